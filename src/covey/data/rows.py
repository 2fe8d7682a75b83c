"""Rows of datasets of any format as dictionaries."""

from types import NoneType
from typing import Any

FOR_PROMPTS = ("prompt", "tools", "chat_template_kwargs")  # columns that the chat template reads
PLAIN = (str, list, dict, NoneType)


def plain_row(row: Any) -> Any:
    """A row as a dictionary whose prompt has plain values, even in a dataset of numpy, torch, pandas or arrow format.

    Other columns keep the format, except in pandas and arrow formats, in which a row is a table.
    """
    for method, arguments in (("to_pylist", ()), ("to_dicts", ()), ("to_dict", ("records",))):
        if not isinstance(row, dict) and callable(getattr(row, method, None)):
            records = getattr(row, method)(*arguments)
            return _plain(records[0]) if len(records) == 1 else row
    if isinstance(row, dict) and any(type(row.get(name)) not in PLAIN for name in FOR_PROMPTS):
        return {name: _plain(value) if name in FOR_PROMPTS else value for name, value in row.items()}
    return row


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(name): _plain(one) for name, one in value.items()}
    if hasattr(value, "tolist"):  # an array, a tensor, or a scalar of one
        value = value.tolist()
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value
