"""The examples of rollout functions do what they say, on a policy that says what the test has it say."""

import runpy
from pathlib import Path

import pytest

from covey.core.engine import SamplingParams
from covey.core.records import FinishReason
from covey.engines.scripted import ScriptedEngine
from covey.rollout.collector import Collector, PromptSample, RolloutSpec
from covey.rollout.prompts import PromptCodec
from covey.rollout.tools.turn_template import TurnTemplates
from covey.rollout.user_batch_function import BatchFunction
from covey.rollout.user_functions import GroupFunction, RolloutFunction, RolloutValidator
from tests.support import tiny

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TOKENIZER = tiny.tokenizer()
EOS = TOKENIZER.eos_token_id


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return lambda name: runpy.run_path(str(EXAMPLES / name))


def played(function, kind, says, answer, n, prompt="What is 3 + 4?"):
    """n rollouts of one prompt; `says` is (what was said before, seed) -> what the policy says."""
    engine = ScriptedEngine(lambda ids, seed: [*encoded(says(TOKENIZER.decode(ids), seed)), EOS])
    codec = PromptCodec(TOKENIZER, None, None)
    play = kind(function, 30.0, RolloutValidator(tiny.config().vocab_size, None))
    collector = Collector(engine, codec, 0, RolloutSpec(play, TurnTemplates(codec, [EOS]), 30.0))
    row = {"prompt": [{"role": "user", "content": prompt}], "answer": answer}
    rollouts = collector.collect([PromptSample(row, 0, s) for s in range(n)], SamplingParams(400), ("train", 0))
    assert all(rollout.error is None for rollout in rollouts), rollouts[0].error
    return rollouts, engine


def encoded(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def contents(rollout):
    return [message["content"] for message in rollout.completion]


def test_retries_tell_what_is_wrong_until_it_is_right(example):
    script = example("retries.py")
    tries = {0: "Nine, or so", 1: "It is 9", 2: "7"}

    def says(before, seed):
        return tries[before.count("Try again")]

    (rollout,), _ = played(script["with_feedback"], RolloutFunction, says, "7", 1)
    feedback = ["I see no number. Try again.", "9 is too large. Try again."]
    assert contents(rollout) == ["Nine, or so", feedback[0], "It is 9", feedback[1], "7"]
    assert rollout.extras == {"tries": 3} and rollout.num_turns == 3 and rollout.finish is FinishReason.STOP
    assert rollout.num_sampled == sum(len(text) + 1 for text in tries.values())
    (never,), _ = played(script["with_feedback"], RolloutFunction, says, "8", 1)
    assert never.extras == {"tries": None} and contents(never)[3] == "9 is too large. Try again."
    assert script["sooner_is_better"](None, tries=[1, 2, 3, None]) == [1.0, 0.5, 0.25, 0.0]


def test_advisers_hear_the_policy_and_are_not_trained_on(example):
    def says(before, seed):
        if before.startswith("<bos>system: "):
            return "step 7" if "step by step" in before else "check 7"
        return "7" if "Others say: step 7 / check 7" in before else "It is 9"

    (rollout,), engine = played(example("sub_agent.py")["advised"], RolloutFunction, says, "7", 1)
    assert contents(rollout)[0] == "It is 9" and contents(rollout)[2] == "7"
    assert rollout.extras == {"advice": "step 7 / check 7"}
    asked = [TOKENIZER.decode(one.request.prompt_ids) for one in engine.served[1:3]]
    assert all(one.endswith("What is 3 + 4? Somebody says: It is 9<eos><bos>assistant: ") for one in asked)
    assert rollout.num_sampled == len("It is 9") + 1 + len("7") + 1


def test_all_branches_of_two_stems_are_trained_on(example):
    def says(before, seed):
        return str(seed % 10) if "So?" in before else f"stem {seed % 1000}"

    script = example("tree_rollouts.py")
    rollouts, engine = played(script["all_branches"], GroupFunction, says, "7", 6)
    stems = [contents(rollout)[0] for rollout in rollouts]
    assert stems[0] != stems[1] and stems == stems[:2] * 3
    assert [one.request.n for one in engine.served] == [2, 3, 3]


def test_the_best_branch_is_the_one_that_is_right(example):
    def says(before, seed):
        return str(5 + seed % 3) if "So?" in before else "hm"

    rollouts, engine = played(example("tree_rollouts.py")["best_branch"], RolloutFunction, says, "7", 8)
    for rollout in rollouts:
        assert (contents(rollout)[-1] == "7") == (rollout.extras["right"] > 0)
    assert {rollout.extras["right"] > 0 for rollout in rollouts} == {True, False}, "seeds that find it, and others"
    assert sum(one.request.n for one in engine.served) == 8 * (1 + 3)


def test_an_environments_reward_comes_with_the_completions(example):
    class Trainer:
        def generate_completions(self, prompts, **changes):
            return self.play.generate_completions(prompts, **changes)

    def kind(function, timeout, limits):
        trainer = Trainer()
        codec = PromptCodec(TOKENIZER, None, None)
        trainer.play = BatchFunction(function, trainer, timeout, codec, limits, {EOS})
        return trainer.play

    rollouts, _ = played(example("rollout_func.py")["play"], kind, lambda before, seed: f"It is {5 + seed % 3}", "7", 6)
    for rollout in rollouts:
        assert rollout.extras == {"env_reward": float("7" in contents(rollout)[0])}
