"""Kuhn poker by self-play: exploitability over training, by what rollouts are compared with.

    python -m benchmarks.kuhn                    # trains a tabular policy, a minute
    python -m benchmarks.kuhn --player tiny      # a tiny model, from the runs of `python -m benchmarks.claims 22`

Either prints a table and draws the curves of both.

Both seats are played by one policy. The tabular one has 12 decisions, a probability for each of three cards at four
points of the game; the six deals are six prompts, advantages are Covey's own (`assign_credit`), and updates are
REINFORCE on the logits, with a rate and an entropy bonus that fall to 0, because the simultaneous gradient of a
zero-sum game circles around an equilibrium. The tiny model is that of claim 22 (`benchmarks.claims.games`): a random
Llama of two layers that writes a letter for each decision, trained by `GRPOTrainer` on 64 games a step, at a constant
rate and without an entropy bonus. Its runs are in the claim's records, and are not trained again here.

Everything else is exact (`benchmarks.poker`), for the model from its probabilities: the value of the game for the first
seat, -1/18 in every equilibrium, and NashConv, what both seats together could gain by the best replies to the policy; 0
in an equilibrium, 11/12 for the uniform policy.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.bands import Curve, draw_bands
from benchmarks.claims.records import RECORDS, ClaimRecords
from benchmarks.claims.table import claim
from benchmarks.poker import AFTER_BET, AFTER_PASS, CALLS, DEALS, FIRST, nash_conv, value_of
from covey import GRPOConfig
from covey.algorithms import grpo
from covey.algorithms.comparison import RoleAverages
from covey.algorithms.credit import assign_credit
from covey.core.records import GameSeat, Scores

COMPARED = ("group", "role", "role_average")
TITLES = {"tabular": "tabular policy", "tiny": "tiny model"}
CLAIM = 22  # whose runs are those of the tiny model
STEPS, SEEDS = 1000, 4  # of tabular runs
RESULTS = Path(__file__).with_name("kuhn.json")
PICTURE = Path(__file__).parents[1] / "docs" / "games" / "kuhn.png"


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
    settings: dict[str, Any] = {"num_generations": 2 * games, "per_device_train_batch_size": 2 * games * len(DEALS)}
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
    final = logits.sigmoid().tolist()
    return {"curve": [*curve, nash_conv(final)], "policy": final, "value": value_of(final)}


def of_claim(records: ClaimRecords, seeds: int) -> dict[str, list[dict[str, Any]]]:
    """Runs of the tiny model by comparison, of the first seeds: NashConv after every step, and the value at the end."""
    found: dict[str, list[dict[str, Any]]] = {}
    for (compare, seed), result in sorted(records.runs(claim(CLAIM)).items()):
        if seed < seeds:
            curves = result["curves"]
            run = {"curve": curves["NashConv"], "value": curves["value for the first seat"][-1]}
            found.setdefault(compare, []).append(run)
    return {compare: found[compare] for compare in COMPARED if compare in found}


def plot(players: dict[str, tuple[int, dict[str, list[dict[str, Any]]]]], path: Path) -> None:
    """NashConv over training, a panel for each player, from its updates and its runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(players), figsize=(5 * len(players), 3.4), layout="constrained", squeeze=False
    )
    for axes, (name, (steps, found)) in zip(panels[0], players.items(), strict=True):
        curves: dict[str, list[Curve]] = {}
        for compare, runs in found.items():
            for run in runs:
                last = len(run["curve"]) - 1
                first = steps == last + 1  # after every update; else from before the first one on
                places = [first + (steps - first) * place / max(last, 1) for place in range(last + 1)]
                curves.setdefault(compare, []).append((places, run["curve"]))
        draw_bands(axes, curves)
        axes.axhline(11 / 12, color="0.5", lw=0.8, ls=":")
        axes.set(title=TITLES[name], xlabel="optimizer steps", ylabel="NashConv (dotted: uniform policy)")
        axes.set_ylim(bottom=0)
        axes.legend(title="compare (seeds)", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


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
    options.add_argument("--player", choices=("tabular", "tiny"), default="tabular")
    options.add_argument("--steps", type=int, help=f"Updates of each tabular run, on 96 games; {STEPS} unless given.")
    options.add_argument("--seeds", type=int, help=f"Tabular runs of each comparison; {SEEDS} unless given.")
    options.add_argument("--records", type=Path, default=RECORDS, help="File of finished runs of claims.")
    options.add_argument("--output", type=Path, default=RESULTS, help="File for the tabular policy's curves.")
    options.add_argument("--plot", type=Path, default=PICTURE)
    given = options.parse_args()
    if given.player == "tiny" and (given.steps, given.seeds) != (None, None):
        options.error("--steps and --seeds are of tabular runs; those of the tiny model are the claim's")
    if any(number is not None and number < 1 for number in (given.steps, given.seeds)):
        options.error("--steps and --seeds must be at least 1")
    steps, seeds = given.steps or STEPS, given.seeds or SEEDS
    torch.set_num_threads(1)
    of_tiny = of_claim(ClaimRecords(given.records), claim(CLAIM).seeds)
    if given.player == "tiny" and not of_tiny:
        options.error(f"the runs of claim {CLAIM} are not there: `python -m benchmarks.claims {CLAIM}` trains them")
    if given.player == "tabular":
        trained: dict[str, list[dict[str, Any]]] = {}
        for seed in range(seeds):
            for compare in COMPARED:
                run = train(compare, seed, steps)
                trained.setdefault(compare, []).append({name: rounded(value) for name, value in run.items()})
        given.output.write_text(json.dumps({"tabular": {"steps": steps, "runs": trained}}, indent=1) + "\n")
    known = json.loads(given.output.read_text()) if given.output.exists() else {}
    players = {name: (one["steps"], one["runs"]) for name, one in known.items()}
    if of_tiny:
        players["tiny"] = max(len(run["curve"]) for runs in of_tiny.values() for run in runs), of_tiny
    print(table(players[given.player][1]))
    plot(players, given.plot)


def rounded(value: Any) -> Any:
    return [round(one, 5) for one in value] if isinstance(value, list) else round(value, 5)


if __name__ == "__main__":
    main()
