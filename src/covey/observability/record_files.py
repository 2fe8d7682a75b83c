"""Files of a record (`covey.observability.record`): their names, and reading them without torch."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from covey.runtime.files import written_whole
from covey.runtime.user_code import format_error

FOLDER, EVALUATIONS = "record", "evaluations"  # of a run's output folder, and of the record
METRICS, VOCABULARY = "metrics.jsonl", "vocabulary.parquet"
FINDINGS, WARNINGS = "findings.json", "warnings.json"  # of `covey doctor`, and of the run itself
TIMELINE, MEASURED = "timeline.json", "measured.json"  # of the latest rollout batch, and of the first step
OF_THE_RUN = ("run.json", METRICS, VOCABULARY, FINDINGS, WARNINGS, TIMELINE, MEASURED)
"""Files that exist once per run, rather than per rollout batch and process."""
AS_JSON = ("data", "prompt", "completion", "steps", "columns", "calls", "answer")
"""Columns that hold JSON; `answer` only in evaluations."""
REWARD = "reward/"
"""Prefix of the columns of rewards; null where a function abstained."""
TERM = "term/"
"""Prefix of columns with tokens' weights in further terms of the loss."""
EVALUATION_NAME = re.compile(r"(.+)_(\d{5,})(?:_rank(\d+))?\.parquet")


def file_name(number: int, rank: int, processes: int, kind: str = "generation") -> str:
    """Name of a file: `generation_00012.parquet`, or with several processes `generation_00012_rank1.parquet`."""
    return f"{kind}_{number:05d}{f'_rank{rank}' if processes > 1 else ''}.parquet"


def number_of(path: Path) -> int:
    """Number of the rollout batch or the step in a file's name."""
    return int(path.stem.split("_")[1])


def files(folder: Path, rank: int = 0, kind: str = "generation") -> list[Path]:
    """A process's files of a record, in the order of rollout batches, or of steps for the kind `update`."""
    found = [path for path in folder.glob(f"{kind}_*.parquet") if path.stem.count("_") == 1]
    return sorted([*found, *folder.glob(f"{kind}_*_rank{rank}.parquet")], key=number_of)


def all_files(folder: Path, kind: str = "generation") -> list[Path]:
    """Files of all processes, in the order of rollout batches and of ranks."""
    found = folder.glob(f"{kind}_*.parquet")
    return sorted(found, key=lambda path: (number_of(path), int(path.stem.partition("_rank")[2] or 0)))


def evaluation_file(name: str, step: int, rank: int, processes: int) -> str:
    """Path within a record of an evaluation's file: `evaluations/eval_hard_00012.parquet`; a slash becomes a dash."""
    name = name.replace("/", "-").replace(os.sep, "-")
    return f"{EVALUATIONS}/{name}_{step:05d}{f'_rank{rank}' if processes > 1 else ''}.parquet"


def evaluation_files(folder: Path) -> dict[str, dict[int, list[Path]]]:
    """Files of all processes by the evaluation's name (`eval_hard`) and step, in the order of steps and ranks."""
    found: dict[str, dict[int, list[Path]]] = {}
    named = [(EVALUATION_NAME.fullmatch(path.name), path) for path in (folder / EVALUATIONS).glob("*.parquet")]
    known = [(one[1], int(one[2]), int(one[3] or 0), path) for one, path in named if one]
    for name, step, _, path in sorted(known):
        found.setdefault(name, {}).setdefault(step, []).append(path)
    return found


def columns_of(path: Path) -> list[str]:
    import pyarrow.parquet as pq

    return list(pq.read_schema(path).names)


def count_rows(path: Path) -> int:
    """Rollouts in a file; 0 for one that cannot be read."""
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(path).num_rows)
    except (OSError, ValueError):  # arrow's errors are of these types
        return 0


def write_table(path: Path, columns: Mapping[str, Any]) -> Path:
    """Write columns into a parquet file, atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with written_whole(path) as new:
        pq.write_table(pa.table(dict(columns)), new, compression="zstd")
    return path


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl`, without a last one that was cut off; empty if there is no file."""
    lines = []
    with suppress(OSError), (folder / METRICS).open() as file:
        for line in file:
            with suppress(ValueError):
                lines.append(json.loads(line))
    return lines


def spent(lines: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Seconds, and CPU seconds of the main process, from the first log to the last; NaN if they are not known.

    A resumed run has several trainings. Time between them is not counted; the time of a later one before its first log
    is, because `run_seconds` counts from the beginning of each training.
    """
    known = [line for line in lines if all(isinstance(line.get(name), int | float) for name in ("time", "cpu_seconds"))]
    if len(known) < 2:
        return math.nan, math.nan
    seconds = cores = 0.0
    for before, line in pairwise(known):
        if not _same_training(before, line):
            seconds += line.get("run_seconds", 0.0)
            cores += line["cpu_seconds"]
            continue
        clock = "run_seconds" if "run_seconds" in before and "run_seconds" in line else "time"
        seconds += line[clock] - before[clock]
        cores += line["cpu_seconds"] - before["cpu_seconds"]
    return seconds, cores


def _same_training(before: Mapping[str, Any], line: Mapping[str, Any]) -> bool:
    """True if two lines were written by the same training (between a start or resume and its end).

    Records of 0.2.0 lack the time at which a training began; there it is seen by values that only grow within one.
    """
    if "began" in before and "began" in line:
        return bool(before["began"] == line["began"])
    return line["cpu_seconds"] >= before["cpu_seconds"] and line.get("run_seconds", 1) >= before.get("run_seconds", 0)


def ends_of(values: Sequence[float]) -> tuple[float, float] | None:
    """First and last value of a curve, as means over its first and last tenth; None for an empty curve."""
    if not values:
        return None
    tenth = max(1, len(values) // 10)
    return sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth


def read_run(run: Path) -> dict[str, Any]:
    """`run.json` of a run's record; ValueError if there is none."""
    try:
        described: dict[str, Any] = json.loads((run / FOLDER / "run.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{str(run)!r} has no record that can be read ({format_error(error)}): give the output_dir of a run that"
            ' was trained with record="tokens" (or "rollouts", to view it).'
        ) from error
    return described


def read_data(folder: Path) -> dict[int, dict[str, Any]]:
    """Recorded rows of the dataset, by their number."""
    import pyarrow.parquet as pq

    rows: dict[int, dict[str, Any]] = {}
    for path in files(folder):
        table = pq.read_table(path, columns=["row", "data"]).to_pydict()
        rows |= {number: json.loads(data) for number, data in zip(table["row"], table["data"], strict=True)}
    return dict(sorted(rows.items()))


def read_rows(path: Path, of_tokens: bool = True) -> list[dict[str, Any]]:
    """Rollouts of a file, one dictionary each; columns that hold messages and data are Python objects again.

    `of_tokens=False` leaves out the columns with a value for each token.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    chosen = None
    if not of_tokens:
        schema = pq.read_schema(path)
        chosen = [one.name for one in schema if one.name == "image_files" or not pa.types.is_list(one.type)]
    rows: list[dict[str, Any]] = pq.read_table(path, columns=chosen).to_pylist()
    return [{**row, **{name: json.loads(row[name]) for name in AS_JSON if name in row}} for row in rows]
