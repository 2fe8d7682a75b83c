"""Facts about a run that the sections of `covey explain` state."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from covey.cli.explain.flags import Cluster
from covey.cli.explain.model import ModelPlan
from covey.cli.explain.start import Start
from covey.config.algebra import BatchAlgebra
from covey.config.base import OnlineConfig
from covey.sizing.memory import MemoryEstimate
from covey.sizing.vllm_memory import EngineMemory


@dataclass(frozen=True)
class ExplainedRun:
    """A run before it starts; None: unknown, or not part of the run."""

    args: OnlineConfig
    algebra: BatchAlgebra
    prompt_tokens: int
    model: ModelPlan
    memory: MemoryEstimate | None = None
    engine: EngineMemory | None = None
    gpu: int | None = None
    cluster: Cluster | None = None
    start: Start | None = None
    samples_eval_dataset: bool = False
    suites: dict[str, dict[str, Any]] | None = None

    @property
    def updates(self) -> Fraction:
        return self.algebra.updates_per_generation

    @property
    def prompts(self) -> int | None:
        rows = self.start.rows if self.start else None
        return rows if rows is not None and rows >= self.algebra.prompts_per_generation else None

    @property
    def batches_per_epoch(self) -> int:
        return (self.prompts or 0) // self.algebra.prompts_per_generation

    @property
    def left_over(self) -> int:
        return (self.prompts or 0) % self.algebra.prompts_per_generation

    @property
    def updates_per_epoch(self) -> int:
        return math.ceil(self.batches_per_epoch * self.updates)

    @property
    def total_updates(self) -> int:
        return math.ceil(self.args.num_train_epochs * self.updates_per_epoch)

    @property
    def epochs(self) -> str:
        count = f"{self.args.max_steps / self.updates_per_epoch:.3g}"
        return f"{count} epoch{'' if count == '1' else 's'}"

    @property
    def max_steps_batches(self) -> float:
        return float(self.args.max_steps / self.updates)

    @property
    def max_steps_prompts(self) -> float:
        return float(self.args.max_steps / self.updates * self.algebra.prompts_per_generation)

    @property
    def updates_per_thousand(self) -> float:
        return float(Fraction(1000, self.algebra.prompts_per_generation) * self.updates)

    @property
    def most_resampled(self) -> int:
        return (1 + self.args.max_resample_times) * self.algebra.generation_batch_size

    @property
    def scores_old(self) -> bool:
        return not self.algebra.on_policy or (self.args.method == "rloo" and bool(self.args.beta))

    @property
    def correction_beyond(self) -> str:
        low, high = self.args.vllm_importance_sampling_clip_min, self.args.vllm_importance_sampling_clip_max
        bounds = [text for bound, text in ((low, f"below {low}"), (high, f"above {high}")) if bound is not None]
        treatment = "is dropped" if self.args.resolved_mismatch_mode.endswith("mask") else "counts as the bound"
        return f"; {' or '.join(bounds)} it {treatment}" if bounds else ""

    @property
    def correction_level(self) -> str:
        return self.args.resolved_mismatch_mode.partition("_")[0]

    @property
    def batches_in_flight(self) -> int:
        return int(self.args.max_staleness / self.updates)

    @property
    def staleness_that_overlaps(self) -> int:
        return math.ceil(self.updates)

    @property
    def sampler(self) -> str:
        if self.args.use_sglang:
            return "SGLang"
        return "vLLM" if self.args.use_vllm and self.args.vllm_mode == "server" else ""

    @property
    def servers(self) -> list[str]:
        return self.args.sglang_urls if self.args.use_sglang else self.args.vllm_urls

    @property
    def server_count(self) -> int:
        return len(self.servers)

    @property
    def server_list(self) -> str:
        return ", ".join(self.servers)

    @property
    def completions_per_server(self) -> int:
        share = math.ceil(self.algebra.generation_batch_size / len(self.servers))
        return min(self.args.vllm_server_concurrency, share)

    @property
    def weight_transfer(self) -> str:
        args = self.args
        port = f"port {args.vllm_group_port}" if args.vllm_group_port else "a free port"
        group = f"over a group that servers join by connecting to this machine at {port} (vllm_group_port)"
        folder = args.vllm_weight_folder or "a temporary folder, which servers on other machines do not see"
        disk = f"as files in {folder} (vllm_weight_folder)"
        return {
            "auto": f"{group}, or, if a server was not started for that, {disk}",
            "group": group,
            "ipc": "nowhere: servers on the same GPU open the trainer's memory",
            "disk": disk,
        }[args.vllm_weight_transfer]

    @property
    def clip_low(self) -> float:
        return 1 - self.args.epsilon

    @property
    def clip_high(self) -> float:
        return 1 + self.args.resolved_epsilon_high

    @property
    def clipped_unit(self) -> str:
        by_token = self.args.loss_type != "rloo" and self.args.importance_sampling_level == "token"
        return "Tokens" if by_token else "Sequences"

    @property
    def most_sampled_tokens(self) -> int:
        return self.algebra.generation_batch_size * (self.args.max_completion_length or 0)

    @property
    def most_trained_tokens(self) -> int:
        return self.algebra.completions_per_update * (self.args.max_completion_length or 0)

    @property
    def most_read_tokens(self) -> int:
        return self.most_trained_tokens + self.algebra.completions_per_update * self.prompt_tokens
