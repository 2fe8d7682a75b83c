"""Prompts of any generation, for async rollouts that are ahead of the dataloader.

Sources give prompts in the order of the dataloader, which then only marks the beginnings of generations.
"""

from typing import Any, Protocol

from covey.config.algebra import BatchAlgebra
from covey.data.dynamic_sampling import PromptChooser
from covey.data.sampler import GenerationSampler, PromptDataset, Slot, train_stream
from covey.rollout.collector import PromptSample


class PromptSource(Protocol):
    """Source of prompt samples; `draws` is called once for each generation, in order."""

    def draws(self, generation: int) -> list[PromptSample]:
        """This process's samples of a generation."""
        ...

    def again(self, generation: int, slots: list[Slot]) -> list[PromptSample]:
        """The samples of a generation that had these slots in the checkpoint."""
        ...


class IndexedPrompts:
    """Prompts of a dataset with a length, in the order of its sampler."""

    def __init__(self, dataset: Any, sampler: GenerationSampler):
        self._rows = PromptDataset(dataset)
        self._sampler = sampler

    def draws(self, generation: int) -> list[PromptSample]:
        return self._rows.__getitems__(self._sampler.slots(generation))

    def again(self, generation: int, slots: list[Slot]) -> list[PromptSample]:
        return self._rows.__getitems__(slots)


class ChosenPrompts:
    """Prompts of a dataset with a length, selected by difficulty."""

    def __init__(self, dataset: Any, chooser: PromptChooser):
        self._rows = PromptDataset(dataset)
        self._chooser = chooser

    def draws(self, generation: int) -> list[PromptSample]:
        """This process's samples of the next generation. Collective."""
        return self._chooser.draw()

    def again(self, generation: int, slots: list[Slot]) -> list[PromptSample]:
        return self._rows.__getitems__(slots)


class StreamedPrompts:
    """Prompts of a dataset that can only be read forward."""

    def __init__(self, dataset: Any, algebra: BatchAlgebra, rank: int, *, shuffle: bool, seed: int):
        self._generations = enumerate(train_stream(dataset, algebra, rank, shuffle=shuffle, seed=seed).generations())

    def draws(self, generation: int) -> list[PromptSample]:
        """This process's samples of a generation; earlier ones are skipped."""
        samples = next(samples for number, samples in self._generations if number >= generation)
        assert samples is not None, "this stream is read"
        return samples

    def again(self, generation: int, slots: list[Slot]) -> list[PromptSample]:
        """The same samples, since a stream is always read in the same order."""
        return self.draws(generation)


def prompt_source(
    dataset: Any, chooser: PromptChooser | None, algebra: BatchAlgebra, rank: int, *, shuffle: bool, seed: int
) -> PromptSource:
    """The source of prompts of a training dataset."""
    if not hasattr(dataset, "__len__"):
        return StreamedPrompts(dataset, algebra, rank, shuffle=shuffle, seed=seed)
    if chooser is not None and chooser.history is not None:
        return ChosenPrompts(dataset, chooser)
    return IndexedPrompts(dataset, GenerationSampler(len(dataset), algebra, rank, shuffle=shuffle, seed=seed))
