"""Difficulty of prompts, estimated from their rewards, and the chance of sampling each (`PromptHistory.chance`)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from covey.core.stats import Mean, Stat

NEWEST = 0.5  # weight of the newest group in a prompt's running means; high, because the policy changes between groups


class PromptHistory:
    """Running means of the total reward of every prompt, and the chance of sampling it.

    For prompt x, m ← (1 - ½) m + ½ mean_group(R) and q ← (1 - ½) q + ½ mean_group(R²), beginning with the first group
    seen. For rewards of 0 and 1, the variance v = q - m² is p (1 - p): largest for prompts of intermediate difficulty.

        chance(x) = floor + (1 - floor) · v(x) / largest v of any prompt

    Prompts not seen yet have chance 1, and all have while no prompt's rewards have differed. Where steps are rewarded,
    R is the reward of the outcome, and the variance of step rewards within a group is added to the mean of R².
    """

    def __init__(self, rows: int, floor: float):
        self.floor = floor
        self.means = torch.full((rows,), torch.nan, dtype=torch.float64)
        """[rows] running mean reward, the pass rate for rewards of 0 and 1; NaN for prompts not seen yet."""
        self._squares = torch.full((rows,), torch.nan, dtype=torch.float64)
        self._largest = 0.0

    def update(self, prompts: Sequence[int], rewards_PG: Tensor, variances_P: Tensor | None = None) -> None:
        """Add the groups of `prompts`, by row number; NaN are missing rewards, and groups of NaN alone are skipped."""
        if variances_P is None:
            variances_P = torch.full((len(rewards_PG),), torch.nan)
        for row, rewards, of_steps in zip(prompts, rewards_PG.double(), variances_P.double(), strict=True):
            scored = rewards[~rewards.isnan()]
            if not len(scored):
                if of_steps.isnan():
                    continue
                scored = torch.zeros(1, dtype=torch.float64)
            square = scored.square().mean() + of_steps.nan_to_num(0.0)
            newest = NEWEST if self.seen(row) else 1.0
            for running, value in ((self.means, scored.mean()), (self._squares, square)):
                running[row] = newest * value + ((1 - newest) * running[row] if newest < 1 else 0.0)
        self._largest = self._variances().nan_to_num(0.0).max().item()

    def seen(self, row: int) -> bool:
        return not bool(self.means[row].isnan())

    def chance(self, row: int) -> float:
        return self._chances(self._variances(row)).item()

    def stats(self) -> dict[str, Stat]:
        variances = self._variances()
        chances = self._chances(variances[~variances.isnan()])
        return {
            "difficulty/seen_fraction": Mean(len(chances), len(variances)),
            "difficulty/chance": Mean(chances.sum().item(), len(chances)),
            "difficulty/settled_fraction": Mean((chances <= self.floor + 1e-9).sum().item(), len(chances)),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"means": self.means.clone(), "squares": self._squares.clone(), "largest": self._largest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.means, self._squares = state["means"].clone(), state["squares"].clone()
        self._largest = state["largest"]

    def _variances(self, rows: Any = slice(None)) -> Tensor:
        return (self._squares[rows] - self.means[rows].square()).clamp(min=0.0)

    def _chances(self, variances: Tensor) -> Tensor:
        if not self._largest > 0:
            return torch.ones_like(variances)
        return (self.floor + (1 - self.floor) * variances / self._largest).nan_to_num(1.0)
