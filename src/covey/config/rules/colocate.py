"""Rules about vLLM inside the trainer's process."""

from typing import Any

from covey.config.rules.helpers import ignored

ROOM = ("offload_model", "offload_optimizer")

COLOCATED = (
    "vllm_sleep_level",
    "vllm_gpu_memory_utilization",
    "vllm_max_model_length",
    "vllm_tensor_parallel_size",
    "vllm_engine_kwargs",
    "vllm_model_impl",
    *ROOM,
    "move_model_batches",
)
"""Fields that a server has settled for itself."""


def memory_share_is_a_share(args: Any) -> None:
    """vLLM gets a part of a GPU's memory, or what the plan of memory leaves."""
    share = args.vllm_gpu_memory_utilization
    if share != "auto" and not (isinstance(share, float) and 0 < share <= 1):
        raise ValueError(
            f"vllm_gpu_memory_utilization={share!r} is out of range: it must be above 0 and at most 1, or 'auto', which"
            " works it out (`covey explain` shows how)."
        )


def sleep_is_light_or_deep(args: Any) -> None:
    """vLLM knows two ways to sleep."""
    if args.vllm_sleep_level not in (1, 2):
        raise ValueError(
            f"vllm_sleep_level={args.vllm_sleep_level!r} is not known: 1 keeps vLLM's weights in host memory, 2 forgets"
            " them. Not to sleep at all is vllm_enable_sleep_mode=False."
        )


def colocation_options_are_read(args: Any) -> None:
    """Settings of vLLM in the trainer's process need it to be there, and those of its sleep need it to sleep."""
    if not args.use_vllm:
        ignored(args, [*ROOM, "move_model_batches"], "use_vllm is False")
    elif args.vllm_mode != "colocate":
        ignored(args, COLOCATED, "vllm_mode is 'server', and the server has settings of its own")
    elif not args.vllm_enable_sleep_mode:
        ignored(args, ["vllm_sleep_level"], "vllm_enable_sleep_mode is False")
        ignored(
            args, ROOM, "vllm_enable_sleep_mode is False, so vLLM holds its memory already and needs no room to be made"
        )


def engine_arguments_repeat_no_field(args: Any) -> None:
    """Each setting of vLLM's engine has one home."""
    for key in args.vllm_engine_kwargs or {}:
        if key in ENGINE_FIELDS:
            raise ValueError(f"vllm_engine_kwargs may not hold {key!r}: {ENGINE_FIELDS[key]}.")


ENGINE_FIELDS = {
    "model": "it is the policy",
    "tokenizer": "it is the policy's",
    "load_format": "weights come from the policy",
    "generation_config": "fields of the config say how to sample",
    "logprobs_mode": "it follows from `temperature`",
    "distributed_executor_backend": "vLLM runs in the trainer's processes",
    "gpu_memory_utilization": "set the field `vllm_gpu_memory_utilization`",
    "max_model_len": "set the field `vllm_max_model_length`",
    "tensor_parallel_size": "set the field `vllm_tensor_parallel_size`",
    "enable_sleep_mode": "set the field `vllm_enable_sleep_mode`",
    "model_impl": "set the field `vllm_model_impl`",
    "trust_remote_code": "set the field `trust_remote_code`",
    "seed": "set the field `seed`",
}
"""Keys that `vllm_engine_kwargs` may not hold, and why."""
