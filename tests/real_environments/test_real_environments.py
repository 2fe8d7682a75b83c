"""Environments of the package index, unmodified: OpenEnv's echo in its server, marble-v1 of verifiers; and a game and a
team that are made with these packages.

`make test-environments` has the packages; elsewhere these tests are skipped.
"""

import json
import runpy
import sys
from pathlib import Path

import pytest

from covey.core.records import FinishReason
from covey.core.transcript import as_text
from covey.rollout.environments import OpenEnvGame, OpenEnvironment, VerifiersEnvironment
from covey.rollout.environments.agent import PlayedTeam
from covey.rollout.environments.game import PlayedGame
from covey.rollout.user_functions import RolloutFunction, RolloutValidator
from tests.support import records, tiny
from tests.support.playing import TOKENIZER, play, says

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    """The namespace of an example script."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return lambda name: runpy.run_path(str(EXAMPLES / name))


def trained(folder, environment, rows, context=256, **changes):
    """A tiny model after ten steps: the trainer, its rewards and the shares of failed rollouts."""
    from covey import GRPOConfig, GRPOTrainer

    settings = {
        "max_steps": 10,
        "num_generations": 8,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
    }
    made = GRPOTrainer(
        model=tiny.model(scale=3.0, max_position_embeddings=context),
        processing_class=tiny.tokenizer(),
        environment_factory=environment,
        train_dataset=rows,
        args=GRPOConfig(output_dir=str(folder), **{**settings, **changes}),
    )
    made.train()
    logs = [entry for entry in made.state.log_history if "loss" in entry]
    return made, [one["rewards/environment/mean"] for one in logs], [one["rollouts/failed"] for one in logs]


def test_openenvs_echo_is_learned_from_in_ten_steps(tmp_path, example):
    pytest.importorskip("openenv")
    with example("environment_openenv.py")["echo_server"]() as address:
        show = lambda observation: observation["echoed_message"]  # noqa: E731
        echo = OpenEnvironment(address, "message", show=show, max_turns=1, max_environments=1)
        _, rewards, failed = trained(tmp_path, echo, echo.dataset(16), max_completion_length=10)
        prompts = {as_text(row["prompt"]) for row in records.rows(tmp_path)}
    # A tenth for each character, ten tokens at most, some of which are the end or no character.
    assert len(rewards) == 10 and failed == [0.0] * 10
    assert sum(rewards[-3:]) > sum(rewards[:3]) and rewards[-1] <= 1
    assert prompts == {"user: Echo Env environment ready!"}


@pytest.fixture
def duel_server(example):
    """The address of a server of the game."""
    pytest.importorskip("openenv")
    with example("environment_openenv.py")["served"]("duel_server:app", Path(__file__).parent) as address:
        yield address


def duel(address):
    return OpenEnvGame(
        address,
        "text",
        roles=("first", "second"),
        turn=lambda heard: heard["player"] or None,
        show=lambda heard, role: f"You are {role}. You heard {heard['last']}.",
        rewards=lambda heard: heard["points"] or {"first": 0.0, "second": 0.0},  # an answer was cut off
        outcome=lambda heard: "draw" if heard["points"].get("first") == 0 else None,
        instructions="Say more. ",
        max_environments=4,
    )


def test_two_players_meet_in_a_server_of_openenv(duel_server):
    game = duel(duel_server)
    agent = PlayedGame(game, 20.0, RolloutValidator(1000, None))
    first, second = play(agent, says("aa", "b"), game.dataset(1), group=2)  # both say the same
    seats = {"second": lambda messages: "a"}
    (won,) = play(agent, says("aa", "b"), game.dataset(1), group=1, rollouts_per_game=1, seats=seats)
    assert [one.role for one in (first, second)] == ["first", "second"]
    assert [len(one.turn_ends) for one in (first, second)] == [2, 2]
    assert second.prompt[-1]["content"] == "Say more. You are second. You heard aa."
    assert first.extras["outcome"] == "draw" and first.extras["environment_reward"] == 0.0
    assert (won.role, won.extras["environment_reward"]) == ("first", 1.0)
    assert won.completion[1]["content"] == "You are first. You heard a."


def test_both_players_in_a_server_of_openenv_are_trained(tmp_path, duel_server):
    settings = {"rollouts_per_game": 2, "compare": "role", "max_completion_length": 48, "max_steps": 2}
    game = duel(duel_server)
    made, _, failed = trained(tmp_path, game, game.dataset(16), **settings)
    assert failed == [0.0] * 2
    assert {"roles/first/reward", "roles/second/reward"} <= made.state.log_history[0].keys()
    assert {row["role"] for row in records.rows(tmp_path)} == {"first", "second"}


@pytest.fixture
def marble():
    pytest.importorskip("marble_v1")
    return VerifiersEnvironment("marble-v1", options={"task": {"rewards": {"answered_legally": {"weight": 1.0}}}})


def test_marble_is_trained_on_for_ten_steps(tmp_path, marble):
    made, rewards, failed = trained(tmp_path, marble, marble.dataset(16), context=4096, max_completion_length=16)
    assert len(rewards) == 10 and failed == [0.0] * 10
    logged = made.state.log_history[0]
    assert logged["environment/scored"] == logged["environment/answered_legally"] == 0.0  # a random policy


def test_marble_knows_a_right_answer(marble):
    rows = marble.dataset(2)
    solution = marble._tasks[0].data.solution
    agent = RolloutFunction(marble.play, 60, RolloutValidator(1000, None))
    answer = f"So:\n```json\n{json.dumps(solution)}\n```"
    (first,) = play(agent, says(answer), rows[:1], room=4000)
    # One for the ring and one for the rules.
    assert first.extras["environment_reward"] == 2.0
    assert first.extras["environment_scores"] == {"scored": 1.0, "answered_legally": 1.0, "closeness": 1.0}
    (second,) = play(agent, says("no idea"), rows[1:], room=4000)
    assert second.extras["environment_reward"] == 0.0
    assert first.completion == [{"role": "assistant", "content": answer}]
    marble.close()


@pytest.fixture
def talking(monkeypatch):
    pytest.importorskip("verifiers")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    yield lambda **settings: VerifiersEnvironment("talking_taskset", **settings)
    sys.modules.pop("talking_taskset", None)


def test_an_environment_that_answers(talking):
    environment = talking()
    agent = RolloutFunction(environment.play, 60, RolloutValidator(1000, None))
    rollouts = play(agent, says("one", "three"), environment.dataset(3), group=2)
    for rollout in rollouts:
        assert rollout.finish is FinishReason.STOP and rollout.extras["environment_reward"] == 2.5
        assert TOKENIZER.decode(rollout.completion_ids) == (
            "one<eos><bos>user: You said one. Again.<eos><bos>assistant: three<eos>"
        )
    short = play(agent, says("one", "three"), environment.dataset(1), room=20)
    assert short[0].finish is FinishReason.LENGTH and len(short[0].turn_ends) == 1
    failed = play(agent, says("one", "boom"), environment.dataset(1))
    assert "OSError: no luck" in failed[0].error
    environment.close()
    (again,) = play(agent, says("one", "three"), environment.dataset(1))
    assert again.extras["environment_reward"] == 2.5  # its servers have started again
    environment.close()


def test_turns_of_a_verifiers_environment_have_a_limit(talking):
    environment = talking(max_turns=1)
    agent = RolloutFunction(environment.play, 60, RolloutValidator(1000, None))
    (rollout,) = play(agent, says("one", "three"), environment.dataset(1))
    assert rollout.finish is FinishReason.TOOL_BUDGET and len(rollout.turn_ends) == 1
    environment.close()


def test_rows_of_another_dataset_are_refused(talking):
    environment = talking()
    agent = RolloutFunction(environment.play, 60, RolloutValidator(1000, None))
    rows = [{"prompt": [{"role": "user", "content": "x"}], "task": task} for task in (7, None)]
    rollouts = play(agent, says("one"), rows)
    assert all("`dataset(size)`" in rollout.error for rollout in rollouts)
    environment.close()


@pytest.fixture
def team(monkeypatch):
    pytest.importorskip("verifiers")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    yield lambda **settings: VerifiersEnvironment("team_taskset", **settings)
    sys.modules.pop("team_taskset", None)


def test_each_trained_trace_of_a_team_is_a_rollout_and_missing_ones_are_filled_up(team):
    """Three rollouts of an episode: a proposer and one or two solvers; the judge is not trained."""
    environment = team()
    assert environment.roles == ("proposer", "solver", "judge")
    agent = PlayedTeam(environment, 60, RolloutValidator(1000, None))
    spec = {"rollouts_per_game": 3}
    rollouts = play(agent, says("yes"), environment.dataset(2), group=3, **spec)
    two, one = rollouts[:3], rollouts[3:]
    assert [each.role for each in two] == ["proposer", "solver", "solver"]
    assert [each.role for each in one] == ["proposer", "solver", ""]
    assert [each.extras["environment_reward"] for each in two] == [3.0, 3.0, 3.0]
    assert two[1].extras["environment_scores"] == {"solver/length": 3.0}
    assert two[1].prompt[-1]["content"] == "Solve yes."
    assert one[2].finish is FinishReason.ABSENT and not one[2].completion_ids
    environment.close()


def test_opponents_play_agents_of_a_team(team):
    environment = team()
    agent = PlayedTeam(environment, 60, RolloutValidator(1000, None))
    seats = {"proposer": lambda messages: "a sum", "judge": lambda messages: "good"}
    rollouts = play(agent, says("yes"), environment.dataset(1), group=2, rollouts_per_game=2, seats=seats)
    assert [each.role for each in rollouts] == ["solver", "solver"]
    assert rollouts[0].prompt[-1]["content"] == "Solve a sum."
    environment.close()


def test_a_team_is_trained(tmp_path, team):
    environment = team()
    settings = {"rollouts_per_game": 3, "num_generations": 6, "per_device_train_batch_size": 6, "compare": "role"}
    settings |= {"max_steps": 2, "gradient_accumulation_steps": 2, "max_completion_length": 8}
    made, rewards, failed = trained(tmp_path, environment, environment.dataset(2), **settings)
    assert len(rewards) == 2 and failed == [0.0] * 2
    assert {"roles/proposer/reward", "roles/solver/reward"} <= made.state.log_history[0].keys()
