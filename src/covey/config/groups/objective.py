"""Fields about the objective: rewards, loss, KL penalty, entropy."""
# ruff: noqa: RUF009 - `described` makes a dataclass field

import math
from dataclasses import dataclass

from covey.config.groups.describe import described
from covey.core.credit import COMPARED_WITH
from covey.core.losses import KL_ESTIMATORS, RATIO_LEVELS


@dataclass
class RewardFields:
    """From reward functions to advantages."""

    reward_weights: list[float] | None = described(
        None, "Weight of each reward function, in their order. Unset: all 1."
    )
    reward_timeout: float = described(
        300.0,
        "Seconds after which a reward function that has not answered counts as failed.",
        gt=0,
        advice="It is in seconds; 300 is the default.",
    )
    stream_rewards: bool = described(
        False,
        "Score each group of completions as soon as it is sampled, while others still are: functions are called group "
        "by group, on threads of their own. Off: each is called once per rollout batch, with all completions. "
        "Functions that are marked `per_completion` score every rollout when it ends in either case.",
    )
    multi_objective_aggregation: str = described(
        "sum_then_normalize",
        "`sum_then_normalize`: weighted sum of rewards, then advantages; `normalize_then_sum`: each reward becomes "
        "advantages of its own first (GDPO).",
        choices=("sum_then_normalize", "normalize_then_sum"),
    )
    scale_rewards: str = described(
        "group",
        "Divisor of advantages: the standard deviation of the `group`, of the whole `batch`, or `none`. True means "
        "`group`, False `none`.",
        choices=("group", "batch", "none"),
    )
    process_weight: float = described(
        1.0,
        "Weight of the advantages of steps, where reward functions reward steps or turns.",
        ge=0,
        lt=math.inf,
        advice="1.0 is the default; 0 leaves that part out.",
    )
    outcome_weight: float = described(
        1.0,
        "Weight of the advantages of whole completions.",
        ge=0,
        lt=math.inf,
        advice="1.0 is the default; 0 leaves that part out.",
    )
    step_discount: float = described(
        1.0,
        "Discount of credit for steps: what a step earns counts this much for the tokens of the step before it, the "
        "square of it for those of the one before that, and so on.",
        ge=0,
        le=1,
        advice="1.0 counts every later step in full.",
    )
    step_baseline: str = described(
        "group",
        "Steps that a step's reward is compared with: `group`, all steps of the group; `turn`, those of the same "
        "number (all first ones, all second ones).",
        choices=COMPARED_WITH,
    )


@dataclass
class KLFields:
    """The KL penalty and its reference model."""

    beta: float = described(
        0.0,
        "Weight of the KL penalty towards the reference model; 0 means that no reference model is loaded.",
        ge=0,
        lt=math.inf,
        advice="0 switches the KL penalty off; 0.001 to 0.1 are usual.",
    )
    kl_estimator: str = described(
        "k3",
        "Estimator of the KL divergence: `k1` (log ratio), `k2` (half its square), `k3` (unbiased, positive).",
        choices=tuple(KL_ESTIMATORS),
    )
    use_bias_correction_kl: bool = described(
        True, "Multiply the KL term by the importance ratio, so that its gradient is unbiased off-policy."
    )
    sync_ref_model: bool = described(False, "Move the reference model towards the policy from time to time (TR-DPO).")
    ref_model_mixup_alpha: float = described(
        0.6,
        "With `sync_ref_model`: reference = (1 - alpha) * reference + alpha * policy.",
        gt=0,
        le=1,
        advice="0.6 is usual.",
    )
    ref_model_sync_steps: int = described(512, "With `sync_ref_model`: updates between two moves.", ge=1)


@dataclass
class LossFields:
    """The surrogate, its ratio and its average."""

    loss_type: str = described(
        "dapo",
        "Loss: grpo, bnpo, dr_grpo, dapo, cispo, sapo, luspo, vespo, gmpo, or one registered with "
        "`covey.algorithms.register_loss`.",
    )
    epsilon: float = described(0.2, "Clipping: how far below 1 the importance ratio may fall.")
    epsilon_high: float | None = described(
        None,
        "Clipping: how far above 1 the importance ratio may rise. Unset: the same as `epsilon`. With cispo it is the "
        "largest ratio itself; unset: 5.",
        ge=0,
        advice="0.2 to 0.28 are usual; with cispo 5.",
    )
    delta: float | None = described(
        None, "Largest ratio for negative advantages (two-sided clipping, INTELLECT-2); unset: no bound."
    )
    importance_sampling_level: str = described(
        "token",
        "Importance ratio of each `token`, of the whole `sequence` (GSPO), or `sequence_token` (GSPO-token).",
        choices=tuple(RATIO_LEVELS),
    )
    sapo_temperature_neg: float = described(1.05, "sapo: how quickly the gate closes for negative advantages.")
    sapo_temperature_pos: float = described(1.0, "sapo: how quickly the gate closes for positive advantages.")
    vespo_k_pos: float = described(2.0, "vespo: exponent of the sequence weight, positive advantages.")
    vespo_lambda_pos: float = described(3.0, "vespo: decay of the sequence weight, positive advantages.")
    vespo_k_neg: float = described(3.0, "vespo: exponent of the sequence weight, negative advantages.")
    vespo_lambda_neg: float = described(2.0, "vespo: decay of the sequence weight, negative advantages.")
    mask_truncated_completions: bool = described(
        False, "Leave completions that reached the length limit out of the loss (DAPO)."
    )
    off_policy_mask_threshold: float | None = described(
        None,
        "Leave out completions with a negative advantage whose mean log-ratio between the sampling and the current "
        "policy exceeds this (DeepSeek-V3.2); unset keeps all.",
        ge=0,
        advice="0.1 to 1 are usual.",
    )
    top_entropy_quantile: float = described(
        1.0,
        "Train only on this share of the tokens, those of highest entropy; 1 trains on all.",
        gt=0,
        le=1,
        advice="1.0 trains on all tokens, 0.2 on a fifth of them.",
    )


@dataclass
class EntropyFields:
    """The entropy bonus."""

    entropy_coef: float = described(
        0.0, "Weight of the entropy bonus; 0 switches it off.", ge=0, advice="Below 0 it would punish exploration."
    )
    use_adaptive_entropy: bool = described(False, "Move the weight of the bonus so that entropy stays near its target.")
    entropy_coef_min: float = described(0.0, "Adaptive: smallest weight.", ge=0)
    entropy_coef_max: float = described(1.0, "Adaptive: largest weight.")
    entropy_coef_delta: float = described(0.005, "Adaptive: how much the weight moves at each update.")
    entropy_target: float = described(0.2, "Adaptive: the entropy, in nats per token, to stay above.")
