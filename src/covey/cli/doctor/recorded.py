"""A run that was recorded: its first generation is examined with its model and rewards, as far as they are there."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import datasets
import torch
from transformers import AutoTokenizer

from covey.cli.config_file import config_of, load_run, parts_of_record, settings_of
from covey.cli.doctor import rewards
from covey.cli.doctor.examined import ExaminedRun, SampleBatch, quiet
from covey.cli.train import build_trainer
from covey.core.records import FinishReason, Rollout, ScoredRollouts
from covey.observability.diagnostics import advice
from covey.observability.findings import Finding
from covey.observability.record import Replay, as_scored
from covey.observability.record_files import FOLDER, files, number_of, read_data, read_metrics, read_rows, read_run

ELSEWHERE = ("vllm_", "sglang_", "use_vllm", "use_sglang", "max_staleness", "replay_from", "report_to", "record")
"""Prefixes of settings that a second look at a run does without."""

FIRST = 4  # generations that are looked at together, as far as they have few prompts


def examine(
    run: Path, seconds: float, summary: dict[str, Any], staged: Callable[[ExaminedRun], Iterator[Finding]]
) -> Iterator[Finding]:
    """Findings from a record; where the run's parts can be made again, with the experiments of a run file."""
    described = read_run(run)
    read = PastRun(run, described)
    summary["generations"] = len(read.generations)
    trainer = rebuilt(described, read)
    if trainer is None:
        summary["rebuilt"] = False
        yield from alone(read, summary)
        yield from read.course()
        return
    read.weights = trainer.rewards.weights  # of environments, too
    base = read.batch() if read.tokens else None  # else sampled again
    examined = ExaminedRun(trainer, trainer.train_dataset, seconds, summary, base)
    cuts = any(name in read.settings for name in ("top_k", "top_p", "min_p", "repetition_penalty"))
    if read.tokens and not (cuts and read.replay.traits.reports_after_cut):  # else scores are of another distribution
        examined.others = read.load(read.generations[-1]).rollouts if len(read.generations) > 1 else []
        examined.own_engine = not read.replay.traits.shares_policy
    found = list(staged(examined))
    yield from found
    if not any(one.level == "error" for one in found):
        yield from read.course()
        yield from (one for one in advice(read_metrics(run / FOLDER), trainer.args, ended=True) if "tools" in one.code)
    trainer.rollouts.close()


def rebuilt(described: dict[str, Any], read: "PastRun") -> Any:
    """The run's trainer, as it was before its first step; None where a part has no name, or is gone."""
    parts = parts_of_record(described)
    tokenizer = parts.pop("tokenizer", None)
    if not parts.get("model") or None in parts.get("reward_funcs", ()) or not Path(parts["model"]).is_dir():
        return None
    kept = {name: value for name, value in read.settings.items() if not name.startswith(ELSEWHERE)}
    kept |= {name: value for name, value in parts.items() if name not in ("eval_dataset", "agent")}
    further: dict[str, Any] = {}
    try:
        with quiet(), tempfile.TemporaryDirectory(prefix="covey-doctor-") as place:
            if tokenizer:
                further["processing_class"] = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
            if "dataset" not in parts:
                further["train_dataset"] = datasets.Dataset.from_list(list(read_data(read.folder).values()))
            again = load_run({**kept, "output_dir": place, "report_to": "none", "record": "off"})
            return build_trainer(again, **further)
    except Exception as error:  # the code of a run that is over may raise anything
        read.problem = f"{type(error).__name__}: {error}"
        return None


class PastRun:
    def __init__(self, run: Path, described: dict[str, Any]):
        self.settings, self.problem = settings_of(described), "a part of it has no name"
        self.generations = [number_of(path) for path in files(run / FOLDER)]
        if not self.generations:
            raise ValueError(f"{str(run)!r} has a record without generations: the run ended before its first step.")
        self.names = list(described["rewards"])
        self.folder = run / FOLDER
        self.replay = Replay(run, self.names, 0, described["processes"])
        first = read_rows(self.replay.path(self.generations[0]))
        self.tokens = "token_ids" in first[0] and not any(row["images"] for row in first)
        config = config_of(parts_of_record(described)["method"])
        self.size = int(self.settings.get("num_generations") or config().num_generations or 8)
        self.weights = torch.tensor(self.settings.get("reward_weights") or [1.0] * len(self.names))

    def load(self, generation: int) -> ScoredRollouts:
        """Rollouts of a generation; without tokens where the record has none."""
        if self.tokens:
            return self.replay.load(generation)
        rows = read_rows(self.replay.path(generation))
        return as_scored(rows, self.names, [_without_tokens(row) for row in rows])

    def batch(self) -> SampleBatch:
        """The first generation; further ones where it has few prompts."""
        loaded: list[ScoredRollouts] = []
        for number in self.generations[:FIRST]:
            if sum(len(one.rollouts) for one in loaded) < 24:
                loaded.append(self.load(number))
        rollouts = [rollout for one in loaded for rollout in one.rollouts]
        samples = [sample for one in loaded for sample in one.draws]
        limit = int(self.settings.get("max_completion_length", 512))
        rewards = torch.cat([one.rewards for one in loaded])
        return SampleBatch(samples, rollouts, rewards, self.weights, self.size, limit, fresh=len(loaded[0].rollouts))

    def course(self) -> Iterator[Finding]:
        """Rewards and entropies from the first to the last generation: a policy that was destroyed."""
        taken = sorted({self.generations[n * (len(self.generations) - 1) // 11] for n in range(12)})
        if len(taken) < 4:
            return
        batches = [self.load(number) for number in taken]
        rewards = [(one.rewards.double() @ self.weights.double()).nanmean().item() for one in batches]
        entropies = [_entropy(one) for one in batches]
        third = max(1, len(taken) // 3)
        first, last = fmean(rewards[:third]), fmean(rewards[-third:])
        before, after = entropies[0], fmean(entropies[-third:])
        scale = max(max(rewards) - min(rewards), 1e-9)
        collapsed = after < 0.1 * before or after > 3 * before + 1
        if collapsed and last < first - 0.3 * scale:
            rate = self.settings.get("learning_rate", 1e-6)
            worst = min(range(1, len(taken)), key=lambda n: rewards[n] - rewards[n - 1])
            yield Finding(
                "learning-rate-high",
                "error",
                f"from the first to the last generations the mean reward went from {first:.3g} to {last:.3g} and the"
                f" entropy from {before:.2g} to {after:.2g} nats, at learning_rate={rate:g}.",
                f"Set learning_rate={rate / 10:g}.",
                f"It fell most at generation {taken[worst]}, from {rewards[worst - 1]:.3g} to {rewards[worst]:.3g}.",
            )


def _without_tokens(row: dict[str, Any]) -> Rollout:
    ids = [0] * row["length"]
    return Rollout([0], ids, [True] * len(ids), None, row["completion"], FinishReason(row["finish"]), row["group"])


def _entropy(scored: ScoredRollouts) -> float:
    pairs = (zip(one.entropies or one.logprobs or (), one.sampled, strict=True) for one in scored.rollouts)
    values = [abs(value) for both in pairs for value, sampled in both if sampled and value is not None]
    return fmean(values or [0.0])


def alone(read: PastRun, summary: dict[str, Any]) -> Iterator[Finding]:
    """Findings from what is on record, without experiments."""
    base = read.batch()
    read_by_rewards = ("multi_objective_aggregation", "dynamic_sample", "advantages")
    args = SimpleNamespace(method="grpo", **{name: read.settings.get(name) for name in read_by_rewards})
    suite = SimpleNamespace(names=read.names)
    run: Any = SimpleNamespace(base=base, args=args, suite=suite, group=read.size)
    summary.update(rewards.summary_of(run))
    lacking = f"The run cannot be made again for experiments ({read.problem})."
    errors = sum(one.finish is FinishReason.ERROR for one in base.rollouts)
    if not base.spread.any() and len(base.known):
        value = base.known.max().item()
        cause = "completions-cut" if base.cut > 0.9 else "signal-sparse"
        yield Finding(
            cause,
            "warning",
            f"all of {len(base.known)} completions of {base.prompts} prompts get equal rewards in their group (at most"
            f" {value:g}), {base.cut:.0%} are cut and {errors} failed.",
            "Raise max_completion_length." if base.cut > 0.9 else "Take other prompts, or look at the reward function.",
            lacking,
        )
    yield from rewards.scale(run)
    yield from rewards.signal(run)
