"""Checks of `covey doctor` on rewards that are given as numbers, without a model."""

import json
from types import SimpleNamespace

import torch

from covey.cli.doctor.columns import _instead
from covey.cli.doctor.completions import _stopped
from covey.cli.doctor.examined import SampleBatch
from covey.cli.doctor.rewards import _cancelling, _silent_about_wrong, scale, sign
from covey.core.records import FinishReason, PromptSample, Rollout

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

    settings = {"group": 2, "failure": None, "rescores": True, "single": True, "weights": base.weights} | changes
    settings["suite"] = SimpleNamespace(names=names)
    return SimpleNamespace(
        base=base,
        args=args,
        totals=all_totals,
        answering=lambda row, text: text,
        has_time=lambda code: True,
        **settings,
    )


def test_functions_that_cancel_are_named():
    found = _cancelling(batch([[1, 0], [0, 1], [1, 0], [1, 0]]), ["right", "wrong"])
    assert found is not None and (found.code, found.level) == ("reward-constant", "error")
    assert "right" in found.evidence and "wrong" in found.evidence and "-1.00" in found.proof
    tenths = batch([[0.1, 0.2], [0.2, 0.1], [0.3, 0.0], [0.3, 0.0]])  # whose sums differ by rounding
    assert _cancelling(tenths, ["a", "b"]) is not None
    assert _cancelling(batch([[1, 0], [0, 1]], weights=[1.0, 0.9]), ["a", "b"]) is None
    assert _cancelling(batch([[1, 1], [0, 1]]), ["a", "b"]) is None  # one is constant


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
    monkeypatch.setattr("covey.cli.doctor.completions.end_token_ids", lambda model, tokenizer: {9})
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
