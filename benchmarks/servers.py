"""Training with a vLLM server: cost of weight updates, and learning compared with the built-in engine.

    .venv-vllm/bin/python -m benchmarks.servers --part sync --part learn

It runs in an environment that has vLLM and Covey (`make test-vllm` makes one) and starts the server itself. `sync`
sends SmolLM2-135M-Instruct whole, over a process group and through files, and a rank-8 adapter of it. `learn` is the
demo's task with the demo's settings. How fast a server samples, against its own offline engine, is a part of
`benchmarks.decode`. Figures are printed as JSON, one line each.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.machine import model_path

SYNCS = 5
"""Updates of each kind after one that is not counted: the first one also makes the connection."""


@contextlib.contextmanager
def vllm_server(folder: str, *flags: str) -> Iterator[str]:
    """The URL of a server that is up within this context."""
    from covey.engines.servers.server_process import ServerProcess, free_port

    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "covey.cli.main", "vllm-serve", "--model", folder, "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "1024", *flags]
    log = Path(tempfile.mkdtemp()) / "server.log"
    process = ServerProcess(
        command,
        f"{url}/health",
        log_path=log,
        deadline=600,
        env={"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        name="vLLM",
    )
    with process:
        yield url


def sync(folder: str) -> Iterator[dict[str, Any]]:
    """Seconds and bytes of weight updates."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    with vllm_server(folder, "--enable-lora", "--max-lora-rank", "8") as url:
        whole = None
        for way in ("group", "disk"):
            found = _updates(url, model, way, adapter_only=False)
            whole = found["bytes"]
            yield {"part": "sync", "what": "whole model", "way": way, **found}
        adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
        found = _updates(url, adapted, "auto", adapter_only=True)
        assert whole is not None
        yield {"part": "sync", "what": "adapter, r=8", "way": "auto", **found, "of_whole": found["bytes"] / whole}


def _updates(url: str, model: Any, way: str, *, adapter_only: bool) -> dict[str, Any]:
    from covey.engines.servers.engine import RemoteEngine
    from covey.engines.servers.http_client import ServerClient
    from covey.engines.servers.vllm.api import VllmApi
    from covey.engines.servers.vllm.weights import VllmWeightApi
    from covey.engines.servers.weights.sender import WeightSender
    from covey.policy.weights import weight_update

    engine = RemoteEngine([ServerClient(url)], VllmApi(), WeightSender(VllmWeightApi(), way), ends=frozenset())
    update = weight_update(model, 0, adapter_only=adapter_only)
    seconds = []
    try:
        for version in range(SYNCS + 1):
            start = time.perf_counter()
            engine.load_weights(replace(update, version=version))
            seconds.append(time.perf_counter() - start)
    finally:
        engine.close()
    return {"bytes": update.nbytes, "seconds": statistics.median(seconds[1:]), "first": seconds[0]}


def learn(folder: str, seed: int, steps: int, **settings: Any) -> dict[str, Any]:
    """The demo's task, sampled by a server; accuracy on held-out sums before and after."""
    from covey import GRPOTrainer
    from covey.cli import demo
    from covey.rewards import numeric_match_reward

    with vllm_server(folder) as url, tempfile.TemporaryDirectory() as output:
        train, held_out = demo.sums(seed)
        server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "bf16": False}
        args = demo.settings(Path(output), seed, steps, **server, **settings)
        trainer = GRPOTrainer(model=folder, reward_funcs=numeric_match_reward, args=args, train_dataset=train)
        trainer.weight_sync.ensure_current(0)
        before = demo.measure(trainer, held_out, "before", seed)
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        trainer.weight_sync.ensure_current(trainer.state.global_step)
        after = demo.measure(trainer, held_out, "after", seed)
        history = trainer.state.log_history
        trainer.collector.engine.close()
    found = {
        name: [round(entry[name], 6) for entry in history if name in entry]
        for name in sorted({key for entry in history for key in entry})
        if name.startswith(("sampling/", "phase/", "sync/")) or name in ("reward", "step_time")
    }
    return {
        "part": "learn",
        "seed": seed,
        "steps": steps,
        **settings,
        "before": before["accuracy"],
        "before_interval": before["interval"],
        "after": after["accuracy"],
        "after_interval": after["interval"],
        "seconds": seconds,
        **found,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=("sync", "learn"), help="all unless given")
    parser.add_argument("--model", help="model folder; SmolLM2-135M-Instruct unless given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--no-correction", action="store_true", help="learn without weighing the loss for the mismatch")
    parser.add_argument("--max-staleness", type=int, default=0)
    given = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    folder = model_path(given.model)
    if "sync" in (given.part or ["sync"]):
        for found in sync(folder):
            print(json.dumps(found), flush=True)
    if "learn" in (given.part or ["learn"]):
        settings: dict[str, Any] = {"vllm_importance_sampling_correction": not given.no_correction}
        if given.max_staleness:
            settings["max_staleness"] = given.max_staleness
        for seed in given.seeds:
            print(json.dumps(learn(folder, seed, given.steps, **settings)), flush=True)


if __name__ == "__main__":
    main()
