"""Rewards that are scored while other groups are still sampled."""

import asyncio
import functools
import threading

import pytest
import torch
from transformers import LlamaForSequenceClassification

from covey.rewards import per_completion
from tests.support import records, runs, tiny


def once(output, **settings):
    torch.manual_seed(0)
    judge = LlamaForSequenceClassification(tiny.config(num_labels=1))
    parts = {
        "reward_funcs": [runs.longer, agrees, judge],
        "reward_processing_classes": [None, None, tiny.tokenizer()],
    }
    trained = runs.trainer(output, **settings, num_generations=2, max_steps=3, parts=parts)
    trained.train()
    return trained


async def agrees(completion_ids, log_extra, **kwargs):
    await asyncio.sleep(0)
    log_extra("length", [len(ids) for ids in completion_ids])
    return [None if len(ids) % 2 else 1.0 for ids in completion_ids]


@pytest.mark.slow
def test_a_run_is_the_same_with_and_without_streaming(tmp_path):
    whole, parts = once(tmp_path / "whole"), once(tmp_path / "parts", stream_rewards=True)
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(whole), runs.weights(parts), strict=True))
    for name in (
        "reward",
        "rewards/longer/mean",
        "rewards/agrees/mean",
        "reward_std",
        "rewards/agrees/failures",
        "loss",
    ):
        assert runs.history(parts, name) == pytest.approx(runs.history(whole, name), nan_ok=True), name
    assert len(runs.history(parts, "phase/reward")) == 3


class Patient:
    """An engine that samples its second group only when the first has been scored."""

    def __init__(self, engine, scored):
        self.engine, self.scored, self.events = engine, scored, []

    def __getattr__(self, name):
        return getattr(self.engine, name)

    async def generate(self, request):
        number = len(self.events)
        self.events.append("asked")
        if number:
            for _ in range(2000):
                if self.scored.is_set():
                    break
                await asyncio.sleep(0.01)
            assert self.scored.is_set(), "the first group is not scored while the second is sampled"
        return await self.engine.generate(request)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_first_group_is_scored_while_the_second_is_sampled(tmp_path, kind):
    scored = threading.Event()
    calls = []

    def slow(completions, **kwargs):
        calls.append(len(completions))
        scored.set()
        return [float(len(text)) for text in completions]

    async def slow_async(completions, **kwargs):
        return slow(completions)

    function = slow if kind == "sync" else slow_async
    trained = runs.trainer(
        tmp_path, stream_rewards=True, max_steps=1, num_generations=4, parts={"reward_funcs": function}
    )
    trained.collector.engine = Patient(trained.collector.engine, scored)
    trained.train()
    assert trained.collector.engine.events == ["asked", "asked"]
    assert calls == [4, 4]


@pytest.mark.slow
def test_a_run_is_the_same_with_and_without_marks(tmp_path):
    def of_length(completion_ids, log_extra, **kwargs):
        log_extra("tokens", [len(ids) for ids in completion_ids])
        return [len(ids) / 10 for ids in completion_ids]

    plain = runs.trainer(tmp_path / "plain", max_steps=3, parts={"reward_funcs": [of_length, agrees]})
    plain.train()
    each = [per_completion(functools.partial(of_length)), per_completion(functools.partial(agrees))]
    parts = runs.trainer(tmp_path / "parts", max_steps=3, parts={"reward_funcs": each})
    parts.train()
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(plain), runs.weights(parts), strict=True))
    tokens = [[row["columns"]["tokens"] for row in records.rows(tmp_path / name)] for name in ("plain", "parts")]
    assert tokens[0] == tokens[1]
    assert runs.history(parts, "rewards/of_length/mean") == runs.history(plain, "rewards/of_length/mean")


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_rollout_is_scored_while_its_siblings_go_on(tmp_path, kind):
    scored, calls = threading.Event(), []

    @per_completion
    def judge(completions, **kwargs):
        calls.append(len(completions))
        scored.set()
        return [float(len(text)) for text in completions]

    @per_completion
    async def judge_async(completions, **kwargs):
        return judge(completions)

    async def waits(row, engine):
        episode = engine.begin()
        await episode.sample()
        for _ in range(2000):
            if engine.sibling == 0 or scored.is_set():
                break
            await asyncio.sleep(0.01)
        assert engine.sibling == 0 or scored.is_set(), "the first is not scored while the others continue"
        return episode.done()

    trained = runs.trainer(
        tmp_path,
        max_steps=1,
        num_generations=4,
        parts={"reward_funcs": judge if kind == "sync" else judge_async, "rollout_func": waits},
    )
    trained.train()
    assert calls == [1] * 8
    assert runs.history(trained, "rollouts/failed") == [0.0]


@pytest.mark.slow
def test_log_and_timeline_show_what_was_scored_during_sampling(tmp_path):
    @per_completion
    async def judge(completions, **kwargs):
        await asyncio.sleep(0.05)
        return [1.0] * len(completions)

    async def waits(row, engine):
        episode = engine.begin()
        await episode.sample()
        await asyncio.sleep(0.2 * engine.sibling)
        return episode.done()

    def run(name, function):
        parts = {"reward_funcs": function, "rollout_func": waits}
        trained = runs.trainer(tmp_path / name, max_steps=2, num_generations=4, parts=parts)
        trained.train()
        return trained

    trained = run("marked", judge)
    # Of the four calls of a group, 0.05 s each and 0.2 s apart, the last begins when no rollout is under way any more.
    assert all(overlap > 0.1 for overlap in runs.history(trained, "overlap/reward"))
    timeline = trained.timeline
    assert timeline.lanes() == ["trainer", "rollouts", "judge"]
    assert len(timeline.spans("rollouts")) == 8 and len(timeline.spans("judge")) == 8
    assert {"generate", "reward", "train"} <= {name for name, _ in timeline.spans("trainer")}
    assert runs.history(run("unmarked", runs.longer), "overlap/reward") == []
