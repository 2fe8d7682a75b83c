"""Gradients from a generation: an optimizer step is planned as a whole when the last of its generations is sampled."""

import math
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from covey.core.batch import TrainBatch, join
from covey.core.losses import BatchCounts, mean_over_update
from covey.core.objective import policy_loss
from covey.core.packing import balance_ranks, pass_tokens
from covey.core.stats import Mean, Stat, read
from covey.observability.updates import UpdateLog
from covey.policy.scoring import TokenScorer
from covey.trainer.checks import FiniteCheck
from covey.trainer.context import RunContext
from covey.trainer.distributed.exchange import OwnRollouts, RolloutIndex, join_indexes, pool
from covey.trainer.distributed.sharding import average_gradients
from covey.trainer.experience import BehaviourScorer
from covey.trainer.loss_terms import EntropyController, ExpertBalance, choose_tokens, entropy_threshold
from covey.trainer.microbatches import (
    MicroBatchRunner,
    PartOfStep,
    RolloutBuffer,
    micro_batch_tokens,
    nominal_parts,
    spread,
)


@dataclass(eq=False)
class UpdatePhase:
    """Trains on generations, one micro-step of Hugging Face's loop at a time."""

    context: RunContext
    scorer: TokenScorer
    behaviour: BehaviourScorer
    runner: MicroBatchRunner
    entropy: EntropyController | None  # of the entropy bonus, or None
    balance: ExpertBalance | None  # None without a load-balancing loss
    finite: FiniteCheck
    backward: Callable[[Any, Any], Tensor]  # (model, micro-batch) -> loss, with the gradients added to the parameters'
    compute_loss: Callable[[Any, TrainBatch], Tensor]
    updates: UpdateLog | None = None  # of the run's record, where it keeps tokens

    def __post_init__(self) -> None:
        self._window = self.context.args.gradient_accumulation_steps
        self.reset()

    def reset(self) -> None:
        self.buffer = RolloutBuffer()
        self._begin_step()

    def _begin_step(self) -> None:
        self.micro_steps, self._planned_passes, self._passes, self._seconds = 0, 0, 0, 0.0
        self._loss_stats: dict[str, Stat] = {}
        self._step_entropies: list[dict[str, Stat]] = []  # of passes; on the device until the step ends
        self._parts_of_step: list[PartOfStep] = []
        self._waiting: deque[list[TrainBatch]] = deque()  # passes of the micro-steps that are planned

    def load(self, batch: TrainBatch) -> None:
        """Put this process's share of a generation into the buffer, with the sizes of all others. Collective."""
        collectives, args = self.context.collectives, self.context.args
        own, index = pool(batch, collectives)
        parts = nominal_parts(len(index), args.per_device_train_batch_size, collectives.size)
        self.buffer = RolloutBuffer(own, index, parts, args.num_iterations)

    def micro_step(self, model: Any, window: int) -> Tensor:
        """Run the micro-batches of one micro-step: several, one or none. Returns their loss."""
        self._window = window
        if not self._waiting:
            self._plan(window - self.micro_steps)
        return self._run(model, self._waiting.popleft())

    def end_micro_step(self, seconds: float) -> None:
        """Count a micro-step that took so long; the last of an optimizer step adds the step's metrics."""
        self._seconds += seconds
        self.micro_steps += 1
        if not self.context.accelerator.sync_gradients:
            return
        stats: dict[str, Stat] = {
            "step_time": Mean(self._seconds, 1.0),
            "passes/count": Mean(float(self._planned_passes), 1.0),
        }
        if self.balance is not None:
            stats["aux_loss"] = Mean(0.0, 1.0)
        if self.entropy is not None:
            mine = Mean(0.0, 0.0)
            for one in read(self._step_entropies):
                mine = mine.merge(one["entropy"])  # type: ignore[arg-type]
            totals = self.context.collectives.gather(mine, "average the step's entropy")
            entropy = Mean(sum(m.total for m in totals), sum(m.count for m in totals))
            stats["entropy_coef"] = Mean(self.entropy.effective, 1.0)
            stats["policy_loss"] = Mean(0.0, 1.0)
            if entropy.count:
                self.entropy.observe(entropy.value())
        self.context.metrics.add(stats, "train")
        self._begin_step()

    def loss(self, model: Any, batch: TrainBatch) -> Tensor:
        """The loss of a micro-batch, scaled so that the sum over a step, averaged over ranks, is the step's loss."""
        context, training = self.context, self.context.training
        filters = batch.entropy_threshold is not None or context.algorithm.objective.needs_entropies
        wants_entropy = self.entropy is not None or filters or not self.behaviour.entropy_known
        aux: Tensor | float = 0.0
        with context.accelerator.autocast():
            if self.balance is not None:
                scores, loads = self.scorer.with_loads(model, batch, self.balance.top_k, entropy=wants_entropy)
                aux = self.balance.loss(loads, len(batch))
            else:
                scores = self.scorer(model, batch, entropy=wants_entropy)
        coef = 0.0 if self.entropy is None else self.entropy.effective
        result = policy_loss(batch, *scores, context.algorithm.objective, coef)
        if self.updates is not None and training:
            self.updates.on_pass(batch, *scores, context.algorithm.objective)
        # Weights assume a full accumulation window and sum over ranks; the optimizer sees a mean over ranks.
        full = context.args.gradient_accumulation_steps
        scale = full / self._window * context.collectives.size if training else 1.0
        if training and not math.isfinite(without_bonus := result.without_bonus.item()):
            scale *= self.finite.check_loss(without_bonus, self._passes)
        if isinstance(aux, Tensor):  # with a count of 0; end_micro_step counts the optimizer steps
            result.stats["aux_loss"] = Mean(aux.item() * scale, 0.0)
        if self.entropy is not None and training:
            result.stats["policy_loss"] = Mean(without_bonus * scale, 0.0)
        self._loss_stats = result.stats
        loss = result.loss if self.balance is None else result.loss + self.balance.coef * aux
        if torch.is_grad_enabled() and not loss.requires_grad:  # only an image encoder is trained, and this is text
            trained = next(weight for weight in context.loop.policy.parameters() if weight.requires_grad)
            loss = loss + 0.0 * trained.sum()
        return loss * scale

    def loss_of(self, batch: TrainBatch) -> float:
        """The loss of a whole batch without training on it; 0 for an empty share. Collective."""
        self.behaviour.settle_layout(batch)
        self.behaviour.settle_entropies()
        kept = batch
        if len(batch) and not self._needs_every_rollout:
            index = RolloutIndex.of(batch).without_signal_dropped()
            kept = batch.select(index.rows.to(batch.lengths.device))
            kept.skipped_tokens, kept.skipped_rows = index.skipped_tokens, index.skipped_rows
        parts = self.runner.plan(kept)
        parts += self.runner.idle(batch, len(parts))
        if self.balance is not None:
            self.balance.begin(1.0, kept, self.behaviour, len(parts))
            self.context.metrics.add({"aux_loss": Mean(0.0, 1.0 / self.context.collectives.size)}, self.context.mode)
        forward = partial(self._counted, self.compute_loss, self.context.loop.model)
        return sum(self.runner.run(part, forward).item() for part in parts)

    def _run(self, model: Any, micro_batches: list[TrainBatch]) -> Tensor:
        """Forward and backward; the optimizer step's last micro-step adds the processes' gradients up."""
        context, sharding = self.context, self.context.sharding
        if isinstance(model, DistributedDataParallel):
            model = model.module  # no collective in a backward pass: processes need not run equally many
        loss, backward = torch.zeros((), device=context.device), partial(self._counted, self.backward, model)
        for number, batch in enumerate(micro_batches, 1):
            context.activity.count(max(self._planned_passes, self._passes + 1), self._passes)
            self._passes += 1
            last = number == len(micro_batches)
            with sharding.around_pass(context.accelerator, model, last) if sharding.gradients else nullcontext():
                loss = loss + self.runner.run(batch, backward)
        if context.accelerator.sync_gradients and context.collectives.size > 1 and not sharding.gradients:
            with context.collectives.together("average the gradients"):
                average_gradients([weight for weight in context.loop.policy.parameters() if weight.requires_grad])
        return loss

    def _counted(self, compute: Callable[[Any, TrainBatch], Tensor], model: Any, batch: TrainBatch) -> Tensor:
        """The loss of a micro-batch, whose metrics are added; entropies known of all completions count once."""
        loss = compute(model, batch)
        stats, training = self._loss_stats, self.context.training
        if training and self.entropy is not None and "entropy" in stats:
            self._step_entropies.append({"entropy": stats["entropy"]})
        if self.behaviour.entropy_known:
            stats.pop("entropy", None)
        self.context.metrics.add(stats, self.context.mode)
        return loss

    def _plan(self, micro_steps: int) -> None:
        """Assign rollouts to ranks and micro-batches, once the optimizer step's last generation is there."""
        context, args = self.context, self.context.args
        part = self.buffer.take(micro_steps)
        self._parts_of_step.append(part)
        if part.micro_batches < micro_steps:  # another generation follows, and averages are over both
            self._waiting += spread([], part.micro_batches)
            return
        self.behaviour.settle_entropies()
        own, index = self._whole_step(self._parts_of_step)
        self.behaviour.settle_layout(own.batch)
        if not self._needs_every_rollout:
            index = index.without_signal_dropped()
        shares = balance_ranks(index, context.collectives.size, self.scorer.layout)
        most = max(len(self.runner.planned(index.select(share))) for share in shares) if len(shares) > 1 else 1
        mine = own.fetch(index, shares, context.collectives)
        if args.top_entropy_quantile < 1.0:
            mine.entropy_threshold = entropy_threshold(self.behaviour, mine)
        if (choice := context.algorithm.objective.choice) is not None:
            mine.chosen = choose_tokens(self.behaviour, mine, choice)
        if context.accelerator.is_main_process:
            mine.skipped_tokens, mine.skipped_rows = index.skipped_tokens, index.skipped_rows
        planned = self.runner.plan(mine, at_least=most)
        self._planned_passes += len(planned)
        tokens = sum(pass_tokens(one, range(len(one)), self.scorer.layout) for one in planned)
        run, skipped = sum(map(len, planned)), mine.skipped_rows
        sizes, skips = Mean(float(tokens), float(len(planned))), Mean(float(skipped), float(run + skipped))
        context.metrics.add({"passes/tokens": sizes, "passes/skipped_rollouts": skips}, "train")
        if context.sharding.gradients:
            planned += [own.batch.idle() for _ in range(most - len(planned))]
        if self.balance is not None:
            taken = sum(part.micro_batches for part in self._parts_of_step)
            self.balance.begin(taken / args.gradient_accumulation_steps, mine, self.behaviour, len(planned))
        self._waiting += spread(planned, part.micro_batches)

    def _whole_step(self, parts: list[PartOfStep]) -> tuple[OwnRollouts, RolloutIndex]:
        """The rollouts of an optimizer step; those of several generations get weights from the counts of all."""
        if len(parts) == 1:
            return parts[0].own, parts[0].index
        args, algorithm = self.context.args, self.context.algorithm
        batches = [part.own.batch for part in parts]
        own = OwnRollouts(join(batches), parts[0].own.rank)
        index = join_indexes([part.index for part in parts], [0, *accumulate(map(len, batches))][:-1])
        rows, tokens = args.per_device_train_batch_size, index.sampled_lengths.float()
        updates = sum(part.micro_batches for part in parts) / args.gradient_accumulation_steps
        counts = BatchCounts(
            tokens,
            micro_batch_tokens(tokens, rows),
            rows_per_update=len(index) / updates,
            tokens_per_update=sum(part.tokens for part in parts) / updates,
            micro_batches_per_update=len(index) // rows / updates,
            max_completion_length=args.max_completion_length,
        )
        entropy_weights = mean_over_update(counts) if self.entropy is not None else None
        return own, replace(index, weights=algorithm.weighting(counts), entropy_weights=entropy_weights)

    @property
    def _needs_every_rollout(self) -> bool:
        """Rollouts without advantage have a gradient of their own."""
        by_entropy = self.entropy is not None or self.context.args.top_entropy_quantile < 1.0
        return self.context.algorithm.objective.needs_every_rollout or by_entropy or self.balance is not None

    def state_dict(self) -> dict[str, Any]:
        assert not self._waiting, "passes end with their optimizer step"
        return {
            "buffer": self.buffer.state_dict(),
            "entropy": None if self.entropy is None else self.entropy.state_dict(),
            "token_limit": self.runner.limit,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buffer.load_state_dict(state["buffer"], self.context.device, self.context.collectives.rank)
        if self.entropy is not None and state["entropy"] is not None:
            self.entropy.load_state_dict(state["entropy"])
        self.runner.limit = state["token_limit"]
