"""Evaluation by sampling: every prompt of a dataset is answered and scored as in training, and nothing is updated.

A plain dataset is sampled as in training, and its loss is told as well; an `EvalSuite` has sampling of its own, which
the loss would mean nothing for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.integrations import rewrite_logs
from transformers.trainer_utils import EvalLoopOutput

from covey.config.algebra import BatchAlgebra
from covey.core.advantages import weighted_total
from covey.core.batch import TrainBatch
from covey.core.engine import SamplingParams
from covey.data.dynamic_sampling import ScoredRollouts
from covey.data.sampler import eval_loader
from covey.data.validation import check_dataset
from covey.observability.completions import CompletionLog
from covey.observability.metrics import MetricLog, generation_stats
from covey.rewards import RewardSuite
from covey.rollout.collector import PromptSample
from covey.trainer.distributed.sharding import ready_to_evaluate
from covey.trainer.evaluation.suites import EvalSuite, Graded, Grader, Scoreboard, rows_of
from covey.trainer.finite import FiniteTraining
from covey.trainer.generation_log import describe, none_for_nan
from covey.trainer.weight_sync import WeightSync


class SampledEvaluation(FiniteTraining):
    """The evaluating half of a trainer. Subclasses provide the step's parts declared here."""

    args: Any
    model: Any
    eval_dataset: Any
    algebra: BatchAlgebra
    metrics: MetricLog
    rewards: RewardSuite
    sampling: SamplingParams
    weight_sync: WeightSync
    evaluates_alone = False
    """It has been got ready to evaluate without training."""
    eval_completions: CompletionLog | None = None
    """Those of the latest evaluation."""
    _generations: dict[str, int]
    _prompts_required: bool
    """Rows must have a prompt; an environment may give it otherwise."""

    def _end_rollouts(self) -> None:
        """No rollout follows: close what they act in."""
        raise NotImplementedError

    def gather_experience(self, draws: list[PromptSample]) -> TrainBatch:
        """Sample, score and assign credit to draws."""
        raise NotImplementedError

    def loss_of(self, batch: TrainBatch) -> float:
        """The loss of a whole batch without training on it; 0 for an empty share."""
        raise NotImplementedError

    def _sample(
        self, key: tuple[str | int, ...], draws: list[PromptSample], number: int, flight: Any = None
    ) -> ScoredRollouts:
        """Sample and reward draws."""
        raise NotImplementedError

    def _generation_key(self) -> tuple[str, int]:
        """A name for the next generation."""
        raise NotImplementedError

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Batches over one evaluation dataset or suite."""
        if isinstance(eval_dataset, str):
            known = self.eval_dataset if isinstance(self.eval_dataset, dict) else {}
            if eval_dataset not in known:
                raise ValueError(f"no evaluation dataset is called {eval_dataset!r}; known: {sorted(known)}.")
            eval_dataset = known[eval_dataset]
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if chosen is None:
            raise ValueError("evaluation needs an `eval_dataset`; this trainer was made without one.")
        rows, algebra = rows_of(chosen), self.algebra
        check_dataset(rows, "eval_dataset", self._prompts_required)
        if isinstance(chosen, EvalSuite):
            algebra = chosen.batches(algebra)
        algebra.check_eval()
        loader = eval_loader(rows, algebra, self.accelerator.process_index)
        loader.suite = chosen if isinstance(chosen, EvalSuite) else None
        return loader

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Batches over a dataset given to `predict`."""
        return self.get_eval_dataloader(test_dataset)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Sample and score an evaluation dataset, or each of several; log metrics, and with them completions."""
        metrics = super().evaluate(*args, **kwargs)
        self._send_completions()
        return metrics

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Sample and score a dataset that is given; there are metrics and no predictions."""
        output = super().predict(*args, **kwargs)
        self._send_completions()
        return output

    def _send_completions(self) -> None:
        """Send what was written down to trackers, now that these have their runs: the first metrics open them."""
        if self.eval_completions is not None and self.args.log_completions:
            self.eval_completions.to_trackers(self.args.report_to, self.state.global_step)
        self.eval_completions = None

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Sample and score every prompt of a dataset; the metrics are those of training, prefixed."""
        ready_to_evaluate(self)
        was_training = self.model.training
        self.model.eval()
        self._generations["eval"] = 0  # every evaluation draws alike, so that what changes is the model
        self.eval_completions = self._completions_of(metric_key_prefix)
        try:
            with self._weights_to_judge():
                if dataloader.suite is None:
                    rows, found = self._evaluate_with_loss(dataloader)
                else:
                    rows, found = self._evaluate_suite(dataloader, dataloader.suite, self.eval_completions)
        finally:
            self.model.train(was_training)
            if not self.is_in_train:
                self._end_rollouts()
        self.eval_completions.publish(self.state.global_step)
        start = f"{metric_key_prefix}_"
        metrics = self.metrics.drain("eval", prefix=start)
        metrics |= {start + name: value for name, value in found.items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=rows)  # type: ignore[arg-type]

    def _completions_of(self, name: str) -> CompletionLog:
        """Where the completions of an evaluation are written down; trackers have them beside its metrics."""
        return CompletionLog(
            self.args.output_dir,
            unique_prompts=self.args.log_unique_prompts,
            sent_as=next(iter(rewrite_logs({f"{name}_completions": 0.0}))),
            folder="evaluations",
            name=name,
            enabled=self.is_world_process_zero(),
        )

    def _evaluate_with_loss(self, dataloader: Any) -> tuple[int, dict[str, float]]:
        """The completions of a plain dataset, and their loss."""
        losses, rows = 0.0, 0
        for draws in dataloader:
            with self.collectives.ending_all():
                batch = self.gather_experience(draws)
                with torch.no_grad():
                    loss = self.loss_of(batch)
            shares = self.collectives.gather((loss, len(batch)), "add up the evaluation's loss")
            rows += (batch_rows := sum(count for _, count in shares))
            losses += batch_rows * sum(loss for loss, _ in shares)
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        return rows, {"loss": losses / max(rows, 1)}

    @torch.no_grad()
    def _evaluate_suite(self, dataloader: Any, suite: EvalSuite, log: CompletionLog) -> tuple[int, dict[str, float]]:
        """The completions of a suite, which are written down, and what it estimates from them."""
        completions, judge = suite.completions(self.algebra), suite.judge(self.rewards)
        tally = Scoreboard(suite, completions)
        rewards: list[Tensor] = []
        measured: list[tuple[int, bool]] = []
        key = self._generation_key()  # one for all, so that samples do not depend on how prompts are cut into batches
        for draws in dataloader:
            with self.collectives.ending_all(), self._sampling_as(suite):
                sampled = self._sample(key, draws, 0)
                mine = self._verdicts(sampled, judge)
            lengths = [(rollout.num_sampled, rollout.truncated) for rollout in sampled.rollouts]
            table = describe(sampled.draws, sampled.rollouts, sampled.columns, bool(self.args.log_multimodal))
            everyone = self.collectives.gather((mine, sampled.rewards, lengths, table), "put the evaluation together")
            for verdicts, scores, sizes, columns in everyone:
                tally.add(verdicts)
                rewards.append(scores)
                measured += sizes
                self._write_down(log, verdicts, scores, [length for length, _ in sizes], columns)
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        stats = generation_stats(
            lengths=[length for length, _ in measured],
            truncated=[cut for _, cut in measured],
            rewards_NF=torch.cat(rewards),
            weights_F=self.rewards.weights,
            names=self.rewards.names,
            num_generations=completions,
        )
        if completions == 1:
            del stats["frac_reward_zero_std"]  # of one each
        self.metrics.add(stats, "eval")
        return len(measured), tally.metrics()

    def _write_down(
        self, log: CompletionLog, verdicts: list[Graded], scores: Tensor, lengths: list[int], table: dict[str, Any]
    ) -> None:
        """Add one process's completions to a file to be."""
        if not log.enabled or not verdicts:
            return
        judged: dict[str, list[Any]] = {
            "right": [verdict.right for verdict in verdicts],
            "answer": [verdict.answer for verdict in verdicts],
        }
        shown = {column: values for column, values in judged.items() if any(value is not None for value in values)}
        for column in dict.fromkeys(name for cells in table["extras"] for name in cells):
            shown[column] = [cells.get(column) for cells in table["extras"]]
        log.add(
            self.state.global_step,
            table["prompt"],
            table["completion"],
            {name: none_for_nan(scores[:, k]) for k, name in enumerate(self.rewards.names)},
            extras=shown,
            finish=table["finish"],
            lengths=lengths,
            counts=table["counts"],
            errors=table["error"],
            images=table["images"],
        )

    @contextmanager
    def _weights_to_judge(self) -> Iterator[None]:
        """With an optimizer that trains other weights than it recommends (schedule-free ones): the recommended."""
        optimizer = self._recommending_optimizer()
        if optimizer is None:
            yield
            return
        optimizer.eval()
        self.weight_sync.forget()
        try:
            yield
        finally:
            self.weight_sync.forget()
            if self.is_in_train:
                optimizer.train()  # the next generation is sampled before the next step sets it

    def _recommending_optimizer(self) -> Any:
        """The optimizer, if it trains other weights than it recommends; else None."""
        inner: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        switches = (getattr(inner, name, None) for name in ("train", "eval"))
        return inner if all(map(callable, switches)) else None

    def _verdicts(self, sampled: ScoredRollouts, judge: Grader) -> list[Graded]:
        totals = weighted_total(sampled.rewards.double(), self.rewards.weights.double()).tolist()
        scored = any(total == total for total in totals)
        answers = judge.answers([rollout.completion for rollout in sampled.rollouts], sampled.columns, scored)
        return [
            Graded(draw.prompt, total, judge.right(rewards), answer)
            for draw, total, rewards, answer in zip(
                sampled.draws, totals, sampled.rewards.tolist(), answers, strict=True
            )
        ]

    @contextmanager
    def _sampling_as(self, suite: EvalSuite) -> Iterator[None]:
        usual = self.sampling
        self.sampling = suite.sampling(usual)
        try:
            yield
        finally:
            self.sampling = usual
