"""Engine of a run, built from its config; a further engine is a further branch of `build_engine`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from covey.config.base import OnlineConfig
from covey.core.engine import RolloutEngine
from covey.core.findings import Finding
from covey.engines.native.engine import NativeEngine
from covey.engines.native.inference_contexts import lockstep
from covey.engines.native.recurrent_engine import RecurrentEngine, needs_recurrent_engine
from covey.policy.loading import end_token_ids
from covey.policy.replicas import FullCopy
from covey.rollout.vision import Vision
from covey.runtime.user_code import report
from covey.trainer.engine_check.parity import AUTOCAST
from covey.trainer.engines.rounding import check_rounding, given_dtype
from covey.trainer.run import Run


def build_engine(
    run: Run, model: Any, tokenizer: Any, policy: Callable[[], Any], context: int | None, vision: Vision | None
) -> RolloutEngine:
    """Engine that samples from the policy; backends are imported only when used.

    A replay has the built-in engine, for its evaluations.
    """
    args, accelerator, sharded = run.args, run.accelerator, run.sharding.weights
    if args.replay_from is None and (args.use_sglang or (args.use_vllm and args.vllm_mode == "server")):
        from covey.trainer.engines.servers import sglang_servers, vllm_servers

        start = sglang_servers if args.use_sglang else vllm_servers
        return start(args, model, tokenizer, accelerator, context)
    if args.replay_from is None and args.use_vllm:
        from covey.trainer.engines.colocated import build_colocated

        return build_colocated(args, model, tokenizer, accelerator, policy, vision, run.opponents, run.teacher_bytes)
    common: dict[str, Any] = {
        "eos_token_ids": end_token_ids(model, tokenizer),
        "max_sequences": args.max_concurrent_completions,
        "max_context": context,
        "forward_context": accelerator.autocast,
        "tokenizer": tokenizer,
        "dtype": given_dtype(args),
    }
    in_step = sharded and not args.ds3_gather_for_generation
    report(_check_reuse(args, model, vision, in_step))
    report(check_rounding(args, model, run.device.type, in_step, run.sharding.name if sharded else ""))
    if in_step:
        steps = partial(lockstep, policy, lambda busy: any(run.collectives.gather(busy, "sample in step")), run.device)
        common |= {"forward_context": partial(_nested, accelerator.autocast, steps), "device": run.device}
    elif sharded:  # a full copy is sampled from
        gathered = FullCopy(model, policy, AUTOCAST.get(accelerator.mixed_precision))
        common["forward_context"] = partial(_nested, gathered.weights, accelerator.autocast)
        policy = partial(getattr, gathered, "model")
    if needs_recurrent_engine(model) or vision is not None:
        return RecurrentEngine(policy, filler_id=tokenizer.pad_token_id, **common)
    return NativeEngine(policy, pad_token_id=tokenizer.pad_token_id, whole_calls=in_step, **common)


@contextmanager
def _nested(outer: Callable[[], Any], inner: Callable[[], Any]) -> Iterator[None]:
    with outer(), inner():
        yield


def _check_reuse(args: OnlineConfig, model: Any, vision: Vision | None, in_step: bool) -> Iterator[Finding]:
    """Errors of `speculative_reuse`, and of sampling in step, where the built-in engine cannot do it."""
    if in_step and vision is not None:
        yield Finding.error(
            "sampling-in-step",
            "ds3_gather_for_generation=False is not supported for vision-language models: a process that reads an image"
            " would wait for others that do not.",
            "Leave ds3_gather_for_generation at True, or sample from a server.",
        )
    if args.speculative_reuse is None:
        return
    given = f"speculative_reuse={args.speculative_reuse!r}"
    if in_step:
        yield Finding.error(
            "draft-reuse",
            f"{given} needs the whole model in each process, and ds3_gather_for_generation=False leaves it spread out.",
            "Set one of the two back to its default.",
        )
    if vision is not None:
        yield Finding.error(
            "draft-reuse",
            f"{given} is not supported for vision-language models, which are sampled prompt by prompt.",
            "Leave speculative_reuse unset.",
        )
    elif needs_recurrent_engine(model):
        yield Finding.error(
            "draft-reuse",
            f"{given} does not suit {type(model).__name__}: a token that is rejected cannot be taken out of the state"
            " of linear attention, convolutions or state-space layers.",
            "Leave speculative_reuse unset.",
        )
