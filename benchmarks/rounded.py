"""Sampling from rounded weights: what a decoding step and a whole step take with `engine_dtype` and without, in pairs.

    python -m benchmarks.rounded                                    # a decoding step of 64 sequences in each format
    python -m benchmarks.rounded --format int8 --steps 2            # and whole steps of the demo
    python -m benchmarks.rounded --curves --seeds 4 --steps 60      # rewards of the demo: exact, corrected, uncorrected

A pair is one measurement without rounding and one with it, one after the other; a figure is the median of the pairs'
ratios, above 1 where rounding takes less time. `--cpu` counts processor time instead, for machines that others use.
The difference of log-probs is the mean over sampled tokens between the rounded engine and the model in float32, after
prompts of the demo and after random tokens. What `engine_dtype="auto"` decides is printed first (`--auto`).
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.machine import describe, model_path
from covey.cli.demo import settings, sums
from covey.engines.native.engine import NativeEngine
from covey.engines.native.number_formats import FORMATS, fast_product
from covey.rewards import numeric_match_reward
from covey.trainer.engines.rounding import logprob_difference, step_seconds, why_slow

GROUP = 8
ARMS: dict[str, dict[str, Any]] = {  # of curves
    "exact": {},
    "corrected": {"vllm_importance_sampling_mode": "token_truncate"},
    "uncorrected": {"vllm_importance_sampling_correction": False, "engine_parity": "off"},
}


def main(argv: Sequence[str] | None = None) -> None:
    given = _parser().parse_args(argv)
    torch.set_num_threads(given.threads)
    clock = time.process_time if given.cpu else time.perf_counter
    folder = model_path(given.model)
    print(json.dumps(describe(given.threads)))
    for name in given.format:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        kind = fast_product(device, name)
        print(f"{name}: {why_slow(device, name) if kind is None else f'fast products ({kind.name})'}")
    if given.auto:
        with tempfile.TemporaryDirectory() as output:
            print(demo_trainer(folder, Path(output), 0, 1, engine_dtype="auto").rounding.reason, flush=True)
    if given.curves:
        for line in curves(folder, given.format[0], given.seeds, given.steps or 60):
            print(json.dumps(line), flush=True)
        return
    decoding(folder, given.format, given.pairs, given.sequences, clock)
    if given.steps:
        whole_steps(folder, given.format, given.pairs, given.steps, clock)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.rounded", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a folder; default: SmolLM2-135M-Instruct")
    parser.add_argument("--format", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--sequences", nargs="+", type=int, default=[64, 16, 4], help="decoded at once")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=0, help="whole steps of the demo for a measurement")
    parser.add_argument("--cpu", action="store_true", help="processor time instead of the clock")
    parser.add_argument("--auto", action="store_true", help="what engine_dtype='auto' measures and decides in the demo")
    parser.add_argument("--curves", action="store_true", help="rewards of the demo, with the first of the formats")
    parser.add_argument("--seeds", type=int, default=4)
    return parser


def pairs_of(measure: Callable[[str | None], float], name: str, count: int) -> str:
    """Median, least and largest ratio of measurements without and with rounding to a format, and median seconds."""
    pairs = [(measure(None), measure(name)) for _ in range(count)]
    ratios = sorted(plain / rounded for plain, rounded in pairs)
    plain, rounded = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    spread = f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
    return f"{statistics.median(ratios):.2f} x {spread}, {plain:.3f} s without and {rounded:.3f} s with"


def decoding(folder: str, names: Sequence[str], count: int, sizes: Sequence[int], clock: Callable[[], float]) -> None:
    """Print ratios of a decoding step, and differences of log-probs."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    for name in names:
        print(f"{name}: log-probs differ on average by {difference(model, tokenizer, name)}", flush=True)
        for size in sizes:
            engine = NativeEngine(lambda: model, eos_token_ids=set(), pad_token_id=0, max_sequences=size)

            def measure(dtype: str | None, engine: NativeEngine = engine, size: int = size) -> float:
                return step_seconds(engine, dtype, size, GROUP, steps=8, clock=clock)

            print(f"{name}: decoding step of {size} sequences: {pairs_of(measure, name, count)}", flush=True)


def difference(model: Any, tokenizer: Any, name: str) -> str:
    """Mean absolute difference of log-probs of sampled tokens, between the rounded engine and the model."""
    engine = NativeEngine(lambda: model, eos_token_ids=set(), pad_token_id=0)
    demo = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True) for row in sums(0)[0][:8]]
    prompts = {
        "the demo's prompts": [ids if isinstance(ids, list) else ids["input_ids"] for ids in demo],
        "random tokens": [torch.randint(len(tokenizer), (32,)).tolist() for _ in range(8)],
    }
    return ", ".join(f"{logprob_difference(engine, name, ids):.4f} on {what}" for what, ids in prompts.items())


class StepTimes(TrainerCallback):
    """Seconds of each optimizer step, rollouts included, after the first."""

    def __init__(self, clock: Callable[[], float]):
        self.clock, self.seconds, self._began = clock, list[float](), 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = self.clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 1:
            self.seconds.append(self.clock() - self._began)


def demo_trainer(folder: str, output: Path, seed: int, steps: int, **changes: Any) -> Any:
    from covey import GRPOTrainer

    args = settings(output, seed, steps, record="off", disable_tqdm=True, **{**changes, "log_completions": False})
    return GRPOTrainer(model=folder, reward_funcs=numeric_match_reward, args=args, train_dataset=sums(seed)[0])


def whole_steps(folder: str, names: Sequence[str], count: int, steps: int, clock: Callable[[], float]) -> None:
    """Print ratios of whole steps of the demo: sampling, rewards, training."""

    def measure(dtype: str | None) -> float:
        times = StepTimes(clock)
        with tempfile.TemporaryDirectory() as output:
            trainer = demo_trainer(folder, Path(output), 0, 1 + steps, engine_dtype=dtype)
            trainer.add_callback(times)
            trainer.train()
        return statistics.median(times.seconds)

    for name in names:
        print(f"{name}: whole step of the demo: {pairs_of(measure, name, count)}", flush=True)


def curves(folder: str, name: str, seeds: int, steps: int) -> Iterator[dict[str, Any]]:
    """For each seed and arm: rewards and differences of log-probs by step, in the order in which they are run."""
    for seed in range(seeds):
        for arm, changes in ARMS.items():
            dtype = None if arm == "exact" else name
            with tempfile.TemporaryDirectory() as output:
                trainer = demo_trainer(
                    folder, Path(output), seed, steps, engine_dtype=dtype, **changes if dtype else {}
                )
                trainer.train()
            logs = trainer.state.log_history
            yield {
                "arm": arm,
                "seed": seed,
                "format": dtype,
                "reward": [round(one["reward"], 4) for one in logs if "reward" in one],
                "difference": [
                    round(one[key], 5) for one in logs if (key := "sampling/sampling_logp_difference/mean") in one
                ],
            }


if __name__ == "__main__":
    main()
