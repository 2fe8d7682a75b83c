"""Parts of claims that need no training: enumerated in float64, in seconds.

Each function returns an `Exact`: the figures, and the answer to its hypothesis.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from covey.algorithms.published import maxrl
from covey.algorithms.registered import AdvantageInputs
from covey.core.advantages import group_relative, leave_one_out, normalize_then_sum
from covey.core.losses import KL_ESTIMATORS

F64 = partial(torch.zeros, dtype=torch.float64)


@dataclass(frozen=True)
class Exact:
    """Outcome of an enumeration: its answer, its figures by name, and a sentence with them."""

    holds: bool
    figures: dict[str, float]
    sentence: str


# ---- 1: length of wrong answers --------------------------------------------------------------------------------------

LONGEST = 8
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "per sequence": lambda lengths: 1 / lengths,
    "constant": lambda lengths: torch.full_like(lengths, 1 / (LONGEST + 1)),
    "sum": torch.ones_like,
}


def lengths_along_the_update(weight: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Change of the mean length of wrong and of right answers, and of accuracy, for a unit of learning rate.

    The policy answers right (1) or wrong (0) with its first token, then stops or continues at each of up to `LONGEST`
    places, with a logit for each place and answer: length says nothing about the reward. The update is the expected
    gradient Σ_o p(o) A(o) w(|o|) ∇ Σ_t log p(o_t), with A standardized by the exact mean and deviation.
    """
    lengths = torch.arange(2, LONGEST + 2, dtype=torch.float64)  # tokens: the answer, the continuations, the stop

    def logprobs(logits: Tensor) -> Tensor:  # [2, LONGEST]
        first, stops = logits[:2].log_softmax(0), logits[2:].view(2, LONGEST - 1)
        stop, go = torch.nn.functional.logsigmoid(stops), torch.nn.functional.logsigmoid(-stops)
        reached = torch.cat([F64(2, 1), go.cumsum(1)], 1)
        return first[:, None] + reached + torch.cat([stop, F64(2, 1)], 1)

    start = torch.cat([torch.tensor([0.5, 0.0], dtype=torch.float64), torch.full((2 * (LONGEST - 1),), -1.5).double()])

    def slope(value: Callable[[Tensor], Tensor]) -> Tensor:
        logits = start.clone().requires_grad_()
        value(logprobs(logits)).backward()
        return logits.grad

    p = logprobs(start).exp()
    right = p[1].sum()
    advantage = torch.stack([-right, 1 - right])[:, None] / (right * (1 - right)).sqrt()
    step = slope(lambda logp: (p * advantage * weight(lengths) * logp).sum())

    def mean_length(answer: int) -> Callable[[Tensor], Tensor]:
        return lambda logp: (logp[answer].exp() * lengths).sum() / logp[answer].exp().sum()

    values = {"wrong": mean_length(0), "right": mean_length(1), "accuracy": lambda logp: logp[1].exp().sum()}
    return {name: float(slope(value) @ step) for name, value in values.items()}


def length_bias() -> Exact:
    """Claim 1, H1: the mean per sequence lengthens wrong answers, a constant and a sum do not."""
    found = {name: lengths_along_the_update(weight) for name, weight in WEIGHTS.items()}
    wrong = {name: one["wrong"] for name, one in found.items()}
    neutral = max(abs(wrong["constant"]), abs(wrong["sum"]))
    figures = {f"{name}: {what}": value for name, one in found.items() for what, value in one.items()}
    sentence = (
        f"change of the mean length of wrong answers for a unit of learning rate: {wrong['per sequence']:+.1e} tokens"
        f" by the mean per sequence ({found['per sequence']['right']:+.1e} for right ones), 0 to {neutral:.0e} by a"
        " constant or a sum"
    )
    return Exact(wrong["per sequence"] > 1e-3 and neutral < 1e-12, figures, sentence)


# ---- 2 and 3: clip-higher, dynamic sampling --------------------------------------------------------------------------


def clip_higher() -> Exact:
    """Claim 2: probability that an unlikely token may reach in one batch, whatever the number of its passes."""
    rises = {bound: 0.01 * (1 + bound) for bound in (0.2, 0.28)}
    batches = math.log(1.1) / math.log(1.28 / 1.2)
    figures = {f"after one batch, {bound}": p for bound, p in rises.items()} | {"batches to 10%": batches}
    return Exact(
        rises[0.28] > rises[0.2],
        figures,
        f"a token of probability .01 reaches {rises[0.2]:.4f} with a bound of .2 and {rises[0.28]:.4f} with .28;"
        f" the ratio of the two grows as (1.28/1.2)^n, to 1.1 after {batches:.1f} batches at the bound",
    )


def share_with_signal(pass_rate: float, group: int) -> float:
    """Share of groups whose completions are neither all right nor all wrong: 1 - p^G - (1 - p)^G."""
    return 1 - pass_rate**group - (1 - pass_rate) ** group


def groups_for_a_signal() -> Exact:
    """Claim 3: groups of 8 to sample for each that has a signal."""
    needed = {p: 1 / share_with_signal(p, 8) for p in (0.02, 0.1, 0.5, 0.9)}
    return Exact(
        all(cost > 1 for cost in needed.values()),
        {f"groups for one of signal, pass rate {p}": cost for p, cost in needed.items()},
        "groups of 8 to sample for one with a signal: "
        + ", ".join(f"{cost:.2f} at a pass rate of {p:g}" for p, cost in needed.items())
        + ". Tokens can be saved only if the signal is worth more",
    )


# ---- 4 and 5: baselines and scales -----------------------------------------------------------------------------------


def groups_of(size: int) -> Tensor:
    """Rewards 0 and 1 of a group with k right completions, for k = 0 ... size: [size + 1, size]."""
    return (torch.arange(size)[None] < torch.arange(size + 1)[:, None]).double()


def binomial(size: int, pass_rate: float) -> Tensor:
    """Probability of k right completions: [size + 1]."""
    chances = [math.comb(size, k) * pass_rate**k * (1 - pass_rate) ** (size - k) for k in range(size + 1)]
    return torch.tensor(chances, dtype=torch.float64)


def rloo_identity() -> Exact:
    """Claim 4, H1: RLOO's advantages are the unscaled ones of GRPO times G / (G - 1)."""
    torch.manual_seed(0)
    errors = {}
    for size in (2, 4, 8, 16):
        rewards = torch.rand(50, size, dtype=torch.float64)
        ours = group_relative(rewards, "none").double() * size / (size - 1)
        errors[f"G = {size}"] = float((leave_one_out(rewards).double() - ours).abs().max())
    exact = 0.0  # the same in float64, without Covey's rounding of advantages to float32
    for size in (2, 4, 8, 16):
        rewards = torch.rand(50, size, dtype=torch.float64)
        others = (rewards.sum(1, keepdim=True) - rewards) / (size - 1)
        centred = (rewards - rewards.mean(1, keepdim=True)) * size / (size - 1)
        exact = max(exact, float((rewards - others - centred).abs().max()))
    largest = max(errors.values())
    return Exact(
        exact < 1e-14 and largest < 1e-6,
        errors | {"float64": exact},
        f"largest difference {exact:.0e} in float64, {largest:.0e} between Covey's two functions, which return float32",
    )


def gradient_variance(pass_rate: float, group: int) -> float:
    """Variance of a one-parameter policy's gradient times the group size: the noise at equal numbers of rollouts.

    The policy is right with probability p = σ(θ); d log p / dθ is 1 - p of a right completion and -p of a wrong one.
    The baseline is RLOO's, so that the mean is the exact p (1 - p).
    """
    rewards = groups_of(group)
    slopes = rewards - pass_rate
    gradients = (leave_one_out(rewards).double() * slopes).mean(1)
    chances = binomial(group, pass_rate)
    mean = (chances * gradients).sum()
    return float(((chances * gradients**2).sum() - mean**2) * group)


def noise_of_small_groups() -> Exact:
    """Claim 4: how much noisier groups of 2 are than groups of 16, at equal rollouts of one prompt."""
    table = {p: [gradient_variance(p, size) for size in (2, 4, 8, 16)] for p in (0.1, 0.5)}
    figures = {f"pass rate {p}, G = {g}": v for p, r in table.items() for g, v in zip((2, 4, 8, 16), r, strict=True)}
    return Exact(
        all(row[0] > row[-1] for row in table.values()),
        figures,
        "variance of the gradient at equal rollouts of one prompt, G = 2, 4, 8, 16: "
        + "; ".join(f"{', '.join(f'{v:.3f}' for v in row)} at a pass rate of {p:g}" for p, row in table.items())
        + ". Two rollouts can suffice only through more prompts",
    )


def mean_size_of_advantage(pass_rate: float, group: int, scale: str) -> float:
    """E|A| of a completion of a prompt with this pass rate, over the binomial of its group."""
    return float(binomial(group, pass_rate) @ group_relative(groups_of(group), scale).double().abs().mean(1))


def weight_of_hard_prompts() -> Exact:
    """Claim 5: weight of a prompt of pass rate .05 relative to one of .5, by the group's deviation and unscaled."""
    figures = {}
    for size in (8, 16):
        for scale in ("group", "none"):
            hard, even = (mean_size_of_advantage(p, size, scale) for p in (0.05, 0.5))
            figures[f"G = {size}, {scale}"] = hard / even
    return Exact(
        all(figures[f"G = {size}, group"] > figures[f"G = {size}, none"] for size in (8, 16)),
        figures,
        "mean |A| at a pass rate of .05 relative to .5: "
        + ", ".join(
            f"{figures[f'G = {g}, group']:.2f} by group, {figures[f'G = {g}, none']:.2f} unscaled (G {g})"
            for g in (8, 16)
        )
        + ". The rest of the divisor's effect is a global step size",
    )  # fmt: skip


# ---- 8, 13, 16: a tabular policy, all sequences ----------------------------------------------------------------------

TOKENS, STEPS = 4, 3
STATES = [state for t in range(STEPS) for state in itertools.product(range(TOKENS), repeat=t)]
PATHS = list(itertools.product(range(TOKENS), repeat=STEPS))
VISITED = torch.tensor([[STATES.index(path[:t]) for t in range(STEPS)] for path in PATHS])  # [paths, STEPS]
TAKEN = torch.tensor(PATHS)


def token_logprobs(table: Tensor) -> Tensor:
    """Log-probabilities of the tokens of all sequences, [paths, STEPS], from those of each state [states, TOKENS]."""
    return table[VISITED, TAKEN]


def gradient(logits: Tensor, value: Callable[[Tensor], Tensor]) -> Tensor:
    """Gradient of a function of the table of log-probabilities with respect to the logits."""
    leaf = logits.clone().requires_grad_()
    value(leaf.log_softmax(-1)).backward()
    return leaf.grad


def corrections(drift: float) -> dict[str, float]:
    """Relative error of the expected gradient from samples of another policy, without and with each correction.

    The other policy's logits differ by `drift` times a standard normal. `KL` is KL(other || trained).
    """
    torch.manual_seed(0)
    normal = partial(torch.randn, dtype=torch.float64)
    logits, rewards, noise = normal(len(STATES), TOKENS), normal(len(PATHS)), normal(len(STATES), TOKENS)
    exact = gradient(logits, lambda table: (token_logprobs(table).sum(1).exp() * rewards).sum())
    old = token_logprobs((logits + drift * noise).log_softmax(-1))
    new = token_logprobs(logits.log_softmax(-1))
    chances = old.sum(1).exp()
    advantages = rewards - chances @ rewards
    ratios = (new - old).exp()
    product = ratios.prod(1, keepdim=True).expand_as(ratios)
    weights = {
        "none": torch.ones_like(ratios),
        "token": ratios,
        "token, at most 2": ratios.clamp(max=2),
        "sequence": product,
        "sequence, from 1/3 to 3": torch.where((product > 1 / 3) & (product < 3), product, 0.0),
    }

    def error(weight: Tensor) -> float:
        scale = chances[:, None] * weight * advantages[:, None]
        found = gradient(logits, lambda table: (scale * token_logprobs(table)).sum())
        return float((found - exact).norm() / exact.norm())

    return {"KL": float(chances @ (old - new).sum(1)), **{name: error(weight) for name, weight in weights.items()}}


def corrected_gradients(*drifts: float) -> Exact:
    """Claims 8 and 16: errors of the gradient from samples of another policy; ratios of tokens repair a part."""
    found = {drift: corrections(drift) for drift in drifts}
    return Exact(
        all(one["sequence"] < 1e-12 < one["token"] < one["none"] for one in found.values()),
        {f"drift {drift}: {name}": value for drift, one in found.items() for name, value in one.items()},
        "error of the gradient without correction, with token ratios, with their product: "
        + "; ".join(
            f"{one['none']:.0%}, {one['token']:.0%}, {one['sequence']:.0%} at a KL of {one['KL']:.3f}"
            for one in found.values()
        ),
    )


def kl_gradients() -> Exact:
    """Claim 13, H1: gradients of the estimators as terms of the loss, on-policy, against those of the divergences.

    k2's is that of KL(π || ref), summed over visited states; k1's is 0; k3's is that of KL(ref || π).
    k3 and k1 times the ratio with its gradient (`use_bias_correction_kl`) have the reverse one's.
    """
    torch.manual_seed(0)
    logits, reference = (torch.randn(len(STATES), TOKENS, dtype=torch.float64) for _ in range(2))
    reference = reference.log_softmax(-1)
    policy = logits.log_softmax(-1)
    chances = token_logprobs(policy).sum(1).exp()
    visits = F64(len(STATES)).index_add_(0, VISITED.flatten(), chances[:, None].expand(-1, STEPS).flatten())
    reverse = gradient(logits, lambda table: (visits * (table.exp() * (table - reference)).sum(-1)).sum())
    forward = gradient(logits, lambda table: (visits * (reference.exp() * (reference - table)).sum(-1)).sum())
    here, there = token_logprobs(policy), token_logprobs(reference)

    def of(name: str, corrected: bool) -> Tensor:
        def value(table: Tensor) -> Tensor:
            now = token_logprobs(table)
            ratio = (now - here).exp() if corrected else 1.0
            return (chances[:, None] * ratio * KL_ESTIMATORS[name](now, there)).sum()

        return gradient(logits, value)

    def error(found: Tensor, wanted: Tensor) -> float:
        return float((found - wanted).abs().max() / wanted.abs().max())

    k3 = of("k3", False)
    figures = {
        "k1": float(of("k1", False).abs().max()),
        "k2 - reverse": error(of("k2", False), reverse),
        "k3 - forward": error(k3, forward),
        "k3, corrected - reverse": error(of("k3", True), reverse),
        "k1, corrected - reverse": error(of("k1", True), reverse),
        "cosine of k3 with reverse": float(torch.cosine_similarity(k3.flatten(), reverse.flatten(), 0)),
    }
    errors = [value for name, value in figures.items() if not name.startswith("cosine")]
    return Exact(
        max(errors) < 1e-12 and figures["cosine of k3 with reverse"] < 0.999,
        figures,
        f"k2 has the gradient of KL(π || ref) to {figures['k2 - reverse']:.0e}, k1 has 0 to {figures['k1']:.0e},"
        f" k3 that of KL(ref || π) to {figures['k3 - forward']:.0e}, at a cosine of"
        f" {figures['cosine of k3 with reverse']:.2f}"
        f" with the former; Covey's default, k3 times the ratio, has that of KL(π || ref) to"
        f" {figures['k3, corrected - reverse']:.0e}",
    )


# ---- 22: roles ---

PAYOFFS = torch.tensor([[0.9, 0.2, 0.5], [0.4, 0.7, 0.1], [0.8, 0.3, 0.6]], dtype=torch.float64)


def role_baselines() -> Exact:
    """Claim 22: mean and variance of the gradient of both seats of a zero-sum game, without and with a role's baseline.

    Each seat has three moves by a softmax; the first one's payoff is `PAYOFFS`, the second one gets its negative. The
    mean over both seats is 0, so that a group of both has no baseline.
    """
    first = torch.tensor([0.2, -0.1, 0.4], dtype=torch.float64).softmax(0)
    second = torch.tensor([-0.3, 0.1, 0.0], dtype=torch.float64).softmax(0)
    worth = first @ PAYOFFS @ second
    chances = first[:, None] * second[None]  # [3, 3]
    eye = torch.eye(3, dtype=torch.float64)

    def moments(baseline: Tensor | float) -> tuple[Tensor, float]:
        own = (PAYOFFS - baseline)[:, :, None] * (eye - first)[:, None]  # of the first seat's logits, [3, 3, 3]
        theirs = (baseline - PAYOFFS)[:, :, None] * (eye - second)[None]
        slopes = torch.cat([own, theirs], 2)
        mean = (chances[:, :, None] * slopes).sum((0, 1))
        return mean, float((chances * (slopes**2).sum(2)).sum() - mean @ mean)

    without, with_role = moments(0.0), moments(worth)
    gap = float((without[0] - with_role[0]).abs().max())
    return Exact(
        gap < 1e-14 and with_role[1] < without[1],
        {"difference of the means": gap, "variance without": without[1], "variance by role": with_role[1]},
        f"a baseline by role changes the mean of the gradient by {gap:.0e} and its variance from {without[1]:.2f} to"
        f" {with_role[1]:.2f}",
    )


# ---- 17, 19, 21 ------------------------------------------------------------------------------------------------------


def smallest_bf16_change() -> Exact:
    """Claim 17: the largest weight that a step of 1e-6 can change in bf16, over weights of one binade to the next.

    bf16 has 8 bits of precision: neighbours of w lie 2^-7 of its power of two apart, and half of that rounds away.
    """
    weights = torch.logspace(-6, 0, 20_001, dtype=torch.float64).float().bfloat16().float()
    changed = (weights + 1e-6).bfloat16().float() != weights
    largest = float(weights[changed].max())
    predicted = 1e-6 * 2**9
    return Exact(
        predicted / 4 < largest <= predicted,
        {"largest weight that changes": largest, "1e-6 · 2^9": predicted},
        f"a step of 1e-6 changes no weight above {largest:.1e} in bf16; 1e-6 · 2^9 = {predicted:.1e}",
    )


def distinct_advantages() -> Exact:
    """Claim 19: GDPO tells rewards (1, 0) and (0, 1) apart in a group, a sum does not.

    Over all groups of 4 completions with two rewards of 0 or 1: groups in which two completions of equal sum have
    different advantages, and the mean number of distinct advantages in a group.
    """
    kinds = torch.tensor(list(itertools.product((0.0, 1.0), repeat=2)), dtype=torch.float64)
    groups = torch.stack([kinds[list(one)] for one in itertools.product(range(4), repeat=4)])  # [256, 4, 2]
    weights = torch.ones(2, dtype=torch.float64)
    by_sum = group_relative(groups.sum(-1))
    apart = torch.cat([normalize_then_sum(group[None], weights) for group in groups])

    def count(advantages: Tensor) -> float:
        return sum(len({round(value, 5) for value in row}) for row in advantages.tolist()) / len(groups)

    figures = {"sum": count(by_sum), "normalize_then_sum": count(apart)}
    return Exact(
        figures["normalize_then_sum"] > figures["sum"],
        figures,
        f"distinct advantages in a group of 4 with two rewards of 0 or 1, mean over all 256 groups:"
        f" {figures['sum']:.2f} by the sum, {figures['normalize_then_sum']:.2f} by GDPO",
    )


def weight_by_pass_rate(pass_rates: Sequence[float] = (0.05, 0.2, 0.5), group: int = 64) -> Exact:
    """Claim 21: MaxRL's expected gradient is p'(θ) / p, that of the log-likelihood of success, but for groups of zeros.

    By enumeration: E[Σ A s] / G with s the score 1 - p or -p is p (1 - p) · (1 - (1 - p)^G) / p.
    """
    figures = {}
    for p in pass_rates:
        rewards = groups_of(group)
        inputs = AdvantageInputs(rewards, rewards[..., None], torch.ones_like(rewards), 1)
        gradients = (maxrl(inputs).double() * (rewards - p)).mean(1)
        figures[f"{p:g}"] = float(binomial(group, p) @ gradients) / (p * (1 - p))
    errors = [abs(value * float(p) / (1 - (1 - float(p)) ** group) - 1) for p, value in figures.items()]
    return Exact(
        max(errors) < 0.02,
        figures,
        "weight of a prompt's gradient relative to plain REINFORCE, groups of 64: "
        + ", ".join(f"{value:.1f} at a pass rate of {p}" for p, value in figures.items())
        + ", which is 1/p but for groups without a success",
    )
