"""Terms of the loss in addition to the objective: the entropy bonus, and the load balance of mixtures of experts."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from covey.config.base import OnlineConfig
from covey.core.batch import TrainBatch
from covey.core.stats import Mean, Stat
from covey.policy.moe import RouterLoads, experts_per_token, has_balancing_loss, load_balancing_loss
from covey.trainer.batch_scorer import BatchScorer


class EntropyController:
    """Coefficient of the entropy bonus in the next step.

    Adaptive (Skywork-OR1, arXiv 2505.22312 §4): the coefficient grows by `entropy_coef_delta` after a step whose
    entropy was at or below the target and shrinks by as much after any other; it acts only while the entropy is at or
    below the target.
    """

    def __init__(self, args: OnlineConfig):
        self.args, self.coef = args, args.entropy_coef
        self.last_entropy: float | None = None  # mean entropy of the last optimizer step, or None before the first

    @property
    def effective(self) -> float:
        above = self.last_entropy is None or self.last_entropy > self.args.entropy_target
        return 0.0 if self.args.use_adaptive_entropy and above else self.coef

    def observe(self, entropy: float) -> None:
        args, self.last_entropy = self.args, entropy
        if args.use_adaptive_entropy:
            step = args.entropy_coef_delta if entropy <= args.entropy_target else -args.entropy_coef_delta
            self.coef = min(max(self.coef + step, args.entropy_coef_min), args.entropy_coef_max)

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef, "last_entropy": self.last_entropy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.coef, self.last_entropy = state["coef"], state["last_entropy"]


def entropy_threshold(scorer: BatchScorer, batch: TrainBatch) -> tuple[float, dict[str, Stat]]:
    """The entropy that a token needs to count, a quantile over the optimizer step, and its metric. Collective."""
    run = scorer.run
    with torch.no_grad():
        entropies = scorer.entropies(batch)[batch.sampled]
    everyone = torch.cat(run.collectives.gather(entropies.cpu(), "find the entropy's quantile")).double().numpy()
    # Not torch.quantile, which stops at 2^24 values; without NaN, as one would drop every token.
    threshold = float(np.nanquantile(everyone, 1 - run.args.top_entropy_quantile)) if len(everyone) else 0.0
    return threshold, {"entropy/threshold": Mean(threshold, 1.0)}


def token_energies(scorer: BatchScorer, batch: TrainBatch) -> Tensor:
    """‖e - π‖² = 1 - 2 π(o_t) + Σ_v π(v)² of every process's trained tokens [N], 0 of others. Collective.

    The sum is π(o_t)² over the probability of o_t at half the temperature, so scoring twice gives it.
    """
    run = scorer.run
    own, half = (scorer.rescore(batch, run.args.temperature / part) for part in (1, 2))
    energies = (1 - 2 * own.exp() + (2 * own - half).exp()).clamp(min=1e-9)
    mine = torch.where(batch.sampled, energies, 0.0).cpu()
    return torch.cat(run.collectives.gather(mine, "compare completions at each token"))


def choose_tokens(
    scorer: BatchScorer, batch: TrainBatch, choice: Callable[..., Tensor]
) -> tuple[Tensor, dict[str, Stat]]:
    """The tokens [N] that a loss chooses from all of the step, however it is cut, and their metric. Collective."""
    run, args = scorer.run, scorer.run.args
    assert batch.advantages is not None, "credit comes before the loss"
    with torch.no_grad():
        logprobs = scorer.logprobs(run.policy, batch)
    prompts, keys = batch.prompts(), []  # random keys by rollout, so that they do not depend on its process
    for prompt, completion in zip(batch.groups.tolist(), batch.completions(), strict=True):
        seed = hash((args.seed, run.step, *prompts[prompt].tolist(), -1, *completion.tolist()))
        keys.append(torch.rand(len(completion), generator=torch.Generator().manual_seed(seed)))
    columns = logprobs.cpu(), batch.advantages.cpu(), torch.cat(keys)
    mine = torch.stack(columns).double()[:, batch.sampled.cpu()]
    shares = run.collectives.gather(mine, "choose tokens of the step")
    every = torch.cat(shares, 1)
    chosen = choice(*every) if every.shape[1] else every[0].bool()
    found = torch.zeros_like(batch.sampled)
    found[batch.sampled] = chosen.split([share.shape[1] for share in shares])[run.collectives.rank].to(found.device)
    return found, {"chosen_token_fraction": Mean(chosen.sum().item(), len(chosen))}


class ExpertBalance:
    """The load-balancing loss of a run: one for each optimizer step, however the step is cut into micro-batches.

    It needs each expert's share of the tokens of the whole step, so a step of several micro-batches or processes is run
    forward once more without its head, before its first micro-batch. The formula is in `covey.policy.moe`.
    """

    def __init__(self, args: OnlineConfig, policy: Any):
        """With the config's weight, else the model's own.

        The model's own computation of the loss is switched off, as it cannot read packed rows. Raises ValueError for a
        weight of a model without such a loss.
        """
        config = policy.config.get_text_config()
        own, wanted = getattr(config, "router_aux_loss_coef", None), args.router_aux_loss_coef
        top_k = experts_per_token(policy)
        if wanted and (own is None or top_k is None):
            raise ValueError(
                f"router_aux_loss_coef={wanted}: {type(policy).__name__} has no load-balancing loss, as its config"
                " names no router_aux_loss_coef. Leave the field unset; it is for mixtures of experts that"
                " transformers has such a loss for (Mixtral, Qwen3-MoE, OLMoE, gpt-oss, ...)."
            )
        self._asks = bool(getattr(config, "output_router_logits", False))
        if self._asks:
            config.output_router_logits = False
        coef = (own if self._asks or has_balancing_loss(policy) else 0.0) if wanted is None else wanted
        self.coef = float(coef or 0.0)  # 0 where there is no such loss
        self.top_k = top_k or 1  # experts of a token

    def of_step(self, share: float, batch: TrainBatch, scorer: BatchScorer, micro_batches: int) -> "StepBalance":
        """The loss of a `share` of an optimizer step, or of an evaluation batch, in so many micro-batches."""
        survey = partial(load_survey, scorer, self.top_k, batch)
        in_one = scorer.run.collectives.size == 1 and micro_batches <= 1
        return StepBalance(share, len(batch), survey, None if in_one else survey())

    @contextmanager
    def config_as_loaded(self, policy: Any) -> Any:
        """Restore the model's own setting of the loss in this context, so that it is saved as it was loaded."""
        config = policy.config.get_text_config()
        if self._asks:
            config.output_router_logits = True
        try:
            yield
        finally:
            if self._asks:
                config.output_router_logits = False


@dataclass
class StepBalance:
    """The load-balancing loss of one optimizer step or evaluation batch."""

    share: float  # of a whole accumulation window
    rows: int  # rollouts of this process
    survey: Callable[[], RouterLoads]  # the loads of the whole step
    whole: RouterLoads | None  # what `survey` returned; None if the only micro-batch has the loads of the whole step

    def __call__(self, loads: RouterLoads, rows: int) -> Tensor:
        """Contribution of a micro-batch of `rows` rollouts to the optimizer step's loss, before the coefficient."""
        if self.whole is None and rows < self.rows:  # it was to be one micro-batch, and memory ran out
            self.whole = self.survey()
        return self.share * load_balancing_loss(self.whole or loads, loads)


def load_survey(scorer: BatchScorer, top_k: int, batch: TrainBatch) -> RouterLoads:
    """The loads of all processes' experts under the policy, without gradient. Collective."""
    policy, found = scorer.run.policy, []

    def look(part: TrainBatch) -> Tensor:
        found.append(scorer.scorer.loads(policy, part, top_k))
        return torch.zeros_like(part.token_ids, dtype=torch.float32)  # no scores are wanted

    scorer.values(policy, batch, look)
    mine = [total.cpu() for total in RouterLoads.of_all(found)] if found else None
    shares = scorer.run.collectives.gather(mine, "add up the experts' loads")
    return RouterLoads.of_all([RouterLoads(*share) for share in shares if share is not None])
