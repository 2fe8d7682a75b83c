"""Algorithms as values: advantages, objective and weighting of a method.

`GRPOConfig` and `RLOOConfig` are turned into an `Algorithm` by `covey.algorithms.grpo.algorithm` and
`covey.algorithms.rloo.algorithm`; the trainer knows nothing else about the method it runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from covey.core.credit import CreditMix, Steps
from covey.core.losses import RatioLevel, Surrogate, SurrogateStats, Weighting, mean_over_update
from covey.core.objective import Objective
from covey.runtime.registry import Registry


@dataclass(frozen=True)
class Algorithm:
    """One method of group-relative policy optimisation."""

    name: str  # shown in messages and model cards
    # (rewards [P, G, F], reward weights [F], KL penalty [P, G] or None, lengths of completions [P, G]) -> advantages
    # [P, G]
    advantages: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
    # The same for rewards of steps: (the steps of each function that rewards steps, these functions' weights [F'], the
    # prompt of each completion [B]) -> the advantages of all steps [S], concatenated over the functions.
    step_advantages: Callable[[Sequence[Steps], Tensor, Tensor], Tensor]
    mix: CreditMix  # weights of the credit of steps and of outcomes in a token's advantage
    objective: Objective  # the loss
    weighting: Weighting  # average of token losses
    kl_in_reward: bool  # the KL penalty is part of the reward (RLOO) rather than of the loss (GRPO)
    beta: float  # weight of the KL penalty
    token_baseline: bool = False  # outcomes are compared again at each token, by energies (`optimal_token_baseline`)


@dataclass(frozen=True)
class LossType:
    """A row of the loss table."""

    surrogate: Callable[[Any], Surrogate]  # config -> token losses; the config has the hyperparameters (epsilon, ...)
    weighting: Weighting = mean_over_update  # average of token losses
    stats: Callable[[Any], SurrogateStats] | None = None  # config -> the surrogate's metrics
    ratio_level: RatioLevel | None = None  # prescribed by the loss; None: `importance_sampling_level` of the config
    mismatch_in_surrogate: bool = False  # the surrogate applies the engine/trainer mismatch weights itself
    zero_without_advantage: bool = True  # advantage 0 makes the token loss 0, so such rollouts need not be run
    credits_tokens: bool | None = None  # a token has its own advantage, as rewards of steps need; None: by ratio level
    reads: frozenset[str] | None = None  # options that are read; others are pointed out. None: perhaps any
    needs_entropies: bool = False  # the surrogate reads the entropies of tokens
    choice: Callable[[Any], Any] | None = None  # config -> `Objective.choice`


LOSS_TYPES: Registry[LossType] = Registry("loss_type")
"""Every `loss_type` by name: `covey.algorithms.grpo` and `.rloo` fill it, `register_loss` extends it."""
