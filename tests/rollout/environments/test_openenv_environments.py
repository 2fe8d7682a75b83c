"""OpenEnv's environments as text environments, with clients that answer as OpenEnv's do."""

from types import SimpleNamespace

import pytest

from covey.core.records import FinishReason
from covey.rollout.environments import OpenEnvironment
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
