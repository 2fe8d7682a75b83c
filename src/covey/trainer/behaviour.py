"""Log-probabilities of what was sampled: under the old and the reference policy, and the check of the engine's."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from covey.core.batch import TrainBatch, collate, segment_sum
from covey.core.model import inference_mode_of
from covey.core.records import Mean, Rollout, Stat
from covey.policy.layout_selection import slowest
from covey.policy.loading import has_dropout
from covey.policy.reference import Reference
from covey.policy.scoring import TokenScorer
from covey.trainer.async_rollouts import staleness
from covey.trainer.context import RunContext
from covey.trainer.engine_check.parity import EngineCheck
from covey.trainer.microbatches import MicroBatchRunner


class BehaviourScorer:
    """Scores rollouts under the policies that the loss compares with, where it needs them.

    Args:
        context: of the run.
        scorer: runs a model forward.
        runner: in micro-batches that fit into memory.
        reference: the model of the KL penalty, or None.

    Attributes:
        engine_check: compares the engine's first log-probs with the scorer's.
        entropy_known: a generation began in this optimizer step, and its entropies were measured over all of its
            completions.
    """

    engine_check: EngineCheck

    def __init__(self, context: RunContext, scorer: TokenScorer, runner: MicroBatchRunner, reference: Reference | None):
        self._context = context
        self._scorer = scorer
        self._runner = runner
        self._reference = reference
        self._layouts_agree = False
        self.entropy_known = False

    def score(self, rollouts: Sequence[Rollout]) -> tuple[TrainBatch, Tensor | None]:
        """The rollouts as a batch with the log-probs that the loss needs, and the KL penalty [B] of the reward, if any.

        Collective.
        """
        context = self._context
        batch = collate(rollouts, mask_truncated=context.args.mask_truncated_completions).to(context.device)
        entropy = sampling_entropy(rollouts, batch)
        self.entropy_known = bool(entropy)
        context.metrics.add(entropy, context.mode)
        with context.phases("score"):
            self.settle_layout(batch)
            ages = token_ages(rollouts, context.step)
            fresh = torch.tensor([row for row, age in enumerate(ages) if not age], dtype=torch.long)
            self.engine_check(batch, fresh.to(batch.lengths.device))
            if not self.engine_check.comparable:
                batch.engine_logprobs = (
                    None  # of another distribution than the trainer scores: nothing may compare them
                )
            return batch, self.add_logprobs(batch)

    def add_logprobs(self, batch: TrainBatch) -> Tensor | None:
        """Score under the old and the reference policy where needed; returns the KL penalty [B], if any."""
        context, algorithm = self._context, self._context.algorithm
        penalised = algorithm.kl_in_reward and algorithm.beta != 0
        off_policy = context.training and not context.algebra.on_policy
        policy, old = context.loop.policy, None
        if off_policy or penalised or self._dropout_hides(batch):
            entropies: list[Stat] | None = None if self.entropy_known else []
            old = self.logprobs(policy, batch, entropies)
            for entropy in entropies or ():
                context.metrics.add({"entropy": entropy}, context.mode)
            self.entropy_known = True
            correction = algorithm.objective.correction
            if correction is not None and batch.engine_logprobs is not None:
                batch.mismatch_weights, stats = correction(old, batch.engine_logprobs, batch.sampled, batch.lengths)
                context.metrics.add(stats, context.mode)
        if self._reference is not None:
            with self._reference.model(policy) as reference:
                batch.ref_logprobs = self.logprobs(reference, batch)
        batch.old_logprobs = old if off_policy else None
        if not penalised:
            return None
        assert old is not None and batch.ref_logprobs is not None, "a penalty needs both"
        kl = torch.where(batch.sampled, old - batch.ref_logprobs, 0.0)
        context.metrics.add({"kl": Mean(kl.sum().item(), batch.sampled.sum().item())}, context.mode)
        return segment_sum(kl, batch.lengths).cpu()

    def probe(self, rollouts: Sequence[Rollout]) -> None:
        """Check the engine with rollouts that are not trained on. Collective."""
        batch = collate(rollouts).to(self._context.device)
        with self._context.phases("score"):
            self.settle_layout(batch)
            self.engine_check(batch)

    def logprobs(self, model: Any, batch: TrainBatch, entropies: list[Stat] | None = None) -> Tensor:
        """Log-probs without gradient, [N].

        Args:
            model: the policy or the reference.
            batch: rollouts.
            entropies: a list that gets the mean entropy of each micro-batch's trained tokens, or None.
        """

        def logprobs(part: TrainBatch) -> Tensor:
            scores = self._scorer(model, part, entropy=entropies is not None)
            if entropies is not None:
                assert scores.entropies is not None, "asked for"
                entropies.append(Mean(scores.entropies[part.sampled].sum().item(), part.sampled.sum().item()))
            return scores.logprobs

        return self.values(model, batch, logprobs)

    def rescore(self, batch: TrainBatch, temperature: float) -> Tensor:
        """The policy's log-probs at another temperature, [N]."""
        with self._scorer.at_temperature(temperature):
            return self.logprobs(self._context.loop.policy, batch)

    def values(self, model: Any, batch: TrainBatch, values_of: Callable[[TrainBatch], Tensor]) -> Tensor:
        """A value for every token [N], computed without gradient in micro-batches."""
        with self._context.accelerator.autocast(), inference_mode_of(self._scorer.unwrap(model)):
            return self._runner.score(batch, self._context.micro_batch_rows, values_of)

    def settle_layout(self, batch: TrainBatch) -> None:
        """Let the scorer choose its layout before anything is planned, as tokens are counted by it.

        The first call is collective. Each process finds its layout by trying, so where rounding or hardware differ
        they may differ too; but all must make the same plan, so they take the slowest that any of them found.
        """
        policy = self._context.loop.policy
        with self._context.accelerator.autocast():
            mine = self._scorer.layout_of(policy, batch)
        if self._layouts_agree:
            return
        agreed = slowest(self._context.collectives.gather(mine, "agree on a layout"))
        if mine != agreed:
            self._scorer.adopt(policy, agreed)
            warnings.warn(
                f"this process could score in the layout '{mine}', but another cannot, so all take '{agreed}'. Set"
                f" attn_layout='{agreed}' to silence this.",
                stacklevel=2,
            )
        self._layouts_agree = True

    def _dropout_hides(self, batch: TrainBatch) -> bool:
        """Dropout gives the loss other log-probs than the engine's are to be compared with."""
        compared = self._context.algorithm.objective.correction is not None and batch.engine_logprobs is not None
        return compared and self._context.training and has_dropout(self._context.loop.policy)

    def state_dict(self) -> dict[str, Any]:
        """The reference's weights, where they change or are an adapter's."""
        reference = self._reference
        changes = reference is not None and (self._context.args.sync_ref_model or reference.stores_adapter)
        return {"reference": reference.state_dict() if reference is not None and changes else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        if state["reference"] is not None and self._reference is not None:
            self._reference.load_state_dict(state["reference"])


def token_ages(rollouts: Sequence[Rollout], version: int) -> list[int]:
    """Largest staleness of a token of each rollout, in optimizer steps; 0 if unknown."""
    return [max(staleness(rollout, version), default=0) if rollout.versions else 0 for rollout in rollouts]


def sampling_entropy(rollouts: Sequence[Rollout], batch: TrainBatch) -> dict[str, Stat]:
    """The `entropy` metric, over every trained token, where the engine measured it while sampling; else nothing."""
    flat: list[float] = []
    for rollout in rollouts:
        if rollout.entropies is None:
            return {}
        flat += rollout.entropies
    trained = torch.tensor(flat)[batch.sampled.cpu()]
    return {"entropy": Mean(trained.sum().item(), len(trained))}
