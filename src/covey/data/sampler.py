"""Which prompts a generation draws, and which share of them each process samples.

A dataloader step is one micro-batch of Hugging Face's training loop. The first step of a generation carries its
draws; the others carry nothing, because the completions are already waiting in the experience buffer. Every process
sees the same permutation and takes its own slice, so the data does not depend on accelerate's sharding.
"""

import warnings
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from covey.config.algebra import BatchAlgebra
from covey.rollout.collector import PromptSample

Slot = tuple[int, int]
"""(row of the dataset, which of its completions)."""


def start_of(generation: int) -> PromptSample:
    """Draws nothing: says that a generation begins, by its number since the run began, and leaves its prompts open."""
    return PromptSample({}, -1, generation)


def started(draws: Sequence[PromptSample]) -> int | None:
    """The number of the generation that begins, or None where the draws name their prompts themselves."""
    return draws[0].sample if draws and draws[0].prompt < 0 else None


class GenerationSampler:
    """Batches of slots for one process, generation by generation.

    Args:
        rows: rows of the dataset.
        algebra: the run's batch sizes.
        rank: this process.
        shuffle: draw prompts in a new random order each epoch.
        seed: of that order.

    Raises:
        ValueError: the dataset has fewer prompts than one generation needs.
    """

    def __init__(self, rows: int, algebra: BatchAlgebra, rank: int, *, shuffle: bool, seed: int):
        check_enough(rows, algebra)
        self.rows = rows
        self.algebra = algebra
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.generations = rows // algebra.prompts_per_generation
        """Generations of one epoch; prompts that do not fill one are left for another epoch's order."""
        self._order = -1, torch.empty(0, dtype=torch.long)

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of this epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Micro-batches of one epoch."""
        return self.generations * self.algebra.micro_batches

    def __iter__(self) -> Iterator[list[Slot]]:
        for generation in self.numbers():
            yield self.slots(generation)
            yield from ([] for _ in range(self.algebra.micro_batches - 1))

    def numbers(self) -> range:
        """The generations of this epoch, by their numbers since the run began."""
        return range(self.epoch * self.generations, (self.epoch + 1) * self.generations)

    def slots(self, generation: int) -> list[Slot]:
        """What this process draws for any generation, also of an epoch to come."""
        epoch, place = divmod(generation, self.generations)
        if self._order[0] != epoch:
            self._order = epoch, self._shuffled(epoch)
        count = self.algebra.prompts_per_generation
        prompts = self._order[1][place * count : (place + 1) * count].tolist()
        return rank_share(prompts, self.algebra.num_generations, self.algebra, self.rank)

    def _shuffled(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.rows)
        return torch.randperm(self.rows, generator=torch.Generator().manual_seed(self.seed + epoch))


def check_enough(rows: int, algebra: BatchAlgebra) -> None:
    """Make sure that a training dataset fills at least one generation.

    Raises:
        ValueError: it has fewer rows than one generation draws prompts.
    """
    if rows < algebra.prompts_per_generation:
        raise ValueError(
            f"the training dataset has {rows} prompt(s) but one generation draws {algebra.prompts_per_generation}"
            f" (generation_batch_size={algebra.generation_batch_size} / num_generations="
            f"{algebra.num_generations}). Give more prompts, a smaller generation_batch_size, or a larger"
            " num_generations."
        )


def rank_share(prompts: Sequence[int], group: int, algebra: BatchAlgebra, rank: int) -> list[Slot]:
    """The slots of one process: an equal, consecutive share of every prompt's `group` completions.

    Where the slots do not divide (a last evaluation batch), earlier processes take one more.
    """
    slots = [(prompt, sample) for prompt in prompts for sample in range(group)]
    return slots[share_of(len(slots), algebra, rank)]


def share_of(count: int, algebra: BatchAlgebra, rank: int) -> slice:
    """Which of `count` slots in a row belong to one process."""
    share, extra = divmod(count, algebra.world_size)
    start = rank * share + min(rank, extra)
    return slice(start, start + share + (rank < extra))


class EvaluationSampler:
    """Batches of slots for one process that go through a dataset once, in order, the last batch being what is left.

    Args:
        rows: rows of the dataset.
        algebra: the run's batch sizes.
        rank: this process.
    """

    def __init__(self, rows: int, algebra: BatchAlgebra, rank: int):
        self.rows = rows
        self.algebra = algebra
        self.rank = rank

    def __len__(self) -> int:
        return -(-self.rows // self.algebra.prompts_per_eval_batch)

    def __iter__(self) -> Iterator[list[Slot]]:
        for first in range(0, self.rows, self.algebra.prompts_per_eval_batch):
            prompts = range(first, min(first + self.algebra.prompts_per_eval_batch, self.rows))
            yield rank_share(prompts, self.algebra.eval_group, self.algebra, self.rank)


class DrawDataset(Dataset):
    """Looks slots up in a dataset of rows; each row is fetched once per batch."""

    def __init__(self, rows: Any):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, slots: list[Slot]) -> list[PromptSample]:
        """Draws for a batch of slots, which may be empty."""
        fetched = {prompt: self.rows[prompt] for prompt, _ in slots}
        return [PromptSample(fetched[prompt], prompt, sample) for prompt, sample in slots]

    def __getitem__(self, slot: Slot) -> PromptSample:
        return self.__getitems__([slot])[0]


class StartSampler:
    """In place of a sampler's slots: the number of each generation, on the step with which it begins.

    Args:
        sampler: whose steps these are.
    """

    def __init__(self, sampler: GenerationSampler):
        self._sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch."""
        self._sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[list[int]]:
        for generation in self._sampler.numbers():
            yield [generation]
            yield from ([] for _ in range(self._sampler.algebra.micro_batches - 1))


class GenerationStarts(Dataset):
    """In place of draws: one mark on the step with which a generation begins.

    The trainer chooses the prompts, when it samples: knowing the rewards of every earlier generation, or while earlier
    ones are still trained on.
    """

    def __init__(self, rows: int):
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitems__(self, generations: list[int]) -> list[PromptSample]:
        """The mark of a generation, or nothing."""
        return [start_of(generation) for generation in generations]

    def __getitem__(self, generation: int) -> PromptSample:
        return start_of(generation)


class StreamStarts(IterableDataset):
    """The same for a dataset without a length: marks without end."""

    def __init__(self, algebra: BatchAlgebra):
        self.algebra = algebra

    def __iter__(self) -> Iterator[list[PromptSample]]:
        for generation in count():
            yield [start_of(generation)]
            yield from ([] for _ in range(self.algebra.micro_batches - 1))


class DrawStream(IterableDataset):
    """The same steps from a dataset that can only be read forward. Every process reads all of it and keeps its share.

    Args:
        rows: an iterable of rows that can be iterated anew.
        algebra: the run's batch sizes.
        rank: this process.
        training: whether a generation is followed by the empty steps that train on it.
    """

    def __init__(self, rows: Any, algebra: BatchAlgebra, rank: int, *, training: bool):
        self.rows = rows
        self.algebra = algebra
        self.rank = rank
        self.training = training

    def __iter__(self) -> Iterator[list[PromptSample]]:
        return self._training_steps() if self.training else self._evaluation_batches()

    def _training_steps(self) -> Iterator[list[PromptSample]]:
        """Pass after pass without end: `max_steps` ends training, and skipping finds the place of a resumed run.

        Raises:
            ValueError: the stream has fewer prompts than one generation needs.
        """
        for number in count():
            if hasattr(self.rows, "set_epoch"):
                self.rows.set_epoch(number)  # a stream that shuffles does so anew
            prompts = 0
            for chunk in self._chunks(self.algebra.prompts_per_generation):
                prompts += len(chunk)
                if len(chunk) == self.algebra.prompts_per_generation:
                    yield self._share(chunk, self.algebra.num_generations)
                    yield from ([] for _ in range(self.algebra.micro_batches - 1))
            check_enough(prompts, self.algebra)  # else there would be pass after pass without a step

    def _evaluation_batches(self) -> Iterator[list[PromptSample]]:
        for chunk in self._chunks(self.algebra.prompts_per_eval_batch):
            yield self._share(chunk, self.algebra.eval_group)

    def _chunks(self, size: int) -> Iterator[dict[int, Any]]:
        numbered = enumerate(self.rows)
        while chunk := dict(islice(numbered, size)):
            yield chunk

    def _share(self, chunk: dict[int, Any], group: int) -> list[PromptSample]:
        slots = rank_share(list(chunk), group, self.algebra, self.rank)
        return [PromptSample(chunk[prompt], prompt, sample) for prompt, sample in slots]


class _EpochLoader(DataLoader):
    """A dataloader that passes the epoch on, which is all that the training loop asks of one."""

    def set_epoch(self, epoch: int) -> None:
        part: Any
        for part in (self.batch_sampler, self.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)


def train_loader(
    dataset: Any,
    algebra: BatchAlgebra,
    rank: int,
    *,
    shuffle: bool,
    seed: int,
    workers: int = 0,
    timeout: float = 0,
    starts: bool = False,
) -> DataLoader:
    """Training steps over a dataset with or without a length; with `starts` they only mark where generations begin.

    Worker processes have `timeout` seconds for each batch; 0 waits for ever.
    """
    if not hasattr(dataset, "__len__"):
        if workers:
            warnings.warn(
                f"`dataloader_num_workers={workers}` has no effect: a dataset without a length is read forward by the"
                " process that trains, because every worker would have to read all of it.",
                stacklevel=2,
            )
        if starts:
            return _loader(StreamStarts(algebra), batch_size=None, seed=seed)
        return _loader(train_stream(dataset, algebra, rank, shuffle=shuffle, seed=seed), batch_size=None, seed=seed)
    sampler = GenerationSampler(len(dataset), algebra, rank, shuffle=shuffle, seed=seed)
    if starts:
        return _loader(GenerationStarts(len(dataset)), batch_sampler=StartSampler(sampler), seed=seed)
    return _loader(
        DrawDataset(dataset), batch_sampler=sampler, num_workers=workers, seed=seed, timeout=timeout if workers else 0
    )


def train_stream(dataset: Any, algebra: BatchAlgebra, rank: int, *, shuffle: bool, seed: int) -> DrawStream:
    """The training steps of a dataset without a length, shuffled where it can be."""
    rows = dataset.shuffle(seed=seed) if shuffle and hasattr(dataset, "shuffle") else dataset
    return DrawStream(rows, algebra, rank, training=True)


def eval_loader(dataset: Any, algebra: BatchAlgebra, rank: int) -> DataLoader:
    """Evaluation batches over a dataset with or without a length."""
    if not hasattr(dataset, "__len__"):
        return _loader(DrawStream(dataset, algebra, rank, training=False), batch_size=None, seed=0)
    return _loader(DrawDataset(dataset), batch_sampler=EvaluationSampler(len(dataset), algebra, rank), seed=0)


def _loader(dataset: Any, *, seed: int, **kwargs: Any) -> DataLoader:
    # A generator of its own: reading data must not advance the random state that training resumes from.
    return _EpochLoader(dataset, collate_fn=_as_is, generator=torch.Generator().manual_seed(seed), **kwargs)


def _as_is(draws: list[PromptSample]) -> list[PromptSample]:
    return draws
