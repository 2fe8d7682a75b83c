"""Rewards of turns in conversations: which tokens answer for which turn, with rollout functions and with tools."""

import statistics

import pytest

from covey.engines.scripted import ScriptedEngine
from covey.rewards import TurnEnd
from tests.support import runs, tiny
from tests.trainer.agents.test_tools import CALL, TEMPLATE, add, says

EPSILON = 1e-4


def letters(prompt_ids, seed):
    """A turn of 1 to 5 letters, its end included, by the seed: siblings differ."""
    return [*(14 + (seed >> place) % 26 for place in range(1 + seed % 4)), 1]


async def twice(row, engine):
    """Two turns, and somebody's remark between them."""
    episode = engine.begin()
    await episode.sample()
    episode.write("and?")
    await episode.sample()
    return episode.done(turns=list(episode.turn_ends), sampled=list(episode.sampled))


class Turns:
    """Rewards of turns and of outcomes by what was sampled, kept for the test."""

    def __init__(self):
        self.turns, self.sampled, self.of_turns, self.of_outcomes = [], [], [], []

    def per_turn(self, completion_ids, turns, sampled, **kwargs):
        self.turns, self.sampled = turns, sampled
        self.of_turns = [self.judge(ids, ends) for ids, ends in zip(completion_ids, turns, strict=True)]
        return [[(TurnEnd(turn), reward) for turn, reward in pairs.items()] for pairs in self.of_turns]

    def judge(self, ids, ends):
        return {turn: float(ids[end - 1] % 3) for turn, end in enumerate(ends)}

    def outcome(self, completion_ids, **kwargs):
        self.of_outcomes = [float(sum(ids) % 5) for ids in completion_ids]
        return self.of_outcomes


class FirstTurns(Turns):
    """Only first turns are rewarded."""

    def judge(self, ids, ends):
        return {0: float(ids[ends[0] - 1] % 3)}


def batch_of(folder, rewards, functions, **settings):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    parts = {
        "processing_class": tokenizer,
        "train_dataset": tiny.rows(conversational=True),
        "engine": ScriptedEngine(letters),
        "rollout_func": twice,
        "reward_funcs": [getattr(rewards, name) for name in functions],
    }
    settings = {"max_completion_length": 150, "max_steps": 1, "engine_parity": "off", **settings}
    trained = runs.trainer(folder, parts=parts, **settings)
    batches = runs.experiences(trained)
    trained.train()
    (batch,) = batches
    return [part.tolist() for part in batch.advantages.split(batch.lengths.tolist())]


def relative(values):
    """(r - mean) / (std + ε) within a group of four."""
    groups = [values[start : start + 4] for start in range(0, len(values), 4)]
    return [(r - statistics.fmean(group)) / (statistics.stdev(group) + EPSILON) for group in groups for r in group]


def test_mt_grpo(tmp_path):
    """Two turns, the first rewarded, and the outcome: A^T + λ A^O for the first, A^O for the second (2505.11821)."""
    rewards = FirstTurns()
    settings = {"step_baseline": "turn", "step_discount": 0.4}
    got = batch_of(tmp_path, rewards, ["per_turn", "outcome"], **settings)
    of_turn, of_outcome = relative([pairs[0] for pairs in rewards.of_turns]), relative(rewards.of_outcomes)
    assert any(of_turn) and any(of_outcome)
    for tokens, ends, turn, outcome in zip(got, rewards.turns, of_turn, of_outcome, strict=True):
        first = ends[0] + 1
        assert tokens[:first] == pytest.approx([turn + 0.4 * outcome] * first, abs=1e-6)
        assert tokens[first:] == pytest.approx([outcome] * (len(tokens) - first), abs=1e-6)


def test_turns_compare_with_their_like_and_answer_for_later_ones(tmp_path):
    rewards = Turns()
    got = batch_of(tmp_path, rewards, ["per_turn"], step_baseline="turn", step_discount=0.5)
    firsts, seconds = (relative([pairs[turn] for pairs in rewards.of_turns]) for turn in (0, 1))
    for tokens, ends, one, two in zip(got, rewards.turns, firsts, seconds, strict=True):
        assert len(ends) == 2 and ends[1] == len(tokens) - 1
        assert tokens[: ends[0] + 1] == pytest.approx([one + 0.5 * two] * (ends[0] + 1), abs=1e-6)
        assert tokens[ends[0] + 1 :] == pytest.approx([two] * (len(tokens) - ends[0] - 1), abs=1e-6)


def test_what_was_written_between_turns_is_not_learned_from(tmp_path):
    """The remark lies in the part that the second turn's reward reaches, and has no weight."""
    rewards = Turns()
    batch_of(tmp_path, rewards, ["per_turn"])
    for ends, sampled in zip(rewards.turns, rewards.sampled, strict=True):
        assert sampled[: ends[0] + 1] == [True] * (ends[0] + 1)
        assert False in sampled[ends[0] + 1 :] and sampled[-1]


def test_turns_of_a_conversation_with_tools_are_rewarded(tmp_path):
    """The first turn calls, the second answers; whoever rewards calls names turn 0."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    called = []

    def calls(completions, **kwargs):
        called.extend(bool(messages[0].get("tool_calls")) for messages in completions)
        return [[(TurnEnd(0), 1.0 + place % 2), (TurnEnd(1), 0.5)] for place in range(len(completions))]

    parts = {
        "processing_class": tokenizer,
        "train_dataset": tiny.rows(conversational=True),
        "engine": says(CALL, "5."),
        "tools": [add],
        "reward_funcs": calls,
    }
    trained = runs.trainer(tmp_path, parts=parts, max_completion_length=150, max_steps=1, engine_parity="off")
    trained.train()
    assert all(called) and len(called) == 8
    assert runs.history(trained, "steps/per_completion") == [2.0]
    assert runs.history(trained, "steps/calls/mean") == [1.0]
    assert runs.history(trained, "grad_norm")[0] > 0
