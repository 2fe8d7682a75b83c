"""Opponents that are not trained: a frozen policy, earlier ones, functions, and games that fail alone."""

import itertools

import pytest
import torch

from covey.core.findings import CheckError
from covey.core.records import FinishReason, PromptSample
from covey.observability.record_files import FOLDER, files, read_rows
from covey.trainer.engines.opponents import FrozenEngine, PastPolicies, frozen_copy
from tests.support import runs, tiny


def points(points, **columns):
    return points


async def against(row, engine):
    """One turn against the opponent, whose turn is part of the prompt of the second."""
    opponent = engine.seat("other").begin(f"{row['prompt']} other")
    said = await opponent.sample()
    episode = engine.begin(f"{row['prompt']} {said.text}")
    await episode.sample()
    return episode.done(role="first", points=float(sum(episode.completion_ids) % 7), said=said.text)


def made(folder, seats, function=against, **changes):
    parts = {"rollout_func": function, "reward_funcs": points, "seats": seats}
    return runs.trainer(folder, parts=parts, **{"learning_rate": 0.5, **changes})


def said(trainer, key=("train", 9)):
    """What the opponent says in some games, the same ones in every call."""
    samples = [PromptSample(row, number, 0) for number, row in enumerate(tiny.rows(4))]
    rollouts = trainer.collector.collect(samples, trainer.rollouts.params, key)
    assert all(rollout.error is None for rollout in rollouts)
    return [rollout.extras["said"] for rollout in rollouts]


@pytest.mark.slow
def test_a_frozen_seat_does_not_learn(tmp_path):
    trainer = made(tmp_path, {"other": "frozen"}, max_steps=1)
    before = said(trainer)
    trainer.train()
    assert said(trainer) == before and len(set(before)) > 1


@pytest.mark.slow
def test_the_policy_of_the_step_before_is_an_opponent(tmp_path):
    """policy:1 with one copy kept: in step n the opponent says what the policy of step n - 1 would have said."""
    trainer = made(tmp_path, {"other": "policy:1"}, max_steps=3, opponents_kept=1)
    assert trainer.run.opponents == (0, 2), "the plan of memory counts the copy that is kept and the next one"
    (past,) = trainer.collector.opponents
    assert isinstance(past, PastPolicies)
    seen, keep = [], past.keep

    def keeping(step, copies):
        keep(step, copies)
        policy = [one.detach().clone() for one in trainer.policy.parameters()]
        (chosen, age) = past.chosen(("any",))
        model = next(model for model, engine in past.copies.values() if engine is chosen)
        seen.append((age, policy, [one.clone() for one in model.parameters()]))

    past.keep = keeping
    trainer.train()
    assert [age for age, _, _ in seen] == [0, 1, 1]
    for (_, before, _), (_, now, opponent) in itertools.pairwise(seen):
        assert all(map(torch.equal, opponent, before)) and not all(map(torch.equal, opponent, now))


@pytest.mark.slow
def test_rewards_against_earlier_policies_are_logged_by_their_age(tmp_path):
    trainer = made(tmp_path, {"other": "policy:1"}, max_steps=3, opponents_kept=2)
    trainer.train()
    logs = trainer.state.log_history
    assert "opponents/0/reward" in logs[0] and "opponents/1/reward" in logs[1]
    assert {name for name in logs[2] if name.startswith("opponents/")} <= {"opponents/1/reward", "opponents/2/reward"}


def test_rewards_against_earlier_policies_have_the_weights_of_their_source(tmp_path):
    """Rewards of source "b" count ten times, for the rewards of the role and of its opponents alike."""
    first, second = tiny.rows(8)[:4], tiny.rows(8)[4:]
    parts = {"rollout_func": against, "reward_funcs": points, "seats": {"other": "policy:1"}}
    parts |= {"train_dataset": {"a": first, "b": second}, "sources": {"b": {"reward_weights": [10.0]}}}
    trainer = runs.trainer(tmp_path, parts=parts, max_steps=1)
    trainer.train()
    assert runs.history(trainer, "opponents/0/reward") == runs.history(trainer, "roles/first/reward")


@pytest.mark.slow
def test_a_resumed_run_plays_the_same_opponents(tmp_path):
    settings = {"max_steps": 3, "opponents_kept": 2, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2}
    whole = made(tmp_path, {"other": "policy:1"}, **settings)
    whole.train()
    resumed = made(tmp_path, {"other": "policy:1"}, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(map(torch.equal, runs.weights(resumed), runs.weights(whole)))
    assert sorted(resumed.collector.opponents[0].copies) == sorted(whole.collector.opponents[0].copies)


def test_copies_share_what_is_not_trained():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny.model(), LoraConfig(r=2, target_modules=["q_proj"]))
    copied = dict(frozen_copy(model).named_parameters())
    for name, weight in model.named_parameters():
        assert (copied[name] is weight) == (not weight.requires_grad)
        assert torch.equal(copied[name], weight)


def test_copies_are_taken_at_their_time_and_dropped():
    """Every 2 steps, 2 kept: those at least 2 steps old are opponents, and one that is not old enough yet is kept."""
    closed = []

    class Engine(FrozenEngine):
        def __init__(self, number):
            self.number = number

        def close(self):
            closed.append(self.number)

    past = PastPolicies(2, 2, lambda: torch.nn.Linear(1, 1), lambda model: Engine(past.step))
    kept = []
    for step in range(9):
        past.keep(step)
        kept.append(sorted(past.copies))
    assert kept[:4] == [[0], [0], [0, 2], [0, 2]] and kept[-1] == [4, 6, 8]
    assert closed == [0, 2]
    ages = {past.chosen(("game", number))[1] for number in range(20)}
    assert ages == {2, 4}
    assert past.chosen(("game", 3)) == past.chosen(("game", 3))
    past.keep(10, copies=False)  # an evaluation after two more steps, before the next rollout batch
    assert sorted(past.copies) == [4, 6, 8]
    assert {past.chosen(("game", number))[1] for number in range(20)} == {2, 4, 6}


@pytest.mark.slow
def test_an_evaluation_meets_opponents_of_the_policy_as_it_is_then(tmp_path):
    """After 2 steps, before a third rollout batch, the copies of steps 0 and 1 are 2 and 1 steps old."""
    trainer = made(tmp_path, {"other": "policy:1"}, max_steps=2, opponents_kept=2)
    trainer.train()
    (past,) = trainer.collector.opponents
    before = sorted(past.copies)
    trainer.evaluate(tiny.rows(2))
    assert before == sorted(past.copies) == [0, 1]
    assert {past.chosen(("game", number))[1] for number in range(20)} == {1, 2}


def test_a_function_may_be_an_opponent_and_another_one_in_evaluations(tmp_path):
    def one(messages):
        return f"one of {len(messages)}"

    async def other(messages):
        return "other"

    parts = {"rollout_func": against, "reward_funcs": points, "seats": {"other": one}, "eval_seats": {"other": other}}
    trainer = runs.trainer(tmp_path, parts=parts)
    assert set(said(trainer)) == {"one of 1"}
    assert set(said(trainer, ("eval", 0))) == {"other"}


def test_a_seat_that_is_not_there_fails_the_rollout_with_its_name(tmp_path):
    trainer = made(tmp_path, {"othre": "frozen"})
    with pytest.raises(ValueError, match=r"no seat 'other'.*Did you mean 'othre'"):
        trainer.train()


@pytest.mark.parametrize("seat", ["frozn", "policy:", "policy:0", 7, None])
def test_a_seat_is_of_a_known_kind(tmp_path, seat):
    with pytest.raises(ValueError, match="the seat 'other' is"):
        made(tmp_path, {"other": seat})


def test_earlier_policies_are_not_sampled_ahead_of_training(tmp_path):
    from tests.support.engines import CopyEngine

    parts = {"rollout_func": against, "reward_funcs": points, "seats": {"other": "policy:1"}}
    with pytest.raises(CheckError) as refused:
        runs.trainer(tmp_path, parts={**parts, "engine": CopyEngine(tiny.model())}, max_staleness=1)
    assert refused.value.codes == ["seat-async"]


def test_the_rollout_of_a_seat_is_refused(tmp_path):
    async def returns_it(row, engine):
        episode = engine.begin()
        await episode.sample()
        return episode.done(role="judge", points=1.0)

    trainer = made(tmp_path, {"judge": "frozen"}, returns_it)
    with pytest.raises(ValueError, match="role 'judge' is a seat"):
        trainer.train()


async def plays(row, engine, n):
    """One game of n seats; that of an odd row and number 1 fails."""
    assert n == 2
    episodes = {role: engine.begin(f"{row['prompt']} {role}") for role in ("first", "second")}
    for episode in episodes.values():
        await episode.sample()
    if engine.sibling == 2:
        raise RuntimeError("the board fell")
    return [episode.done(role=role, points=1.0 * sum(episode.completion_ids)) for role, episode in episodes.items()]


def test_a_function_is_called_for_each_game_and_a_game_fails_alone(tmp_path):
    parts = {"rollout_func": plays, "reward_funcs": points}
    runs.trainer(tmp_path, parts=parts, rollouts_per_game=2, num_generations=8, compare="role", max_steps=1).train()
    rows = read_rows(files(tmp_path / FOLDER)[0])
    assert [(row["sample"], row["game"]) for row in rows] == [(sample, sample // 2) for sample in range(8)]
    failed = [row["sample"] for row in rows if row["finish"] == str(FinishReason.ERROR)]
    assert failed == [2, 3]
    assert [row["reward/points"] is None for row in rows] == [sample in failed for sample in range(8)]


def test_a_game_that_fails_before_its_first_move_has_no_length(tmp_path):
    async def falls(row, engine, n):
        if engine.sibling == 2:
            raise RuntimeError("the board fell")
        return await plays(row, engine, n)

    parts = {"rollout_func": falls, "reward_funcs": points}
    run = runs.trainer(tmp_path, parts=parts, rollouts_per_game=2, num_generations=8, compare="role", max_steps=1)
    run.train()
    played = [row["length"] for row in read_rows(files(tmp_path / FOLDER)[0]) if row["sample"] not in (2, 3)]
    assert runs.history(run, "completions/min_length") == [min(played)] and min(played) > 0
    assert runs.history(run, "completions/mean_length") == [sum(played) / 6]
    assert runs.history(run, "roles/first/mean_length") == [sum(played[::2]) / 3]
    assert runs.history(run, "rollouts/failed") == [0.25]


class Guess:
    """Each player says one text; every game is a draw."""

    roles = ("first", "second")

    def reset(self):
        self.said = []

    def turn(self):
        return self.roles[len(self.said)] if len(self.said) < 2 else None

    def observe(self, role):
        return role

    def move(self, role, text):
        self.said.append(text)

    def rewards(self):
        return dict.fromkeys(self.roles, 0.0)


@pytest.mark.filterwarnings("ignore")
def test_a_game_has_no_tools_whose_calls_are_counted(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"game {number}"}]} for number in range(8)]
    parts = {"environment_factory": Guess, "reward_funcs": None, "train_dataset": rows}
    run = runs.trainer(tmp_path, parts=parts, rollouts_per_game=2, num_generations=4, max_steps=1)
    run.train()
    assert "roles/first/reward" in run.state.log_history[0]
    assert not [name for name in run.state.log_history[0] if name.startswith("tools/")]
