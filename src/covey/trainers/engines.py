"""Which engine samples, built from the config: the only place that knows which field decides what about engines."""

from collections.abc import Callable
from typing import Any

from covey.policy.loading import end_token_ids
from covey.rollout.engine import RolloutEngine
from covey.rollout.engines.native import NativeEngine
from covey.rollout.engines.stateful import StatefulEngine, is_stateful


def build_engine(
    args: Any, model: Any, tokenizer: Any, accelerator: Any, policy: Callable[[], Any], context: int | None
) -> RolloutEngine:
    """What samples from the policy.

    Raises:
        ValueError: drafts are to be reused by a model that cannot take a token back.
    """
    common: dict[str, Any] = {
        "eos_token_ids": end_token_ids(model, tokenizer),
        "max_rows": args.max_concurrent_completions,
        "max_context": context,
        "forward_context": accelerator.autocast,
    }
    if not is_stateful(model):
        return NativeEngine(policy, pad_token_id=tokenizer.pad_token_id, **common)
    if args.speculative_reuse is not None:
        raise ValueError(
            f"speculative_reuse={args.speculative_reuse!r} does not suit {type(model).__name__}: a token that is"
            " rejected cannot be taken out of the state of linear attention, convolutions or state-space layers. Leave"
            " speculative_reuse unset."
        )
    return StatefulEngine(policy, **common)
