"""Record of a run's rollouts, with which it can be trained again without an engine if tokens are recorded.

`output_dir/record/` has `run.json` (settings, versions, dataset, rewards), `metrics.jsonl` and, for each rollout batch
or evaluation and each process, a parquet file that is written atomically. A row is a rollout; columns of tokens are
lists with one value per completion token. `covey.observability.updates` adds the log-probs of the updates.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import torch
from transformers import TrainerCallback

from covey.core.batch import TrainBatch
from covey.core.engine import EngineTraits
from covey.core.records import FinishReason, PromptSample, Rollout, RolloutBatch
from covey.core.routes import read_bytes, to_bytes
from covey.core.terms import term_sizes, term_weights
from covey.observability.excerpts import thumbnails
from covey.observability.metrics import Timeline, drawn
from covey.observability.record_files import (
    AS_JSON,
    FOLDER,
    METRICS,
    OF_THE_RUN,
    REWARD,
    TERM,
    TIMELINE,
    VOCABULARY,
    evaluation_file,
    evaluation_files,
    file_name,
    files,
    number_of,
    read_metrics,
    read_rows,
    read_run,
    write_table,
)
from covey.observability.updates import UpdateLog, vocabulary_of
from covey.runtime.files import written_whole
from covey.runtime.packages import versions
from covey.runtime.user_code import format_error, warn

LIBRARIES = ("covey", "torch", "transformers", "accelerate", "peft", "vllm", "sglang")
AS_THEY_ARE = ("group", "role", "game", "prompt", "completion", "reused", "calls", "seconds", "tool_seconds")
"""Fields of a `Rollout` that are columns of the same name."""
LISTS = dict.fromkeys(("turn_ends", "prompt_ids", "versions"), "int32") | {"sampled": "bool"}
LISTS["observed"] = "int8"
LISTS |= dict.fromkeys(("logprobs", "entropies"), "float32")
"""Fields of a rollout that hold lists, and the type of their values."""
OF_TOKENS = (
    *("old_logprobs", "ref_logprobs", "teacher_logprobs"),
    *("advantages", "weights", "entropy_weights", "mismatch_weights"),
)
"""Fields [N] of `TrainBatch` that are columns; those that the run does not compute are missing."""
GIGABYTE = 10**9
Grades = Sequence[
    tuple[bool | None, Any]
]  # of each rollout of an evaluation: whether it is right, and the answer read from it


@dataclass(eq=False)
class Recorder(TrainerCallback):
    """Writes this process's rollouts, at the end of the optimizer step that begins to train on them."""

    folder: Path  # `output_dir/record`
    reward_names: list[str]
    describe: Callable[[], dict[str, Any]]  # returns the content of run.json
    rank: int = 0
    processes: int = 1
    max_bytes: float = 20 * GIGABYTE  # most bytes of this process's files; after that nothing is written
    tokens: bool = True  # write the columns of tokens, which a replay needs
    tokenizer: Any = None  # its vocabulary is written with the tokens
    timeline: Timeline | None = None  # its latest rollout batch is written at every log
    _pending: list[tuple[int, int, RolloutBatch, TrainBatch]] = field(default_factory=list, init=False)
    _bytes: int = field(default=0, init=False)
    _begun: bool = field(default=False, init=False)
    _early: list[dict[str, Any]] = field(default_factory=list, init=False)  # logs of training before the record begins
    _config: str = field(default="", init=False)
    _evaluated: dict[str, list[tuple[RolloutBatch, list[float | None] | None, Grades]]] = field(
        default_factory=dict, init=False
    )
    _own: set[Path] = field(default_factory=set, init=False)  # files of evaluations before training began
    _is_training: bool = field(default=False, init=False)
    _training_since: float = field(default_factory=time.monotonic, init=False)
    _training_began: float = field(
        default_factory=time.time, init=False
    )  # begin of the training as wall-clock time (`time.time`)
    _cpu_before: float = field(default_factory=time.process_time, init=False)  # this process may have trained before

    def __post_init__(self) -> None:
        self.updates = UpdateLog(self.folder, self.rank, self.processes) if self.tokens else None

    def add(self, step: int, rollout_batch: int, scored: RolloutBatch, batch: TrainBatch) -> TrainBatch:
        """Record a rollout batch that training begins with; returns its batch with `origin` set."""
        if self.updates is not None:
            unknown = any(rollout.entropies is None for rollout in scored.rollouts)
            batch = self.updates.numbered(batch, rollout_batch, entropies=unknown)
        self._pending.append((step, rollout_batch, scored, batch))
        return batch

    def begin_evaluation(self, name: str) -> None:
        """Forget rollouts of an earlier evaluation of this name that did not end."""
        self._evaluated[name] = []

    def add_evaluated(
        self, name: str, scored: RolloutBatch, batch: TrainBatch | None = None, grades: Grades = ()
    ) -> None:
        """Add rollouts of the current evaluation, with their advantages or with grades."""
        advantages = None if batch is None else [advantage for _, advantage in _outcomes(scored.rollouts, batch)]
        self._evaluated[name].append((scored, advantages, grades))

    def end_evaluation(self, name: str, step: int) -> None:
        """Write the rollouts of an evaluation after `step` optimizer steps."""
        if parts := self._evaluated.pop(name, []):
            path = self.folder / evaluation_file(name, step, self.rank, self.processes)
            begins = 0 if self._is_training and step == 0 else None
            self._keep(step, begins, lambda: self._write_evaluation(path, step, parts))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pending, self._pending = self._pending, []
        for step, rollout_batch, scored, batch in pending:
            path = self.folder / file_name(rollout_batch, self.rank, self.processes)
            self._keep(step, rollout_batch, lambda: self._write(path, step, rollout_batch, scored, batch))  # noqa: B023
        if (updates := self.updates) is not None:
            self._keep(state.global_step, None, lambda: updates.write(state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Append a line of metrics, with the time, this training's begin, seconds and CPU seconds, and memory."""
        if self.rank or not logs or not (self._begun or self._is_training):
            return
        spent = {"cpu_seconds": time.process_time() - self._cpu_before, "memory_gb": _memory() / GIGABYTE}
        spent |= {"run_seconds": time.monotonic() - self._training_since, "began": self._training_began}
        line = {"step": state.global_step, "time": time.time(), "config": self._config, **spent, **logs}
        if not self._begun:  # an evaluation before the first step
            self._early.append(line)
            return
        self._append(line)
        if self.timeline is not None and (lanes := drawn(self.timeline)) is not None:
            with suppress(OSError), written_whole(self.folder / TIMELINE) as new:
                new.write_text(json.dumps(lanes))

    def _append(self, line: dict[str, Any]) -> None:
        with suppress(OSError), (self.folder / METRICS).open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training_since, self._cpu_before, self._is_training = time.monotonic(), time.process_time(), True
        self._training_began = time.time()
        self._early.clear()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_log(args, state, control, {"event": "end"})
        self._is_training = False

    def _keep(self, step: int, rollout_batch: int | None, write: Callable[[], Path | None]) -> None:
        """Write a file, unless the record is full; a failure is a warning, and the run continues."""
        if self._bytes >= self.max_bytes:
            return
        try:
            if not self._begun and rollout_batch is not None:
                self._begin(step, rollout_batch)
            if (path := write()) is not None:
                self._bytes += path.stat().st_size
        except (OSError, ValueError, TypeError, OverflowError) as error:  # the last three: values that fit no column
            warn(
                f"the record of step {step} could not be written into {str(self.folder)!r}: {format_error(error)}. The"
                " run continues without it.",
            )
        if self._bytes >= self.max_bytes:
            warn(
                f"the record in {str(self.folder)!r} has reached record_max_gb={self.max_bytes / GIGABYTE:g}: it ends"
                f" with step {step}, and the run continues without it. Raise record_max_gb to keep more.",
            )

    def _begin(self, step: int, rollout_batch: int) -> None:
        """Write run.json; a new run moves an earlier record aside, a resumed run continues it."""
        self._begun = True
        evaluations = {
            path: step
            for steps in evaluation_files(self.folder).values()
            for step, paths in steps.items()
            for path in paths
            if path not in self._own and _rank_of(path) == self.rank
        }
        if rollout_batch == 0 and (earlier := [*files(self.folder, self.rank), *evaluations]):
            places = (self.folder.with_name(f"{self.folder.name}_{number}") for number in itertools.count(1))
            kept = next(place for place in places if not (place / earlier[0].relative_to(self.folder)).exists())
            others = [self.folder / name for name in OF_THE_RUN if self.rank == 0]
            for path in [*earlier, *files(self.folder, self.rank, "update"), *others]:
                if path.exists():
                    place = kept / path.relative_to(self.folder)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    path.rename(place)
            evaluations = {}
        for path, after in evaluations.items():
            if after >= step:
                path.unlink()
            else:
                self._bytes += path.stat().st_size
        for kind, first in (("generation", rollout_batch), ("update", step)):
            for path in files(self.folder, self.rank, kind):
                if number_of(path) >= first:
                    path.unlink()
                else:
                    self._bytes += path.stat().st_size
        if self.rank == 0:
            self._describe()
            if lines := read_metrics(self.folder):  # the last line may have been cut off
                kept_lines = [json.dumps(line) + "\n" for line in lines if line["step"] < step]
                with written_whole(self.folder / METRICS) as new:
                    new.write_text("".join(kept_lines))
            for line in self._early if rollout_batch == 0 else ():  # a resumed run has those of its first start
                self._append(line | {"config": self._config})
            if self.tokens and self.tokenizer is not None:
                write_table(self.folder / VOCABULARY, {"bytes": vocabulary_of(self.tokenizer)})

    def _describe(self) -> None:
        described = {**self.describe(), "processes": self.processes, "versions": versions(LIBRARIES)}
        self._config = sha256(_to_json(described["settings"]).encode()).hexdigest()[:12]
        with written_whole(self.folder / "run.json") as new:
            new.write_text(json.dumps(described, indent=1, default=_kind_of))

    def _write_evaluation(
        self, path: Path, step: int, parts: list[tuple[RolloutBatch, list[float | None] | None, Grades]]
    ) -> Path:
        columns: dict[str, list[Any]] = {}
        for number, (scored, advantages, grades) in enumerate(parts):
            rollouts = scored.rollouts
            fates = ["failed" if rollout.finish is FinishReason.ERROR else "evaluated" for rollout in rollouts]
            part = self._of_rollouts(step, number, scored, fates, advantages or [None] * len(rollouts))
            graded = grades or [(None, None)] * len(rollouts)
            part |= {"right": [right for right, _ in graded], "answer": [answer for _, answer in graded]}
            for name, values in part.items():
                columns.setdefault(name, []).extend(values)
        if not self._begun:
            self._own.add(path)
            if self.rank == 0 and not (self.folder / "run.json").exists():
                self._describe()
        return write_table(path, _typed(columns))

    def _write(self, path: Path, step: int, rollout_batch: int, scored: RolloutBatch, batch: TrainBatch) -> Path:
        fates, advantages = zip(*_outcomes(scored.rollouts, batch), strict=True)
        columns = _typed(self._of_rollouts(step, rollout_batch, scored, fates, advantages))
        if self.tokens:
            columns |= _of_tokens(scored.rollouts, batch)
        return write_table(path, columns)

    def _of_rollouts(
        self,
        step: int,
        rollout_batch: int,
        scored: RolloutBatch,
        fates: Sequence[str],
        advantages: Sequence[float | None],
    ) -> dict[str, list[Any]]:
        rollouts = scored.rollouts
        return {
            "step": [step] * len(rollouts),
            "generation": [rollout_batch] * len(rollouts),
            "row": [draw.prompt for draw in scored.samples],
            "sample": [draw.sample for draw in scored.samples],
            **({"source": [draw.source for draw in scored.samples]} if any(d.source for d in scored.samples) else {}),
            "data": [draw.row for draw in scored.samples],
            **{name: [getattr(rollout, name) for rollout in rollouts] for name in AS_THEY_ARE},
            **{REWARD + name: _known(scored.rewards[:, i]) for i, name in enumerate(self.reward_names)},
            "steps": [{str(function): pairs for function, pairs in steps.items()} for steps in scored.steps],
            "columns": [{name: cells[i] for name, cells in scored.columns.items()} for i in range(len(rollouts))],
            "finish": [str(rollout.finish) for rollout in rollouts],
            "error": [rollout.error for rollout in rollouts],
            "fate": [*fates],
            "advantage": [*advantages],
            "length": [len(rollout.completion_ids) for rollout in rollouts],
            "entropy": [*map(_mean_entropy, rollouts)],
            "images": [len(rollout.images) for rollout in rollouts],
            "image_files": self._image_files(rollouts),
        }

    def _image_files(self, rollouts: list[Rollout]) -> list[list[str]]:
        """Names of small PNG files in `images/`; an image in several rollouts is written once."""
        known: dict[int, bytes] = {}
        names = []
        for rollout in rollouts:
            names.append([f"{sha256(data).hexdigest()[:24]}.png" for data in thumbnails(rollout.images, known)])
            for name, image in zip(names[-1], rollout.images, strict=True):
                if not (path := self.folder / "images" / name).exists():
                    with written_whole(path) as new:
                        new.write_bytes(known[id(image)])
        return names


def _typed(columns: dict[str, list[Any]]) -> dict[str, Any]:
    """Columns of a file with messages and data as JSON, and the types of columns that may have no value."""
    types = {"error": pa.string(), "right": pa.bool_(), "image_files": pa.list_(pa.string())}
    types |= dict.fromkeys(("advantage", "entropy"), pa.float64())
    typed = {name: pa.array(columns[name], kind) for name, kind in types.items() if name in columns}
    return {**columns, **{name: [*map(_to_json, columns[name])] for name in AS_JSON if name in columns}, **typed}


def _rank_of(path: Path) -> int:
    return int(path.stem.partition("_rank")[2] or 0)


def _of_tokens(rollouts: list[Rollout], batch: TrainBatch) -> dict[str, Any]:
    """Columns with a value for each token, and columns that describe the structure of tokens (turns, strands)."""

    def lists(values: list[list[Any] | None], kind: Any) -> Any:
        return pa.array(values, pa.list_(kind))

    offsets = pa.array([0, *batch.lengths.cumsum(0).tolist()], pa.int32())
    columns = {
        name: lists([getattr(rollout, name) for rollout in rollouts], pa.type_for_alias(kind))
        for name, kind in LISTS.items()
    }
    columns["strands"] = lists([[n for pair in rollout.strands for n in pair] for rollout in rollouts], pa.int32())
    columns["token_ids"] = lists([rollout.completion_ids for rollout in rollouts], pa.int32())
    columns["sampling_mask"] = lists([rollout.sampling_mask for rollout in rollouts], pa.list_(pa.int32()))
    if any(rollout.routes is not None for rollout in rollouts):
        files = [None if one.routes is None else np.frombuffer(to_bytes(one.routes), np.uint8) for one in rollouts]
        columns["routes"] = pa.array(files, pa.list_(pa.uint8()))
    for name in OF_TOKENS:
        if (values := getattr(batch, name)) is not None:
            columns[name] = pa.ListArray.from_arrays(offsets, pa.array(values.float().cpu().numpy()))
    for term in batch.term_tokens:
        weights = term_weights(batch, term).float().cpu().numpy()
        columns[f"{TERM}{term}"] = pa.ListArray.from_arrays(offsets, pa.array(weights))
    return columns


@dataclass(eq=False)
class Replay:
    """Reads rollouts from the record of a run."""

    folder: Path  # the run's `output_dir`
    reward_names: list[str]
    rank: int = 0
    processes: int = 1
    needs_routes: bool = False  # refuse rollouts without the experts of their tokens

    def __post_init__(self) -> None:
        described = read_run(self.folder)
        self.traits = EngineTraits(**described["engine"])  # of the engine that sampled
        if (recorded := described["processes"]) != self.processes:
            raise ValueError(
                f"replay_from={str(self.folder)!r} was recorded by {recorded} processes, and {self.processes} are to"
                " train from it: start as many."
            )

    def path(self, rollout_batch: int) -> Path:
        return self.folder / FOLDER / file_name(rollout_batch, self.rank, self.processes)

    def load(self, rollout_batch: int) -> RolloutBatch:
        """This process's rollouts of a rollout batch; ValueError if its text and tokens are not on record."""
        path = self.path(rollout_batch)
        if not path.exists():
            numbers = [number_of(known) for known in files(self.folder / FOLDER, self.rank)]
            raise ValueError(
                f"replay_from={str(self.folder)!r} has no rollout batch {rollout_batch}: it is a record of"
                f" {len(numbers)}{f', the last of which is {max(numbers)}' if numbers else ''}. Set max_steps to what"
                " it holds."
            )
        rows = read_rows(path)
        if "token_ids" not in rows[0]:
            raise ValueError(
                f"replay_from={str(self.folder)!r} has rollouts without their tokens: replay a run that was trained"
                ' with record="tokens".'
            )
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
        if self.needs_routes and any(row.get("routes") is None for row in rows if any(row["sampled"])):
            raise ValueError(
                f"replay_from={str(self.folder)!r} has rollouts without the experts of their tokens, which"
                " routing_replay='R3' replays: replay a run that was trained with it, or leave it unset."
            )
        return as_scored(rows, names, [rollout_of(row) for row in rows])


def as_scored(rows: list[dict[str, Any]], names: list[str], rollouts: list[Rollout]) -> RolloutBatch:
    """Rollouts of a record's rows as a `RolloutBatch`, with the rewards of the functions `names`."""
    rewards = [[_number(row[REWARD + name]) for name in names] for row in rows]
    return RolloutBatch(
        [PromptSample(row["data"], row["row"], row["sample"], row.get("source", "")) for row in rows],
        rollouts,
        torch.tensor(rewards, dtype=torch.float64).view(len(rows), len(names)),
        {name: [row["columns"][name] for row in rows] for name in rows[0]["columns"]},
        [
            {int(function): [(e, _number(r)) for e, r in pairs] for function, pairs in row["steps"].items()}
            for row in rows
        ],
    )


def rollout_of(row: dict[str, Any]) -> Rollout:
    """The rollout of a row with tokens."""
    strands, routes = row["strands"], row.get("routes")
    return Rollout(
        **{name: row[name] for name in (*AS_THEY_ARE, *LISTS, "error", "sampling_mask") if name in row},
        completion_ids=row["token_ids"],
        finish=FinishReason(row["finish"]),
        strands=list(zip(strands[::2], strands[1::2], strict=True)),
        routes=None if routes is None else torch.from_numpy(read_bytes(bytes(routes))),
    )


def _outcomes(rollouts: list[Rollout], batch: TrainBatch) -> Iterator[tuple[str, float | None]]:
    """Fate of each rollout, and its mean advantage over trained tokens (None without any).

    Fates: `failed`, `absent` (`FinishReason.ABSENT`), `masked` (no token is trained), `no signal` (all advantages are
    0), and `trained`, also if it only has tokens in a further term of the loss.
    """
    assert batch.advantages is not None, "credit is assigned before a rollout batch is recorded"
    of_each = (values.split(batch.lengths.tolist()) for values in (batch.sampled, batch.advantages))
    in_terms = [sum(sizes) > 0 for sizes in zip(*(one.tolist() for one in term_sizes(batch).values()), strict=True)]
    for rollout, sampled, advantages, has_term in zip(
        rollouts, *of_each, in_terms or [False] * len(rollouts), strict=True
    ):
        known = advantages[sampled]
        if rollout.finish in (FinishReason.ERROR, FinishReason.ABSENT):
            fate = "failed" if rollout.finish is FinishReason.ERROR else "absent"
        elif has_term:
            fate = "trained"
        elif not len(known):
            fate = "masked"
        else:
            fate = "trained" if known.any() else "no signal"
        yield fate, float(known.mean()) if len(known) else None


def _mean_entropy(rollout: Rollout) -> float | None:
    """Mean entropy over a completion's sampled tokens, in nats; None if it was not measured."""
    known = [*itertools.compress(rollout.entropies or (), rollout.sampled)]
    return fmean(known) if known else None


def _memory() -> int:
    """Bytes of memory: the peak on the GPU so far or, without a GPU, the process's current memory."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return int(psutil.Process().memory_info().rss)


def _known(values: torch.Tensor) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _to_json(value: Any) -> str:
    try:
        return json.dumps(value, default=_kind_of)
    except (TypeError, ValueError, RecursionError):  # keys of other types, or a value that contains itself
        return json.dumps(type(value).__name__)


def _kind_of(value: Any) -> str:
    return type(value).__name__
