"""The loss of one optimizer step, the slow way: float64, one sequence and one token at a time, nothing precomputed.

It follows the papers literally: nested lists of ranks, micro-batches and sequences, Python loops, averages taken where
the formula writes them. It shares no code and no idea (flat vectors, token weights) with `covey.core`, which is what
makes it worth comparing with. To check a new loss, add its `token_losses` branch and its `micro_batch_loss` branch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Row:
    """One completion. `lp` and `entropy` are leaf tensors [T]; everything else is plain numbers, one per token."""

    lp: Tensor
    entropy: Tensor
    mask: list[bool]
    advantages: list[float]
    old: list[float] | None
    ref: list[float]
    engine: list[float] | None
    chosen: tuple[bool, ...] = ()  # one per token, where the loss chooses tokens

    @property
    def size(self) -> int:
        return sum(self.mask)


@dataclass(frozen=True)
class Options:
    """The settings of a run, by their config names."""

    loss_type: str = "grpo"
    level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float = 0.28
    delta: float | None = None
    cispo_cap: float = 1.1
    beta: float = 0.0
    kl_estimator: str = "k3"
    bias_correction: bool = False
    off_policy_threshold: float | None = None
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    mismatch_mode: str | None = None
    clip_min: float | None = None
    clip_max: float | None = None
    max_completion_length: int = 7
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    k_pos: float = 2.0
    lambda_pos: float = 3.0
    k_neg: float = 3.0
    lambda_neg: float = 2.0
    dro_beta: float = 0.5
    cov_share: float = 0.2
    kl_cov_coef: float = 0.7
    clip_cov_low: float = 0.02
    clip_cov_high: float = 0.8


Ranks = Sequence[Sequence[Sequence[Row]]]
"""ranks[r][m][i]: completion i of micro-batch m on rank r, all of one optimizer step."""


def step_loss(ranks: Ranks, options: Options, generation_tokens: int, steps_per_generation: int) -> Tensor:
    """The loss of one optimizer step, averaged over ranks as data-parallel training averages gradients.

    Args:
        ranks: the step's completions; every rank has as many micro-batches as another.
        generation_tokens: trained tokens of the whole rollout batch, all ranks.
        steps_per_generation: micro-batches that each rank cuts a rollout batch into.
    """
    world, accumulation = len(ranks), len(ranks[0])
    threshold = entropy_threshold(ranks, options.top_entropy_quantile)
    if options.loss_type in ("kl_cov", "clip_cov"):
        choose([row for micro_batches in ranks for rows in micro_batches for row in rows], options)
    normaliser = max(generation_tokens, 1) / world * accumulation / steps_per_generation
    total = torch.zeros((), dtype=torch.float64)
    for micro_batches in ranks:
        for rows in micro_batches:
            total = total + micro_batch_loss(rows, options, threshold, accumulation, normaliser) / world
            total = total - options.entropy_coef * entropy_bonus(rows) / accumulation / world
    return total


def micro_batch_loss(
    rows: Sequence[Row], o: Options, threshold: float | None, accumulation: int, normaliser: float
) -> Tensor:
    sums = [sum_over_tokens(row, o, threshold) for row in rows]
    total = sum(sums, torch.zeros((), dtype=torch.float64))
    if o.loss_type in ("grpo", "sapo", "gmpo", "rloo"):
        means = [s / max(row.size, 1) for s, row in zip(sums, rows, strict=True)]
        return sum(means, torch.zeros((), dtype=torch.float64)) / len(rows) / accumulation
    if o.loss_type == "bnpo":
        return total / max(sum(row.size for row in rows), 1) / accumulation
    if o.loss_type == "dr_grpo":
        return total / (len(rows) * o.max_completion_length) / accumulation
    if o.loss_type == "luspo":
        return total / len(rows) / accumulation
    assert o.loss_type in ("dapo", "cispo", "vespo", "dppo_tv", "dppo_kl", "gpg", "dro", "kl_cov", "clip_cov")
    return total / normaliser


def key(number: int) -> float:
    """The number that stands for chance, of a trained token of the step."""
    return number * 0.618 % 1


def choose(rows: Sequence[Row], o: Options) -> None:
    """Set `chosen`: the tokens of largest covariance, or those of smallest key within the band."""
    places = [(row, t) for row in rows for t in range(len(row.mask)) if row.mask[t]]
    lps = [float(row.lp[t].detach()) for row, t in places]
    advantages = [row.advantages[t] for row, t in places]
    means = sum(lps) / len(lps), sum(advantages) / len(advantages)
    covariances = [(lp - means[0]) * (a - means[1]) for lp, a in zip(lps, advantages, strict=True)]
    ranked = range(len(places))
    if o.loss_type == "kl_cov":
        ranked = sorted(ranked, key=lambda n: -covariances[n])
    else:
        ranked = sorted((n for n in ranked if o.clip_cov_low <= covariances[n] <= o.clip_cov_high), key=key)
    best = {(id(places[n][0]), places[n][1]) for n in ranked[: max(1, int(o.cov_share * len(places)))]}
    for row in rows:
        row.chosen = tuple((id(row), t) in best for t in range(len(row.mask)))


def entropy_bonus(rows: Sequence[Row]) -> Tensor:
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        for t, trained in enumerate(row.mask):
            if trained:
                total, count = total + row.entropy[t], count + 1
    return total / max(count, 1)


def entropy_threshold(ranks: Ranks, quantile: float) -> float | None:
    """The entropy below which tokens are left out: the (1 - quantile)-quantile, interpolated linearly."""
    if quantile >= 1.0:
        return None
    rows = [row for micro_batches in ranks for rows in micro_batches for row in rows]
    values = sorted(float(row.entropy[t].detach()) for row in rows for t in range(len(row.mask)) if row.mask[t])
    position = (1 - quantile) * (len(values) - 1)
    below = math.floor(position)
    above = min(below + 1, len(values) - 1)
    return values[below] + (position - below) * (values[above] - values[below])


def sum_over_tokens(row: Row, o: Options, threshold: float | None) -> Tensor:
    """Σ_t m_t (keep_t ρ_t l_t + β kl_t) of one sequence."""
    old = [float(x) for x in row.lp.detach()] if row.old is None else row.old
    rho = mismatch(row, old, o)
    losses = token_losses(row, old, rho, o)
    total = torch.zeros((), dtype=torch.float64)
    for t, trained in enumerate(row.mask):
        if not trained:
            continue
        loss = losses[t]
        if o.off_policy_threshold is not None and not fresh(row, old, t, o.off_policy_threshold):
            loss = loss * 0.0
        if threshold is not None and float(row.entropy[t].detach()) < threshold:
            loss = loss * 0.0
        if rho is not None and o.loss_type != "vespo":
            loss = loss * rho[t]
        if o.beta:
            loss = loss + o.beta * kl_term(row, old, t, o)
        total = total + loss
    return total


def kl_term(row: Row, old: list[float], t: int, o: Options) -> Tensor:
    gap = row.lp[t] - row.ref[t]
    if o.kl_estimator == "k1":
        kl = gap
    elif o.kl_estimator == "k2":
        kl = 0.5 * gap * gap
    else:
        kl = torch.exp(-gap) + gap - 1.0
    return kl * torch.exp(row.lp[t] - old[t]) if o.bias_correction else kl


def fresh(row: Row, old: list[float], t: int, threshold: float) -> bool:
    if row.advantages[t] >= 0:
        return True
    sampled = old if row.engine is None else row.engine
    drifts = [sampled[u] - float(row.lp[u].detach()) for u in range(len(row.mask)) if row.mask[u]]
    drifts = [0.0 if math.isnan(d) else d for d in drifts]
    return sum(drifts) / max(len(drifts), 1) <= threshold


def mismatch(row: Row, old: list[float], o: Options) -> list[float] | None:
    """ρ of every token, or None where the correction is off."""
    if o.mismatch_mode is None:
        return None
    assert row.engine is not None
    level, action = o.mismatch_mode.split("_")
    gaps = [old[t] - row.engine[t] if row.mask[t] else 0.0 for t in range(len(row.mask))]
    gaps = [0.0 if math.isnan(g) else g for g in gaps]
    if level == "sequence":
        gaps = [sum(gaps)] * len(gaps)
    weights = []
    for gap in gaps:
        rho = math.exp(gap)
        too_low = o.clip_min is not None and rho < o.clip_min
        too_high = o.clip_max is not None and rho > o.clip_max
        if action == "mask":
            rho = 0.0 if too_low or too_high else rho
        elif too_low:
            rho = o.clip_min
        elif too_high:
            rho = o.clip_max
        weights.append(rho)
    return weights


def log_ratios(row: Row, old: list[float], level: str) -> list[Tensor]:
    """log r_t of every token at a level."""
    steps = [row.lp[t] - old[t] for t in range(len(row.mask))]
    if level == "token":
        return steps
    trained = [s for s, m in zip(steps, row.mask, strict=True) if m]
    mean = sum(trained, torch.zeros((), dtype=torch.float64)) / max(len(trained), 1)
    if level == "sequence":
        return [mean] * len(steps)
    assert level == "sequence_token"
    return [mean.detach() + row.lp[t] - row.lp[t].detach() for t in range(len(steps))]


def clipped(ratio: Tensor, advantage: float, o: Options, delta: float | None) -> Tensor:
    """-min(min(r, δ) A, clip(r, 1-ε, 1+ε_high) A)."""
    low, high = 1 - o.epsilon, 1 + o.epsilon_high
    inside = low <= float(ratio.detach()) <= high
    constant = torch.tensor(min(max(float(ratio.detach()), low), high), dtype=torch.float64)
    clip_branch = (ratio if inside else constant) * advantage
    plain = ratio
    if delta is not None and float(ratio.detach()) > delta:
        plain = torch.tensor(delta, dtype=torch.float64)
    plain_branch = plain * advantage
    return -(plain_branch if float(plain_branch.detach()) <= float(clip_branch.detach()) else clip_branch)


def token_losses(row: Row, old: list[float], rho: list[float] | None, o: Options) -> list[Tensor]:
    """l_t of every token, before filters, ρ and KL."""
    count = range(len(row.mask))
    if o.loss_type == "rloo":
        return rloo(row, old, o)
    if o.loss_type == "gmpo":
        return gmpo(row, old, o)
    if o.loss_type == "vespo":
        return [-phi(row, old, rho, row.advantages[t], o) * row.advantages[t] * row.lp[t] for t in count]
    if o.loss_type == "gpg":
        return [-row.advantages[t] * row.lp[t] for t in count]
    if o.loss_type == "dro":
        return [o.dro_beta / 2 * (row.lp[t] - old[t]) ** 2 - row.advantages[t] * row.lp[t] for t in count]
    if o.loss_type in ("dppo_tv", "dppo_kl"):
        return [dppo(row.lp[t], old[t], row.advantages[t], o) for t in count]
    if o.loss_type == "kl_cov":  # the estimate r - log r - 1 of KL(π_old || π)
        gaps = [row.lp[t] - old[t] for t in count]
        return [
            (o.kl_cov_coef * (torch.exp(g) - g - 1) if picked else 0.0) - torch.exp(g) * a
            for g, a, picked in zip(gaps, row.advantages, row.chosen, strict=True)
        ]
    ratios = [torch.exp(x) for x in log_ratios(row, old, o.level)]
    if o.loss_type == "clip_cov":
        return [0.0 * row.lp[t] if row.chosen[t] else clipped(ratios[t], row.advantages[t], o, None) for t in count]
    if o.loss_type == "cispo":
        return [-min(float(ratios[t].detach()), o.cispo_cap) * row.advantages[t] * row.lp[t] for t in count]
    if o.loss_type == "sapo":
        return [sapo(ratios[t], row.advantages[t], o) for t in count]
    return [clipped(ratios[t], row.advantages[t], o, o.delta) for t in count]


def dppo(lp: Tensor, old: float, advantage: float, o: Options) -> Tensor:
    """-r A, and nothing for a token that went more than a tenth of ε too far in the direction of A."""
    new, before = math.exp(float(lp.detach())), math.exp(old)
    divergence = abs(new - before)
    if o.loss_type == "dppo_kl":
        rest, new_rest = max(1 - before, 1e-7), max(1 - new, 1e-7)  # the cases hold log-probs above 0
        divergence = before * math.log(before / new) + (1 - before) * math.log(rest / new_rest)
    limit = o.epsilon_high if advantage > 0 else o.epsilon
    if advantage * (new - before) > 0 and divergence > limit / 10:
        return 0.0 * lp
    return -torch.exp(lp - old) * advantage


def sapo(ratio: Tensor, advantage: float, o: Options) -> Tensor:
    tau = o.tau_pos if advantage > 0 else o.tau_neg
    return -(4.0 / tau) / (1.0 + torch.exp(-tau * (ratio - 1.0))) * advantage


def rloo(row: Row, old: list[float], o: Options) -> list[Tensor]:
    """One action: the ratio is the product of the tokens' ratios; a token's loss moves |o| times its own log-prob."""
    log_ratio = sum(float(row.lp[t].detach()) - old[t] for t, trained in enumerate(row.mask) if trained)
    own = [row.size * (x - x.detach()) for x in row.lp]
    return [clipped(torch.exp(log_ratio + own[t]), row.advantages[t], o, None) for t in range(len(row.mask))]


def gmpo(row: Row, old: list[float], o: Options) -> list[Tensor]:
    """-A (Π_t bounded r_t)^(1/|o|): each r_t bounded on the side on which it could be exploited."""
    losses = []
    for advantage in row.advantages:
        product = torch.ones((), dtype=torch.float64)
        for t, trained in enumerate(row.mask):
            if not trained:
                continue
            ratio = torch.exp(row.lp[t] - old[t])
            too_good = advantage > 0 and float(ratio.detach()) > math.exp(o.epsilon_high)
            too_bad = advantage <= 0 and float(ratio.detach()) < math.exp(-o.epsilon)
            if too_good or too_bad:
                ratio = torch.tensor(math.exp(o.epsilon_high if too_good else -o.epsilon), dtype=torch.float64)
            product = product * ratio
        losses.append(-advantage * product ** (1.0 / max(row.size, 1)))
    return losses


def phi(row: Row, old: list[float], rho: list[float] | None, advantage: float, o: Options) -> float:
    """w^k exp(λ - λ w), w the sequence's importance weight."""
    floor, ceiling = math.log(1e-8), 20.0
    log_w = 0.0
    for t, trained in enumerate(row.mask):
        if trained:
            log_w += min(max(float(row.lp[t].detach()) - old[t], -20.0), 20.0)
            if rho is not None:
                log_w += floor if rho[t] <= 1e-8 else min(math.log(rho[t]), 20.0)
    log_w = min(max(log_w, floor), ceiling)
    k, lam = (o.k_pos, o.lambda_pos) if advantage >= 0 else (o.k_neg, o.lambda_neg)
    exponent = lam + k * log_w - lam * math.exp(log_w)
    return math.exp(exponent) if exponent < 700 else 0.0
