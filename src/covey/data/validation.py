"""Checks of a dataset before training: of the data themselves, and of prompts encoded for sampling."""

import difflib
import heapq
import os
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from covey.core.findings import CheckError, Finding
from covey.core.transcript import content_text
from covey.data.rows import plain_row
from covey.data.sources import Sources, raw
from covey.data.templates import check_template
from covey.rewards.functions import check_reserved
from covey.rollout.prompts import PromptCodec, are_messages
from covey.runtime.user_code import format_error, place_of, report

LOOKED_AT = 16  # rows that are fully checked; of others only the prompt, if it can be read alone
SHAPES = 64  # sequences of roles, one prompt of each is encoded
LONGEST = 64  # prompts that are encoded because they are the longest

USUAL_NAMES = ("prompts", "question", "problem", "query", "instruction", "input", "text", "messages", "conversations")
"""Names of the prompt column in other datasets."""

MESSAGES = re.compile(  # messages in JSON or Python, or an object that holds them
    r"[\s\ufeff]*[\[({](?=.*[\"'](content|value)[\"']\s*:)"
    r".*[\"'](role|from)[\"']\s*:\s*[\"'](user|system|assistant|tool|developer|human|gpt)[\"']",
    re.DOTALL | re.IGNORECASE,
)
ROLES = {"system", "developer", "user", "assistant", "tool"}
USUAL_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bot": "assistant"}
"""Roles of other formats, such as ShareGPT's."""
LOAD = "Load one with `datasets.load_dataset(...)`, or give a list of rows like {'prompt': '2+2=', 'answer': '4'}."


def check_dataset(dataset: Any, role: str, prompts_required: bool = True) -> Iterator[Finding]:
    """Findings about a dataset up to the first error; `role` names it ("train_dataset" or "eval_dataset")."""
    for finding in _findings(dataset, role, prompts_required):
        yield finding
        if finding.level == "error":
            return  # later checks would read the wrong values


def _findings(dataset: Any, role: str, prompts_required: bool) -> Iterator[Finding]:
    yield from _check_container(dataset, role)
    rows = first_rows(dataset)
    for number, row in enumerate(rows):
        yield from _check_row(row, number, role, prompts_required)
    first_of: dict[str, int] = {}
    roles: set[str] = set()
    for number, prompt in _prompts(dataset, rows):
        if prompt is None and not prompts_required:
            continue  # the environment gives it
        yield from _check_prompt(prompt, number, role)
        first_of.setdefault("standard" if isinstance(prompt, str) else "conversational", number)
        roles |= {message["role"] for message in prompt if isinstance(message, dict)}
    for given in roles - ROLES:  # templates may have more, such as ipython
        if (known := USUAL_ROLES.get(name := given.strip().lower(), name)) in ROLES:
            evidence = f"messages of `{role}` have the role {given!r}, which chat templates seldom know:"
            yield Finding.warning("prompt-role", evidence, f"write {known!r}.")
    if len(first_of) > 1:
        yield Finding.error(
            "prompt-mixture",
            f"`{role}` mixes conversational prompts (lists of messages, row {first_of['conversational']}) with plain "
            f"strings (row {first_of['standard']}); reward functions could not know what they receive.",
            "Use one kind.",
        )


def check_prompts(dataset: Any, role: str, codec: PromptCodec) -> Iterator[Finding]:
    """Findings about the first and longest prompts as they are encoded, up to the first error."""
    first = first_rows(dataset)
    numbered = dict(enumerate(first[:LOOKED_AT]))
    others = {*_longest(_prompts(dataset, first), codec), *_of_each_shape(_prompts(dataset, first))}
    numbered |= {i: dataset[i] for i in sorted(others) if i not in numbered}
    for number, row in numbered.items():
        if row.get("prompt") is None:
            continue  # the environment gives it
        try:
            codec.read_row(row)
        except CheckError as error:
            yield from error.within(f"row {number} of `{role}`").findings
            return
        except ValueError as error:  # of images, or of a tokenizer
            yield Finding.error("row-unread", f"row {number} of `{role}`: {error}")
            return
    yield from check_template(numbered, role, codec)


def columns_of(dataset: Any) -> set[str]:
    return {column for row in first_rows(dataset) for column in row}


def first_rows(dataset: Any) -> list[Any]:
    """The rows to check: all rows of a list, else the first ones; of each source, if there are several."""
    if isinstance(dataset, Sources):
        return [one.filled(row) for one in dataset.sources for row in first_rows(one.rows)]
    if isinstance(dataset, list | tuple):
        return list(map(plain_row, dataset))
    if hasattr(dataset, "__len__"):
        return [read_row(dataset, number) for number in range(min(LOOKED_AT, len(dataset)))]
    return list(map(plain_row, islice(iter(dataset), LOOKED_AT)))


def read_row(dataset: Any, number: int) -> Any:
    """A row of a dataset, whose class may be the user's; CheckError with the row's number if reading fails."""
    try:
        row = plain_row(dataset[number])
    except Exception as error:  # of the user's class
        evidence = f"row {number} of a dataset that says it has {len(dataset)} cannot be read: {format_error(error)}"
        raise CheckError.of("row-unread", f"{evidence}{place_of(error)}") from error
    report(islice(_check_row(row, number, "dataset", prompt_required=False), 1))
    return row


def _prompts(dataset: Any, rows: list[Any]) -> Iterator[tuple[int, Any]]:
    """Row numbers and prompts, of the whole dataset if the column can be read alone, else of `rows`."""
    dataset = raw(dataset)
    if not any("prompt" in row for row in rows):
        return iter(())
    if hasattr(dataset, "__len__") and hasattr(dataset, "select_columns") and dataset.format["type"] is None:
        batches = dataset.select_columns("prompt").iter(batch_size=1000)
        return enumerate(prompt for batch in batches for prompt in batch["prompt"])
    return ((number, row.get("prompt")) for number, row in enumerate(rows))


def _longest(numbered: Iterator[tuple[int, Any]], codec: PromptCodec) -> list[int]:
    """Numbers of the rows with the longest prompts, among those that may exceed the context."""
    if codec.max_context is None:
        return []
    sizes = ((_text_bytes(prompt), number) for number, prompt in numbered)
    return [number for _, number in heapq.nlargest(LONGEST, (s for s in sizes if s[0] >= codec.max_context))]


def _of_each_shape(numbered: Iterator[tuple[int, Any]]) -> list[int]:
    """One row for each sequence of roles, because chat templates refuse some of them."""
    shapes: dict[tuple[Any, ...], int] = {}
    for number, prompt in numbered:
        if isinstance(prompt, list) and len(shapes) < SHAPES:
            shapes.setdefault(tuple(message.get("role") for message in prompt), number)
    return list(shapes.values())


def _text_bytes(prompt: Any) -> int:
    texts = [prompt] if isinstance(prompt, str) else [str(message.get("content")) for message in prompt or ()]
    return sum(len(text.encode(errors="replace")) for text in texts)


def _check_container(dataset: Any, role: str) -> Iterator[Finding]:
    if isinstance(dataset, str | os.PathLike):
        yield Finding.error("dataset-type", f"`{role}` is the name {os.fspath(dataset)!r}, not a dataset.", LOAD)
    if isinstance(dataset, Mapping):
        keys = ", ".join(map(repr, dataset))
        yield Finding.error(
            "dataset-type",
            f"`{role}` is a dictionary with the keys {keys}, not a dataset.",
            "If these are splits, give one of them, as in `dataset['train']`; if they are columns, make a dataset with"
            " `datasets.Dataset.from_dict`.",
        )
    if hasattr(dataset, "iloc"):
        fix = "Make it a dataset with `datasets.Dataset.from_pandas(frame)`."
        yield Finding.error("dataset-type", f"`{role}` is a data frame.", fix)
    if isinstance(dataset, Iterator):
        yield Finding.error(
            "dataset-type",
            f"`{role}` is a {type(dataset).__name__}, which can be read only once; a run reads its data again in every"
            " epoch.",
            "Give a list, or `datasets.IterableDataset.from_generator(function)`.",
        )
    if not hasattr(dataset, "__getitem__") and (not hasattr(dataset, "__iter__") or hasattr(dataset, "__len__")):
        evidence = f"`{role}` must be a dataset of rows with a 'prompt' column, got {type(dataset).__name__}."
        yield Finding.error("dataset-type", evidence, LOAD)
    if hasattr(dataset, "__len__") and len(dataset) == 0:
        yield Finding.error("dataset-empty", f"`{role}` is empty.", "Give at least one row with a 'prompt' column.")


def _check_row(row: Any, number: int, role: str, prompt_required: bool) -> Iterator[Finding]:
    if not isinstance(row, dict):
        yield Finding.error(
            "row-type",
            f"row {number} of `{role}` must be a dictionary of columns, such as {{'prompt': ...}}, got"
            f" {type(row).__name__}: {row!r:.80}.",
        )
    if others := [column for column in row if not isinstance(column, str)]:
        yield Finding.error(
            "row-type",
            f"row {number} of `{role}` has a column {others[0]!r}, but names of columns are text: reward functions get"
            " columns by name.",
            "Rename it.",
        )
    if prompt_required and "prompt" not in row:
        evidence = f"`{role}` has no 'prompt' column; its columns are {sorted(row)}."
        yield Finding.error("column-prompt", evidence, _rename_hint(list(row)))
    yield from check_reserved(row)


def _rename_hint(columns: list[str]) -> str:
    close = [name for name in columns if name.lower() in USUAL_NAMES]
    close += difflib.get_close_matches("prompt", columns, n=1, cutoff=0.5)
    if not close:
        return "Put what the model is asked into a column of that name."
    return f"Is {close[0]!r} what the model is asked? Then `dataset.rename_column({close[0]!r}, 'prompt')`."


def _check_prompt(prompt: Any, number: int, role: str) -> Iterator[Finding]:
    place = f"the prompt of row {number} of `{role}`"
    if not isinstance(prompt, str) and not are_messages(prompt):
        yield Finding.error(
            "prompt-type",
            f"{place} must be a string or a non-empty list of messages with 'role' and 'content', got {prompt!r:.200}.",
            "Correct the row or filter it out.",
        )
        return
    if prompt == "":
        yield Finding.error("prompt-empty", f"{place} is an empty string.", "Remove such rows.")
    if isinstance(prompt, str) and MESSAGES.match(prompt):
        yield Finding.error(
            "prompt-json",
            f"{place} is a list of messages written as text, which the model would read as it is:",
            "make it a list with `json.loads`.",
        )
    text = prompt if isinstance(prompt, str) else "".join(content_text(one.get("content")) for one in prompt)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        yield Finding.error(
            "prompt-surrogate",
            f"{place} holds half of a surrogate pair, {text[error.start]!r}, which is no character.",
            "Repair the text or remove the row.",
        )
