"""Whatever tools, rollout functions, environments and rewards do, the run continues; nothing leaks between rollouts.

The catalogue is in `hostile` and the modules it names; benchmarks/survival.md has a row for each case.
"""

import asyncio
import gc
import math
import os
import re
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support import runs
from tests.support.hostile import environments as hostile_environments
from tests.support.hostile import functions as hostile_functions
from tests.support.hostile import rewards as hostile_rewards
from tests.support.hostile import tools as hostile_tools
from tests.support.hostile.cases import ENDS, FAILS, Scene, acts_badly, failed
from tests.support.hostile.page import SECTIONS, render

PAGE = Path(__file__).parents[3] / "benchmarks" / "survival.md"

MOST_SECONDS = 300.0  # on the busiest machine
"""Of a run; deadlines are below a second in most of them, and the machine may be shared."""


PATIENCE = {
    "covey.runtime.loop_thread.OWNER_CHECK_SECONDS": 0.05,
    "covey.runtime.deadlines.INTERRUPT_INTERVAL": 0.1,
    "covey.rewards.call.LOOP_GRACE": 0.3,
    "covey.runtime.loop_thread.RESPONSE_SECONDS": 0.3,
}
"""What is waited for beyond deadlines: a second each, as a rule."""


@pytest.fixture
def scene(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, seconds in PATIENCE.items():
        monkeypatch.setattr(name, seconds)
    made = Scene(tmp_path)
    yield made
    made.release.set()


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """(case) -> the run of it and its weights, made once: what a run is like in which nobody is hostile."""
    made = {}

    def run(case):
        if case.parts not in made:
            scene = Scene(tmp_path_factory.mktemp("benign"))
            trained = scene.trainer(case.parts(scene))
            trained.train()
            made[case.parts] = scene, runs.weights(trained)
        return made[case.parts]

    return run


def named(case):
    return re.sub(r"[^\w]+", "-", case.what)


def train(case, scene):
    """The trainer, after its steps."""
    began = time.monotonic()
    trained = scene.trainer(case.parts(scene), **case.settings)
    trained.train()
    print(f"{time.monotonic() - began:.1f} s")
    assert time.monotonic() - began < MOST_SECONDS
    assert trained.state.global_step == case.steps
    assert all(torch.isfinite(weight).all() for weight in runs.weights(trained))
    logged = [entry for entry in trained.state.log_history if "loss" in entry]
    assert len(logged) == case.steps
    assert all(math.isfinite(value) for entry in logged for value in entry.values() if isinstance(value, float))
    for name in case.counted:
        assert all(entry[name] > 0 for entry in logged), name
    return trained


def tokens(rollout):
    return rollout.prompt_ids, rollout.completion_ids, rollout.sampled, rollout.completion, rollout.finish


def same(trained, weights):
    return all(torch.equal(a, b) for a, b in zip(runs.weights(trained), weights, strict=True))


def compare(case, scene, benign, hostile):
    """Whoever is not hostile has the tokens that it has without the others; yields who is, beside what it would be."""
    assert len(scene.rollout_batches) == case.steps
    for here, there in zip(scene.rollout_batches, benign.rollout_batches[: case.steps], strict=True):
        bad = [hostile(place, rollout) for place, rollout in enumerate(there)]
        assert any(bad) and not all(bad)
        for mine, theirs, is_bad in zip(here, there, bad, strict=True):
            late = mine.calls == {"timeout": 1} or "took longer" in (mine.error or "")
            if is_bad:
                yield mine, theirs
            elif not (case.delays and late):
                assert tokens(mine) == tokens(theirs), (mine.calls, mine.error)


def check(case, mine, theirs):
    """Whether what is hostile came to what the table says."""
    assert failed(mine) == (case.outcome == FAILS), mine.error
    if case.harmless:
        assert tokens(mine) == tokens(theirs)
    assert case.check(mine, theirs)
    told = mine.error if failed(mine) else str(mine.completion[1:2])
    assert all(re.search(pattern, told) for pattern in case.says), told


def play(case, scene, without, benign, hostile):
    """Train with a case whose rollouts are hostile, some of them."""
    if case.outcome == ENDS:
        return refused(case, scene)
    benign, weights = without(case.benign or benign)
    trained = train(case, scene)
    for mine, theirs in compare(case, scene, benign, hostile):
        check(case, mine, theirs)
    assert not case.harmless or same(trained, weights)


def refused(case, scene):
    with pytest.raises(case.kind) as caught:
        scene.trainer(case.parts(scene), **case.settings).train()
    assert all(re.search(pattern, str(caught.value)) for pattern in case.says), str(caught.value)


def each(cases):
    """Every case. Slow are those that a test of a lower layer shows, and all but three that come to the same."""
    alike, marked = Counter(), []
    for case in cases:
        kind = case.outcome, case.counted, case.kind, bool(case.settings), case.delays, case.harmless
        alike[kind] += not case.shown_by
        slow = case.shown_by or alike[kind] > 3
        marked.append(pytest.param(case, id=named(case), marks=[pytest.mark.slow] if slow else []))
    return pytest.mark.parametrize("case", marked)


@pytest.mark.slow
@each(hostile_tools.TOOLS)
def test_a_hostile_tool_costs_its_own_call(case, scene, without, nothing_is_left):
    play(case, scene, without, hostile_tools.BENIGN, lambda place, rollout: acts_badly(rollout))


@each(hostile_functions.FUNCTIONS)
def test_a_hostile_rollout_function_costs_its_own_rollout(case, scene, without, nothing_is_left):
    play(case, scene, without, hostile_functions.BENIGN, lambda place, rollout: place % 4 == hostile_functions.HOSTILE)


@pytest.mark.slow
@each(hostile_environments.ENVIRONMENTS)
def test_a_hostile_environment_costs_its_own_rollout(case, scene, without, nothing_is_left):
    play(case, scene, without, hostile_environments.BENIGN, lambda place, rollout: place >= 4)  # of the odd prompt


@pytest.mark.slow
@each(hostile_rewards.REWARDS)
def test_a_hostile_reward_costs_its_own_rewards(case, scene, without, nothing_is_left):
    if case.outcome == ENDS:
        return refused(case, scene)
    benign, weights = without(hostile_rewards.BENIGN)
    trained = train(case, scene)
    for here, there in zip(scene.rollout_batches, benign.rollout_batches[: case.steps], strict=True):
        assert list(map(tokens, here)) == list(map(tokens, there))
    assert scene.given == benign.given[: case.steps], "what the next function is given"
    assert not case.harmless or same(trained, weights)


@pytest.fixture
def nothing_is_left(request, scene):
    """After a run none of our threads, tasks and processes is there, and no setting is another than before."""
    case = request.node.callspec.params["case"]
    before, settings, used = {*threading.enumerate(), *tasks()}, process_settings(), memory()
    earlier = children()
    yield
    if case.lingers:
        scene.release.set()
    scene.kept.clear()
    assert process_settings() == settings
    until = time.monotonic() + 30
    while (left := [*threads(before), *(set(tasks()) - before), *(children() - earlier)]) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.02)
    assert not left
    assert memory() - used < 300e6


def process_settings():
    return os.getcwd(), torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()


def threads(before):
    """New threads of the library."""
    return [one for one in set(threading.enumerate()) - before if one.name.startswith("covey")]


def tasks():
    return [one for one in gc.get_objects() if isinstance(one, asyncio.Task) and not one.done()]


def children():
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return set(path.read_text().split()) if path.exists() else set()


def memory():
    """Bytes that the process holds, of which freed blocks are given back before."""
    import ctypes

    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


# ---- the page ------------------------------------------------------------------------------------------------------


def test_there_are_as_many_cases_as_were_promised():
    cases = [case.what for cases in SECTIONS.values() for case in cases]
    assert len(set(cases)) == len(cases) >= 30


def test_slow_cases_are_shown_by_a_test_that_exists():
    shown = {case.shown_by for cases in SECTIONS.values() for case in cases if case.shown_by}
    assert len(shown) > 5
    for test in shown:
        path, name = test.split("::")
        assert f"def {name}(" in (Path(__file__).parents[2] / path).read_text(), test


def test_the_page_has_every_case():
    page = PAGE.read_text()
    assert page == render(page), "run: python tools/troubleshooting.py"
    assert page.count("\n| case | outcome |\n") == len(SECTIONS)
