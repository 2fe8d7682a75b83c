"""Two processes on gloo give the losses and weights of one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "two_processes.py"
CASES = {
    "grpo": {"method": "grpo", "beta": 0.05},
    "rloo, and suites that do not divide": {"method": "rloo", "num_iterations": 2, "suites": True},
    "a group over both processes": {"method": "grpo", "num_generations": 8, "loss_type": "grpo"},
    "steps of a group over both processes, with refills": {
        "method": "rloo",
        "num_generations": 8,
        "by_steps": True,
        "step_discount": 0.9,
        "dynamic_sample": True,
        "prompt_sampler": "difficulty",
    },
    "lora": {"method": "grpo", "lora": True},
    "checkpointed layers": {"method": "grpo", "gradient_checkpointing": True},
    "dynamic sampling": {"method": "grpo", "dynamic_sample": True, "settled": True},
    "dynamic sampling by difficulty, a group over both processes": {
        "method": "rloo",
        "num_generations": 8,
        "dynamic_sample": True,
        "prompt_sampler": "difficulty",
        "settled": True,
    },
    "drafts, some of them at the other process": {"method": "grpo", "speculative_reuse": "exact", "max_steps": 6},
    "memory running out on one process": {"method": "grpo", "out_of_memory": True, "gradient_accumulation_steps": 2},
    "a process without signal": {"method": "grpo", "settled": True, "max_tokens_per_micro_batch": 30},
    "an engine that is corrected, a process without signal": {
        "method": "grpo",
        "settled": True,
        "perturbed": True,
        "correct_built_in_engine": True,
        "engine_parity": "off",
        "vllm_importance_sampling_mode": "sequence_truncate",
    },
    "environments, a group over both processes": {
        "method": "grpo",
        "beta": 0.05,
        "num_generations": 8,
        "environments": True,
    },
    "rollout functions, a group over both processes": {
        "method": "grpo",
        "num_generations": 8,
        "player": "one rollout",
        "max_completion_length": 16,
    },
    "trees, sampled ahead": {
        "method": "rloo",
        "player": "a group",
        "max_staleness": 2,
        "max_steps": 5,
        "max_completion_length": 16,
    },
    "sampling ahead": {"method": "grpo", "max_staleness": 2, "max_steps": 5},
    "sampling ahead, with refills by difficulty": {
        "method": "grpo",
        "max_staleness": 1,
        "max_steps": 5,
        "dynamic_sample": True,
        "prompt_sampler": "difficulty",
        "settled": True,
    },
    "experts with balanced loads, a process without signal": {
        "method": "grpo",
        "experts": True,
        "router_aux_loss_coef": 0.5,
        "settled": True,
        "max_tokens_per_micro_batch": 30,
    },
    "an entropy quantile and bonus": {"method": "grpo", "top_entropy_quantile": 0.5, "entropy_coef": 0.01},
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(output: Path, settings: dict, processes: int) -> dict:
    output.mkdir()
    per_device = 8 // processes
    micro = {
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": 1,
        "max_steps": 3,
        "optim": "sgd",
    }
    launcher = [sys.executable]
    if processes > 1:
        launcher += [
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            str(processes),
            "--master_addr",
            "127.0.0.1",
            "--master_port",
            str(free_port()),
        ]
    folders = [str(SCRIPT.parent), str(SCRIPT.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folders),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [*launcher, str(SCRIPT), str(output), json.dumps({**micro, **settings})],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(output / "result.pt", weights_only=True)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one(tmp_path, case):
    one, two = (run(tmp_path / str(n), CASES[case], n) for n in (1, 2))
    for name, values in one["history"].items():
        assert two["history"][name] == pytest.approx(values, rel=1e-4, abs=1e-6), name
    for a, b in zip(one["weights"], two["weights"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_processes_take_the_layout_that_suits_all_of_them(tmp_path):
    one = run(tmp_path / "1", {"method": "grpo"}, 1)
    two = run(tmp_path / "2", {"method": "grpo", "pads_at_the_last": True}, 2)
    assert (one["layout"], two["layout"]) == ("shared_prefix", "padded")
    assert two["history"]["loss"] == pytest.approx(one["history"]["loss"], rel=1e-4, abs=1e-6)
    for a, b in zip(one["weights"], two["weights"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
