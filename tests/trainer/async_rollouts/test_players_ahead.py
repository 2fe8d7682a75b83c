"""Rollout functions and tools while later rollout batches are sampled, evaluated, stopped and resumed."""

import asyncio

import pytest
import torch

from covey.engines.scripted import ScriptedEngine
from covey.rollout import runner
from tests.support import runs, tiny
from tests.support.engines import CopyEngine, scripted
from tests.support.players import PLAYERS, tree, twice
from tests.trainer.agents.test_tools import CALL, add, says
from tests.trainer.agents.test_tools import trainer as tool_trainer
from tests.trainer.async_rollouts.test_staleness import noted

pytestmark = pytest.mark.filterwarnings("ignore:the engine reported no log-probs")
LONG = {"max_completion_length": 16, "max_steps": 6}
PLAIN = {"optim": "sgd", "learning_rate": 0.5}
"""Steps in proportion to gradients, where these may differ in their last bits: Adam's are as long for rounding."""


def play(folder, player, staleness, engine=None, parts=None, **settings):
    engine = scripted() if engine is None else engine
    settings = {**LONG, "max_staleness": staleness, **settings}
    if isinstance(engine, ScriptedEngine):
        settings["engine_parity"] = "off"
    given = {"engine": engine, "rollout_func": PLAYERS.get(player, player), **(parts or {})}
    return runs.trainer(folder, parts=given, **settings)


def trained(trainer):
    """The trainer, after it has trained, with what it trained on."""
    found = noted(trainer)
    trainer.train()
    return trainer, [each[:3] for each in found]


def same(one, other, *names, exact=True):
    """Which rollouts an engine computes together depends on the moment they ask, so its numbers do in their last bits.

    Tokens do not, and neither does a loss that makes nothing of the engine's log-probs.
    """
    for a, b in zip(runs.weights(one), runs.weights(other), strict=True):
        torch.testing.assert_close(a, b, rtol=0 if exact else 1e-3, atol=0 if exact else 1e-4)
    for name in ("reward", "num_tokens", *names):
        assert runs.history(one, name) == runs.history(other, name)


ONE_BY_DEFAULT = [pytest.param(name, marks=[pytest.mark.slow] * (name != "a group")) for name in PLAYERS]


@pytest.mark.slow
@pytest.mark.parametrize("player", ONE_BY_DEFAULT)
def test_samples_are_those_of_the_synchronous_run(tmp_path, player):
    found = {}
    for staleness in (0, 1, 4):
        trainer = play(tmp_path / str(staleness), player, staleness)
        found[staleness] = noted(trainer)
        trainer.train()
    for staleness in (1, 4):
        assert [each[:3] for each in found[staleness]] == [each[:3] for each in found[0]]
        for step, _, _, versions in found[staleness]:
            assert all(0 <= step - version <= staleness for version in versions)


@pytest.mark.slow
@pytest.mark.parametrize("player", ONE_BY_DEFAULT)
def test_two_runs_are_equal(tmp_path, player):
    parts = {"rollout_func": PLAYERS[player]}
    (first, found), (second, again) = (trained(runs.trainer(tmp_path / i, parts=parts, **LONG)) for i in "ab")
    assert found == again
    same(first, second, "loss", "grad_norm", "rollouts/turns")


@pytest.mark.slow
@pytest.mark.parametrize("player", ONE_BY_DEFAULT)
def test_two_runs_ahead_are_equal(tmp_path, player):
    (first, found), (second, again) = (
        trained(play(tmp_path / i, player, 2, CopyEngine(tiny.model()), **PLAIN)) for i in "ab"
    )
    assert found == again
    same(first, second, "sampling/staleness/mean", exact=False)


@pytest.mark.slow
@pytest.mark.parametrize("player", ONE_BY_DEFAULT)
@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_resuming_goes_on_as_if_nothing_had_happened(tmp_path, player, staleness):
    cycle = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 10}

    def make(folder, **saving):
        if not staleness:
            parts = {"rollout_func": PLAYERS[player]}
            return runs.trainer(tmp_path / folder, parts=parts, **{**LONG, **cycle, **saving})
        return play(tmp_path / folder, player, staleness, CopyEngine(tiny.model()), **cycle, **saving, **PLAIN)

    straight, whole = trained(make("a"))
    make("b", save_strategy="steps", save_steps=3).train()
    resumed = make("b")
    found = noted(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-3"))
    assert [each[:3] for each in found] == whole[-len(found) :]
    same(straight, resumed, "rollouts/turns", exact=not staleness)


@pytest.mark.slow
def test_an_evaluation_is_played_without_effect_on_the_run(tmp_path):
    straight = play(tmp_path / "a", "one rollout", 1, CopyEngine(tiny.model()), **PLAIN)
    straight.train()
    looks = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    parts = {"eval_dataset": tiny.rows(2)}
    evaluated = play(tmp_path / "b", "one rollout", 1, CopyEngine(tiny.model()), parts, **looks, **PLAIN)
    evaluated.train()
    assert len(runs.history(evaluated, "eval_rollouts/turns")) == 3
    same(straight, evaluated, exact=False)


@pytest.mark.slow
def test_what_a_checkpoint_cannot_hold_is_sampled_again(tmp_path):
    class Score:
        """No plain value."""

    async def keeps(row, engine):
        rollout = await twice(row, engine)
        rollout.extras["score"] = Score()
        return rollout

    saved = play(tmp_path, keeps, 2, save_strategy="steps", save_steps=3)
    with pytest.warns(UserWarning, match=r"samples them again: a rollout's extras\['score'\] is a Score"):
        saved.train()
    resumed = play(tmp_path, keeps, 2)
    found = noted(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    straight = play(tmp_path / "straight", keeps, 0)
    expected = noted(straight)
    straight.train()
    assert [each[:3] for each in found] == [each[:3] for each in expected[3:]]
    assert all(step - version <= 2 for step, _, _, versions in found for version in versions)


@pytest.mark.slow
@pytest.mark.parametrize(("player", "starts"), [("one rollout", 4), ("a group", 1)])
def test_first_turns_are_sampled_with_the_weights_at_launch(tmp_path, player, starts, monkeypatch):
    """The engine has them all before it gets newer weights, though functions run on another thread, and slowly."""
    monkeypatch.setattr(runner, "SUBMISSION_SECONDS", 30.0)  # the machine may be busy

    async def slowly(row, engine):
        await asyncio.sleep(0.2)  # longer than a step takes
        return await twice(row, engine)

    async def slow_tree(row, engine, n):
        await asyncio.sleep(0.2)
        return await tree(row, engine, n)

    engine = scripted()
    play(tmp_path, slowly if player == "one rollout" else slow_tree, 2, engine).train()
    first = [one for one in engine.served if len(one.request.prompt_ids) == 4]
    versions = [one.version for one in first for _ in one.request.seeds]  # however many became one request
    launched = [0] * 6 + [1] * 2 + [2] * 2 + [3] * 2  # six rollout batches of two prompts
    assert sorted(versions) == [version for version in launched for _ in range(starts)]


@pytest.mark.slow
def test_a_function_that_begins_late_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "SUBMISSION_SECONDS", 0.05)

    async def late(row, engine):
        await asyncio.sleep(0.5)
        return await twice(row, engine)

    trainer = play(tmp_path, late, 4, max_steps=2)
    found = noted(trainer)
    trainer.train()
    assert [step for step, *_ in found] == [0, 1]


@pytest.mark.slow
def test_tools_are_called_ahead(tmp_path):
    found = {}
    for staleness in (0, 2):
        parts = {"tools": [add]}
        engine = says("Let me see. " + CALL, "5")
        trained = tool_trainer(tmp_path / str(staleness), engine, parts=parts, max_steps=4, max_staleness=staleness)
        found[staleness] = noted(trained)
        trained.train()
        assert runs.history(trained, "tools/call_frequency") == [1.0] * 4
    assert [each[:3] for each in found[2]] == [each[:3] for each in found[0]]
