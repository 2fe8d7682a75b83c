"""Prompt samples: the completions to be sampled, grouped by prompt."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PromptSample:
    """One completion to be sampled.

    Attributes:
        row: the dataset row; `row["prompt"]` is the prompt.
        prompt: the row's number, which seeds the sample.
        sample: index among the prompt's completions, 0 ... G-1.
    """

    row: dict[str, Any]
    prompt: int
    sample: int


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """Samples of one prompt.

    Attributes:
        number: index among the groups of the batch.
        start: index of the first sample in the batch.
        samples: one or more.
        rows: the dataset row of each.
    """

    number: int
    start: int
    samples: list[PromptSample]
    rows: list[dict[str, Any]]
