"""Evaluation sets of a run file.

    eval_dataset:
      sums: held_out.jsonl
      hard: {dataset: hard.jsonl, num_generations: 16, temperature: 0.7, pass_at: [1, 16]}

For the settings of a set see `covey.trainer.evaluation.suites`.
"""

from collections.abc import Iterator
from typing import Any

import yaml


def load_evaluations(given: Any) -> Any:
    """The evaluation sets of a run file, as a trainer takes them: a dataset, a suite, or several by name.

    Args:
        given: a file or hub id, or a mapping (also as text) of a suite's settings, or of names to either.

    Raises:
        FileNotFoundError, ValueError: rows that cannot be read, or settings that cannot work.
    """
    if not given:
        return None
    if not _has_names(given):
        return _load(_mapping(given))
    return {name: _load(entry) for name, entry in _named(given).items()}


def evaluation_files(given: Any) -> Iterator[str]:
    """Files and hub ids of the evaluation sets."""
    for entry in _named(given).values() if _has_names(given) else [_mapping(given)]:
        yield entry["dataset"] if isinstance(entry, dict) and "dataset" in entry else str(entry)


def suite_settings(given: Any) -> dict[str, dict[str, Any]]:
    """Settings of the suites among the evaluation sets, by name; a suite without a name is called ""."""
    every = _named(given) if _has_names(given) else {"": _mapping(given)}
    return {name: entry for name, entry in every.items() if isinstance(entry, dict)}


def has_plain(given: Any) -> bool:
    """True if an evaluation set is a plain dataset."""
    return bool(given) and len(suite_settings(given)) < (len(_named(given)) if _has_names(given) else 1)


def _load(entry: Any) -> Any:
    from covey.cli.data import load_rows
    from covey.runtime.import_path import is_reference, resolve
    from covey.trainer.evaluation.suites import suite_of

    if isinstance(entry, str):
        return load_rows(entry, None)
    if not isinstance(entry, dict) or not isinstance(entry.get("dataset"), str):
        raise ValueError(
            f"eval_dataset holds {entry!r}; an evaluation set is a file or hub id, or settings with one, such as"
            " {dataset: held_out.jsonl, temperature: 0, pass_at: 1}."
        )
    settings = {name: value for name, value in entry.items() if name not in ("dataset", "split")}
    if isinstance(answer := settings.get("answer"), str) and is_reference(answer):
        settings["answer"] = resolve(answer, "answer")
    return suite_of(settings, load_rows(entry["dataset"], entry.get("split")))


def _mapping(given: Any) -> Any:
    """A mapping from the text of a flag; other values unchanged."""
    return yaml.safe_load(given) if isinstance(given, str) and given.lstrip().startswith("{") else given


def _has_names(given: Any) -> bool:
    """True for a mapping of sets by name rather than one of settings."""
    settings = _mapping(given)
    return isinstance(settings, dict) and not isinstance(settings.get("dataset"), str)


def _named(given: Any) -> dict[str, Any]:
    return {str(name): entry for name, entry in _mapping(given).items()}
