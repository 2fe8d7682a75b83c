"""Rules about the reuse of earlier completions as drafts."""

import math
from typing import Any

from covey.config.rules.helpers import closest, ignored, within

KINDS = ("exact", "lenient")
"""Ways to reuse earlier completions."""


def reuse_is_exact_or_lenient(args: Any) -> None:
    """Reuse is of a kind there is, with an engine and a distribution that let drafts be checked."""
    kind = args.speculative_reuse
    if kind is None:
        return
    if kind not in KINDS:
        raise ValueError(
            f"speculative_reuse={kind!r} is not known; choose one of: {', '.join(KINDS)}; unset, every completion is"
            f" decoded afresh.{closest(kind, KINDS)}"
        )
    for engine in ("use_vllm", "use_sglang"):
        if getattr(args, engine):
            raise ValueError(
                f"speculative_reuse={kind!r} with {engine}=True: only the built-in engine can check earlier"
                " completions. Leave one of the two out."
            )
    if args.repetition_penalty != 1.0:
        raise ValueError(
            f"speculative_reuse={kind!r} with repetition_penalty={args.repetition_penalty}: the penalty makes tokens"
            " depend on which came before, so earlier completions cannot be checked in one pass. Leave one of the"
            " two out."
        )


def lenience_is_positive(args: Any) -> None:
    """Lenience scales a probability."""
    within(args, "speculative_lenience", "above 0, and finite", lambda x: 0 < x < math.inf, "1 to 2 are usual.")


def reuse_can_happen(args: Any) -> None:
    """Options of reuse are read, and prompts come again."""
    if args.speculative_reuse is None:
        ignored(args, ["speculative_max_tokens"], "speculative_reuse is not set")
    if args.speculative_reuse != "lenient":
        ignored(args, ["speculative_lenience"], "only speculative_reuse='lenient' reads it")
    once = args.prompt_sampler == "uniform" and not args.dynamic_sample  # else a prompt may come twice in an epoch
    if once and args.max_steps <= 0 and args.num_train_epochs <= 1:
        because = f"with num_train_epochs={args.num_train_epochs:g} no prompt comes a second time"
        ignored(args, ["speculative_reuse"], because)
