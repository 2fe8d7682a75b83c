"""Training with real vLLM servers: rewards rise, and a server that is killed costs a retry."""

import os
import signal
import threading
import time
import urllib.request
from typing import Any

import pytest
from transformers import TrainerCallback

from covey import GRPOConfig, GRPOTrainer
from tests.support import tiny

pytestmark = pytest.mark.vllm

SETTINGS: dict[str, Any] = {
    "use_vllm": True,
    "vllm_mode": "server",
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "num_generations": 8,
    "max_completion_length": 16,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "disable_tqdm": True,
}


def digits(completions, **kwargs):
    """The share of digits among the characters of a completion."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def make_trainer(model: str, output_dir, **settings: Any) -> GRPOTrainer:
    return GRPOTrainer(
        model=model,
        reward_funcs=digits,
        args=GRPOConfig(output_dir=str(output_dir), **{**SETTINGS, **settings}),
        train_dataset=tiny.rows(),
    )


def history(trainer: GRPOTrainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def metric(url: str, name: str) -> float:
    """The sum of one of a server's own counters."""
    lines = urllib.request.urlopen(f"{url}/metrics", timeout=10).read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name) and "_created" not in line)


def test_twenty_steps_with_a_server_raise_the_reward(server, tmp_path):
    trainer = make_trainer(server.model, tmp_path, vllm_server_base_url=server.url, max_steps=20)
    trainer.train()
    rewards = history(trainer, "reward")
    assert len(rewards) == 20
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    # the trainer's own log-probs of what the server sampled with the weights that it was sent
    assert max(history(trainer, "sampling/sampling_logp_difference/mean")) < 1e-3


def kill_while_it_samples(running) -> None:
    """Waits until the server has requests in flight, and kills it."""

    def watch() -> None:
        while metric(running.url, "vllm:num_requests_running") == 0:
            time.sleep(0.01)
        os.kill(running.process.pid, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


class Accident(TrainerCallback):
    """Kills a server while step 4 is sampled."""

    def __init__(self, doomed):
        self.doomed = doomed

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            kill_while_it_samples(self.doomed)


@pytest.mark.filterwarnings("ignore")
def test_the_run_goes_on_if_one_of_two_sampling_servers_dies(server, start_server, tmp_path):
    doomed = start_server()
    trainer = make_trainer(
        doomed.model,
        tmp_path,
        vllm_server_base_url=[doomed.url, server.url],
        max_steps=8,
        max_completion_length=96,
        num_generations=4,
    )
    trainer.add_callback(Accident(doomed))
    trainer.train()
    assert trainer.state.global_step == 8
    assert not doomed.process.running
    assert len(history(trainer, "reward")) == 8
