"""Cost of a teacher of the policy's size on the lengths of W1: time against one forward pass, and memory of `start`.

    python -m benchmarks.teacher_cost                                  # a part of W1, about a minute of a free core
    python -m benchmarks.teacher_cost --groups 8 --tokens 128          # all of W1

SmolLM2-135M-Instruct trains on scripted completions, so that a step has no sampling. The unit is one forward pass over
the step's tokens: Covey's own scoring of the policy, in the micro-batches of training. A figure is a median, with the
least and the largest value.

- *teacher*: the phase in which the teacher scores a rollout batch, in pairs: a pass of the policy and the phase are
  measured one after the other, `--pairs` times in a row.
- *training*: what the teacher's part of the loss adds to forward and backward passes: each step of a run with a teacher
  less the median step of a run without one, in forward passes. The first step of a run is not measured.

Seconds are of the processor, so that other processes disturb them little. Memory is what the tensors of the process
hold at the end of a step with an adapter, with `teacher="start"` and without.
"""

import argparse
import gc
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe, model_path
from benchmarks.workloads import WORKLOADS, Workload, rows
from covey import GRPOConfig, GRPOTrainer
from covey.engines.scripted import ScriptedEngine

LIMIT = 1.15
SCRIPTED = (100, 1000)  # ids of completions: the first, and the first beyond
KINDS: dict[str, dict[str, Any]] = {
    "advantage": {"teacher_loss": "advantage"},
    "sampled token": {"teacher_loss": "divergence"},
    "8 tokens": {"teacher_loss": "divergence", "teacher_top_k": 8, "teacher_beta": 0.0},
    "whole vocabulary": {"teacher_loss": "divergence", "teacher_top_k": -1},
}
"""Settings of a teacher; the limit is for the first two, which read its log-prob of the sampled token alone."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.teacher_cost", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a folder; default: SmolLM2-135M-Instruct")
    parser.add_argument("--groups", type=int, default=1, help="prompts of a step; W1 has 8")
    parser.add_argument("--tokens", type=int, default=32, help="of a completion; W1 has 128")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="of a run, the first of which is not measured")
    parser.add_argument("--kinds", nargs="+", default=["advantage", "sampled token"], choices=list(KINDS))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    print(describe(options.threads))
    work = replace(WORKLOADS["W1"], groups=options.groups, completion_tokens=options.tokens)
    print(work.describe())
    folder = model_path(options.model)
    for line in memory(folder, work):
        print(line, flush=True)
    found = ratios(folder, work, options.kinds, options.pairs, options.steps)
    for kind, (of_teacher, of_training) in found.items():
        print(
            f"{kind}: teacher {spread(of_teacher)} x a forward pass (limit {LIMIT}), training {spread(of_training)} x"
        )


def spread(values: Sequence[float]) -> str:
    """Median, least and largest.

    Example:
        >>> spread([1.0, 3.0, 1.5])
        '1.50 (1.00 to 3.00)'
    """
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def ratios(
    folder: str, work: Workload, kinds: Sequence[str], pairs: int, steps: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Times of the teacher's phase and of what it adds to training, in forward passes, by kind."""
    found = {}
    without, _ = run({}, folder, work, steps, 0)
    plain = statistics.median(without)
    for kind in kinds:
        training, timed = run({"teacher": folder, **KINDS[kind]}, folder, work, steps, pairs)
        forward = statistics.median(one for one, _ in timed)
        print(f"{kind}: pairs {timed}, training {training} with and {without} without a teacher", flush=True)
        found[kind] = [teacher / one for one, teacher in timed], [(one - plain) / forward for one in training]
    return found


def run(
    teacher: dict[str, Any], folder: str, work: Workload, steps: int, pairs: int
) -> tuple[list[float], list[tuple[float, float]]]:
    """Processor seconds of training of each step but the first, and pairs of a forward pass and the teacher's phase."""
    with tempfile.TemporaryDirectory() as output, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(folder, Path(output), work, max_steps=steps, **teacher)
        trainer.run.phases.clock = time.process_time
        timed = time_pairs(trainer, pairs)
        trainer.train()
    training = [entry["phase/train"] for entry in trainer.state.log_history if "phase/train" in entry]
    return training[1:], timed


def time_pairs(trainer: Any, pairs: int) -> list[tuple[float, float]]:
    """Seconds of a forward pass of the policy and of the teacher's phase, in turns, on the second rollout batch."""
    score, found, batches = trainer.behaviour.score, list[tuple[float, float]](), []

    def scoring(rollouts: Any, mode: Any) -> Any:
        behaviour = score(rollouts, mode)
        batches.append(replace(behaviour.batch, teacher_logprobs=None, named_ids=None, teacher_tops=None))
        with trainer.run.phases("measuring"):
            for _ in range(pairs if len(batches) == 2 else 0):
                since = time.process_time()
                trainer.batch_scorer.logprobs(trainer.policy, batches[1], rows=trainer.run.algebra.rows(mode))
                between = time.process_time()
                trainer.behaviour.teachers(rollouts, batches[1], mode)
                found.append((between - since, time.process_time() - between))
        return behaviour

    trainer.behaviour.score = scoring
    return found


def make_trainer(folder: str, output: Path, work: Workload, peft_config: Any = None, **given: Any) -> Any:
    """A trainer of scripted completions of W1's lengths."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    length = work.completion_tokens

    def script(prompt: Sequence[int], seed: int) -> list[int]:
        ids = torch.randint(*SCRIPTED, (length,), generator=torch.Generator().manual_seed(seed % 2**31))
        return [int(number) for number in ids]

    return GRPOTrainer(
        model=folder,
        reward_funcs=by_place,
        args=GRPOConfig(
            output_dir=str(output),
            per_device_train_batch_size=work.completions,
            num_generations=work.group_size,
            max_completion_length=length,
            learning_rate=1e-6,
            optim="sgd",
            engine_parity="off",  # a script has no log-probs
            vllm_importance_sampling_correction=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            record="off",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            **given,
        ),
        train_dataset=rows(work, tokenizer, steps=16, warm_ups=0),
        processing_class=tokenizer,
        engine=ScriptedEngine(script),
        peft_config=peft_config,
    )


def by_place(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Rewards that differ within each group."""
    return [float(place) for place in range(len(completion_ids))]


def memory(folder: str, work: Workload) -> list[str]:
    """Bytes of tensors at the end of a step of an adapter, without a teacher and with its start."""
    from peft import LoraConfig

    lines, found = [], []
    for given in ({}, {"teacher": "start", "teacher_loss": "divergence"}):
        with tempfile.TemporaryDirectory() as output, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapter = LoraConfig(r=8, task_type="CAUSAL_LM")
            trainer = make_trainer(folder, Path(output), work, peft_config=adapter, max_steps=1, **given)
            trainer.train()
            found.append(bytes_of_tensors())
            lines.append(f"tensors {'with start' if given else 'without a teacher'}: {found[-1] / 2**20:.1f} MiB")
        del trainer
        gc.collect()
    return [*lines, f"the difference: {found[1] - found[0]:,} bytes"]


def bytes_of_tensors() -> int:
    """Bytes of the storages of all tensors of this process, each counted once."""
    gc.collect()
    storages = {}
    for one in gc.get_objects():
        if isinstance(one, torch.Tensor) and one.device.type != "meta":
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


if __name__ == "__main__":
    main()
