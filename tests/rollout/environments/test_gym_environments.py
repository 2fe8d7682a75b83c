"""gymnasium's environments as text environments, with its own FrozenLake and environments of Text spaces."""

import pytest

from covey.rollout.environments import GymEnvironment
from tests.support.playing import play, says, text_agent

gymnasium = pytest.importorskip("gymnasium")

MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}


def lake(**changes):
    return GymEnvironment("FrozenLake-v1", actions=MOVES, render_mode="ansi", is_slippery=False, **changes)


class Spell(gymnasium.Env):
    """Spell backwards what you are told; spaces of text."""

    def __init__(self):
        self.observation_space = self.action_space = gymnasium.spaces.Text(20)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.word = "".join(self.np_random.choice(list("abc"), 3))
        return self.word, {}

    def step(self, action):
        return "", float(action == self.word[::-1]), True, False, {}


def test_a_walk_over_the_lake():
    environment = lake(instructions="Reach G. You are in brackets.", system="Say left, down, right or up.")
    rows = environment.dataset(2)
    assert [row["seed"] for row in rows] == [0, 1]
    engine = says("down", "I go down", "right", "down or right? down", "right", "right")
    rollout, _ = play(text_agent(environment, max_turns=6), engine, rows)
    assert engine.received[0].startswith(
        "<bos>system: Say left, down, right or up.<eos>"
        "<bos>user: Reach G. You are in brackets.\n[S]FFF\nFHFH\nFFFH\nHFFG\n<eos>"
    )
    assert rollout.completion[1]["content"] == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG\n"
    assert rollout.extras["environment_reward"] == 1.0 and len(rollout.turn_ends) == 6


def test_what_is_no_action_is_told_and_costs_what_it_costs():
    (rollout,) = play(text_agent(lake(invalid_reward=-1.0), max_turns=2), says("jump", "down"), lake().dataset(1))
    assert rollout.completion[1]["content"] == "That is no action. Say one of: left, down, right, up."
    assert rollout.extras["environment_reward"] == -1.0


def test_words_count_as_wholes():
    parse = lake().parse
    assert parse("Up, no: DOWN!") == 1
    for text in ("downtown", "", "lef"):
        with pytest.raises(ValueError, match="no action"):
            parse(text)


def test_spaces_of_text_need_nothing_else():
    environment = GymEnvironment(Spell)
    word = environment().reset(seed=3)
    assert word == environment().reset(seed=3)  # a row starts all its rollouts alike
    right, wrong = (
        play(text_agent(environment), says(said), environment.dataset(1, seed=3))[0] for said in (word[::-1], "x")
    )
    assert (right.extras["environment_reward"], wrong.extras["environment_reward"]) == (1.0, 0.0)


def test_functions_of_ones_own():
    environment = GymEnvironment(
        "Blackjack-v1",
        parse=lambda text: int("hit" in text),
        show=lambda observation, environment: f"You have {observation[0]}, the dealer shows {observation[1]}.",
    )
    hand = environment()
    assert hand.reset(seed=1).startswith("You have ")
    assert len(hand.step("hit me")) == 5


def test_an_answer_must_mean_something():
    with pytest.raises(ValueError, match=r"not an action of Discrete\(4\).*actions=.*parse="):
        GymEnvironment("FrozenLake-v1")()
    with pytest.raises(ValueError, match="give one of the two"):
        GymEnvironment("FrozenLake-v1", actions=MOVES, parse=int)
    with pytest.raises(ValueError, match="`actions` is empty"):
        GymEnvironment("FrozenLake-v1", actions={})
    with pytest.raises(ValueError, match=r"is_slippery: settings go with an environment's id"):
        GymEnvironment(Spell, is_slippery=False)
