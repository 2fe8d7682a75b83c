"""Rollouts into training data: log-probs of the compared policies, then credit over all processes."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from covey.algorithms.credit import Credit, UnreadSettings, assign_credit, signal_stats, step_stats
from covey.core.advantages import weighted_total
from covey.core.batch import TrainBatch, collate, segment_sum
from covey.core.likeness import keys_of
from covey.core.losses import BatchCounts, mean_over_update, token_weights
from covey.core.model import inference_mode_of
from covey.core.records import RankShard, Rollout, Scores
from covey.core.stats import Mean, Stat
from covey.observability.completions import CompletionLog
from covey.observability.metrics import generation_stats
from covey.policy.fused import fused_layers
from covey.policy.layouts import slowest
from covey.policy.loading import has_dropout
from covey.policy.replicas import Reference
from covey.policy.scoring import TokenScorer
from covey.rewards import RewardSuite
from covey.trainer.context import RunContext
from covey.trainer.engine_check.parity import EngineCheck
from covey.trainer.microbatches import MicroBatchRunner, micro_batch_tokens
from covey.trainer.rollout_phase import RolloutBatch
from covey.trainer.rollout_reports import (
    GlobalBatch,
    entropy_stats,
    logs_completions,
    mean_entropies,
    sampling_entropy,
    summarize,
    token_ages,
)


@dataclass(eq=False)
class BehaviourScorer:
    """Scores rollouts under the policies that the loss compares with, where it needs them."""

    engine_check: EngineCheck = field(init=False)  # compares the engine's first log-probs with the scorer's

    context: RunContext
    scorer: TokenScorer
    runner: MicroBatchRunner
    reference: Reference | None  # of the KL penalty, or None
    # Entropies of all rollout batches that began in this optimizer step are logged; known once all of these are scored.
    entropy_known: bool = field(default=False, init=False)
    # Of each of them, with their mode; nothing of one that neither the engine nor a scoring pass has measured.
    _entropies: list[list[tuple[dict[str, Stat], str]]] = field(default_factory=list, init=False)
    _layouts_agree: bool = field(default=False, init=False)

    def begin_step(self) -> None:
        """Begin an optimizer step, or an evaluation batch."""
        self.entropy_known, self._entropies = False, []

    def settle_entropies(self) -> None:
        """Log the entropies of the step's rollout batches if all are measured; else its passes are to measure them."""
        if self._entropies:
            self.entropy_known = all(self._entropies)
            for stats, mode in chain.from_iterable(self._entropies if self.entropy_known else []):
                self.context.metrics.add(stats, mode)
            self._entropies = []

    def score(self, rollouts: Sequence[Rollout]) -> tuple[TrainBatch, Tensor | None]:
        """The rollouts with the log-probs that the loss needs, and the reward's KL penalty [B] or None. Collective."""
        context = self.context
        if not context.training:
            self.begin_step()
        batch = collate(rollouts, mask_truncated=context.args.mask_truncated_completions).to(context.device)
        with context.phases("score"):
            self.settle_layout(batch)
            if context.args.log_entropy:
                self.measure_entropies(rollouts)
            entropy = sampling_entropy(rollouts, batch)
            self._entropies.append([(entropy, context.mode)] if entropy else [])
            fresh = [row for row, age in enumerate(token_ages(rollouts, context.step)) if not age]
            self.engine_check(batch, torch.tensor(fresh, dtype=torch.long, device=batch.lengths.device))
            if not self.engine_check.comparable:  # of another distribution than the trainer scores
                batch.engine_logprobs = None
            return batch, self.add_logprobs(batch)

    def add_logprobs(self, batch: TrainBatch) -> Tensor | None:
        """Score under the old and the reference policy where needed; returns the KL penalty [B], if any."""
        context, algorithm = self.context, self.context.algorithm
        penalised = algorithm.kl_in_reward and algorithm.beta != 0
        off_policy = context.training and not context.algebra.on_policy
        policy, old = context.loop.policy, None
        correction, reported = algorithm.objective.correction, batch.engine_logprobs
        compared = correction is not None and reported is not None and context.training
        # Dropout gives the loss other log-probs than the engine's are to be compared with.
        if off_policy or penalised or (compared and has_dropout(policy)):
            measured = self._entropies[-1]
            old = self.logprobs(policy, batch, measured=None if measured else measured)
            measured += [] if measured else [({}, context.mode)]  # of no rollouts
            if correction is not None and reported is not None:
                batch.mismatch_weights, stats = correction(old, reported, batch.sampled, batch.lengths)
                context.metrics.add(stats, context.mode)
        if self.reference is not None:
            with self.reference.model(policy) as reference:
                batch.ref_logprobs = self.logprobs(reference, batch)
        batch.old_logprobs = old if off_policy else None
        if not penalised:
            return None
        assert old is not None and batch.ref_logprobs is not None, "a penalty needs both"
        kl = torch.where(batch.sampled, old - batch.ref_logprobs, 0.0)
        context.metrics.add({"kl": Mean(kl.sum().item(), batch.sampled.sum().item())}, context.mode)
        return segment_sum(kl, batch.lengths).cpu()

    def measure_entropies(self, rollouts: Sequence[Rollout]) -> None:
        """Score the entropies of rollouts where the engine of any process did not report them. Collective."""
        lacking = any(rollout.entropies is None for rollout in rollouts)
        if not any(self.context.collectives.gather(lacking, "ask for entropies")):
            return
        batch = collate(rollouts).to(self.context.device)  # with truncated completions, learned from or not
        for rollout, own in zip(rollouts, self.entropies(batch).cpu().split(batch.lengths.tolist()), strict=True):
            rollout.entropies = own.tolist()

    def probe(self, rollouts: Sequence[Rollout]) -> None:
        """Check the engine with rollouts that are not trained on, if there are any. Collective."""
        if not rollouts:
            return
        batch = collate(rollouts).to(self.context.device)
        with self.context.phases("score"):
            self.settle_layout(batch)
            self.engine_check(batch)

    def logprobs(
        self, model: Any, batch: TrainBatch, measured: list[tuple[dict[str, Stat], str]] | None = None
    ) -> Tensor:
        """Log-probs [N] without gradient; the entropy of trained tokens is appended to `measured`, with its mode."""
        mode = self.context.mode  # while it scores, the model is in evaluation mode

        def logprobs(part: TrainBatch) -> Tensor:
            scores = self.scorer(model, part, entropy=measured is not None)
            if measured is not None:
                assert scores.entropies is not None, "asked for"
                entropy = Mean(scores.entropies[part.sampled].sum(), part.sampled.sum())
                measured.append(({"entropy": entropy}, mode))
            return scores.logprobs

        return self.values(model, batch, logprobs)

    def entropies(self, batch: TrainBatch) -> Tensor:
        policy = self.context.loop.policy
        return self.values(policy, batch, lambda part: self.scorer(policy, part, entropy=True).entropies)

    def rescore(self, batch: TrainBatch, temperature: float) -> Tensor:
        with self.scorer.at_temperature(temperature):
            return self.logprobs(self.context.loop.policy, batch)

    def values(self, model: Any, batch: TrainBatch, values_of: Callable[[TrainBatch], Any]) -> Tensor:
        """A value for every token [N], computed without gradient in micro-batches."""
        fused = fused_layers(self.runner.fused(model))
        with self.context.accelerator.autocast(), inference_mode_of(self.scorer.unwrap(model)), fused:
            return self.runner.score(batch, values_of)

    def settle_layout(self, batch: TrainBatch) -> None:
        """Let the scorer choose its layout before anything is planned; the first call is collective: all take one."""
        policy = self.context.loop.policy
        with self.context.accelerator.autocast():
            mine = self.scorer.layout_of(policy, batch)
        if self._layouts_agree:
            return
        agreed = slowest(self.context.collectives.gather(mine, "agree on a layout"))
        if mine != agreed:
            self.scorer.adopt(policy, agreed)
            warnings.warn(
                f"this process could score in the layout '{mine}', but another cannot, so all take '{agreed}'. Set"
                f" attn_layout='{agreed}' to silence this.",
                stacklevel=2,
            )
        self._layouts_agree = True

    def state_dict(self) -> dict[str, Any]:
        return {"reference": self.reference and self.reference.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["reference"] is not None and self.reference is not None:
            self.reference.load_state_dict(state["reference"])


@dataclass(eq=False)
class CreditAssigner:
    """Compares the rollouts of all processes with one another."""

    context: RunContext
    rewards: RewardSuite
    entropy_bonus: bool  # token weights of the entropy bonus are needed
    unread: UnreadSettings
    energies: Callable[[TrainBatch], Tensor] | None  # of all processes' tokens, where `Algorithm.token_baseline`
    num_tokens: int = field(default=0, init=False)  # prompt and completion tokens that were processed in training
    _newest: Scores | None = field(default=None, init=False)

    def assign(self, batch: TrainBatch, rollouts: RolloutBatch, kl: Tensor | None, log: CompletionLog | None) -> None:
        """Set advantages and token weights of a batch, and log its rollouts; `kl` [B] penalises rewards. Collective."""
        context, args, algebra = self.context, self.context.args, self.context.algebra
        everyone = self.gather(rollouts, batch, kl)
        if everyone.staleness > args.max_staleness:
            raise RuntimeError(
                f"the engine says that it sampled tokens with weights {everyone.staleness} optimizer steps older than"
                f" those that are trained, and max_staleness={args.max_staleness} allows {args.max_staleness}: it has"
                " not taken weights that it was sent. Look at the engine's log; a server that was restarted comes back"
                " with the weights it was started with. A rollout function must not return rollouts that it has kept"
                " from an earlier step."
            )
        self.unread.look(everyone.scores)
        self._newest = everyone.scores
        energies = None if self.energies is None else self.energies(batch)
        credit = assign_credit(
            context.algorithm, self.rewards.weights, everyone.scores, context.group_size, everyone.kl, energies
        )
        batch.advantages = credit.of_tokens(everyone.mine).to(batch.lengths.device)
        tokens = batch.sampled_lengths.float()
        updates = algebra.steps_per_generation / algebra.gradient_accumulation_steps if context.training else 1.0
        counts = BatchCounts(
            tokens,
            micro_batch_tokens(tokens, context.micro_batch_rows),
            rows_per_update=len(everyone.lengths) / updates,
            tokens_per_update=everyone.trained_tokens / updates,
            micro_batches_per_update=everyone.micro_batches / updates,
            max_completion_length=args.max_completion_length,
        )
        batch.weights = token_weights(context.algorithm.weighting, counts, batch.sampled, batch.lengths)
        if self.entropy_bonus:
            batch.entropy_weights = token_weights(mean_over_update, counts, batch.sampled, batch.lengths)
        self._log(everyone, credit, rollouts, log)

    def describe_rewards(self) -> str:
        """Mean and range of the newest generation's total rewards, for messages."""
        if self._newest is None:
            return "none yet"
        totals = weighted_total(self._newest.rewards.double(), self.rewards.weights.double())
        known = totals[~totals.isnan()]
        return f"mean {known.mean():.3g}, from {known.min():.3g} to {known.max():.3g}" if len(known) else "none"

    def gather(self, rollouts: RolloutBatch, batch: TrainBatch, kl: Tensor | None) -> GlobalBatch:
        """Rewards and lengths of all processes' rollouts. Collective."""
        context, scored = self.context, rollouts.scored
        mine = RankShard(
            scores=scored.scores,
            kl=kl,
            trained_tokens=int(batch.sampled.sum()),
            micro_batches=-(-len(scored.rollouts) // context.micro_batch_rows),
            staleness=max(token_ages(scored.rollouts, context.step), default=0),
            lengths=[rollout.num_sampled for rollout in scored.rollouts],
            truncated=[rollout.truncated for rollout in scored.rollouts],
            prompt_tokens=sum(len(rollout.prompt_ids) for rollout in scored.rollouts),
            entropies=mean_entropies(scored.rollouts, context.args),
            likeness=[keys_of(*pair) for pair in zip(scored.draws, scored.rollouts, strict=True)],
        )
        purpose = "gather the rewards of {} generation {}".format(*rollouts.key)
        return GlobalBatch(context.collectives.gather(mine, purpose), context.collectives.rank)

    def _log(self, everyone: GlobalBatch, credit: Credit, rollouts: RolloutBatch, log: CompletionLog | None) -> None:
        context, names, weights = self.context, self.rewards.names, self.rewards.weights
        selection = rollouts.selection
        if context.training:
            self.num_tokens += (selection or everyone).processed_tokens
            context.loop.state.num_input_tokens_seen = self.num_tokens  # for callbacks with a budget
        sampled, stats = (everyone, {}) if selection is None else (selection.first, dict(selection.stats))
        stats |= generation_stats(
            lengths=sampled.lengths,
            truncated=sampled.truncated,
            rewards_NF=sampled.scores.rewards,  # groups kept for their rewards would mislead
            weights_F=weights,
            names=names,
            num_generations=context.group_size,
            likeness=sampled.likeness,
        )
        stats |= step_stats(sampled.scores, weights, names, context.group_size)
        alone = credit if everyone.kl is None else None  # the rewards' own
        stats |= signal_stats(context.algorithm, weights, everyone.scores, context.group_size, alone)
        stats |= entropy_stats(everyone.entropies) if context.args.log_entropy else {}
        context.metrics.add(stats, context.mode)
        if log is not None and logs_completions(context.args):
            mine = summarize(rollouts.scored, context.args)
            summaries = list(chain.from_iterable(context.collectives.to_first(mine, "put the completions together")))
            if log.enabled:
                log.add(context.step + context.training, **everyone.table(summaries, names, credit.of_completions()))

    def state_dict(self) -> dict[str, Any]:
        return {"num_tokens": self.num_tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_tokens = state["num_tokens"]
