"""Evaluation by sampling: every prompt of a dataset is answered and scored as in training, and nothing is updated."""

from typing import Any

import torch
from transformers.trainer_utils import EvalLoopOutput

from covey.core.batch import TrainBatch
from covey.observability.metrics import MetricLog
from covey.rollout.collector import Draw
from covey.trainers.checkpoint import AtomicCheckpoints
from covey.trainers.config.algebra import BatchAlgebra
from covey.trainers.dataset import check_dataset
from covey.trainers.sampler import eval_loader


class SampledEvaluation(AtomicCheckpoints):
    """The evaluating half of a trainer. Subclasses provide the step's parts declared here."""

    args: Any
    model: Any
    eval_dataset: Any
    algebra: BatchAlgebra
    metrics: MetricLog
    _generations: dict[str, int]
    _prompts_required: bool
    """Rows must have a prompt; an environment may give it otherwise."""

    def _end_rollouts(self) -> None:
        """No rollout follows: close what they act in."""
        raise NotImplementedError

    def gather_experience(self, draws: list[Draw]) -> TrainBatch:
        """Sample, score and assign credit to draws."""
        raise NotImplementedError

    def loss_of(self, batch: TrainBatch) -> float:
        """The loss of a whole batch without training on it; 0 for an empty share."""
        raise NotImplementedError

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Batches over one evaluation dataset."""
        if isinstance(eval_dataset, str):
            known = self.eval_dataset if isinstance(self.eval_dataset, dict) else {}
            if eval_dataset not in known:
                raise ValueError(f"no evaluation dataset is called {eval_dataset!r}; known: {sorted(known)}.")
            eval_dataset = known[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("evaluation needs an `eval_dataset`; this trainer was made without one.")
        check_dataset(dataset, "eval_dataset", self._prompts_required)
        self.algebra.check_eval()
        return eval_loader(dataset, self.algebra, self.accelerator.process_index)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Batches over a dataset given to `predict`."""
        return self.get_eval_dataloader(test_dataset)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Sample and score every prompt of a dataset; the metrics are those of training, prefixed."""
        was_training = self.model.training
        self.model.eval()
        self._generations["eval"] = 0  # every evaluation draws alike, so that what changes is the model
        losses, rows = 0.0, 0
        try:
            for draws in dataloader:
                with self.collectives.ending_all():
                    batch = self.gather_experience(draws)
                    with torch.no_grad():
                        loss = self.loss_of(batch)
                shares = self.collectives.gather((loss, len(batch)), "add up the evaluation's loss")
                rows += (batch_rows := sum(count for _, count in shares))
                losses += batch_rows * sum(loss for loss, _ in shares)
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        finally:
            self.model.train(was_training)
            if not self.is_in_train:
                self._end_rollouts()
        metrics = self.metrics.drain("eval", prefix=f"{metric_key_prefix}_")
        metrics[f"{metric_key_prefix}_loss"] = losses / max(rows, 1)
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=rows)  # type: ignore[arg-type]
