"""Reading of recorded runs for the page, also while they are being written."""

import ast
import base64
import gzip
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from covey.core.transcript import as_text
from covey.observability.findings import read_findings
from covey.observability.metric_docs import OF_THE_LOOP, all_sets, evaluation_sets, meaning, metrics_of, place, prefix
from covey.observability.page.tables import EXCERPT, RecordedBatch, TokenUpdate
from covey.observability.pairs import pairs
from covey.observability.record_files import (
    FINDINGS,
    FOLDER,
    MEASURED,
    METRICS,
    TIMELINE,
    VOCABULARY,
    WARNINGS,
    ends_of,
    evaluation_files,
    number_of,
    read_metrics,
    read_run,
    spent,
)

CACHED = 24  # tables of rollout batches in memory
TITLED = 8  # rollout batches whose prompts decide which common beginning the names of prompts leave out
WORTH_LEAVING_OUT = 16  # characters of a common beginning, from which on it is left out
CHANGE = "trainer's log-prob minus the recorded run's: the distance of this policy from the one that sampled"
QUIET = 600.0  # seconds without a new file after which an unfinished run counts as stopped


class NotRecorded(LookupError):
    """Error for a rollout or image that is not in the record."""


class RecordedRun:
    """A run's record; what is read is cached until its files change.

    Args:
        folder: the run's `output_dir`.
        cached: number of rollout batches whose tables are kept in memory.
    """

    def __init__(self, folder: Path, cached: int = CACHED):
        read_run(folder)
        self.folder, self.record = folder, folder / FOLDER
        self._read: dict[Path, int] = {}  # files of updates and when they were written
        self._updates: dict[str, list[TokenUpdate]] = {}  # by rollout batch and process, in the order of steps
        self._tables = lru_cache(cached)(self._table)
        self._blocks: dict[str, tuple[str, dict[str, Any]]] = {}
        self._packed: dict[str, tuple[str, str]] = {}  # blocks as an exported page holds them, with their versions
        self.stride = 1  # an exported page lists every `stride`-th rollout batch; it only grows
        self._metrics = lru_cache(1)(lambda written: read_metrics(self.record))

    def state(self) -> dict[str, Any]:
        """Files of the record, each with a version that changes with it."""
        files = self._files()
        names = ("run.json", METRICS, FINDINGS, WARNINGS, TIMELINE, MEASURED)
        evaluations = [path for steps in evaluation_files(self.record).values() for path in steps[max(steps)]]
        times = [*(_written(self.record / name) for name in names), *map(_written, evaluations)]
        written = max(times[1], *(map(_written, [*files.values()][-1:] or [self.record]))) / 1e9
        lines = self._lines()
        ended = bool(lines) and lines[-1].get("event") == "end"
        return {
            "name": self.folder.name or self.folder.resolve().name,
            "folder": str(self.folder),
            "live": "ended" if ended else "running" if time.time() - written < QUIET else "stopped",
            "written": written,
            "version": "-".join(map(str, times)),
            "blocks": [[key, self._version(key, path)] for key, path in files.items()],
            "left_out": 0,
        }

    def described(self, most_lines: int | None = None) -> dict[str, Any]:
        """Settings, metrics, evaluations, totals, the latest timeline, and findings: the doctor's and the run's own.

        If there are more than `most_lines` lines of metrics, evenly spread ones are returned.
        """
        described = read_run(self.folder)
        described["settings"] = {name: _literal(text) for name, text in described.get("settings", {}).items()}
        findings = read_findings(self.record / FINDINGS)
        warned = read_findings(self.record / WARNINGS)
        findings += [one for one in warned if one["code"] not in {known["code"] for known in findings}]
        lines = [{name: value for name, value in line.items() if _is_json(value)} for line in self._lines()]
        seconds, cores = spent(lines)
        totals = {
            "reward": ends_of([line["reward"] for line in lines if "reward" in line]),
            "seconds": None if math.isnan(seconds) else seconds,
            "core_seconds": None if math.isnan(cores) else cores,
        }
        stride = 1
        while most_lines is not None and len(lines) > stride * most_lines:
            stride *= 2
        return {
            "described": described,
            "metrics": [*lines[::stride], *lines[len(lines) - 1 : (len(lines) - 1) // stride * stride : -1][:1]],
            "evaluations": evaluations_of(lines),
            "meanings": meanings_of(lines),
            "totals": totals,
            "findings": findings,
            "timeline": self._json(TIMELINE),
            "measured": self._json(MEASURED),
        }

    def _json(self, name: str) -> dict[str, Any] | None:
        with suppress(OSError, ValueError):
            return dict(json.loads((self.record / name).read_text()))
        return None

    def pairs(self) -> list[dict[str, Any]]:
        """Completions of the same prompts early and late in the run."""
        shown = ("completion", "reward", "step", "finish", "fate", "image_files")

        def cell(row: dict[str, Any] | None) -> dict[str, Any] | None:
            return None if row is None else {name: row[name] for name in shown}

        weights = _literal(read_run(self.folder).get("settings", {}).get("reward_weights")) or []
        return [
            {"prompt": after["prompt"], "before": cell(before), "after": cell(after)}
            for before, after in pairs(self.record, weights)
        ]

    def blocks(self, keys: list[str]) -> dict[str, Any]:
        """Summaries of the rollouts of rollout batches, by key."""
        files, found = self._files(), {}
        for key in keys:
            if (path := files.get(key)) is None:
                continue
            version = self._version(key, path)
            if self._blocks.get(key, ("",))[0] != version:
                self._blocks[key] = version, self._block(key, path)
            found[key] = self._blocks[key][1]
        return found

    def _block(self, key: str, path: Path) -> dict[str, Any]:
        rollout_batch = self._rollout_batch(key, path)
        block = rollout_batch.block(_literal(read_run(self.folder).get("settings", {}).get("reward_weights")) or [])
        block["columns"]["prompt"] = [title[:EXCERPT] for title in rollout_batch.prompts(self._title)]
        return block

    def packed_blocks(self, keys: Sequence[str]) -> dict[str, str]:
        """Summaries of rollout batches as packed for an exported page, cached for the next page."""
        files, known, self._packed = self._files(), self._packed, {}
        for key in keys:
            version = self._version(key, files[key])
            one = known.get(key, ("", ""))
            self._packed[key] = one if one[0] == version else (version, packed(self._block(key, files[key])))
        return {key: text for key, (_, text) in self._packed.items()}

    @cached_property
    def _title(self) -> Callable[[Any], str]:
        """Function that names a prompt by the part in which it differs from other prompts."""
        rollout_batches = [self._rollout_batch(key, path) for key, path in [*self._files().items()][:TITLED]]
        return title_of(
            [rollout_batch.prompt(row) for rollout_batch in rollout_batches for row in rollout_batch.firsts()]
        )

    def rollout(self, name: str) -> dict[str, Any]:
        """A rollout by `rollout_batch.rank.row`; NotRecorded if there is none."""
        key, _, row = name.rpartition(".")
        if (path := self._files().get(key)) is None:
            raise NotRecorded(f"there is no rollout batch {key}")
        rollout_batch = self._rollout_batch(key, path)
        if not row.isdecimal() or int(row) >= rollout_batch.table.num_rows:
            raise NotRecorded(f"rollout batch {key} has no rollout {row}")
        return self._named(rollout_batch.rollout(int(row), key, self._words))

    def rollout_batch(self, key: str) -> list[dict[str, Any]]:
        rollout_batch = self._rollout_batch(key, self._files()[key])
        rows = range(rollout_batch.table.num_rows)
        return [self._named(rollout_batch.rollout(row, key, self._words)) for row in rows]

    def _named(self, rollout: dict[str, Any]) -> dict[str, Any]:
        """The rollout with its columns of tokens under the titles that apply to this run."""
        replayed = _literal(read_run(self.folder).get("settings", {}).get("replay_from")) is not None
        for column in rollout["tokens"]["columns"] if replayed and rollout["tokens"] else ():
            if column["name"] == "gap":
                column["title"], column["meaning"] = "change", CHANGE
        return rollout

    def search(self, words: str) -> list[str]:
        """Rollouts whose prompt or completion contains the words, ignoring case."""
        found, wanted = [], words.lower()
        for key, path in self._files().items():
            rollout_batch = self._rollout_batch(key, path)
            prompts: dict[int, bool] = {}
            groups = rollout_batch.table["group"].to_pylist()
            for row, text in enumerate(rollout_batch.table["completion"].to_pylist()):
                if groups[row] not in prompts:
                    prompts[groups[row]] = wanted in as_text(rollout_batch.prompt(row)).lower()
                if prompts[groups[row]] or wanted in as_text(json.loads(text)).lower():
                    found.append(f"{key}.{row}")
        return found

    def image(self, name: str) -> Path:
        """A small PNG file of the record; NotRecorded for any other."""
        path = self.record / "images" / Path(name).name
        if path.suffix != ".png" or not path.is_file():
            raise NotRecorded(f"there is no image {name}")
        return path

    def _files(self) -> dict[str, Path]:
        """Files of rollout batches by `rollout_batch.rank`; new files of updates are read."""
        updates = {path: _written(path) for path in self.record.glob("update_*.parquet")}
        if any(updates.get(path) != time for path, time in self._read.items()):  # a resumed run wrote others
            self._read, self._updates = {}, {}
            self._tables.cache_clear()  # its versions may come again, with other updates
        for path in sorted(updates.keys() - self._read.keys(), key=number_of):
            for key, rows in _rows_of(path).items():
                self._updates.setdefault(key, []).append(TokenUpdate(number_of(path), rows, path, updates[path]))
                self._updates[key].sort(key=lambda update: update.step)
        self._read = updates
        found = {}
        for path in sorted(self.record.glob("generation_*.parquet"), key=lambda path: (number_of(path), path.name)):
            found[f"{number_of(path)}.{path.stem.partition('_rank')[2] or 0}"] = path
        return found

    def _version(self, key: str, path: Path) -> str:
        return f"{_written(path)}-{len(self._updates.get(key, ()))}"

    def _rollout_batch(self, key: str, path: Path) -> RecordedBatch:
        return self._tables(key, path, self._version(key, path))

    def _table(self, key: str, path: Path, version: str) -> RecordedBatch:
        return RecordedBatch(pq.read_table(path).combine_chunks(), self._updates.get(key, []))

    def _lines(self) -> list[dict[str, Any]]:
        return self._metrics(_written(self.record / METRICS))

    @cached_property
    def _words(self) -> list[bytes]:
        path = self.record / VOCABULARY
        return pq.read_table(path)["bytes"].to_pylist() if path.exists() else []


def title_of(prompts: Sequence[Any]) -> Callable[[Any], str]:
    """Function that names a prompt by the last message of a user, or the whole text.

    A beginning that all of these prompts have in common, such as a task's instructions, is left out.
    """
    for text_of in (_last_message, as_text):
        texts = {text_of(prompt) for prompt in prompts}
        if len(texts) > 1:
            break
    else:
        text_of = _last_message
        texts = set()
    common = os.path.commonprefix([*texts])  # noqa: RUF071 (of texts, not of paths)
    common = common[: max(common.rfind(space) for space in " \n") + 1] if len(texts) > 1 else ""

    def title(prompt: Any) -> str:
        text = text_of(prompt)
        return text if len(common) < WORTH_LEAVING_OUT or not text.startswith(common) else f"… {text[len(common) :]}"

    return title


def _last_message(prompt: Any) -> str:
    """The last message of a user; the whole text if there is none."""
    if isinstance(prompt, list):
        for message in reversed(prompt):
            if isinstance(message, dict) and message.get("role") == "user":
                return as_text([message]).removeprefix("user: ")
    return as_text(prompt)


def evaluations_of(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Curves of evaluations: rewards, and shares such as pass@1 with their intervals, of each set."""
    curves: dict[tuple[str, str], list[dict[str, float]]] = {}
    for line in lines:
        for name in evaluation_sets(line):
            metrics = metrics_of(name, line)
            own = [key for key in metrics if re.fullmatch("rewards/.*/mean", key)]
            shares = [key for key in metrics if "@" in key and not key.endswith(("_low", "_high"))]
            for key in (*shares, *(["reward"] if "reward" in metrics else ()), *(own if len(own) > 1 else ())):
                point = {"x": line["step"], "y": metrics[key]}
                point |= {end: metrics[f"{key}_{end}"] for end in ("low", "high") if f"{key}_{end}" in metrics}
                curves.setdefault((name, key), []).append(point)
    return [{"set": name, "metric": metric, "points": points} for (name, metric), points in curves.items()]


def meanings_of(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Names of metrics with their meanings, in the order of the docs: training, evaluations, and own metrics last."""
    names = {key for line in lines for key, value in line.items() if isinstance(value, int | float)} - {*OF_THE_LOOP}
    names -= {name for name in names if "reward/" in name and name.replace("reward/", "rewards/", 1) in names}
    sets = all_sets([dict(line) for line in lines])
    starts = sorted(map(prefix, sets), key=len, reverse=True)  # `eval_` begins the others, too
    base = {name: name.removeprefix(next(filter(name.startswith, starts), "")) for name in names}
    ordered = sorted(names, key=lambda name: (base[name] != name, place(base[name]), name))
    return [(name, meaning(base[name]) or "") for name in ordered]


def packed(value: Any) -> str:
    """A value in the compressed form of an exported page."""
    return base64.b64encode(gzip.compress(json.dumps(value).encode(), 6)).decode()


def _rows_of(path: Path) -> dict[str, list[tuple[int, int]]]:
    """First token and row of the rollouts in a file of updates, by the rollout batch and process that sampled them."""
    table = pq.read_table(path, columns=["generation", "rank", "first"])
    rows: dict[str, list[tuple[int, int]]] = {}
    for row, cell in enumerate(table.to_pylist()):
        rows.setdefault(f"{cell['generation']}.{cell['rank']}", []).append((cell["first"], row))
    return rows


def _written(path: Path) -> int:
    """Time at which a file was written, in nanoseconds; 0 if there is no file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _literal(text: Any) -> Any:
    """The value of a recorded setting, which is written as Python's repr; the text itself if it is no plain value."""
    with suppress(ValueError, SyntaxError, TypeError):
        value = ast.literal_eval(text)
        return value if isinstance(value, bool | int | float | str | list | tuple | dict | None) else text
    return text


def _is_json(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
