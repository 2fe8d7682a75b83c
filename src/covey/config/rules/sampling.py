"""Rules about the sampling distribution."""

import math
from typing import Any

from covey.config.rules.helpers import within

SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
    "max_length": "max_completion_length",
    "num_return_sequences": "num_generations",
    "n": "num_generations",
    "do_sample": "temperature",
    "cache_implementation": "cache_implementation",
}
"""Keys that `generation_kwargs` may not hold, and the field to use instead."""


def temperature_is_positive(args: Any) -> None:
    """Greedy completions of one prompt are all the same: nothing to compare."""
    within(
        args,
        "temperature",
        "above 0",
        lambda t: 0 < t < math.inf,
        "At 0 all completions of a prompt are equal and every advantage is 0; 1.0 is usual.",
    )


def truncation_of_the_distribution_is_sane(args: Any) -> None:
    """top-p, top-k, min-p and the repetition penalty are in their ranges."""
    within(args, "top_p", "above 0 and at most 1", lambda p: 0 < p <= 1, "1.0 keeps all tokens.")
    within(args, "top_k", "0 or more", lambda k: k >= 0, "0 keeps all tokens.")
    within(args, "min_p", "between 0 and 1", lambda p: 0 <= p <= 1, "Unset or 0 keeps all tokens.")
    within(args, "repetition_penalty", "above 0", lambda r: r > 0, "1.0 changes nothing; 1.05 to 1.2 are usual.")


def generation_kwargs_repeat_no_field(args: Any) -> None:
    """Each sampling setting has one home."""
    for key in args.generation_kwargs or {}:
        if key in SAMPLING_KEYS:
            raise ValueError(f"generation_kwargs may not hold {key!r}: set the field `{SAMPLING_KEYS[key]}` instead.")


def dr_grpo_has_a_length(args: Any) -> None:
    """dr_grpo divides by the largest length there can be."""
    if args.loss_type == "dr_grpo" and args.max_completion_length is None:
        raise ValueError(
            "loss_type='dr_grpo' divides by max_completion_length, which is None. Set it, or use loss_type='dapo'."
        )
