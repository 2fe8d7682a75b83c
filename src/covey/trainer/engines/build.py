"""Engine of a run, built from its config; a further engine is a further branch of `build_engine`."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from covey.core.engine import RolloutEngine
from covey.engines.native.engine import NativeEngine
from covey.engines.native.inference_contexts import Lockstep
from covey.engines.native.recurrent_engine import RecurrentEngine, needs_recurrent_engine
from covey.policy.full_copy import FullCopy
from covey.policy.loading import end_token_ids
from covey.rollout.vision import Vision
from covey.trainer.distributed.collectives import Collectives
from covey.trainer.distributed.sharding import sharding_of
from covey.trainer.engine_check.parity import AUTOCAST


def build_engine(
    args: Any,
    model: Any,
    tokenizer: Any,
    accelerator: Any,
    policy: Callable[[], Any],
    context: int | None,
    collectives: Collectives,
    vision: Vision | None = None,
) -> RolloutEngine:
    """Engine that samples from the policy."""
    if args.use_sglang:
        from covey.trainer.engines.servers import sglang_servers

        return sglang_servers(args, model, tokenizer, accelerator, context)
    if args.use_vllm and args.vllm_mode == "server":
        from covey.trainer.engines.servers import vllm_servers

        return vllm_servers(args, model, tokenizer, accelerator, context)
    if args.use_vllm:
        from covey.trainer.engines.colocated import build_colocated

        return build_colocated(args, model, tokenizer, accelerator, policy, vision)
    return _built_in(args, model, tokenizer, accelerator, policy, context, collectives, vision)


def _built_in(
    args: Any,
    model: Any,
    tokenizer: Any,
    accelerator: Any,
    policy: Callable[[], Any],
    context: int | None,
    collectives: Collectives,
    vision: Vision | None,
) -> RolloutEngine:
    common: dict[str, Any] = {
        "eos_token_ids": end_token_ids(model, tokenizer),
        "max_sequences": args.max_concurrent_completions,
        "max_context": context,
        "forward_context": accelerator.autocast,
    }
    in_step = sharding_of(accelerator).weights and not args.ds3_gather_for_generation
    if in_step:
        _check_sampled_in_step(args, vision)
        common |= _in_step(accelerator, policy, collectives)
    elif sharding_of(accelerator).weights:
        policy, common["forward_context"] = _gathered(accelerator, model, policy)
    if not needs_recurrent_engine(model) and vision is None:
        return NativeEngine(policy, pad_token_id=tokenizer.pad_token_id, whole_calls=in_step, **common)
    if args.speculative_reuse is not None and vision is not None:
        raise ValueError(
            f"speculative_reuse={args.speculative_reuse!r} is not supported for vision-language models, which are"
            " sampled prompt by prompt. Leave speculative_reuse unset."
        )
    if args.speculative_reuse is not None:
        raise ValueError(
            f"speculative_reuse={args.speculative_reuse!r} does not suit {type(model).__name__}: a token that is"
            " rejected cannot be taken out of the state of linear attention, convolutions or state-space layers. Leave"
            " speculative_reuse unset."
        )
    return RecurrentEngine(policy, filler_id=tokenizer.pad_token_id, **common)


def _gathered(
    accelerator: Any, model: Any, policy: Callable[[], Any]
) -> tuple[Callable[[], Any], Callable[[], AbstractContextManager[None]]]:
    """Full copy of a sharded policy to sample from, and the context in which it has weights."""
    gathered = FullCopy(model, policy, AUTOCAST.get(accelerator.mixed_precision))

    @contextmanager
    def forward_context() -> Iterator[None]:
        with gathered.weights(), accelerator.autocast():
            yield

    return lambda: gathered.model, forward_context


def _in_step(accelerator: Any, policy: Callable[[], Any], collectives: Collectives) -> dict[str, Any]:
    """Settings of an engine that samples from the sharded policy, in step with the other processes."""
    in_step = Lockstep(policy, lambda busy: any(collectives.gather(busy, "sample in step")), accelerator.device)

    @contextmanager
    def forward_context() -> Iterator[None]:
        with accelerator.autocast(), in_step.together():
            yield

    return {"forward_context": forward_context, "device": accelerator.device}


def _check_sampled_in_step(args: Any, vision: Vision | None) -> None:
    if vision is not None:
        raise ValueError(
            "ds3_gather_for_generation=False is not supported for vision-language models: a process that reads an image"
            " would wait for others that do not. Leave ds3_gather_for_generation at True, or sample from a server."
        )
    if args.speculative_reuse is not None:
        raise ValueError(
            f"speculative_reuse={args.speculative_reuse!r} needs the whole model in each process, and"
            " ds3_gather_for_generation=False leaves it spread out. Set one of the two back to its default."
        )
