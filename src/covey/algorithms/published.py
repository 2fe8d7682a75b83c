"""Published methods in addition to GRPO's and RLOO's own: advantages and losses, one function a formula.

To add one, write the function and name it in a table at the end.
"""

from dataclasses import replace
from math import comb

import torch
from torch import Tensor

from covey.algorithms.algorithm import LOSS_TYPES, LossType
from covey.algorithms.grpo import EPSILONS, clip_fractions, with_epsilons, with_fields
from covey.algorithms.registered import AdvantageInputs, register_advantages
from covey.core.advantages import EPSILON, centred, nanstd
from covey.core.losses import SurrogateInputs, clip, token_level

TIE = 1e-5  # covariances that differ by less count as equal, so that rounding does not decide which token is chosen


def reinforce_plus_plus(x: AdvantageInputs) -> Tensor:
    """A = (R - mean_batch) / (std_batch + ε): the batch is the baseline (REINFORCE++, arXiv 2501.03262)."""
    totals = x.totals.flatten()
    return (centred(totals, 0) / (nanstd(totals, 0) + EPSILON)).view_as(x.totals)


def reinforce_plus_plus_baseline(x: AdvantageInputs) -> Tensor:
    """A = D / (std_batch(D) + ε), D = R - mean_group: REINFORCE++ with a baseline (arXiv 2501.03262)."""
    difference = centred(x.totals)
    return difference / (nanstd(difference.flatten(), 0) + EPSILON)


def maxrl(x: AdvantageInputs) -> Tensor:
    """A = (R - mean_group) / mean_group: for rewards 0 and 1 the likelihood of success (arXiv 2602.02710)."""
    mean = x.totals.nanmean(1, keepdim=True)
    return torch.where(mean > 0, centred(x.totals) / mean, 0.0)


def gpg(x: AdvantageInputs) -> Tensor:
    """A = (R - mean_group) · P / (P - P_0), where P_0 of P groups have equal rewards (GPG, arXiv 2504.02546)."""
    difference = centred(x.totals)
    telling = (difference.nan_to_num(0.0) != 0).any(1).sum()
    return difference * len(difference) / telling.clamp(min=1)


def opo(x: AdvantageInputs) -> Tensor:
    """A = R - Σ l R / Σ l over the group, with lengths l: the optimal baseline (OPO, arXiv 2505.23585).

    0 in groups of equal rewards.
    """
    lengths = torch.where(x.totals.isnan(), 0.0, x.lengths)
    baseline = (lengths * x.totals).nansum(1, keepdim=True) / lengths.sum(1, keepdim=True).clamp(min=1)
    return torch.where(centred(x.totals).nan_to_num(0.0).any(1, keepdim=True), x.totals - baseline, 0.0)


def pass_at_k(x: AdvantageInputs) -> Tensor:
    """Average advantage over all subsets of k that hold a completion, each rewarded with the best reward in it.

    Pass@k training (arXiv 2508.10751, §2.4), computed exactly.

    With m of n completions wrong (reward at most 0): mean = 1 - C(m, k) / C(n, k), std = √(mean (1 - mean)), and
    A = (1 - mean) / std if it is right, (1 - mean - C(m-1, k-1) / C(n-1, k-1)) / std if it is wrong.
    """
    rows, k = [], x.k
    for totals in x.totals:
        n, m = int((~totals.isnan()).sum()), int((totals <= 0).sum())
        mean = 1 - comb(m, k) / comb(n, k) if n >= k else 1.0
        std = (mean * (1 - mean)) ** 0.5
        right = (1 - mean) / std if std else 0.0
        wrong = right - comb(m - 1, k - 1) / comb(n - 1, k - 1) / std if std and m else 0.0
        rows.append(torch.where(totals > 0, right, wrong))
    return torch.stack(rows)


def otb(x: AdvantageInputs) -> Tensor:
    """A = R - mean_group, the input of `optimal_token_baseline` once the energies of tokens are known."""
    return centred(x.totals)


def dppo_tv(x: SurrogateInputs, *, low: float, high: float) -> Tensor:
    """DPPO with the total variation between "this token" and "any other": |π(o_t) - π_old(o_t)|."""
    return _dppo(x, (x.logprobs.exp() - x.old_logprobs.exp()).abs(), low, high)


def dppo_kl(x: SurrogateInputs, *, low: float, high: float) -> Tensor:
    """DPPO with KL(π_old || π) over the same two events: π_old log(π_old/π) + (1-π_old) log((1-π_old)/(1-π))."""
    old = x.old_logprobs.exp()
    rest, old_rest = (1 - x.logprobs.exp()).clamp(min=1e-7), (1 - old).clamp(min=1e-7)
    return _dppo(x, old * (x.old_logprobs - x.logprobs) + (1 - old) * (old_rest / rest).log(), low, high)


def _dppo(x: SurrogateInputs, divergence: Tensor, low: float, high: float) -> Tensor:
    """-r A, and 0 for a token whose probability has already moved far in the direction of A (DPPO, arXiv 2602.04879).

    Far is a divergence above `high` where A > 0 and the token's probability rose, above `low` where A < 0 and it fell.
    Unlike a bound on the ratio, this does not clip tokens of small probability.
    """
    onwards = x.log_ratio.detach() * x.advantages > 0
    far = divergence.detach() > torch.where(x.advantages > 0, high, low)
    return torch.where(onwards & far, 0.0, -x.ratio * x.advantages)


def reinforce(x: SurrogateInputs) -> Tensor:
    """-A log π: no ratio and no clipping (GPG, arXiv 2504.02546)."""
    return -x.advantages * x.logprobs


def dro(x: SurrogateInputs, *, beta: float) -> Tensor:
    """-(A log π - β/2 (log π - log π_old)²): a quadratic penalty instead of clipping (DRO, arXiv 2405.19107)."""
    return beta / 2 * (x.logprobs - x.old_logprobs).square() - x.advantages * x.logprobs


def kl_cov(x: SurrogateInputs, *, coef: float) -> Tensor:
    """-r A + coef · [chosen] KL(π_old || π), with r - log r - 1 as the estimate (KL-Cov, arXiv 2505.22617, §4.2)."""
    loss = -x.ratio * x.advantages
    return loss if x.chosen is None else torch.where(x.chosen, loss + coef * (x.ratio - x.log_ratio - 1), loss)


def clip_cov(x: SurrogateInputs, **epsilons: float) -> Tensor:
    """PPO's clipped loss, and 0 without a gradient for chosen tokens (Clip-Cov, arXiv 2505.22617, §4.2)."""
    return clip(x, **epsilons) if x.chosen is None else torch.where(x.chosen, 0.0, clip(x, **epsilons))


def covariances(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Cov_t = (log π - mean log π)(A - mean A) over the N tokens of the step (arXiv 2505.22617, §4.2)."""
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def most_covariant(logprobs: Tensor, advantages: Tensor, keys: Tensor, *, share: float) -> Tensor:
    """[N] bool: the share · N tokens of largest covariance, at least one, and all that tie with the last: KL-Cov."""
    covariance = covariances(logprobs, advantages)
    return covariance > covariance.topk(max(1, int(share * len(keys)))).values[-1] - TIE


def some_covariant(
    logprobs: Tensor, advantages: Tensor, keys: Tensor, *, share: float, low: float, high: float
) -> Tensor:
    """[N] bool: share · N random tokens, at least one if possible, with a covariance from `low` to `high`: Clip-Cov.

    `keys` [N] are random numbers: the smallest are chosen.
    """
    covariance = covariances(logprobs, advantages)
    keys = torch.where((covariance >= low) & (covariance <= high), keys, torch.inf)
    return (keys <= keys.kthvalue(max(1, int(share * len(keys)))).values) & keys.isfinite()


for _function in (reinforce_plus_plus, reinforce_plus_plus_baseline, maxrl, gpg, opo, pass_at_k, otb):
    register_advantages(_function.__name__, _function)

for _name, _row in {
    "dppo_tv": LossType(with_fields(dppo_tv, low="epsilon", high="resolved_epsilon_high"), reads=EPSILONS),
    "dppo_kl": LossType(with_fields(dppo_kl, low="epsilon", high="resolved_epsilon_high"), reads=EPSILONS),
    "gpg": LossType(with_fields(reinforce), reads=frozenset()),
    "dro": LossType(with_fields(dro, beta="dro_beta"), zero_without_advantage=False, reads=frozenset({"dro_beta"})),
    "kl_cov": LossType(
        with_fields(kl_cov, coef="kl_cov_coef"),
        reads=frozenset({"kl_cov_coef", "cov_share"}),
        choice=with_fields(most_covariant, share="cov_share"),
    ),
    "clip_cov": LossType(
        with_epsilons(clip_cov),
        stats=clip_fractions,
        reads=EPSILONS | {"cov_share", "clip_cov_low", "clip_cov_high"},
        choice=with_fields(some_covariant, share="cov_share", low="clip_cov_low", high="clip_cov_high"),
    ),
}.items():
    LOSS_TYPES.register(_name, replace(_row, ratio_level=token_level))
