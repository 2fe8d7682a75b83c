"""The prompts of any generation, also of one that the dataloader has not come to yet.

A dataloader is iterated by Hugging Face's training loop, one optimizer step at a time. Whoever samples ahead of it
takes the prompts from here, in the order in which the loader would have drawn them, while the loader only marks where
generations begin. A source has `draws(generation)`, called once for each generation in order, and
`again(generation, slots)`, the same draws once more when a run is resumed. Not here: when that happens
(`covey.trainer.async_rollouts`).
"""

from typing import Any, Protocol

from covey.config.algebra import BatchAlgebra
from covey.data.dynamic_sampling import PromptChooser
from covey.data.sampler import GenerationSampler, PromptDataset, Slot, train_stream
from covey.rollout.collector import PromptSample


class PromptSource(Protocol):
    """Where a generation's draws come from."""

    def draws(self, generation: int) -> list[PromptSample]:
        """This process's draws for a generation."""
        ...

    def again(self, generation: int, slots: list[Slot]) -> list[PromptSample]:
        """The draws of a generation that had these slots when the checkpoint was made."""
        ...


class IndexedPrompts:
    """Of a dataset with a length, in the order of its sampler."""

    def __init__(self, dataset: Any, sampler: GenerationSampler):
        self._rows = PromptDataset(dataset)
        self._sampler = sampler

    def draws(self, generation: int) -> list[PromptSample]:
        """This process's draws for a generation."""
        return self._rows.__getitems__(self._sampler.slots(generation))

    def again(self, generation: int, slots: list[Slot]) -> list[PromptSample]:
        """The draws of these slots."""
        return self._rows.__getitems__(slots)


class ChosenPrompts:
    """Of a dataset with a length, chosen by difficulty when they are drawn."""

    def __init__(self, dataset: Any, chooser: PromptChooser):
        self._rows = PromptDataset(dataset)
        self._chooser = chooser

    def draws(self, generation: int) -> list[PromptSample]:
        """This process's draws for the next generation. All processes draw alike."""
        return self._chooser.draw()

    def again(self, generation: int, slots: list[Slot]) -> list[PromptSample]:
        """The draws of these slots."""
        return self._rows.__getitems__(slots)


class StreamedPrompts:
    """Of a dataset that can only be read forward."""

    def __init__(self, dataset: Any, algebra: BatchAlgebra, rank: int, *, shuffle: bool, seed: int):
        self._generations = enumerate(train_stream(dataset, algebra, rank, shuffle=shuffle, seed=seed).generations())

    def draws(self, generation: int) -> list[PromptSample]:
        """This process's draws for a generation; those before it are read and left out."""
        samples = next(samples for number, samples in self._generations if number >= generation)
        assert samples is not None, "this stream is read"
        return samples

    def again(self, generation: int, slots: list[Slot]) -> list[PromptSample]:
        """The same, since a stream always reads alike."""
        return self.draws(generation)


def prompt_source(
    dataset: Any, chooser: PromptChooser | None, algebra: BatchAlgebra, rank: int, *, shuffle: bool, seed: int
) -> PromptSource:
    """Where the prompts of a training dataset come from."""
    if not hasattr(dataset, "__len__"):
        return StreamedPrompts(dataset, algebra, rank, shuffle=shuffle, seed=seed)
    if chooser is not None and chooser.history is not None:
        return ChosenPrompts(dataset, chooser)
    return IndexedPrompts(dataset, GenerationSampler(len(dataset), algebra, rank, shuffle=shuffle, seed=seed))
