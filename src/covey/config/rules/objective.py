"""Rules about the objective: loss, KL penalty, entropy bonus and rewards."""

import math
from numbers import Real
from typing import TYPE_CHECKING

from covey.config.groups.describe import Limits
from covey.config.messages import closest, ignored, warn

if TYPE_CHECKING:
    from covey.config.base import OnlineConfig

CLIPPED = frozenset({"grpo", "bnpo", "dr_grpo", "dapo", "luspo"})

BUILT_IN = CLIPPED | {"cispo", "sapo", "vespo", "gmpo", "rloo"}

READ_BY = {
    "epsilon": CLIPPED | {"gmpo", "rloo"},
    "epsilon_high": CLIPPED | {"gmpo", "rloo", "cispo"},
    "delta": CLIPPED,
    "sapo_temperature_pos": {"sapo"},
    "sapo_temperature_neg": {"sapo"},
    "vespo_k_pos": {"vespo"},
    "vespo_lambda_pos": {"vespo"},
    "vespo_k_neg": {"vespo"},
    "vespo_lambda_neg": {"vespo"},
}
"""Options by the built-in losses that read them; a loss registered by a user may read any."""


def loss_type_is_known(args: "OnlineConfig") -> None:
    """The loss is built in or registered, and goes with the method."""
    from covey.algorithms import LOSS_TYPES

    if args.loss_type not in LOSS_TYPES:
        raise ValueError(
            f"loss_type={args.loss_type!r} is not known; choose one of: {', '.join(sorted(LOSS_TYPES))}."
            f"{closest(args.loss_type, LOSS_TYPES)} To add your own, call covey.algorithms.register_loss before making "
            "the config."
        )
    if args.method == "grpo" and args.loss_type == "rloo":
        raise ValueError("loss_type='rloo' belongs to RLOO: use RLOOConfig and RLOOTrainer (`covey rloo`).")
    if args.loss_type == "dr_grpo" and args.max_completion_length is None:
        raise ValueError(
            "loss_type='dr_grpo' divides by max_completion_length, which is None. Set it, or use loss_type='dapo'."
        )


def clipping_leaves_a_range(args: "OnlineConfig") -> None:
    """1 - epsilon and 1 + epsilon_high enclose 1, and delta lies beyond them."""
    if args.loss_type == "gmpo":  # clips between exp(-epsilon) and exp(epsilon_high)
        Limits(ge=0, advice="0.4 is usual for gmpo.").check("epsilon", args.epsilon)
    elif not 0 <= args.epsilon < 1:
        raise ValueError(f"epsilon={args.epsilon} is out of range: it must be at least 0 and below 1. 0.2 is usual.")
    if args.delta is not None and args.loss_type in CLIPPED and args.delta <= 1 + args.resolved_epsilon_high:
        raise ValueError(
            f"delta={args.delta} must be larger than 1 + epsilon_high = {1 + args.resolved_epsilon_high:g}: it bounds "
            "the ratios that ordinary clipping lets through when the advantage is negative. 2 to 4 are usual."
        )


def cispo_has_its_cap(args: "OnlineConfig") -> None:
    """cispo reads epsilon_high as the largest ratio itself."""
    if args.loss_type != "cispo":
        return
    if args.epsilon_high is None:
        warn(
            f"loss_type='cispo' needs a largest ratio and `epsilon_high` is not set: {args.resolved_epsilon_high:g} is "
            "used."
        )
    elif args.epsilon_high <= 1:
        warn(
            f"epsilon_high={args.epsilon_high} with loss_type='cispo' is the largest ratio itself, not a distance from "
            "1: it shrinks every gradient. 5 is usual."
        )


def loss_options_are_read(args: "OnlineConfig") -> None:
    """Options of a loss are read by the chosen one; on-policy, every ratio is 1 and no bound acts."""
    from covey.algorithms import LOSS_TYPES

    if args.loss_type in BUILT_IN:
        unread = [name for name, losses in READ_BY.items() if args.loss_type not in losses]
        ignored(args, unread, f"loss_type={args.loss_type!r} does not read it")
    if LOSS_TYPES[args.loss_type].ratio_level is not None:
        ignored(args, ["importance_sampling_level"], f"loss_type={args.loss_type!r} prescribes its own")
    on_policy = args.algebra().on_policy
    if on_policy and args.loss_type in BUILT_IN - {"cispo"}:  # its cap is no distance from 1
        bounds = [name for name in ("epsilon", "epsilon_high", "delta") if args.loss_type in READ_BY[name]]
        ignored(args, bounds, "this run is on-policy, so every importance ratio is 1; see `covey explain`")
    if on_policy and not args.max_staleness:
        ignored(args, ["off_policy_mask_threshold"], "this run is on-policy, so no completion is stale")


def reference_sync_needs_a_reference(args: "OnlineConfig") -> None:
    """Synchronising needs a reference model, which there is only with a KL penalty."""
    if args.sync_ref_model and args.beta == 0:
        raise ValueError(
            "sync_ref_model=True needs a reference model, and beta=0 loads none. Set beta above 0 (0.04, say) or "
            "sync_ref_model=False."
        )
    if not args.sync_ref_model:
        ignored(args, ["ref_model_mixup_alpha", "ref_model_sync_steps"], "sync_ref_model is False")


def kl_options_are_read(args: "OnlineConfig") -> None:
    """Options of the KL term need a KL term in the loss; in RLOO's reward only k1, summed, is the penalty."""
    if args.method == "rloo" and args.kl_estimator != "k1":
        raise ValueError(
            f"kl_estimator={args.kl_estimator!r} with RLOO: the penalty is part of the reward there, and its estimator "
            "is 'k1', the log ratio of the whole completion. Leave kl_estimator unset, or use GRPO."
        )
    if args.beta == 0:
        ignored(args, ["kl_estimator", "use_bias_correction_kl"], "beta is 0, so there is no KL penalty")
    elif args.method == "rloo":
        ignored(args, ["use_bias_correction_kl"], "RLOO's KL penalty is part of the reward and carries no gradient")


def entropy_controller_has_room(args: "OnlineConfig") -> None:
    """The weight of the entropy bonus can move between its bounds, and starts there."""
    low, high = args.entropy_coef_min, args.entropy_coef_max
    if low > high:
        raise ValueError(f"entropy_coef_min={low} must not be above entropy_coef_max={high}.")
    if not args.use_adaptive_entropy:
        names = ["entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"]
        ignored(args, names, "use_adaptive_entropy is False")
        return
    if not low <= args.entropy_coef <= high:
        raise ValueError(
            f"entropy_coef={args.entropy_coef}, where the adaptive weight starts, is outside "
            f"[entropy_coef_min, entropy_coef_max] = [{low}, {high}]."
        )
    if args.entropy_coef_delta <= 0 or args.entropy_target < 0:
        raise ValueError(
            f"use_adaptive_entropy=True needs entropy_coef_delta above 0 (is {args.entropy_coef_delta}) and "
            f"entropy_target of 0 or more (is {args.entropy_target})."
        )


def rewards_carry_weight(args: "OnlineConfig") -> None:
    """Weights are finite, and not all zero."""
    weights = args.reward_weights
    if weights is None:
        return
    numbers = isinstance(weights, list | tuple) and all(isinstance(weight, Real) for weight in weights)
    if not numbers or not all(math.isfinite(weight) for weight in weights) or not any(weights):
        raise ValueError(
            f"reward_weights={weights!r}: give a list of one finite number per reward function, at least one of them "
            "not 0, or leave it unset to weigh all alike."
        )


def steps_or_outcomes_carry_weight(args: "OnlineConfig") -> None:
    """Steps or whole completions have advantages."""
    if args.process_weight == args.outcome_weight == 0:
        raise ValueError(
            "process_weight=0 and outcome_weight=0 leave no advantage to learn from: set one of them above 0."
        )
    if args.method == "rloo" and args.outcome_weight == 0 < args.beta:
        warn(
            f"outcome_weight=0 leaves out RLOO's KL penalty (beta={args.beta}), which is part of the outcome. Set"
            " outcome_weight above 0, or beta=0 to save the reference model."
        )


def scaling_is_read(args: "OnlineConfig") -> None:
    """`scale_rewards` and the aggregation of rewards apply where advantages are normalised."""
    if args.method == "rloo":
        names = ["scale_rewards", "multi_objective_aggregation"]
        ignored(args, names, "RLOO's baseline is the mean of the other completions; see normalize_advantages")
    elif args.multi_objective_aggregation == "normalize_then_sum":
        ignored(args, ["scale_rewards"], "multi_objective_aggregation='normalize_then_sum' scales each reward itself")


RULES = (
    loss_type_is_known,
    clipping_leaves_a_range,
    cispo_has_its_cap,
    loss_options_are_read,
    reference_sync_needs_a_reference,
    kl_options_are_read,
    entropy_controller_has_room,
    rewards_carry_weight,
    steps_or_outcomes_carry_weight,
    scaling_is_read,
)
