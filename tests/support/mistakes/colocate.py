"""Mistakes with vLLM in the trainer's process, as far as they show without it; tests/real_vllm has the others."""

import importlib.metadata
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from covey.engines.vllm_colocate.process import start_vllm
from covey.sizing import memory, vllm_memory
from covey.sizing.vllm_memory import GIB, EngineMemory
from covey.trainer.engines import colocated
from tests.support import tiny
from tests.support.mistakes.cases import CONFIG, Bench, Mistake, checked


def _start(version: str | None) -> Any:
    missing = importlib.metadata.PackageNotFoundError("vllm")
    answer = {"side_effect": missing} if version is None else {"return_value": version}
    with patch.object(importlib.metadata, "version", **answer):
        return start_vllm({})


def _colocated(bench: Bench, **settings: Any) -> Any:
    return bench.config(**{"use_vllm": True, "vllm_gpu_memory_utilization": "auto", **settings})


def _too_small(bench: Bench) -> None:
    args = _colocated(bench)
    estimate = memory.estimate_of(args, tiny.model())
    vllm_memory.utilization(estimate, EngineMemory(GIB, GIB, GIB, GIB), args, 3 * GIB)


def _three_processes(bench: Bench) -> None:
    accelerator = SimpleNamespace(num_processes=3, device=torch.device("cpu"), mixed_precision="no")
    colocated.build_colocated(
        _colocated(bench, vllm_tensor_parallel_size=2), None, None, accelerator, lambda: None, None
    )


def _sleep_on_a_cpu(bench: Bench) -> None:
    assert not colocated.sleeps(_colocated(bench, vllm_enable_sleep_mode=True), torch.device("cpu"))


COLOCATION = [
    Mistake(
        "Trained with vLLM where it is not installed",
        lambda bench: _start(None),
        ("pip install vllm",),
        when=CONFIG,
        kind=ImportError,
    ),
    Mistake("Trained with an old vLLM", lambda bench: _start("0.8.5"), (r"0\.8\.5",), when=CONFIG, kind=ImportError),
    checked(
        "Gave vLLM a share of the memory that is none",
        lambda bench: bench.config(vllm_gpu_memory_utilization="most"),
        "setting-range",
        "='most'",
        "'auto'",
        when=CONFIG,
    ),
    Mistake(
        "Gave vLLM a GPU that is too small, with the share worked out",
        _too_small,
        (r"3\.0", "GiB", "vllm_enable_sleep_mode=True"),
        when=CONFIG,
    ),
    checked(
        "Chose a depth of sleep that there is not",
        lambda bench: bench.config(vllm_sleep_level=0),
        "setting-range",
        "vllm_sleep_level=0",
        "vllm_enable_sleep_mode=False",
        when=CONFIG,
    ),
    checked(
        "Gave vLLM's engine an argument that is a field",
        lambda bench: bench.config(vllm_engine_kwargs={"seed": 3}),
        "setting-elsewhere",
        "'seed'",
        "`seed`",
        when=CONFIG,
    ),
    checked(
        "Split vLLM's model over processes that do not divide",
        _three_processes,
        "tensor-parallel",
        "vllm_tensor_parallel_size=2 .* 3 processes",
        " 1, 3",
        when=CONFIG,
    ),
    Mistake(
        "Offloaded, or put vLLM to sleep, on a CPU",
        _sleep_on_a_cpu,
        ("`vllm_enable_sleep_mode=True`",),
        when=CONFIG,
        kind=UserWarning,
    ),
]

SHOWN_BY_VLLM = {
    "Sampled before vLLM had the policy's weights",
    "Put a setting into generation_kwargs that vLLM does not know",
    "Gave prompts that fill vLLM's context",
    "Ran vLLM where it cannot start",
}
"""Rows of the page whose tests need vLLM: tests/real_vllm/test_colocate_engine.py."""
