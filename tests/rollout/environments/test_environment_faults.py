"""What environments may do wrong: each fault costs the rollout in which it happens, and nothing else."""

import gc
import sys
import threading
import time
import warnings
import weakref

import pytest

from covey.core.records import FinishReason
from covey.rollout.environments import EnvironmentPool, EnvironmentWarning
from covey.runtime.calling_thread import threaded
from covey.runtime.deadlines import MAX_STILL_RUNNING
from tests.support import forking, launching
from tests.support.playing import call, play, says, text_agent, tool_agent

SECONDS = 0.4
"""Deadline of each call; what hangs, hangs for much longer."""


def hang():
    end = time.monotonic() + 20
    while time.monotonic() < end:
        time.sleep(0.01)


async def hang_async():
    import asyncio

    await asyncio.sleep(20)


class Tools:
    """Does in the method that the row names what the row names."""

    def reset(self, where=None, what=None, **row):
        self.where, self.what = where, what
        self.leaked = getattr(self, "leaked", 0)
        return self._do("reset", "")

    def act(self) -> str:
        """Act."""
        return self._do("act", "acted")

    def get_reward(self):
        return self._do("get_reward", 1.0)

    def _do(self, where, otherwise):
        return self.what() if where == self.where else otherwise


class Text:
    """Likewise, in steps."""

    def reset(self, where=None, what=None, **row):
        self.where, self.what = where, what
        return self.what() if where == "reset" else ""

    def step(self, text):
        return self.what() if self.where == "step" else ("on", 1.0, True, {})


def error():
    raise ZeroDivisionError("no luck")


def leave():
    raise SystemExit(3)


class Unprintable:
    def __repr__(self):
        raise RuntimeError("not shown")


class Terrible(Exception):
    def __str__(self):
        raise RuntimeError("not shown")


class Endless:
    def __repr__(self):
        hang()


class Slow:
    """Made within the deadline and shown within it, but not both."""

    def __init__(self):
        time.sleep(0.75 * SECONDS)

    def __str__(self):
        time.sleep(0.75 * SECONDS)
        return "slow"


def terrible():
    raise Terrible


# (kind of environment, where, what it does there, what the error says)
FAULTS = [
    (Tools, "reset", error, "Tools.reset raised ZeroDivisionError: no luck"),
    (Tools, "reset", leave, "Tools.reset raised SystemExit: 3"),
    (Tools, "reset", terrible, "Tools.reset raised Terrible"),
    (Tools, "reset", hang, "Tools.reset took longer than tool_timeout=0.4 s"),
    (Tools, "reset", lambda: 5, "Tools.reset returned 5 (int)"),
    (Tools, "reset", Unprintable, "Tools.reset returned a value that cannot be printed"),
    (Tools, "reset", Endless, "Tools.reset took longer than tool_timeout=0.4 s"),
    (Text, "step", lambda: ("on", Endless(), False, {}), "Text.step took longer than tool_timeout=0.4 s"),
    (Tools, "reset", lambda: [{"content": "no role"}], "Tools.reset returned [{'content': 'no role'}]"),
    (Tools, "act", hang, "Tools.act was given up"),
    (Tools, "act", Slow, "Tools.act was given up"),
    (Tools, "get_reward", error, "Tools.get_reward raised ZeroDivisionError"),
    (Tools, "get_reward", hang, "Tools.get_reward took longer than tool_timeout=0.4 s"),
    (Tools, "get_reward", lambda: float("nan"), "Tools.get_reward returned the reward nan"),
    (Tools, "get_reward", lambda: float("inf"), "Tools.get_reward returned the reward inf"),
    (Tools, "get_reward", lambda: "1.0", "Tools.get_reward returned the reward '1.0' (str)"),
    (Tools, "get_reward", lambda: [1.0, 2.0], "Tools.get_reward returned [1.0, 2.0] (list); steps are a list of"),
    (Tools, "get_reward", lambda: [(1, float("nan"))], "Tools.get_reward returned the reward nan"),
    (Text, "reset", error, "Text.reset raised ZeroDivisionError"),
    (Text, "step", error, "Text.step raised ZeroDivisionError"),
    (Text, "step", hang, "Text.step took longer than tool_timeout=0.4 s"),
    (Text, "step", lambda: ("on", 1.0), "Text.step returned ('on', 1.0) (tuple)"),
    (Text, "step", lambda: ("on", "much", False, {}), "Text.step returned the reward 'much'"),
    (Text, "step", lambda: ("on", float("nan"), False, {}), "Text.step returned the reward nan"),
    (Text, "step", lambda: ("on", 0.0, "no", {}), "Text.step returned 'no' (str) where it says whether"),
    (Text, "step", lambda: (None, 0.0, False, {}), "Text.step returned no observation"),
    (Text, "step", lambda: ({"grid": 1}, 0.0, False, {}), "Text.step returned {'grid': 1} (dict)"),
]


def alive(agent):
    known = agent.pool._environments
    return len(known.idle) + len(known.leased)


@pytest.mark.parametrize(("kind", "where", "what", "said"), FAULTS)
def test_a_fault_costs_its_own_rollout(kind, where, what, said):
    prompt = [{"role": "user", "content": "go"}]
    good, bad = {"prompt": prompt}, {"prompt": prompt, "where": where, "what": what}
    agent = (tool_agent if kind is Tools else text_agent)(kind, SECONDS)
    rollouts = play(agent, says(call("act"), "done") if kind is Tools else says("1"), [good, bad, good])
    assert [rollout.finish for rollout in rollouts] == [FinishReason.STOP, FinishReason.ERROR, FinishReason.STOP]
    assert said in rollouts[1].error
    assert [rollout.extras.get("environment_reward") for rollout in rollouts] == [1.0, None, 1.0]
    assert alive(agent) == 2  # the third is thrown away
    agent.close()


def test_columns_may_have_any_name():
    names = ("self", "name", "function", "method", "check", "read", "args", "kwargs")

    class Tells:
        def reset(mine, **row):
            mine.row = row

        def step(mine, text):
            return "", float(all(mine.row[name] == name for name in names)), True, {}

    row = {"prompt": [{"role": "user", "content": "go"}], **{name: name for name in names}}
    (rollout,) = play(text_agent(Tells, SECONDS), says("1"), [row])
    assert rollout.error is None and rollout.extras["environment_reward"] == 1.0


def test_what_hangs_in_async_methods():
    class Slow(Tools):
        async def reset(self, slow=False, **row):
            if slow:
                await hang_async()

    prompt = [{"role": "user", "content": "go"}]
    rows = [{"prompt": prompt}, {"prompt": prompt, "slow": True}]
    agent = tool_agent(Slow, SECONDS)
    with pytest.raises(AttributeError):
        Slow().get_reward()  # `where` is not set: each of these rollouts fails in get_reward or in reset
    rollouts = play(agent, says("done"), rows)
    assert "took longer" in rollouts[1].error and "get_reward raised AttributeError" in rollouts[0].error


def test_a_discarded_environment_affects_no_other_rollout():
    late = []

    class Late(Text):
        def step(self, text):
            if self.where == "step":
                try:
                    hang()
                finally:
                    late.append(threading.get_ident())
            return "on", 1.0, True, {}

    prompt = [{"role": "user", "content": "go"}]
    agent = text_agent(Late, SECONDS)
    first = play(agent, says("1"), [{"prompt": prompt, "where": "step"}])
    agent.release(first)
    second = play(agent, says("1"), [{"prompt": prompt}] * 2)
    assert [rollout.finish for rollout in second] == [FinishReason.STOP] * 2
    assert not [rollout for rollout in second if rollout.extras["environments"].where]


@pytest.mark.filterwarnings("ignore::covey.runtime.deadlines.LateCallWarning")
def test_environments_that_hang_cost_a_bounded_number_of_threads():
    """Methods that nothing can stop: no environment is made while several hang, and those at hand are used."""
    release, made = threading.Event(), []

    @threaded
    class Hangs(Text):
        def __init__(self):
            made.append(self)

        def step(self, text):
            return ("on", 1.0, True, {}) if self.where != "step" else release.wait()

    prompt = [{"role": "user", "content": "go"}]
    agent = text_agent(Hangs, 0.05)
    before = threading.active_count()

    def rollouts(*where):
        played = play(agent, says("1"), [{"prompt": prompt, "where": one} for one in where])
        agent.release(played)
        return played

    rollouts("reset", *["step"] * MAX_STILL_RUNNING)
    for _ in range(3):
        assert [one.finish for one in rollouts("step", "step")] == [FinishReason.ERROR] * 2
    assert len(made) <= MAX_STILL_RUNNING + 2
    assert threading.active_count() <= before + 2 * MAX_STILL_RUNNING + 4
    release.set()
    until = time.monotonic() + 20
    while (rollout := rollouts("")[0]).finish is not FinishReason.STOP:
        assert time.monotonic() < until, rollout.error
        time.sleep(0.02)
    agent.pool.close()


def test_the_row_that_an_environment_changes_is_its_own_copy():
    class Greedy(Text):
        def reset(self, **row):
            row["prompt"].clear()
            row["notes"].append("mine")
            return "what is left"

    row = {"prompt": [{"role": "user", "content": "go"}], "notes": []}
    rollouts = play(text_agent(Greedy), says("1"), [row], group=2)
    assert row == {"prompt": [{"role": "user", "content": "go"}], "notes": []}
    assert rollouts[0].prompt_ids == rollouts[1].prompt_ids


def test_messages_that_an_environment_keeps_and_changes():
    board = [{"role": "user", "content": "empty"}]

    class Keeps(Text):
        def reset(self, **row):
            return board

        def step(self, text):
            board[0]["content"] = "full"
            return "on", 1.0, True, {}

    engine = says("1")
    rollouts = play(text_agent(Keeps), engine, [{}])
    assert board[0]["content"] == "full" and "empty" in engine.received[0]
    assert rollouts[0].finish is FinishReason.STOP


def test_one_object_for_all_is_refused():
    shared = Text()
    rollouts = play(text_agent(lambda: shared), says("1"), group=2)
    failed = [rollout for rollout in rollouts if rollout.finish is FinishReason.ERROR]
    assert len(failed) == 1 and "returned the same Text twice" in failed[0].error


def test_a_factory_that_fails_costs_rollouts_and_hangs_nobody():
    def factory():
        error()

    rollouts = play(text_agent(factory, limit=1), says("1"), group=3)
    assert all("environment_factory raised ZeroDivisionError" in rollout.error for rollout in rollouts)


def test_a_rollout_that_is_late_gives_its_environment_away():
    agent = text_agent(Text, seconds=30)
    prompt = [{"role": "user", "content": "go"}]
    (rollout,) = play(agent, says("1"), [{"prompt": prompt, "where": "step", "what": hang}], seconds=SECONDS)
    assert rollout.finish is FinishReason.ERROR and "rollout_timeout" in rollout.error
    assert alive(agent) == 0


# --- closing --------------------------------------------------------------------------------------------------------


class Closes(Text):
    """Counts how often it is closed."""

    closed = 0

    def close(self):
        type(self).closed += 1


@pytest.fixture(autouse=True)
def _count_anew():
    Closes.closed = 0


def test_all_are_closed_once_lent_or_not():
    agent = text_agent(Closes)
    play(agent, says("1"), group=3)  # not released
    agent.close()
    agent.close()
    assert Closes.closed == 3


def test_thrown_away_ones_are_closed():
    agent = text_agent(Closes)
    prompt = [{"role": "user", "content": "go"}]
    play(agent, says("1"), [{"prompt": prompt, "where": "step", "what": error}])
    agent.close()
    assert Closes.closed == 1


def test_a_hung_one_is_closed_too():
    agent = text_agent(Closes, SECONDS)
    prompt = [{"role": "user", "content": "go"}]
    play(agent, says("1"), [{"prompt": prompt, "where": "step", "what": lambda: time.sleep(2)}])
    agent.close()
    assert Closes.closed == 1


def test_errors_in_close_are_warnings():
    class Clings(Text):
        def close(self):
            raise OSError("still there")

    agent = text_agent(Clings)
    play(agent, says("1"))
    with pytest.warns(EnvironmentWarning, match=r"Clings.close raised OSError: still there"):
        agent.close()


def test_a_close_that_hangs_is_given_up():
    class Clings(Text):
        def close(self):
            hang()

    agent = text_agent(Clings, SECONDS)
    play(agent, says("1"), group=4)
    with pytest.warns(
        EnvironmentWarning, match=r"4 environments could not.*Clings.close took longer than tool_timeout=0.4 s"
    ):
        agent.close()


def test_a_forgotten_pool_closes_its_environments():
    agent = text_agent(Closes)
    play(agent, says("1"), group=2)
    pool = weakref.ref(agent.pool)
    del agent
    gc.collect()
    assert pool() is None and Closes.closed == 2


@pytest.mark.slow
def test_environments_are_closed_when_the_process_ends(tmp_path):
    script = tmp_path / "forgets.py"
    script.write_text(
        "import asyncio\n"
        "from covey.rollout.environments import EnvironmentPool\n"
        "from covey.runtime.calling_thread import CallingThread\n"
        "class One:\n"
        "    def close(self):\n"
        "        print('closed', flush=True)\n"
        "class Two:\n"
        "    async def close(self):\n"
        "        await asyncio.sleep(0)\n"
        "        print('closed too', flush=True)\n"
        "pools = [EnvironmentPool(kind, 5.0) for kind in (One, Two)]\n"
        "for pool in pools:\n"
        "    asyncio.run(pool.acquire())\n"
        "here = EnvironmentPool(One, 5.0)\n"
        "CallingThread('covey-sampling').run(here.acquire())\n"
        "raise SystemExit(3)\n"
    )
    ended = forking.run([sys.executable, str(script)], env=launching.environment(), timeout=60)
    assert ended.returncode == 3 and sorted(ended.stdout.split("\n")) == ["", "closed", "closed", "closed too"], (
        ended.stderr
    )
    assert "Error" not in ended.stderr


def test_environments_without_close_are_let_go():
    @threaded
    class OnThreads(Text):
        pass

    before = set(threading.enumerate())
    agent = text_agent(OnThreads)
    play(agent, says("1"), group=2)
    assert len(set(threading.enumerate()) - before) >= 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agent.close()
    end = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < end:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


def test_a_pool_can_be_used_after_it_was_closed():
    pool = EnvironmentPool(Closes, 5.0)
    agent = text_agent(Closes)
    agent.pool = pool
    play(agent, says("1"))
    agent.close()
    (rollout,) = play(agent, says("1"))
    assert rollout.finish is FinishReason.STOP and Closes.closed == 1
    agent.close()
    assert Closes.closed == 2
