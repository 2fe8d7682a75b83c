"""What arms of claims need beyond the library: registered losses and advantages, a tiny mixture of experts."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from covey.algorithms import register_advantages
from covey.algorithms.algorithm import LOSS_TYPES
from covey.algorithms.grpo import clip_fractions
from covey.algorithms.registered import ADVANTAGES
from covey.core.advantages import group_relative
from covey.core.losses import SurrogateInputs
from covey.core.stats import Mean, Stat

ADVANTAGES_OF_CLAIMS = ("only_negative", "only_positive", "no_rewards")
LOSSES_OF_CLAIMS = ("dapo_with_kl", "random_tokens", "sure_tokens")


def only_negative(x: Any) -> Tensor:
    """min(A, 0): only wrong completions are trained on (2506.01347)."""
    return group_relative(x.totals).clamp(max=0)


def only_positive(x: Any) -> Tensor:
    """max(A, 0): only right completions are trained on."""
    return group_relative(x.totals).clamp(min=0)


def no_rewards(x: Any) -> Tensor:
    """Advantages of 0: what is learnt comes from a teacher alone."""
    return torch.zeros_like(x.totals)


def reverse_kl(config: Any) -> Any:
    """The clip fractions, and the mean of log π - log π_ref over trained tokens: KL(π || ref) on-policy."""
    fractions = clip_fractions(config)

    def stats(x: SurrogateInputs) -> dict[str, Stat]:
        found = fractions(x)
        if x.ref_logprobs is not None:
            gap = torch.where(x.sampled, x.logprobs - x.ref_logprobs, 0.0).detach()
            found["reverse_kl"] = Mean(gap.sum(), x.sampled.sum())
        return found

    return stats


def some(logprobs: Tensor, advantages: Tensor, keys: Tensor, *, share: float = 0.2) -> Tensor:
    """A random share of the tokens of a step."""
    return keys <= keys.kthvalue(max(1, int(share * len(keys)))).values


def register() -> None:
    """Make the losses and advantages of claims known, once."""
    for function in (only_negative, only_positive, no_rewards):
        if function.__name__ not in ADVANTAGES:
            register_advantages(function.__name__, function)
    row = LOSS_TYPES["dapo"]

    def random_tokens(config: Any) -> Any:
        """The clipped loss of a random fifth of the step's tokens."""
        loss = row.surrogate(config)
        return lambda x: loss(x) if x.chosen is None else torch.where(x.chosen, loss(x), 0.0)

    def sure_tokens(config: Any) -> Any:
        """The clipped loss of the 80% of tokens of least entropy, in a micro-batch."""
        loss = row.surrogate(config)

        def of_sure(x: SurrogateInputs) -> Tensor:
            assert x.entropies is not None
            entropies = x.entropies.detach()
            trained = entropies[x.sampled]
            return torch.where(entropies < trained.quantile(0.8), loss(x), 0.0) if len(trained) else loss(x)

        return of_sure

    for name, own in {
        "dapo_with_kl": replace(row, stats=reverse_kl),
        "random_tokens": replace(row, surrogate=random_tokens, choice=lambda config: some),
        "sure_tokens": replace(row, surrogate=sure_tokens, needs_entropies=True),
    }.items():
        if name not in LOSS_TYPES:
            LOSS_TYPES.register(name, own)


def tiny_mixture() -> Any:
    """A random mixture of two layers with eight experts, of which two are used, over the letters of the alphabet."""
    from transformers import MixtralConfig, MixtralForCausalLM

    from benchmarks.letters import SIZES
    from benchmarks.process_supervision import VOCABULARY

    return MixtralForCausalLM(
        MixtralConfig(vocab_size=len(VOCABULARY), num_local_experts=8, num_experts_per_tok=2, **SIZES)
    )
