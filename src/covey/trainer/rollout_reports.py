"""Reports on rollouts: times, streamed rewards, failures, agents' metrics, and rows of the completions table."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from covey.algorithms.credit import Credit
from covey.config.base import OnlineConfig
from covey.core.advantages import weighted_total
from covey.core.batch import TrainBatch
from covey.core.likeness import Keys
from covey.core.records import FinishReason, PromptSample, RankShard, Rollout, RolloutBatch, Scores
from covey.core.stats import Max, Mean, Min, Stat, merge_all
from covey.core.terms import TermCounts
from covey.core.transcript import Counts, RolloutSummary, count
from covey.observability.excerpts import thumbnails
from covey.observability.metric_docs import is_taken
from covey.observability.metrics import ROLLOUTS, Timeline, covered, stats_by_label
from covey.rewards.call import RewardStream
from covey.rewards.contract import RewardError
from covey.rewards.functions import RewardContext, check_logged_name
from covey.rollout.collector import group_numbers
from covey.rollout.runner import RolloutSpec
from covey.rollout.tools.toolbox import call_stats
from covey.rollout.user_functions import RolloutError
from covey.trainer.build_rollouts import plays_functions

FAILED_BATCHES = 3  # after this many rollout batches in a row in which every rollout failed, the run stops


class RolloutWarning(UserWarning):
    """A rollout failed, and the run continues."""


@dataclass
class RewardLog:
    """Columns and metrics that reward functions log while they run."""

    columns: dict[str, list[Any]] = field(default_factory=dict)  # of the completions table, one cell per rollout
    metrics: dict[str, Stat] = field(default_factory=dict)  # means over calls, processes and the logging window

    def log_extra(self, column: str, values: list[Any]) -> None:
        earlier = self.columns.get(column, [None] * len(values))  # of functions for the rows of other sources
        self.columns[column] = [old if value is None else value for value, old in zip(values, earlier, strict=True)]

    def log_metric(self, name: str, value: float) -> None:
        check_logged_name("log_metric", name)
        if is_taken(name):
            raise RewardError(
                f"log_metric({name!r}, ...): the trainer logs a metric of this name itself. Choose another, such as"
                f" 'my/{name}'."
            )
        merge_all(self.metrics, {name: Mean(float(value), 1.0)})

    def context(self, trainer_state: Any) -> RewardContext:
        return RewardContext(trainer_state, self.log_extra, self.log_metric)


def add_spans(timeline: Timeline, stream: RewardStream, names: Sequence[str]) -> None:
    """Add the spans of rollouts and of the named reward functions to a timeline, once all is scored."""
    timeline.add(ROLLOUTS, "", stream.rollout_spans)
    calls = stream.spans()
    for index, spans in calls.items():
        timeline.add(names[index], "", spans)
    if calls:
        last = max((end for _, end in stream.rollout_spans), default=0.0)
        timeline.overlap("reward", covered(chain.from_iterable(calls.values()), until=last))


class FailureMonitor:
    """Lets a run continue without failed rollouts, and stops it if all fail."""

    def __init__(self, gather: Callable[[Any], list[Any]] | None = None) -> None:
        self._gather = gather or (lambda mine: [mine])
        self._has_worked = False
        self._failed_batches = 0
        self._warned = False

    def state_dict(self) -> dict[str, Any]:
        return {"has_worked": self._has_worked, "failed_batches": self._failed_batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._has_worked, self._failed_batches = state["has_worked"], state["failed_batches"]

    def count(self, rollouts: Sequence[Rollout]) -> None:
        """Count the failed rollouts of this process; all processes decide together, as one may fail by chance."""
        mine = [rollout.error for rollout in rollouts if rollout.finish is FinishReason.ERROR]
        present = sum(not rollout.absent for rollout in rollouts)
        errors, counts, totals = zip(*self._gather((mine[:1], len(mine), present)), strict=True)
        failed, total, first = sum(counts), sum(totals), next(chain.from_iterable(errors), None)
        if failed < total:
            self._has_worked, self._failed_batches = True, 0
        elif total:
            self._failed_batches += 1
            if not self._has_worked or self._failed_batches >= FAILED_BATCHES:
                often = f", {self._failed_batches} rollout batches in a row" if self._has_worked else ""
                raise RolloutError(f"all {total} rollouts failed{often}. The first one: {first}")
        if failed and not self._warned:
            self._warned = True
            warnings.warn(
                f"{failed} of {total} rollouts failed; they get no reward and are counted in rollouts/failed. The first"
                f" one: {first}",
                RolloutWarning,
                stacklevel=4,
            )


def failure_stats(rollouts: Sequence[Rollout]) -> dict[str, Stat]:
    failed = [float(rollout.finish is FinishReason.ERROR) for rollout in rollouts if not rollout.absent]
    return {"rollouts/failed": Mean.of(failed)}


def agent_stats(rollouts: Sequence[Rollout], spec: RolloutSpec) -> dict[str, Stat]:
    """`rollouts/turns`, `rollouts/failed`, ... and, where there are tools, outcomes and seconds of calls."""
    rollouts = [rollout for rollout in rollouts if not rollout.absent]
    has_tools = not plays_functions(spec) and getattr(spec.play, "schemas", True)
    tools = has_tools or any(rollout.calls for rollout in rollouts)
    seconds: dict[str, Stat] = {"tools/seconds": Mean.of([rollout.tool_seconds for rollout in rollouts])}
    return {
        "rollouts/turns": Mean.of([float(rollout.num_turns) for rollout in rollouts]),
        "rollouts/seconds": Mean.of([rollout.seconds for rollout in rollouts if rollout.seconds]),
        **failure_stats(rollouts),
        "rollouts/tool_budget": Mean.of([float(rollout.finish is FinishReason.TOOL_BUDGET) for rollout in rollouts]),
        **(call_stats(rollouts) | seconds if tools else {}),
    }


def lengths_of(sampled: Any) -> dict[str, list[float]]:
    """Lengths and truncation of a `GlobalBatch` or a `SamplingRound`; NaN for rollouts that have no length."""
    columns = {"mean_length": sampled.lengths, "truncated": sampled.truncated}
    return {
        name: [float(value) if played else math.nan for value, played in zip(values, sampled.played, strict=True)]
        for name, values in columns.items()
    }


def role_stats(sampled: Any, weights: Tensor, members_PG: Tensor) -> dict[str, Stat]:
    """Metrics by role of a `GlobalBatch` or a `SamplingRound`, and the share of rollouts that are alone in theirs."""
    totals = weighted_total(sampled.scores.rewards.double(), weights.double()).tolist()
    roles = [seat.role for seat in sampled.scores.seats]
    means = {"reward": totals, **lengths_of(sampled)}
    sizes = (members_PG >= 0).sum(1)
    alone = {"roles/alone": Mean(float((sizes == 1).sum()), sum(sampled.scores.present))}
    return {**stats_by_label("roles", roles, means, {"reward_std": totals}), **alone}


def credit_stats(scores: Scores, credit: Credit, baselines_N: Tensor | None) -> dict[str, Stat]:
    """Share of each role's rollouts without a signal, and its running mean where it is compared with one."""
    means: dict[str, Sequence[float]] = {"advantage_zero": (~credit.has_signal()).tolist()}
    if baselines_N is not None:
        means["baseline"] = baselines_N.tolist()
    return stats_by_label("roles", [seat.role for seat in scores.seats], means, {})


def games_of(samples: Sequence[PromptSample], rollouts: Sequence[Rollout]) -> list[list[int]]:
    """Numbers of the rollouts of each game; a rollout without a role belongs to none."""
    games: dict[tuple[int, int], list[int]] = {}
    for number, (group, rollout) in enumerate(zip(group_numbers(samples), rollouts, strict=True)):
        if rollout.role:
            games.setdefault((group, rollout.game), []).append(number)
    return [*games.values()]


def without_failed_games(samples: Sequence[PromptSample], rollouts: Sequence[Rollout], rewards_NF: Tensor) -> Tensor:
    """The rewards, NaN for all seats of a game in which one failed: what the others got is not their own."""
    failed = [rollout.finish is FinishReason.ERROR for rollout in rollouts]
    lost = [number for seats in games_of(samples, rollouts) if any(failed[one] for one in seats) for number in seats]
    if not lost:
        return rewards_NF
    rewards = rewards_NF.clone()
    rewards[lost] = torch.nan
    return rewards


def opponent_stats(rollouts: Sequence[Rollout], rewards_NF: Tensor, weights_NF: Tensor) -> dict[str, Stat]:
    """Mean reward against each earlier policy, by its age in optimizer steps."""
    ages = [str(rollout.extras.get("opponent_age", "")) for rollout in rollouts]
    totals = weighted_total(rewards_NF.double(), weights_NF.double()).tolist()
    return stats_by_label("opponents", ages, {"reward": totals}, {})


def game_stats(samples: Sequence[PromptSample], rollouts: Sequence[Rollout]) -> dict[str, Stat]:
    """Failures by role, turns of a game over all of its seats, and draws, of this process's rollouts."""
    games = [[rollouts[number] for number in seats] for seats in games_of(samples, rollouts)]
    if not games:
        return {}
    failed = [rollout.finish is FinishReason.ERROR for rollout in rollouts]
    turns = [float(sum(one.num_turns for one in seats)) for seats in games]
    outcomes = [[one.extras["outcome"] for one in seats if "outcome" in one.extras] for seats in games]
    draws = [float(known[0] == "draw") for known in outcomes if known]
    stats = stats_by_label("roles", [rollout.role for rollout in rollouts], {"failures": failed}, {})
    return {**stats, "games/length": Mean.of(turns), "games/draws": Mean.of(draws)}


def staleness(rollout: Rollout, version: int) -> list[int]:
    """Optimizer steps from the weights that sampled each sampled token to `version`; empty if unknown."""
    if rollout.versions is None:
        return []
    pairs = zip(rollout.versions, rollout.sampled, strict=True)
    return [version - sampled_with for sampled_with, sampled in pairs if sampled]


def staleness_stats(rollouts: Sequence[Rollout], version: int) -> dict[str, Stat]:
    ages = [float(age) for rollout in rollouts for age in staleness(rollout, version)]
    if not ages:
        return {}
    return {"sampling/staleness/mean": Mean.of(ages), "sampling/staleness/max": Max(max(ages))}


def token_ages(rollouts: Sequence[Rollout], version: int) -> list[int]:
    """Largest staleness of a token of each rollout, in optimizer steps; 0 if unknown."""
    return [max(staleness(rollout, version), default=0) for rollout in rollouts]


def sampling_entropy(rollouts: Sequence[Rollout], batch: TrainBatch) -> dict[str, Stat]:
    """The `entropy` metric, over every trained token, where the engine measured it while sampling; else nothing."""
    flat: list[float] = []
    for rollout in rollouts:
        if rollout.entropies is None:
            return {}
        flat += rollout.entropies
    trained = torch.tensor(flat)[batch.sampled.cpu()]
    return {"entropy": Mean(trained.sum().item(), len(trained))}


def entropy_stats(entropies: Sequence[float | None]) -> dict[str, Stat]:
    """`entropy/mean`, `entropy/max` and `entropy/min` over completions."""
    known = [entropy for entropy in entropies if entropy is not None]
    if not known:
        return {}
    return {"entropy/mean": Mean.of(known), "entropy/max": Max(max(known)), "entropy/min": Min(min(known))}


def columns_of(summaries: Sequence[RolloutSummary]) -> dict[str, list[Any]]:
    return {name: [getattr(one, name) for one in summaries] for name in RolloutSummary._fields}


def as_logged(columns: dict[str, list[Any]], rewards: Tensor, functions: Sequence[str]) -> dict[str, Any]:
    """Arguments of `CompletionLog.add`, with [N, F] rewards; a rollout without a cell or a reward has None."""
    extras = columns["extras"]
    names = dict.fromkeys(chain.from_iterable(extras))
    by_function = zip(functions, rewards.T.tolist(), strict=True)
    entropies = {"entropy": columns["entropy"]} if set(columns["entropy"]) - {None} else {}
    return {
        "prompts": columns["prompt"],
        "completions": columns["completion"],
        "finish": columns["finish"],
        "counts": columns["counts"],
        "errors": columns["error"],
        "images": columns["images"],
        "lengths": columns["length"],
        "rewards": {name: [None if one != one else one for one in values] for name, values in by_function},
        "extras": entropies | {name: [cells.get(name) for cells in extras] for name in names},
    }


def logs_completions(args: OnlineConfig) -> bool:
    """True where the first process shows, sends or exports the completions of all."""
    return args.log_completions or args.exports_completions


def mean_entropies(rollouts: Sequence[Rollout], args: OnlineConfig) -> list[float | None]:
    """Mean entropy over each completion's sampled tokens, if the config asks for them; None if unknown."""
    if not args.log_entropy:
        return [None] * len(rollouts)
    known = [list(compress(rollout.entropies or (), rollout.sampled)) for rollout in rollouts]
    return [fmean(entropies) if entropies else None for entropies in known]


def summarize(scored: RolloutBatch, args: OnlineConfig) -> list[RolloutSummary]:
    """A summary of each rollout, with small images and its entropy if the config asks for them."""
    known: dict[int, bytes] = {}
    entropies = mean_entropies(scored.rollouts, args)
    found = []
    for index, (sample, rollout) in enumerate(zip(scored.samples, scored.rollouts, strict=True)):
        # Messages show calls that were not executed, too; the rollout's own counts know their results.
        shown, executed = count(rollout.completion), sum(rollout.calls.values())
        extras = {"solution": sample.row["solution"]} if "solution" in sample.row else {}
        if scored.columns:
            extras |= {name: values[index] for name, values in scored.columns.items()}
        failed = executed - rollout.calls.get("ok", 0) if executed else shown.failed_calls
        found.append(
            RolloutSummary(
                length=rollout.num_sampled,
                prompt=rollout.asked(sample.row) or "",
                completion=rollout.completion,
                finish=str(rollout.finish),
                counts=Counts(rollout.num_turns or shown.turns, max(executed, shown.calls), failed),
                error=rollout.error,
                images=thumbnails(rollout.images, known) if args.log_multimodal and rollout.media else [],
                extras=extras,
                entropy=entropies[index],
            )
        )
    return found


class GlobalBatch:
    """The shares of all processes, joined in the order of ranks."""

    def __init__(self, shards: list[RankShard], rank: int):
        sizes, kl = [], []
        self.lengths: list[int] = []
        self.truncated: list[bool] = []
        self.played: list[bool] = []
        self.entropies: list[float | None] = []
        self.likeness: list[Keys] = []
        self.trained: list[int] = []
        self.micro_batches = self.staleness = prompt_tokens = 0
        for shard in shards:
            self.lengths += shard.lengths
            self.truncated += shard.truncated
            self.played += shard.played
            self.entropies += shard.entropies
            self.likeness += shard.likeness
            sizes.append(len(shard.lengths))
            prompt_tokens += shard.prompt_tokens
            kl += [] if shard.kl is None else [shard.kl]
            self.trained += shard.trained
            self.micro_batches += shard.micro_batches
            self.staleness = max(self.staleness, shard.staleness)
        self.terms = {name: TermCounts.sum(shard.terms[name] for shard in shards) for name in shards[0].terms}
        self.term_sizes = {name: [*chain(*(shard.term_sizes[name] for shard in shards))] for name in self.terms}
        self.scores = shards[0].scores if len(shards) == 1 else Scores.joined([shard.scores for shard in shards])
        self.trained_tokens = sum(self.trained)
        self.kl = torch.cat(kl) if kl else None
        self.processed_tokens = sum(self.lengths) + prompt_tokens
        start = sum(sizes[:rank])
        self.mine = slice(start, start + sizes[rank])  # this process's rollouts

    def table(self, summaries: Sequence[RolloutSummary], names: list[str], advantages: Tensor) -> dict[str, Any]:
        """The completions table of summaries of all processes, as arguments of `CompletionLog.add`."""
        there = [number for number, present in enumerate(self.scores.present) if present]
        logged = as_logged(columns_of([summaries[number] for number in there]), self.scores.rewards[there], names)
        for function in self.scores.process_functions:  # last token and reward of each step
            steps = self.scores.steps_of(function)
            logged["extras"][f"{names[function]}_steps"] = [
                [[float(end), None if reward != reward else reward] for end, reward in steps[number]]
                for number in there
            ]
        return {**logged, "advantages": advantages[there].tolist()}
