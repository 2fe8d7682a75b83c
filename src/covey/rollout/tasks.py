"""What is to be sampled: one completion after another, siblings next to each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PromptSample:
    """One completion to be sampled.

    Attributes:
        row: the dataset row; `row["prompt"]` is the prompt.
        prompt: the row's number, which seeds the sample.
        sample: which of the prompt's completions this is, 0 ... G-1.
    """

    row: dict[str, Any]
    prompt: int
    sample: int


@dataclass(frozen=True)
class SampleGroup:
    """Draws of one prompt, next to each other.

    Attributes:
        number: among the groups of the batch.
        place: of the first among the draws of the batch.
        draws: one or more.
    """

    number: int
    place: int
    draws: list[PromptSample]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The dataset row of each."""
        return [draw.row for draw in self.draws]


def sample_groups(draws: Sequence[PromptSample]) -> list[SampleGroup]:
    """Runs of draws of the same prompt; a prompt drawn again (sample 0 once more) starts a new run."""
    runs: list[SampleGroup] = []
    for place, draw in enumerate(draws):
        last = runs[-1].draws[-1] if runs else None
        if last is not None and last.prompt == draw.prompt and last.sample < draw.sample:
            runs[-1].draws.append(draw)
        else:
            runs.append(SampleGroup(len(runs), place, [draw]))
    return runs
