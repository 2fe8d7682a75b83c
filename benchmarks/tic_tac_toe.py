"""Tic-tac-toe by self-play of a tiny model: results against fixed players, by what rollouts are compared with.

    python -m benchmarks.tic_tac_toe             # trains what is not in its records, prints tables and draws curves

The game and its uniform and optimal player are those of `examples/tic_tac_toe.py`. A random Llama of two layers plays
both seats: it is shown the board, nine letters, before each move, and its next token is the move; another one than a
free cell loses. It is first taught the rules by supervised training on games of uniform players, as a language model
knows them, unless `--rules 0` is given. Every 25 steps it plays 256 games in each seat against each player. A result is
the share of games that it wins, less the share that it loses. Between uniform players the first seat has 0.297; the
best possible against a uniform player is 0.995 in the first seat and 0.925 in the second, and 0 against an optimal one.
"""

import argparse
import copy
import random
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.bands import Curve, draw_bands
from benchmarks.letters import tiny_llama, tokenizer, vocabulary_of
from benchmarks.records import Records

sys.path.insert(0, examples := str(Path(__file__).parents[1] / "examples"))
try:
    from tic_tac_toe import MARKS, TicTacToe, optimal, uniform, winner
finally:
    sys.path.remove(examples)  # which has files of other modules' names

DIGITS = "123456789"
VOCABULARY = vocabulary_of([".", "x", "o", *DIGITS])
LETTERS = {id: letter for letter, id in VOCABULARY.items()}
COMPARED = ("group", "role", "role_average")
PLAYERS: dict[str, Callable[[list[Any]], str]] = {"uniform": uniform, "optimal": optimal}
SEATS = [f"{role} against {name}" for name in PLAYERS for role in TicTacToe.roles]
EVERY = 25  # steps between two looks
RECORDS = Path(__file__).with_name("tic_tac_toe.jsonl")  # a line for each finished run
PICTURE = Path(__file__).parents[1] / "docs" / "games" / "tic_tac_toe.png"
COLLAPSE = 0.2  # fall of the result against the uniform player, the mean of both seats, from its best to its last


async def play(row: dict[str, Any], engine: Any, n: int) -> list[Any]:
    """One game: a seat's rollout alternates boards, which it is shown, with its moves."""
    game, seats = TicTacToe(), dict[str, Any]()
    game.reset()
    while (role := game.turn()) is not None:
        if role in seats:
            seats[role].write(game.board)
        else:
            seats[role] = engine.begin(MARKS[role] + game.board)
        game.move(role, (await seats[role].sample(max_tokens=1)).text)
    points = game.rewards()
    for role in game.roles:
        seats.setdefault(role, engine.begin(MARKS[role] + game.board))  # over before its first move
    return [seats[role].done(role=role, points=points[role], outcome=game.outcome) for role in game.roles]


def points(points: list[float], **columns: Any) -> list[float]:
    return points


@torch.no_grad()
def judged(model: Any, games: int, seed: int) -> dict[str, float]:
    """Results of a model in both seats against all players, and the share of its games that an illegal move ends."""
    generator = torch.Generator().manual_seed(seed)
    results, illegal = dict[str, float](), []
    for name, player in PLAYERS.items():
        for role in TicTacToe.roles:
            played = [TicTacToe() for _ in range(games)]
            texts = [MARKS[role]] * games
            for game in played:
                game.reset()
            while alive := [number for number, game in enumerate(played) if game.turn() is not None]:
                own = [number for number in alive if played[number].turn() == role]
                for number in alive:
                    if number not in own:
                        _answer(played[number], player, number)
                if not own:
                    continue
                for number in own:
                    texts[number] += played[number].board
                ids = torch.tensor([[VOCABULARY[letter] for letter in texts[number]] for number in own])
                chances = model(input_ids=ids).logits[:, -1].float().softmax(-1)
                for number, (token,) in zip(own, chances.multinomial(1, generator=generator).tolist(), strict=True):
                    letter = LETTERS[token] if len(LETTERS[token]) == 1 else "."
                    texts[number] += letter
                    played[number].move(role, letter)
            won = [_won(game, role) for game in played]
            results[f"{role} against {name}"] = statistics.fmean(won)
            illegal += [game.lost == role for game in played]
    return {**results, "illegal": statistics.fmean(illegal)}


def teach_rules(model: Any, steps: int, seed: int) -> None:
    """Supervised training on games of uniform players, 64 new ones a step: which moves are legal, and nothing else."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=max(steps, 1))
    generator = random.Random(seed)
    for _ in range(steps):
        seats = [seat for _ in range(64) for seat in _uniform_game(generator)]
        longest = max(len(text) for text in seats)
        ids = torch.tensor([[VOCABULARY[letter] for letter in text.ljust(longest, "x")] for text in seats])
        moves = torch.tensor([[letter in DIGITS for letter in text.ljust(longest, "x")] for text in seats])
        logits = model(input_ids=ids).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits[moves[:, 1:]], ids[:, 1:][moves[:, 1:]])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def _uniform_game(generator: random.Random) -> list[str]:
    """What each seat reads and writes in a game of two players that take any free cell."""
    game = TicTacToe()
    game.reset()
    seats = [MARKS[role] for role in game.roles]
    while (role := game.turn()) is not None:
        move = str(generator.choice([cell for cell in range(9) if game.board[cell] == "."]) + 1)
        seats[game.roles.index(role)] += game.board + move
        game.move(role, move)
    return seats


def _answer(game: Any, player: Callable[[list[Any]], str], number: int) -> None:
    """The opponent's move; a uniform player is another one in each game."""
    role = game.turn()
    if player is uniform:
        free = [cell for cell in range(9) if game.board[cell] == "."]
        game.move(role, str(random.Random(f"{number} {game.board}").choice(free) + 1))
    else:
        game.move(role, player([{"role": "user", "content": game.observe(role)}]))


def _won(game: Any, role: str) -> int:
    if game.lost:
        return 1 if game.lost != role else -1
    mark = winner(game.board)
    return 0 if mark is None else 1 if mark == MARKS[role] else -1


def beginner(seed: int, rules: int) -> Any:
    """A random model after `rules` supervised steps (`teach_rules`)."""
    torch.manual_seed(seed)
    model = tiny_llama(VOCABULARY)
    teach_rules(model, rules, seed)
    return model


def train(
    model: Any, compare: str, seed: int, steps: int, games: int = 256, rate: float = 1e-3
) -> dict[str, list[float]]:
    """Train a model by self-play, 64 games a step; `judged` at the beginning and every `EVERY` steps, by name."""
    from transformers import TrainerCallback

    from covey import GRPOConfig, GRPOTrainer

    curves: dict[str, list[float]] = {}

    class Judge(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **parts: Any) -> None:
            if state.global_step % EVERY == 0:
                self.look(model)

        def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **parts: Any) -> None:
            self.look(model)

        def look(self, model: Any) -> None:
            for name, value in judged(model, games, seed).items():
                curves.setdefault(name, []).append(round(value, 4))

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=points,
            args=GRPOConfig(
                output_dir=folder,
                seed=seed,
                compare=compare,
                scale_rewards="none",
                rollouts_per_game=2,
                num_generations=32,
                per_device_train_batch_size=128,
                gradient_accumulation_steps=1,
                max_completion_length=50,
                max_steps=steps,
                learning_rate=rate,
                lr_scheduler_type="constant",
                logging_steps=steps,
                save_strategy="no",
                report_to="none",
                record="off",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                disable_tqdm=True,
            ),
            train_dataset=[{"prompt": "x"}] * 4,
            processing_class=tokenizer(VOCABULARY),
            rollout_func=play,
            callbacks=[Judge()],
        )
        trainer.train()
    return curves


def against(curves: dict[str, list[float]], player: str) -> list[float]:
    """Results against a player, the mean of both seats."""
    seats = [curves[f"{role} against {player}"] for role in TicTacToe.roles]
    return [statistics.fmean(values) for values in zip(*seats, strict=True)]


def collapses(found: dict[str, list[dict[str, list[float]]]]) -> str:
    """A line for each comparison: runs that collapse, and the largest fall."""
    lines = []
    for compare, runs in found.items():
        falls = [max(values) - values[-1] for values in (against(curves, "uniform") for curves in runs)]
        many = sum(fall > COLLAPSE for fall in falls)
        lines.append(
            f"{compare}: {many} of {len(runs)} runs fall by more than {COLLAPSE}; the largest fall is {max(falls):.2f}"
        )
    return "\n".join(lines)


def plot(found: dict[str, list[dict[str, list[float]]]], path: Path) -> None:
    """Results against both players over training."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for axes, player in zip(panels, PLAYERS, strict=True):
        curves: dict[str, list[Curve]] = {}
        for compare, runs in found.items():
            results = [against(curves, player) for curves in runs]
            curves[compare] = [([EVERY * place for place in range(len(values))], values) for values in results]
        draw_bands(axes, curves)
        axes.set(title=f"against the {player} player", xlabel="optimizer steps", ylabel="games won less games lost")
        axes.set_ylim(-1.05, 1.05 if player == "uniform" else 0.05)  # the best possible is 0.96, and 0
        axes.legend(title="compare (seeds)", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def table(found: dict[str, list[dict[str, list[float]]]]) -> str:
    """A row for each comparison: the mean last result of each seat against each player, with the least and largest."""
    names = [*SEATS, "illegal"]
    lines = [f"| compare | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for compare, runs in found.items():
        cells = []
        for name in names:
            last = [run[name][-1] for run in runs]
            cells.append(f"{statistics.fmean(last):.2f} ({min(last):.2f} to {max(last):.2f})")
        lines.append(f"| {compare} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=200, help="Updates of each run, on 64 games.")
    options.add_argument("--seeds", type=int, default=4, help="Runs of each comparison.")
    options.add_argument("--rules", type=int, default=1000, help="Supervised steps before, which teach the rules.")
    options.add_argument("--rate", type=float, default=3e-4, help="Learning rate of self-play.")
    options.add_argument("--records", type=Path, default=RECORDS, help="File of finished runs.")
    options.add_argument("--plot", type=Path, default=PICTURE)
    given = options.parse_args(arguments)
    torch.set_num_threads(1)
    records, found = Records(given.records), dict[str, list[dict[str, list[float]]]]()
    for seed in range(given.seeds):
        start = None
        for compare in COMPARED:
            run: dict[str, Any] = {
                "compare": compare,
                "seed": seed,
                "steps": given.steps,
                "rules": given.rules,
                "rate": given.rate,
            }
            if not records.find(**run):
                start = start or beginner(seed, given.rules)
                records.add(**run, curves=train(copy.deepcopy(start), compare, seed, given.steps, rate=given.rate))
                print(f"{compare}, seed {seed}: trained", flush=True)
            found.setdefault(compare, []).append(records.find(**run)[0]["curves"])
    print(table(found))
    print(collapses(found))
    plot(found, given.plot)


if __name__ == "__main__":
    main()
