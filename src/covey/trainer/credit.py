"""Credit of a generation: rewards of all processes in, advantages and token weights out, and what is logged of both."""

from typing import Any

from torch import Tensor

from covey.algorithms.credit import Credit, UnreadSettings, assign_credit, step_stats
from covey.core.batch import TrainBatch
from covey.observability.completions import CompletionLog
from covey.observability.metrics import generation_stats
from covey.rewards import RewardSuite
from covey.trainer.context import RunContext
from covey.trainer.entropy import EntropyController
from covey.trainer.generation_log import GlobalBatch, RankShard, describe
from covey.trainer.rollout_buffer import weigh
from covey.trainer.rollout_phase import RolloutBatch
from covey.trainer.staleness import check_fresh_enough, oldest


class CreditAssigner:
    """Compares the rollouts of all processes with one another.

    Args:
        context: of the run.
        rewards: names and weights of the reward functions.
        entropy: of the run.
        unread: points out settings of steps where no steps are rewarded.

    Attributes:
        num_tokens: prompt and completion tokens that were processed in training.
    """

    def __init__(self, context: RunContext, rewards: RewardSuite, entropy: EntropyController, unread: UnreadSettings):
        self._context = context
        self._rewards = rewards
        self._entropy = entropy
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
        check_fresh_enough(generation.oldest, context.args.max_staleness)
        self._unread.look(generation.scores)
        weights, group = self._rewards.weights, context.group_size
        credit = assign_credit(context.algorithm, weights, generation.scores, group, generation.kl)
        batch.advantages = credit.of_tokens(generation.mine).to(batch.lengths.device)
        args, algebra = context.args, context.algebra
        weigh(
            batch,
            context.algorithm.weighting,
            rows_per_part=context.micro_batch_rows,
            total_rows=len(generation),
            total_tokens=generation.total_tokens,
            total_parts=generation.total_parts,
            updates=algebra.steps_per_generation / algebra.gradient_accumulation_steps if context.training else 1.0,
            max_completion_length=args.max_completion_length,
            entropy_bonus=self._entropy.enabled,
        )
        self._log(generation, credit, rollouts, log)
        return batch

    def gather(self, rollouts: RolloutBatch, batch: TrainBatch, kl: Tensor | None) -> GlobalBatch:
        """Rewards and lengths of all processes' rollouts."""
        context, scored = self._context, rollouts.scored
        mine = RankShard(
            scores=scored.scores,
            kl=kl,
            tokens=batch.sampled_lengths.tolist(),
            parts=-(-len(scored.rollouts) // context.micro_batch_rows),
            lengths=[rollout.num_sampled for rollout in scored.rollouts],
            truncated=[rollout.truncated for rollout in scored.rollouts],
            prompt_lengths=[len(rollout.prompt_ids) for rollout in scored.rollouts],
            oldest=oldest(scored.rollouts, context.step),
            table=describe(scored.draws, scored.rollouts, scored.columns, context.args.log_multimodal),
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
