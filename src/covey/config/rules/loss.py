"""Rules about the loss, and about how updates follow generations."""

from typing import Any

from covey.config.rules.helpers import ignored, warn, within

CLIPPED = frozenset({"grpo", "bnpo", "dr_grpo", "dapo", "luspo"})

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
"""Which built-in losses read which option; a loss registered by a user may read any."""

BUILT_IN = CLIPPED | {"cispo", "sapo", "vespo", "gmpo", "rloo"}


def clipping_leaves_a_range(args: Any) -> None:
    """1 - epsilon and 1 + epsilon_high enclose 1."""
    if args.loss_type == "gmpo":  # clips between exp(-epsilon) and exp(epsilon_high)
        within(args, "epsilon", "0 or more", lambda e: e >= 0, "0.4 is usual for gmpo.")
    else:
        within(args, "epsilon", "at least 0 and below 1", lambda e: 0 <= e < 1, "0.2 is usual.")
    within(args, "epsilon_high", "0 or more", lambda e: e >= 0, "0.2 to 0.28 are usual; with cispo 5.")


def delta_is_beyond_the_clip(args: Any) -> None:
    """The second bound of two-sided clipping lies outside the first."""
    if args.delta is not None and args.loss_type in CLIPPED and args.delta <= 1 + args.resolved_epsilon_high:
        raise ValueError(
            f"delta={args.delta} must be larger than 1 + epsilon_high = {1 + args.resolved_epsilon_high:g}: it bounds "
            "the ratios that ordinary clipping lets through when the advantage is negative. 2 to 4 are usual."
        )


def cispo_has_its_cap(args: Any) -> None:
    """cispo reads epsilon_high as the largest ratio itself."""
    if args.loss_type != "cispo":
        return
    if args.epsilon_high is None:
        warn(
            f"loss_type='cispo' needs a largest ratio and `epsilon_high` is not set: {args.resolved_epsilon_high:g} is "
            "used.",
        )
    elif args.epsilon_high <= 1:
        warn(
            f"epsilon_high={args.epsilon_high} with loss_type='cispo' is the largest ratio itself, not a distance from "
            "1: it shrinks every gradient. 5 is usual.",
        )


def options_suit_the_loss(args: Any) -> None:
    """A hyperparameter that the loss does not read is pointed out."""
    if args.loss_type in BUILT_IN:
        unread = [name for name, losses in READ_BY.items() if args.loss_type not in losses]
        ignored(args, unread, f"loss_type={args.loss_type!r} does not read it")


def ratio_level_is_free(args: Any) -> None:
    """Some losses prescribe the level of their ratio."""
    from covey.algorithms import LOSS_TYPES

    if LOSS_TYPES[args.loss_type].ratio_level is not None:
        ignored(args, ["importance_sampling_level"], f"loss_type={args.loss_type!r} prescribes its own")


def clipping_can_happen(args: Any) -> None:
    """On-policy every ratio is 1, so clipping bounds are idle."""
    if args.algebra().on_policy and args.loss_type in BUILT_IN - {"cispo"}:  # its cap is no distance from 1
        bounds = [name for name in ("epsilon", "epsilon_high", "delta") if args.loss_type in READ_BY[name]]
        ignored(args, bounds, "this run is on-policy, so every importance ratio is 1; see `covey explain`")


def off_policy_mask_can_happen(args: Any) -> None:
    """The off-policy mask has a sensible threshold and something to mask."""
    within(args, "off_policy_mask_threshold", "0 or more", lambda t: t >= 0, "0.1 to 1 are usual.")
    if args.algebra().on_policy and not args.max_staleness:
        ignored(args, ["off_policy_mask_threshold"], "this run is on-policy, so no completion is stale")


def top_entropy_keeps_something(args: Any) -> None:
    """Some share of the tokens is trained on."""
    within(
        args,
        "top_entropy_quantile",
        "above 0 and at most 1",
        lambda q: 0 < q <= 1,
        "1.0 trains on all tokens, 0.2 on a fifth of them.",
    )


def iterations_change_the_policy(args: Any) -> None:
    """Passing over a generation again makes sense only after an update."""
    algebra = args.algebra()
    if args.num_iterations > 1 and algebra.on_policy:
        warn(
            f"num_iterations={args.num_iterations}, but all {algebra.micro_batches} micro-batches of a generation fall "
            f"into one update (gradient_accumulation_steps={args.gradient_accumulation_steps}): the same gradient is "
            f"computed {args.num_iterations} times over. Lower gradient_accumulation_steps to "
            f"{algebra.steps_per_generation} or set num_iterations=1.",
        )


def updates_align_with_generations(args: Any) -> None:
    """An update should not take some micro-batches from one generation and some from the next."""
    algebra = args.algebra()
    if not algebra.on_policy and algebra.updates_per_generation.denominator != 1:
        warn(
            f"A generation lasts {algebra.micro_batches} micro-batches and an update takes "
            f"{algebra.gradient_accumulation_steps}: some updates mix two generations. Make steps_per_generation * "
            "num_iterations a multiple of gradient_accumulation_steps, or a divisor of it.",
        )
