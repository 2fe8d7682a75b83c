"""Unknown keyword arguments of a trainer: old names, near misses, fields of its config.

To add a name, add a row to `RENAMED` (accepted, with a warning) or `REFUSED` (with advice). For old names of config
fields see `covey.config.aliases`.
"""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from covey.config.messages import warn

Init = TypeVar("Init", bound=Callable[..., None])

RENAMED = {"config": "args", "policy": "model", "reward_model": "reward_funcs"}
"""Arguments of earlier RLOO trainers, and their names here."""

_REFERENCE = "there is none: the reference is made from `model` where `beta` is not 0"
REFUSED = {
    "tokenizer": "it is called 'processing_class'",
    "reward_func": "it is called 'reward_funcs'",
    "reward_function": "it is called 'reward_funcs'",
    "rewards": "it is called 'reward_funcs'",
    "dataset": "it is called 'train_dataset'",
    "ref_policy": _REFERENCE,
    "ref_model": _REFERENCE,
    "data_collator": "there is none: prompts are not collated; leave it out",
    "compute_metrics": "there is none: log values from a reward function with its argument `log_metric`",
    "value_model": "there is none: the other completions of a prompt are the baseline",
    "formatting_func": "there is none: give the dataset a column 'prompt'",
}
"""Arguments of other trainers, and what to use instead."""


def accepts_old_names(init: Init) -> Init:
    """Wrap a trainer's `__init__`: unknown arguments are renamed or explained, and all are stored in `made_of`."""
    signature = inspect.signature(init)
    parameters = signature.parameters

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **keywords: Any) -> None:
        keywords = resolve_arguments(type(self), list(parameters)[1:], keywords)
        if not args and "model" not in keywords and keywords.get("model_init") is None:
            raise TypeError(f"{type(self).__name__} needs `model`: a hub id, a folder or a model.")
        self.made_of = dict(list(signature.bind(self, *args, **keywords).arguments.items())[1:])
        init(self, *args, **keywords)

    return wrapped  # type: ignore[return-value]


def resolve_arguments(trainer: Any, names: Iterable[str], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a call under their names here.

    Args:
        trainer: the class; errors name it and the fields of its config.
        names: its arguments.
        keywords: arguments of a call.

    Raises:
        TypeError: an unknown argument, or an old and a new name together.
    """
    known = list(names)
    result = {name: value for name, value in keywords.items() if name in known}
    for old, value in keywords.items():
        if old in known:
            continue
        if old not in RENAMED:
            raise TypeError(f"{trainer.__name__} has no argument {old!r}{_hint(old, known, trainer.config_class)}")
        new = RENAMED[old]
        if new in keywords:
            raise TypeError(f"{old!r} is an old name of {new!r}, and {trainer.__name__} was given both; keep {new!r}.")
        warn(f"{old!r} is called {new!r} in {trainer.__name__}.", FutureWarning)
        result[new] = value
    return result


def _hint(name: str, known: list[str], config_class: Any) -> str:
    if name in REFUSED:
        return f"; {REFUSED[name]}."
    if name in {field.name for field in dataclasses.fields(config_class)}:
        return f"; it is a field of the config: args={config_class.__name__}({name}=...)."
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f". It has: {', '.join(known)}."
