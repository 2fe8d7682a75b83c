"""Environments with `step(text)`: the policy's turn is the action, the observation the next message of the user."""

import pytest

from covey.core.records import FinishReason
from tests.support.playing import TOKENIZER, play, says, text_agent


class Guess:
    """Guess a number; a guess costs 0.1, the right one earns 1."""

    def reset(self, number=3, **row):
        self.number = number
        return " Guess a number."

    def step(self, text):
        if int(text) == self.number:
            return "right", 1.0, True, {}
        return f"{text} is wrong", -0.1, False, {}


def test_turns_alternate_with_observations():
    engine = says("1", "2", "3")
    (rollout,) = play(text_agent(Guess), engine)
    assert engine.received[-1].startswith("<bos>user: go Guess a number.<eos><bos>assistant: ")
    assert [(message["role"], message["content"]) for message in rollout.completion] == [
        ("assistant", "1"),
        ("user", "1 is wrong"),
        ("assistant", "2"),
        ("user", "2 is wrong"),
        ("assistant", "3"),
    ]
    assert rollout.finish is FinishReason.STOP
    assert rollout.extras["environment_reward"] == pytest.approx(1 - 0.1 - 0.1)
    # Sampled are three digits and the end after each.
    assert rollout.num_sampled == 6 and [rollout.completion_ids[end] for end in rollout.turn_ends] == [1, 1, 1]


def test_rewards_of_turns_can_be_steps():
    (rollout,) = play(text_agent(Guess, turn_end=lambda turn: ("turn", turn)), says("1", "3"))
    assert rollout.extras["environment_reward"] == [(("turn", 0), -0.1), (("turn", 1), 1.0)]


def test_an_episode_that_lasts_too_long_is_cut():
    (rollout,) = play(text_agent(Guess, max_turns=2), says("1"))
    assert rollout.finish is FinishReason.TOOL_BUDGET and len(rollout.turn_ends) == 2
    assert rollout.extras["environment_reward"] == pytest.approx(-0.2)


def test_a_right_guess_in_the_last_turn_is_not_cut():
    (rollout,) = play(text_agent(Guess, max_turns=2), says("1", "3"))
    assert rollout.finish is FinishReason.STOP


def test_gymnasiums_five_values():
    class Five(Guess):
        def step(self, text):
            return "on", 0.5, False, len(text) > 1, {}

    first, second = (play(text_agent(Five), says(*turns))[0] for turns in (["1", "22"], ["22"]))
    assert first.finish is second.finish is FinishReason.TOOL_BUDGET
    assert (first.extras["environment_reward"], second.extras["environment_reward"]) == (1.0, 0.5)


def test_a_turn_that_was_cut_off_is_the_last_action():
    (rollout,) = play(text_agent(Guess), says("1234567"), room=3)
    assert rollout.finish is FinishReason.LENGTH
    assert rollout.extras["environment_reward"] == -0.1


def test_an_observation_without_room_to_answer_ends_the_episode():
    (rollout,) = play(text_agent(Guess), says("1"), room=30)
    # 2 tokens of the first turn; "1 is wrong" with what surrounds it would need 10 + 9 + 13.
    assert rollout.finish is FinishReason.LENGTH and len(rollout.completion_ids) == 2


def test_observations_may_be_messages():
    class Chatty(Guess):
        def step(self, text):
            return [{"role": "user", "content": "a"}], 0, text == "3", {}

    (rollout,) = play(text_agent(Chatty), says("1", "3"))
    assert TOKENIZER.decode(rollout.completion_ids) == "1<eos><bos>user: a<eos><bos>assistant: 3<eos>"


def test_get_reward_takes_the_place_of_what_steps_gave():
    class Judged(Guess):
        def get_reward(self):
            return 0.25

    (rollout,) = play(text_agent(Judged), says("3"))
    assert rollout.extras["environment_reward"] == 0.25


def test_an_environment_without_rewards_abstains():
    class Silent(Guess):
        def step(self, text):
            return "on", None, text == "3", {}

    (rollout,) = play(text_agent(Silent), says("1", "3"))
    assert rollout.extras["environment_reward"] is None


def test_few_environments_serve_many_rollouts():
    alive = []

    class Scarce(Guess):
        def __init__(self):
            alive.append(self)

    agent = text_agent(Scarce, limit=2)
    rollouts = play(agent, says("1", "3"), group=8)
    assert len(alive) == 2
    assert all(rollout.extras["environment_reward"] == 0.9 for rollout in rollouts)
    assert all("environments" not in rollout.extras for rollout in rollouts)  # another rollout has it by now
