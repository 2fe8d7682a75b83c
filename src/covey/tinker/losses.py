"""Losses of the API: sums over tokens, with inputs and thresholds as the client documents them.

To add one, write a function of `SentInputs` and a row of `LOSSES`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from covey.algorithms.published import dro
from covey.core.losses import SurrogateInputs, clip, sequence_token_level
from covey.tinker.errors import Refusal

HOSTED_ONLY = "stable_reinforce"  # its formula is not published


@dataclass(frozen=True)
class SentInputs:
    """Log-probs of the targets, which carry the gradient, and the inputs sent with them, of B data end to end.

    Positions whose weight and advantage are 0 have a log-prob of 0 here, so that no number there counts.
    """

    logprobs: Tensor  # [N], or [N, K] for cross-entropy
    lengths: Tensor  # [B] int64, positions of each datum
    weights: Tensor | None = None  # as `logprobs`
    old_logprobs: Tensor | None = None  # [N], as sampled
    advantages: Tensor | None = None  # [N]
    mask: Tensor | None = None  # [N], the positions of the sequence's ratio

    def surrogate(self, log_ratio: Tensor | None = None) -> SurrogateInputs:
        """The same for the surrogates of Covey; the ratio is that of each token unless another is given."""
        assert self.old_logprobs is not None and self.advantages is not None, "the loss's inputs were checked"
        own = self.logprobs - self.old_logprobs
        trained = torch.ones_like(own, dtype=torch.bool)
        ratio = own if log_ratio is None else log_ratio
        return SurrogateInputs(ratio, self.logprobs, self.old_logprobs, self.advantages, trained, self.lengths)


TokenLoss = Callable[[SentInputs, Mapping[str, float]], Tensor]


def cross_entropy(x: SentInputs, config: Mapping[str, float]) -> Tensor:
    """-w log p, for one target of each position or K of them."""
    return -x.logprobs if x.weights is None else -x.weights * x.logprobs


def importance_sampling(x: SentInputs, config: Mapping[str, float]) -> Tensor:
    """-r A with r = p / q: the policy gradient on samples of q."""
    return clip(x.surrogate(), epsilon_low=math.inf, epsilon_high=math.inf)


def ppo(x: SentInputs, config: Mapping[str, float]) -> Tensor:
    """-min(r A, clip(r, low, high) A) (PPO, arXiv 1707.06347, eq. 7); the thresholds are ratios."""
    return clip(x.surrogate(), **_epsilons(config))


def cispo(x: SentInputs, config: Mapping[str, float]) -> Tensor:
    """-sg[clip(r, low, high)] A log p (CISPO, arXiv 2506.13585, eq. 4)."""
    given = x.surrogate()
    ratio = given.ratio.detach().clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -ratio * given.advantages * x.logprobs


def direct_reward(x: SentInputs, config: Mapping[str, float]) -> Tensor:
    """-(A log p - β/2 (log p - log q)²) (DRO, arXiv 2405.19107)."""
    return dro(x.surrogate(), beta=config["beta"])


def gspo(x: SentInputs, config: Mapping[str, float]) -> Tensor:
    """-min(s A, clip(s, low, high) A), s the sequence's ratio with each token's gradient (arXiv 2507.18071, eq. 14)."""
    assert x.old_logprobs is not None and x.mask is not None, "the loss's inputs were checked"
    ratio = sequence_token_level(x.logprobs, x.old_logprobs, x.mask != 0, x.lengths)
    return clip(x.surrogate(ratio), **_epsilons(config))


def _epsilons(config: Mapping[str, float]) -> dict[str, float]:
    """Distances from 1, as Covey's own losses have them."""
    return {"epsilon_low": 1 - config["clip_low_threshold"], "epsilon_high": config["clip_high_threshold"] - 1}


@dataclass(frozen=True)
class Loss:
    """A loss: its function, and the inputs and settings that it reads."""

    tokens: TokenLoss  # loss of each token; the answer is their sum
    needs: tuple[str, ...]  # inputs that each datum has, one number for each position
    may: tuple[str, ...] = ()  # inputs that it may have
    config: Mapping[str, float | None] = field(default_factory=dict)  # settings and defaults; None must be given
    # the input that decides which positions count: those where it is not 0
    counts: str = "advantages"
    counts_too: str | None = None  # and those where this one is not


SAMPLES = ("target_tokens", "logprobs", "advantages")

LOSSES = {
    "cross_entropy": Loss(cross_entropy, ("target_tokens",), ("weights",), counts="weights"),
    "importance_sampling": Loss(importance_sampling, SAMPLES),
    "ppo": Loss(ppo, SAMPLES, (), {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": Loss(cispo, SAMPLES, (), {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    # its penalty counts for tokens of advantage 0, too; but not for prompts, whose log-prob and advantage are 0
    "dro": Loss(direct_reward, SAMPLES, (), {"beta": None}, counts_too="logprobs"),
    # thresholds of the paper, section 5.1; those of the hosted service are not known
    "gspo": Loss(
        gspo,
        (*SAMPLES, "sequence_ratio_mask"),
        (),
        {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
        counts_too="sequence_ratio_mask",
    ),
}


def loss_of(name: str, given: Mapping[str, float | str]) -> tuple[Loss, dict[str, float]]:
    """A loss and its settings; Refusal for one that is not known, lacks a setting or does not read one."""
    if name == HOSTED_ONLY:
        raise Refusal(
            f"loss_fn={name!r} exists on the hosted service only: its formula is not published. Add"
            " loss_fn=importance_sampling to the recipe's flags, or start the server with --substitute"
            f" {name}=importance_sampling."
        )
    if name not in LOSSES:
        raise Refusal(f"loss_fn={name!r} is not known; choose one of: {', '.join(LOSSES)}.")
    loss = LOSSES[name]
    if unknown := [key for key in given if key not in loss.config]:
        known = ", ".join(loss.config) or "none"
        raise Refusal(f"loss_fn={name!r} has no setting {unknown[0]!r}; its settings: {known}. Leave it out.")
    config = {}
    for key, default in loss.config.items():
        value = given.get(key, default)
        if value is None:
            raise Refusal(f"loss_fn={name!r} needs {key} in loss_fn_config, such as {{'{key}': 0.05}}.")
        if isinstance(value, str) or not math.isfinite(value):
            raise Refusal(f"loss_fn={name!r}: {key}={value!r} must be a number.")
        config[key] = float(value)
    low, high = config.get("clip_low_threshold"), config.get("clip_high_threshold")
    if low is not None and high is not None and not 0 <= low <= 1 <= high:
        raise Refusal(
            f"loss_fn={name!r}: clip_low_threshold={low} and clip_high_threshold={high} are ratios, the first at most 1"
            " and the second at least 1 (0.8 and 1.2, say)."
        )
    return loss, config
