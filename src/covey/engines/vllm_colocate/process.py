"""Starting and stopping vLLM inside this process, and leaving the process as it was.

There is one vLLM in a process at a time, as all of them would share its groups of processes. vLLM takes a process for
its own: it seeds the random generators, replaces `torch.set_num_threads`, settles how child processes start and sets
environment variables that other libraries read. A trainer, its reward workers and its checkpoints need all of these as
they were. Not here: sampling and weights (`vllm_colocate`); how much memory vLLM may take
(`covey.sizing.vllm_memory`).
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
from typing import Any

import numpy as np
import torch
from packaging.version import InvalidVersion, Version

from covey.engines.vllm_colocate.dummy_weights import register_dummy_loader

OLDEST = "0.28"
"""The first vLLM whose in-process engine has all that is used here."""

INSTALL = "pip install 'covey[vllm]'"


def require_vllm() -> str:
    """The version of vLLM.

    Raises:
        ImportError: it is missing or too old.
    """
    try:
        found = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(
            f"use_vllm=True needs vLLM, which is not installed here: {INSTALL}. Or leave use_vllm off: the built-in"
            " engine needs nothing."
        ) from error
    with contextlib.suppress(InvalidVersion):  # a build of one's own may be called anything
        if Version(found) < Version(OLDEST):
            raise ImportError(f"vLLM {found} is too old: {OLDEST} or newer is needed. Upgrade it: {INSTALL}.")
    return found


_running: weakref.finalize | None = None
"""Stops the vLLM of this process; also when nothing refers to it any more."""


def start_vllm(arguments: dict[str, Any]) -> Any:
    """A `vllm.LLMEngine` whose worker lives in this process; one that ran before is stopped.

    Args:
        arguments: of `vllm.EngineArgs`; the load format "dummy" leaves constants as they are.

    Raises:
        ImportError: vLLM is missing or too old.
        RuntimeError: it does not start; the message holds what it said and what to try.
    """
    global _running
    version = require_vllm()
    stop_vllm()
    shared = torch.distributed.is_initialized()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read whenever an engine is made
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its progress lines would drown the trainer's
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    with process_kept():
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
    client._finalizer.detach()  # it would end the trainer's process group as well
    _running = weakref.finalize(engine, _shut_down, client.engine_core, shared)
    return engine


def stop_vllm() -> None:
    """End the vLLM of this process, if there is one, and give its memory back."""
    if _running is not None:
        _running()


def is_running(engine: Any) -> bool:
    """Whether this is the vLLM of this process, rather than one that another has taken the place of."""
    found = _running.peek() if _running is not None else None
    return found is not None and found[0] is engine


def _shut_down(core: Any, shared: bool) -> None:
    """End an engine's core. It destroys torch's default process group, which may be the trainer's."""
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
        # the trainer has ended its own process group before, and vLLM's went with it
    finally:
        torch.distributed.destroy_process_group = destroy


@contextlib.contextmanager
def process_kept() -> Iterator[None]:
    """Put back, at the end, what the body changes in the state that a whole process shares.

    These are the random generators, thread count, matmul precision, default dtype, the start method of child
    processes, handlers of SIGINT and SIGTERM, what the garbage collector looks at, and environment variables but
    vLLM's own (VLLM_*), which it reads later.
    """
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    precision, dtype, gradients = (
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
    )
    start_method = multiprocessing.get_start_method(allow_none=True)
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if main else {}
    environment = dict(os.environ)
    frozen = gc.get_freeze_count()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if gpus is not None:
            torch.cuda.set_rng_state_all(gpus)
        torch.set_num_threads = set_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)
        multiprocessing.set_start_method(start_method, force=True)  # None: not settled yet
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        if not frozen:
            gc.unfreeze()
        _restore(environment)


def _restore(environment: dict[str, str]) -> None:
    for name in set(os.environ) | set(environment):
        if name.startswith("VLLM_"):
            continue
        if name not in environment:
            del os.environ[name]
        elif os.environ.get(name) != environment[name]:
            os.environ[name] = environment[name]
