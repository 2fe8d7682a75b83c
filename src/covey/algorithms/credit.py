"""Credit assignment: from rewards of outcomes and steps to the advantage of every token.

A reward function that rewards the steps of any completion of a rollout batch, on any process, is a process function: a
number that it returns for another completion is one step that ends with that completion's last token. The formulas are
in `covey.core.credit` and `covey.core.advantages`.

Letters: N completions in whole groups, P subgroups (prompts, unless `compare` divides them) of G completions at most,
F reward functions, S steps.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from covey.algorithms.algorithm import Algorithm, Members
from covey.algorithms.comparison import gathered, less_average, numbers_of, scattered
from covey.core.advantages import Credited, nanstd, spread, weighted_total
from covey.core.batch import token_index
from covey.core.credit import credit_to_go, gather_steps, join_steps, optimal_token_baseline
from covey.core.findings import CheckError
from covey.core.records import NO_SEAT
from covey.core.records import Scores as Scores
from covey.core.stats import Mean, Stat
from covey.runtime.user_code import warn

BATCHES_WITHOUT_STEPS = 3  # rollout batches without rewards of steps, after which a warning names their settings


@dataclass(frozen=True)
class Credit:
    """Advantages of N completions, stored at the tokens where steps and completions end."""

    lengths: Tensor  # [N] int64 completion tokens
    ends: Credited  # advantages at the ends of steps and completions

    def of_tokens(self, rows: slice) -> Tensor:
        """Advantages of all tokens of the completions `rows`, concatenated, float32."""
        start, stop, _ = rows.indices(len(self.lengths))
        mine = (self.ends.rows >= start) & (self.ends.rows < stop)
        ends = Credited(self.ends.rows[mine] - start, self.ends.ends[mine], self.ends.to_go[mine])
        return spread(ends, self.lengths[rows])

    def of_completions(self) -> Tensor:
        """[N] float32, the advantage of each completion's first token, which includes all credit that follows."""
        first = self.ends.rows.diff(prepend=self.ends.rows.new_tensor([-1])) > 0
        advantages = torch.zeros(len(self.lengths), dtype=torch.float64)
        advantages[self.ends.rows[first]] = self.ends.to_go[first]
        return advantages.float()

    def has_signal(self) -> Tensor:
        """[N] bool, true where any token of a completion has an advantage other than 0."""
        signal = torch.zeros(len(self.lengths), dtype=torch.bool)
        signal[self.ends.rows[self.ends.to_go.float() != 0]] = True
        return signal


def assign_credit(
    algorithm: Algorithm,
    weights_F: Tensor,
    scores: Scores,
    group_size: int,
    kl: Tensor | None = None,
    energies: Tensor | None = None,
    baselines: Tensor | None = None,
) -> Credit:
    """Advantages of N completions by the algorithm's `comparison`: outcomes against outcomes, steps against steps.

    Args:
        algorithm: the method.
        weights_F: weights of the reward functions.
        scores: rewards of N completions; those of a group are consecutive.
        group_size: completions per prompt, G.
        kl: [N] KL divergence that is penalised in the reward, or None.
        energies: of all completion tokens, concatenated, for `optimal_token_baseline`; or None.
        baselines: [N] running means that completions are compared with (`RoleAverages`), or None.

    Raises:
        ValueError: rewards of steps, with a loss or a comparison that cannot use them.
        CheckError: advantages per token, with rewards of steps or with a loss that cannot use them.
        FloatingPointError: `kl` is NaN or infinite.
    """
    process = scores.process_functions
    if process and not algorithm.objective.credits_tokens:
        raise ValueError(
            "a reward function rewards steps, but this loss gives all tokens of a completion the same credit"
            " (loss_type='gmpo', or importance_sampling_level='sequence'), so the credit of steps would be lost. Set"
            " importance_sampling_level='sequence_token' or 'token', or choose another loss_type."
        )
    lengths = torch.tensor(scores.lengths, dtype=torch.long)
    members = algorithm.comparison.subgroups(scores, group_size)
    groups = numbers_of(members, len(lengths))
    rewards = _with_penalty(scores, process, groups, kl)
    if baselines is not None:
        if process:
            raise ValueError(
                "compare='role_average' keeps running means of whole rollouts, but a reward function rewards steps."
                " Set compare='role' to compare steps with each other, or return one reward for each rollout."
            )
        totals_N = algorithm.totals(rewards, weights_F, kl)
        outcome_N = less_average(totals_N, baselines, scores, algorithm.comparison.scaled)
    else:
        kl_PG = None if kl is None else gathered(kl, members, 0.0)
        more = (_members(scores, lengths, members),) if algorithm.reads_members else ()
        rewards_PGF = gathered(rewards, members, torch.nan)
        outcome_N = scattered(algorithm.advantages(rewards_PGF, weights_F, kl_PG, *more), members, len(lengths))
    if outcome_N.dim() == 2:
        return Credit(lengths, _of_each_token(algorithm, outcome_N, lengths, process))
    if energies is not None:
        if process:
            raise ValueError(
                "advantages='otb' is for rewards of whole completions, but a reward function rewards steps. Return one"
                " reward for each completion, or choose other advantages."
            )
        known = torch.where(scores.rewards.isnan().all(1), torch.nan, outcome_N * algorithm.mix.outcome_weight)
        return Credit(lengths, optimal_token_baseline(known, energies, lengths, groups))
    if not process:  # the outcome alone, at the last token of each completion that has tokens
        nonempty = lengths.nonzero()[:, 0]
        to_go = outcome_N[nonempty].double() * algorithm.mix.outcome_weight
        return Credit(lengths, Credited(nonempty, lengths[nonempty] - 1, to_go))
    parts = [gather_steps(scores.steps_of(function), scores.lengths) for function in process]
    advantages_S = algorithm.step_advantages(parts, weights_F[process], groups)
    return Credit(lengths, credit_to_go(join_steps(parts), advantages_S, lengths, outcome_N, algorithm.mix))


def _of_each_token(algorithm: Algorithm, advantages_NT: Tensor, lengths: Tensor, process: list[int]) -> Credited:
    """Credit of per-token advantages [N, T], each token being a step; CheckError where the run cannot use them."""
    given = "the function of `advantages` gives each token an advantage of its own"
    if process:
        raise CheckError.of(
            "advantages-twice", f"{given}, and a reward function rewards steps.", "Return one reward per completion."
        )
    if not algorithm.objective.credits_tokens:
        raise CheckError.of(
            "advantages-tokens",
            f"{given}, but this loss gives all tokens of a completion the same (loss_type='gmpo', or"
            " importance_sampling_level='sequence').",
            "Set importance_sampling_level='sequence_token' or 'token', or choose another loss_type.",
        )
    rows, ends = (torch.arange(advantages_NT.shape[1]) < lengths[:, None]).nonzero(as_tuple=True)
    return Credited(rows, ends, advantages_NT[rows, ends].double() * algorithm.mix.outcome_weight)


class Judge(NamedTuple):
    """Method and reward weights for the completions of one source, or of a run without sources."""

    algorithm: Algorithm
    weights_F: Tensor  # weights of the reward functions


JudgeOf = Callable[[str], Judge]  # by the name of a source, "" in a run without


def credit_by_source(
    judge_of: JudgeOf,
    scores: Scores,
    group_size: int,
    kl: Tensor | None = None,
    energies: Tensor | None = None,
    baselines: Tensor | None = None,
) -> Credit:
    """`assign_credit` for the completions of each source, with the source's own method and reward weights."""
    if not scores.sources:
        return assign_credit(*judge_of(""), scores, group_size, kl, energies, baselines)
    lengths, parts = torch.tensor(scores.lengths, dtype=torch.long), []
    for name, rows in scores.by_source().items():
        own_energies = None if energies is None else energies[token_index(rows, lengths)]
        judge, own_kl = judge_of(name), None if kl is None else kl[rows]
        means = baselines[rows] if baselines is not None and judge.algorithm.comparison.averages else None
        ends = assign_credit(*judge, scores.take(rows), group_size, own_kl, own_energies, means).ends
        parts.append(Credited(rows[ends.rows], ends.ends, ends.to_go))
    joined = Credited(*map(torch.cat, zip(*parts, strict=True)))
    order = joined.rows.argsort(stable=True)
    return Credit(lengths, Credited(*(values[order] for values in joined)))


def members_by_source(judge_of: JudgeOf, scores: Scores, group_size: int) -> Tensor:
    """Completions that are compared with each other, by the comparison of their source: [P, G] int64, -1 as padding."""
    if not scores.sources:
        return judge_of("").algorithm.comparison.subgroups(scores, group_size)
    parts = []
    for name, rows in scores.by_source().items():
        members = judge_of(name).algorithm.comparison.subgroups(scores.take(rows), group_size)
        parts.append(torch.where(members >= 0, rows[members], -1))
    most = max(part.shape[1] for part in parts)
    joined = torch.cat([pad(part, (0, most - part.shape[1]), value=-1) for part in parts])
    return joined[joined[:, 0].argsort(stable=True)]


def weights_by_source(judge_of: JudgeOf, scores: Scores) -> Tensor:
    """Weights of reward functions: [F], or [N, F] where completions are of several sources."""
    if not scores.sources:
        return judge_of("").weights_F
    known = {name: judge_of(name).weights_F for name in dict.fromkeys(scores.sources)}
    return torch.stack([known[name] for name in scores.sources])


def signal_stats(credit: Credit, group_size: int) -> dict[str, Stat]:
    """`frac_advantage_zero`: the share of groups whose advantages are all 0; `credit` is without the KL penalty."""
    return {"frac_advantage_zero": Mean.of((~credit.has_signal().view(-1, group_size).any(1)).double().tolist())}


@dataclass
class UnreadSettings:
    """Settings of process rewards that the user gave; they have no effect if no reward function rewards steps."""

    settings: dict[str, Any]
    patience: int = BATCHES_WITHOUT_STEPS

    def look(self, scores: Scores) -> None:
        """Count a rollout batch; after a few without steps, warn once."""
        if scores.process_functions:
            self.settings = {}
        self.patience -= 1
        if self.settings and self.patience == 0:
            given = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
            warn(
                f"{given}: has had no effect in {BATCHES_WITHOUT_STEPS} rollout batches, in which no reward function"
                " rewarded steps. Return (end, reward) pairs for a completion, or leave it unset.",
            )


def _members(scores: Scores, lengths: Tensor, members: Tensor) -> Members:
    """Lengths, roles and games of each subgroup's completions, as registered advantages get them."""
    seats = scores.seats or [NO_SEAT] * len(lengths)
    names = tuple(sorted({one.role for one in seats}))
    roles, games = torch.tensor([(names.index(one.role), one.game) for one in seats]).view(-1, 2).unbind(1)
    return Members(gathered(lengths, members, 0), gathered(roles, members, -1), gathered(games, members, -1), names)


def _with_penalty(scores: Scores, process: list[int], groups: Tensor, kl: Tensor | None) -> Tensor:
    """[N, F] rewards of outcomes, NaN for none.

    If a KL penalty is part of the reward, groups in which only steps are rewarded get an outcome of 0, so that their
    penalty is compared: without an outcome it would be dropped.
    """
    outcomes = scores.outcomes()
    if kl is not None and not kl.isfinite().all():  # a reward of NaN would count as an abstention
        raise FloatingPointError(
            "the KL divergence from the reference model is NaN or infinite, so it cannot be subtracted from rewards:"
            " weights of the policy or the reference are NaN or infinite, or an activation overflows."
        )
    if kl is not None and process:
        with_outcome = groups[~outcomes.isnan().all(1)]
        without_outcome = torch.isin(groups, with_outcome, invert=True)
        outcomes[without_outcome & ~scores.rewards.isnan().all(1), process[0]] = 0.0
    return outcomes


def step_stats(judge_of: JudgeOf, scores: Scores, names: Sequence[str], members_PG: Tensor) -> dict[str, Stat]:
    """Metrics of the rewards of steps; empty if no reward function rewards steps."""
    stats: dict[str, Stat] = {}
    count = 0
    for function in scores.process_functions:
        rewards = [reward for steps in scores.steps_of(function) for _, reward in steps if reward == reward]
        count += len(rewards)
        stats[f"steps/{names[function]}/mean"] = Mean.of(rewards)
    if not stats:
        return {}
    totals_PG, variances_P = spread_by_source(judge_of, scores, members_PG)
    alike = (nanstd(totals_PG, dim=1).flatten() == 0) & (variances_P.nan_to_num(0.0) == 0)
    stats["frac_reward_zero_std"] = Mean.of(alike.double().tolist())
    return {**stats, "steps/per_completion": Mean(count, len(scores.lengths))}


def spread_by_source(judge_of: JudgeOf, scores: Scores, members_PG: Tensor) -> tuple[Tensor, Tensor]:
    """`spread_of_rewards` with each source's weights; the completions of a subgroup belong to one source."""
    if not scores.sources:
        return spread_of_rewards(scores, judge_of("").weights_F, members_PG)
    labels = [scores.sources[int(members[members >= 0][0])] for members in members_PG]
    totals_PG = torch.full(members_PG.shape, torch.nan, dtype=torch.float64)
    variances_P = torch.full((len(members_PG),), torch.nan, dtype=torch.float64)
    for name in dict.fromkeys(labels):
        own = torch.tensor([label == name for label in labels])
        totals_PG[own], variances_P[own] = spread_of_rewards(scores, judge_of(name).weights_F, members_PG[own])
    return totals_PG, variances_P


def spread_of_rewards(scores: Scores, weights_F: Tensor, members_PG: Tensor) -> tuple[Tensor, Tensor]:
    """Total rewards of outcomes [P, G], and the variance of each group's rewards of steps [P]; NaN for none.

    The variance is Σ_f w_f² var_f over the functions f that reward steps.
    """
    totals_PG = gathered(weighted_total(scores.outcomes(), weights_F), members_PG, torch.nan)
    variances_P = torch.full((len(totals_PG),), torch.nan, dtype=torch.float64)
    for function in scores.process_functions:
        steps = scores.steps_of(function)
        for group in range(len(totals_PG)):
            completions = [steps[number] for number in members_PG[group].tolist() if number >= 0]
            rewards = [reward for pairs in completions for _, reward in pairs if reward == reward]
            if rewards:
                variance = weights_F[function].item() ** 2 * statistics.pvariance(rewards)
                variances_P[group] = variances_P[group].nan_to_num(0.0) + variance
    return totals_PG, variances_P
