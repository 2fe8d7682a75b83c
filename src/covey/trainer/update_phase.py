"""Optimizer steps: planned once their rollouts are in the buffer, then losses and gradients of the micro-batches."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from covey.core.batch import TrainBatch, join
from covey.core.losses import BatchCounts, mean_over_update
from covey.core.objective import policy_loss
from covey.core.packing import balance_ranks, computed_tokens
from covey.core.records import Experience, Plan, PlannedMicroStep
from covey.core.routing import RouteReading
from covey.core.stats import Mean, Stat, read
from covey.core.supervision import DEMONSTRATIONS
from covey.core.terms import TermCounts
from covey.data.sources import SourceSizes, averaged_by_source
from covey.observability.updates import UpdateLog
from covey.policy.scoring import Teachers, TokenScorer
from covey.trainer.batch_scorer import BatchScorer
from covey.trainer.checks import FiniteCheck
from covey.trainer.demonstrations import Demonstrations
from covey.trainer.distributed.exchange import OwnRollouts, RolloutIndex, join_indexes, pool
from covey.trainer.distributed.sharding import average_gradients
from covey.trainer.loss_terms import EntropyController, ExpertBalance, choose_tokens, entropy_threshold
from covey.trainer.microbatches import (
    MicroBatchRunner,
    PartOfStep,
    RolloutBuffer,
    micro_batch_tokens,
    micro_batches_of,
    nominal_parts,
    spread,
)
from covey.trainer.run import Run

Stats = dict[str, Stat]


@dataclass(eq=False)
class UpdatePhase:
    """Plans optimizer steps, and computes their losses and gradients."""

    run: Run
    scorer: TokenScorer
    batch_scorer: BatchScorer
    runner: MicroBatchRunner
    entropy: EntropyController | None  # of the entropy bonus, or None
    balance: ExpertBalance | None  # None without a load-balancing loss
    finite: FiniteCheck
    # (model, micro-batch, plan, number of the micro-batch in the step) -> loss and metrics: `loss`, or an override
    compute_loss: Callable[[Any, TrainBatch, Plan, int], tuple[Tensor, Stats]]
    backward: Callable[[Tensor], None]  # adds the gradients of a loss to the parameters'
    demonstrations: Demonstrations | None = None  # that steps learn from in addition to rollouts
    teachers: Callable[[], Teachers | None] | None = None  # heads that the loss reads; collective
    updates: UpdateLog | None = None  # of the run's record, where it keeps tokens
    buffer: RolloutBuffer = field(default_factory=RolloutBuffer, init=False)

    # ---- the plan ----------------------------------------------------------------------------------------------------

    def load(self, experience: Experience) -> None:
        """Put this process's rollouts into the buffer, with the sizes of all others. Collective."""
        collectives, args = self.run.collectives, self.run.args
        known, names = self.run.sources, experience.sources
        sources = None if known is None else known.numbers(names)
        absent = torch.tensor(experience.absent) if experience.absent else None
        own, index = pool(experience.batch, collectives, sources, absent)
        parts = nominal_parts(len(index), args.per_device_train_batch_size, collectives.size)
        self.buffer.append(own, index, parts, args.num_iterations)

    def plan(self, micro_steps: int, began: Sequence[Experience]) -> Plan:
        """Assign the rollouts of the next step to processes and micro-batches. Collective.

        Args:
            micro_steps: nominal micro-batches of the step.
            began: rollout batches added to the buffer since the last plan; their entropies are logged.
        """
        run, args, algorithm = self.run, self.run.args, self.run.algorithm
        parts = self.buffer.take(micro_steps)
        known = bool(began) and all(one.entropy for one in began)
        stats: list[Stats] = list(chain.from_iterable(one.entropy for one in began)) if known else []
        own, index = self._whole_step(parts)
        if self.demonstrations is not None:
            share = micro_steps / args.gradient_accumulation_steps
            own, index, found = self.demonstrations.added(own, index, run.step, share)
            term = next(one for one in algorithm.objective.terms if one.name == DEMONSTRATIONS)
            stats.append({**found, f"{DEMONSTRATIONS}/coef": Mean(term.coef(run.step), 1.0)})
        self.batch_scorer.settle_layout(own.batch)
        if not self._needs_every_rollout:
            index = index.without_signal_dropped()
        shares = balance_ranks(index, run.collectives.size, self.scorer.layout)
        rows = args.per_device_train_batch_size
        most = max(len(self.runner.planned(index.select(one), rows)) for one in shares) if len(shares) > 1 else 1
        mine = own.fetch(index, shares, run.collectives)
        if args.top_entropy_quantile < 1.0:
            threshold, found = entropy_threshold(self.batch_scorer, mine)
            mine, stats = replace(mine, entropy_threshold=threshold), [*stats, found]
        if (choice := algorithm.objective.choice) is not None:
            chosen, found = choose_tokens(self.batch_scorer, mine, choice)
            mine, stats = replace(mine, chosen=chosen), [*stats, found]
        if run.accelerator.is_main_process:
            mine = replace(mine, skipped_tokens=index.skipped_tokens, skipped_rows=index.skipped_rows)
        micro_batches = self.runner.plan(mine, rows, at_least=most)
        stats.append(self._sizes(micro_batches, mine.skipped_rows))
        if run.sharding.gradients:
            micro_batches += [own.batch.idle() for _ in range(most - len(micro_batches))]
        balance = None
        if self.balance is not None:
            share = micro_steps / args.gradient_accumulation_steps
            balance = self.balance.of_step(share, mine, self.batch_scorer, len(micro_batches))
        last = parts[-1].micro_batches
        return Plan(
            [*([] for _ in range(micro_steps - last)), *spread(micro_batches, last)],
            scale=args.gradient_accumulation_steps / micro_steps * run.collectives.size,
            measures_entropy=not known,
            balance=balance,
            teachers=self._heads(),
            stats=stats,
        )

    def plan_evaluation(self, experience: Experience) -> Plan:
        """The micro-batches of an evaluation batch, none without rollouts. Collective."""
        batch = experience.batch
        self.batch_scorer.settle_layout(batch)
        kept, stats, balance = batch, [*experience.entropy], None
        if len(batch) and not self._needs_every_rollout:
            index = RolloutIndex.of(batch).without_signal_dropped()
            kept = batch.select(index.rows.to(batch.lengths.device))
            kept = replace(kept, skipped_tokens=index.skipped_tokens, skipped_rows=index.skipped_rows)
        micro_batches = self.runner.plan(kept, self.run.args.per_device_eval_batch_size)
        micro_batches += self.runner.idle(batch, len(micro_batches))
        if self.balance is not None:
            balance = self.balance.of_step(1.0, kept, self.batch_scorer, len(micro_batches))
            stats.append({"aux_loss": Mean(0.0, 1.0 / self.run.collectives.size)})
        return Plan(
            [micro_batches],
            training=False,
            measures_entropy=not experience.entropy,
            balance=balance,
            teachers=self._heads(),
            stats=stats,
        )

    def _heads(self) -> Teachers | None:
        return None if self.teachers is None else self.teachers()

    def _sizes(self, micro_batches: list[TrainBatch], skipped: int) -> Stats:
        tokens = sum(computed_tokens(one, range(len(one)), self.scorer.layout) for one in micro_batches)
        run = sum(map(len, micro_batches))
        return {
            "micro_batches/count": Mean(float(len(micro_batches)), 1.0),
            "micro_batches/tokens": Mean(float(tokens), float(len(micro_batches))),
            "micro_batches/skipped_rollouts": Mean(float(skipped), float(run + skipped)),
        }

    def _whole_step(self, parts: list[PartOfStep]) -> tuple[OwnRollouts, RolloutIndex]:
        """The rollouts of an optimizer step.

        In a step of several rollout batches, weights are normalised by the counts of all of them.
        """
        if len(parts) == 1:
            return parts[0].own, parts[0].index
        args, algorithm = self.run.args, self.run.algorithm
        batches = [part.own.batch for part in parts]
        own = OwnRollouts(join(batches), parts[0].own.rank)
        index = join_indexes([part.index for part in parts], [0, *accumulate(map(len, batches))][:-1])
        rows, tokens, present = args.per_device_train_batch_size, index.sampled_lengths.float(), index.present
        updates = sum(part.micro_batches for part in parts) / args.gradient_accumulation_steps
        counts = BatchCounts(
            tokens,
            micro_batch_tokens(tokens, rows),
            rows_per_update=int(present.sum()) / updates,
            tokens_per_update=sum(part.tokens for part in parts) / updates,
            micro_batches_per_update=micro_batches_of(present.tolist(), rows) / updates,
            max_completion_length=args.max_completion_length,
        )
        weighting, known, of_sources = algorithm.weighting, self.run.sources, None
        if known is not None and index.sources is not None:
            longest = args.max_completion_length
            counts = replace(counts, max_completion_length=known.longest(index.sources, longest, tokens.device))
            count = len(known.sources)
            by_source = [sum(column) for column in zip_longest(*(one.source_tokens for one in parts), fillvalue=0.0)]
            by_source += [0.0] * (count - len(by_source))
            counted, slots = (
                torch.bincount(numbers, minlength=count).tolist() for numbers in (index.sources[present], index.sources)
            )
            of_sources = SourceSizes(counted, by_source, slots)
            weighting = averaged_by_source(known, weighting, index.sources, of_sources, updates)
        entropy_weights = mean_over_update(counts) if self.entropy is not None else None
        term_scales = {}
        for name, sizes in index.term_tokens.items():
            of_step = TermCounts.sum(part.terms[name] for part in parts).times(1 / updates)
            micro_tokens = micro_batch_tokens(sizes.float(), rows)
            of_term = algorithm.weighting
            if known is not None and index.sources is not None and of_sources is not None:
                own_sizes = known.term_sizes(index.sources, sizes.tolist())
                of_term = averaged_by_source(known, of_term, index.sources, of_sources, updates, own_sizes)
            term_scales[name] = of_step.scales(of_term, sizes.float(), micro_tokens, counts.max_completion_length)
        weights = weighting(counts)
        return own, replace(index, weights=weights, entropy_weights=entropy_weights, term_scales=term_scales)

    @property
    def _needs_every_rollout(self) -> bool:
        """True if rollouts whose advantages are all 0 have a gradient, too."""
        by_entropy = self.entropy is not None or self.run.args.top_entropy_quantile < 1.0
        return self.run.algorithm.objective.needs_every_rollout or by_entropy or self.balance is not None

    # ---- losses and gradients ----------------------------------------------------------------------------------------

    def loss(self, model: Any, batch: TrainBatch, plan: Plan, number: int = 0) -> tuple[Tensor, Stats]:
        """The loss of a micro-batch, and its metrics.

        It is scaled so that the sum over a step, averaged over processes, is the step's loss.
        """
        run, objective = self.run, self.run.algorithm.objective
        filters = batch.entropy_threshold is not None or objective.needs_entropies
        wants_entropy = self.entropy is not None or filters or plan.measures_entropy
        aux: Tensor | float = 0.0
        asked: dict[str, Any] = {"entropy": wants_entropy, "teachers": plan.teachers}
        asked["named"] = batch.named_ids if objective.reads_named else None
        with run.accelerator.autocast():
            if self.balance is not None and plan.balance is not None:
                top_k = self.balance.top_k
                scores, loads = self.scorer.with_loads(model, batch, top_k, **asked)
                aux = plan.balance(loads, len(batch))
            else:
                scores = self.scorer(model, batch, **asked)
        coef = 0.0 if self.entropy is None else self.entropy.effective
        of_tokens = scores.logprobs, scores.entropies
        result = policy_loss(batch, *of_tokens, objective, coef, run.step, scores.named, scores.divergence)
        if self.updates is not None and plan.training:
            self.updates.on_micro_batch(batch, scores.logprobs, scores.entropies, objective, run.step)
        stats, scale = {**result.stats, **replayed_stats(scores.routes, plan.training)}, plan.scale
        if plan.training and not math.isfinite(without_bonus := result.without_bonus.item()):
            scale *= self.finite.check_loss(without_bonus, number)
        if isinstance(aux, Tensor):  # with a count of 0; `step_stats` counts the optimizer steps
            stats["aux_loss"] = Mean(aux.item() * scale, 0.0)
        if self.entropy is not None and plan.training:
            stats["policy_loss"] = Mean(without_bonus * scale, 0.0)
        loss = result.loss if self.balance is None else result.loss + self.balance.coef * aux
        if torch.is_grad_enabled() and not loss.requires_grad:  # only an image encoder is trained, and this is text
            trained = next(weight for weight in run.policy.parameters() if weight.requires_grad)
            loss = loss + 0.0 * trained.sum()
        return loss * scale, stats

    def gradients(self, model: Any, micro_step: PlannedMicroStep) -> tuple[Tensor, list[Stats]]:
        """Add up the gradients of a micro-step's micro-batches; at the last one, average over processes. Collective.

        Returns:
            Their loss, and the metrics of each.
        """
        run, sharding, plan = self.run, self.run.sharding, micro_step.plan
        if isinstance(model, DistributedDataParallel):
            model = model.module  # no collective in a backward pass: processes need not run equally many
        loss, found = torch.zeros((), device=run.device), list[Stats]()
        first, last = micro_step.earlier + 1, micro_step.earlier + len(micro_step.micro_batches)
        for number, batch in enumerate(micro_step.micro_batches, first):

            def backward(part: TrainBatch, number: int = number) -> Tensor:
                loss, stats = self.compute_loss(model, part, plan, number)
                self.backward(loss)
                found.append(stats)
                return loss.detach()

            run.activity.count(plan.size, number - 1)
            around = sharding.around_micro_batch(run.accelerator, model, number == last) if sharding.gradients else None
            with around or nullcontext():
                loss = loss + self.runner.run(batch, backward)
        if micro_step.is_last and run.collectives.size > 1 and not sharding.gradients:
            with run.collectives.together("average the gradients"):
                average_gradients([weight for weight in run.policy.parameters() if weight.requires_grad])
        return loss, found

    def step_stats(self, plan: Plan, found: list[Stats], seconds: float) -> list[Stats]:
        """The metrics of a step, from its plan and its micro-batches; adapts the entropy bonus. Collective."""
        stats: Stats = {"step_time": Mean(seconds, 1.0)}
        if self.balance is not None:
            stats["aux_loss"] = Mean(0.0, 1.0)
        if self.entropy is not None:
            mine = Mean(0.0, 0.0)
            for one in read([{"entropy": of_batch["entropy"]} for of_batch in found if "entropy" in of_batch]):
                mine = mine.merge(one["entropy"])  # type: ignore[arg-type]
            totals = self.run.collectives.gather(mine, "average the step's entropy")
            entropy = Mean(sum(m.total for m in totals), sum(m.count for m in totals))
            stats["entropy_coef"] = Mean(self.entropy.effective, 1.0)
            stats["policy_loss"] = Mean(0.0, 1.0)
            if entropy.count:
                self.entropy.observe(entropy.value())
        return [*plan.stats, *logged(plan, found), stats]

    def evaluate(self, model: Any, experience: Experience) -> tuple[float, list[Stats]]:
        """The loss of a whole batch without training on it, 0 for an empty share, and its metrics. Collective."""
        plan, found = self.plan_evaluation(experience), list[Stats]()

        def forward(part: TrainBatch) -> Tensor:
            loss, stats = self.compute_loss(model, part, plan, 0)
            found.append(stats)
            return loss

        loss = sum(self.runner.run(part, forward).item() for part in plan.micro_steps[0])
        return loss, [*plan.stats, *logged(plan, found)]

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "buffer": self.buffer.state_dict(),
            "entropy": None if self.entropy is None else self.entropy.state_dict(),
            "token_limit": self.runner.limit,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buffer.load_state_dict(state["buffer"], self.run.device, self.run.collectives.rank)
        if self.entropy is not None and state["entropy"] is not None:
            self.entropy.load_state_dict(state["entropy"])
        self.runner.limit = state["token_limit"]


def replayed_stats(read: RouteReading | None, training: bool) -> Stats:
    """Share of (token, layer) pairs of a training pass whose router would have chosen other experts than replayed."""
    if read is None or read.replaced is None or read.forced is None or not training:
        return {}
    return {"routing/replaced": Mean(read.replaced.sum().float(), read.forced.float() * len(read.replaced))}


def logged(plan: Plan, found: list[Stats]) -> list[Stats]:
    """Metrics of micro-batches to log: without `entropy` where the plan has it for all rollouts."""
    if plan.measures_entropy:
        return found
    return [{name: stat for name, stat in stats.items() if name != "entropy"} for stats in found]
