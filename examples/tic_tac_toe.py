"""Self-play: a model learns tic-tac-toe by playing both seats, and is evaluated against players that never change.

Each seat is a rollout with its own reward, compared with the same seat's other games (compare="role").
"""

import random
from functools import cache

from common import parser, settings
from covey import GRPOConfig, GRPOTrainer

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]
RULES = "You play tic-tac-toe as {mark}. Cells are numbered 1 to 9, row by row. Answer with the number of a free cell."
MARKS = {"first": "x", "second": "o"}


def winner(board: str) -> str | None:
    return next((board[i] for i, j, k in LINES if board[i] != "." and board[i] == board[j] == board[k]), None)


class TicTacToe:
    """A game for `environment_factory`: the policy plays every role that no opponent has."""

    roles = ("first", "second")

    def reset(self) -> None:
        self.board, self.lost = "." * 9, None

    def turn(self) -> str | None:
        """The role that moves next; None at the end."""
        if self.lost or winner(self.board) or "." not in self.board:
            return None
        return self.roles[(9 - self.board.count(".")) % 2]

    def observe(self, role: str) -> str:
        rows = "\n".join(self.board[start : start + 3] for start in (0, 3, 6))
        return f"{RULES.format(mark=MARKS[role])}\n{rows}"

    def move(self, role: str, text: str) -> None:
        """Play the first digit of an answer; another move than a free cell loses."""
        digit = next((int(character) for character in text if character in "123456789"), 0)
        if not digit or self.board[digit - 1] != ".":
            self.lost = role
            return
        self.board = self.board[: digit - 1] + MARKS[role] + self.board[digit:]

    @property
    def outcome(self) -> str:
        return "illegal" if self.lost else winner(self.board) or "draw"

    def rewards(self) -> dict[str, float]:
        """1 for the winner and -1 for the loser, 0 for a draw; an illegal move costs 2 and pays the other nothing."""
        if self.lost:
            return {role: -2.0 * (role == self.lost) for role in self.roles}
        won = {"x": 1.0, "o": -1.0}.get(winner(self.board) or "", 0.0)
        return {"first": won, "second": -won}


def board_of(messages: list) -> str:
    return "".join(messages[-1]["content"].splitlines()[-3:])


def uniform(messages: list) -> str:
    """A player that takes any free cell, which depends on the board alone."""
    board = board_of(messages)
    return str(random.Random(board).choice([cell for cell in range(9) if board[cell] == "."]) + 1)


@cache
def value(board: str, mark: str) -> int:
    """Result for x, +1, 0 or -1, where both play as well as can be and `mark` moves."""
    if (won := winner(board)) or "." not in board:
        return {"x": 1, "o": -1}.get(won or "", 0)
    return (max if mark == "x" else min)(value(*after(board, mark, cell)) for cell in range(9) if board[cell] == ".")


def after(board: str, mark: str, cell: int) -> tuple[str, str]:
    return board[:cell] + mark + board[cell + 1 :], "o" if mark == "x" else "x"


def optimal(messages: list) -> str:
    """A player that never loses."""
    board = board_of(messages)
    mark = "x" if board.count("x") == board.count("o") else "o"
    free = [cell for cell in range(9) if board[cell] == "."]
    return str((max if mark == "x" else min)(free, key=lambda cell: value(*after(board, mark, cell))) + 1)


def main():
    options = parser(__doc__).parse_args()
    changes = {
        "num_generations": 8,  # four games of each prompt
        "rollouts_per_game": 2,
        "compare": "role",
        "scale_rewards": "none",
        "max_completion_length": 256,  # of all turns of a seat
        "max_turn_length": 8,
        "per_device_eval_batch_size": 8,
        "eval_strategy": "steps",
        "eval_steps": max(options.max_steps // 4, 1),
    }
    trainer = GRPOTrainer(
        model=options.model,
        args=GRPOConfig(**{**settings(options), **changes}),
        environment_factory=TicTacToe,
        eval_dataset=[{"prompt": None, "seed": seed} for seed in range(2)],
        eval_seats={"second": uniform},  # or optimal
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
