"""Log-probs and entropies of batches under a model, computed without gradient in micro-batches that fit into memory."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from covey.core.batch import TrainBatch
from covey.core.model import inference_mode_of
from covey.core.routes import unknown_like
from covey.core.stats import Mean, Stat
from covey.policy.fused import fused_layers
from covey.policy.layouts import slowest
from covey.policy.lm_head.scores import TokenScores
from covey.policy.scoring import TokenScorer
from covey.trainer.microbatches import MicroBatchRunner
from covey.trainer.run import Run


@dataclass(eq=False)
class BatchScorer:
    """Scores batches; every process must call it equally often where weights are sharded."""

    run: Run
    scorer: TokenScorer
    runner: MicroBatchRunner
    _layouts_agree: bool = field(default=False, init=False)

    def logprobs(self, model: Any, batch: TrainBatch, rows: int | None = None) -> Tensor:
        """Log-probs [N] without gradient, in nominal micro-batches of `rows` completions; None: as in evaluations."""
        return self.values(model, batch, lambda part: self.scorer(model, part).logprobs, rows)

    def with_entropy(self, model: Any, batch: TrainBatch) -> tuple[Tensor, list[dict[str, Stat]]]:
        """Log-probs [N] without gradient, and the metric `entropy` of the trained tokens, in parts."""
        measured: list[dict[str, Stat]] = []

        def logprobs(part: TrainBatch) -> Tensor:
            scores = self.scorer(model, part, entropy=True)
            assert scores.entropies is not None, "asked for"
            measured.append({"entropy": Mean(scores.entropies[part.sampled].sum(), part.sampled.sum())})
            return scores.logprobs

        return self.values(model, batch, logprobs), measured

    def with_routes(
        self, model: Any, batch: TrainBatch, entropy: bool = False
    ) -> tuple[Tensor, TrainBatch, list[dict[str, Stat]]]:
        """Log-probs [N] without gradient, the batch with the experts that the model sent its tokens to, and entropies.

        A prompt of several micro-batches has the routes of the first of them. Entropies are as in `with_entropy`.
        """
        measured: list[dict[str, Stat]] = []
        prompts: dict[tuple[int, ...], Tensor] = {}

        def score(part: TrainBatch) -> tuple[Tensor, ...]:
            scores, routes, of_prompts = self.scorer.routes(model, part, entropy=entropy)
            for prompt, own in zip(part.prompts(), of_prompts, strict=True):
                prompts.setdefault(tuple(prompt.tolist()), own)
            if scores.entropies is not None:
                measured.append({"entropy": Mean(scores.entropies[part.sampled].sum(), part.sampled.sum())})
            return scores.logprobs, routes

        logprobs, routes = self._in_parts(model, batch, score, None)
        of_prompts = [prompts[tuple(prompt.tolist())] for prompt in batch.prompts()]
        joined = torch.cat(of_prompts) if of_prompts else unknown_like(routes, 0)
        return logprobs, replace(batch, routes=routes, prompt_routes=joined), measured

    def routes(self, batch: TrainBatch) -> Tensor:
        """Experts [N, L, k] that the policy sends the tokens of a batch to, or those that the batch forces."""
        return self._in_parts(
            self.run.policy, batch, lambda part: (self.scorer.routes(self.run.policy, part)[1],), None
        )[0]

    def entropies(self, batch: TrainBatch) -> Tensor:
        """Entropies [N] of the policy without gradient."""
        policy = self.run.policy
        return self.values(policy, batch, lambda part: self.scorer(policy, part, entropy=True).entropies)

    def rescore(self, batch: TrainBatch, temperature: float) -> Tensor:
        """Log-probs [N] under the policy at another temperature."""
        with self.scorer.at_temperature(temperature):
            return self.logprobs(self.run.policy, batch)

    def values(
        self, model: Any, batch: TrainBatch, values_of: Callable[[TrainBatch], Any], rows: int | None = None
    ) -> Tensor:
        """A value for every token [N], computed without gradient in micro-batches."""
        return self._in_parts(model, batch, lambda part: (values_of(part),), rows)[0]

    def scores(
        self,
        model: Any,
        batch: TrainBatch,
        *,
        entropy: bool = False,
        top: int = 0,
        hidden: bool = False,
        rows: int | None = None,
    ) -> TokenScores:
        """Scores of a batch, without gradient, in micro-batches; also of `batch.named_ids` where it has them.

        Args:
            model: the policy or another model.
            batch: the batch to score.
            entropy, top, hidden: as for `TokenScorer`.
            rows: completions in a nominal micro-batch; None: as in evaluation.
        """
        optional = {"entropies": entropy, "named": batch.named_ids is not None}
        optional |= {"top_ids": top > 0, "top_logprobs": top > 0, "hidden": hidden}
        names = ["logprobs", *(name for name, wanted in optional.items() if wanted)]

        def score(part: TrainBatch) -> tuple[Tensor, ...]:
            found = self.scorer(model, part, entropy=entropy, named=part.named_ids, top=top, hidden=hidden)
            return tuple(getattr(found, name) for name in names)

        found: dict[str, Any] = dict(zip(names, self._in_parts(model, batch, score, rows), strict=True))
        return TokenScores(**found)

    def _in_parts(
        self,
        model: Any,
        batch: TrainBatch,
        values_of: Callable[[TrainBatch], tuple[Tensor, ...]],
        rows: int | None,
    ) -> tuple[Tensor, ...]:
        rows = self.run.algebra.rows("eval") if rows is None else rows
        fused = fused_layers(self.runner.fused(model))
        with self.run.accelerator.autocast(), inference_mode_of(self.scorer.unwrap(model)), fused:
            return self.runner.score(batch, values_of, rows)

    def settle_layout(self, batch: TrainBatch) -> None:
        """Let the scorer choose its layout before anything is planned.

        The first call is collective: all processes agree on the slowest layout among theirs.
        """
        policy = self.run.policy
        with self.run.accelerator.autocast():
            mine = self.scorer.layout_of(policy, batch)
        if self._layouts_agree:
            return
        agreed = slowest(self.run.collectives.gather(mine, "agree on a layout"))
        if mine != agreed:
            self.scorer.adopt(policy, agreed)
            warnings.warn(
                f"this process could score in the layout '{mine}', but another cannot, so all take '{agreed}'. Set"
                f" attn_layout='{agreed}' to silence this.",
                stacklevel=2,
            )
        self._layouts_agree = True
