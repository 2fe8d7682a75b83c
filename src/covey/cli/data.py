"""Training and evaluation prompts by name: a hub id, a file, a folder or a function; with a `prompt` column.

The trainer checks the rows. To read another kind of file, add its suffix to `BUILDERS` of `covey.cli.run_file`.
"""

import csv
import difflib
import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets

from covey.cli.run_file import BUILDERS, check_data_file, evaluation_sets, is_function, is_local
from covey.core.findings import CheckError, Finding
from covey.core.transcript import is_messages
from covey.data.conversations import with_system_message
from covey.data.validation import LOOKED_AT
from covey.runtime.hub import look_up
from covey.runtime.import_path import is_reference, resolve
from covey.runtime.safe_text import printable
from covey.runtime.user_code import format_error, place_of, report
from covey.trainer.evaluation.suites import suite_of

EVAL_SPLITS = ("validation", "test", "eval", "train")
"""Splits for evaluation prompts if none is named, in order of preference."""


def load_rows(
    spec: str, split: str | None = "train", columns: dict[str, str] | None = None, system_prompt: str | None = None
) -> Any:
    """A `datasets.Dataset` with at least one row and a `prompt` column, of a file, a folder, a function or a hub id.

    An id may name a configuration after a colon: `openai/gsm8k:main`. A split may be sliced: `train[:1000]`; None takes
    the first of `EVAL_SPLITS` that exists. A single file is all `train`. `columns` maps names in the data to new ones.
    """
    if is_function(spec):
        loaded = _call(spec)
    else:
        loaded = _load_local(Path(spec).expanduser()) if is_local(spec) else _load_hub(spec)
    rows = _pick(loaded, split, spec)
    if len(rows) == 0:
        place = f" in split {split!r}" if split else ""
        raise CheckError.of("dataset-empty", f"dataset {spec!r} has no rows{place}.")
    if columns:
        if len({new for new in columns.values() if isinstance(new, str)}) < len(columns):
            raise CheckError.of("column-names", f"columns={columns}: the new names must be text, and all different.")
        there = rows.column_names
        if missing := [old for old, new in columns.items() if old not in there and new not in there]:
            evidence = f"columns={columns}: dataset {spec!r} has no {missing[0]!r}; it has: {', '.join(there)}."
            raise CheckError.of("column-names", evidence)
        if idle := [old for old in columns if old not in there]:
            evidence = f"columns={columns}: dataset {spec!r} has no column {idle[0]!r} to rename."
            report([Finding.warning("column-names", evidence)])
        columns = {old: new for old, new in columns.items() if old in there}
        if taken := [new for new in columns.values() if new in there and new not in columns]:
            evidence = f"columns={columns}: dataset {spec!r} has a {taken[0]!r} already."
            raise CheckError.of("column-names", evidence, "Rename that one, too.")
        rows = rows.rename_columns(columns)
    check_prompt_column(spec, rows.column_names)
    prompts = [row["prompt"] for row in rows.select(range(min(LOOKED_AT, len(rows))))] if system_prompt else []
    if prompts and all(prompt and is_messages(prompt) and prompt[0].get("role") == "system" for prompt in prompts):
        because = "its prompts begin with system messages of their own."
        report([Finding.warning("setting-unread", f"`system_prompt` has no effect on dataset {spec!r}: {because}")])
    return with_system_message(system_prompt, rows)


OF_THE_DATA = ("dataset", "split", "rows")
"""Keys of a source that say which rows it has; the others are its settings."""


def load_sources(given: Mapping[str, Any], columns: Any = None, system_prompt: str | None = None) -> dict[str, Any]:
    """Data sets of sources by name, as `train_dataset` of a trainer."""
    loaded = {}
    for name, entry in given.items():
        if not isinstance(entry, Mapping) or not isinstance(entry.get("dataset"), str):
            raise CheckError.of(
                "source-name",
                f"sources: {name}: {entry!r:.200}; a source is a mapping with a `dataset`, such as {{dataset:"
                " sums.jsonl, weight: 2}.",
            )
        own = None if entry.get("system_prompt") else system_prompt  # the trainer adds the source's
        rows = load_rows(entry["dataset"], entry.get("split") or "train", columns, own)
        if (count := entry.get("rows")) is not None:
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                evidence = f"sources: {name}: rows={count!r} must be a whole number, 1 or more."
                raise CheckError.of("source-setting", evidence)
            rows = rows.select(range(min(count, len(rows))))
        loaded[str(name)] = rows
    return loaded


def _call(spec: str) -> Any:
    """The dataset, or the splits, that a user's function returns."""
    function = resolve(spec, "dataset")
    try:
        found = function()
        if isinstance(found, datasets.Dataset | datasets.DatasetDict):
            return found
        rows = [] if isinstance(found, str) or not hasattr(found, "__iter__") else list(found)
    except (Exception, SystemExit) as error:
        evidence = f"dataset {spec!r}, called without arguments, raised {format_error(error)}{place_of(error)}"
        raise CheckError.of("dataset-type", evidence) from error
    if not all(isinstance(row, dict) for row in rows) or not rows:
        raise CheckError.of(
            "dataset-type",
            f"dataset {spec!r} returned {type(found).__name__}: {found!r:.80}; it must return a `datasets.Dataset`, or"
            " rows such as [{'prompt': '2+2=', 'answer': '4'}].",
        )
    return datasets.Dataset.from_list(rows)


def check_prompt_column(spec: str, columns: list[str]) -> None:
    """Raise `CheckError` unless a column is named `prompt`; the message lists the columns and the likely one."""
    if "prompt" in columns:
        return
    close = difflib.get_close_matches("prompt", columns, n=1, cutoff=0.5)
    likely = close or [name for name in ("question", "problem", "query", "instruction", "input") if name in columns]
    rename = "write `columns: {{{}: prompt}}` into the run file, or rename it to 'prompt'."
    hint = (
        f"If {likely[0]!r} holds them, {rename.format(*likely)}" if likely else "Add it: text, or a list of messages."
    )
    evidence = f"dataset {spec!r} has no column 'prompt'; its columns are: {', '.join(columns)}."
    raise CheckError.of("column-prompt", evidence, hint)


def _load_local(path: Path) -> Any:
    check_data_file(path)
    suffix = path.suffix.lower()
    if not path.is_dir() and suffix not in BUILDERS:
        evidence = f"{str(path)!r} is not a data file that Covey reads; it reads: {', '.join(BUILDERS)}."
        raise CheckError.of("dataset-type", evidence)
    if path.is_file() and path.stat().st_size == 0:
        raise CheckError.of("dataset-empty", f"data file {str(path)!r} is empty.")
    try:
        if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
            return datasets.load_from_disk(str(path))
        if path.is_dir():
            return datasets.load_dataset(str(path))
        options = {"sep": "\t"} if suffix == ".tsv" else {}
        if BUILDERS[suffix] == "csv":
            _check_header(path, **options)
        name = glob.escape(str(path))  # it may hold a bracket
        loaded = datasets.load_dataset(BUILDERS[suffix], data_files=name, **options)
        for rows in loaded.values():
            rows.data.validate(full=True)  # json's reader takes any bytes for text
        return loaded
    except Exception as error:  # of half a dozen libraries
        reason = printable(str(error.__cause__ or error)).strip().split("\n")[0]
        evidence = f"{str(path)!r} holds no rows that can be read: {reason or type(error).__name__}."
        raise CheckError.of("row-unread", evidence, "Text is read as UTF-8.") from error


def _check_header(path: Path, sep: str = ",") -> None:
    """Refuse two columns of one name, of which pandas would rename the second."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        names = next(csv.reader(file, delimiter=sep), [])
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two columns are named {twice[0]!r}; rename one")


def _load_hub(spec: str) -> Any:
    name, _, config = spec.partition(":")
    if Path(name).expanduser().exists():
        evidence = f"dataset {spec!r}: {name!r} is here, and {config!r} is no part of it; see `dataset_split`."
        raise CheckError.of("dataset-split", evidence)
    look_up(name, "dataset")
    try:
        return datasets.load_dataset(name, config or None)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise FileNotFoundError(
            f"dataset {spec!r} is neither a file or folder here nor a data set that can be reached on the hub: {error}"
        ) from error
    except ConnectionError as error:
        raise FileNotFoundError(
            f"dataset {spec!r} is no file or folder here, and the hub cannot be reached ({error}). Give the path of a "
            f"data file ({', '.join(BUILDERS)})."
        ) from error


def _pick(loaded: Any, split: str | None, spec: str) -> Any:
    splits = {"train": loaded} if isinstance(loaded, datasets.Dataset) else dict(loaded)
    if split is None:
        split = next((name for name in EVAL_SPLITS if name in splits), next(iter(splits)))
    name, bracket, inside = split.partition("[")
    if name not in splits:
        evidence = f"dataset {spec!r} has no split {name!r}; it has: {', '.join(splits)}."
        raise CheckError.of("dataset-split", evidence)
    return splits[name].select(_sliced(split, inside, len(splits[name])) or []) if bracket else splits[name]


def _sliced(split: str, inside: str, count: int) -> range:
    """Rows of `[from:to]`; each end is a number of rows, negative from the end, or a percentage."""
    start, colon, stop = inside.removesuffix("]").partition(":")
    try:
        ends = [_row(end.strip(), count) for end in (start, stop)]
    except ValueError:
        ends, colon = [], ""
    if not colon or not inside.endswith("]"):
        evidence = f"split {split!r} cannot be read; a slice is written like train[:1000], train[100:] or train[:10%]."
        raise CheckError.of("dataset-split", evidence)
    return range(count)[slice(*ends)]


def _row(text: str, count: int) -> int | None:
    if not text:
        return None
    return round(float(text[:-1]) / 100 * count) if text.endswith("%") else int(text)


def load_evaluations(given: Any, *renamed: Any) -> Any:
    """Evaluation sets of a run file, as a trainer takes them: a dataset, a suite, or several by name.

    `renamed` are the `columns` and `system_prompt` of `load_rows`.
    """
    loaded = {name: _load_set(entry, *renamed) for name, entry in evaluation_sets(given).items()}
    return loaded.get("") if set(loaded) <= {""} else loaded


def _load_set(entry: Any, *renamed: Any) -> Any:
    if isinstance(entry, str):
        return load_rows(entry, None, *renamed)
    if not isinstance(entry, dict) or not isinstance(entry.get("dataset"), str):
        raise CheckError.of(
            "dataset-type",
            f"eval_dataset holds {entry!r}; an evaluation set is a file or hub id, or settings with one, such as"
            " {dataset: held_out.jsonl, temperature: 0, pass_at: 1}.",
        )
    settings = {name: value for name, value in entry.items() if name not in ("dataset", "split")}
    if isinstance(answer := settings.get("answer"), str) and is_reference(answer):
        settings["answer"] = resolve(answer, "answer")
    return suite_of(settings, load_rows(entry["dataset"], entry.get("split"), *renamed))
