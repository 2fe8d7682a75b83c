"""Rules about sampling ahead of training. Whether an engine can do it is for the trainer to see, which knows it."""

from typing import Any

from covey.config.rules.helpers import warn, within


def staleness_is_counted(args: Any) -> None:
    """It is a number of optimizer steps."""
    advice = "0 samples and trains by turns, 1 samples one step ahead."
    within(args, "max_staleness", "0 or more", lambda steps: steps >= 0, advice)


def sampling_ahead_has_an_engine(args: Any) -> None:
    """What samples while the policy trains runs elsewhere, and keeps no drafts."""
    if not args.max_staleness:
        return
    if args.use_vllm and args.vllm_mode == "colocate":
        raise ValueError(
            f"max_staleness={args.max_staleness} with vllm_mode='colocate': vLLM in the trainer's process samples on"
            " the devices that train, so the two take turns. Set vllm_mode='server', or max_staleness=0."
        )
    if args.use_transformers_continuous_batching:
        raise ValueError(
            f"max_staleness={args.max_staleness} with use_transformers_continuous_batching=True: it samples with the"
            " very weights that are trained. Sample with a server, or set max_staleness=0."
        )
    if args.speculative_reuse is not None:
        raise ValueError(
            f"max_staleness={args.max_staleness} with speculative_reuse={args.speculative_reuse!r}: only the built-in"
            " engine can check earlier completions, and it cannot sample while the policy trains. Leave one of the two"
            " out."
        )


def stale_samples_are_corrected(args: Any) -> None:
    """Samples of older weights are weighed for it, unless the user says no."""
    if args.max_staleness and not args.vllm_importance_sampling_correction:
        warn(
            f"max_staleness={args.max_staleness} with vllm_importance_sampling_correction=False: completions of older"
            " weights are trained on as if they were fresh, which biases the gradient. Leave the correction on."
        )


def servers_that_sample_ahead_stay_awake(args: Any) -> None:
    """Servers that sample while the policy trains have no time to sleep."""
    if args.max_staleness and args.use_vllm and args.vllm_mode == "server" and args.vllm_enable_sleep_mode:
        warn(
            f"vllm_enable_sleep_mode=True with max_staleness={args.max_staleness}: the servers sample while the policy"
            " trains, so they hardly sleep. Leave it False, or set max_staleness=0."
        )
