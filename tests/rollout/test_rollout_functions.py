"""Rollout functions of the user's own: what they are given, what they may return, what they cannot do to a run."""

import asyncio
import re
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import pytest

from covey.core.engine import SamplingParams
from covey.core.records import FinishReason, Rollout
from covey.engines.scripted import ScriptedEngine
from covey.rollout.collector import Collector, PromptSample, RolloutSpec
from covey.rollout.prompts import PromptCodec
from covey.rollout.seats import checked_seats
from covey.rollout.tools.turn_template import TurnTemplates
from covey.rollout.user_functions import GroupFunction, RolloutFunction, RolloutValidator, _run_into, form_of
from covey.runtime.calling_thread import threaded
from tests.support import tiny

TOKENIZER = tiny.tokenizer()
EOS = TOKENIZER.eos_token_id
PARAMS = SamplingParams(max_tokens=40)


def letters(prompt_ids, seed):
    """Three letters that the seed decides."""
    return [14 + seed % 7, 14 + seed // 7 % 7, 14 + seed // 49 % 7, EOS]


def wait_for(condition, seconds=10.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def collector(function, engine=None, timeout=60.0, kind=RolloutFunction, limits=False):
    codec = PromptCodec(TOKENIZER, None, None)
    bounds = RolloutValidator(tiny.config().vocab_size, None)
    agency = RolloutSpec(
        kind(function, timeout, bounds), TurnTemplates(codec, [EOS]), timeout, bounds if limits else None
    )
    return Collector(engine or ScriptedEngine(letters), codec, 7, agency)


def draws(prompts=2, group=4):
    return [PromptSample({"prompt": f"{p}+{p}=", "answer": 2 * p}, p, s) for p in range(prompts) for s in range(group)]


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


def test_the_last_turn_alone_may_be_trained_on():
    """With strands, the last turn in the order of time: the middle one here, "5 6" at 3 and 4, between 2 and 7."""

    async def strands(row, engine):
        ids, sampled = [10, 11, 12, 5, 6, 20, 21, 7], [True, True, False, True, True, False, True, True]
        made = Rollout([1], ids, sampled, None, "", FinishReason.STOP, strands=[(3, 0), (5, 0)])
        made.turn_ends = [1, 7, 4]
        return made

    for function, trained in ((twice, range(9, 13)), (strands, range(3, 5)), (once, range(4))):
        made = collector(function)
        made.spec = replace(made.spec, trained_turns="last")
        (rollout,) = collect(made, draws(1, 1))
        assert [index for index, sampled in enumerate(rollout.sampled) if sampled] == list(trained)


# ---- one rollout -----------------------------------------------------------------------------------------------------


def test_one_turn_is_what_would_be_sampled_without_a_function():
    plain = Collector(ScriptedEngine(letters), PromptCodec(TOKENIZER, None, None), 7)
    expected, found = collect(plain), collect(collector(once))
    assert [one.completion_ids for one in found] == [one.completion_ids for one in expected]
    assert [one.group for one in found] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [one.extras for one in found] == [{"answer": 0}] * 4 + [{"answer": 2}] * 4


def test_a_group_on_another_thread_shares_one_prompt_computation():
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


def test_equal_batch_keys_sample_equally_other_keys_do_not():
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
    assert failed == [2, 6] and rollouts[2].error.startswith("RuntimeError: no luck")
    assert len(rollouts[2].completion_ids) == 4, "what there was until then"


@pytest.mark.slow
def test_a_late_function_fails_its_rollout_and_blocks_no_other():
    release = threading.Event()

    async def blocks(row, engine):
        if (row["answer"], engine.sibling) == (2, 3):
            release.wait(600)  # and not `await asyncio.sleep`
        return await once(row, engine)

    made = collector(blocks, timeout=0.5)
    collect(made)
    release.set()
    again = collect(collector(once))
    assert all(one.finish is FinishReason.STOP for one in again)


def test_an_engine_error_ends_the_batch_even_if_it_is_caught():
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
        ({"completion_ids": [5, 1000]}, "token 1000 of a rollout is not in the model's vocabulary"),
        ({"completion_ids": [5, True]}, "token True of a rollout"),
        ({"prompt_ids": []}, "an empty prompt"),
        ({"logprobs": [float("nan"), 0.0]}, "log-probs that are not finite"),
        ({"logprobs": [-1.0, 5.0]}, "a log-prob of 5, and probabilities are at most 1"),
        ({"entropies": [0.0]}, "entropies: give one for each token"),
        ({"completion": 5}, "text or a list of messages with a 'role', not int"),
        ({"completion": ["a"]}, "text or a list of messages"),
        ({"finish": "done"}, "'done' is not a valid FinishReason"),
        ({"extras": None}, "has no attribute 'items'"),
        ({"versions": ["new", "newer"]}, "invalid literal for int"),
        ({"turn_ends": [7]}, "give the index of the last token of each turn"),
        ({"calls": {"ok": "many"}}, "invalid literal for int"),
    ],
)
def test_a_rollout_that_cannot_be_trained_on_is_a_failure(changes, error):
    async def returns(row, engine):
        rollout = Rollout([5], [5, 6], [True, True], None, "ab", FinishReason.STOP)
        for name, value in changes.items():
            setattr(rollout, name, value)
        return rollout

    assert error in collect(collector(returns))[0].error


class Endless:
    def __str__(self):
        while True:
            pass


@pytest.mark.slow
def test_what_a_function_returns_is_read_under_its_deadline():
    async def returns(row, engine):
        rollout = await once(row, engine)
        if engine.sibling == 1:
            rollout.completion = [{"role": "assistant", "content": Endless()}]
        return rollout

    rollouts = collect(collector(returns, timeout=0.5), draws(prompts=1))
    assert rollouts[0].error is None and "took longer than rollout_timeout=0.5 s" in rollouts[1].error


def test_a_rollout_is_nobody_elses():
    """One that is kept, returned again and changed later is a rollout of its own each time."""
    kept = []

    async def returns(row, engine):
        if not kept:
            kept.append(await once(row, engine))
        kept[0].group = 5
        return kept[0]

    first, second, *_ = collect(collector(returns))
    kept[0].completion_ids.clear()
    kept[0].extras["answer"] = "spoilt"
    assert first is not second and len(first.completion_ids) == 4 and first.extras == {"answer": 0}


def test_invalid_tokens_of_a_failed_episode_are_not_trained_on():
    async def spoils(row, engine):
        episode = engine.begin()
        await episode.sample()
        if engine.sibling == 1:
            episode.completion_ids.append(10**9)
        if engine.sibling == 2:
            episode.messages.append({"role": "user", "content": "no turn of mine"})
            episode.sampled.clear()
        if engine.sibling:
            raise RuntimeError("enough")
        return episode.done()

    rollouts = collect(collector(spoils, limits=True), draws(prompts=1))
    assert rollouts[0].error is None and all(one.error.startswith("RuntimeError: enough") for one in rollouts[1:])
    assert [len(one.completion_ids) for one in rollouts] == [4, 0, 0, 4]


def test_nothing_is_sampled_for_a_rollout_that_has_ended():
    tasks = []

    async def leaves_a_task(row, engine):
        async def samples_on():
            while True:
                await engine.generate("more", max_tokens=2)

        tasks.append(asyncio.get_running_loop().create_task(samples_on()))
        return await once(row, engine)

    engine = ScriptedEngine(letters)
    made = collector(leaves_a_task, engine)
    collect(made, draws(prompts=1, group=2))
    before = len(engine.served)
    wait_for(lambda: all(task.done() for task in tasks))
    assert len(engine.served) == before
    assert all("the rollout has ended" in str(one.exception()) for one in tasks if not one.cancelled())


def test_a_request_cancelled_before_it_starts_is_answered():
    future = Future()

    async def never_entered():
        raise AssertionError("it was cancelled")

    async def cancels():
        _run_into(never_entered(), future)
        (task,) = asyncio.all_tasks() - {asyncio.current_task()}
        task.cancel()

    asyncio.run(cancels())
    assert future.cancelled()


def test_a_function_that_will_not_be_cancelled_is_left_behind():
    release = threading.Event()

    async def goes_on(row, engine):
        if engine.sibling:
            return await once(row, engine)
        while not release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return await once(row, engine)

    rollouts = collect(collector(goes_on, timeout=0.3), draws(prompts=1))
    assert [one.finish is FinishReason.ERROR for one in rollouts] == [True, False, False, False]
    assert "took longer than rollout_timeout=0.3 s" in rollouts[0].error
    release.set()


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()])
def test_whatever_a_function_raises_costs_its_rollout(error):
    async def raises(row, engine):
        if engine.sibling == 1:
            raise error
        return await once(row, engine)

    rollouts = collect(collector(raises))
    assert [i for i, one in enumerate(rollouts) if one.error] == [1, 5]
    assert rollouts[1].error.startswith(type(error).__name__)


def test_a_function_that_changes_its_row_affects_no_other():
    async def spoils(row, engine):
        row["answer"] = row["prompt"] = "mine"
        return await once(row, engine)

    rows = draws()
    rollouts = collect(collector(spoils), rows)
    assert [draw.row["answer"] for draw in rows] == [0] * 4 + [2] * 4
    assert TOKENIZER.decode(rollouts[0].prompt_ids) == "mine"


# ---- a group ---------------------------------------------------------------------------------------------------------


async def tree(row, engine, n):
    """A first turn, and n second ones."""
    stem = engine.begin()
    await stem.sample()
    branches = [stem.fork() for _ in range(n)]
    for branch in branches:
        branch.write(" so ")
    await asyncio.gather(*(branch.sample() for branch in branches))
    return [branch.done(place=place) for place, branch in enumerate(branches)]


def test_a_group_is_played_together():
    engine = ScriptedEngine(letters)
    rollouts = collect(collector(tree, engine, kind=GroupFunction))
    for group in (rollouts[:4], rollouts[4:]):
        assert len({tuple(one.completion_ids[:8]) for one in group}) == 1, "branches share their stem"
        assert len({tuple(one.completion_ids) for one in group}) == 4, "and differ after it"
        assert [one.extras["place"] for one in group] == [0, 1, 2, 3]
    assert rollouts[0].completion_ids[:4] != rollouts[4].completion_ids[:4]
    assert [one.group for one in rollouts] == [0] * 4 + [1] * 4
    assert [one.request.n for one in engine.served] == [1, 1, 4, 4], "branches are sampled in one request"


def test_a_group_over_two_processes_is_two_trees():
    made = collector(tree, kind=GroupFunction)
    here, there = collect(made, draws(1)[:2]), collect(made, draws(1)[2:])
    assert len(here) == len(there) == 2
    assert here[0].completion_ids[:4] != there[0].completion_ids[:4]


def test_a_group_function_may_play_each_by_itself():
    async def apart(row, engine, n):
        async def one():
            episode = engine.begin()
            await episode.sample()
            return episode.done()

        return await asyncio.gather(*(one() for _ in range(n)))

    engine = ScriptedEngine(letters)
    rollouts = collect(collector(apart, engine, kind=GroupFunction), draws(prompts=1))
    assert len({tuple(one.completion_ids) for one in rollouts}) == 4
    assert [one.request.n for one in engine.served] == [4]


def test_a_rollout_that_is_returned_twice_counts_twice():
    async def doubled(row, engine, n):
        return [await once(row, engine)] * n

    rollouts = collect(collector(doubled, kind=GroupFunction))
    assert [one.group for one in rollouts] == [0] * 4 + [1] * 4
    assert rollouts[0] is not rollouts[1] and rollouts[0].completion_ids == rollouts[1].completion_ids


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        (None, "asked for 4 rollouts of a prompt and returned None"),
        ([1, "x", 2], "returned 3 of int, str"),
        ([], r"returned \[\]"),
    ],
)
def test_a_wrong_result_of_a_group_function_fails_its_group(returned, error):
    async def plays(row, engine, n):
        return returned if row["answer"] == 2 else await tree(row, engine, n)

    rollouts = collect(collector(plays, kind=GroupFunction))
    assert [one.finish is FinishReason.ERROR for one in rollouts] == [False] * 4 + [True] * 4
    assert re.search(error, rollouts[4].error)


def test_what_a_group_function_raises_costs_its_group():
    async def plays(row, engine, n):
        rollouts = await tree(row, engine, n)
        return rollouts if row["answer"] == 2 else 1 / 0

    rollouts = collect(collector(plays, kind=GroupFunction))
    assert all(one.error.startswith("ZeroDivisionError: division by zero") for one in rollouts[:4])
    assert [one.error for one in rollouts[4:]] == [None] * 4
    assert len({id(one) for one in rollouts}) == 8


def test_a_late_group_is_given_up():
    async def plays(row, engine, n):
        if row["answer"] == 2:
            await asyncio.sleep(600)
        return await tree(row, engine, n)

    rollouts = collect(collector(plays, timeout=0.5, kind=GroupFunction))
    assert [one.error for one in rollouts] == [None] * 4 + ["the rollout took longer than rollout_timeout=0.5 s"] * 4


# ---- the forms -------------------------------------------------------------------------------------------------------


def test_a_function_says_by_its_arguments_what_it_plays():
    class Player:
        async def __call__(self, row, engine):
            return await once(row, engine)

    async def with_settings(row, engine, depth=3):
        return await once(row, engine)

    async def anything(*args):
        return await once(*args)

    def batch(prompts, trainer):
        return {}

    assert [form_of(one) for one in (once, Player(), with_settings, anything)] == ["rollout"] * 4
    assert [form_of(tree), form_of(partial(tree)), form_of(partial(tree, n=4))] == ["group", "group", "rollout"]
    assert form_of(batch) == form_of(dict) == "batch"


def test_a_function_of_another_form_is_refused():
    async def alone(row):
        return None

    async def waits(prompts, trainer):
        return {}

    def blocks(row, engine, n):
        return []

    def prompts_alone(prompts):
        return {}

    with pytest.raises(ValueError, match=r"of \(row, engine, n\) that is not async.*`async def`"):
        form_of(blocks)
    with pytest.raises(ValueError, match=r"of \(prompts\), but is called with \(prompts, trainer\)"):
        form_of(prompts_alone)
    with pytest.raises(ValueError, match=r"an async function of \(row\).*`async def rollouts\(row, engine, n\)`"):
        form_of(alone)
    with pytest.raises(ValueError, match=r"of \(prompts, trainer\).*without async, `def rollout\(prompts, trainer\)`"):
        form_of(waits)


# ---- games -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("begun", "roles", "tokens"),
    [
        (["first", "second"], ["first", "second"], [4, 4]),
        (["first"], ["first", ""], [4, 0]),
        ([], ["", ""], [0, 0]),
        (["solver", "solver", "solver"], ["solver", "solver"], [4, 4]),  # more than are trained: drafts
        (["", "first", "second"], ["first", "second"], [4, 4]),
        (["", ""], ["", ""], [4, 4]),  # no roles at all
    ],
)
def test_rollouts_of_a_failed_game_have_the_roles_that_its_episodes_were_begun_with(begun, roles, tokens):
    """The second game of a prompt fails after a turn of each episode."""

    async def play(row, engine, n):
        episodes = []
        for role in begun if engine.sibling == 2 else ["first", "second"]:
            episodes.append(engine.begin(f"{role}: ", role=role, game=7))
            await episodes[-1].sample()
        if engine.sibling == 2:
            raise RuntimeError("the board fell")
        return [one.done(points=1.0) for one in episodes]

    made = collector(play, kind=GroupFunction, limits=True)
    made.spec = replace(made.spec, rollouts_per_game=2)
    found = collect(made, draws(1, 4))
    assert [one.role for one in found] == ["first", "second", *roles]
    assert [one.game for one in found] == [0, 0, 1, 1]
    assert [len(one.completion_ids) for one in found] == [4, 4, *tokens]
    if roles[0] != roles[1]:
        texts = [TOKENIZER.decode(one.prompt_ids) for one in found[2:] if one.completion_ids]
        assert texts == [f"{role}: " for role in roles if role]
    assert ["the board fell" in (one.error or "") for one in found] == [False, False, True, True]


def test_a_failed_rollout_has_the_role_that_its_episode_was_begun_with():
    async def play(row, engine):
        engine.begin("1", role="judge")
        episode = engine.begin("2", role="first", game=3)
        await episode.sample()
        raise RuntimeError("the board fell")

    made = collector(play, limits=True)
    made.spec = replace(made.spec, seats=checked_seats({"judge": lambda messages: "7"}, 9.0))
    found = collect(made, draws(1, 2))
    assert [(one.role, one.game, len(one.completion_ids)) for one in found] == [("first", 3, 4)] * 2


def test_a_failed_call_that_plays_several_games_keeps_their_numbers():
    async def play(row, engine, n):
        for game in range(2):
            engine.begin(f"{game}", role="first", game=game), engine.begin(f"{game}", role="second", game=game)
        raise RuntimeError("the board fell")

    found = collect(collector(play, kind=GroupFunction, limits=True), draws(1, 4))
    assert [(one.role, one.game) for one in found] == [("first", 0), ("second", 0), ("first", 1), ("second", 1)]


def test_roles_of_opponents_are_none_of_failed_rollouts():
    async def play(row, engine, n):
        engine.begin("1", role="judge"), engine.begin("2", role="first")
        raise RuntimeError("the board fell")

    made = collector(play, kind=GroupFunction, limits=True)
    made.spec = replace(made.spec, rollouts_per_game=2, seats=checked_seats({"judge": lambda messages: "7"}, 9.0))
    assert [one.role for one in collect(made, draws(1, 2))] == ["first", ""]


@pytest.mark.parametrize("given", [{"role": "a b"}, {"game": -1}])
def test_an_episode_is_begun_with_a_role_and_a_game_or_not_at_all(given):
    async def play(row, engine):
        return engine.begin(**given).done()

    (rollout,) = collect(collector(play), draws(1, 1))
    assert "ValueError: an episode" in rollout.error and repr(next(iter(given.values()))) in rollout.error


def against(function, play, timeout=60.0):
    made = collector(play, timeout=timeout)
    made.spec = replace(made.spec, seats=checked_seats({"other": function}, timeout))
    return made


def test_a_seat_that_blocks_holds_up_no_other_game():
    """The first game's opponent waits until the second game has ended."""
    ended, waited = threading.Event(), []

    def other(messages):
        waited.append(ended.wait(5.0))
        return "7"

    async def play(row, engine):
        if engine.sibling == 0:
            await engine.seat("other").begin("Your move.").sample()
        episode = engine.begin()
        await episode.sample()
        if engine.sibling == 1:
            ended.set()
        return episode.done()

    assert [one.error for one in collect(against(other, play), draws(1, 2))] == [None, None] and waited == [True]


def test_a_seat_has_the_same_results_on_a_thread_and_on_the_loop():
    """Each answer depends on the number of earlier calls."""

    def made(wait):
        count = []

        def other(messages):
            count.append(None)
            time.sleep(wait * (len(count) % 3))
            return f"{len(messages[-1]['content'])} {len(count)}"

        async def on_the_loop(messages):
            return other(messages)

        return other, on_the_loop

    async def play(row, engine):
        episode, talk = engine.begin(), engine.seat("other").begin("Begin.")
        for _ in range(3):
            said = (await talk.sample()).text
            episode.write(said) if episode.completion_ids else None
            talk.write((await episode.sample(max_tokens=3)).text)
        return episode.done()

    threads, loop = (against(made(0.005)[0], play), against(made(0.0)[1], play))
    found, expected = collect(threads), collect(loop)
    assert [one.error for one in found] == [None] * 8
    assert [one.completion_ids for one in found] == [one.completion_ids for one in expected]


@pytest.mark.parametrize("marked", [False, True])
def test_a_seat_that_hangs_costs_its_own_game(marked):
    """The first game's call does not return; the others ask the seat, too, if its calls may run concurrently."""

    def other(messages):
        while messages[-1]["content"] == "hang":
            time.sleep(0.01)
        return "7"

    async def play(row, engine):
        if engine.sibling == 0 or marked:
            await engine.seat("other").begin("hang" if engine.sibling == 0 else "go on").sample()
        episode = engine.begin()
        await episode.sample()
        return episode.done()

    lost, *others = collect(against(threaded(other) if marked else other, play, timeout=1.5), draws(1, 4))
    assert "rollout_timeout=1.5" in lost.error and [one.error for one in others] == [None] * 3
