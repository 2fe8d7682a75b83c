"""vLLM inside the trainer's process: built from the config, it reads the policy's weights from memory.

While it samples, the policy and its optimizer may be offloaded to host memory.
"""

import copy
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from covey.config.base import OnlineConfig
from covey.config.engines import SERVER_FORMATS
from covey.core.findings import CheckError
from covey.engines.vllm_colocate.engine import ModelGroup, VllmColocateEngine
from covey.engines.vllm_colocate.process import start_vllm
from covey.policy.adapters import active_adapter, base_model, has_adapter, why_not_alone
from covey.policy.loading import end_token_ids
from covey.policy.sharded_tensors import original_class
from covey.rollout.vision import Vision
from covey.runtime.process_memory import available_memory
from covey.runtime.user_code import warn
from covey.sizing import memory, vllm_memory
from covey.trainer.engine_check.parity import AUTOCAST

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # maximum ranks that vLLM can be configured with
CPU_CACHE = "VLLM_CPU_KVCACHE_SPACE"
"""vLLM's own variable for the size of its cache on a CPU, in GiB; takes precedence over Covey's estimate."""


def build_colocated(
    args: OnlineConfig,
    model: Any,
    tokenizer: Any,
    accelerator: Any,
    policy: Callable[[], Any],
    vision: Vision | None,
    opponents: memory.Opponents | None = None,
    teachers: int = 0,
) -> VllmColocateEngine:
    """Start vLLM in this process, asleep or without weights until the first update. `vision` expands its images."""
    size, processes = args.vllm_tensor_parallel_size, accelerator.num_processes
    if processes % size:
        raise CheckError.of(
            "tensor-parallel",
            f"vllm_tensor_parallel_size={size} does not divide the {processes} processes of this run: each of them is"
            f" a part of one of vLLM's models.",
            f"Choose one of: {', '.join(str(n) for n in range(1, processes + 1) if processes % n == 0)}.",
        )
    sleeping = sleeps(args, accelerator.device)
    folder = tempfile.TemporaryDirectory(prefix="covey-vllm-")
    config = copy.copy(base_model(model).config)  # without a name of the class in models that were never saved
    config.architectures = config.architectures or [original_class(base_model(model)).__name__]
    config.save_pretrained(folder.name)
    (tokenizer if vision is None else vision.processor).save_pretrained(folder.name)
    arguments = {
        **engine_arguments(args, model, folder.name, accelerator),
        **memory_arguments(args, model, accelerator.device, opponents, teachers),
        **adapter_arguments(args, model),
        **(args.vllm_engine_kwargs or {}),  # type: ignore[dict-item] # a config parses JSON
        "enable_sleep_mode": sleeping,
    }
    room = make_room(
        accelerator.device,
        model=policy if args.offload_model and sleeping else None,
        optimizers=(lambda: accelerator._optimizers) if args.offload_optimizer and sleeping else None,
    )
    with room():  # vLLM takes its whole share when it starts, and fails if that is not free
        vllm, group = start_vllm(arguments), ModelGroup()
        if size > 1:
            from vllm.distributed.parallel_state import get_tp_group

            group = ModelGroup(get_tp_group().cpu_group)
        engine = VllmColocateEngine(
            vllm,
            eos_token_ids=end_token_ids(model, tokenizer),
            regex=args.vllm_structured_outputs_regex,
            sleep_level=args.vllm_sleep_level if sleeping else None,
            batches=args.move_model_batches,
            make_room=room,
            group=group,
        )
    weakref.finalize(engine, folder.cleanup)
    return engine


def engine_arguments(args: OnlineConfig, model: Any, folder: str, accelerator: Any) -> dict[str, Any]:
    """Arguments of `vllm.EngineArgs`, except for memory and adapters."""
    path = getattr(base_model(model).config, "_name_or_path", "")
    on_cpu = accelerator.device.type == "cpu"
    return {
        "model": path if args.trust_remote_code and path else folder,  # it holds the code of such a model
        "tokenizer": folder,
        "trust_remote_code": args.trust_remote_code,
        "load_format": "dummy",
        "dtype": str(AUTOCAST.get(accelerator.mixed_precision, model.dtype)).removeprefix("torch."),
        **dict([SERVER_FORMATS[args.engine_dtype]] if args.engine_dtype else []),
        "max_model_len": args.vllm_max_model_length or -1,  # -1: the model's own, or what memory allows
        "logprobs_mode": "raw_logprobs" if args.temperature == 1.0 else "processed_logprobs",  # as the trainer's
        "generation_config": "vllm",  # no defaults from the model's own: only requested settings apply
        "enable_prefix_caching": True,  # a prompt is computed once for all its completions
        "disable_log_stats": True,
        "model_impl": args.vllm_model_impl,
        "seed": args.seed,
        "enforce_eager": on_cpu,  # compiling there costs minutes
        "enable_chunked_prefill": False if on_cpu else None,  # in pieces, a prompt with a seed ends the CPU build
        "tensor_parallel_size": args.vllm_tensor_parallel_size,
        "distributed_executor_backend": "external_launcher" if accelerator.num_processes > 1 else "uni",
    }


def adapter_arguments(args: OnlineConfig, model: Any) -> dict[str, Any]:
    """Settings for an adapter that is sent without the base weights, if configured and possible."""
    if not has_adapter(model) or args.vllm_lora_sync == "merged" or why_not_alone(model) is not None:
        return {}
    most = next((most for most in LORA_RANKS if most >= model.peft_config[active_adapter(model)].r), None)
    if most is None:  # beyond vLLM's maximum: the weight synchronisation merges it or raises
        return {}
    return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": most}


def memory_arguments(
    args: OnlineConfig, model: Any, device: torch.device, opponents: memory.Opponents | None, teachers: int = 0
) -> dict[str, Any]:
    """Memory of vLLM: a share of a GPU, or a cache of fixed size on a CPU."""
    on_cpu, share = device.type == "cpu", args.vllm_gpu_memory_utilization
    if on_cpu and os.environ.get(CPU_CACHE):
        return {}
    if not on_cpu and share != "auto":
        return {"gpu_memory_utilization": share}
    # as `covey explain` does, with the parameters of the loaded model
    estimate = memory.estimate_of(args, model, opponents, teachers)
    engine = vllm_memory.engine_memory(estimate, base_model(model).config, args)
    if on_cpu:
        return {"kv_cache_memory_bytes": vllm_memory.cpu_cache_bytes(engine, available_memory())}
    gpu = torch.cuda.get_device_properties(device).total_memory
    return {"gpu_memory_utilization": vllm_memory.utilization(estimate, engine, args, gpu)[0]}


def sleeps(args: OnlineConfig, device: torch.device) -> bool:
    """True if vLLM sleeps between rollout batches; warns about settings without effect on a CPU."""
    if device.type == "cpu":
        for name in ("vllm_enable_sleep_mode", "offload_model", "offload_optimizer"):
            if getattr(args, name):
                message = f"`{name}=True` has no effect on a CPU: there is no other memory to move to."
                warn(message)
        return False
    return bool(args.vllm_enable_sleep_mode)


def make_room(
    device: torch.device, *, model: Callable[[], Any] | None, optimizers: Callable[[], Iterable[Any]] | None
) -> Callable[[], AbstractContextManager[None]]:
    """Context for an engine to enter before it wakes: empties torch's cache and moves tensors to host memory."""

    @contextmanager
    def room() -> Iterator[None]:
        tensors = [] if model is None else [*model().parameters(), *model().buffers()]
        for optimizer in optimizers() if optimizers is not None else ():  # looked up here, as they are created late
            tensors += optimizer_tensors(optimizer)
        with parked([tensor for tensor in tensors if tensor.device.type == device.type]):
            if device.type == "cuda":
                torch.cuda.empty_cache()  # an engine that sleeps takes its memory from the driver, not from torch
            yield

    return room


def optimizer_tensors(optimizer: Any) -> list[Tensor]:
    """State tensors of an optimizer, without single numbers such as step counts."""
    states = getattr(optimizer, "state", {}).values()
    return [value for state in states for value in state.values() if isinstance(value, Tensor) and value.numel() > 1]


@contextmanager
def parked(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Move tensors to host memory within this context; a tensor given twice is moved once."""
    moved: list[tuple[Tensor, torch.device]] = []
    try:
        with torch.no_grad():
            for tensor in {id(tensor): tensor for tensor in tensors}.values():
                local = getattr(tensor, "_local_tensor", tensor)  # this process's shard of a distributed tensor
                home = local.device
                copied = torch.empty_like(local, device="cpu", pin_memory=home.type == "cuda", requires_grad=False)
                copied.copy_(local, non_blocking=home.type == "cuda")
                moved.append((local, home))
                _wait(home)
                local.data = copied
        yield
    finally:
        with torch.no_grad():
            for local, home in moved:
                local.data = local.data.to(home, non_blocking=True)
        for home in {home for _, home in moved}:
            _wait(home)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
