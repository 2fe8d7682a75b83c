"""Rollout functions of the user's own: what they are given, what they may return, what they cannot do to a run."""

import asyncio
import threading
import time

import pytest

import tiny
from covey.core.rollout import FinishReason, Rollout
from covey.rollout.collector import Agency, Collector, Draw
from covey.rollout.engine import SamplingParams
from covey.rollout.engines.scripted import ScriptedEngine
from covey.rollout.episode import TurnTemplates
from covey.rollout.functions import Limits, RolloutFunction
from covey.rollout.prompts import PromptCodec

TOKENIZER = tiny.tokenizer()
EOS = TOKENIZER.eos_token_id
PARAMS = SamplingParams(max_tokens=40)


def letters(prompt_ids, seed):
    """Three letters that the seed decides."""
    return [14 + seed % 7, 14 + seed // 7 % 7, 14 + seed // 49 % 7, EOS]


def collector(function, engine=None, timeout=60.0, kind=RolloutFunction):
    codec = PromptCodec(TOKENIZER, None, None)
    play = kind(function, timeout, Limits(tiny.config().vocab_size, None))
    agency = Agency(play, TurnTemplates(codec, [EOS]), timeout)
    return Collector(engine or ScriptedEngine(letters), codec, 7, agency)


def draws(prompts=2, group=4):
    return [Draw({"prompt": f"{p}+{p}=", "answer": 2 * p}, p, s) for p in range(prompts) for s in range(group)]


def collect(made, some=None, key=("train", 0)):
    return made.collect(draws() if some is None else some, PARAMS, key)


async def once(row, engine):
    episode = engine.begin()
    await episode.sample()
    return episode.done(answer=row["answer"])


async def twice(row, engine):
    episode = engine.begin()
    await episode.sample()
    if episode.write(" and "):
        await episode.sample()
    return episode.done()


# ---- one rollout -----------------------------------------------------------------------------------------------------


def test_one_turn_is_what_would_be_sampled_without_a_function():
    plain = Collector(ScriptedEngine(letters), PromptCodec(TOKENIZER, None, None), 7)
    expected, found = collect(plain), collect(collector(once))
    assert [one.completion_ids for one in found] == [one.completion_ids for one in expected]
    assert [one.group for one in found] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [one.extras for one in found] == [{"answer": 0}] * 4 + [{"answer": 2}] * 4


def test_siblings_prompt_is_computed_once_though_they_run_on_another_thread():
    for _ in range(5):  # two threads meet in many ways
        engine = ScriptedEngine(letters)
        collect(collector(twice, engine), draws(prompts=3, group=8))
        first = [one.request for one in engine.served if len(one.request.prompt_ids) == 4]
        assert [(TOKENIZER.decode(one.prompt_ids), one.n) for one in first] == [("0+0=", 8), ("1+1=", 8), ("2+2=", 8)]


def test_branches_that_are_sampled_at_once_are_one_request():
    async def branches(row, engine):
        stem = engine.begin()
        await stem.sample()
        forks = [stem.fork() for _ in range(5)]
        await asyncio.gather(*(fork.sample() for fork in forks))
        return forks[0].done()

    engine = ScriptedEngine(letters)
    collect(collector(branches, engine), draws(prompts=1, group=1))
    assert [one.request.n for one in engine.served] == [1, 5]


def test_two_generations_of_one_function_are_equal_and_others_are_not():
    made = collector(twice)
    first, again, other = (collect(made, key=("train", number)) for number in (0, 0, 1))
    assert [one.completion_ids for one in first] == [one.completion_ids for one in again]
    assert [one.completion_ids for one in first] != [one.completion_ids for one in other]


def test_functions_run_apart_from_the_loop_that_samples():
    threads = set()

    async def look(row, engine):
        threads.add(threading.current_thread())
        return await once(row, engine)

    collect(collector(look))
    assert len(threads) == 1 and threading.current_thread() not in threads


def test_a_failing_function_costs_its_rollout():
    async def sometimes(row, engine):
        rollout = await once(row, engine)
        if engine.sibling == 2:
            raise RuntimeError("no luck")
        return rollout

    rollouts = collect(collector(sometimes))
    failed = [i for i, one in enumerate(rollouts) if one.finish is FinishReason.ERROR]
    assert failed == [2, 6] and rollouts[2].error == "RuntimeError: no luck"
    assert len(rollouts[2].completion_ids) == 4, "what there was until then"


def test_a_late_function_costs_its_rollout_and_blocks_nobody_for_long():
    async def blocks(row, engine):
        if (row["answer"], engine.sibling) == (2, 3):
            time.sleep(3)  # and not `await asyncio.sleep`
        return await once(row, engine)

    began = time.monotonic()
    made = collector(blocks, timeout=0.5)
    collect(made)
    assert time.monotonic() - began < 3
    again = collect(collector(once))
    assert all(one.finish is FinishReason.STOP for one in again)


def test_an_engines_error_ends_the_batch_whatever_the_function_makes_of_it():
    def broken(prompt_ids, seed):
        raise RuntimeError("no weights")

    async def calm(row, engine):
        try:
            return await once(row, engine)
        except RuntimeError:
            return engine.begin().done()

    with pytest.raises(RuntimeError, match="no weights"):
        collect(collector(calm, ScriptedEngine(broken)))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"completion_ids": [5, 1000]}, "token 1000 of a rollout is no token of the model"),
        ({"completion_ids": [5, True]}, "token True of a rollout"),
        ({"prompt_ids": []}, "an empty prompt"),
        ({"logprobs": [float("nan"), 0.0]}, "log-probs that are not finite"),
        ({"entropies": [0.0]}, "one value a token"),
    ],
)
def test_a_rollout_that_cannot_be_trained_on_is_a_failure(changes, error):
    async def returns(row, engine):
        fields = {"prompt_ids": [5], "completion_ids": [5, 6], "sampled": [True, True], "logprobs": None}
        return Rollout(**{**fields, **changes}, completion="ab", finish=FinishReason.STOP)

    assert error in collect(collector(returns))[0].error


def test_what_a_function_does_to_its_row_is_no_business_of_others():
    async def spoils(row, engine):
        row["answer"] = row["prompt"] = "mine"
        return await once(row, engine)

    rows = draws()
    rollouts = collect(collector(spoils), rows)
    assert [draw.row["answer"] for draw in rows] == [0] * 4 + [2] * 4
    assert TOKENIZER.decode(rollouts[0].prompt_ids) == "mine"
