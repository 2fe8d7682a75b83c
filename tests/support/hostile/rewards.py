"""Hostile reward functions."""

import asyncio
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from covey.rewards import RewardError
from tests.support.hostile.cases import ENDS, NOTHING, UNSCORED, Case, Scene, deadline
from tests.support.hostile.tools import Unprintable, UnprintableError, changes_settings


def ones(completions: Any) -> list[float]:
    return [1.0] * len(completions)


def reward(bad: Callable[..., Any]) -> Callable[[Scene], dict[str, Any]]:
    """The reward function `judge`, which is `bad(scene, **arguments)`, before the usual one."""

    def parts(scene: Scene) -> dict[str, Any]:
        def judge(**kwargs: Any) -> Any:
            return bad(scene, **kwargs)

        return {"reward_funcs": [judge]}

    return parts


def async_reward(bad: Callable[..., Any]) -> Callable[[Scene], dict[str, Any]]:
    def parts(scene: Scene) -> dict[str, Any]:
        async def judge(**kwargs: Any) -> Any:
            return await bad(scene, **kwargs)

        return {"reward_funcs": [judge]}

    return parts


def returns(make: Callable[[Any], Any]) -> Callable[[Scene], dict[str, Any]]:
    return reward(lambda scene, completions, **kwargs: make(completions))


def sometimes(bad: Callable[[], Any]) -> Callable[[Scene], dict[str, Any]]:
    """Bad where a completion has an odd number of tokens."""

    def judge(scene: Scene, completions: Any, completion_ids: Any, **kwargs: Any) -> Any:
        return [bad() if len(ids) % 2 else 1.0 for ids in completion_ids]

    return reward(judge)


def once_in_a_while(bad: Callable[[Any], Any]) -> Callable[[Scene], dict[str, Any]]:
    """Bad in every second call."""
    calls: list[int] = []

    def judge(scene: Scene, completions: Any, **kwargs: Any) -> Any:
        calls.append(len(completions))
        return ones(completions) if len(calls) % 2 else bad(completions)

    return reward(judge)


def raising(error: Callable[[], BaseException]) -> Callable[[], Any]:
    def bad() -> Any:
        raise error()

    return bad


def recursing() -> Any:
    return recursing()


def loops(scene: Scene, **kwargs: Any) -> None:
    while True:
        pass


def sleeps(scene: Scene, **kwargs: Any) -> None:
    time.sleep(60)


def backtracks(scene: Scene, **kwargs: Any) -> None:
    re.match(r"(a+)+$", "a" * 40 + "b")


def catches_interrupts(scene: Scene, **kwargs: Any) -> None:
    for _ in range(3):
        try:
            loops(scene)
        except BaseException:
            continue
    loops(scene)


async def never_answers(scene: Scene, **kwargs: Any) -> None:
    await asyncio.Event().wait()


async def blocks(scene: Scene, **kwargs: Any) -> None:
    scene.release.wait()


async def exits(scene: Scene, completions: Any, completion_ids: Any, **kwargs: Any) -> Any:
    if any(len(ids) % 2 for ids in completion_ids):
        raise SystemExit(0)
    return ones(completions)


def spoil(value: Any) -> None:
    """Change everything that can be changed, all the way down."""
    for one in list(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()):
        spoil(one)
    if isinstance(value, dict | list):
        value.clear()


def changes_its_arguments(scene: Scene, completions: Any, **kwargs: Any) -> list[float]:
    rewards = ones(completions)
    spoil([completions, [value for value in kwargs.values() if isinstance(value, list)]])
    return rewards


def changes_its_arguments_later(scene: Scene, completions: Any, **kwargs: Any) -> list[float]:
    given = [completions, [value for value in kwargs.values() if isinstance(value, list)]]
    threading.Timer(0.05, spoil, [given]).start()
    return ones(completions)


def floods(scene: Scene, completions: Any, **kwargs: Any) -> list[float]:
    for _ in range(50):
        sys.stderr.write("x" * 100_000 + "\n")
    return ones(completions)


def leaves_threads(scene: Scene, completions: Any, **kwargs: Any) -> list[float]:
    for _ in range(20):
        threading.Thread(target=scene.release.wait, daemon=True).start()
    return ones(completions)


def logs_anything(scene: Scene, completions: Any, log_extra: Any, **kwargs: Any) -> list[float]:
    itself: list[Any] = [object()]
    log_extra("things", [itself, {1: object()}, b"\xff", "\ud800", 10**30, float("inf"), None, lambda: 1])
    log_extra("advantage", ones(completions))
    return ones(completions)


def changes(scene: Scene, completions: Any, **kwargs: Any) -> list[float]:
    changes_settings(scene)
    torch.set_grad_enabled(True)
    return ones(completions)


BENIGN = Case("nothing", NOTHING, returns(ones))

FAILURES, TIMEOUTS = ("rewards/judge/failures",), ("rewards/judge/timeouts",)
HANGS, HANGS_TWICE = deadline("reward_timeout"), deadline("reward_timeout", steps=2)
INTERRUPTED = "runtime/test_deadlines.py::test_a_call_on_the_main_thread_is_interrupted"
STUBBORN = "runtime/test_deadlines.py::test_a_main_thread_call_that_catches_an_interrupt_is_late_all_the_same"
EXPECTED = r"expected a list of 8 numbers \(or None\), one per completion"


def late(what: str, parts: Callable[[Scene], dict[str, Any]], **more: Any) -> Case:
    return Case(what, UNSCORED, parts, counted=TIMEOUTS, **{"settings": HANGS, **more})


def partly(what: str, bad: Callable[[], Any]) -> Case:
    return Case(what, UNSCORED, sometimes(bad), counted=FAILURES)


def ends(what: str, parts: Callable[[Scene], dict[str, Any]], *says: str, **more: Any) -> Case:
    return Case(what, ENDS, parts, says, **{"kind": RewardError, **more})


REWARDS = [
    late("A reward loops forever", reward(loops)),
    late("A reward sleeps too long", reward(sleeps)),
    late("A reward's regular expression backtracks without end", reward(backtracks), shown_by=INTERRUPTED),
    late("A reward catches three interrupts", reward(catches_interrupts), shown_by=STUBBORN),
    late("An async reward never answers", async_reward(never_answers)),
    late("An async reward blocks the event loop", async_reward(blocks), lingers=True, settings=HANGS_TWICE),
    partly("A reward is NaN", lambda: float("nan")),
    partly("A reward is infinite", lambda: float("inf")),
    partly("A reward is a huge integer", lambda: 10**400),
    partly("A reward is text", lambda: "1"),
    partly("A reward cannot be printed", Unprintable),
    partly("Rewards of steps have another shape", lambda: [(0, 1.0, 2)]),
    partly("Rewards of steps end where there is no token", lambda: [(10**9, 1.0)]),
    partly("A reward raises for some completions", raising(ValueError)),
    partly("A reward raises SystemExit", raising(SystemExit)),
    partly("A reward raises what cannot be printed", raising(UnprintableError)),
    partly("A reward recurses without end", recursing),
    Case("An async reward raises SystemExit", UNSCORED, async_reward(exits), counted=FAILURES),
    ends("A reward raises for every completion", returns(lambda _: 1 / 0), "failed on all 8 samples: ZeroDivision"),
    ends("A reward function returns text for every completion", returns(lambda all: ["1"] * len(all)), EXPECTED),
    ends("A reward function returns nothing", returns(lambda _: None), "Is there a `return`", EXPECTED),
    ends("A reward function returns too few", returns(lambda all: [1.0]), "returned 1 rewards for 8", EXPECTED),
    ends("A reward function is a generator", returns(lambda all: (1.0 for _ in all)), "generator", EXPECTED),
    Case("A reward function returns nothing, once", UNSCORED, once_in_a_while(lambda all: None)),
    Case("A reward function returns too few, once", UNSCORED, once_in_a_while(lambda all: [1.0])),
    Case("A reward function is a generator, once", UNSCORED, once_in_a_while(lambda all: (1.0 for _ in all))),
    ends("A reward raises KeyboardInterrupt", returns(lambda _: os.kill(os.getpid(), 2)), kind=KeyboardInterrupt),
    Case("A reward changes its arguments", NOTHING, reward(changes_its_arguments), harmless=True),
    Case("A reward changes its arguments later", NOTHING, reward(changes_its_arguments_later), harmless=True),
    Case("A reward floods stderr", NOTHING, reward(floods), harmless=True),
    Case("A reward logs what no table can hold", NOTHING, reward(logs_anything), harmless=True),
    Case("A reward leaves threads behind", NOTHING, reward(leaves_threads), harmless=True),
    Case("A reward changes directory, environment and settings of torch", NOTHING, reward(changes), harmless=True),
]
