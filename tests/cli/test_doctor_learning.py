"""Trial updates of `covey doctor`, whose sizes are given."""

from types import SimpleNamespace

import pytest
import torch

from covey.cli.doctor import learning
from covey.cli.doctor.learning import TrialUpdate
from covey.core.findings import ranked


def found(monkeypatch, moved, rate=1e-9):
    """Findings of a run whose updates change log-probs by `moved(learning rate)`."""

    class Trials:
        def __init__(self, run):
            self.run = run

        def update(self, learning_rate):
            return TrialUpdate(moved(learning_rate), 0.1, True)

    monkeypatch.setattr(learning, "Trials", Trials)
    monkeypatch.setattr(learning, "scheduled", lambda trainer, steps: 1.0)
    algebra = SimpleNamespace(generation_batch_size=8)
    trainer = SimpleNamespace(context=SimpleNamespace(algebra=algebra), model=object())
    base = SimpleNamespace(rollouts=[None] * 8, seconds=1.0, spread=torch.zeros(1))
    run = SimpleNamespace(args=SimpleNamespace(learning_rate=rate), steps=100, trainer=trainer, base=base, summary={})
    return ranked(learning.learning_rate(run))


def test_a_rate_is_proposed_where_its_updates_learn(monkeypatch):
    (low,) = found(monkeypatch, lambda rate: 10 * rate)  # 0.02 nats an update at 0.002: two nats in 100 steps
    assert (low.code, low.level, low.fix) == ("learning-rate-low", "error", "Set learning_rate=0.002.")


@pytest.mark.parametrize("moved", [lambda rate: 0.0, lambda rate: 1e-6 * rate])
def test_no_rate_is_proposed_where_none_helps(moved, monkeypatch):
    """A cold policy, or frozen weights: the largest rate that is proposed would change nothing either."""
    (low,) = found(monkeypatch, moved)
    assert low.code == "learning-rate-low" and "Set learning_rate" not in low.fix
