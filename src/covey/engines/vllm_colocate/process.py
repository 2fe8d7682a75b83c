"""Start and stop of vLLM inside this process, leaving the state of the process unchanged.

A process has one vLLM at a time, because two would share its process groups.
"""

import contextlib
import gc
import importlib.metadata
import multiprocessing
import os
import random
import signal
import threading
import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from packaging.version import InvalidVersion, Version

OLDEST = "0.28"  # oldest supported version of vLLM
LOAD_FORMAT = "covey_dummy"
INSTALL = "pip install vllm"


def require_vllm() -> str:
    """Version of vLLM; ImportError if it is missing or too old."""
    try:
        found = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(
            f"use_vllm=True needs vLLM, which is not installed here: {INSTALL}. Or leave use_vllm off: the built-in"
            " engine needs nothing."
        ) from error
    with contextlib.suppress(InvalidVersion):  # own builds may have any version
        if Version(found) < Version(OLDEST):
            raise ImportError(f"vLLM {found} is too old: {OLDEST} or newer is needed. Upgrade it: {INSTALL}.")
    return found


_running: weakref.finalize | None = None  # stops the vLLM of this process, also when it is garbage collected


def start_vllm(arguments: dict[str, Any]) -> Any:
    """Start a `vllm.LLMEngine` with its worker in this process; an earlier one is stopped.

    `arguments` are those of `vllm.EngineArgs`; the load format "dummy" keeps computed constants. RuntimeError, with
    vLLM's error and advice, if it does not start.
    """
    global _running
    version = require_vllm()
    if _running is not None:
        _running()
    shared = torch.distributed.is_initialized()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read whenever an engine is made
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # less noise between the trainer's lines
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    with preserved_process_state():
        try:
            from vllm import EngineArgs, LLMEngine

            if arguments.get("load_format") == "dummy":
                arguments = {**arguments, "load_format": register_dummy_loader()}
            engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except TypeError as error:
            raise ValueError(
                f"vLLM {version} does not take these arguments: {error}. Look at vllm_engine_kwargs, whose keys are"
                " those of vllm.EngineArgs."
            ) from error
        except (ValueError, RuntimeError, AssertionError, OSError, torch.OutOfMemoryError) as error:
            raise RuntimeError(
                f"vLLM {version} did not start in this process: {type(error).__name__}: {error}\nIf memory is short,"
                " lower vllm_gpu_memory_utilization or vllm_max_model_length, or set vllm_enable_sleep_mode=True."
                " VLLM_LOGGING_LEVEL=INFO in the environment shows what vLLM does."
            ) from error
    client = engine.engine_core
    client._finalizer.detach()  # it would destroy the trainer's process group, too
    _running = weakref.finalize(engine, _shut_down, client.engine_core, shared)
    return engine


def is_running(engine: Any) -> bool:
    found = _running.peek() if _running is not None else None
    return found is not None and found[0] is engine


def _shut_down(core: Any, shared: bool) -> None:
    """Shut an engine's core down without destroying the trainer's default process group."""
    destroy = torch.distributed.destroy_process_group

    def destroy_others(group: Any = None) -> None:
        if group is not None:
            destroy(group)

    if shared:
        torch.distributed.destroy_process_group = destroy_others
    try:
        core.shutdown()
    except ValueError:
        if not shared or torch.distributed.is_initialized():
            raise
        # the trainer has destroyed its process group before, and vLLM's with it
    finally:
        torch.distributed.destroy_process_group = destroy


@contextlib.contextmanager
def preserved_process_state() -> Iterator[None]:
    """Context that restores process-wide state that vLLM changes, except the variables VLLM_*, which it reads later."""
    with contextlib.ExitStack() as restored:
        restored.callback(_restore_environment, dict(os.environ))
        restored.callback(random.setstate, random.getstate())
        restored.callback(np.random.set_state, np.random.get_state())
        restored.callback(torch.set_rng_state, torch.get_rng_state())
        if torch.cuda.is_initialized():
            restored.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
        restored.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        restored.callback(torch.set_default_dtype, torch.get_default_dtype())
        restored.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        restored.callback(torch.set_num_threads, torch.get_num_threads())
        restored.callback(setattr, torch, "set_num_threads", torch.set_num_threads)
        start_method = multiprocessing.get_start_method(allow_none=True)  # None: not set yet
        restored.callback(multiprocessing.set_start_method, start_method, force=True)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if (handler := signal.getsignal(number)) is not None:
                    restored.callback(signal.signal, number, handler)
        if not gc.get_freeze_count():
            restored.callback(gc.unfreeze)
        yield


def _restore_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        if not name.startswith("VLLM_"):
            del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if not name.startswith("VLLM_")})


def repack_heads(model: Any) -> None:
    """Pack the output heads of a vLLM model on a CPU again after new weights.

    vLLM does not repack a head that is tied to the embedding, so the model would continue with the old head.
    """
    for module in model.modules():
        if type(module).__name__ == "ParallelLMHead" and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


@cache
def register_dummy_loader() -> str:
    """Register a load format with random weights and intact buffers; vLLM's own format also randomizes buffers."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader(LOAD_FORMAT)
    class DummyLoader(DummyModelLoader):
        def load_weights(self, model: Any, model_config: Any) -> None:
            constants = {name: buffer.clone() for name, buffer in model.named_buffers()}
            super().load_weights(model, model_config)
            for name, buffer in model.named_buffers():
                if name in constants:
                    buffer.copy_(constants[name])

    return LOAD_FORMAT
