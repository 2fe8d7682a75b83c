"""Training with a vLLM server: cost of weight updates, and learning compared with the built-in engine.

    .venv-vllm/bin/python -m benchmarks.servers --part sync --part differences --part learn

It runs in an environment that has vLLM and Covey (`make test-vllm` makes one) and starts the server itself. `sync`
sends SmolLM2-135M-Instruct whole, over a process group and through files, and a rank-8 adapter of it. `differences`
trains it for some steps of AdamW at three learning rates, with weights in float32 that are sent in bfloat16, as
differences and whole (`--rates`, `--updates`), and compares bit by bit what the server holds in the end. `learn` is the
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


def differences(folder: str, rates: list[float], updates: int) -> Iterator[dict[str, Any]]:
    """Bytes and seconds of updates by learning rate: of all weights, and of what changed; both to the same server.

    After the last difference the server's model is compared with what a whole update of the same weights makes of it.
    """
    with vllm_server(folder, "--worker-extension-cls", "tests.real_vllm.reading.ReadingWorker") as url:
        for rate in rates:
            yield {"part": "differences", "learning_rate": rate, **_at_rate(url, folder, rate, updates)}


def _at_rate(url: str, folder: str, rate: float, updates: int) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from covey.cli import demo
    from covey.policy.weights import weight_update

    torch.manual_seed(0)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder, dtype="float32"),
        AutoTokenizer.from_pretrained(folder),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    rows, _ = demo.sums(0)

    def train(step: int) -> None:
        texts = [str(rows[(4 * step + i) % len(rows)]["prompt"]) for i in range(4)]
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        model(**batch, labels=batch["input_ids"]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def send(engine: Any, version: int) -> Any:
        return _timed(engine, weight_update(model, version, dtype=torch.bfloat16))

    engine = _engine(url, differ=True)
    found, changed = [], []
    try:
        for version in range(updates + 1):
            if version:
                train(version)
            sent, one = send(engine, version)
            found.append(one)
            changed += [sent.changed] if sent.changed is not None else []
    finally:
        engine.close()
    held = _checksums(url)
    engine = _engine(url, differ=False)
    try:
        whole = [send(engine, updates + 1 + number)[1] for number in range(SYNCS + 1)]
    finally:
        engine.close()
    equal = held == _checksums(url)
    medians = {
        f"{name}_{key}": round(statistics.median(one[key] for one in each[1:]), 3)
        for name, each in (("whole", whole), ("differences", found))
        for key in each[0]
    }
    share = medians["differences_bytes"] / medians["whole_bytes"]
    first = found[0]["bytes"]
    return {
        "updates": updates,
        "changed": [min(changed), statistics.median(changed), max(changed)],
        **medians,
        "bytes_of_whole": share,
        "first_update_bytes": first,
        "equal_weights": equal,
    }


def _checksums(url: str) -> Any:
    """Checksums of all that the server's model holds."""
    import asyncio

    from covey.engines.servers.http_client import ServerClient
    from covey.engines.servers.vllm.weights import call_workers

    return asyncio.run(call_workers(ServerClient(url), "read_checksums", "read what it holds", 60.0))[0]


def _timed(engine: Any, update: Any) -> tuple[Any, dict[str, float]]:
    """What an update sent, its bytes, and its seconds: passed, and of this process's processor time."""
    start, cpu = time.perf_counter(), time.process_time()
    sent = engine.load_weights(update)
    seconds, used = time.perf_counter() - start, time.process_time() - cpu
    nbytes = sent.nbytes if sent is not None else update.nbytes
    return sent, {"bytes": nbytes, "seconds": seconds, "trainer_cpu_seconds": used}


def _engine(url: str, differ: bool) -> Any:
    from covey.engines.servers.engine import RemoteEngine
    from covey.engines.servers.http_client import ServerClient
    from covey.engines.servers.vllm.api import VllmApi
    from covey.engines.servers.vllm.weights import VllmWeightApi
    from covey.engines.servers.weights.sender import WeightSender

    sender = WeightSender(VllmWeightApi(), "group", differences=differ)
    return RemoteEngine([ServerClient(url)], VllmApi(), sender, ends=frozenset())


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
    parser.add_argument("--part", action="append", choices=("sync", "differences", "learn"), help="all unless given")
    parser.add_argument("--model", help="model folder; SmolLM2-135M-Instruct unless given")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 1e-5, 1e-6], help="of differences")
    parser.add_argument("--updates", type=int, default=10, help="of differences, at each rate; at least 1")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--no-correction", action="store_true", help="learn without weighing the loss for the mismatch")
    parser.add_argument("--max-staleness", type=int, default=0)
    given = parser.parse_args()
    if given.updates < 1:
        parser.error(f"--updates {given.updates}: must be at least 1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    folder = model_path(given.model)
    if "sync" in (given.part or ["sync"]):
        for found in sync(folder):
            print(json.dumps(found), flush=True)
    if "differences" in (given.part or ["differences"]):
        for found in differences(folder, given.rates, given.updates):
            print(json.dumps(found), flush=True)
    if "learn" in (given.part or ["learn"]):
        settings: dict[str, Any] = {"vllm_importance_sampling_correction": not given.no_correction}
        if given.max_staleness:
            settings["max_staleness"] = given.max_staleness
        for seed in given.seeds:
            print(json.dumps(learn(folder, seed, given.steps, **settings)), flush=True)


if __name__ == "__main__":
    main()
