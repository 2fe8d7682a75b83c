"""Advantages from rewards, over groups of completions of the same prompt, and their spread over tokens.

Rewards are `[P, G]` (one total per completion) or `[P, G, F]` (one per reward function), with NaN where a function
abstained. A completion without any reward is left out of every mean and deviation, and its advantage is 0. Everything
is computed in float64 and returned in float32; a group whose rewards are all equal, but for the rounding of a sum such
as 0.1 + 0.2, gets exact zeros.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from covey.core.batch import expand, segment_starts

EPSILON = 1e-4  # added to a standard deviation before dividing by it
ROUNDING = 4 * torch.finfo(torch.float64).eps  # relative difference up to which rewards count as equal


def weighted_total(rewards_PGF: Tensor, weights_F: Tensor) -> Tensor:
    """Σ_k w_k r_k over the functions that gave a reward, NaN where none did: [..., F] -> [...]."""
    total = (rewards_PGF * weights_F.to(rewards_PGF)).nansum(-1)
    return torch.where(rewards_PGF.isnan().all(-1), torch.nan, total)


def group_relative(rewards_PG: Tensor, scale: str = "group") -> Tensor:
    """A = (R - mean_group) / (std + ε): [P, G] (NaN = not scorable) -> [P, G] float32 without NaN.

    `scale`: "group" divides by the group's deviation (GRPO, arXiv 2402.03300 §4.1.2), "batch" by the whole batch's
    (Lite PPO, arXiv 2508.08221), "none" by nothing (Dr. GRPO, arXiv 2503.20783).

    Example:
        >>> group_relative(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), scale="none").tolist()
        [[0.5, -0.5], [0.0, 0.0]]
    """
    rewards = rewards_PG.double()
    advantages = centred(rewards)
    if scale == "group":
        advantages = advantages / (nanstd(rewards, dim=1) + EPSILON)
    elif scale == "batch":
        advantages = advantages / (nanstd(rewards.flatten(), dim=0) + EPSILON)
    return advantages.nan_to_num(0.0).float()


def normalize_then_sum(rewards_PGF: Tensor, weights_F: Tensor) -> Tensor:
    """Normalise each reward in its group, add them up, normalise over the batch: GDPO (arXiv 2601.05242).

    z_k = (r_k - mean_group) / (std_group + ε);  S = Σ_k w_k z_k;  A = S / (std_batch + ε).
    The paper also subtracts the batch's mean of S. It is 0 already, z_k being centred in every group; computing it
    would only add rounding to groups without a signal. [P, G, F], [F] -> [P, G] float32 without NaN.
    """
    rewards = rewards_PGF.double()
    normalised = centred(rewards) / (nanstd(rewards, dim=1) + EPSILON)
    total_PG = weighted_total(normalised, weights_F.double())
    advantages = total_PG / (nanstd(total_PG.flatten(), dim=0) + EPSILON)
    return advantages.nan_to_num(0.0).float()


def leave_one_out(rewards_PG: Tensor, normalize: bool = False) -> Tensor:
    """A_i = R_i - mean of the other rewards in the group: RLOO (Kool et al. 2019; arXiv 2402.14740).

    [P, G] (NaN = not scorable) -> [P, G]; a completion whose group has no other scorable one gets 0. `normalize`
    divides afterwards by the deviation of the whole batch's advantages, plus ε. Their mean is 0 already.

    Example:
        >>> leave_one_out(torch.tensor([[3.0, 1.0, 2.0]])).tolist()
        [[1.5, -1.5, 0.0]]
    """
    rewards = rewards_PG.double()
    scorable = (~rewards.isnan()).sum(1, keepdim=True)
    # R_i - (S - R_i)/(n-1) = (R_i - S/n) · n/(n-1)
    advantages = centred(rewards) * scorable / (scorable - 1).clamp(min=1)
    if normalize:
        advantages = advantages / (nanstd(advantages.flatten(), dim=0) + EPSILON)
    return advantages.nan_to_num(0.0).float()


def nanstd(values: Tensor, dim: int) -> Tensor:
    """Unbiased standard deviation over `dim` (kept) without the NaN; 0 for fewer than two values or equal ones."""
    count = (~values.isnan()).sum(dim, keepdim=True)
    variance = centred(values, dim).square().nansum(dim, keepdim=True) / (count - 1).clamp(min=1)
    return variance.sqrt()


def centred(values: Tensor, dim: int = 1) -> Tensor:
    """Subtract the mean over `dim`; exactly 0 where all values are equal up to rounding.

    The smallest value is subtracted first, which is exact where they are close, so that the rounding of the mean of
    large values does not drown small differences.
    """
    high = values.nan_to_num(-torch.inf).amax(dim, keepdim=True)
    low = torch.where(values.isnan(), torch.inf, values).amin(dim, keepdim=True)
    above = values - low
    return torch.where(alike(low, high) & ~values.isnan(), 0.0, above - above.nanmean(dim, keepdim=True))


def alike(low: Tensor, high: Tensor) -> Tensor:
    """True where the smallest and the largest value differ by rounding at most."""
    return high - low <= ROUNDING * torch.maximum(low.abs(), high.abs())


class Credited(NamedTuple):
    """Advantages at the tokens where a step or the completion ends; ordered by completion and end."""

    rows: Tensor  # [K] int64, completion of each end
    ends: Tensor  # [K] int64, index of the last token, counted from the completion's first
    to_go: Tensor  # [K] float64, advantage of this token and of the tokens between the previous end and it


def spread(credited: Credited, lengths_B: Tensor) -> Tensor:
    """[N] float32: the advantage of the first end at or after each token in its completion, 0 after the last."""
    tokens = torch.arange(int(lengths_B.sum()), device=lengths_B.device)
    if not len(credited.rows):
        return torch.zeros(len(tokens), device=lengths_B.device)
    starts = segment_starts(lengths_B)
    ends = starts[credited.rows] + credited.ends
    following = torch.searchsorted(ends, tokens).clamp(max=len(ends) - 1)  # first end at or after each token
    last = expand(starts + lengths_B - 1, lengths_B)  # last token of each token's completion
    inside = (ends[following] >= tokens) & (ends[following] <= last)
    return torch.where(inside, credited.to_go[following], 0.0).float()
