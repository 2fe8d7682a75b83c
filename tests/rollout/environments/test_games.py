"""Games for `environment_factory`: turns, seats, rewards, and what a game may not be."""

import random
from fractions import Fraction
from functools import cache
from pathlib import Path
from runpy import run_path

import pytest

from covey.core.findings import CheckError
from covey.core.records import FinishReason
from covey.engines.scripted import ScriptedEngine
from covey.observability.record_files import FOLDER, files, read_rows
from covey.rollout.environments.game import checked_rewards, is_game
from covey.rollout.environments.interface import EnvironmentFailed
from covey.rollout.user_functions import RolloutError
from tests.support import runs, tiny

EXAMPLES = Path(__file__).parents[3] / "examples"
EOS = tiny.tokenizer().eos_token_id
MESSAGES = {"train_dataset": tiny.rows(8, conversational=True)}


class Takes:
    """Two seats take turns, three moves in all; the longer last answer wins."""

    roles = ("first", "second")

    def reset(self, **row):
        self.said = []

    def turn(self):
        return None if len(self.said) == 3 else self.roles[len(self.said) % 2]

    def observe(self, role):
        return f"{role}: {len(self.said)} moves"

    def move(self, role, text):
        self.said.append(text)

    @property
    def outcome(self):
        return "draw"

    def rewards(self):
        return {"first": 1.0, "second": -1.0}


def trainer(folder, game=Takes, parts=None, **changes):
    settings = {"rollouts_per_game": 2, "num_generations": 4, "compare": "role", "max_completion_length": 64}
    given = {"environment_factory": game, "reward_funcs": None, **MESSAGES, **(parts or {})}
    return runs.trainer(folder, parts=given, **{**settings, "max_steps": 1, **changes})


def test_each_seat_is_a_rollout_with_its_role_reward_and_turns(tmp_path):
    made = trainer(tmp_path, parts={"engine": ScriptedEngine(lambda *given: [5, EOS])}, record="tokens")
    made.train()
    rows = read_rows(files(tmp_path / FOLDER)[0])
    seats = [("first", 0), ("second", 0), ("first", 1), ("second", 1)]
    assert [(row["role"], row["game"]) for row in rows[:4]] == seats
    assert [row["reward/Takes"] for row in rows[:4]] == [1, -1, 1, -1]
    assert [len(row["turn_ends"]) for row in rows[:4]] == [2, 1, 2, 1]
    assert [row["completion"][1]["content"] for row in rows[:4:2]] == ["first: 2 moves"] * 2
    log = made.state.log_history[0]
    assert log["games/draws"] == 1 and log["roles/first/reward"] == 1 and log["roles/second/reward"] == -1


@pytest.mark.slow
def test_an_opponent_takes_a_seat_that_is_not_trained(tmp_path):
    seen = []

    def other(messages):
        seen.append(messages[-1]["content"])
        return "7"

    made = trainer(tmp_path, parts={"seats": {"second": other}}, rollouts_per_game=1)
    made.train()
    rows = read_rows(files(tmp_path / FOLDER)[0])
    assert {row["role"] for row in rows} == {"first"} and {row["game"] for row in rows} <= {0, 1, 2, 3}
    assert all(text.endswith("second: 1 moves") for text in seen)


@pytest.mark.slow
def test_a_fixed_opponent_plays_in_evaluations_alone(tmp_path):
    parts = {"eval_seats": {"second": lambda messages: "7"}, "eval_dataset": MESSAGES["train_dataset"][:1]}
    found = trainer(tmp_path, parts=parts, per_device_eval_batch_size=4).evaluate()
    assert found["eval_roles/first/reward"] == 1 and "eval_roles/second/reward" not in found


class Counted(Takes):
    """Takes whose games are told apart: every second one is drawn, and the number 2 breaks at its last move."""

    made = 0
    breaks = ()

    def reset(self, **row):
        super().reset()
        type(self).made += 1
        self.number = self.made

    def move(self, role, text):
        if self.number in self.breaks and len(self.said) == 2:
            raise RuntimeError("the board fell")
        super().move(role, text)

    outcome = property(lambda self: "draw" if self.number % 2 else "won")


def test_an_evaluation_with_fewer_trained_seats_counts_each_game_by_itself(tmp_path):
    """4 games of one prompt against an opponent, where training has 2 rollouts a game: 2 turns each, half are drawn."""
    game = type("Counted", (Counted,), {"made": 0})
    parts = {"eval_seats": {"second": lambda messages: "7"}, "eval_dataset": MESSAGES["train_dataset"][:1]}
    parts |= {"engine": ScriptedEngine(lambda *given: [5, EOS])}
    found = trainer(tmp_path, game, parts=parts, per_device_eval_batch_size=4).evaluate()
    assert (found["eval_games/length"], found["eval_games/draws"]) == (2, 0.5)


@pytest.mark.parametrize(("seats", "lost"), [({}, [2, 3]), ({"second": lambda messages: "7"}, [1])])
def test_a_game_that_raises_fails_alone_with_the_seats_of_its_roles(tmp_path, seats, lost):
    """The second game of the first prompt breaks: its rollouts keep their roles and their own words."""
    game = type("Counted", (Counted,), {"made": 0, "breaks": (2,)})
    parts = {"seats": seats, "engine": ScriptedEngine(lambda *given: [5, EOS])}
    made = trainer(tmp_path, game, parts=parts, rollouts_per_game=2 - len(seats))
    made.train()
    rows = read_rows(files(tmp_path / FOLDER)[0])
    failed = [number for number, row in enumerate(rows) if row["finish"] == str(FinishReason.ERROR)]
    assert failed == lost and [number for number, row in enumerate(rows) if row["reward/Counted"] is None] == lost
    roles = ["first"] if seats else ["first", "second"]
    for row in rows:
        number, place = divmod(row["sample"], len(roles))
        assert (row["role"], row["game"]) == (roles[place], number)
        assert f"{row['role']}: {place} moves" in row["prompt"][-1]["content"]
    turns = [sum(one["role"] == "assistant" for one in row["completion"]) for row in rows[:4]]
    assert turns == ([2, 2, 2, 2] if seats else [2, 1, 2, 1])
    log = made.state.log_history[0]
    assert [log[f"roles/{role}/failures"] for role in roles] == [len(lost) / 8] * len(roles)
    assert log["rollouts/failed"] == len(lost) / 8


@pytest.mark.parametrize("rewards", [{"first": 1.0, "secnod": -1.0}, [1.0, -1.0], {"first": "won"}, None])
def test_rewards_are_numbers_of_roles(rewards):
    with pytest.raises((RolloutError, EnvironmentFailed), match=r"Takes\.rewards"):
        checked_rewards(rewards, Takes.roles, "Takes.rewards")


def test_a_role_without_a_reward_has_none():
    assert checked_rewards({"second": 2}, Takes.roles, "Takes.rewards") == {"second": 2.0}
    assert checked_rewards({"first": None}, Takes.roles, "Takes.rewards") == {"first": None}


def without(method):
    return type("Partial", (Takes,), {method: None})


@pytest.mark.parametrize(
    ("game", "parts", "changes", "code"),
    [
        (Takes, {}, {"rollouts_per_game": 1}, "game-seats"),
        (Takes, {"seats": {"second": "frozen"}}, {}, "game-seats"),
        (Takes, {"seats": {"frist": "frozen"}}, {}, "game-seats"),
        (Takes, {"eval_seats": {"first": "frozen", "second": "frozen"}}, {}, "game-seats"),
        (type("Twice", (Takes,), {"roles": ("first", "first")}), {}, {}, "game-seats"),
        (without("observe"), {}, {}, "environment-methods"),
        ({"takes": Takes}, {}, {}, "player-type"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused(tmp_path, game, parts, changes, code):
    with pytest.raises(CheckError) as refused:
        trainer(tmp_path, game, parts, **changes)
    assert code in refused.value.codes


def test_what_is_a_game():
    assert is_game(Takes) and not is_game(Takes()) and not is_game(object) and not is_game(None)


# ---- the example's rules, exactly ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example():
    import sys

    sys.path.insert(0, str(EXAMPLES))
    try:
        return run_path(str(EXAMPLES / "tic_tac_toe.py"))
    finally:
        sys.path.remove(str(EXAMPLES))


def test_uniform_players_win_as_often_as_enumeration_says(example):
    """The first player wins 737/1260 of the games, the second 121/420, and 8/63 are drawn."""
    winner = example["winner"]

    @cache
    def shares(board, mark):
        if (won := winner(board)) or "." not in board:
            return tuple(Fraction(won == one) for one in ("x", "o", None))
        free = [cell for cell in range(9) if board[cell] == "."]
        after = [shares(board[:cell] + mark + board[cell + 1 :], "o" if mark == "x" else "x") for cell in free]
        return tuple(sum(one[k] for one in after) / len(free) for k in range(3))

    assert shares("." * 9, "x") == (Fraction(737, 1260), Fraction(121, 420), Fraction(8, 63))


def play(example, first, second):
    game = example["TicTacToe"]()
    game.reset()
    players = {"first": first, "second": second}
    while (role := game.turn()) is not None:
        game.move(role, players[role]([{"role": "user", "content": game.observe(role)}]))
    return game


def test_optimal_play_is_a_draw_and_never_loses(example):
    assert example["value"]("." * 9, "x") == 0
    game = play(example, example["optimal"], example["optimal"])
    assert game.outcome == "draw" and game.rewards() == {"first": 0.0, "second": 0.0}
    draw = random.Random(0)

    def wild(messages):
        board = example["board_of"](messages)
        return str(draw.choice([cell for cell in range(9) if board[cell] == "."]) + 1)

    assert all(play(example, wild, example["optimal"]).rewards()["second"] >= 0 for _ in range(30))
    assert play(example, example["uniform"], example["optimal"]).rewards()["second"] >= 0


def test_an_illegal_move_costs_its_player_alone(example):
    game = play(example, lambda messages: "5", lambda messages: "5")
    assert (game.outcome, game.rewards()) == ("illegal", {"first": 0.0, "second": -2.0})
    assert play(example, lambda messages: "none", example["optimal"]).rewards() == {"first": -2.0, "second": 0.0}
