"""Formulas of teachers: the gap of a sampled token added to its advantage, or a divergence as a term of the loss.

A teacher T gives log T(o_t) of tokens that the student P has sampled. All functions are pure, on flat vectors `[N]`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.core.batch import TrainBatch
from covey.core.stats import Mean, Stat
from covey.core.terms import Coefficient, TermInputs


@dataclass(frozen=True, slots=True)
class GapInputs:
    """Inputs of a teacher's advantage, all `[N]` but `lengths [B]`; constants, without a gradient."""

    gap: Tensor  # log T(o_t) - log P(o_t) under the policy as it is now, bounded by `teacher_clip`; 0 without a teacher
    advantages: Tensor  # credit by the rewards
    tokens: Tensor  # mask of the trained tokens that have a teacher
    sampled: Tensor  # mask of trained tokens
    lengths: Tensor  # tokens of each rollout
    coef: float  # weight of the teacher in this step


GapAdvantage = Callable[[GapInputs], Tensor]
"""Gap and credit -> advantages [N] of the tokens that have a teacher; the others keep theirs."""


def added_gap(x: GapInputs) -> Tensor:
    """A_t + c (log T(o_t) - sg log P(o_t)): on-policy distillation, alone or next to rewards.

    Without rewards its expected gradient is that of Σ_t KL(P || T) at the visited prefixes (Qwen3, arXiv 2505.09388;
    MiniLLM, arXiv 2306.08543, is its sequence form). P is the policy as it is now: with the log-probs of the policy
    that sampled, the second update of a batch would also be rewarded for leaving that policy.
    """
    return x.advantages + x.coef * x.gap


def bounded(gap: Tensor, clip: float | None) -> Tensor:
    return gap if clip is None else gap.clamp(-clip, clip)


@dataclass(frozen=True)
class TeacherAdvantage:
    """Advantages of a micro-batch with a teacher's part (`Objective.teacher`)."""

    advantage: GapAdvantage
    coef: Coefficient
    clip: float | None = None  # bound of the gap, in nats

    def __call__(self, batch: TrainBatch, logprobs: Tensor, step: int) -> Tensor:
        """Advantages [N] of a silenced batch, from the policy's log-probs [N]."""
        assert batch.advantages is not None, "credit comes before the loss"
        if batch.teacher_logprobs is None:
            return batch.advantages
        tokens = batch.sampled & ~batch.teacher_logprobs.isnan()
        gap = torch.where(tokens, batch.teacher_logprobs - logprobs.detach(), 0.0)
        x = GapInputs(bounded(gap, self.clip), batch.advantages, tokens, batch.sampled, batch.lengths, self.coef(step))
        return torch.where(tokens, self.advantage(x), batch.advantages).to(batch.advantages)


def tokens_with_a_teacher(batch: TrainBatch) -> Tensor:
    """[N] shares of tokens in a teacher's term: 1 for trained tokens that have one."""
    if batch.teacher_logprobs is None:
        return torch.zeros_like(batch.token_ids, dtype=torch.float32)
    return (batch.sampled & ~batch.teacher_logprobs.isnan()).float()


def teacher_gap(x: TermInputs) -> Tensor:
    """log P(o_t) - log T(o_t), whose mean over sampled tokens estimates KL(P || T); 0 without a teacher."""
    if x.batch.teacher_logprobs is None:  # a batch without any
        return torch.zeros_like(x.logprobs)
    return torch.where(x.tokens, x.logprobs - x.batch.teacher_logprobs.to(x.logprobs), 0.0)


def sampled_divergence(x: TermInputs, *, clip: float | None = None) -> Tensor:
    """r ρ sg(log P(o_t) - log T(o_t)): the token's importance ratio r and engine/trainer mismatch weight ρ, if any.

    The expected gradient is that of KL(P || T) at the prefixes that the sampling policy visited. It comes from r alone.
    Backward through a KL estimator would have another expectation: 0 for k1, the right one for k2, and the gradient of
    the forward KL(T || P) for k3.
    """
    value = x.ratio * bounded(teacher_gap(x).detach(), clip)
    return value if x.mismatch_weights is None else value * x.mismatch_weights


WHOLE_VOCABULARY = -1
"""Value of `teacher_top_k` for the whole vocabulary: every token is compared, and there is no bin for the others."""
LEAST_TAIL = 1e-6
"""Smallest mass of the tokens that are not named; below this, 1 - Σ in float32 is rounding error."""
LEAST_LOGPROB = -50.0
"""Log-prob, in nats, of a token that policy or teacher cannot sample, and of an unused column."""


def binned_divergence(logprobs: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Divergence [N] between policy P and teacher T over K named tokens and one bin for all others, from [N, K] each.

    β = 1: KL(P || T), β = 0: KL(T || P), between: β KL(T || M) + (1 - β) KL(P || M) with M = (1 - β) P + β T (GKD,
    arXiv 2306.13649, eq. 1). It is at most the divergence over the whole vocabulary, and equal to it where the bins are
    single tokens. The value is not continuous in β at 0 and 1: as β approaches them, it goes to 0 in proportion to β
    or to 1 - β.
    """
    log_p, log_t = (
        torch.where(one.isfinite(), one, LEAST_LOGPROB).clamp(min=LEAST_LOGPROB) for one in (logprobs, teacher)
    )
    log_p, log_t = (
        torch.cat([one, (1 - one.exp().sum(1, keepdim=True)).clamp(min=LEAST_TAIL).log()], 1) for one in (log_p, log_t)
    )
    return divergence_parts(log_p, log_t, beta).sum(1)


FAR = 60.0
"""Largest difference of two log-probs in a mixture, in nats: the smaller probability is then 1e-26 of the larger."""


def log_mixture(log_p: Tensor, log_t: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log(M / P) and log(M / T) of M = (1 - β) P + β T, accurate in the last digits however near β is to 0 or 1.

    Computing log M first and subtracting log P or log T would cancel most digits of the smaller of the two.
    """
    gap = (log_t - log_p).clamp(-FAR, FAR)
    if beta <= 0.5:
        of_p = (beta * gap.expm1()).log1p()
        return of_p, of_p - gap
    of_t = ((1 - beta) * (-gap).expm1()).log1p()
    return of_t + gap, of_t


def divergence_parts(log_p: Tensor, log_t: Tensor, beta: float) -> Tensor:
    """Summands of the divergence between P and T, one per token or bin, from log-probs; β as in `binned_divergence`."""
    if beta == 1:
        return log_p.exp() * (log_p - log_t)
    if beta == 0:
        return log_t.exp() * (log_t - log_p)
    of_p, of_t = log_mixture(log_p, log_t, beta)
    return -beta * log_t.exp() * of_t - (1 - beta) * log_p.exp() * of_p


def whole_divergence(log_p: Tensor, log_t: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Divergence [n] over a whole vocabulary from log-probs [n, V], and the centre [n] of its gradient.

    With f_v the derivative in P_v, the gradient in the logits is P_v (f_v - Σ_u P_u f_u); that sum is the centre, up to
    a constant in f.
    """
    value = divergence_parts(log_p, log_t, beta).sum(1)
    if beta == 1:
        return value, value
    if beta == 0:
        return value, torch.zeros_like(value)
    return value, -(1 - beta) * (log_p.exp() * log_mixture(log_p, log_t, beta)[0]).sum(1)


def divergence_slopes(log_p: Tensor, log_t: Tensor, beta: float, centre: Tensor) -> Tensor:
    """Gradient of `whole_divergence` in the policy's logits, for some tokens [n, v] of the vocabulary."""
    if beta == 0:
        return log_p.exp() - log_t.exp()
    slopes = log_p - log_t if beta == 1 else (beta - 1) * log_mixture(log_p, log_t, beta)[0]
    return log_p.exp() * (slopes - centre[:, None])


def named_divergence(x: TermInputs, *, beta: float) -> Tensor:
    """`binned_divergence` at each position of the term, [N].

    It compares distributions, whichever token was sampled. Ratio and mismatch weight of the sampled token are left out:
    their expectation over that token is 1.
    """
    if x.named is None or x.batch.teacher_tops is None:  # a batch without any
        return torch.zeros_like(x.logprobs)
    rows = x.tokens[:, None]
    teacher = torch.where(rows, x.batch.teacher_tops.to(x.named), -torch.inf)
    return binned_divergence(torch.where(rows, x.named, -torch.inf), teacher, beta)


def vocabulary_divergence(x: TermInputs) -> Tensor:
    """`whole_divergence` at each position of the term, which the policy's head has computed."""
    if x.divergence is None:  # a batch without any
        return torch.zeros_like(x.logprobs)
    return torch.where(x.tokens, x.divergence, 0.0)


def named_stats(x: TermInputs) -> dict[str, Stat]:
    """`gap_stats`, and `teacher/top_mass` and `teacher/student_mass`: the mass of the named tokens under each."""
    stats = gap_stats(x)
    if x.named is None or x.batch.teacher_tops is None:
        return stats
    for name, of in (("top_mass", x.batch.teacher_tops), ("student_mass", x.named.detach())):
        mass = torch.where(x.tokens, of.exp().sum(1), 0.0)
        stats[f"teacher/{name}"] = Mean(mass.sum(), x.tokens.sum())
    return stats


def split_names(top_k: int, beta: float) -> tuple[int, int]:
    """Split of `top_k` named tokens: the number that the teacher names, and the number that the policy names.

    All are named by the distribution that weighs the divergence: the teacher for β = 0, the policy for β = 1. In
    between each names half. (0, 0) with `WHOLE_VOCABULARY`.
    """
    top_k = max(top_k, 0)
    if beta in (0.0, 1.0):
        return (top_k, 0) if beta == 0.0 else (0, top_k)
    return top_k - top_k // 2, top_k // 2


def measured_gap(x: TermInputs) -> Tensor:
    """The difference log P(o_t) - log T(o_t) without a gradient, where it acts through the advantages."""
    return teacher_gap(x).detach()


def gap_stats(x: TermInputs, *, clip: float | None = None) -> dict[str, Stat]:
    """`teacher/kl`, and with a bound `teacher/gap_clipped`, the share of tokens whose gap it cuts."""
    gap, count = teacher_gap(x).detach(), x.tokens.sum()
    stats: dict[str, Stat] = {"teacher/kl": Mean(gap.sum(), count)}
    if clip is not None:
        stats["teacher/gap_clipped"] = Mean((gap.abs() > clip).sum(), count)
    return stats
