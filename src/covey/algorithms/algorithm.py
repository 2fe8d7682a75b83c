"""Algorithms as values: advantages, objective and weighting of a method.

`GRPOConfig` and `RLOOConfig` are turned into an `Algorithm` by `covey.algorithms.grpo.algorithm` and
`covey.algorithms.rloo.algorithm`; the trainer knows nothing else about the method it runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from covey.core.credit import CreditMix, Steps
from covey.core.losses import RatioLevel, Surrogate, SurrogateInputs, SurrogateStats, Weighting, mean_over_update
from covey.core.objective import Objective
from covey.runtime.registry import Registry


@dataclass(frozen=True)
class Algorithm:
    """One method of group-relative policy optimisation.

    Attributes:
        name: shown in messages and model cards.
        advantages: (rewards [P, G, F], reward weights [F], KL penalty [P, G] or None) -> advantages [P, G].
        step_advantages: the same for rewards of steps: (the steps of each function that rewards steps, these functions'
            weights [F'], the prompt of each completion [B]) -> the advantages of all steps [S], concatenated over the
            functions.
        mix: weights of the credit of steps and of outcomes in a token's advantage.
        objective: the loss.
        weighting: average of token losses.
        kl_in_reward: the KL penalty is part of the reward (RLOO) rather than of the loss (GRPO).
        beta: weight of the KL penalty.
    """

    name: str
    advantages: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    step_advantages: Callable[[Sequence[Steps], Tensor, Tensor], Tensor]
    mix: CreditMix
    objective: Objective
    weighting: Weighting
    kl_in_reward: bool
    beta: float


@dataclass(frozen=True)
class LossType:
    """A row of the loss table.

    Attributes:
        surrogate: config -> token losses. The config supplies the hyperparameters (epsilon, ...).
        weighting: average of token losses.
        stats: config -> the surrogate's metrics, or None.
        ratio_level: a level that the loss prescribes; None takes `importance_sampling_level` from the config.
        mismatch_in_surrogate: the surrogate applies the engine/trainer mismatch weights itself.
        zero_without_advantage: an advantage of 0 makes the token loss 0, so such rollouts need not be run.
        credits_tokens: each token is trained with its own advantage, which rewards of steps need. None: determined by
            the ratio level.
        reads: options of the config that the surrogate reads, so that others are pointed out; None: it may read any.
    """

    surrogate: Callable[[Any], Surrogate]
    weighting: Weighting = mean_over_update
    stats: Callable[[Any], SurrogateStats] | None = None
    ratio_level: RatioLevel | None = None
    mismatch_in_surrogate: bool = False
    zero_without_advantage: bool = True
    credits_tokens: bool | None = None
    reads: frozenset[str] | None = None


LOSS_TYPES: Registry[LossType] = Registry("loss_type")
"""Every `loss_type` by name: `covey.algorithms.grpo` and `.rloo` fill it, `register_loss` extends it."""


def register_loss(
    name: str,
    surrogate: Surrogate,
    weighting: Weighting = mean_over_update,
    *,
    zero_without_advantage: bool = False,
) -> Surrogate:
    """Register a loss under `loss_type=name`.

    Args:
        name: value of `loss_type` in a config.
        surrogate: `SurrogateInputs -> token losses [N]`.
        weighting: an average of `covey.core.losses`, or another function of `BatchCounts`; the token mean by default.
        zero_without_advantage: promise that a token with advantage 0 has loss 0, so that rollouts without a signal
            may be skipped, as with the built-in losses.

    Returns:
        `surrogate`.

    Raises:
        ValueError: the name is taken. In training, at the first pass: it returns no token losses [N] with a gradient.
    """
    row = LossType(
        lambda config: _checked_once(name, surrogate), weighting, zero_without_advantage=zero_without_advantage
    )
    LOSS_TYPES.register(name, row)
    return surrogate


def _checked_once(name: str, surrogate: Surrogate) -> Surrogate:
    """The surrogate; its first result with a gradient is checked."""
    checked = False

    def checking(x: SurrogateInputs) -> Tensor:
        nonlocal checked
        losses = surrogate(x)
        if not checked and torch.is_grad_enabled() and x.logprobs.requires_grad:
            checked = True
            given = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
            if not isinstance(losses, Tensor) or losses.shape != x.logprobs.shape:
                raise ValueError(
                    f"loss_type={name!r} returned {given}; it must return the loss of each token, shape"
                    f" {list(x.logprobs.shape)}. The trainer averages them itself."
                )
            if not losses.requires_grad:
                raise ValueError(
                    f"loss_type={name!r} returned losses without a gradient, so nothing would be trained. Compute them"
                    " from x.ratio, x.log_ratio or x.logprobs, without `detach` or `torch.no_grad`."
                )
        return losses

    return checking
