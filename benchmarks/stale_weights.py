"""How soon is an engine noticed that does not take new weights, and how often is a healthy one accused?

    python -m benchmarks.stale_weights

A tiny Llama is trained by GRPO; its engine is the built-in one on a copy of the model. Some copies take no update, some
stay one update behind, some stop taking them in the middle of the run; healthy ones take all, in several number
formats, as adapters and quantised.
"""

import argparse
import contextlib
import copy
import io
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig

from benchmarks.staleness import tiny_model, tokenizer
from covey import GRPOConfig, GRPOTrainer
from covey.core.engine import EngineTraits, WeightUpdate
from covey.engines.native.engine import NativeEngine
from covey.trainer.engine_check.stale_weights import StaleWeightsTest

RATES = (1e-6, 1e-5, 1e-4, 1e-3)
STEPS = 30


class CopyEngine(NativeEngine):
    """The built-in engine on a copy of the model, in a number format of its own.

    `behind` delays every update by so many; `until` is the last version that is taken; `levels` rounds every matrix to
    so many values, as quantisation does.
    """

    def __init__(
        self, dtype: torch.dtype = torch.float32, behind: int = 0, until: int | None = None, levels: int | None = None
    ):
        self.model: Any = tiny_model().eval().to(dtype)
        super().__init__(lambda: self.model, eos_token_ids=[1], pad_token_id=0, max_context=256)
        self.traits = EngineTraits(dtype=dtype)
        self.behind, self.until, self.levels = behind, until, levels
        self.sent: list[dict[str, torch.Tensor]] = []

    def load_weights(self, update: WeightUpdate) -> None:
        """Take the update, or an earlier one."""
        if self.until is not None and update.version > self.until:
            return
        self.sent.append({spec.name: self.rounded(tensor.clone()) for spec, tensor in update.checked()})
        self.sent = self.sent[-1 - self.behind :]
        self.model.load_state_dict(self.sent[0], strict=False)

    def rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on as many levels as the engine has."""
        if self.levels is None or tensor.ndim < 2:
            return tensor
        scale = tensor.abs().amax(-1, keepdim=True).clamp(min=1e-9) / (self.levels / 2)
        return (tensor / scale).round() * scale


@dataclass(frozen=True)
class Case:
    """A run: its engine's settings and the trainer's."""

    name: str
    engine: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    adapter: bool = False


STALE = [
    Case("takes no update", {"until": 0}),
    Case("one update behind", {"behind": 1}),
    Case("takes none after step 10", {"until": 10}),
    Case("takes no adapter", {"until": 0}, adapter=True),
]
HALF = {"bf16": True}
HEALTHY = [
    Case("float32"),
    Case("adapter, merged", adapter=True),
    Case("bfloat16 autocast, engine in float32", {}, HALF),
    Case("bfloat16 autocast, engine in bfloat16", {"dtype": torch.bfloat16}, HALF),
    Case("float32, engine in bfloat16", {"dtype": torch.bfloat16}, {"engine_parity": "warn"}),
    Case("float32, engine of 8 bits", {"levels": 255}, {"engine_parity": "warn"}),
    Case("float32, engine of 4 bits", {"levels": 15}, {"engine_parity": "warn"}),
    Case("bfloat16 adapter, engine of 4 bits", {"levels": 15}, {**HALF, "engine_parity": "warn"}, True),
]


@dataclass(frozen=True)
class Result:
    """Optimizer step at which the engine was called stale (None: never), comparisons, and their share of the time."""

    found: int | None
    comparisons: int
    share: float


def run(case: Case, rate: float, seed: int, steps: int) -> Result:
    """Train until the engine is called stale, or to the end."""
    seconds: list[float] = []
    compare = StaleWeightsTest.preferences

    def timed(*given: Any) -> Any:
        began = time.perf_counter()
        result = compare(*given)
        seconds.append(time.perf_counter() - began)
        return result

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = _trainer(folder, case, rate, seed, steps)
        accusations: list[int] = []
        began = time.perf_counter()
        StaleWeightsTest.preferences = timed
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                trainer.train()
        except ValueError as error:
            if "stale weights" not in str(error):
                raise
            accusations.append(trainer.state.global_step)
        finally:
            StaleWeightsTest.preferences = compare
        took = time.perf_counter() - began
    if any("has stale weights:" in str(one.message) for one in caught):
        accusations.append(-1)
    return Result(accusations[0] if accusations else None, len(seconds), sum(seconds) / took)


def _trainer(folder: str, case: Case, rate: float, seed: int, steps: int) -> GRPOTrainer:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 12,
        "max_steps": steps,
        "learning_rate": rate,
        "lr_scheduler_type": "constant",
        "logging_steps": steps,
        "save_strategy": "no",
        "report_to": "none",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": seed,
    }

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [float(sum(ids) % 11) for ids in completion_ids]

    return GRPOTrainer(
        model=copy.deepcopy(tiny_model()),
        reward_funcs=reward,
        args=GRPOConfig(output_dir=folder, **{**settings, **case.settings}),
        train_dataset=[{"prompt": f"{number}+{number}="} for number in range(64)],
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear") if case.adapter else None,
        engine=CopyEngine(**case.engine),
    )


def main() -> int:
    """Measure and print; the exit code is 1 where a stale engine is missed, or a healthy one accused."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stale_weights",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=5, help="runs of each stale engine at each learning rate")
    parser.add_argument("--checks", type=int, default=1000, help="comparisons of healthy engines, over all cases")
    given = parser.parse_args()
    torch.set_num_threads(1)
    good = True
    print("| stale engine | learning rate | found | optimizer steps without it |\n|---|---|---|---|")
    for case in STALE:
        for rate in RATES:
            results = [run(case, rate, seed, STEPS) for seed in range(given.seeds)]
            late = [result.found - (case.engine.get("until") or 0) for result in results if result.found is not None]
            print(
                f"| {case.name} | {rate:g} | {len(late)} of {len(results)} | {', '.join(map(str, late))} |", flush=True
            )
            good &= len(late) == len(results) and max(late) <= 3
    usual = run(Case("float32"), 1e-5, 0, 200)
    print(
        f"\nTime of the comparisons in a healthy run of 200 steps: {usual.share:.2%} ({usual.comparisons} of them).\n"
    )
    print("| healthy engine | comparisons | called stale |\n|---|---|---|")
    total = 0
    for case in HEALTHY:
        steps = -(-given.checks // (len(HEALTHY) * len(RATES)))
        results = [run(case, rate, 0, steps + 1) for rate in RATES]
        accused, compared = sum(one.found is not None for one in results), sum(one.comparisons for one in results)
        print(f"| {case.name} | {compared} | {accused} |", flush=True)
        good &= not accused
        total += compared
    print(f"\n{total} comparisons of healthy engines.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
