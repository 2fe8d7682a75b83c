"""Tic-tac-toe of a tiny model: how it is judged, and that a short run can be read."""

import pytest
import torch
from benchmarks.records import Records
from benchmarks.tic_tac_toe import COMPARED, LETTERS, SEATS, VOCABULARY, beginner, judged, table, train

from benchmarks import tic_tac_toe


class Perfect(torch.nn.Module):
    """A model that says what a function of the last board says."""

    def __init__(self, player):
        super().__init__()
        self.player = player

    def forward(self, input_ids):
        logits = torch.full((*input_ids.shape, len(VOCABULARY)), -1e9)
        for row, ids in enumerate(input_ids.tolist()):
            board = "".join(LETTERS[id] for id in ids[-9:])
            logits[row, -1, VOCABULARY[self.player([{"role": "user", "content": board}])]] = 0.0
        return type("Output", (), {"logits": logits})


def test_an_optimal_player_never_loses_and_the_illegal_one_always_does():
    from benchmarks.tic_tac_toe import optimal

    found = judged(Perfect(optimal), games=40, seed=0)
    assert found["first against optimal"] == found["second against optimal"] == found["illegal"] == 0
    assert found["first against uniform"] > 0.8 and found["second against uniform"] > 0.6
    stubborn = judged(Perfect(lambda messages: "."), games=4, seed=0)
    assert all(stubborn[name] == -1 for name in SEATS) and stubborn["illegal"] == 1


@pytest.mark.slow
def test_a_short_run_is_judged_at_both_ends():
    found = train(beginner(0, rules=0), "role", seed=0, steps=2, games=8)
    assert all(len(curve) == 2 for curve in found.values()) and set(found) == {*SEATS, "illegal"}
    assert "| role |" in table({"role": [found]})


@pytest.mark.slow
def test_supervised_steps_teach_which_moves_are_legal():
    """A random model loses nearly all games by an illegal move; after 200 steps fewer than half."""
    before, after = (judged(beginner(0, rules), games=64, seed=0)["illegal"] for rules in (0, 200))
    assert before > 0.8 and after < 0.5


@pytest.mark.slow
def test_finished_runs_are_read_and_a_fall_is_counted(tmp_path, capsys):
    """Both seats go from 0.5 to 0.1 against the uniform player with `group`, and stay otherwise: one collapse."""
    records = Records(tmp_path / "runs.jsonl")
    for compare in COMPARED:
        curves = {name: [-1.0, 0.5, 0.1 if compare == "group" else 0.5] for name in (*SEATS, "illegal")}
        records.add(compare=compare, seed=0, steps=50, rules=10, rate=3e-4, curves=curves)
    sizes = ["--seeds", "1", "--steps", "50", "--rules", "10"]
    given = [*sizes, "--records", str(records.path), "--plot", str(tmp_path / "it.png")]
    tic_tac_toe.main(given)
    said = capsys.readouterr().out
    assert "group: 1 of 1 runs fall by more than 0.2; the largest fall is 0.40" in said
    assert "role: 0 of 1 runs" in said and (tmp_path / "it.png").stat().st_size > 1000
