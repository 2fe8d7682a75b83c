"""From a generation to gradients: the updating half of a trainer.

An optimizer step is planned as a whole (which rollouts are run at all, on which process, in which forward passes) when
the last of its generations is sampled, then run pass by pass. Not here: how experience is gathered
(`covey.trainer.trainer`), how passes survive a lack of memory (`covey.trainer.microbatches`).
"""

import functools
import time
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from covey.algorithms.algorithm import Algorithm
from covey.core.batch import TrainBatch
from covey.core.metrics import Mean, Stat
from covey.core.model import inference_mode_of
from covey.core.objective import LossInputs, policy_loss
from covey.core.packing import balance_ranks, pass_tokens
from covey.core.weighting import mean_over_update
from covey.observability.timeline import PhaseTimer
from covey.policy.layouts.selection import slowest
from covey.policy.moe import RouterLoads
from covey.policy.scoring import TokenScorer
from covey.policy.unwrap import Unwrap
from covey.trainer.distributed.exchange import OwnRollouts, RolloutIndex, join_generations, pool
from covey.trainer.distributed.gradients import average_gradients
from covey.trainer.distributed.sharding import Sharding, ready_to_train
from covey.trainer.entropy import EntropyController, exact_quantile
from covey.trainer.evaluation.phase import SampledEvaluation
from covey.trainer.microbatches import MicroBatchRunner
from covey.trainer.moe_balance import ExpertBalance
from covey.trainer.rollout_buffer import PartOfStep, RolloutBuffer, batch_counts, nominal_parts


class PolicyUpdates(SampledEvaluation):
    """The updating half of a trainer. `OnlineTrainer` provides the parts declared here."""

    algorithm: Algorithm
    scorer: TokenScorer
    passes: MicroBatchRunner
    experience: RolloutBuffer
    entropy: EntropyController
    balance: ExpertBalance
    phases: PhaseTimer
    sharding: Sharding
    _entropy_known: bool
    """A generation began in this optimizer step, and its entropies were measured over all of its completions."""
    _layouts_agree = False
    """All processes score in the same layout."""

    def _sample_ahead(self, draws: Any) -> None:
        """At the beginning of an optimizer step: launch the generations that may be sampled with these weights."""
        raise NotImplementedError

    def _forget_ahead(self) -> None:
        """Give up what is sampled ahead."""
        raise NotImplementedError

    def _forget_step(self) -> None:
        """Start an optimizer step's books."""
        self._unbooked: dict[str, Stat] = {}
        self._micro_step, self._step_passes, self._step_seconds = 0, 0, 0.0
        self._step_entropy = Mean(0.0, 0.0)
        self._parts_of_step: list[PartOfStep] = []

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train from the start or from a checkpoint; nothing is left over from an earlier, interrupted call."""
        ready_to_train(self)
        self.experience = RolloutBuffer()
        self._forget_step()
        self._forget_ahead()
        with self.collectives.ending_all():
            try:
                if (optimizer := self._recommending_optimizer()) is not None:
                    optimizer.train()  # of an earlier call
                result = super().train(*args, **kwargs)
                self.check_weights()
                if (optimizer := self._recommending_optimizer()) is not None and not self.args.load_best_model_at_end:
                    optimizer.eval()
                return result
            finally:
                self._forget_ahead()
                self._end_rollouts()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One micro-step of Hugging Face's loop: draws (or nothing) in, gradients out.

        A micro-step that brings draws starts a generation. What an optimizer step has to train on is planned once, when
        all of its generations are sampled, so a micro-step may run several passes or none.
        """
        start = time.perf_counter()
        model.train()
        with self.phases("train"):
            self._entropy_known = self._entropy_known and self._micro_step > 0
            self._sample_ahead(inputs)
            if inputs:
                self._refill(self.gather_experience(inputs))
            if inputs or self._micro_step == 0:
                self._plan(self.current_gradient_accumulation_steps - self._micro_step)
            loss = self._run(model, self.experience.next())
        self._step_seconds += time.perf_counter() - start
        self._micro_step += 1
        if self.accelerator.sync_gradients:
            self._close_step()
        return loss

    def compute_loss(
        self,
        model: Any,
        inputs: TrainBatch,  # type: ignore[override]
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """The loss of one pass, so scaled that the sum over a step's passes, averaged over ranks, is the step's."""
        wants_entropy = self.entropy.enabled or inputs.entropy_threshold is not None or not self._entropy_known
        aux: Tensor | float = 0.0
        with self.accelerator.autocast():
            if self.balance.enabled:
                scores, loads = self.scorer.with_loads(model, inputs, self.balance.top_k, entropy=wants_entropy)
                aux = self.balance.loss(loads, len(inputs))
            else:
                scores = self.scorer(model, inputs, entropy=wants_entropy)
        coef = self.entropy.effective
        result = policy_loss(LossInputs.of(inputs, *scores, coef), self.algorithm.objective)
        scale = self._loss_scale()
        if self.model.training:
            self.check_loss(result.without_bonus)
        if isinstance(aux, Tensor):  # the counts make the means ones over optimizer steps
            result.stats["aux_loss"] = Mean(aux.item() * scale, 0.0)
        if self.entropy.enabled and self.model.training:
            result.stats["policy_loss"] = Mean(result.without_bonus * scale, 0.0)  # _close_step counts the steps
        self._unbooked = result.stats
        loss = result.loss + self.balance.coef * aux
        if torch.is_grad_enabled() and not loss.requires_grad:  # text alone, and just what encodes images is trained
            trained = next(parameter for parameter in self.policy.parameters() if parameter.requires_grad)
            loss = loss + 0.0 * trained.sum()
        return loss * scale

    def _prepare_inputs(self, inputs: TrainBatch) -> TrainBatch:  # type: ignore[override]
        return inputs  # planned and on the device already

    def _refill(self, batch: TrainBatch) -> None:
        """Put this process's share of a generation into the buffer, with the sizes of all others. Collective."""
        own, index = pool(batch, self.collectives)
        parts = nominal_parts(len(index), self.args.per_device_train_batch_size, self.collectives.size)
        self.experience.refill(own, index, parts, self.args.num_iterations)

    def _plan(self, micro_steps: int) -> None:
        """Plan the optimizer step, once its last generation is there: rollouts to ranks, and to passes."""
        part = self.experience.take(micro_steps)
        self._parts_of_step.append(part)
        if part.micro_batches < micro_steps:  # another generation follows, and averages are over both
            self.experience.spread([], part.micro_batches)
            return
        own, index = self._whole_step(self._parts_of_step)
        self._settle_layout(own.batch)
        if not self._every_rollout_counts:
            index = index.without_signal_dropped()
        shares = balance_ranks(index, self.collectives.size, self.scorer.layout)
        rows = self.args.per_device_train_batch_size
        most = max(self.passes.count(index.select(share), rows) for share in shares) if len(shares) > 1 else 1
        mine = own.fetch(index, shares, self.collectives)
        if self.args.top_entropy_quantile < 1.0:
            mine.entropy_threshold = self._entropy_threshold(mine)
        if self.accelerator.is_main_process:
            mine.skipped_tokens, mine.skipped_rows = index.skipped_tokens, index.skipped_rows
        planned = self.passes.plan(mine, rows, at_least=most)
        self._step_passes += len(planned)
        self.metrics.add(self._plan_stats(planned, mine.skipped_rows), "train")
        if self.sharding.gradients:
            planned += [own.batch.idle() for _ in range(most - len(planned))]
        if self.balance.enabled:
            taken = sum(part.micro_batches for part in self._parts_of_step)
            self._balance(mine, taken / self.args.gradient_accumulation_steps, len(planned))
        self.experience.spread(planned, part.micro_batches)

    def _whole_step(self, parts: list[PartOfStep]) -> tuple[OwnRollouts, RolloutIndex]:
        """The rollouts of an optimizer step; those of several generations get weights from the counts of all."""
        if len(parts) == 1:
            return parts[0].own, parts[0].index
        own, index = join_generations([(part.own, part.index) for part in parts])
        rows, taken = self.args.per_device_train_batch_size, sum(part.micro_batches for part in parts)
        counts = batch_counts(
            index.sampled_lengths,
            rows_per_part=rows,
            total_rows=len(index),
            total_tokens=sum(part.tokens for part in parts),
            total_parts=len(index) // rows,
            updates=taken / self.args.gradient_accumulation_steps,
            max_completion_length=self.args.max_completion_length,
        )
        entropy_weights = mean_over_update(counts) if self.entropy.enabled else None
        return own, replace(index, weights=self.algorithm.weighting(counts), entropy_weights=entropy_weights)

    def _balance(self, batch: TrainBatch, share: float, passes: int) -> None:
        """Let the load-balancing loss know what is trained on. Collective."""

        def survey(batch: TrainBatch) -> RouterLoads:
            found: list[RouterLoads] = []

            def look(part: TrainBatch) -> Tensor:
                found.append(self.scorer.loads(self.policy, part, self.balance.top_k))
                return torch.zeros_like(part.token_ids, dtype=torch.float32)  # no scores are wanted

            with self.accelerator.autocast(), inference_mode_of(self.policy):
                self.passes.score(batch, self._rows_per_part, look)
            mine = [total.cpu() for total in RouterLoads.of_all(found)] if found else None
            shares = self.collectives.gather(mine, "add up the experts' loads")
            return RouterLoads.of_all([RouterLoads(*share) for share in shares if share is not None])

        alone = self.accelerator.num_processes == 1 and passes <= 1
        self.balance.begin(share, batch, survey, whole=alone)

    def _plan_stats(self, planned: list[TrainBatch], skipped: int) -> dict[str, Stat]:
        tokens = sum(pass_tokens(part, range(len(part)), self.scorer.layout) for part in planned)
        run = sum(len(part) for part in planned)
        return {
            "passes/tokens": Mean(float(tokens), float(len(planned))),
            "passes/skipped_rollouts": Mean(float(skipped), float(run + skipped)),
        }

    @property
    def _every_rollout_counts(self) -> bool:
        """Whether rollouts without advantage have a gradient of their own."""
        by_entropy = self.entropy.enabled or self.args.top_entropy_quantile < 1.0
        return self.algorithm.objective.needs_every_rollout or by_entropy or self.balance.enabled

    def _run(self, model: Any, passes: list[TrainBatch]) -> Tensor:
        """Run a micro-step's passes forward and backward; the step's last one adds the processes' gradients up."""
        one_pass = super().training_step

        def backward(batch: TrainBatch) -> Tensor:
            loss = one_pass(model, batch)  # type: ignore[arg-type]
            self._note_loss(self._unbooked)
            return loss

        if isinstance(model, DistributedDataParallel):
            model = model.module  # no collective in a pass: processes need not run equally many
        loss = torch.zeros((), device=self.accelerator.device)
        for number, part in enumerate(passes, 1):
            with self.sharding.around_pass(self.accelerator, model, last=number == len(passes)):
                loss = loss + self.passes.run(part, backward)
        averaged = self.sharding.gradients or self.accelerator.num_processes == 1
        if self.accelerator.sync_gradients and not averaged:
            with self.collectives.together("average the gradients"):
                average_gradients([p for p in self.policy.parameters() if p.requires_grad])
        return loss

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, its config as it was loaded."""
        with self.balance.config_as_loaded(self.policy):
            super().save_model(output_dir, _internal_call)

    def loss_of(self, batch: TrainBatch) -> float:
        """The loss of a whole batch without training on it; 0 for an empty share."""

        def forward(part: TrainBatch) -> Tensor:
            loss = self.compute_loss(self.model, part)
            self._note_loss(self._unbooked)
            return loss

        self._settle_layout(batch)
        kept = batch if self._every_rollout_counts else batch.without_signal_dropped()
        parts = self.passes.plan(kept, self._rows_per_part)
        parts += self.passes.idle(batch, len(parts))
        if self.balance.enabled:
            self._balance(kept, 1.0, len(parts))
            self.metrics.add(self.balance.count(1.0 / self.accelerator.num_processes), self.mode)
        return sum(self.passes.run(part, forward).item() for part in parts)

    def _settle_layout(self, batch: TrainBatch) -> None:
        """Let the scorer choose its layout before anything is planned: how tokens are counted depends on it.

        The first call is collective. Each process finds its layout by trying, so where rounding or hardware differ
        they may differ too; but all must make the same plan, so they take the slowest that any of them found.
        """
        with self.accelerator.autocast():
            mine = self.scorer.settle(self.policy, batch)
        if self._layouts_agree:
            return
        found = self.collectives.gather(mine, "agree on a layout")
        if mine != (agreed := slowest(found)):
            self.scorer.adopt(self.policy, agreed)
            warnings.warn(
                f"this process could score in the layout '{mine}', but another cannot, so all take '{agreed}'. Set"
                f" attn_layout='{agreed}' to silence this.",
                stacklevel=2,
            )
        self._layouts_agree = True

    def _score(self, model: Any, batch: TrainBatch, entropies: list[Stat] | None = None) -> Tensor:
        """Log-probs without gradient, [N]; the mean entropy of each pass's trained tokens is added to `entropies`."""

        def logprobs(part: TrainBatch) -> Tensor:
            scores = self.scorer(model, part, entropy=entropies is not None)
            if entropies is not None:
                assert scores.entropies is not None, "asked for"
                entropies.append(Mean(scores.entropies[part.sampled].sum().item(), part.sampled.sum().item()))
            return scores.logprobs

        with self.accelerator.autocast(), inference_mode_of(self.scorer.unwrap(model)):
            return self.passes.score(batch, self._rows_per_part, logprobs)

    def _entropy_threshold(self, batch: TrainBatch) -> float:
        """The entropy that a token needs to count: a quantile over the optimizer step, all processes together."""

        def entropies_of(part: TrainBatch) -> Tensor:
            scores = self.scorer(self.policy, part, entropy=True)
            assert scores.entropies is not None, "asked for"
            return scores.entropies

        with self.accelerator.autocast(), inference_mode_of(self.policy), torch.no_grad():
            entropies = self.passes.score(batch, self._rows_per_part, entropies_of)
        everyone = torch.cat(self.collectives.gather(entropies[batch.sampled].cpu(), "find the entropy's quantile"))
        threshold = exact_quantile(everyone, 1 - self.args.top_entropy_quantile)
        self.metrics.add({"entropy/threshold": Mean(threshold, 1.0)}, self.mode)
        return threshold

    def _note_loss(self, stats: dict[str, Stat]) -> None:
        """Keep a micro-batch's metrics; entropies that are known of all completions are not counted twice."""
        if self.model.training and isinstance(entropy := stats.get("entropy"), Mean):
            self._step_entropy = self._step_entropy.merge(entropy)
        if self._entropy_known:
            stats.pop("entropy", None)
        self.metrics.add(stats, self.mode)

    def _loss_scale(self) -> float:
        """Weights assume a full accumulation window and sum over ranks; the optimizer sees a mean over ranks."""
        if not self.model.training:
            return 1.0
        window = self.args.gradient_accumulation_steps / self.current_gradient_accumulation_steps
        return window * self.accelerator.num_processes

    def _close_step(self) -> None:
        stats: dict[str, Stat] = {
            "step_time": Mean(self._step_seconds, 1.0),
            "passes/count": Mean(float(self._step_passes), 1.0),
            **self.balance.count(1.0),
        }
        if self.entropy.enabled:
            totals = self.collectives.gather(self._step_entropy, "average the step's entropy")
            entropy = Mean(sum(m.total for m in totals), sum(m.count for m in totals))
            stats["entropy_coef"] = Mean(self.entropy.effective, 1.0)
            stats["policy_loss"] = Mean(0.0, 1.0)
            if entropy.count:
                self.entropy.observe(entropy.value())
        self.metrics.add(stats, "train")
        self._forget_step()

    # ---- where a step stands ---------------------------------------------------------------------------------------

    @property
    def policy(self) -> Any:
        """The transformers (or PEFT) model inside whatever wraps it."""
        return self._unwrap(self.model_wrapped)

    @functools.cached_property
    def _unwrap(self) -> Unwrap:
        return Unwrap(self.accelerator)

    @property
    def mode(self) -> str:
        """`train` or `eval`."""
        return "train" if self.model.training else "eval"

    @property
    def _group_size(self) -> int:
        return self.algebra.num_generations if self.model.training else self.algebra.eval_group

    @property
    def _rows_per_part(self) -> int:
        return self.args.per_device_train_batch_size if self.model.training else self.args.per_device_eval_batch_size
