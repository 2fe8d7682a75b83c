"""Rules about engines other than the built-in one, and about the correction of their log-probabilities."""

import dataclasses
from typing import TYPE_CHECKING

from covey.config.hardware import by_deepspeed, by_fsdp
from covey.config.messages import ignored, is_set, warn

if TYPE_CHECKING:
    from covey.config.base import OnlineConfig

SERVER_ONLY = (
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_server_timeout",
    "vllm_server_request_timeout",
    "vllm_server_sync_timeout",
    "vllm_server_concurrency",
    "vllm_server_api_key",
    "vllm_group_port",
    "vllm_weight_transfer",
    "vllm_weight_folder",
    "vllm_weight_bucket",
)
"""Fields that vLLM in the trainer's process does not read."""

OFFLOAD = ("offload_model", "offload_optimizer")

COLOCATED = (
    "vllm_sleep_level",
    "vllm_gpu_memory_utilization",
    "vllm_max_model_length",
    "vllm_tensor_parallel_size",
    "vllm_engine_kwargs",
    "vllm_model_impl",
    *OFFLOAD,
    "move_model_batches",
)
"""Fields that a server has settings of its own for."""

SHARED_WITH_SGLANG = ("vllm_lora_sync", "vllm_structured_outputs_regex")
"""Fields named after vLLM that SGLang's servers read as well."""

CORRECTION_OPTIONS = (
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
)
CORRECTION = ("vllm_importance_sampling_correction", *CORRECTION_OPTIONS, "vllm_importance_sampling_cap")
"""Fields of the correction: named after vLLM, in force for every engine."""

ENGINE_KEYS = {
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


def one_engine_samples(args: "OnlineConfig") -> None:
    """At most one engine is asked for."""
    named = [name for name in ("use_vllm", "use_sglang", "use_transformers_continuous_batching") if getattr(args, name)]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(f'{name}=True' for name in named)}: one engine samples. Leave the other out.")


def engine_options_need_their_engine(args: "OnlineConfig") -> None:
    """Settings of vLLM, SGLang and transformers' generation need those engines."""
    names = [field.name for field in dataclasses.fields(args)]
    if not args.use_vllm:
        read = {*CORRECTION, *(SHARED_WITH_SGLANG if args.use_sglang else ())}
        unread = [name for name in names if name.startswith("vllm_") and name not in read]
        ignored(args, [*unread, *OFFLOAD, "move_model_batches"], "use_vllm is False")
    if not args.use_sglang:
        unread = [name for name in names if name.startswith("sglang_")]
        ignored(args, [*unread, "checkpoint_path"], "use_sglang is False")
    own = "the built-in engine, which batches continuously itself, samples in place of transformers'"
    ignored(args, ["use_transformers_continuous_batching"], own)
    ignored(args, ["transformers_continuous_batching_config"], f"{own}; max_concurrent_completions bounds its batch")
    if args.samples_elsewhere:
        ignored(args, ["ds3_gather_for_generation"], "another engine samples, from weights of its own")
    elif not (args.deepspeed or args.fsdp or by_deepspeed() or by_fsdp()):
        ignored(args, ["ds3_gather_for_generation"], "neither FSDP nor DeepSpeed is in use")
    ignored(args, ["cache_implementation"], "the built-in engine manages its own key-value cache")


def vllm_settings_are_read(args: "OnlineConfig") -> None:
    """Settings of a mode of vLLM need that mode, and those of its sleep need it to sleep."""
    if not args.use_vllm:
        return
    if args.vllm_mode == "server":
        ignored(args, COLOCATED, "vllm_mode is 'server', and the server has settings of its own")
        if args.vllm_server_base_url:
            ignored(args, ["vllm_server_host", "vllm_server_port"], "vllm_server_base_url replaces it")
        ignored(args, ["max_concurrent_completions"], "it is for the built-in engine; set vllm_server_concurrency")
        return
    ignored(args, SERVER_ONLY, f"vllm_mode is {args.vllm_mode!r}, not 'server'")
    if not args.vllm_enable_sleep_mode:
        ignored(args, ["vllm_sleep_level"], "vllm_enable_sleep_mode is False")
        ignored(args, OFFLOAD, "vllm_enable_sleep_mode is False, so vLLM holds its memory already and nothing is moved")


def colocated_vllm_is_possible(args: "OnlineConfig") -> None:
    """vLLM's share of the memory, its sleep and its engine's arguments are in range."""
    share = args.vllm_gpu_memory_utilization
    if share != "auto" and not (isinstance(share, float) and 0 < share <= 1):
        raise ValueError(
            f"vllm_gpu_memory_utilization={share!r} is out of range: it must be above 0 and at most 1, or 'auto', which"
            " works it out (`covey explain` shows how)."
        )
    if args.vllm_sleep_level not in (1, 2):
        raise ValueError(
            f"vllm_sleep_level={args.vllm_sleep_level!r} is not known: 1 keeps vLLM's weights in host memory, 2 "
            "discards them. Not to sleep at all is vllm_enable_sleep_mode=False."
        )
    assert not isinstance(args.vllm_engine_kwargs, str), "parsed at construction"
    for key in args.vllm_engine_kwargs or {}:
        if key in ENGINE_KEYS:
            raise ValueError(f"vllm_engine_kwargs may not hold {key!r}: {ENGINE_KEYS[key]}.")


def sglang_settings_are_read(args: "OnlineConfig") -> None:
    """A server is either named or started."""
    if not args.use_sglang:
        return
    if args.sglang_base_url:
        ignored(args, ["sglang_device", "sglang_server_args"], "sglang_base_url names servers that run already")
    elif not args.sglang_device:
        ignored(args, ["sglang_server_args"], "no server is started: sglang_device is not set")
    ignored(args, ["max_concurrent_completions"], "it is for the built-in engine; set sglang_concurrency")


def correction_is_read(args: "OnlineConfig") -> None:
    """The built-in engine is corrected only when asked for, and options of the correction need the correction."""
    if args.samples_elsewhere:
        ignored(args, ["correct_built_in_engine"], "another engine samples, which is corrected anyway")
    elif not args.correct_built_in_engine:
        because = (
            "the built-in engine samples with the trainer's own weights and precision; correct_built_in_engine=True"
            " corrects its rounding all the same"
        )
        ignored(args, CORRECTION, because)
        return
    if not args.vllm_importance_sampling_correction:
        because = "vllm_importance_sampling_correction is False"
        ignored(args, [*CORRECTION_OPTIONS, "correct_built_in_engine"], because)


def correction_bounds_enclose_one(args: "OnlineConfig") -> None:
    """The ratio 1, of an engine that agrees with the trainer, lies within the bounds."""
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    if not 0 <= (low or 0.0) <= 1 or (high is not None and not high >= 1):
        raise ValueError(
            f"vllm_importance_sampling_clip_min={low} and vllm_importance_sampling_clip_max={high} must lie on either"
            " side of 1, the ratio where engine and trainer agree: the first between 0 and 1, the second 1 or more,"
            " or either of them unset. 0.5 and 3 are usual."
        )


def vespo_is_corrected_by_token(args: "OnlineConfig") -> None:
    """vespo multiplies the ratios of a sequence's tokens itself."""
    mode, used = args.vllm_importance_sampling_mode, args.resolved_mismatch_mode
    if args.corrects_mismatch and mode != used and is_set(args, "vllm_importance_sampling_mode"):
        warn(
            f"vllm_importance_sampling_mode={mode!r} with loss_type={args.loss_type!r}: it multiplies the ratios of a"
            f" sequence's tokens itself, so {used!r} is used."
        )


RULES = (
    one_engine_samples,
    engine_options_need_their_engine,
    vllm_settings_are_read,
    colocated_vllm_is_possible,
    sglang_settings_are_read,
    correction_is_read,
    correction_bounds_enclose_one,
    vespo_is_corrected_by_token,
)
