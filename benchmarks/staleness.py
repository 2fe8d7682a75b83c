"""Does a step take the longer of sampling and training, rather than their sum, when sampling runs ahead?

    python -m benchmarks.staleness

A real trainer trains a tiny model on the answers of the scripted engine (`covey.engines.scripted`), whose
requests take programmed times and which works on one rollout batch at a time, as a server does that one fully uses.
A training step is made longer by a programmed time too; how long it then is altogether is measured, with an engine that
answers at once. From these two numbers follows what a step should take: their sum with `max_staleness` 0, the longer of
the two from 1 on. Uneven times of sampling even out over the rollout batches under way, so there it takes more.

What is trained on (prompts and completions, in order) is the same with every staleness and in a second run.
"""

import argparse
import hashlib
import statistics
import string
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from covey import GRPOConfig, GRPOTrainer
from covey.engines.scripted import ScriptedEngine

STALENESS = (0, 1, 4)
PROMPTS, GROUP = 4, 4
WARM_UP = 3
"""Steps at the beginning that are not measured."""


@dataclass(frozen=True)
class Measured:
    """Seconds of a step and a digest of what was trained on.

    The mean over the measured steps: what is sampled ahead can make up for a step that took long, or the other way.
    """

    step: float
    digest: str


@dataclass(frozen=True)
class Workload:
    """Seconds that a rollout batch takes to be sampled, by its number, and that a training step is made longer by."""

    name: str
    generate: Callable[[int], float]
    train: float

    even: bool = True

    def mean_generate(self, steps: int) -> float:
        """Seconds a rollout batch takes on average, over those that are measured."""
        return statistics.mean(self.generate(number) for number in range(WARM_UP, steps))


def workloads(unit: float) -> list[Workload]:
    """Measured workloads; `unit` scales all times."""
    return [
        Workload("sampling and training alike", lambda number: unit, unit),
        Workload("sampling takes twice as long", lambda number: 2 * unit, unit),
        Workload("training takes twice as long", lambda number: unit, 2 * unit),
        Workload("uneven sampling", lambda number: (0.5 if number % 4 else 2.5) * unit, unit, even=False),
    ]


class Longer(GRPOTrainer):
    """A trainer whose optimizer steps take `extra` seconds more."""

    extra = 0.0

    def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One pass per optimizer step: the setting sees to that."""
        time.sleep(self.extra)
        return super().compute_loss(*args, **kwargs)


class Clock(TrainerCallback):
    """Takes down when each step begins."""

    def __init__(self) -> None:
        self.began: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the training loop."""
        self.began.append(time.perf_counter())


def measure(seconds: Callable[[int], float], train: float, max_staleness: int, steps: int) -> Measured:
    """Train for some steps; `seconds` of a rollout batch by its number, `train` seconds more for a training step."""
    seen, clock = hashlib.sha256(), Clock()
    engine = ScriptedEngine(letters, seconds=lambda request: seconds(request // PROMPTS), lanes=PROMPTS)

    def reward(prompts: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        seen.update(repr((prompts, completion_ids)).encode())
        return [float(sum(ids) % 11) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as folder:
        trainer = Longer(
            model=tiny_model(),
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=PROMPTS * GROUP,
                gradient_accumulation_steps=1,
                num_generations=GROUP,
                max_completion_length=8,
                max_steps=steps,
                max_staleness=max_staleness,
                vllm_importance_sampling_correction=False,  # a script has no log-probs
                engine_parity="off",  # so there is nothing to compare, and samples for it would take their time
                logging_steps=steps,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                disable_tqdm=True,
            ),
            train_dataset=[{"prompt": f"{number}+{number}="} for number in range(64)],
            processing_class=tokenizer(),
            callbacks=[clock],
            engine=engine,
        )
        trainer.extra = train
        trainer.train()
    took = [after - before for before, after in zip(clock.began, clock.began[1:], strict=False)]
    return Measured(statistics.mean(took[WARM_UP:]), seen.hexdigest()[:12])


def letters(prompt_ids: Any, seed: int) -> list[int]:
    """A completion of 1 to 8 letters."""
    return [4 + (seed + sum(prompt_ids) + place * place) % 90 for place in range(1 + seed % 8)]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable character."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", *string.printable])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    )


def tiny_model() -> LlamaForCausalLM:
    """Two layers: what a step takes is what was programmed."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=104,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=2,
        )
    )


def main() -> int:
    """Measure and print; the exit code is 1 where what was trained on differs, or an even workload misses its bound."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.staleness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--unit", type=float, default=1.0, help="seconds of the shorter phases; larger is more exact")
    parser.add_argument("--steps", type=int, default=15, help="optimizer steps of a run")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows, kept = [], True
    for workload in workloads(given.unit):
        train = measure(lambda number: 0.0, workload.train, 0, given.steps).step
        generate, digests = workload.mean_generate(given.steps), set()
        for staleness in STALENESS:
            found = measure(workload.generate, workload.train, staleness, given.steps)
            again = measure(lambda number: 0.0, 0.0, staleness, given.steps)
            digests |= {found.digest, again.digest}
            expected = max(generate, train) if staleness else generate + train
            off = found.step / expected - 1
            kept &= abs(off) <= 0.05 or not workload.even
            rows.append(
                f"| {workload.name} | {staleness} | {generate:.2f} | {train:.2f} | {expected:.2f} |"
                f" {found.step:.2f} | {off:+.1%} | {found.digest} |"
            )
            print(rows[-1], flush=True)
        kept &= len(digests) == 1
    print(
        "\n| workload | max_staleness | sampling, s | training, s | expected step, s | measured step, s | difference |"
        " trained on |\n|---|---|---|---|---|---|---|---|"
    )
    print("\n".join(rows))
    print(f"\nWithin 5% and the same content every time: {'yes' if kept else 'NO'}.")
    return 0 if kept else 1


if __name__ == "__main__":
    raise SystemExit(main())
