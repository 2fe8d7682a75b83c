"""Process credit: from rewards of steps or turns to an advantage for every token.

A completion is rewarded several times, each time for the part that ends at a token. Credit is computed in three pure
steps: `gather_steps` makes flat `Steps`; `steps_relative` (GRPO), `steps_leave_one_out` (RLOO) or
`steps_normalized_then_summed` (GDPO) compute their advantages; `token_advantages` spreads these over tokens. For
another credit assignment, write a function with the signature of `Algorithm.step_advantages` and set that attribute.

Letters: B completions, P prompts, N completion tokens, S steps of all completions, F' reward functions that reward
steps, K tokens at which a step or completion ends; groups_B is the prompt of each completion, lengths_B its number of
tokens, weights_F the weights of the functions. A reward of NaN is an abstention: it is left out of every mean and
deviation and adds nothing, but its step still separates the tokens before its end from those after it. Computed in
float64; advantages of tokens are float32. Steps whose rewards are all equal get exact zeros.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from covey.core.advantages import EPSILON, Credited, alike, nanstd, spread
from covey.core.batch import segment_ids, segment_starts

COMPARED_WITH = ("group", "turn")
"""Steps are compared with all steps of their group, or with those of the same number (all first turns, ...)."""


class Steps(NamedTuple):
    """Rewarded parts of B completions, ordered by completion and then by end.

    Example:
        Two completions, the first with rewards 1 at token 3 and 0 at token 7, the second with 0.5 at token 2:
        `Steps(rows=[0, 0, 1], ends=[3, 7, 2], numbers=[0, 1, 0], rewards=[1, 0, 0.5])`
    """

    rows: Tensor  # [S] int64, completion of each step
    ends: Tensor  # [S] int64, last token of each, counted from the completion's first
    numbers: Tensor  # [S] int64, number of the step in its completion, from 0; steps with the same end share a number
    rewards: Tensor  # [S] float64, NaN = abstained


@dataclass(frozen=True)
class CreditMix:
    """Weights with which the credit of steps and of the outcome make up a token's advantage."""

    process_weight: float = 1.0  # ω of the steps
    outcome_weight: float = 1.0  # ω of the outcome
    discount: float = 1.0  # γ in [0, 1]: the k-th end after a token's own counts γ^k


def gather_steps(steps: Sequence[Sequence[tuple[int, float | None]]], lengths: Sequence[int]) -> Steps:
    """Flatten one list of `(last token, reward)` per completion, in any order; None or NaN abstains.

    ValueError for an end outside of its completion, or an infinite reward.
    """
    found: list[tuple[int, int, int, float]] = []
    for row, (pairs, length) in enumerate(zip(steps, lengths, strict=True)):
        number, last = -1, -1
        for end, reward in sorted(pairs, key=itemgetter(0)):
            if not 0 <= end < length:
                raise ValueError(
                    f"a step of completion {row} ends at token {end}, but the completion has {length} tokens: an end"
                    f" counts from 0 at the completion's first token and is smaller than {length}."
                )
            at = int(end)
            number, last = number + (at != last), at
            value = math.nan if reward is None else float(reward)
            if math.isinf(value):
                raise ValueError(
                    f"a step of completion {row} has the reward {value}: give a finite number, or None to abstain."
                )
            found.append((row, at, number, value))
    columns = zip(zip(*found, strict=True) if found else [()] * 4, [torch.int64] * 3 + [torch.float64], strict=True)
    return Steps(*(torch.tensor(column, dtype=dtype) for column, dtype in columns))


def steps_relative(steps: Steps, groups_B: Tensor, scale: str = "group", compared_with: str = "group") -> Tensor:
    """r̃ = (r - mean) / (std + ε) over the compared steps: [S] float64 without NaN.

    With `compared_with="group"` this is process supervision (DeepSeekMath, arXiv 2402.03300 §4.1.3): R holds the
    rewards of all steps of all completions of a group, and r̃_i^index(j) = (r_i^index(j) - mean(R)) / std(R). With
    "turn", turn k is compared with turn k of the other completions (MT-GRPO, arXiv 2505.11821). `scale="group"` divides
    by the deviation of the compared steps, "batch" by that of all steps, "none" by nothing.
    """
    cells, count = _cells(steps, groups_B, compared_with)
    centred = _centre(steps.rewards, cells, count)
    if scale == "group":
        known = ~steps.rewards.isnan()
        variance = _sums(centred.square(), cells, count) / (_sums(known, cells, count) - 1).clamp(min=1)
        centred = centred / (variance.sqrt()[cells] + EPSILON)
    elif scale == "batch" and len(steps.rewards):
        centred = centred / (nanstd(steps.rewards, dim=0) + EPSILON)
    return centred.nan_to_num(0.0)


def steps_leave_one_out(
    steps: Steps, groups_B: Tensor, normalize: bool = False, compared_with: str = "group"
) -> Tensor:
    """r̃ = r - mean over the compared steps of the other completions: [S] float64 without NaN.

    RLOO's baseline (arXiv 2402.14740) for steps: all steps of the completion itself are left out of the mean, so the
    baseline adds no bias. A step that is compared with steps of no other completion gets 0. `normalize` afterwards
    divides by the standard deviation of all S advantages, plus ε.
    """
    cells, count = _cells(steps, groups_B, compared_with)
    own, own_count = _numbered(torch.stack([cells, steps.rows]))
    known = ~steps.rewards.isnan()
    # Rewards are centred first: equal ones are then exact zeros, and so are their sums and means.
    centred = _centre(steps.rewards, cells, count)
    others_sum = _sums(centred, cells, count)[cells] - _sums(centred, own, own_count)[own]
    others = _sums(known, cells, count)[cells] - _sums(known, own, own_count)[own]
    advantages = torch.where(others > 0, centred - others_sum / others.clamp(min=1), 0.0)
    advantages = torch.where(known, advantages, torch.nan)
    if normalize and len(advantages):
        advantages = advantages / (nanstd(advantages, dim=0) + EPSILON)
    return advantages.nan_to_num(0.0)


StepBaseline = Callable[[Steps, Tensor], Tensor]
"""(steps of one reward function, the prompt of each completion [B]) -> the steps' advantages [S]."""


def join_steps(parts: Sequence[Steps]) -> Steps:
    """The steps of several reward functions, one function's after the other's."""
    if not parts:
        return gather_steps([], [])
    return Steps(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def steps_weighted(parts: Sequence[Steps], weights_F: Tensor, groups_B: Tensor, *, baseline: StepBaseline) -> Tensor:
    """ω_f r̃_f: each function's steps compared by `baseline` among themselves, weighted; [S] as in `join_steps`."""
    weighted = [weight * baseline(part, groups_B) for part, weight in zip(parts, weights_F.tolist(), strict=True)]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *weighted])


def steps_normalized_then_summed(
    parts: Sequence[Steps], weights_F: Tensor, groups_B: Tensor, *, compared_with: str = "group"
) -> Tensor:
    """Each function's steps normalised in the group, then weighted, then all of them divided by one deviation; [S].

    GDPO (arXiv 2601.05242) is about outcomes; here is its formula for steps: z_f = r̃_f of `steps_relative`, Z = Σ_f ω_f
    z_f over the steps that end at the same token, and every ω_f z_f is divided by std(Z) + ε, the deviation over all
    tokens of the batch where steps end. If each completion is a single step, this is `normalize_then_sum`.
    """
    steps = join_steps(parts)
    normalised = partial(steps_relative, scale="group", compared_with=compared_with)
    advantages = steps_weighted(parts, weights_F, groups_B, baseline=normalised)
    ends, count = _numbered(torch.stack([steps.rows, steps.ends]))
    known = _sums(~steps.rewards.isnan(), ends, count) > 0
    sums = _sums(advantages, ends, count)[known]
    return advantages / (nanstd(sums, dim=0) + EPSILON) if len(sums) else advantages


def credit_to_go(
    steps: Steps, advantages_S: Tensor, lengths_B: Tensor, outcome_B: Tensor | None = None, mix: CreditMix | None = None
) -> Credited:
    """G_j = v_j + γ G_{j+1} over the ends of each completion; v_j sums the weighted advantages of steps ending at j.

    The outcome's advantages `outcome_B`, if given, count as one more step that ends with the completion.
    """
    mix = mix or CreditMix()
    assert 0 <= mix.discount <= 1, "checked with the config"
    starts = segment_starts(lengths_B)
    at = starts[steps.rows] + steps.ends
    value = advantages_S.double() * mix.process_weight
    if outcome_B is not None:
        nonempty = lengths_B > 0  # an empty completion has no token to credit
        at = torch.cat([at, (starts + lengths_B - 1)[nonempty]])
        value = torch.cat([value, outcome_B.double()[nonempty] * mix.outcome_weight])
    at, which = at.unique(return_inverse=True)  # sorted, so in the order of completions
    rows = torch.searchsorted(starts, at, right=True) - 1
    to_go = _rewards_to_go(_sums(value, which, len(at)), rows, mix.discount)
    return Credited(rows, at - starts[rows], to_go)


def optimal_token_baseline(advantages_B: Tensor, energies: Tensor, lengths_B: Tensor, groups_B: Tensor) -> Credited:
    """A_it = R_i - Σ_j W_jt R_j / Σ_j W_jt over the group's completions that reach t (OTB, arXiv 2602.07078).

    W_jt = Σ_{s<=t} ‖e_s - π_s‖², the squared norm of the log-prob's gradient in the logits, is the sum of `energies`
    [N] up to the t-th trained token (tokens that are not trained have energy 0). Advantages may stand for rewards,
    because a constant added to all R of a group cancels; NaN is left out. A completion that alone of its group reaches
    t has no other to compare with: its A_it is its own advantage.
    """
    rows = segment_ids(lengths_B)
    trained = energies > 0
    before = segment_starts(lengths_B)[rows]
    counts, sums = trained.long().cumsum(0), energies.double().cumsum(0)
    t = counts - (counts - trained.long())[before] - 1
    weights = torch.where(trained & ~advantages_B[rows].isnan(), sums - (sums - energies)[before], 0.0)
    cells, number = _numbered(torch.stack([groups_B[rows], t.clamp(min=0)]))
    own = advantages_B.double()[rows].nan_to_num(0.0)
    total = _sums(weights, cells, number)
    alone = _sums(weights > 0, cells, number) < 2
    baseline = torch.where(alone, 0.0, _sums(weights * own, cells, number) / torch.where(alone, 1.0, total))
    return Credited(rows, torch.arange(len(rows)) - before, torch.where(weights > 0, own - baseline[cells], 0.0))


def token_advantages(
    steps: Steps, advantages_S: Tensor, lengths_B: Tensor, outcome_B: Tensor | None = None, mix: CreditMix | None = None
) -> Tensor:
    """A_t = Σ_{j: end_j >= t} γ^(steps between t and j) ω_j r̃_j: the credit from a token on, [N] float32.

    With γ = 1 and no outcome it is DeepSeekMath's Â_{i,t} = Σ_{index(j) >= t} r̃_i^index(j) (arXiv 2402.03300 §4.1.3).
    An outcome (`outcome_B`, the advantage of each completion as a whole; `covey.core.advantages`) is one more step that
    ends with the completion. For two turns of which the first is rewarded, this is MT-GRPO (arXiv 2505.11821): the
    first turn gets r̃ + γ A, the second A, with γ in place of the paper's λ. The paper has two turns; the extension to
    more turns, to several rewards per turn and to a discount per turn is ours.

    Tokens after the last step get 0 unless there is an outcome. A step may end at a token that was not sampled (a tool
    result): the credit goes to all tokens before it, and tokens that were not sampled have weight 0.

    Example:
        Steps that end at tokens 1 and 3 of five, with advantages 1 and -2:
        >>> steps = gather_steps([[(1, 0.0), (3, 0.0)]], [5])
        >>> token_advantages(steps, torch.tensor([1.0, -2.0]), torch.tensor([5])).tolist()
        [-1.0, -1.0, -2.0, -2.0, 0.0]
    """
    return spread(credit_to_go(steps, advantages_S, lengths_B, outcome_B, mix), lengths_B)


def _rewards_to_go(values: Tensor, owners: Tensor, discount: float) -> Tensor:
    """G_j = v_j + γ G_{j+1} within each owner. A running sum, not a difference of sums: zeros stay exactly zero."""
    sums: list[float] = []
    following, owner_after = 0.0, None
    for value, owner in zip(reversed(values.tolist()), reversed(owners.tolist()), strict=True):
        following = value + (discount * following if owner == owner_after else 0.0)
        owner_after = owner
        sums.append(following)
    return torch.tensor(sums[::-1], dtype=torch.float64, device=values.device)


def _cells(steps: Steps, groups_B: Tensor, compared_with: str) -> tuple[Tensor, int]:
    """Number of each step's comparison set, [S] int64, and the count of sets."""
    assert compared_with in COMPARED_WITH, "checked with the config"
    groups_S = groups_B[steps.rows]
    return _numbered(torch.stack([groups_S, steps.numbers]) if compared_with == "turn" else groups_S[None])


def _numbered(keys_KS: Tensor) -> tuple[Tensor, int]:
    """Equal columns get equal numbers from 0: [K, S] -> [S], count."""
    if not keys_KS.shape[1]:
        return keys_KS[0], 0
    distinct, numbers = keys_KS.unique(dim=1, return_inverse=True)
    return numbers, distinct.shape[1]


def _sums(values: Tensor, cells: Tensor, count: int) -> Tensor:
    """Sum of each cell without the NaN: [S] -> [count] float64."""
    out = torch.zeros(count, dtype=torch.float64, device=values.device)
    return out.index_add(0, cells, values.double().nan_to_num(0.0))


def _centre(values: Tensor, cells: Tensor, count: int) -> Tensor:
    """Subtract each cell's mean as `advantages.centred` does; exactly 0 where its values are equal up to rounding."""
    known = ~values.isnan()
    infinite = torch.full((count,), torch.inf, dtype=torch.float64, device=values.device)
    low = infinite.scatter_reduce(0, cells, torch.where(known, values, torch.inf), "amin")
    high = (-infinite).scatter_reduce(0, cells, torch.where(known, values, -torch.inf), "amax")
    above = values - low[cells]
    mean = _sums(above, cells, count) / _sums(known, cells, count).clamp(min=1)
    return torch.where(alike(low, high)[cells] & known, 0.0, above - mean[cells])
