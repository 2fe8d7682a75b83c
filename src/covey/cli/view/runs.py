"""Reading of recorded runs for the page, while they are written."""

import ast
import json
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from covey.cli.view.tables import Generation, Lists, Update
from covey.core.transcript import as_text
from covey.observability.record_files import (
    FOLDER,
    METRICS,
    VOCABULARY,
    number_of,
    read_metrics,
    read_run,
)

FINDINGS = "findings.json"
CACHED = 24  # tables of generations in memory
QUIET = 600.0  # seconds without a new file after which a run without an end counts as stopped


class RecordedRun:
    """A run's record; what is read is kept until its files change."""

    def __init__(self, folder: Path):
        read_run(folder)
        self.folder, self.record = folder, folder / FOLDER
        self._updates: dict[Path, dict[str, Update]] = {}
        self._tables: OrderedDict[str, tuple[int, Generation]] = OrderedDict()
        self._blocks: dict[str, tuple[str, dict[str, Any]]] = {}
        self._vocabulary: list[bytes] | None = None

    def state(self) -> dict[str, Any]:
        """Files of the record, each with a version that changes with it."""
        blocks = [[key, self._version(key, path)] for key, path in self._files().items()]
        watched = [self.record / name for name in ("run.json", METRICS, FINDINGS)]
        times = [path.stat().st_mtime_ns if path.exists() else 0 for path in watched]
        written = max([times[1], *(path.stat().st_mtime_ns for path in [*self._files().values()][-1:])]) / 1e9
        lines = read_metrics(self.record)
        ended = bool(lines) and lines[-1].get("event") == "end"
        live = "ended" if ended else "running" if time.time() - written < QUIET else "stopped"
        name = self.folder.name or self.folder.resolve().name
        return {
            "name": name,
            "folder": str(self.folder),
            "live": live,
            "written": written,
            "version": "-".join(map(str, times)),
            "blocks": blocks,
        }

    def described(self) -> dict[str, Any]:
        """Settings, metrics and findings."""
        described = read_run(self.folder)
        described["settings"] = {name: _literal(text) for name, text in described.get("settings", {}).items()}
        findings = []
        with suppress(OSError, ValueError):
            findings = json.loads((self.record / FINDINGS).read_text())
        return {"described": described, "metrics": _finite(read_metrics(self.record)), "findings": findings}

    def blocks(self, keys: list[str]) -> dict[str, Any]:
        """Summaries of the rollouts of generations, by key."""
        files, found = self._files(), {}
        weights = read_run(self.folder).get("settings", {}).get("reward_weights")
        numbers = _literal(weights) or []
        for key in keys:
            if (path := files.get(key)) is None:
                continue
            version = self._version(key, path)
            if self._blocks.get(key, ("",))[0] != version:
                self._blocks[key] = version, self._generation(key, path).block(numbers)
            found[key] = self._blocks[key][1]
        return found

    def rollout(self, name: str) -> dict[str, Any]:
        """A rollout by `generation.rank.row`; LookupError where there is none."""
        key, _, row = name.rpartition(".")
        generation = self._generation(key, self._files()[key])
        if not 0 <= int(row) < generation.table.num_rows:
            raise LookupError(f"generation {key} has no rollout {row}")
        return generation.rollout(int(row), key, self._words())

    def generation(self, key: str) -> list[dict[str, Any]]:
        generation = self._generation(key, self._files()[key])
        return [generation.rollout(row, key, self._words()) for row in range(generation.table.num_rows)]

    def search(self, words: str) -> list[str]:
        """Rollouts whose prompt or completion contains the words, in any case."""
        found, wanted = [], words.lower()
        for key, path in self._files().items():
            generation = self._generation(key, path)
            prompts: dict[int, bool] = {}
            groups = generation.table["group"].to_pylist()
            for row, text in enumerate(generation.table["completion"].to_pylist()):
                if groups[row] not in prompts:
                    prompts[groups[row]] = wanted in as_text(generation.prompt(row)).lower()
                if prompts[groups[row]] or wanted in as_text(json.loads(text)).lower():
                    found.append(f"{key}.{row}")
        return found

    def image(self, name: str) -> Path:
        """A small PNG file of the record; LookupError for any other."""
        path = self.record / "images" / Path(name).name
        if path.suffix != ".png" or not path.is_file():
            raise LookupError(f"there is no image {name}")
        return path

    def _files(self) -> dict[str, Path]:
        """Files of generations by `generation.rank`."""
        found = {}
        for path in sorted(self.record.glob("generation_*.parquet"), key=lambda path: (number_of(path), path.name)):
            found[f"{number_of(path)}.{path.stem.partition('_rank')[2] or 0}"] = path
        return found

    def _version(self, key: str, path: Path) -> str:
        return f"{path.stat().st_mtime_ns}-{len(self._updates_of(key))}"

    def _generation(self, key: str, path: Path) -> Generation:
        updates = self._updates_of(key)
        version = path.stat().st_mtime_ns + len(updates)
        if self._tables.get(key, (0,))[0] != version:
            self._tables[key] = version, Generation(pq.read_table(path).combine_chunks(), updates)
        self._tables.move_to_end(key)
        while len(self._tables) > CACHED:
            self._tables.popitem(last=False)
        return self._tables[key][1]

    def _updates_of(self, key: str) -> list[Update]:
        """Updates with rollouts of a generation, in the order of steps; new files are read."""
        for path in self.record.glob("update_*.parquet"):
            if path not in self._updates:
                self._updates[path] = dict(_parts(path))
        found = [parts[key] for parts in self._updates.values() if key in parts]
        return sorted(found, key=lambda update: update.step)

    def _words(self) -> list[bytes]:
        if self._vocabulary is None:
            path = self.record / VOCABULARY
            self._vocabulary = pq.read_table(path)["bytes"].to_pylist() if path.exists() else []
        return self._vocabulary


def _parts(path: Path) -> Iterator[tuple[str, Update]]:
    """Updates of a file by the generation and process that sampled."""
    table = pq.read_table(path)
    lists = Lists(table, pc.list_value_length(table["logprobs"]).to_numpy().astype(np.int64))
    rows: dict[str, list[tuple[int, int]]] = {}
    cells = zip(*(table[name].to_pylist() for name in ("generation", "rank", "first")), strict=True)
    for row, (generation, rank, first) in enumerate(cells):
        rows.setdefault(f"{generation}.{rank}", []).append((first, row))
    for key, of_key in rows.items():
        yield key, Update(number_of(path), of_key, lists)


def _literal(text: Any) -> Any:
    """A setting as it was, if it was plain: they are written as Python shows them."""
    with suppress(ValueError, SyntaxError, TypeError):
        value = ast.literal_eval(text)
        return value if isinstance(value, bool | int | float | str | list | tuple | dict | None) else text
    return text


def _finite(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without NaN and infinities, which JSON does not know."""
    return [
        {
            name: value if value == value and abs(value) != float("inf") else None
            for name, value in line.items()
            if isinstance(value, int | float)
        }
        for line in lines
    ]
