"""Kuhn poker by self-play of a tabular policy: exploitability over training, by what rollouts are compared with.

    python -m benchmarks.kuhn

Three cards, an ante of 1 and one bet of 1 (Kuhn 1950). The policy has 12 decisions, a probability for each of three
cards at four points of the game, and plays both seats. The six deals are six prompts. Advantages are Covey's own
(`assign_credit`), for each `compare`; updates are REINFORCE on the logits, with a rate and an entropy bonus that fall
to 0, because the simultaneous gradient of a zero-sum game circles around an equilibrium.

Everything else is exact: the value of the game for the first seat, -1/18 in every equilibrium, and NashConv, what both
seats together could gain by the best replies to the policy; 0 in an equilibrium, 11/12 for the uniform policy.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey import GRPOConfig
from covey.algorithms import grpo
from covey.algorithms.comparison import RoleAverages
from covey.algorithms.credit import assign_credit
from covey.core.records import GameSeat, Scores

FIRST, CALLS, AFTER_PASS, AFTER_BET = range(0, 3), range(3, 6), range(6, 9), range(9, 12)
"""Decisions by card (jack, queen, king): the first seat bets, it calls, the second seat bets after a pass, it calls."""
DEALS = list(itertools.permutations(range(3), 2))
VALUE = -1 / 18  # of every equilibrium, for the first seat
COMPARED = ("group", "role", "role_average")
RESULTS = Path(__file__).with_name("kuhn.json")


def value_of(policy: Sequence[Any]) -> Any:
    """Expected payoff of the first seat, where `policy` has the 12 probabilities of a bet or a call."""
    total = 0
    for one, two in DEALS:
        sign = 1 if one > two else -1
        bets, calls = policy[FIRST[one]], policy[CALLS[one]]
        passed = (1 - policy[AFTER_PASS[two]]) * sign + policy[AFTER_PASS[two]] * (calls * 2 * sign - (1 - calls))
        bet = policy[AFTER_BET[two]] * 2 * sign + (1 - policy[AFTER_BET[two]])
        total += (1 - bets) * passed + bets * bet
    return total / len(DEALS)


def best_replies(policy: Sequence[Any]) -> tuple[Any, Any]:
    """Payoff of the first seat if it replies best to the second, and if the second replies best to it."""
    pure = list(itertools.product((0, 1), repeat=6))
    first = max(value_of([*reply, *policy[6:]]) for reply in pure)
    second = min(value_of([*policy[:6], *reply]) for reply in pure)
    return first, second


def nash_conv(policy: Sequence[Any]) -> Any:
    first, second = best_replies(policy)
    return first - second


def play(policy: Tensor, games: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """So many games of each deal: decisions [N, 3] (-1: none), choices [N, 3] and payoffs of the first seat [N]."""
    cards = torch.tensor(DEALS).repeat_interleave(games, 0)
    one, two = cards.unbind(1)

    def act(at: Tensor) -> Tensor:
        return torch.rand(len(at), generator=generator, dtype=torch.float64) < policy[at]

    opening = one + FIRST[0]
    bet = act(opening)
    answer = torch.where(bet, two + AFTER_BET[0], two + AFTER_PASS[0])
    answered = act(answer)
    calls = one + CALLS[0]
    called = act(calls)
    sign = torch.where(one > two, 1.0, -1.0).double()
    after_bet = torch.where(answered, 2 * sign, 1.0)
    after_pass = torch.where(answered, torch.where(called, 2 * sign, -1.0), sign)
    decided = torch.stack([opening, answer, torch.where(~bet & answered, calls, -1)], 1)
    return decided, torch.stack([bet, answered, called], 1).double(), torch.where(bet, after_bet, after_pass)


def train(
    compare: str, seed: int, steps: int, games: int = 16, rate: float = 2.0, bonus: float = 0.3
) -> dict[str, Any]:
    """Train one policy by self-play.

    Returns:
        `curve`, NashConv at a hundred steps and at the end; the last `policy` and its `value` for the first seat.
    """
    settings = {"num_generations": 2 * games, "per_device_train_batch_size": 2 * games * len(DEALS)}
    config = GRPOConfig(output_dir="unused", compare=compare, scale_rewards="none", use_cpu=True, **settings)
    algorithm, weights = grpo.algorithm(config), torch.ones(1)
    averages = RoleAverages(config.role_decay) if algorithm.comparison.averages else None
    generator = torch.Generator().manual_seed(seed)
    logits, curve = torch.zeros(12, dtype=torch.float64), []
    seats = [GameSeat(role, game) for _ in DEALS for game in range(games) for role in ("first", "second")]
    for step in range(steps):
        policy = logits.sigmoid()
        if step % max(steps // 100, 1) == 0:
            curve.append(nash_conv(policy.tolist()))
        decided, chosen, payoffs = play(policy, games, generator)
        rewards = torch.stack([payoffs, -payoffs], 1).flatten()
        scores = Scores(rewards[:, None], [{}] * len(seats), [1] * len(seats), seats)
        baselines = None if averages is None else averages.baselines(scores)
        credit = assign_credit(algorithm, weights, scores, 2 * games, baselines=baselines)
        if averages is not None:
            averages.update(scores, rewards)
        by_seat = credit.of_completions().double().view(-1, 2)
        advantages = by_seat[:, [0, 1, 0]]  # of the seat that decides: first, second, first
        there = decided >= 0
        score = (chosen - policy[decided]) * advantages
        gradient = torch.zeros(12, dtype=torch.float64).index_add_(0, decided[there], score[there]) / len(payoffs)
        entropy = -logits * policy * (1 - policy)  # of each decision, in its logit
        left = 1 - step / steps
        logits += rate * left * (gradient + bonus * left * entropy / 12)
    policy = logits.sigmoid().tolist()
    return {"curve": [*curve, nash_conv(policy)], "policy": policy, "value": value_of(policy)}


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each comparison: NashConv at a tenth of the steps, in the middle and at the end, and the value."""
    lines = ["| compare | NashConv after 10% | 50% | 100% | value for the first seat |", "|---|---|---|---|---|"]
    for compare, runs in found.items():
        places = [[run["curve"][len(run["curve"]) * tenths // 10 - 1] for run in runs] for tenths in (1, 5, 10)]
        cells = [f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})" for values in places]
        values = [run["value"] for run in runs]
        cells.append(f"{statistics.fmean(values):.4f} ({min(values):.4f} to {max(values):.4f})")
        lines.append(f"| {compare} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=1000, help="Updates of each run, on 96 games.")
    options.add_argument("--seeds", type=int, default=4, help="Runs of each comparison.")
    options.add_argument("--output", type=Path, default=RESULTS, help="File for the curves.")
    given = options.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    for compare in COMPARED:
        for seed in range(given.seeds):
            run = train(compare, seed, given.steps)
            found.setdefault(compare, []).append({name: rounded(value) for name, value in run.items()})
        given.output.write_text(json.dumps({"steps": given.steps, "runs": found}, indent=1) + "\n")
    print(table(found))


def rounded(value: Any) -> Any:
    return [round(one, 5) for one in value] if isinstance(value, list) else round(value, 5)


if __name__ == "__main__":
    main()
