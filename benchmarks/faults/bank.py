"""The bank: entries read from YAML, and the folders of run files, data and rewards that they stand for."""

import functools
import hashlib
import json
import string
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.faults import data, models

HERE = Path(__file__).parent
MODEL_FIELD = "$model"


@dataclass(frozen=True)
class Entry:
    """A planted fault, or a healthy run.

    Attributes:
        name: of the entry; no two are alike.
        about: the mistake in a sentence.
        task: the run without a fault that it changes, in tasks.yaml.
        kind: code of the first finding that is expected; None for a healthy run.
        accepts: other codes that name the fault as truly.
        when: `before`, from the run file, or `after`, from a record of a few steps.
        run: settings of the run file; None removes one.
        row: keys of a row's form; None removes one.
        files: further files, by name.
        model: variant of the model's folder (models.py).
        repair: the same keys, on top of the entry's, that make it learn; None returns to the task's own.
    """

    name: str
    about: str
    task: str
    kind: str | None = None
    accepts: tuple[str, ...] = ()
    when: str = "before"
    run: dict[str, Any] = field(default_factory=dict)
    row: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    model: str | None = None
    repair: dict[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Changes with the entry, so that a result of an earlier version of it does not count."""
        return _digest([vars(self), _tasks()])

    def setup(self, repaired: bool = False) -> "Setup":
        own = {key: getattr(self, key) for key in ("run", "row", "files", "model", "task")}
        if repaired:
            assert self.repair, f"{self.name!r} has no repair"
            for key, value in self.repair.items():
                own[key] = {**own[key], **value} if isinstance(value, dict) else value
        task = _tasks()["tasks"][own["task"]]
        run = {**_tasks()["settings"], **task["run"], **own["run"]}
        row = {**task.get("row", {}), **(own["row"] or {})}
        return Setup(
            run={key: value for key, value in run.items() if value is not None},
            rows=[_filled(row, fields) for fields in data.rows(own["task"])],
            files={**task.get("files", {}), **(own["files"] or {})},
            model=own["model"],
        )


@dataclass(frozen=True)
class Setup:
    """Contents of a run's folder."""

    run: dict[str, Any]
    rows: list[dict[str, Any]]
    files: dict[str, str]
    model: str | None

    @property
    def digest(self) -> str:
        """Of all that decides on the training; files that the run does not name are none of it."""
        used = {name: text for name, text in self.files.items() if name in json.dumps(self.run)}
        return _digest([self.run, self.rows, used, self.model])

    def changed(self, settings: dict[str, Any]) -> "Setup":
        """The same with these settings of the run."""
        return replace(self, run={**self.run, **settings})

    def write(self, folder: Path, model: Path) -> Path:
        """Write run.yaml, rows.jsonl and the other files; returns the run file.

        Args:
            folder: made, and empty until then.
            model: folder of the model without a fault.
        """
        folder.mkdir(parents=True)
        if self.model is not None:
            model = models.build(model, folder / "model", self.model)
        run = {key: str(model) if value == MODEL_FIELD else value for key, value in self.run.items()}
        files = {**self.files, "run.yaml": yaml.safe_dump(run, sort_keys=False)}
        if "dataset" in run:
            files["rows.jsonl"] = "".join(json.dumps(row) + "\n" for row in self.rows)
        for name, content in files.items():
            (folder / name).write_text(content)
        return folder / "run.yaml"


def faults() -> list[Entry]:
    return [entry for name in ("rewards", "sampling", "training") for entry in _read(name)]


def healthy() -> list[Entry]:
    return _read("healthy")


def _read(name: str) -> list[Entry]:
    entries = yaml.load((HERE / "entries" / f"{name}.yaml").read_text(), _loader())
    return [Entry(**{**entry, "accepts": tuple(entry.get("accepts", ()))}) for entry in entries]


@functools.cache
def _tasks() -> dict[str, Any]:
    return yaml.load((HERE / "tasks.yaml").read_text(), _loader())


def _digest(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _loader() -> Any:
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _filled(form: Any, fields: dict[str, Any]) -> Any:
    """A row of this form; the fields themselves without one."""
    if isinstance(form, str):
        whole = form.removeprefix("$")
        return fields[whole] if form != whole and whole in fields else string.Template(form).substitute(fields)
    if isinstance(form, list):
        return [_filled(part, fields) for part in form]
    filled = {key: _filled(value, fields) for key, value in form.items() if value is not None}
    return filled or fields
