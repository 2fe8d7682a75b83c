"""Algorithms as values: advantages, objective and weighting of a method.

`GRPOConfig` and `RLOOConfig` are turned into an `Algorithm` by `covey.algorithms.grpo.algorithm` and
`covey.algorithms.rloo.algorithm`; the trainer knows nothing else about the method it runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from covey.algorithms.comparison import RolloutComparison
from covey.core.credit import CreditMix, Steps
from covey.core.losses import RatioLevel, Surrogate, SurrogateStats, Weighting, mean_over_update
from covey.core.objective import Objective
from covey.runtime.registry import Registry


class Members(NamedTuple):
    """Completions that are compared with each other; smaller subgroups are padded: 0 tokens, role and game -1."""

    lengths: Tensor  # [P, G] tokens of each
    roles: Tensor  # [P, G] int64, index into `role_names`
    games: Tensor  # [P, G] int64, number of the game in its prompt
    role_names: tuple[str, ...] = ("",)  # "": no role


@dataclass(frozen=True)
class Algorithm:
    """One method of group-relative policy optimisation.

    Attributes:
        name: shown in messages and model cards.
        totals: (rewards [..., F], reward weights [F], KL divergence [...] or None) -> total rewards [...], NaN where
            no function gave a reward.
        advantages: (rewards [P, G, F], reward weights [F], KL divergence [P, G] or None) -> advantages [P, G], or
            [P, G, T] where each token has its own. With `reads_members` it has a fourth argument, `Members`.
        step_advantages: the same for rewards of steps: (the steps of each function that rewards steps, these functions'
            weights [F'], the subgroup of each completion [B]) -> the advantages of all steps [S], concatenated over the
            functions.
        mix: weights of the credit of steps and of outcomes in a token's advantage.
        objective: the loss.
        weighting: average of token losses.
        kl_in_reward: the KL penalty is part of the reward (RLOO) rather than of the loss (GRPO).
        beta: weight of the KL penalty.
        reads_members: `advantages` reads the lengths, roles and games of completions.
        token_baseline: outcomes are compared again at each token, weighted by energies (`optimal_token_baseline`).
        comparison: which completions of a prompt are compared with each other.
    """

    name: str
    totals: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    advantages: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    step_advantages: Callable[[Sequence[Steps], Tensor, Tensor], Tensor]
    mix: CreditMix
    objective: Objective
    weighting: Weighting
    kl_in_reward: bool
    beta: float
    reads_members: bool = False
    token_baseline: bool = False
    comparison: RolloutComparison = field(default_factory=RolloutComparison)


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
        credits_tokens: each token has an advantage of its own, as rewards of steps need. None: true unless the ratio
            level is "sequence".
        reads: options of the config that the surrogate reads, so that a run can warn of others that are set and have
            no effect; None: it may read any.
        needs_entropies: the surrogate reads the entropies of tokens.
        choice: config -> `Objective.choice`, or None.
    """

    surrogate: Callable[[Any], Surrogate]
    weighting: Weighting = mean_over_update
    stats: Callable[[Any], SurrogateStats] | None = None
    ratio_level: RatioLevel | None = None
    mismatch_in_surrogate: bool = False
    zero_without_advantage: bool = True
    credits_tokens: bool | None = None
    reads: frozenset[str] | None = None
    needs_entropies: bool = False
    choice: Callable[[Any], Any] | None = None


LOSS_TYPES: Registry[LossType] = Registry("loss_type")
"""Every `loss_type` by name: `covey.algorithms.grpo` and `.rloo` fill it, `register_loss` extends it."""
