"""OpenEnv's environments as text environments, with clients that answer as OpenEnv's do."""

from types import SimpleNamespace
from typing import ClassVar

import pytest

from covey.core.records import FinishReason
from covey.rollout.environments import OpenEnvGame, OpenEnvironment
from covey.rollout.environments.game import PlayedGame
from covey.rollout.user_functions import RolloutValidator
from tests.support.playing import play, says, text_agent


class Client:
    """Echoes, as the environment does that `openenv init` makes; in the synchronous form that `sync` gives."""

    def __init__(self, capacity=True):
        self.closed = False
        self.capacity = capacity

    def sync(self):
        return self

    def reset(self, **given):
        if not self.capacity:
            raise RuntimeError("Server error: Server at capacity: 1/1 sessions active. (code: CAPACITY_REACHED)")
        return SimpleNamespace(observation={"echoed_message": f"ready {given}", "done": False}, reward=None, done=False)

    def step(self, action):
        text = action["message"]
        seen = {"echoed_message": text, "message_length": len(text), "done": False, "reward": 0.1}
        return SimpleNamespace(observation=seen, reward=len(text) / 10, done=text == "bye")

    def close(self):
        self.closed = True


def test_an_episode():
    environment = OpenEnvironment(Client, "message", instructions="Talk. ", max_turns=3)
    engine = says("hi", "bye")
    agent = text_agent(environment)
    (rollout,) = play(agent, engine, environment.dataset(1, seed=5))
    assert engine.received[0] == "<bos>user: Talk. ready {'seed': 5}<eos><bos>assistant: "
    assert rollout.completion[1] == {"role": "user", "content": '{"echoed_message": "hi", "message_length": 2}'}
    assert rollout.extras["environment_reward"] == pytest.approx(0.5) and rollout.finish is FinishReason.STOP
    client = rollout.extras["environments"].client
    assert not client.closed
    agent.close()
    assert client.closed


def test_rows_may_hold_what_reset_takes():
    environment = OpenEnvironment(Client, "message")
    rows = environment.dataset(resets=[{"task": "easy"}, {"task": "hard", "seed": None}])
    engine = says("bye")
    play(text_agent(environment), engine, rows)
    assert any(
        "ready {'task': 'hard'}" in told for told in engine.received
    )  # a table holds None where a row says nothing
    with pytest.raises(ValueError, match=r"either `size`.*or `resets`"):
        environment.dataset()


def test_actions_may_be_made_by_a_function():
    def action(text):
        if not text.isalpha():
            raise ValueError("Letters only.")
        return {"message": text}

    environment = OpenEnvironment(Client, action, invalid_reward=-1.0)
    (rollout,) = play(text_agent(environment), says("12", "bye"), environment.dataset(1))
    assert rollout.completion[1]["content"] == "Letters only."
    assert rollout.extras["environment_reward"] == pytest.approx(-1 + 0.3)


def test_observations_may_be_shown_in_another_way():
    environment = OpenEnvironment(Client, "message", show=lambda observation: observation["echoed_message"].upper())
    (rollout,) = play(text_agent(environment), says("hi", "bye"), environment.dataset(1))
    assert rollout.completion[1]["content"] == "HI"


def test_a_full_server_says_what_to_do():
    environment = OpenEnvironment(lambda: Client(capacity=False), "message")
    (rollout,) = play(text_agent(environment), says("hi"), environment.dataset(1))
    assert "CAPACITY_REACHED" in rollout.error and "Set max_environments" in rollout.error


# ---- games of several players ----------------------------------------------------------------------------------------


class Counting:
    """An environment of two players, by an asynchronous client: they add 1 or 2, and who reaches 3 wins."""

    made: ClassVar[list] = []

    def __init__(self):
        self.count, self.closed = 0, False
        self.made.append(self)

    async def reset(self, start=0):
        self.count = start
        return SimpleNamespace(observation={"count": start}, reward=None, done=False)

    async def step(self, action):
        self.count += action["add"]
        done = self.count >= 3
        return SimpleNamespace(observation={"count": self.count}, reward=float(done), done=done)

    async def close(self):
        self.closed = True


def counting(**changes):
    def action(text):
        if text not in ("1", "2"):
            raise ValueError("1 or 2")
        return {"add": int(text)}

    return OpenEnvGame(Counting, action, **{"roles": ("first", "second"), "instructions": "Add. ", **changes})


def played(game, engine, group=2, **row):
    Counting.made.clear()
    agent = PlayedGame(game, 20.0, RolloutValidator(1000, None))
    rows = game.dataset(resets=[row])
    found = play(agent, engine, rows, group=group)
    assert all(client.closed for client in Counting.made)
    return found


def test_each_player_of_a_game_is_a_rollout():
    """0, 1 by the first, 2 by the second, 3 by the first, who is rewarded for the last move."""
    engine = says("1", "1")
    first, second = played(counting(), engine)
    assert [one.role for one in (first, second)] == ["first", "second"]
    assert [len(one.turn_ends) for one in (first, second)] == [2, 1]
    assert first.extras["environment_reward"] == 1.0 and second.extras["environment_reward"] == 0.0
    assert engine.received[0] == '<bos>user: Add. {"count": 0}<eos><bos>assistant: '
    assert first.completion[1]["content"] == '{"count": 2}'


def test_rewards_turns_and_what_is_shown_may_be_functions():
    game = counting(
        turn=lambda seen: None if seen["count"] > 1 else "second",
        show=lambda seen, role: f"{role} sees {seen['count']}",
        rewards=lambda seen: {"first": -1.0, "second": 1.0},
        outcome=lambda seen: "draw",
    )
    first, second = played(game, says("1"), start=1)
    assert (first.turn_ends, len(second.turn_ends)) == ([], 1)
    assert [one.extras["environment_reward"] for one in (first, second)] == [-1.0, 1.0]
    assert first.extras["outcome"] == "draw" and second.prompt[-1]["content"] == "Add. second sees 1"


def test_a_move_that_is_no_action_ends_a_game():
    first, second = played(counting(invalid_reward=-2.0), says("x"))
    assert (first.extras["environment_reward"], second.extras["environment_reward"]) == (-2.0, None)
    assert first.extras["outcome"] == "invalid"


def test_games_wait_for_sessions_of_the_server():
    most = []

    class Watched(Counting):
        async def reset(self, start=0):
            most.append(sum(not one.closed for one in self.made))
            return await super().reset(start)

    game = counting(max_environments=1)
    game.client = Watched
    Counting.made.clear()
    agent = PlayedGame(game, 20.0, RolloutValidator(1000, None))
    play(agent, says("2"), game.dataset(resets=[{}, {}, {}]), group=2)
    assert most == [1, 1, 1]


def test_roles_are_names():
    with pytest.raises(ValueError, match="roles"):
        OpenEnvGame(Counting, "add", roles=())
