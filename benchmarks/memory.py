"""What `covey explain` says of memory, against what runs take: `python -m benchmarks.memory`.

Each run trains in a process of its own for a few steps, with completions of full length. What is measured is the
largest resident size of a step's two halves, sampling and training, less what the process holds before it has a model:
Python, PyTorch and its threads. On a GPU it is the most that PyTorch's allocator had given out.

    python -m benchmarks.memory                        # every row of CONFIGURATIONS, with SmolLM2-135M
    python -m benchmarks.memory "LoRA" --model FOLDER  # one of them, another model

To add a configuration, add a row to `CONFIGURATIONS`.
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.worker import peak_memory, reset_peak_memory

LORA = {"r": 16, "target_modules": "all-linear"}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "full": {"gradient_checkpointing": False},
    "full, checkpointed layers": {"gradient_checkpointing": True},
    "full, a reference, several passes": {
        "gradient_checkpointing": False,
        "beta": 0.04,
        "per_device_train_batch_size": 16,
    },
    "LoRA": {"gradient_checkpointing": False, "peft": LORA},
    "LoRA, checkpointed layers": {"gradient_checkpointing": True, "peft": LORA, "beta": 0.04},
    "RLOO, padded rows": {
        "method": "rloo",
        "num_generations": 4,
        "attn_layout": "padded",
        "gradient_checkpointing": False,
    },
}
"""Fields of the run in which it differs from `COMMON`."""

COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "max_completion_length": 64,
    "max_steps": 2,
    "learning_rate": 1e-6,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "bf16": False,
}
PROMPT_TOKENS = 64


def measure(model: str, fields: dict[str, Any], threads: int = 1) -> dict[str, Any]:
    """Predicted and measured bytes of one run, in a child process.

    Args:
        model: folder of the model.
        fields: of the run; `method` and `peft` among them.
        threads: that it computes with.

    Returns:
        `sampling` and `training`, measured; `predicted`, with the fields of `MemoryEstimate`.

    Raises:
        RuntimeError: the run failed.
    """
    spec = json.dumps({"model": model, "fields": fields, "threads": threads})
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "benchmarks.memory", "--child", spec]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the run failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# ---- in the child ---------------------------------------------------------------------------------------------------


class Meter:
    """The most memory that is held between two looks, beyond what was held at first."""

    def __init__(self, device: Any):
        self._device = device
        self._baseline = 0
        self._baseline = self.take()

    def take(self) -> int:
        """Bytes since the last look."""
        import torch

        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            peak = peak_memory()
            gc.collect()
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # else what training freed would count as sampling's
            reset_peak_memory()
        return peak - self._baseline


def child(spec: dict[str, Any]) -> dict[str, Any]:
    """Train, and say what it took."""
    import torch

    torch.set_num_threads(spec["threads"])
    fields = {**COMMON, **spec["fields"]}
    method, peft = fields.pop("method", "grpo"), fields.pop("peft", None)
    with tempfile.TemporaryDirectory() as folder:
        trainer, meter = _trainer(method, spec["model"], {**fields, "output_dir": folder}, peft)
        found: dict[str, list[int]] = {"sampling": [], "training": []}
        collect = trainer.collector.collect

        def collecting(*args: Any, **kwargs: Any) -> Any:
            found["training"].append(meter.take())  # since the last generation, or since the start
            rollouts = collect(*args, **kwargs)
            found["sampling"].append(meter.take())
            return rollouts

        trainer.collector.collect = collecting
        trainer.train()
        found["training"].append(meter.take())
    predicted = _predicted(trainer.args, trainer.model.config, peft)
    return {
        "sampling": max(found["sampling"]),
        "training": max(found["training"][1:]),
        "each": found,
        "predicted": predicted,
    }


def _trainer(method: str, model: str, fields: dict[str, Any], peft: dict[str, Any] | None) -> tuple[Any, Meter]:
    """A trainer whose completions never end before their limit, and a meter from before it has a model."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer

    import covey
    from benchmarks.workloads import Workload, rows

    args = (covey.GRPOConfig if method == "grpo" else covey.RLOOConfig)(**fields)
    tokenizer = AutoTokenizer.from_pretrained(model)
    group = args.num_generations
    workload = Workload("memory", PROMPT_TOKENS, args.per_device_train_batch_size // group, group, 1)
    data = Dataset.from_list(rows(workload, tokenizer, 4))
    kind = covey.GRPOTrainer if method == "grpo" else covey.RLOOTrainer
    adapter = None
    if peft is not None:
        from peft import LoraConfig

        adapter = LoraConfig(task_type="CAUSAL_LM", **peft)
    torch.randn(256, 256) @ torch.randn(256, 256)  # what the first product of a process makes
    meter = Meter(args.device)
    trainer = kind(model=model, reward_funcs=_rank, args=args, train_dataset=data, peft_config=adapter)
    trainer.collector.engine.eos_token_ids = set()
    return trainer, meter


def _rank(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """Siblings never tie, so that all are trained on."""
    return [float(place) for place, _ in enumerate(completions)]


def _predicted(args: Any, config: Any, peft: dict[str, Any] | None) -> dict[str, Any]:
    from dataclasses import asdict

    from covey.trainers.memory import estimate

    m = estimate(config, args, prompt_tokens=PROMPT_TOKENS, peft=peft)
    return {**asdict(m), "training": m.training, "sampling": m.sampling, "peak": m.peak}


# ---- the table ------------------------------------------------------------------------------------------------------


def line(name: str, found: dict[str, Any]) -> str:
    """A row of the table: each half and the peak, predicted and measured, and how far the peak is off."""
    mib = 2**20
    predicted = found["predicted"]
    halves = [f"{predicted[half] / mib:.0f} / {found[half] / mib:.0f}" for half in ("sampling", "training")]
    peak = max(found["sampling"], found["training"])
    off = predicted["peak"] / peak - 1
    return f"| {name} | {halves[0]} | {halves[1]} | {predicted['peak'] / mib:.0f} / {peak / mib:.0f} | {off:+.0%} |"


def main() -> None:
    """Measure the named configurations, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CONFIGURATIONS)}")
    parser.add_argument("--model", help="folder; SmolLM2-135M-Instruct by default")
    parser.add_argument("--parts", action="store_true", help="print every predicted part")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        found = child(json.loads(options.child))
        print(json.dumps(found))
        return
    from covey.cli.demo import model_folder

    model = options.model or str(model_folder())
    print("| run | sampling, MiB: predicted / measured | training | peak | off |\n|---|---|---|---|---|")
    for name in options.names or CONFIGURATIONS:
        found = measure(model, CONFIGURATIONS[name])
        print(line(name, found), flush=True)
        if options.parts:
            print(json.dumps(found, indent=1), flush=True)


if __name__ == "__main__":
    main()
