"""Marks that reward functions look for, in their code and in completions whose thinking the prompt opened."""

import functools
import re

import pytest

from covey.rewards import (
    RewardSuite,
    exact_match_reward,
    get_regex_reward,
    json_reward,
    reasoning_accuracy_reward,
    think_format_reward,
)
from covey.rewards.marks import named_tokens
from tests.support import tiny

PATTERN = re.compile(r"<\|mark\|>(\d+)")


def by_global(completions, **kwargs):
    return [1.0 if PATTERN.search(text) else 0.0 for text in completions]


def by_helper(completions, **kwargs):
    return by_global(completions)


def by_constant(completions, mark="<|mark|>", **kwargs):
    return [float(mark in text) for text in completions]


class ByAttribute:
    def __init__(self):
        self.mark = "<|mark|>"

    def __call__(self, completions, **kwargs):
        return [float(self.mark in text) for text in completions]


def unrelated(completions, **kwargs):
    return [float(len(text)) for text in completions]


@pytest.fixture(scope="module")
def marked():
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<|mark|>"]})
    return tokenizer


def closed_over(mark):
    return lambda completions, **kwargs: [float(mark in text) for text in completions]


@pytest.mark.parametrize(
    "function",
    [by_global, by_helper, by_constant, ByAttribute(), closed_over("<|mark|>"), get_regex_reward(r"<\|mark\|>4")],
)
def test_a_mark_is_found_where_a_function_names_it(function, marked):
    assert named_tokens([function], marked) == {"<|mark|>"}


def test_built_in_rewards_name_their_marks_and_others_none(marked):
    assert named_tokens([think_format_reward], marked) == {"<think>", "</think>"}
    partial = functools.partial(reasoning_accuracy_reward, reasoning_delimiters=["<|mark|>"])
    assert named_tokens([partial], marked) == {"</think>", "<|mark|>"}
    assert named_tokens([unrelated, len], marked) == set()


def test_a_pattern_with_the_end_of_the_sequence_warns(marked):
    tokenizer = tiny.tokenizer()
    tokenizer.eos_token = "<|mark|>"
    with pytest.warns(UserWarning, match="mark"):
        RewardSuite(by_global, tokenizer=tokenizer)


def test_rewards_know_where_the_prompt_opened_thinking(context, marked):
    from covey.core.records import FinishReason, Rollout

    prompt = marked("2+2=<think>", add_special_tokens=False)["input_ids"]
    ids = marked("so</think>4", add_special_tokens=False)["input_ids"]
    rollout = Rollout(prompt, ids, [True] * len(ids), None, "so</think>4", FinishReason.STOP)
    suite = RewardSuite([think_format_reward, get_regex_reward("^<think>so</think>")], tokenizer=marked)
    assert suite([{"prompt": "2+2=<think>"}], [rollout], context).rewards.tolist() == [[1.0, 1.0]]


def test_json_and_equality_are_of_the_text_after_thinking():
    assert json_reward(['<think>{"a"</think>{"a": 1}', "so</think>[1]", '<think>{"a": 1}']) == [1.0, 1.0, 0.0]
    assert exact_match_reward(["<think>Rome?</think> Paris", "<think>Paris"], answer=["Paris"] * 2) == [1.0, 0.0]
