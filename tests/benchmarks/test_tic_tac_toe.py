"""Tic-tac-toe of a tiny model: how it is judged, and that a short run can be read."""

import pytest
import torch
from benchmarks.tic_tac_toe import LETTERS, SEATS, VOCABULARY, judged, table, train


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
    found = train("role", seed=0, steps=2, games=8)
    assert all(len(curve) == 2 for curve in found.values()) and set(found) == {*SEATS, "illegal"}
    assert "| role |" in table({"role": [found]})
