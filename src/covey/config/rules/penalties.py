"""Rules about the KL penalty, the reference model, the entropy bonus and rewards."""

import math
from numbers import Real
from typing import Any

from covey.config.rules.helpers import ignored, warn, within


def kl_weight_is_not_negative(args: Any) -> None:
    """The KL term pulls towards the reference, never away."""
    within(
        args, "beta", "0 or more", lambda b: 0 <= b < math.inf, "0 switches the KL penalty off; 0.001 to 0.1 are usual."
    )


def load_balancing_is_not_negative(args: Any) -> None:
    """The load-balancing loss evens the load of experts out, never the other way."""
    advice = "0 switches the loss off; 0.001 to 0.02 are usual."
    within(args, "router_aux_loss_coef", "0 or more", lambda c: 0 <= c < math.inf, advice)


def reference_sync_needs_a_reference(args: Any) -> None:
    """Synchronising needs a reference model, which there is only with a KL penalty."""
    if args.sync_ref_model and args.beta == 0:
        raise ValueError(
            "sync_ref_model=True needs a reference model, and beta=0 loads none. Set beta above 0 (0.04, say) or "
            "sync_ref_model=False."
        )
    if not args.sync_ref_model:
        ignored(args, ["ref_model_mixup_alpha", "ref_model_sync_steps"], "sync_ref_model is False")
    within(args, "ref_model_mixup_alpha", "above 0 and at most 1", lambda a: 0 < a <= 1, "0.6 is usual.")


def kl_options_need_kl(args: Any) -> None:
    """Options of the KL term need a KL term in the loss."""
    if args.beta == 0:
        ignored(args, ["kl_estimator", "use_bias_correction_kl"], "beta is 0, so there is no KL penalty")
    elif args.method == "rloo":
        ignored(args, ["use_bias_correction_kl"], "RLOO's KL penalty is part of the reward and carries no gradient")


def rloo_kl_is_the_log_ratio(args: Any) -> None:
    """In the reward, only k1 summed over the completion is the KL penalty that RLOO is derived with."""
    if args.method == "rloo" and args.kl_estimator != "k1":
        raise ValueError(
            f"kl_estimator={args.kl_estimator!r} with RLOO: the penalty is part of the reward there, and its estimator "
            "is 'k1', the log ratio of the whole completion. Leave kl_estimator unset, or use GRPO."
        )


def entropy_controller_has_room(args: Any) -> None:
    """The weight of the entropy bonus can move between its bounds, and starts there."""
    if args.entropy_coef < 0:
        raise ValueError(f"entropy_coef={args.entropy_coef} must be 0 or more: below 0 it would punish exploration.")
    bounds = (args.entropy_coef_min, args.entropy_coef_max)
    if bounds[0] > bounds[1] or bounds[0] < 0:
        raise ValueError(
            f"entropy_coef_min={bounds[0]} and entropy_coef_max={bounds[1]} must be 0 or more and in this order."
        )
    if args.use_adaptive_entropy and not bounds[0] <= args.entropy_coef <= bounds[1]:
        raise ValueError(
            f"entropy_coef={args.entropy_coef}, where the adaptive weight starts, is outside "
            f"[entropy_coef_min, entropy_coef_max] = [{bounds[0]}, {bounds[1]}]."
        )
    if args.use_adaptive_entropy and (args.entropy_coef_delta <= 0 or args.entropy_target < 0):
        raise ValueError(
            f"use_adaptive_entropy=True needs entropy_coef_delta above 0 (is {args.entropy_coef_delta}) and "
            f"entropy_target of 0 or more (is {args.entropy_target})."
        )


def adaptive_options_need_adaptive_entropy(args: Any) -> None:
    """The controller's settings need the controller."""
    if not args.use_adaptive_entropy:
        names = ["entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"]
        ignored(args, names, "use_adaptive_entropy is False")


def rewards_carry_weight(args: Any) -> None:
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


def credit_is_weighed(args: Any) -> None:
    """Steps and outcomes count for something, and later steps for no more than earlier ones."""
    for name in ("process_weight", "outcome_weight"):
        within(args, name, "0 or more", lambda w: 0 <= w < math.inf, "1.0 is the default; 0 leaves that part out.")
    if args.process_weight == args.outcome_weight == 0:
        raise ValueError(
            "process_weight=0 and outcome_weight=0 leave no advantage to learn from: set one of them above 0."
        )
    if args.method == "rloo" and args.outcome_weight == 0 < args.beta:
        warn(
            f"outcome_weight=0 leaves out RLOO's KL penalty (beta={args.beta}), which is part of the outcome. Set"
            " outcome_weight above 0, or beta=0 to save the reference model."
        )
    within(args, "step_discount", "between 0 and 1", lambda g: 0 <= g <= 1, "1.0 counts every later step in full.")


def reward_timeout_is_positive(args: Any) -> None:
    """A reward function gets some time."""
    within(args, "reward_timeout", "above 0 (seconds)", lambda t: t > 0, "300 is the default.")


def reward_clip_is_ordered(args: Any) -> None:
    """The clipping range of RLOO's reward has its ends in order."""
    if args.method == "rloo" and args.reward_clip_range is not None:
        low, high = args.reward_clip_range
        if not low < high:
            raise ValueError(
                f"reward_clip_range=({low:g}, {high:g}): the first number must be smaller than the second, or every "
                "reward becomes the same."
            )


def scaling_is_read(args: Any) -> None:
    """`scale_rewards` and the aggregation of rewards apply where advantages are normalised."""
    if args.method == "rloo":
        names = ["scale_rewards", "multi_objective_aggregation"]
        ignored(args, names, "RLOO's baseline is the mean of the siblings; see normalize_advantages")
    elif args.multi_objective_aggregation == "normalize_then_sum":
        ignored(args, ["scale_rewards"], "multi_objective_aggregation='normalize_then_sum' scales each reward itself")
