"""Record of a run: every token of every generation, from which the run can be trained again without an engine.

`output_dir/record/` holds `run.json` (settings, versions, dataset, rewards) and a parquet file for each generation and
process, which is there as a whole or not at all. A row is a rollout; columns of tokens are lists, one value for each
token of the completion.
"""

import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from covey.core.batch import TrainBatch
from covey.core.engine import EngineTraits
from covey.core.records import FinishReason, PromptSample, Rollout, ScoredRollouts
from covey.runtime.files import written_whole
from covey.runtime.user_code import format_error

FOLDER = "record"
LIBRARIES = ("covey", "torch", "transformers", "accelerate", "peft", "vllm", "sglang")
OF_TOKENS = ("old_logprobs", "ref_logprobs", "advantages", "weights", "entropy_weights", "mismatch_weights")
"""Columns of `TrainBatch` [N]; a column that the run does not compute is missing."""
AS_JSON = ("data", "prompt", "completion", "steps", "columns", "calls")
REWARD = "reward/"
"""Prefix of the columns of rewards; null where a function abstained."""
GIGABYTE = 10**9


@dataclass(eq=False)
class Recorder:
    """Writes the record of this process's rollouts."""

    folder: Path  # `output_dir/record`
    reward_names: list[str]
    describe: Callable[[], dict[str, Any]]  # -> what goes into run.json
    rank: int = 0
    processes: int = 1
    max_bytes: float = 20 * GIGABYTE  # of this process's files; beyond it nothing more is written
    _bytes: int = field(default=0, init=False)
    _begun: bool = field(default=False, init=False)

    def add(self, step: int, generation: int, scored: ScoredRollouts, batch: TrainBatch) -> None:
        """Write a generation; a failure is a warning, as the run goes on."""
        if self._bytes >= self.max_bytes:
            return
        try:
            if not self._begun:
                self._begin(generation)
            path = self.folder / file_name(generation, self.rank, self.processes)
            self._write(path, step, generation, scored, batch)
            self._bytes += path.stat().st_size
        except (OSError, ValueError, TypeError, OverflowError) as error:  # the last three: values that fit no column
            warnings.warn(
                f"the record of step {step} could not be written into {str(self.folder)!r}: {format_error(error)}. The"
                " run goes on without it.",
                stacklevel=3,
            )
        if self._bytes >= self.max_bytes:
            warnings.warn(
                f"the record in {str(self.folder)!r} has reached record_max_gb={self.max_bytes / GIGABYTE:g}: it ends"
                f" with generation {generation} (step {step}), and the run goes on without it. Raise record_max_gb to"
                " keep more.",
                stacklevel=3,
            )

    def _begin(self, generation: int) -> None:
        """Describe the run; a new one keeps an earlier record elsewhere, a resumed one goes on from here."""
        self._begun = True
        if generation == 0 and (earlier := files(self.folder, self.rank)):
            places = (self.folder.with_name(f"{self.folder.name}_{number}") for number in itertools.count(1))
            kept = next(place for place in places if not (place / earlier[0].name).exists())
            kept.mkdir(exist_ok=True)
            for path in [*earlier, *([self.folder / "run.json"] if self.rank == 0 else [])]:
                path.rename(kept / path.name)
            warnings.warn(
                f"{str(self.folder)!r} held the record of an earlier run, which is now in {kept.name!r}. Choose another"
                " output_dir to keep runs apart.",
                stacklevel=4,
            )
        for path in files(self.folder, self.rank):
            if number_of(path) >= generation:
                path.unlink()
            else:
                self._bytes += path.stat().st_size
        if self.rank == 0:
            described = {**self.describe(), "processes": self.processes, "versions": dict(_versions())}
            with written_whole(self.folder / "run.json") as new:
                new.write_text(json.dumps(described, indent=1))

    def _write(self, path: Path, step: int, generation: int, scored: ScoredRollouts, batch: TrainBatch) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        def of_rollouts(values: list[list[Any] | None], kind: Any) -> Any:
            return pa.array(values, pa.list_(kind))

        rollouts = scored.rollouts
        offsets = pa.array([0, *batch.lengths.cumsum(0).tolist()], pa.int32())
        columns: dict[str, Any] = {
            "step": [step] * len(rollouts),
            "generation": [generation] * len(rollouts),
            "row": [draw.prompt for draw in scored.draws],
            "sample": [draw.sample for draw in scored.draws],
            "group": [rollout.group for rollout in rollouts],
            "data": [draw.row for draw in scored.draws],
            "prompt": [rollout.prompt for rollout in rollouts],
            "completion": [rollout.completion for rollout in rollouts],
            **{REWARD + name: _known(scored.rewards[:, i]) for i, name in enumerate(self.reward_names)},
            "steps": [{str(function): pairs for function, pairs in steps.items()} for steps in scored.steps],
            "columns": [{name: cells[i] for name, cells in scored.columns.items()} for i in range(len(rollouts))],
            "finish": [str(rollout.finish) for rollout in rollouts],
            "error": pa.array([rollout.error for rollout in rollouts], pa.string()),
            "fate": [*_fates(rollouts, batch)],
            "reused": [rollout.reused for rollout in rollouts],
            "images": [len(rollout.images) for rollout in rollouts],
            "calls": [rollout.calls for rollout in rollouts],
            "seconds": [rollout.seconds for rollout in rollouts],
            "tool_seconds": [rollout.tool_seconds for rollout in rollouts],
            "turn_ends": of_rollouts([rollout.turn_ends for rollout in rollouts], pa.int32()),
            "strands": of_rollouts([[n for pair in rollout.strands for n in pair] for rollout in rollouts], pa.int32()),
            "prompt_ids": of_rollouts([rollout.prompt_ids for rollout in rollouts], pa.int32()),
            "token_ids": of_rollouts([rollout.completion_ids for rollout in rollouts], pa.int32()),
            "sampled": of_rollouts([rollout.sampled for rollout in rollouts], pa.bool_()),
            "versions": of_rollouts([rollout.versions for rollout in rollouts], pa.int32()),
            "logprobs": of_rollouts([rollout.logprobs for rollout in rollouts], pa.float32()),
            "entropies": of_rollouts([rollout.entropies for rollout in rollouts], pa.float32()),
            "sampling_mask": of_rollouts([rollout.sampling_mask for rollout in rollouts], pa.list_(pa.int32())),
        }
        columns |= {name: [*map(_to_json, columns[name])] for name in AS_JSON}
        for name in OF_TOKENS:
            values = getattr(batch, name)
            if values is not None:
                columns[name] = pa.ListArray.from_arrays(offsets, pa.array(values.float().cpu().numpy()))
        with written_whole(path) as new:
            pq.write_table(pa.table(columns), new, compression="zstd")


@dataclass(eq=False)
class Replay:
    """Reads rollouts from the record of a run."""

    folder: Path  # the run's `output_dir`
    reward_names: list[str]
    rank: int = 0
    processes: int = 1

    def __post_init__(self) -> None:
        described = read_run(self.folder)
        self.traits = EngineTraits(**described["engine"])  # of the engine that sampled
        if (recorded := described["processes"]) != self.processes:
            raise ValueError(
                f"replay_from={str(self.folder)!r} was recorded by {recorded} processes, and {self.processes} are to"
                " train from it: start as many."
            )

    def load(self, generation: int) -> ScoredRollouts:
        """This process's rollouts of a generation; ValueError where the record has none, or no text alone."""
        path = self.folder / FOLDER / file_name(generation, self.rank, self.processes)
        if not path.exists():
            numbers = [number_of(known) for known in files(self.folder / FOLDER, self.rank)]
            raise ValueError(
                f"replay_from={str(self.folder)!r} has no generation {generation}: it is a record of {len(numbers)}"
                f"{f', the last of which is {max(numbers)}' if numbers else ''}. Set max_steps to what it holds."
            )
        rows = read_rows(path)
        names = [name.removeprefix(REWARD) for name in rows[0] if name.startswith(REWARD)]
        if names != self.reward_names:
            raise ValueError(
                f"replay_from={str(self.folder)!r} has the rewards {', '.join(names)}, and this run has"
                f" {', '.join(self.reward_names)}: give the same functions in the same order. They are not called;"
                " reward_weights may differ."
            )
        if any(row["images"] for row in rows):
            raise ValueError(
                f"replay_from={str(self.folder)!r} has rollouts with images, which a record does not hold: only runs"
                " on text can be replayed."
            )
        rewards = [[_number(row[REWARD + name]) for name in names] for row in rows]
        return ScoredRollouts(
            [PromptSample(row["data"], row["row"], row["sample"]) for row in rows],
            [_rollout(row) for row in rows],
            torch.tensor(rewards, dtype=torch.float32).view(len(rows), len(names)),
            {name: [row["columns"][name] for row in rows] for name in rows[0]["columns"]},
            [
                {int(function): [(e, _number(r)) for e, r in pairs] for function, pairs in row["steps"].items()}
                for row in rows
            ],
        )


def file_name(generation: int, rank: int, processes: int) -> str:
    """Name of a generation's file: `generation_00012.parquet`, of one among several processes `..._00012_rank1`."""
    return f"generation_{generation:05d}{f'_rank{rank}' if processes > 1 else ''}.parquet"


def number_of(path: Path) -> int:
    """Number of the generation in a file's name."""
    return int(path.stem.split("_")[1])


def files(folder: Path, rank: int = 0) -> list[Path]:
    """A process's files of a record, in the order of generations."""
    found = [path for path in folder.glob("generation_*.parquet") if path.stem.count("_") == 1]
    return sorted([*found, *folder.glob(f"generation_*_rank{rank}.parquet")], key=number_of)


def read_run(run: Path) -> dict[str, Any]:
    """`run.json` of a run's record; ValueError where there is none."""
    try:
        described: dict[str, Any] = json.loads((run / FOLDER / "run.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{str(run)!r} has no record that can be read ({format_error(error)}): give the output_dir of a run that"
            ' was trained with record="tokens".'
        ) from error
    return described


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rollouts of a file, one dictionary each; columns that hold messages and data are Python objects again."""
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return [{**row, **{name: json.loads(row[name]) for name in AS_JSON}} for row in rows]


def _rollout(row: dict[str, Any]) -> Rollout:
    strands = row["strands"]
    return Rollout(
        prompt_ids=row["prompt_ids"],
        completion_ids=row["token_ids"],
        sampled=row["sampled"],
        logprobs=row["logprobs"],
        completion=row["completion"],
        finish=FinishReason(row["finish"]),
        group=row["group"],
        entropies=row["entropies"],
        reused=row["reused"],
        versions=row["versions"],
        turn_ends=row["turn_ends"],
        calls=row["calls"],
        error=row["error"],
        seconds=row["seconds"],
        tool_seconds=row["tool_seconds"],
        prompt=row["prompt"],
        sampling_mask=row["sampling_mask"],
        strands=list(zip(strands[::2], strands[1::2], strict=True)),
    )


def _fates(rollouts: list[Rollout], batch: TrainBatch) -> Iterator[str]:
    """`failed`, `masked` (no token is learned from), `no signal` (all advantages are 0) or `trained`."""
    assert batch.advantages is not None, "credit is assigned before a generation is recorded"
    of_each = (values.split(batch.lengths.tolist()) for values in (batch.sampled, batch.advantages))
    for rollout, sampled, advantages in zip(rollouts, *of_each, strict=True):
        if rollout.finish is FinishReason.ERROR:
            yield "failed"
        elif not sampled.any():
            yield "masked"
        else:
            yield "trained" if advantages[sampled].any() else "no signal"


def _versions() -> Iterator[tuple[str, str]]:
    for name in LIBRARIES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _known(values: torch.Tensor) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _to_json(value: Any) -> str:
    try:
        return json.dumps(value, default=lambda other: type(other).__name__)
    except (TypeError, ValueError, RecursionError):  # keys of other types, or a value within itself
        return json.dumps(type(value).__name__)
