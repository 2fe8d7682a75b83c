"""The entropy bonus's coefficient, fixed or adaptive, and the quantile below which tokens are left out of the loss."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class EntropyController:
    """Coefficient of the entropy bonus in the next step.

    Adaptive (Skywork-OR1, arXiv 2505.22312 §4): the coefficient grows by `delta` after a step whose entropy was at or
    below the target and shrinks by as much after any other; it acts only while the entropy is at or below the target.

    Attributes:
        coef: current coefficient.
        adaptive: true if it changes.
        low, high: its bounds.
        delta: change per step.
        target: nats per token.
        last_entropy: mean entropy of the last optimizer step, or None before the first.
    """

    coef: float
    adaptive: bool = False
    low: float = 0.0
    high: float = 1.0
    delta: float = 0.005
    target: float = 0.2
    last_entropy: float | None = None

    @property
    def enabled(self) -> bool:
        """The loss has an entropy term."""
        return self.adaptive or self.coef != 0.0

    @property
    def effective(self) -> float:
        """The coefficient of the coming step."""
        if self.adaptive and (self.last_entropy is None or self.last_entropy > self.target):
            return 0.0
        return self.coef

    def observe(self, entropy: float) -> None:
        """Update the coefficient with an optimizer step's mean entropy."""
        self.last_entropy = entropy
        if self.adaptive:
            step = self.delta if entropy <= self.target else -self.delta
            self.coef = min(max(self.coef + step, self.low), self.high)

    def state_dict(self) -> dict[str, Any]:
        """Values that change during training."""
        return {"coef": self.coef, "last_entropy": self.last_entropy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` stopped."""
        self.coef, self.last_entropy = state["coef"], state["last_entropy"]


def exact_quantile(values: Tensor, q: float) -> float:
    """The q-quantile with linear interpolation, of any number of values (torch.quantile stops at 2^24)."""
    if not len(values):
        return 0.0
    ordered = values.sort().values
    place = q * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return torch.lerp(ordered[low], ordered[high], place - low).item()
