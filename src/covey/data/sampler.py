"""Prompts of each rollout batch, and their distribution over processes.

The first micro-batch of a rollout batch carries its prompt samples; later ones find completions in the rollout buffer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from covey.config.algebra import BatchAlgebra
from covey.core.findings import Finding
from covey.core.records import MicroStep, PromptSample
from covey.data.rows import plain_row
from covey.data.sources import Sources
from covey.data.validation import read_row
from covey.runtime.user_code import report

Slot = tuple[int, int]  # (row of the dataset, index among its completions)


@dataclass(eq=False)
class GenerationSampler:
    """Batches of slots of a dataset for one process; ValueError if it is smaller than one rollout batch."""

    rows: int  # of the dataset
    algebra: BatchAlgebra
    rank: int  # of the process
    _: KW_ONLY
    shuffle: bool  # True: each epoch has a new random order; False: an epoch begins where the last one ended
    seed: int
    with_slots: bool = True  # False: the trainer chooses the prompts

    def __post_init__(self) -> None:
        report(check_enough(self.rows, self.algebra))
        self.epoch = 0
        self.rollout_batches = self.rows // self.algebra.prompts_per_rollout_batch
        """Rollout batches of one epoch. Prompts that do not fill one are left out; unshuffled, they begin the next."""
        self._order = -1, torch.empty(0, dtype=torch.long)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.rollout_batches * self.algebra.micro_batches

    def __iter__(self) -> Iterator[tuple[int | None, list[Slot] | None]]:
        """Arguments of `TrainingSteps`, for each micro-batch of this epoch."""
        for rollout_batch in range(self.epoch * self.rollout_batches, (self.epoch + 1) * self.rollout_batches):
            yield rollout_batch, self.slots(rollout_batch) if self.with_slots else None
            yield from ((None, None) for _ in range(self.algebra.micro_batches - 1))

    def slots(self, rollout_batch: int) -> list[Slot]:
        epoch, place = divmod(rollout_batch, self.rollout_batches)
        count = self.algebra.prompts_per_rollout_batch
        if self._order[0] != epoch:
            random = torch.Generator().manual_seed(self.seed + epoch)
            order = torch.randperm(self.rows, generator=random) if self.shuffle else torch.arange(self.rows)
            began = 0 if self.shuffle else epoch * self.rollout_batches * count % self.rows
            self._order = epoch, order.roll(-began)
        prompts = self._order[1][place * count : (place + 1) * count].tolist()
        return rank_share(prompts, self.algebra.num_generations, self.algebra, self.rank)


def check_enough(rows: int, algebra: BatchAlgebra) -> Iterator[Finding]:
    if rows < algebra.prompts_per_rollout_batch:
        yield Finding.error(
            "dataset-small",
            f"the training dataset has {rows} prompt(s) but one rollout batch draws"
            f" {algebra.prompts_per_rollout_batch} (generation_batch_size={algebra.generation_batch_size} /"
            f" num_generations={algebra.num_generations}).",
            "Give more prompts, a smaller generation_batch_size, or a larger num_generations.",
        )


def rank_share(prompts: Sequence[int], group: int, algebra: BatchAlgebra, rank: int) -> list[Slot]:
    """The slots of one process: an equal, consecutive share of all slots; earlier processes get one game more."""
    slots = [(prompt, sample) for prompt in prompts for sample in range(group)]
    return slots[share_of(len(slots), algebra, rank)]


def share_of(count: int, algebra: BatchAlgebra, rank: int) -> slice:
    """The consecutive part of `count` slots for one process, in whole games."""
    share, extra = divmod(count // algebra.rollouts_per_game, algebra.world_size)
    start = rank * share + min(rank, extra)
    stop = start + share + (rank < extra)
    return slice(start * algebra.rollouts_per_game, stop * algebra.rollouts_per_game)


class PromptDataset(Dataset):
    """Prompt samples of a dataset with a length; each row is fetched once per batch."""

    def __init__(self, rows: Any):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, slots: list[Slot]) -> list[PromptSample]:
        fetched = {prompt: read_row(self.rows, prompt) for prompt, _ in slots}
        if not isinstance(rows := self.rows, Sources):
            return [PromptSample(fetched[prompt], prompt, sample) for prompt, sample in slots]
        names = {prompt: rows.names[rows.of(prompt)] for prompt in fetched}
        limits, sizes = rows.limits, rows.group_sizes
        return [
            PromptSample(fetched[prompt], prompt, sample, name, limits.get(name), sample >= sizes.get(name, sample + 1))
            for prompt, sample in slots
            for name in (names[prompt],)
        ]


class TrainingSteps(PromptDataset):
    """Micro-steps of training, indexed by the items of `GenerationSampler`."""

    def __getitems__(self, step: Any) -> Any:
        rollout_batch, slots = step
        return MicroStep(rollout_batch, None if slots is None else super().__getitems__(slots))


@dataclass(eq=False)
class RowStream(IterableDataset):
    """Prompt samples of a dataset that can only be read forward, repeated without end; each process reads all rows."""

    rows: Any
    algebra: BatchAlgebra
    rank: int

    def _chunks(self, size: int) -> Iterator[dict[int, Any]]:
        numbered = enumerate(map(plain_row, self.rows))
        while chunk := dict(islice(numbered, size)):
            yield chunk

    def _share(self, chunk: dict[int, Any], group: int) -> list[PromptSample]:
        return PromptDataset(chunk).__getitems__(rank_share(list(chunk), group, self.algebra, self.rank))


class EvaluationStream(RowStream):
    """Evaluation batches, once through the rows."""

    def __iter__(self) -> Iterator[list[PromptSample]]:
        for chunk in self._chunks(self.algebra.prompts_per_eval_batch):
            yield self._share(chunk, self.algebra.eval_group)


class TrainingStream(RowStream):
    """Endless micro-steps of training: `max_steps` ends the run, and a resumed run skips those already done."""

    def __iter__(self) -> Iterator[MicroStep]:
        for rollout_batch, samples in enumerate(self.rollout_batches()):
            yield MicroStep(rollout_batch, samples)
            yield from (MicroStep() for _ in range(self.algebra.micro_batches - 1))

    def rollout_batches(self) -> Iterator[list[PromptSample] | None]:
        while self.rows is None:
            yield None  # the trainer chooses prompts when it samples
        left: dict[int, Any] = {}  # rows of the last epoch that did not fill a rollout batch
        for epoch in count():
            if hasattr(self.rows, "set_epoch"):
                self.rows.set_epoch(epoch)  # which shuffles a stream again
            prompts = 0
            for number, row in enumerate(map(plain_row, self.rows)):
                prompts += 1
                left[number] = row
                if len(left) == self.algebra.prompts_per_rollout_batch:
                    yield self._share(left, self.algebra.num_generations)
                    left = {}
            report(check_enough(prompts, self.algebra))  # else one prompt would come twice in a rollout batch


class _EpochLoader(DataLoader):
    """A dataloader that passes the epoch to its sampler; streams count epochs themselves."""

    def set_epoch(self, epoch: int) -> None:
        if isinstance(self.batch_sampler, GenerationSampler):
            self.batch_sampler.set_epoch(epoch)


def train_loader(
    dataset: Any,
    algebra: BatchAlgebra,
    rank: int,
    *,
    shuffle: bool,
    seed: int,
    workers: int = 0,
    context: str | None = None,
    timeout: float = 0,
    choose_late: bool = False,
) -> DataLoader:
    """Micro-steps of training; with `choose_late` the trainer chooses prompts.

    `context` (fork, spawn or forkserver) and `timeout` (in seconds; 0: no limit) are of worker processes.
    """
    if not hasattr(dataset, "__len__"):
        rows = None if choose_late else dataset
        stream = train_stream(rows, algebra, rank, shuffle=shuffle, seed=seed)
        return _loader(stream, batch_size=None, seed=seed)
    sampler = GenerationSampler(len(dataset), algebra, rank, shuffle=shuffle, seed=seed, with_slots=not choose_late)
    workers, steps = 0 if choose_late else workers, TrainingSteps(dataset)
    started: dict[str, Any] = (
        {"num_workers": workers, "multiprocessing_context": context, "timeout": timeout} if workers else {}
    )
    return _loader(steps, batch_sampler=sampler, seed=seed, **started)


def train_stream(dataset: Any, algebra: BatchAlgebra, rank: int, *, shuffle: bool, seed: int) -> TrainingStream:
    rows = dataset.shuffle(seed=seed) if shuffle and hasattr(dataset, "shuffle") else dataset
    return TrainingStream(rows, algebra, rank)


class EvaluationLoader(_EpochLoader):
    """A dataloader of evaluation batches, with their evaluation suite, if any."""

    def __init__(self, *args: Any, suite: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.suite = suite


def eval_loader(dataset: Any, algebra: BatchAlgebra, rank: int, suite: Any = None) -> DataLoader:
    of_suite: dict[str, Any] = {"kind": partial(EvaluationLoader, suite=suite), "seed": 0}
    if not hasattr(dataset, "__len__"):
        return _loader(EvaluationStream(dataset, algebra, rank), batch_size=None, **of_suite)
    rows, size = range(len(dataset)), algebra.prompts_per_eval_batch
    batches = [rows[first : first + size] for first in rows[::size]]  # the last one may be smaller
    shares = [rank_share(prompts, algebra.eval_group, algebra, rank) for prompts in batches]
    return _loader(PromptDataset(dataset), batch_sampler=shares, **of_suite)


def _loader(dataset: Any, *, seed: int, kind: Callable[..., DataLoader] = _EpochLoader, **kwargs: Any) -> DataLoader:
    # Its own generator: reading data must not advance the random state that training resumes from.
    return kind(dataset, collate_fn=_as_is, generator=torch.Generator().manual_seed(seed), **kwargs)


def _as_is(batch: Any) -> Any:
    return batch
