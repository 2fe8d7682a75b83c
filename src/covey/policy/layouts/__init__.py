"""How the ragged tokens of a batch are laid out for one forward pass.

A layout turns prompts and completions into model inputs and says, for every completion token, which hidden state
predicts it. Adding one is a function of this signature and a row in `LAYOUTS`.
"""

from collections.abc import Callable

from covey.core.batch import TrainBatch
from covey.policy.layouts.inputs import ModelInputs
from covey.policy.layouts.packed import packed
from covey.policy.layouts.padded import padded
from covey.policy.layouts.shared_prefix import shared_prefix

Layout = Callable[[TrainBatch, int], ModelInputs]
"""(batch, pad token id) -> model inputs."""

LAYOUTS: dict[str, Layout] = {"shared_prefix": shared_prefix, "packed": packed, "padded": padded}
"""Fastest first; the last one suits every model."""

__all__ = ["LAYOUTS", "Layout", "ModelInputs"]
