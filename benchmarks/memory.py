"""Memory predicted by `covey explain` against measured peaks: `python -m benchmarks.memory`.

Each run trains in a process of its own for a few steps, with completions of full length. What is measured is the
largest resident size of a step's two halves, sampling and training, less what the process holds after it has trained a
tiny model: Python, PyTorch, its threads, and what libraries load when they are first used. On a GPU it is the most that
PyTorch's allocator had given out.

    python -m benchmarks.memory                        # every row of CONFIGURATIONS, with SmolLM2-135M
    python -m benchmarks.memory "LoRA" --model FOLDER  # one of them, another model

To add a configuration, add a row to `CONFIGURATIONS`.
"""

import argparse
import ctypes
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import vision_model
from benchmarks.worker import peak_memory, reset_peak_memory

RECOMPUTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
LORA = {"r": 16, "target_modules": "all-linear"}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
IMAGES = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 32}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "full": {"gradient_checkpointing": False},
    "full, checkpointed layers": RECOMPUTING,
    "full, a reference, several passes": {
        "gradient_checkpointing": False,
        "beta": 0.04,
        "per_device_train_batch_size": 16,
    },
    "LoRA": {"gradient_checkpointing": False, "peft": LORA},
    "LoRA, checkpointed layers": {**RECOMPUTING, "peft": LORA, "beta": 0.04},
    "RLOO, padded rows": {
        "method": "rloo",
        "num_generations": 4,
        "attn_layout": "padded",
        "gradient_checkpointing": False,
    },
    "LoRA over 4 bits": {"gradient_checkpointing": False, "peft": LORA, "quantization": NF4},
    "LoRA over 4 bits, nested, checkpointed layers": {
        **RECOMPUTING,
        "peft": {**LORA, "r": 64},
        "quantization": {**NF4, "bnb_4bit_use_double_quant": True},
    },
    "LoRA over 8 bits": {"gradient_checkpointing": False, "peft": LORA, "quantization": {"load_in_8bit": True}},
    "images": {"gradient_checkpointing": False, "images": 1, **IMAGES},
    "images, frozen encoder": {"gradient_checkpointing": False, "images": 1, "freeze_vit": True, **IMAGES},
    "images, LoRA": {"gradient_checkpointing": False, "images": 1, "peft": LORA, **IMAGES},
    "LoRA of rank 64 on q and v, embeddings trained": {
        "gradient_checkpointing": False,
        "peft": {"r": 64, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["embed_tokens"]},
    },
    "long completions, two iterations": {
        **RECOMPUTING,
        "num_generations": 4,
        "max_completion_length": 160,
        "num_iterations": 2,
        "beta": 0.02,
    },
    "16 completions a group": {
        "gradient_checkpointing": False,
        "num_generations": 16,
        "per_device_train_batch_size": 16,
        "max_completion_length": 32,
        "loss_type": "grpo",
    },
    "small passes": {"gradient_checkpointing": False, "max_tokens_per_micro_batch": 200},
}
"""Fields of the run in which it differs from `COMMON`; `images` of a prompt, for a model made to see some."""

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
IMAGE_SIZE = (320, 240)


def measure(model: str, fields: dict[str, Any], threads: int = 1) -> dict[str, Any]:
    """Predicted and measured bytes of one run, in a child process.

    Args:
        model: folder of the model.
        fields: of the run; `method`, `peft`, `quantization` and `images` among them.
        threads: that it computes with.

    Returns:
        `sampling` and `training`, measured; `predicted`, with the fields of `MemoryEstimate`.

    Raises:
        RuntimeError: the run failed.
    """
    spec = json.dumps({"model": model, "fields": fields, "threads": threads})
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    environment["MALLOC_ARENA_MAX"] = "1"  # a thread that meets a busy heap takes another, and each keeps what it frees
    command = [sys.executable, "-m", "benchmarks.memory", "--child", spec]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the run failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# ---- in the child ---------------------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """Of a run, what are no fields of its config."""

    method: str = "grpo"
    peft: dict[str, Any] | None = None
    quantization: dict[str, Any] | None = None
    images: int = 0


class Meter:
    """The most memory that is held between two looks, beyond what was held at first."""

    def __init__(self, device: Any):
        self._device = device
        self._baseline = 0
        self.take()
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
    what = Parts(*(fields.pop(name, usual) for name, usual in Parts()._asdict().items()))
    with tempfile.TemporaryDirectory() as folder:
        model = spec["model"] if not what.images else vision_model.make(spec["model"], Path(folder) / "model")
        _warm_up(spec["model"], {**fields, "output_dir": folder, "max_completion_length": 8}, what)
        meter = Meter(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        trainer = _trainer(model, {**fields, "output_dir": folder}, what)
        found: dict[str, list[int]] = {"sampling": [], "training": []}
        collect = trainer.collector.collect

        def collecting(*args: Any, **kwargs: Any) -> Any:
            found["training"].append(meter.take())  # since the last rollout batch, or since the start
            rollouts = collect(*args, **kwargs)
            found["sampling"].append(meter.take())
            return rollouts

        trainer.collector.collect = collecting
        trainer.train()
        found["training"].append(meter.take())
        predicted = _predicted(trainer.args, model, what)
    return {
        "sampling": max(found["sampling"]),
        "training": max(found["training"][1:]),
        "each": found,
        "predicted": predicted,
    }


def _warm_up(model: str, fields: dict[str, Any], what: Parts) -> None:
    """Train a tiny model, so that libraries have loaded what they load when they are first used."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(model)
    config.update({"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "layer_types": None})
    config.update({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32})
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(model).save_pretrained(folder)
        tiny = vision_model.make(folder, Path(folder) / "vision") if what.images else folder
        _trainer(tiny, fields, what).train()


def _trainer(model: str, fields: dict[str, Any], what: Parts) -> Any:
    """A trainer whose completions never end before their limit."""
    from datasets import Dataset
    from PIL import Image
    from transformers import AutoTokenizer

    import covey
    from benchmarks.workloads import Workload, rows
    from covey.cli.train import adapter, quantisation

    args = (covey.GRPOConfig if what.method == "grpo" else covey.RLOOConfig)(**fields)
    tokenizer = AutoTokenizer.from_pretrained(model)
    group = args.num_generations
    workload = Workload("memory", PROMPT_TOKENS, args.per_device_train_batch_size // group, group, 1)
    found = rows(workload, tokenizer, 4)
    if what.images:
        noise, size = random.Random(0), IMAGE_SIZE[0] * IMAGE_SIZE[1] * 3  # images that are alike are encoded once
        for i, row in enumerate(found):
            shown = [Image.frombytes("RGB", IMAGE_SIZE, noise.randbytes(size)) for _ in range(what.images)]
            found[i] = _shown(row["prompt"], shown)
    kind = covey.GRPOTrainer if what.method == "grpo" else covey.RLOOTrainer
    trainer = kind(
        model=model,
        reward_funcs=_rank,
        args=args,
        train_dataset=found if what.images else Dataset.from_list(found),
        peft_config=adapter(what.peft),
        quantization_config=quantisation(what.quantization),
    )
    trainer.collector.engine.eos_token_ids = set()
    _leave_files(trainer.model)
    return trainer


def _leave_files(model: Any) -> None:
    """Copy what still lies in a mapped file of weights, of which all pages count that were ever read: those of the
    weights that have been quantised, too."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.clone()


def _shown(prompt: str, images: list[Any]) -> dict[str, Any]:
    content = [{"type": "image"}] * len(images) + [{"type": "text", "text": prompt}]
    return {"prompt": [{"role": "user", "content": content}], "images": images}


def _rank(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """Distinct rewards within a group, so that all completions are trained on."""
    return [float(place) for place, _ in enumerate(completions)]


def _predicted(args: Any, model: str, what: Parts) -> dict[str, Any]:
    from dataclasses import asdict

    from transformers import AutoConfig, AutoProcessor

    from covey.cli.explain.run import processed
    from covey.cli.train import quantisation
    from covey.sizing.memory import Images, available_bytes, estimate

    config = AutoConfig.from_pretrained(model)
    images = Images()
    if what.images:
        images = processed(AutoProcessor.from_pretrained(model), config, what.images, IMAGE_SIZE)
    given = {"peft": what.peft, "quantization": quantisation(what.quantization), "images": images}
    given["device_bytes"] = available_bytes(args)
    m = estimate(config, args, prompt_tokens=PROMPT_TOKENS, **given)
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
