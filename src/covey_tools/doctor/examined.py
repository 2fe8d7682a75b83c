"""A run under examination: its trainer, a few of its prompts, and experiments on them, each a batch of completions."""

import copy
import functools
import math
import random
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from covey.core.advantages import nanstd, weighted_total
from covey.core.batch import TrainBatch, collate
from covey.core.records import FinishReason, PromptSample, Rollout
from covey.core.stats import Stat
from covey.data.sources import COLUMN, Sources
from covey.rewards import RewardError
from covey.rollout.prompts import is_conversational
from covey.rollout.tool_agent import ToolAgent
from covey.rollout.user_batch_function import BatchFunction
from covey.rollout.vision import Encoded
from covey.trainer.rollout_reports import RewardLog

PROMPTS, SAMPLES = 6, 8  # looked at first, and least samples of each
FEWEST = 3  # prompts that are looked at where rewards take long
CALLS = 30  # of the rewards, about, for all experiments
MOST_ROWS = 1000  # of the dataset, whose columns are compared
Encode = Callable[[dict[str, Any]], list[int]]  # a row to the tokens of its prompt
quiet = functools.partial(warnings.catch_warnings, action="ignore")


@dataclass(eq=False)
class SampleBatch:
    """Completions of a few prompts, `size` of each one after another, with their rewards."""

    samples: list[PromptSample]
    rollouts: list[Rollout]
    rewards: Tensor  # [N, F], NaN where a function gave none
    weights: Tensor  # [F]
    size: int
    limit: int  # most tokens of a completion
    seconds: float = 0.0  # of sampling
    stats: dict[str, Stat] = field(default_factory=dict)  # of the reward functions
    fresh: int | None = None  # how many of the first rollouts the untrained policy has sampled; None: all

    @property
    def prompts(self) -> int:
        return len(self.rollouts) // self.size

    @cached_property
    def totals(self) -> Tensor:  # [P, size]
        return weighted_total(self.rewards.double(), self.weights.double()).view(-1, self.size)

    @property
    def known(self) -> Tensor:
        return self.totals[~self.totals.isnan()]

    @property
    def mean(self) -> float:
        return self.known.mean().item() if len(self.known) else math.nan

    @property
    def spread(self) -> Tensor:  # [P], deviation of the rewards of each group
        return nanstd(self.totals, dim=1)[:, 0]

    @property
    def seconds_of_rewards(self) -> float:
        return sum(stat.value() for name, stat in self.stats.items() if re.fullmatch("rewards/.*/seconds", name))

    @property
    def present(self) -> list[Rollout]:
        """All rollouts but absent ones, which fill up groups."""
        return [one for one in self.rollouts if not one.absent]

    @property
    def unscored(self) -> Tensor:  # [P, size], those present that have no reward
        return self.totals.isnan() & ~torch.tensor([one.absent for one in self.rollouts]).view_as(self.totals)

    @property
    def cut(self) -> float:
        return sum(one.finish is FinishReason.LENGTH for one in self.present) / max(len(self.present), 1)

    @property
    def texts(self) -> list[str]:
        return [str(one.completion) for one in self.present]

    def signal(self, size: int) -> float:
        """Expected share of groups of `size` whose rewards differ, from all completions of each prompt."""
        shares = []
        for row in self.totals:
            values = [value for value in row.tolist() if value == value]
            count, equal = len(values), 0.0
            for times in Counter(values).values():
                alike = math.comb(times, size) / math.comb(count, size) if size <= count else (times / count) ** size
                equal += alike
            shares.append(1 - equal if count > 1 else 0.0)
        return fmean(shares)

    def first(self, prompts: int) -> "SampleBatch":
        kept = prompts * self.size
        return replace(self, samples=self.samples[:kept], rollouts=self.rollouts[:kept], rewards=self.rewards[:kept])

    def joined(self, other: "SampleBatch") -> "SampleBatch":
        """This batch and another of the same prompts, as one with larger groups."""
        first, second, rows = self.size, other.size, range(self.prompts)

        def merged(mine: Sequence[Any], others: Sequence[Any]) -> list[Any]:
            parts = ((mine[n * first : (n + 1) * first], others[n * second : (n + 1) * second]) for n in rows)
            return [one for pair in parts for part in pair for one in part]

        rewards = torch.stack(merged([*self.rewards], [*other.rewards]))
        samples, rollouts = merged(self.samples, other.samples), merged(self.rollouts, other.rollouts)
        return replace(self, samples=samples, rollouts=rollouts, rewards=rewards, size=first + second)

    def gain(self, other: "SampleBatch") -> float:
        """Rise of the mean reward from this batch to another of the same prompts, as a share of the range; 0 if
        chance explains it."""
        if not len(self.known) or not len(other.known):
            return 0.0
        both = torch.cat([self.known, other.known])
        scale = (both.max() - both.min()).item()
        error = sum(float(one.known.var(correction=0)) / len(one.known) for one in (self, other)) ** 0.5
        rise = other.mean - self.mean
        return rise / scale if scale and abs(rise) > 2 * error + 1e-9 else 0.0


@dataclass(eq=False)
class ExaminedRun:
    """A run's trainer, the completions to explain, and the means to try other settings within `seconds`."""

    trainer: Any
    rows: Any  # of the dataset
    seconds: float = 75.0
    summary: dict[str, Any] = field(default_factory=dict)  # figures for the report
    recorded: SampleBatch | None = None  # of the first rollout batch on record; None: sampled here
    others: list[Rollout] = field(default_factory=list)  # of the last rollout batch on record
    place: str = "output_dir"  # of the run, for people
    evaluations: dict[str, Any] = field(default_factory=dict)  # rows of evaluation sets by name
    own_engine: bool = False  # those on record were sampled by an engine with weights of its own

    def __post_init__(self) -> None:
        self._ends, self._experiments = time.perf_counter() + self.seconds, 0
        self._longest = 0.0  # seconds of one sampling, with its rewards
        trainer = self.trainer
        self.args, self.collector, self.suite = trainer.args, trainer.collector, trainer.rewards
        self.codec, self.tokenizer = self.collector.codec, self.collector.codec.tokenizer
        self.suite.timeout = min(self.suite.timeout, self.seconds / 5)
        self.failure: RewardError | None = None
        self.group = trainer.run.algebra.num_generations
        self.weights = self.suite.weights
        play = self.collector.spec and self.collector.spec.play
        self.single = play is None and self.codec.vision is None  # one turn of text: prompts can be written otherwise
        self.needs_calls = isinstance(play, ToolAgent)  # of tools, which a text of one turn does not make
        self.rescores = play is None or self.needs_calls  # rewards read the completion alone

    @property
    def steps(self) -> int:
        args, algebra = self.args, self.trainer.run.algebra
        if args.max_steps > 0 or not hasattr(self.rows, "__len__"):
            return max(args.max_steps, 1)
        rollout_batches = len(self.rows) * self.group // algebra.generation_batch_size
        return max(1, int(rollout_batches * algebra.updates_per_rollout_batch * args.num_train_epochs))

    @property
    def left(self) -> float:
        return self._ends - time.perf_counter()

    def has_time(self, code: str) -> bool:
        """True if there is time for one more experiment; else its finding is noted as not examined.

        One takes as long as the longest so far, so that the last one does not end late.
        """
        if self.left > max(self.seconds / 10, self._longest):
            return True
        self.leave_out("time", code)
        return False

    def leave_out(self, reason: str, *codes: str) -> None:
        """Note codes that were not examined for want of "time" or a "part" of the run, or because of its "kind"."""
        for code in codes:
            self.summary.setdefault("not_examined", {}).setdefault(code, reason)

    @property
    def rows_read(self) -> int:
        """Number of rows that the run comes to: unshuffled, a short run ends before the last ones."""
        args, algebra = self.args, self.trainer.run.algebra
        chosen = args.prompt_sampler != "uniform" or args.dynamic_sample or args.gates or isinstance(self.rows, Sources)
        if args.shuffle_dataset or chosen:
            return len(self.rows)
        batches = math.ceil(self.steps / algebra.updates_per_rollout_batch)
        return min(len(self.rows), max(batches * (algebra.generation_batch_size // self.group), PROMPTS))

    @cached_property
    def numbers(self) -> list[int]:
        """Numbers of the rows in `taken`."""
        if not hasattr(self.rows, "__len__"):
            return list(range(len(self.taken)))
        if isinstance(self.rows, Sources):
            firsts, most = self.rows.firsts, MOST_ROWS // len(self.rows.sources)
            return [first + place for first, last in pairwise(firsts) for place in _evenly(last - first, most)]
        return _evenly(self.rows_read, MOST_ROWS)

    @cached_property
    def taken(self) -> list[dict[str, Any]]:
        """Rows of the dataset, evenly over those that the run comes to."""
        if not hasattr(self.rows, "__len__"):
            return [dict(row) for row in islice(iter(self.rows), MOST_ROWS)]
        return [dict(self.rows[number]) for number in self.numbers]

    @cached_property
    def step_seconds(self) -> float:
        """Seconds for one more token of each of a few completions."""
        self.sample(1, SAMPLES, max_tokens=2)  # what the first call sets up
        few = self.sample(1, SAMPLES, max_tokens=min(16, self.limit))
        longest = max((len(one.completion_ids) for one in few.rollouts), default=1)
        return few.seconds / max(longest, 1)

    @property
    def limit(self) -> int:
        return min(self.trainer.rollouts.params.max_tokens, (self.codec.max_context or 2**20))

    @property
    def turn_limit(self) -> int | None:
        """Most tokens of a turn of the policy, where it plays turns."""
        spec = self.collector.spec
        return None if spec is None or isinstance(spec.play, BatchFunction) else spec.max_turn_length

    def tokens_within(self, seconds: float, completions: int) -> int:
        """Tokens of so many completions for which there is time."""
        return int(seconds / (self.step_seconds * max(1.0, (completions / SAMPLES) ** 0.6)))

    @cached_property
    def base(self) -> SampleBatch:
        """The completions to explain: those on record, or samples by the run's own settings."""
        if self.recorded is not None:
            self.recorded.stats = self.score(self.recorded.samples, self.recorded.rollouts)[1]
            return self.recorded
        prompts, size = min(PROMPTS, len(self.taken)), max(SAMPLES, min(self.group, 16))
        while prompts > 2 and self.tokens_within(self.seconds / 4, prompts * size) < self.limit:
            prompts -= 1
        limit = min(self.limit, max(self.tokens_within(self.seconds / 4, prompts * size), 16))
        batch = self.sample(prompts, size, max_tokens=limit)
        if batch.seconds_of_rewards > self.seconds / CALLS and prompts > FEWEST:
            batch = batch.first(FEWEST)
            batch.stats = self.score(batch.samples, batch.rollouts)[1]
        return batch

    def sample(
        self, prompts: int, size: int, encode: Encode | None = None, start: int = 0, **changes: Any
    ) -> SampleBatch:
        """Sample and reward with other settings or other tokens of prompts: those to explain, with a `start` others."""
        if "base" in self.__dict__ and not start:
            asked = [(one.prompt, one.row) for one in self.base.samples[:: self.base.size]][:prompts]
        else:
            places = self._places(prompts, start)
            asked = [(self.numbers[place], self.taken[place]) for place in places]
        return self.sampled_of(asked, size, encode, **changes)

    def _places(self, prompts: int, start: int) -> list[int]:
        """Places among `taken` of so many rows, equally many of each source."""
        if not isinstance(self.rows, Sources):
            return _evenly(len(self.taken), prompts, start)
        found, names = list[int](), self.rows.names
        for index, name in enumerate(names):
            own = [place for place, row in enumerate(self.taken) if row[COLUMN] == name]
            count = prompts // len(names) + (index < prompts % len(names))
            found += [own[place] for place in _evenly(len(own), count, start)]
        return found

    def sampled_of(
        self,
        asked: Sequence[tuple[int, dict[str, Any]]],
        size: int,
        encode: Encode | None = None,
        max_turn_length: int | None = None,
        **changes: Any,
    ) -> SampleBatch:
        """Sample and reward completions of rows, given with their numbers; a `max_turn_length` instead of the run's."""
        samples = [PromptSample(row, number, sample) for number, row in asked for sample in range(size)]
        params = replace(self.trainer.rollouts.params, **changes)
        self._experiments += 1
        own, spec = self.collector.codec, self.collector.spec
        if max_turn_length is not None and spec is not None:
            self.collector.spec = replace(spec, max_turn_length=max_turn_length)
        if encode is not None:
            self.collector.codec = copy.copy(own)
            self.collector.codec.read_row = lambda row: Encoded(encode(row))
        began = time.perf_counter()
        try:
            with quiet():
                rollouts = self.collector.collect(samples, params, ("doctor", self._experiments))
        finally:
            self.collector.codec, self.collector.spec = own, spec
        seconds = time.perf_counter() - began
        rewards, stats = self.score(samples, rollouts)
        if self.collector.spec is not None:
            self.collector.spec.release(rollouts)
        self._longest = max(self._longest, time.perf_counter() - began)
        return SampleBatch(samples, rollouts, rewards, self.weights, size, params.max_tokens, seconds, stats)

    def again(self, **changes: Any) -> SampleBatch:
        """Other completions of the prompts to explain."""
        return self.sample(self.base.prompts, self.base.size, max_tokens=self.base.limit, **changes)

    def score(self, samples: Sequence[PromptSample], rollouts: list[Rollout]) -> tuple[Tensor, dict[str, Stat]]:
        """Rewards [N, F]; NaN for all, and the error in `failure`, where a function fails on all."""
        try:
            with quiet():
                context = RewardLog().context(self.trainer.state)
                result = self.suite([sample.row for sample in samples], rollouts, context)
            return result.rewards, result.stats
        except RewardError as error:
            self.failure = error
            return torch.full((len(rollouts), len(self.suite.names)), math.nan), {}

    def totals(self, rows: Sequence[dict[str, Any]], rollouts: list[Rollout], function: int | None = None) -> Tensor:
        """Weighted rewards [N] of rollouts with other rows than their own; or the rewards by one function."""
        samples = [PromptSample(row, number, 0) for number, row in enumerate(rows)]
        rewards = self.score(samples, rollouts)[0].double()
        return weighted_total(rewards, self.weights.double()) if function is None else rewards[:, function]

    def answering(self, row: dict[str, Any], text: str) -> Rollout:
        """A rollout whose completion is a text."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        shown = [{"role": "assistant", "content": text}] if is_conversational(row.get("prompt")) else text
        return Rollout([0], list(ids), [True] * len(ids), None, shown, FinishReason.STOP)

    @torch.no_grad()
    def logprobs(self, batch: TrainBatch, temperature: float = 1.0, exact: bool = False) -> Tensor:
        """Log-probs [N] under the policy; `exact`: in the weights' own precision, in which small updates show."""
        trainer = self.trainer
        with quiet(), trainer.scorer.at_temperature(temperature):
            trainer.batch_scorer.settle_layout(batch)
            if exact:
                return trainer.scorer(trainer.model, batch).logprobs
            return trainer.batch_scorer.logprobs(trainer.model, batch)

    def likelihoods(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        """Mean log-probability, in nats, of the second of each pair of lists of tokens after the first."""
        batch = self.collated([Rollout(a, b, [True] * len(b), None, "", FinishReason.STOP) for a, b in pairs])
        scored = self.logprobs(batch).split(batch.lengths.tolist())
        return [part.mean().item() for part in scored]

    def collated(self, rollouts: list[Rollout]) -> TrainBatch:
        numbers: dict[tuple[int, ...], int] = {}
        for one in rollouts:
            one.group = numbers.setdefault(tuple(one.prompt_ids), len(numbers))
        return collate(rollouts).to(self.trainer.run.device)


def _evenly(total: int, most: int, start: int = 0) -> list[int]:
    """Numbers of so many rows, evenly over all of them; with a `start` others, at random."""
    count = min(most, total)
    if start:
        return sorted(random.Random(start).sample(range(total), count))
    return [number * total // count for number in range(count)]
