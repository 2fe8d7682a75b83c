"""Credit of a generation: rewards of all processes in, advantages and token weights out, and the log of both."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covey.algorithms.credit import Credit, UnreadSettings, assign_credit, step_stats
from covey.core.batch import TrainBatch
from covey.core.records import RankShard, RolloutSummary, Scores
from covey.core.transcript import Counts, count, thumbnails
from covey.data.dynamic_sampling import ScoredRollouts
from covey.observability.completions import CompletionLog
from covey.observability.metrics import generation_stats
from covey.rewards import RewardSuite
from covey.trainer.behaviour import token_ages
from covey.trainer.context import RunContext
from covey.trainer.rollout_buffer import weigh
from covey.trainer.rollout_phase import RolloutBatch


class SummaryColumns(NamedTuple):
    """The same fields of many rollouts, each a list."""

    length: list[int]
    truncated: list[bool]
    prompt_length: list[int]
    prompt: list[Any]
    completion: list[Any]
    finish: list[str]
    counts: list[Counts]
    error: list[str | None]
    images: list[list[bytes]]
    extras: list[dict[str, Any]]

    @classmethod
    def of(cls, summaries: Sequence[RolloutSummary]) -> "SummaryColumns":
        """The columns of a table of summaries."""
        return cls(*map(list, zip(*summaries, strict=True))) if summaries else cls(*([] for _ in cls._fields))

    @property
    def extra_columns(self) -> dict[str, list[Any]]:
        """Logged columns by name, with None where a rollout has no cell."""
        names = dict.fromkeys(chain.from_iterable(self.extras))
        return {name: [cells.get(name) for cells in self.extras] for name in names}


class GlobalBatch:
    """The shares of all processes, joined.

    Args:
        shards: in the order of ranks.
        rank: this process.

    Attributes:
        mine: indices of this process's rollouts.
    """

    def __init__(self, shards: list[RankShard], rank: int):
        alone = shards[0] if len(shards) == 1 else None
        summaries, sizes, kl = [], [], []
        self.trained_tokens = self.micro_batches = self.staleness = 0
        for shard in shards:
            summaries += shard.summaries
            sizes.append(len(shard.summaries))
            kl += [] if shard.kl is None else [shard.kl]
            self.trained_tokens += shard.trained_tokens
            self.micro_batches += shard.micro_batches
            self.staleness = max(self.staleness, shard.staleness)
        self.scores = alone.scores if alone else Scores.joined([shard.scores for shard in shards])
        self.kl = torch.cat(kl) if kl else None
        self.columns = SummaryColumns.of(summaries)
        self.lengths, self.truncated = self.columns.length, self.columns.truncated
        self.processed_tokens = sum(self.lengths) + sum(self.columns.prompt_length)
        start = sum(sizes[:rank])
        self.mine = slice(start, start + sizes[rank])

    def table(self, names: list[str], advantages: Tensor) -> dict[str, Any]:
        """The completions table over all processes, as arguments of `CompletionLog.add`.

        Args:
            names: of the reward functions.
            advantages: [rollouts], of each one's first token.
        """
        columns, extras = self.columns, self.columns.extra_columns
        for function in self.scores.process_functions:  # last token and reward of each step
            extras[f"{names[function]}_steps"] = [
                [[float(end), None if reward != reward else reward] for end, reward in pairs]
                for pairs in self.scores.steps_of(function)
            ]
        return {
            "prompts": columns.prompt,
            "completions": columns.completion,
            "rewards": {name: none_for_nan(self.scores.rewards[:, k]) for k, name in enumerate(names)},
            "advantages": advantages.tolist(),
            "extras": extras,
            "finish": columns.finish,
            "counts": columns.counts,
            "errors": columns.error,
            "images": columns.images,
            "lengths": columns.length,
        }


def summarize(scored: ScoredRollouts, images: bool) -> list[RolloutSummary]:
    """A summary of each rollout; with `images`, small ones of each."""
    known: dict[int, bytes] = {}
    found = []
    for index, (sample, rollout) in enumerate(zip(scored.draws, scored.rollouts, strict=True)):
        # Messages show calls that were not executed, too; the rollout's own counts know their results.
        shown, executed = count(rollout.completion), sum(rollout.calls.values())
        failed = executed - rollout.calls.get("ok", 0) if executed else shown.failed_calls
        found.append(
            RolloutSummary(
                length=rollout.num_sampled,
                truncated=rollout.truncated,
                prompt_length=len(rollout.prompt_ids),
                prompt=rollout.asked(sample.row) or "",
                completion=rollout.completion,
                finish=str(rollout.finish),
                counts=Counts(rollout.num_turns or shown.turns, max(executed, shown.calls), failed),
                error=rollout.error,
                images=thumbnails(rollout.images, known) if images and rollout.media else [],
                extras={name: values[index] for name, values in scored.columns.items()} if scored.columns else {},
            )
        )
    return found


def none_for_nan(values: Tensor) -> list[float | None]:
    """Numbers as tables hold them."""
    return [None if value != value else value for value in values.tolist()]


def check_staleness(staleness: int, max_staleness: int) -> None:
    """Refuse to train on tokens that are staler than the run allows.

    Args:
        staleness: the largest of all processes' tokens, in optimizer steps.
        max_staleness: the run's.

    Raises:
        RuntimeError: the engine has sampled with older weights than it was given.
    """
    if staleness > max_staleness:
        raise RuntimeError(
            f"the engine says that it sampled tokens with weights {staleness} optimizer steps older than those that are"
            f" trained, and max_staleness={max_staleness} allows {max_staleness}: it has not taken weights that it was"
            " sent. Look at the engine's log; a server that was restarted comes back with the weights it was started"
            " with. A rollout function must not return rollouts that it has kept from an earlier step."
        )


class CreditAssigner:
    """Compares the rollouts of all processes with one another.

    Args:
        context: of the run.
        rewards: names and weights of the reward functions.
        entropy_bonus: token weights of the entropy bonus are needed.
        unread: points out settings of steps where no steps are rewarded.

    Attributes:
        num_tokens: prompt and completion tokens that were processed in training.
    """

    def __init__(self, context: RunContext, rewards: RewardSuite, entropy_bonus: bool, unread: UnreadSettings):
        self._context = context
        self._rewards = rewards
        self._entropy_bonus = entropy_bonus
        self._unread = unread
        self.num_tokens = 0

    def assign(
        self, batch: TrainBatch, rollouts: RolloutBatch, kl: Tensor | None, log: CompletionLog | None
    ) -> TrainBatch:
        """Set advantages and token weights of a batch, and log its rollouts. Collective.

        Groups are G rollouts in the order of sampling, whatever prompts they continue: `TrainBatch.groups` is about
        forward passes alone.

        Args:
            batch: of this process's rollouts.
            rollouts: the same, with their rewards.
            kl: [B] KL penalty of the reward, or None.
            log: gets the completions.
        """
        context = self._context
        generation = self.gather(rollouts, batch, kl)
        check_staleness(generation.staleness, context.args.max_staleness)
        self._unread.look(generation.scores)
        weights, group = self._rewards.weights, context.group_size
        credit = assign_credit(context.algorithm, weights, generation.scores, group, generation.kl)
        batch.advantages = credit.of_tokens(generation.mine).to(batch.lengths.device)
        args, algebra = context.args, context.algebra
        weigh(
            batch,
            context.algorithm.weighting,
            rows_per_part=context.micro_batch_rows,
            total_rows=len(generation.lengths),
            total_tokens=generation.trained_tokens,
            total_parts=generation.micro_batches,
            updates=algebra.steps_per_generation / algebra.gradient_accumulation_steps if context.training else 1.0,
            max_completion_length=args.max_completion_length,
            entropy_bonus=self._entropy_bonus,
        )
        self._log(generation, credit, rollouts, log)
        return batch

    def gather(self, rollouts: RolloutBatch, batch: TrainBatch, kl: Tensor | None) -> GlobalBatch:
        """Rewards and lengths of all processes' rollouts."""
        context, scored = self._context, rollouts.scored
        mine = RankShard(
            scores=scored.scores,
            kl=kl,
            trained_tokens=int(batch.sampled.sum()),
            micro_batches=-(-len(scored.rollouts) // context.micro_batch_rows),
            staleness=max(token_ages(scored.rollouts, context.step), default=0),
            summaries=summarize(scored, images=bool(context.args.log_multimodal)),
        )
        purpose = "gather the rewards of {} generation {}".format(*rollouts.key)
        return GlobalBatch(context.collectives.gather(mine, purpose), context.collectives.rank)

    def _log(self, generation: GlobalBatch, credit: Credit, rollouts: RolloutBatch, log: CompletionLog | None) -> None:
        context, names, weights = self._context, self._rewards.names, self._rewards.weights
        selection = rollouts.selection
        if context.training:
            self.num_tokens += (selection or generation).processed_tokens
            context.metrics.set("num_tokens", self.num_tokens)
        sampled = generation if selection is None else selection.first  # groups kept for their rewards would mislead
        stats = dict(selection.stats) if selection is not None else {}
        stats |= generation_stats(
            lengths=sampled.lengths,
            truncated=sampled.truncated,
            rewards_NF=sampled.scores.rewards,
            weights_F=weights,
            names=names,
            num_generations=context.group_size,
        )
        stats |= step_stats(sampled.scores, weights, names, context.group_size)
        context.metrics.add(stats, context.mode)
        if log is not None and log.enabled:
            log.add(context.step, **generation.table(names, credit.of_completions()))

    def state_dict(self) -> dict[str, Any]:
        """The count of tokens."""
        return {"num_tokens": self.num_tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self.num_tokens = state["num_tokens"]
