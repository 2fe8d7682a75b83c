"""Rewards of steps: what functions may return, which tokens steps end with, and what logs see of them."""

import asyncio
import math
import re

import numpy as np
import pytest
import torch

from covey.core.records import FinishReason, Rollout
from covey.core.special_tokens import CompletionDecoder
from covey.rewards import CharEnd, RewardError, RewardSuite, RewardWarning, TurnEnd
from covey.rewards.steps import resolve, total
from tests.support import tiny

NAN = math.nan


def rollout(text, tail=(1,), prefill="", conversational=False, **extras):
    """A completion of the tiny tokenizer, one token a character, with special tokens (the end of sequence) after it."""
    ids = [*(tiny.tokenizer()(text)["input_ids"] if text else []), *tail]
    completion = [{"role": "assistant", "content": prefill + text}] if conversational or prefill else text
    return Rollout([7], ids, [True] * len(ids), None, completion, FinishReason.STOP, **extras)


def suite(*functions, **settings):
    return RewardSuite(list(functions), tokenizer=tiny.tokenizer(), **settings)


def scored(context, returned, rollouts):
    """What a function that returns this makes of the rollouts."""
    rows = [{"prompt": "?"} for _ in rollouts]
    return suite(lambda completions: returned)(rows, rollouts, context)


def shown(steps):
    return [
        {function: [(end, None if r != r else r) for end, r in pairs] for function, pairs in one.items()}
        for one in steps
    ]


# --- what may be returned ------------------------------------------------------------------------------------------


def test_numbers_none_and_steps_may_be_mixed_and_logs_see_sums(context):
    result = scored(context, [[(0, 1.0), (2, 0.5)], 2.0, None, []], [rollout("abcd")] * 4)
    assert shown(result.steps) == [{0: [(0, 1.0), (2, 0.5)]}, {}, {}, {0: []}]
    assert result.rewards[:, 0].tolist() == pytest.approx([1.5, 2.0, NAN, 0.0], nan_ok=True)


def test_a_step_abstains_with_none_or_nan_and_that_is_no_failure(context):
    result = scored(context, [[(0, None), (2, 0.5)], [(1, NAN)]], [rollout("abcd")] * 2)
    assert shown(result.steps) == [{0: [(0, None), (2, 0.5)]}, {0: [(1, None)]}]
    assert result.rewards[:, 0].tolist() == pytest.approx([0.5, NAN], nan_ok=True)
    assert result.stats["rewards/lambda/failures"].value() == 0


@pytest.mark.parametrize("end", [np.int64(2), np.uint8(2), torch.tensor(2)])
@pytest.mark.parametrize("reward", [1, True, np.float32(1), torch.tensor(1.0)])
def test_ends_and_rewards_may_be_scalars_of_any_kind(context, end, reward):
    assert shown(scored(context, [[[end, reward]]], [rollout("abcd")]).steps) == [{0: [(2, 1.0)]}]


def test_rewards_are_rounded_as_the_matrix_is(context):
    """0.1 as a number and 0.1 as a step are one reward: siblings that got the same must tie."""
    result = scored(context, [[(0, 0.1)], 0.1], [rollout("ab")] * 2)
    assert result.steps[0][0][0][1] == result.rewards[1, 0].item() == result.rewards[0, 0].item()


def test_steps_come_in_the_order_of_tokens(context):
    assert shown(scored(context, [[(3, 1.0), (0, 2.0), (3, 4.0)]], [rollout("abcd")]).steps) == [
        {0: [(0, 2.0), (3, 1.0), (3, 4.0)]}
    ]


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ([[(0, math.inf)]], "Give finite numbers of ordinary size, None where there is no reward"),
        ([[(0, 1e39)]], "Give finite numbers of ordinary size"),
        (
            [[(0, "good")]],
            r"or, for rewards of its steps, a list of \(end, reward\) pairs. An end is the index of a token",
        ),
        ([[0, 1.0]], r"returned \[0, 1.0\] \(list\) for a completion"),
        ([(0, 1.0)], r"returned \(0, 1.0\) \(tuple\) for a completion"),
        ([[(0, 1.0, 2)]], "a list of .end, reward. pairs"),
        ([[(0.0, 1.0)]], r"CharEnd\(n\) or TurnEnd\(k\)"),
        ([[(True, 1.0)]], "An end is the index of a token"),
        ([[("0", 1.0)]], "An end is the index of a token"),
        ([[(None, 1.0)]], "An end is the index of a token"),
        ([[(4, 1.0)]], "token 4, but the completion has 4 tokens.*from 0 to 3.*CharEnd.match.end"),
        ([[(-1, 1.0)]], "token -1, but the completion has 4 tokens"),
        ([[(CharEnd(4), 1.0)]], r"CharEnd\(4\), but the completion's text has 3 characters"),
        ([[(CharEnd(0), 1.0)]], r"CharEnd\(0\).*1 or more"),
        ([[(TurnEnd(1), 1.0)]], r"TurnEnd\(1\), but the completion has 1 turn of the policy"),
        ([[(TurnEnd(-1), 1.0)]], r"TurnEnd\(-1\)"),
    ],
)
def test_what_is_no_step_is_refused_with_the_sample(context, returned, says):
    with pytest.raises(RewardError, match=f"(?s)reward function 'lambda'.*{says}.*completion: 'abc'"):
        scored(context, returned, [rollout("abc")])


def test_a_step_that_ends_nowhere_costs_its_own_sample(context):
    returned = [[(0, 1.0)], [(9, 1.0)], [(CharEnd(9), 1.0)], 2.0]
    with pytest.warns(RewardWarning, match=r"failed on 2 of 4 samples \(it ended a step at token 9.*\n.*\n.*'de'"):
        result = scored(context, returned, [rollout("abc"), rollout("de"), rollout("fg"), rollout("h")])
    assert shown(result.steps) == [{0: [(0, 1.0)]}, {}, {}, {}]
    assert result.rewards[:, 0].isnan().tolist() == [False, True, True, False]
    assert result.stats["rewards/lambda/failures"].value() == 2


def test_a_completion_without_tokens_has_no_steps(context):
    result = scored(context, [[(0, 1.0), (CharEnd(0), 2.0), (TurnEnd(0), 3.0)]], [rollout("", tail=())])
    assert shown(result.steps) == [{0: []}]
    assert result.rewards.tolist() == [[6.0]]


def test_sums_leave_out_what_abstains():
    assert total([(0, 1.0), (1, NAN), (2, 0.25)]) == 1.25
    assert total([(0, NAN)]) is None
    assert total([]) == 0


# --- characters ----------------------------------------------------------------------------------------------------


def ends(steps, one):
    return [end for end, _ in resolve(steps, one, CompletionDecoder(tiny.tokenizer()))]


def test_ends_of_matches_become_tokens():
    text = "1+1=2;2+2=5;so"
    steps = [(CharEnd(m.end()), 1.0) for m in re.finditer(r"\d=\d;", text)]
    assert ends(steps, rollout(text)) == [5, 11]


def test_the_end_of_the_text_is_the_end_of_the_completion():
    """Whoever rewards the last step rewards the decision to stop after it, too."""
    assert ends([(CharEnd(3), 1.0)], rollout("abc", tail=(1,))) == [3]
    assert ends([(CharEnd(3), 1.0)], rollout("abc", tail=())) == [2]
    assert ends([(CharEnd(0), 1.0)], rollout("", tail=(1, 1))) == [1]


def test_special_tokens_within_the_text_have_no_characters():
    ids = [*tiny.tokenizer()("ab")["input_ids"], 2, 3, *tiny.tokenizer()("cd")["input_ids"]]
    one = Rollout([7], ids, [True] * 6, None, "abcd", FinishReason.STOP)
    assert [ends([(CharEnd(n), 1.0)], one)[0] for n in (1, 2, 3, 4)] == [0, 1, 4, 5]


def test_characters_begun_by_the_prompt_count_and_are_no_step():
    one = rollout("45", prefill="so 3")
    assert ends([(CharEnd(5), 1.0)], one) == [0]
    assert ends([(CharEnd(6), 1.0)], one) == [2]
    with pytest.raises(ValueError, match=r"the first 4 characters of the text were the prompt's.*leave steps out"):
        ends([(CharEnd(4), 1.0)], one)


def test_a_message_without_its_call_has_its_own_characters():
    one = rollout("Adding. <call>")
    one.completion = [{"role": "assistant", "content": "Adding.", "tool_calls": []}]
    assert ends([(CharEnd(7), 1.0)], one) == [6]


@pytest.mark.parametrize(
    ("sampled", "prefill", "seen", "tokens"),
    [
        ("  4+4 ", "", "4+4", [2, 3, 6]),
        ("  4+4 ", "so", "so  4+4", [None, None, 0]),
        ("  4+4 <call>", "", "4+4", [2, 3, 4]),
        ("4+4 ", "", "4+4", [0, 1, 4]),
    ],
    ids=["around", "after what was begun", "before a call", "after"],
)
def test_a_message_without_white_space_has_its_own_characters(sampled, prefill, seen, tokens):
    """The last character of a turn without a call is its end, the token that ends it included."""
    one = rollout(sampled, prefill=prefill, conversational=True)
    one.completion = [{"role": "assistant", "content": seen}]
    for count, token in enumerate(tokens, 1):
        if token is not None:
            assert ends([(CharEnd(count), 1.0)], one) == [token]


def test_a_text_that_the_tokens_do_not_spell_has_no_characters():
    one = rollout("abc")
    one.completion = "something else"
    with pytest.raises(ValueError, match=r"not what its tokens decode to.*give indexes of tokens"):
        ends([(CharEnd(2), 1.0)], one)


def test_characters_of_several_messages_are_refused(context):
    one = rollout("abc")
    one.completion = [
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    with pytest.raises(RewardError, match=r"CharEnd\(1\), but the completion has 3 messages.*give TurnEnd\(k\)"):
        scored(context, [[(CharEnd(1), 1.0)]], [one])


def test_characters_need_a_tokenizer():
    with pytest.raises(ValueError, match="needs the policy's tokenizer"):
        resolve([(CharEnd(1), 1.0)], rollout("abc"), None)


# --- turns ---------------------------------------------------------------------------------------------------------


def test_turns_end_as_the_rollout_says_and_may_abstain():
    one = rollout("abcdef", turn_ends=[1, 3, 6])
    assert shown([{0: resolve([(TurnEnd(1), 2.0)], one, None)}]) == [{0: [(1, None), (3, 2.0), (6, None)]}]
    assert shown([{0: resolve([(2, 1.0)], one, None)}]) == [{0: [(2, 1.0)]}]


def test_without_turns_one_ends_with_the_completion():
    assert resolve([(TurnEnd(0), 1.0)], rollout("abc"), None) == [(3, 1.0)]


# --- every way to be scored ----------------------------------------------------------------------------------------


def lines(completions, log_extra):
    log_extra("count", [text.count(";") for text in completions])
    return [[(CharEnd(m.end()), float(m[0][0] == "1")) for m in re.finditer("[^;]*;", text)] for text in completions]


async def lines_async(completions, log_extra):
    await asyncio.sleep(0)
    return lines(completions, log_extra)


def choosy(completions, log_extra):
    """Fails on any batch that holds a completion with a 3."""
    if any("3" in text for text in completions):
        raise KeyError("3")
    return lines(completions, log_extra)


TEXTS = ["1;2;", "2;", "", "1;1;1;"]
EXPECTED = [[(1, 1.0), (4, 0.0)], [(2, 0.0)], [], [(1, 1.0), (3, 1.0), (6, 1.0)]]


@pytest.mark.parametrize("function", [lines, lines_async])
@pytest.mark.parametrize("streamed", [False, True])
def test_steps_are_the_same_however_they_are_scored(context, function, streamed):
    made, rollouts, rows = suite(function), [rollout(text) for text in TEXTS], [{"prompt": "?"}] * 4
    if streamed:
        with made.stream(None, groups=True) as stream:
            stream.on_group(2, rows[2:], rollouts[2:])
            stream.on_group(0, rows[:2], rollouts[:2])
            result = made(rows, rollouts, context, stream)
    else:
        result = made(rows, rollouts, context)
    assert [one[0] for one in result.steps] == EXPECTED
    assert result.rewards[:, 0].tolist() == [1.0, 0.0, 0.0, 3.0]
    assert context.extras["count"] == [2, 1, 0, 3]


def test_a_sample_that_fails_costs_its_own_steps_alone(context):
    rollouts = [rollout(text) for text in ["1;2;", "3;", "2;"]]
    with pytest.warns(UserWarning, match="failed on 1 of 3 samples"):
        result = suite(choosy)([{"prompt": "?"}] * 3, rollouts, context)
    assert shown(result.steps) == [{0: [(1, 1.0), (4, 0.0)]}, {}, {0: [(2, 0.0)]}]
    assert result.stats["rewards/choosy/failures"].value() == 1


def test_failed_rollouts_have_no_steps_and_move_no_others(context):
    rollouts = [rollout(text) for text in ["1;", "2;", "1;1;"]]
    rollouts[1].finish = FinishReason.ERROR
    result = suite(lines)([{"prompt": "?"}] * 3, rollouts, context)
    assert shown(result.steps) == [{0: [(2, 1.0)]}, {}, {0: [(1, 1.0), (4, 1.0)]}]
    rollouts = [rollouts[1]]
    assert suite(lines)([{"prompt": "?"}], rollouts, context).steps == [{}]


def test_functions_beside_one_another_keep_their_steps_apart(context):
    result = suite(lines, lambda completions: [1.0, [(0, 5.0)]])([{"prompt": "?"}] * 2, [rollout("2;")] * 2, context)
    assert shown(result.steps) == [{0: [(2, 0.0)]}, {0: [(2, 0.0)], 1: [(0, 5.0)]}]
    assert result.rewards.tolist() == [[0.0, 1.0], [0.0, 5.0]]
