"""Eight LoRA configurations in one study against eight runs one after another: memory, decode throughput, time.

    python -m benchmarks.study [--model FOLDER] [--variants 8] [--max_steps 3] [--results FILE]

Each side is a process of its own, and written down at once: an interrupted benchmark continues where it stopped. Decode
throughput is sampled tokens by the seconds of sampling, in a study those of its rounds. Memory is the most that the
process had (VmHWM).
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import model_path

PROMPTS = [{"prompt": f"Count from {i} to ten:", "answer": ""} for i in range(32)]
ADAPTER = {"target_modules": "all-linear", "lora_alpha": 16}
VARIANTS = [{"learning_rate": 1e-4 * (1 + i), "peft": {"r": (4, 8, 16)[i % 3]}} for i in range(16)]
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "report_to": "none",
    "bf16": False,
    "use_cpu": True,
    "disable_tqdm": True,
}


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def study(model: str, count: int, settings: dict[str, Any], folder: str) -> dict[str, float]:
    """One study; the time of sampling is that of the engine's batches."""
    from covey_tools.study.study import Study

    seconds = 0.0
    made = Study(
        model,
        {f"v{i}": VARIANTS[i] for i in range(count)},
        {**settings, "peft": ADAPTER, "output_dir": folder},
        reward_funcs=reward,
        train_dataset=PROMPTS,
    )
    sample = made._sample

    def timed() -> dict[str, Any]:
        nonlocal seconds
        start = time.perf_counter()
        outcomes = sample()
        seconds += time.perf_counter() - start
        return outcomes

    made._sample = timed  # type: ignore[method-assign]
    made.train()
    return {"generate": seconds}


def alone(model: str, number: int, settings: dict[str, Any], folder: str) -> dict[str, float]:
    """One run; the time of sampling is that of `collect`."""
    from peft import LoraConfig

    from covey import GRPOConfig, GRPOTrainer

    changes = {name: value for name, value in VARIANTS[number].items() if name != "peft"}
    trainer = GRPOTrainer(
        model,
        reward,
        GRPOConfig(**{**settings, **changes, "output_dir": folder, "save_strategy": "no"}),
        PROMPTS,
        peft_config=LoraConfig(task_type="CAUSAL_LM", **{**ADAPTER, **VARIANTS[number]["peft"]}),
    )
    seconds, collect = 0.0, trainer.collector.collect

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal seconds
        start = time.perf_counter()
        rollouts = collect(*args, **kwargs)
        seconds += time.perf_counter() - start
        return rollouts

    trainer.collector.collect = timed
    trainer.train()
    return {"generate": seconds}


def measured(kind: str, number: int, options: argparse.Namespace) -> dict[str, float]:
    """The figures of one side, from a process of its own."""
    words = ["--model", options.model, "--max_steps", options.max_steps, "--tokens", options.tokens]
    command = [sys.executable, "-m", "benchmarks.study", "--side", kind, "--variants", number, *words]
    done = subprocess.run([*map(str, command)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder; SmolLM2-135M-Instruct if absent")
    parser.add_argument("--variants", type=int, default=8)
    parser.add_argument("--max_steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--results", type=Path, default=Path("runs/study.json"))
    parser.add_argument("--side", choices=["study", "alone"])
    options = parser.parse_args()
    options.model = model_path(options.model)
    if options.side:
        settings = {**SETTINGS, "max_steps": options.max_steps, "max_completion_length": options.tokens}
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            figures = (study if options.side == "study" else alone)(options.model, options.variants, settings, folder)
            figures["seconds"] = time.perf_counter() - start
            figures["tokens"] = sampled_tokens(Path(folder))
        figures["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(figures))
        return
    options.results.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(options.results.read_text()) if options.results.is_file() else {}
    for kind, number in [("study", options.variants), *(("alone", number) for number in range(options.variants))]:
        if f"{kind} {number}" not in known:
            known[f"{kind} {number}"] = measured(kind, number, options)
            options.results.write_text(json.dumps(known, indent=1) + "\n")
    together, *runs = known.values()
    rate = sum(run["tokens"] for run in runs) / sum(run["generate"] for run in runs)
    print(f"peak memory: {together['peak_mib'] / max(run['peak_mib'] for run in runs):.2f} x one run's")
    print(f"decode throughput: {together['tokens'] / together['generate'] / rate:.2f} x the runs one after another")
    print(f"wall time: {together['seconds'] / sum(run['seconds'] for run in runs):.2f} x theirs")


def sampled_tokens(folder: Path) -> int:
    """Tokens of all completions on record."""
    import pyarrow.parquet as parquet

    files = folder.rglob("generation_*.parquet")
    return sum(sum(parquet.read_table(file, columns=["length"])["length"].to_pylist()) for file in files)


if __name__ == "__main__":
    main()
