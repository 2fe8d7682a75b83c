"""What is to be sampled: one completion after another, siblings next to each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Draw:
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
class Siblings:
    """Draws of one prompt, next to each other.

    Attributes:
        number: among the groups of the batch.
        place: of the first among the draws of the batch.
        draws: one or more.
    """

    number: int
    place: int
    draws: list[Draw]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The dataset row of each."""
        return [draw.row for draw in self.draws]


def siblings(draws: Sequence[Draw]) -> list[Siblings]:
    """Runs of draws of the same prompt; a prompt drawn again (sample 0 once more) starts a new run."""
    runs: list[Siblings] = []
    for place, draw in enumerate(draws):
        last = runs[-1].draws[-1] if runs else None
        if last is not None and last.prompt == draw.prompt and last.sample < draw.sample:
            runs[-1].draws.append(draw)
        else:
            runs.append(Siblings(len(runs), place, [draw]))
    return runs
