"""Comparison of completions of a prompt by the seats of a game that they were played in.

A comparison gives every completion a key. Completions of one prompt with equal keys form a *subgroup*, and a method
computes its advantages within subgroups instead of groups. `role_average` compares with a running mean instead.

Letters: N completions in whole groups, P subgroups, G completions of the largest, F reward functions.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from covey.core.advantages import EPSILON, nanstd
from covey.core.findings import Finding
from covey.core.records import NO_SEAT, GameSeat, Scores

WITHIN = ("group", "role", "episode")
"""Comparisons within a prompt: all of its completions, those of one role, or those of one role in one game."""
ROLE_AVERAGE = "role_average"
COMPARISONS = (*WITHIN, ROLE_AVERAGE)


@dataclass(frozen=True)
class RolloutComparison:
    """Setting `compare` of a config, as a value."""

    by: str = "group"  # one of `COMPARISONS`
    of_roles: Mapping[str, str] = field(default_factory=dict)  # role -> one of `WITHIN`, where it differs from `by`
    decay: float = 0.95  # d of `RoleAverages`
    scaled: bool = False  # with running means: divide by the standard deviation of each role in the batch

    @classmethod
    def of(cls, config: Any, scaled: bool) -> "RolloutComparison":
        """The comparison of a config. With a mapping, roles that it does not name are compared by "role"."""
        if isinstance(config.compare, Mapping):
            return cls("role", dict(config.compare), config.role_decay)
        return cls(config.compare, decay=config.role_decay, scaled=scaled)

    @property
    def averages(self) -> bool:
        """True if completions are compared with running means."""
        return self.by == ROLE_AVERAGE

    def key(self, seat: GameSeat) -> tuple[str | int, ...]:
        """Key of a seat within its prompt."""
        by = self.of_roles.get(seat.role, self.by)
        return {"role": (seat.role,), "episode": (seat.role, seat.game)}.get(by, ())

    def subgroups(self, scores: Scores, group_size: int) -> Tensor:
        """Completions that are compared with each other, [P, G] int64: numbers in order of appearance, -1 for none.

        A rollout that failed before its role was known is in no subgroup of a role.
        """
        if not scores.seats and not scores.absent:
            return whole_groups(len(scores.lengths), group_size)
        members: dict[tuple[str | int, ...], list[int]] = {}
        seats = scores.seats or [NO_SEAT] * len(scores.lengths)
        for number, (seat, present) in enumerate(zip(seats, scores.present, strict=True)):
            key = self.key(seat)
            if present and (seat.known or not key):
                members.setdefault((number // group_size, *key), []).append(number)
        if not members:  # all have failed
            return whole_groups(len(scores.lengths), group_size)
        most = max(map(len, members.values()))
        return torch.tensor([[*own, *[-1] * (most - len(own))] for own in members.values()])


def whole_groups(count: int, group_size: int) -> Tensor:
    """Completions of each prompt, [P, G] int64."""
    return torch.arange(count).view(-1, group_size)


def gathered(values: Tensor, members_PG: Tensor, fill: float) -> Tensor:
    """Values [N, ...] arranged by subgroup, [P, G, ...], with `fill` where a subgroup has no member."""
    return torch.cat([values, values.new_full((1, *values.shape[1:]), fill)])[members_PG]


def scattered(values_PG: Tensor, members_PG: Tensor, count: int) -> Tensor:
    """Inverse of `gathered`: values [P, G] or [P, G, T] by subgroup, put in the order of completions, [N] or [N, T]."""
    there = members_PG >= 0
    values = values_PG.new_zeros(count, *values_PG.shape[2:])
    values[members_PG[there]] = values_PG[there]
    return values


def numbers_of(members_PG: Tensor, count: int) -> Tensor:
    """[N] int64, index of each completion's subgroup."""
    return scattered(torch.arange(len(members_PG))[:, None].expand_as(members_PG), members_PG, count)


@dataclass(eq=False)
class RoleAverages:
    """Running means of total rewards by environment and role, in sampling order.

    b ← d b + (1 - d) R from b = 0, and the baseline is b / (1 - d^n) after n rewards, 0 before the first: role-
    conditioned advantage estimation (SPIRAL, arXiv 2506.24119), with the bias of the beginning corrected. A rollout
    batch is compared with the means from before it, so the baseline does not depend on it and adds no bias.
    """

    decay: float
    means: dict[tuple[str, str], tuple[float, int]] = field(default_factory=dict)  # b and n by (environment, role)

    def baseline(self, environment: str, role: str) -> float:
        mean, count = self.means.get((environment, role), (0.0, 0))
        return mean / (1 - self.decay**count) if count else 0.0

    def baselines(self, scores: Scores) -> Tensor:
        """[N] float64, the baseline of each completion."""
        seats = scores.seats or [NO_SEAT] * len(scores.lengths)
        return torch.tensor([self.baseline(one.environment, one.role) for one in seats], dtype=torch.float64)

    def update(self, scores: Scores, totals_N: Tensor) -> None:
        """Add the total rewards [N] of a rollout batch of all processes; NaN is no reward."""
        seats = scores.seats or [NO_SEAT] * len(scores.lengths)
        for seat, total in zip(seats, totals_N.tolist(), strict=True):
            if total == total:
                mean, count = self.means.get((seat.environment, seat.role), (0.0, 0))
                updated = self.decay * mean + (1 - self.decay) * total
                self.means[seat.environment, seat.role] = updated, count + 1

    def state_dict(self) -> dict[str, Any]:
        return {"means": [[*key, *value] for key, value in self.means.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.means = {(environment, role): (mean, count) for environment, role, mean, count in state["means"]}


def less_average(totals_N: Tensor, baselines_N: Tensor, scores: Scores, scaled: bool) -> Tensor:
    """A = R - b, [N] float32 without NaN; with `scaled`, A is divided by std + ε over the role's A in the batch."""
    advantages = totals_N.double() - baselines_N
    if scaled:
        roles = [(one.environment, one.role) for one in scores.seats or [NO_SEAT] * len(totals_N)]
        for role in dict.fromkeys(roles):
            own = torch.tensor([one == role for one in roles])
            advantages[own] = advantages[own] / (nanstd(advantages[own], dim=0) + EPSILON)
    return advantages.nan_to_num(0.0).float()


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_comparison(
    comparison: RolloutComparison, named: str, scores: Scores, group_size: int, pass_at_k: int | None = None
) -> Iterator[Finding]:
    """Findings about the seats of a rollout batch, of all processes, and how they are to be compared.

    `named` is the setting with its value, as in "compare='role'"; `pass_at_k` the k of advantages=pass_at_k, else None.
    """
    if comparison.by == "group":
        return
    roles = sorted({seat.role for seat in scores.seats} - {""})
    if not roles:
        yield Finding.error(
            "roles-missing",
            f"{named}, but no rollout of the first rollout batch has a role.",
            'Give it one: engine.begin(prompt, role="first").',
        )
        return
    yield from _check_names(comparison, named, roles)
    if comparison.averages:
        return
    sizes = (comparison.subgroups(scores, group_size) >= 0).sum(1)
    if bool((sizes < 2).all()):
        games = [seat.game for seat in scores.seats]
        yield Finding.error(
            "roles-alone",
            f"{named} leaves each of {len(scores.lengths)} rollouts alone in its subgroup (roles {', '.join(roles)};"
            f" games {min(games)} to {max(games)}), so there is nothing to compare it with.",
            "Set compare='role', or sample more rollouts of a role in each game.",
        )
    elif pass_at_k is not None and int(sizes.min()) < pass_at_k:
        yield Finding.error(
            "roles-few",
            f"{named} with advantages='pass_at_k' compares only {int(sizes.min())} rollouts with each other, but"
            f" pass_at_k={pass_at_k} needs at least {pass_at_k}.",
            f"Set pass_at_k to {max(int(sizes.min()), 1)} or less, or sample more of a role.",
        )


def _check_names(comparison: RolloutComparison, named: str, roles: Sequence[str]) -> Iterator[Finding]:
    unknown = [role for role in comparison.of_roles if role not in roles]
    others = [role for role in roles if role not in comparison.of_roles]
    if not unknown:
        return
    evidence = f"{named} names {', '.join(map(repr, unknown))}, and the first rollout batch has the roles"
    evidence = f"{evidence} {', '.join(map(repr, roles))}."
    if not others:
        yield Finding.warning("roles-unknown", evidence)
        return
    close = [one for role in unknown for one in difflib.get_close_matches(role, others, n=1)]
    yield Finding.error("roles-unknown", evidence, f"Did you mean {close[0]!r}?" if close else "Name one of these.")


def check_zero_sum(
    comparison: RolloutComparison,
    scores: Scores,
    weights_F: Tensor,
    group_size: int,
    *,
    dynamic: bool,
    difficulty: bool,
) -> Iterator[Finding]:
    """Findings about the selection of prompts by their rewards, if the rewards of a game's seats add up to 0.

    `dynamic` and `difficulty`: prompts are selected by dynamic_sample, by prompt_sampler='difficulty'.
    """
    selects = difficulty or (dynamic and comparison.by == "group")
    if not selects or not scores.seats:
        return
    sums: dict[tuple[int, int], float] = {}
    for number, (seat, rewards) in enumerate(zip(scores.seats, scores.rewards.double(), strict=True)):
        total = float((rewards * weights_F.double()).nansum())
        sums[number // group_size, seat.game] = sums.get((number // group_size, seat.game), 0.0) + total
    cancel = bool(sums) and all(abs(one) < 1e-9 for one in sums.values()) and bool(scores.rewards.nan_to_num().any())
    if not cancel or len({seat.role for seat in scores.seats}) < 2:
        return
    if difficulty:
        yield Finding.error(
            "roles-zero-sum",
            "prompt_sampler='difficulty' looks for prompts of intermediate difficulty, but the rewards of each game's"
            " seats add up to 0: every prompt has mean 0, whatever the policy can do.",
            "Leave prompt_sampler unset, or train one seat against an opponent.",
        )
    else:
        yield Finding.warning(
            "roles-zero-sum",
            "dynamic_sample=True replaces groups whose rewards are alike, but the rewards of each game's seats add up"
            " to 0: with compare='group' every game that is not a draw has a signal, and hardly a group is replaced.",
            "Set compare='role', or dynamic_sample=False.",
        )
