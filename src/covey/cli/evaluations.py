"""Evaluation sets of a run file.

    eval_dataset:
      sums: held_out.jsonl
      hard: {dataset: hard.jsonl, num_generations: 16, temperature: 0.7, pass_at: [1, 16]}

What a set's settings mean is in `covey.trainer.evaluation.suites`. Not here: `covey eval` (`covey.cli.evaluate`).
"""

from collections.abc import Iterator
from typing import Any

import yaml


def load_evaluations(given: Any) -> Any:
    """What a run file says about evaluation, as a trainer takes it: a dataset, a suite, or several by name.

    Args:
        given: a file or hub id, or a mapping (also as text) of a suite's settings, or of names to either.

    Raises:
        FileNotFoundError, ValueError: rows that cannot be read, settings that do not exist or cannot work.
    """
    if not given:
        return None
    return {name: _load(one) for name, one in _named(given).items()} if _has_names(given) else _load(_mapping(given))


def evaluation_files(given: Any) -> Iterator[str]:
    """The files and hub ids that it names."""
    for one in _named(given).values() if _has_names(given) else [_mapping(given)]:
        yield one["dataset"] if isinstance(one, dict) and "dataset" in one else str(one)


def suite_settings(given: Any) -> dict[str, dict[str, Any]]:
    """The settings of those that are suites, by name; one without a name is called ""."""
    every = _named(given) if _has_names(given) else {"": _mapping(given)}
    return {name: one for name, one in every.items() if isinstance(one, dict)}


def has_plain(given: Any) -> bool:
    """Whether any of them is a plain dataset."""
    return bool(given) and len(suite_settings(given)) < (len(_named(given)) if _has_names(given) else 1)


def _load(one: Any) -> Any:
    from covey.cli.data import load_rows
    from covey.runtime.import_path import is_reference, resolve
    from covey.trainer.evaluation.suites import suite_of

    if isinstance(one, str):
        return load_rows(one, None)
    if not isinstance(one, dict) or not isinstance(one.get("dataset"), str):
        raise ValueError(
            f"eval_dataset holds {one!r}; an evaluation set is a file or hub id, or settings with one, such as"
            " {dataset: held_out.jsonl, temperature: 0, pass_at: 1}."
        )
    settings = {name: value for name, value in one.items() if name not in ("dataset", "split")}
    if isinstance(answer := settings.get("answer"), str) and is_reference(answer):
        settings["answer"] = resolve(answer, "answer")
    return suite_of(settings, load_rows(one["dataset"], one.get("split")))


def _mapping(given: Any) -> Any:
    """The mapping that a flag's text is, or what was given."""
    return yaml.safe_load(given) if isinstance(given, str) and given.lstrip().startswith("{") else given


def _has_names(given: Any) -> bool:
    """Whether it is a mapping of sets by name rather than one of settings."""
    settings = _mapping(given)
    return isinstance(settings, dict) and not isinstance(settings.get("dataset"), str)


def _named(given: Any) -> dict[str, Any]:
    return {str(name): one for name, one in _mapping(given).items()}
