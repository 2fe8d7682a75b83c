"""Checks of `covey doctor` on rewards that are given as numbers, without a model."""

import doctest
import json
import re
from types import SimpleNamespace

import pytest
import torch

from covey.core.records import FinishReason, PromptSample, Rollout
from covey.core.stats import Mean
from covey_tools.doctor import reward_texts
from covey_tools.doctor.columns import _instead, _of_other_classes, _of_other_rows, _shifted
from covey_tools.doctor.completions import (
    _all_masked,
    _cutting,
    _different,
    _longer,
    _only_errors,
    _stopped,
    answered_calls,
    calls,
    temperature,
)
from covey_tools.doctor.examined import SampleBatch
from covey_tools.doctor.reward_calls import _scores_other_rows, _silent_about_wrong, order, remembered, slow
from covey_tools.doctor.reward_differences import flat
from covey_tools.doctor.reward_texts import constants_of, text_matching
from covey_tools.doctor.reward_values import cancelling, length, scale, sign, summary_of, turned

NAN = float("nan")


def batch(rewards, size=2, weights=None, texts=None, rows=None, ends=9):
    """Completions whose rewards are given, one list for each; `rows` one for each prompt."""
    texts = texts or [""] * len(rewards)
    rows = rows or [{"prompt": str(n)} for n in range(len(rewards) // size)]
    samples = [PromptSample(rows[n // size], n // size, n % size) for n in range(len(rewards))]
    rollouts = [Rollout([0], [5, ends], [True] * 2, None, text, FinishReason.STOP) for text in texts]
    values = torch.tensor(rewards, dtype=torch.double)
    return SampleBatch(samples, rollouts, values, torch.tensor(weights or [1.0] * len(rewards[0])), size, 8)


def run(base, names, totals=None, **changes):
    """A run with rewards by `totals(row, text)`."""
    args = SimpleNamespace(method="grpo", multi_objective_aggregation="sum_then_normalize")

    def all_totals(rows, texts):
        shown = [getattr(text, "completion", text) for text in texts]
        return torch.tensor([totals(row, text) for row, text in zip(rows, shown, strict=True)], dtype=torch.double)

    settings = {"group": 2, "failure": None, "rescores": True, "single": True, "weights": base.weights}
    settings |= {"needs_calls": False, "turn_limit": None, "seconds": 75.0, "left": 70.0, "summary": {}, **changes}
    settings["suite"] = SimpleNamespace(names=names, functions=[])
    return SimpleNamespace(
        base=base,
        args=args,
        totals=all_totals,
        answering=lambda row, text: Rollout([0], [5] * len(text), [True] * len(text), None, text, FinishReason.STOP),
        has_time=lambda code: True,
        **settings,
    )


def test_absent_rollouts_are_no_completions():
    """Two groups of 3 with an absent one each, which is no empty text, not cut, and no abstention of the reward."""
    base = batch([[1], [1], [NAN]] * 2, size=3, texts=["a", "b", ""] * 2)
    for place, finish in enumerate((FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABSENT) * 2):
        base.rollouts[place].finish = finish
    assert (base.cut, base.texts, int(base.unscored.sum())) == (0.5, ["a", "b"] * 2, 0)
    assert _different(base) == 1.0
    assert _silent_about_wrong(run(base, ["right"])) is None


def test_rewards_that_differ_between_seats_alone_are_no_signal():
    """A zero-sum game that the first seat always wins: compared by role, no rollout has a signal."""
    base, suite = batch([[1], [-1]] * 3), SimpleNamespace(abstains=False)
    for compare, expected in (("group", 1.0), ("role", None), ("role_average", None)):
        args = SimpleNamespace(compare=compare, advantages="group", dynamic_sample=False)
        games = SimpleNamespace(base=base, group=2, args=args, suite=suite)
        assert summary_of(games)["groups_with_signal_expected"] == expected


def test_functions_that_cancel_are_named():
    found = cancelling(batch([[1, 0], [0, 1], [1, 0], [1, 0]]), ["right", "wrong"])
    assert found is not None and (found.code, found.level) == ("reward-constant", "error")
    assert "right" in found.evidence and "wrong" in found.evidence and "-1.00" in found.proof
    tenths = batch([[0.1, 0.2], [0.2, 0.1], [0.3, 0.0], [0.3, 0.0]])  # whose sums differ by rounding
    assert cancelling(tenths, ["a", "b"]) is not None
    assert cancelling(batch([[1, 0], [0, 1]], weights=[1.0, 0.9]), ["a", "b"]) is None
    assert cancelling(batch([[1, 1], [0, 1]]), ["a", "b"]) is None  # one is constant


def test_none_for_wrong_answers_is_no_constant_reward():
    found = _silent_about_wrong(run(batch([[1], [NAN], [NAN], [1], [1], [1]]), ["right"]))
    assert found is not None and (found.code, found.level) == ("reward-failing", "error")
    assert (found.effect.now, found.effect.then) == (0.0, 2 / 3)
    by_task = batch([[1], [1], [NAN], [NAN], [1], [1]])  # a function abstains from whole prompts
    assert _silent_about_wrong(run(by_task, ["right"])) is None
    graded = batch([[1], [0], [NAN], [1], [1], [NAN]])
    assert _silent_about_wrong(run(graded, ["right"])) is None


def test_proposed_weights_switch_no_function_off():
    """`loud` differs 1e8 times as much as `right`; a third function is constant, a fourth has weight 0."""
    rewards = [[a, 1e8 * b, 1, b] for a, b in ((1, 1), (0, 2), (1, 3), (0, 1), (1, 2), (0, 3), (0, 2), (1, 1))]
    base = batch(rewards, size=4, weights=[1.0, 1.0, 1.0, 0.0])
    (found,) = scale(run(base, ["right", "loud", "same", "off"]))
    given = json.loads(found.fix.partition("=")[2].partition(", or")[0])
    right, loud, same, off = given
    assert 0 < loud < 1e-7 < right < 10 and (same, off) == (1.0, 0.0)


ANSWERS = [{"prompt": "", "answer": "7"}, {"prompt": "", "answer": "11"}, {"prompt": "", "answer": "3"}]


def test_a_reward_for_wrong_answers_is_found():
    base = batch([[0], [-1]] * 3, weights=[-1.0], rows=ANSWERS)
    (found,) = sign(run(base, ["right"], lambda row, text: -float(text == row["answer"])))
    assert found.code == "reward-sign" and "reward_weights=[1.0]" in found.fix
    for healthy in (
        lambda row, text: float(text == row["answer"]),
        lambda row, text: float(len(text)),  # longer answers get more, right or wrong
        lambda row, text: -float(len(text)),
        lambda row, text: 1.0,
    ):
        assert not [*sign(run(base, ["right"], healthy))]
    assert not [*sign(run(batch([[0], [1]], rows=[{"prompt": ""}]), ["right"], lambda row, text: 0.0))]


def test_another_column_that_completions_match_is_proposed():
    rows = [{"prompt": "", "id": str(1000 + n), "answer": str(n), "unit": "m"} for n in range(3)]
    base = batch([[0]] * 6, rows=rows, texts=["0 m", "x", "1 m", "1 m", "2 m", "y"])

    def matches(row, text):
        return float(str(row["id"]) in text.split())

    (found,) = _instead(run(base, ["right"], matches), "id")
    assert found.code == "data-columns" and "{answer: id}" in found.fix and "0.667" in found.proof  # 4 of 6
    alike = [{"prompt": "", "id": row["id"], "unit": "m"} for row in rows]  # as often in completions of other rows
    assert not [*_instead(run(batch([[0]] * 6, rows=alike, texts=["0 m"] * 6), ["right"], matches), "id")]


def test_completions_that_a_stop_text_ends_are_tried_without_it(monkeypatch):
    monkeypatch.setattr("covey_tools.doctor.completions.end_token_ids", lambda model, tokenizer: {9})
    params = SimpleNamespace(extra={"stop": [" "], "seed": 3})
    parts = {
        "trainer": SimpleNamespace(rollouts=SimpleNamespace(params=params), model=None),
        "tokenizer": None,
        "again": lambda extra: batch([[float(extra == {"seed": 3})]] * 8),
    }
    (found,) = _stopped(run(batch([[0]] * 8, ends=4), ["right"], **parts))
    assert found.code == "completions-cut" and found.worth == 1.0
    assert found.level(SimpleNamespace(args=SimpleNamespace(mask_truncated_completions=False), group=2)) == "error"
    assert not [*_stopped(run(batch([[0]] * 8), ["right"], **parts))]  # the model has ended these


TEXTS = ["a", "bb cc", "ddd ee", "f", "gg", "hhhh iii"]


def paid(reward, texts=TEXTS, **changes):
    """A run of three prompts with the rewards of two texts each."""
    rows = [{"prompt": str(n), "answer": texts[2 * n]} for n in range(3)]
    values = [[reward(rows[n // 2], text)] for n, text in enumerate(texts)]
    return run(batch(values, rows=rows, texts=texts), ["right"], reward, **changes)


def codes(findings):
    return [(one.code, one.level) for one in findings]


def test_a_little_for_content_does_not_hide_that_length_is_paid():
    by_length = paid(lambda row, text: len(text) + 0.1 * (text == row["answer"]))
    assert codes(length(by_length)) == [("reward-length", "warning")]


def test_marks_that_long_completions_have_are_no_length():
    """Tags make completions longer, and are what is paid."""
    texts = ["a", "<b>bb</b>", "<b>d</b>", "f", "gg", "<b>hh</b>"]
    assert codes(length(paid(lambda row, text: float(text.startswith("<")), texts))) == []


def test_what_is_paid_each_time_it_is_said_is_told():
    counted = paid(lambda row, text: float(text.split().count(row["answer"])))
    assert codes(length(counted)) == [("reward-repeats", "warning")]
    for healthy in (
        lambda row, text: float(row["answer"] in text.split()),  # once is as good as twice
        lambda row, text: min(text.split().count(row["answer"]), 2.0),  # two of a kind are asked for
        lambda row, text: float(text.strip() == row["answer"]),
    ):
        assert codes(length(paid(healthy))) == []


def noisy(noise):
    """A reward of 1 and 0 in turn, to which later calls add noise that has nothing to do with it."""
    base = batch([[1], [0]] * 4, size=4)

    def score(samples, rollouts):
        change = torch.tensor([1.0, 1.0, -1.0, -1.0] * 2, dtype=torch.double)[: len(rollouts), None]
        return base.rewards[: len(rollouts)] + noise * change, {}

    return run(base, ["right"], score=score)


def test_noise_is_an_error_where_it_is_most_of_what_differs():
    # correlation of both calls: 0.5 / sqrt(0.25 + noise^2), 0.86 and 0.49
    assert codes(order(noisy(0.3))) == [("reward-order", "warning")]
    assert codes(order(noisy(0.9))) == [("reward-order", "error")]


def test_a_reward_that_remembers_is_told_though_it_is_seldom_paid():
    """Two of forty completions get a point, and none of them a second time."""
    base = batch([[float(n in (3, 17))] for n in range(40)], size=8)
    given = run(base, ["first"], score=lambda samples, rollouts: (torch.zeros(len(rollouts), 1), {}))
    assert codes(order(given)) == [("reward-order", "error")]


def test_columns_of_other_rows_are_not_blamed_for_a_reward_of_the_wrong_sign():
    base = batch([[-1], [0]] * 3, rows=ANSWERS)
    wrong = run(base, ["right"], lambda row, text: float(text != row["answer"]))
    assert len(turned(wrong)) > 1
    wrong.rows = wrong.taken = ANSWERS * 4
    assert [*_of_other_rows(wrong, "answer")] == []


def test_a_reward_that_used_up_the_time_is_still_slow():
    base = batch([[1], [0]] * 4)
    base.stats = {"rewards/right/seconds": Mean.of([4.0])}
    algebra = SimpleNamespace(generation_batch_size=32)
    parts = {"trainer": SimpleNamespace(run=SimpleNamespace(algebra=algebra)), "score": lambda samples, rolls: None}
    (found,) = slow(run(base, ["right"], **parts))
    assert found.code == "reward-slow" and "16 s of a step" in found.evidence  # 4 s for 8 of 32 completions


def test_rollouts_that_all_earn_the_same_are_told_without_other_texts():
    """Of an environment, which no text can be given to."""
    base = batch([[0]] * 6, texts=["1", "2", "3", "4", "5", "6"])
    assert codes(flat(run(base, ["shop"], rescores=False, left=0.0))) == [("reward-unreachable", "error")]
    base = batch([[0.5]] * 6)
    assert codes(flat(run(base, ["shop"], rescores=False, left=0.0))) == [("reward-constant", "error")]
    assert codes(flat(run(batch([[0], [1]] * 3), ["shop"], rescores=False))) == []


def test_tools_that_are_not_called_come_before_a_constant_reward():
    base = batch([[0]] * 6)
    settings = SimpleNamespace(tool_parser="json", output_dir="", max_tool_calling_iterations=None, tool_timeout=60.0)
    settings.mask_truncated_completions, settings.resolved_mismatch_mode = False, "token_mask"
    given = run(base, ["bought"], needs_calls=True, place="out")
    given.args = settings
    assert codes(flat(given)) == [] and codes(calls(given)) == [("tools-unused", "error")]
    for number, one in enumerate(base.rollouts):
        one.calls = {"ok": 1} if number < 2 else {"exception": 1}
    (found,) = calls(given)
    assert found.code == "tools-failing" and found.proof.endswith("4 exception, 2 ok.")


def test_a_cold_policy_with_two_answers_is_cold():
    """At any temperature there are but two answers among eight: few differ, and all groups gain a signal."""
    cold = batch([[0]] * 16, size=8, texts=["yes"] * 16)
    open_ = batch([[n % 2] for n in range(16)], size=8, texts=["yes", "no"] * 8)
    given = run(cold, ["right"], again=lambda **changes: open_, group=8)
    given.args = SimpleNamespace(temperature=0.01, top_k=0, top_p=1.0, min_p=None)
    assert codes(temperature(given)) == [("temperature-low", "error")]


def test_a_loss_over_nothing_is_an_error():
    given = run(batch([[0]] * 4), ["right"])
    assert (_all_masked(given).code, _all_masked(given).level) == ("completions-cut", "error")
    assert "max_completion_length=8" in _all_masked(given).evidence


def cut(sampled):
    """A completion that a limit has cut off; the policy has sampled the tokens that are 1."""
    return Rollout([0], [5] * len(sampled), [*map(bool, sampled)], None, "", FinishReason.LENGTH)


def test_a_limit_of_turns_is_named_where_it_has_cut_turns():
    """Turns of at most 3 tokens in completions of at most 8."""
    base = batch([[0]] * 4)
    given = run(base, ["right"], turn_limit=3)
    last_turns = [cut([1, 1, 1]), cut([1, 1, 0, 1, 1, 1]), cut([1, 0, 1, 1, 1])]
    base.rollouts = [*last_turns, cut([1, 1, 1, 0, 0, 1, 1, 1])]  # the last has no room for more
    assert _cutting(given) == ("max_turn_length", 3)
    found = _all_masked(given)
    assert "4 completions are cut at max_turn_length=3," in found.evidence
    assert found.fix.startswith("Raise max_turn_length") and "max_completion_length" not in found.sentence
    base.rollouts = [cut([1, 1, 1]), cut([1] * 8), cut([1, 1, 1, 0, 1, 1])]  # the last one's message did not fit
    assert _cutting(given) == ("max_completion_length", 8)
    base.rollouts = last_turns
    assert _cutting(run(base, ["right"])) == ("max_completion_length", 8)  # nothing limits turns


def test_longer_turns_are_tried_where_turns_are_cut():
    """All are cut at 3 tokens of a turn; with more, turns of 4 to 7 tokens end."""
    base, asked = batch([[0]] * 8), {}
    base.rollouts = [cut([1, 1, 1])] * 8

    def sample(prompts, size, **limits):
        asked.update(limits)
        longer = batch([[1]] * 8)
        turns = [Rollout([0], [5] * 9, [True] * n + [False] * (9 - n), None, "", FinishReason.STOP) for n in (4, 7)]
        longer.rollouts = turns * 4
        return longer

    parts = {"turn_limit": 3, "limit": 8, "codec": SimpleNamespace(max_context=None), "sample": sample}
    given = run(base, ["right"], tokens_within=lambda seconds, completions: 1000, rescores=False, **parts)
    given.args.max_completion_length, given.args.mask_truncated_completions = 8, False
    (found,) = _longer(given)
    assert asked == {"max_turn_length": 8, "max_tokens": 8}  # no turn is longer than a completion
    assert found.change == "With max_turn_length=8 instead of 3" and found.ended == 1.0
    assert found.evidence == "100% of the completions are cut at max_turn_length=3."
    assert found.fix.startswith("Set max_turn_length=8: 95% of those that ended have turns of at most 7 tokens")


@pytest.mark.parametrize(("way", "place"), [(-1, "1 before"), (2, "2 after"), (0, None)])
def test_answers_of_a_neighbouring_row_are_found_by_their_probabilities(way, place):
    """40 rows; the model finds the answer of the row `way` off a nat more probable than any other."""

    def likelihoods(pairs):
        return [-2.0 + (b == a + way) + 0.1 * ((7 * a + 3 * b) % 5) for (a,), (b,) in pairs]

    given = run(batch([[0]] * 2), ["right"])
    given.rows = [{"prompt": str(n), "answer": n} for n in range(40)]
    given.codec = SimpleNamespace(read_row=lambda row: SimpleNamespace(ids=[int(row["prompt"])]))
    given.tokenizer = lambda text, add_special_tokens: {"input_ids": [int(text)]}
    given.likelihoods = likelihoods
    found = _shifted(given, "answer")
    assert found is None if place is None else found.code == "data-columns" and f"row {place}" in found.fix


def test_examples_of_texts_that_rewards_ask_for():
    assert doctest.testmod(reward_texts).failed == 0


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"^<think>.*?</think><answer>.*?</answer>$", "<think>7</think><answer>7</answer>"),
        (r"(?s)^<reasoning>\n.*?\n</reasoning>\n$", "<reasoning>\n7\n</reasoning>\n"),
        (r"#### (\-?[0-9\.\,]+)", "#### 7"),
        (r"<answer>([\s\S]*?)</answer>", "<answer>7</answer>"),
        (r"a{3}b", None),  # more than marks and wildcards
        ("(", None),
    ],
)
def test_a_text_is_made_for_a_pattern(pattern, text):
    assert text_matching(pattern, "7") == text
    assert text is None or re.search(pattern, text)


PATTERN = re.compile("<a>(.*)</a>")


def test_texts_and_patterns_of_a_function_are_read_from_it():
    def function(completions, **kwargs):
        """A docstring is none."""
        return [PATTERN.search(one) is not None and one.endswith("<end>") for one in completions]

    assert sorted(constants_of(function)) == ["<a>(.*)</a>", "<end>"]
    assert constants_of(print) == []


def recalled(values, seconds=0.0):
    """Findings about a function that gives these rewards to all of a batch of [0, 1, 0, 1], call after call."""
    given, clock = iter(values), iter(range(1000))
    base = batch([[0], [1]] * 2)

    def score(samples, rollouts):
        next(clock)
        return torch.tensor(next(given), dtype=torch.double).view(-1, 1), {}

    trainer = SimpleNamespace(run=SimpleNamespace(algebra=SimpleNamespace(generation_batch_size=4)))
    return codes(remembered(run(base, ["f"], score=score, trainer=trainer, steps=3)))


def test_a_function_that_changes_its_mind_late_has_a_memory():
    """Three steps of 4 completions: it is called four times with 4."""
    same, spent = [0, 1, 0, 1], [0, 0, 0, 0]
    assert recalled([same, same, spent]) == [("reward-order", "error")]
    assert recalled([same] * 4 + [spent]) == []  # after the run


def test_a_function_that_scores_other_rows_is_no_failure():
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "x"}]
    base = batch([[NAN], [NAN]], rows=rows[:1])
    totals = lambda rows, texts, function: torch.tensor([NAN, 1.0])  # noqa: E731
    given = run(base, ["words"], taken=rows)
    given.totals = totals
    assert _scores_other_rows(given, 0)
    given.totals = lambda rows, texts, function: torch.tensor([NAN, NAN])
    assert not _scores_other_rows(given, 0)


def test_a_distance_is_a_reward_of_the_wrong_sign():
    """Where the right answer alone gets the least of all, though some ways to write it get more than wrong ones."""

    def distance(row, text):
        return float(sum(a != b for a, b in zip(text.ljust(30), row["answer"].ljust(30), strict=False)))

    rows = [{"prompt": str(n), "answer": word} for n, word in enumerate(("tool", "animal", "food"))]
    given = run(batch([[0], [1]] * 3, rows=rows), ["f"], distance)
    assert codes(sign(given)) == [("reward-sign", "warning")]
    assert codes(sign(run(batch([[0], [1]] * 3, rows=rows), ["f"], lambda row, text: -distance(row, text)))) == []


def called(arguments, answer):
    call = {"type": "function", "function": {"name": "look", "arguments": {"word": arguments}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": answer}]
    return Rollout([0], [5], [True], None, messages, FinishReason.STOP)


def test_a_tool_that_only_answers_an_error_fails():
    broken = [called(word, "Error: unavailable") for word in ("a", "b", "c", "a")]
    assert answered_calls(broken[:1]) == [("look", '{"word": "a"}', "Error: unavailable")]
    assert codes(_only_errors(broken, "error")) == [("tools-failing", "error")]
    assert codes(_only_errors([*broken, called("d", "a noun")], "error")) == []
    assert codes(_only_errors([called(word, "done") for word in "abc"], "error")) == []
    assert codes(_only_errors([called("a", "Error")] * 4, "error")) == []  # of one call, which may be wrong


@pytest.mark.parametrize(("shift", "expected"), [(0, []), (1, [("data-columns", "warning")])])
def test_classes_of_other_rows_are_told_by_what_the_model_prefers(shift, expected):
    """Prompt n is answered by class n % 3 with two nats more than others, and the row has it or the next one."""
    classes = ["0", "1", "2"]
    rows = [{"prompt": str(n), "answer": str((n + shift) % 3)} for n in range(24)]

    def likelihoods(pairs):
        return [2.0 * (prompt[0] % 3 == answer[0]) for prompt, answer in pairs]

    codec = SimpleNamespace(read_row=lambda row: SimpleNamespace(ids=[int(row["prompt"])]))
    given = run(batch([[0]] * 24, size=1, rows=rows), ["right"], taken=rows, codec=codec, likelihoods=likelihoods)
    given.tokenizer = lambda text, **kwargs: {"input_ids": [int(text)]}
    found = _of_other_classes(given, "answer", classes)
    assert codes([found] if found else []) == expected
