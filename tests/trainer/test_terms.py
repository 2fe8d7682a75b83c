"""A term of the loss in a run: its weights add up to one over each step, whatever rollout batches lie in it."""

import pytest

from covey.algorithms import terms
from covey.core.terms import TokenTerm, term_weights
from tests.support import runs

THIRD = TokenTerm(
    "extra",
    lambda batch: (batch.token_ids % 3 == 0).float(),
    lambda x: -x.logprobs,
    lambda step: 0.5,
)


def trained(folder, monkeypatch, **changes):
    """A trainer with the term, and the total weight of the term in each of its optimizer steps."""
    monkeypatch.setattr(terms, "TERMS", [lambda config: THIRD])
    trainer, totals = runs.trainer(folder, **changes), []
    plan = trainer.updates.plan

    def planning(*given):
        planned = plan(*given)
        parts = [part for step in planned.micro_steps for part in step]
        totals.append(planned.scale * sum(term_weights(part, "extra").sum().item() for part in parts))
        return planned

    trainer.updates.plan = planning
    trainer.train()
    return trainer, totals


@pytest.mark.parametrize(
    ("settings", "steps_of_a_batch"),
    [
        ({}, 1),
        ({"steps_per_generation": 1}, 1),  # two rollout batches in a step
        ({"steps_per_generation": 4}, 2),  # two steps of a rollout batch, with an equal share of its count each
    ],
)
def test_weights_of_a_term_add_up_to_one_over_a_step(tmp_path, monkeypatch, settings, steps_of_a_batch):
    trainer, totals = trained(tmp_path, monkeypatch, **settings)
    assert len(totals) == 2
    if steps_of_a_batch == 1:
        assert totals == pytest.approx([1.0, 1.0])
    else:
        assert sum(totals) == pytest.approx(2.0)
    assert all(tokens > 0 for tokens in runs.history(trainer, "extra/tokens"))
    assert all(loss > 0 for loss in runs.history(trainer, "extra/loss"))


def test_a_term_moves_the_policy_where_no_reward_does(tmp_path, monkeypatch):
    changes = {"parts": {"reward_funcs": lambda completions, **_: [0.0] * len(completions)}, "max_steps": 1}
    before = runs.weights(runs.trainer(tmp_path / "none", **changes))
    trainer, _ = trained(tmp_path / "extra", monkeypatch, **changes)
    assert any(not (new == old).all() for new, old in zip(runs.weights(trainer), before, strict=True))
