"""Hostile environments: with `step(text)`, and with methods that are tools."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from covey.engines.scripted import ScriptedEngine
from tests.support.hostile.cases import CALL_FAILS, FAILS, NOTHING, SHOWN, Case, Scene, acting, deadline
from tests.support.hostile.tools import Endless, Unprintable, UnprintableError, is_full

Answer = Callable[[Scene], Any]


def fine(scene: Scene) -> Any:
    return None


def raises(error: Callable[[], BaseException]) -> Answer:
    def bad(scene: Scene) -> Any:
        raise error()

    return bad


def returns(value: Any) -> Answer:
    return lambda scene: value


def loops(scene: Scene) -> Any:
    while True:
        pass


def waits(scene: Scene) -> Any:
    scene.release.wait()


def answers_fine(scene: Scene) -> str:
    return "fine"


def rewards_one(scene: Scene) -> float:
    return 1.0


def text(reset: Answer = fine, step: Answer | None = None, close: Answer = fine) -> Callable[[Scene], dict[str, Any]]:
    """Environments that say "go" and then "on" once; in those of odd prompts something else happens."""

    def parts(scene: Scene) -> dict[str, Any]:
        class Talk:
            bad = False

            def reset(self, answer: str) -> Any:
                self.turns, self.bad = 0, int(answer) // 2 % 2 == 1
                said = reset(scene) if self.bad else None
                return " go" if said is None else said

            def step(self, action: str) -> Any:
                self.turns += 1
                if self.bad and step is not None:
                    return step(scene)
                return "on", float(len(action)), self.turns == 2, {}

            def close(self) -> None:
                if self.bad:
                    close(scene)

        return {"environment_factory": Talk}

    return parts


def async_text(reset: Callable[[Scene], Any]) -> Callable[[Scene], dict[str, Any]]:
    def parts(scene: Scene) -> dict[str, Any]:
        class Talk:
            async def reset(self, answer: str) -> Any:
                self.turns = 0
                if int(answer) // 2 % 2 == 1:
                    await reset(scene)
                return " go"

            async def step(self, action: str) -> Any:
                self.turns += 1
                return "on", float(len(action)), self.turns == 2, {}

        return {"environment_factory": Talk}

    return parts


def tools(act: Answer = answers_fine, get_reward: Answer = rewards_one) -> Callable[[Scene], dict[str, Any]]:
    """Environments with one method; in those of odd prompts something else happens."""

    def parts(scene: Scene) -> dict[str, Any]:
        class World:
            def reset(self, answer: str) -> None:
                self._bad = int(answer) // 2 % 2 == 1

            def act(self, bad: bool) -> Any:
                """Act.

                Args:
                    bad: Is not looked at.
                """
                return (act if self._bad else answers_fine)(scene)

            def get_reward(self) -> Any:
                return (get_reward if self._bad else rewards_one)(scene)

        return {"environment_factory": World, "engine": ScriptedEngine(acting)}

    return parts


async def never_answers(scene: Scene) -> None:
    await asyncio.Event().wait()


def large(scene: Scene) -> str:
    scene.kept.append(None)
    return "x" * (10**9 if len(scene.kept) == 1 else 10**7)  # this machine cannot hold several at once


def leaves_threads(scene: Scene) -> None:
    for _ in range(20):
        threading.Thread(target=scene.release.wait, daemon=True).start()


BENIGN = Case("nothing", NOTHING, text())
BENIGN_TOOLS = Case("nothing", NOTHING, tools())

FAULT = "rollout/environments/test_environment_faults.py::test_a_fault_costs_its_own_rollout"
HANGING_CLOSE = "rollout/environments/test_environment_faults.py::test_a_close_that_hangs_is_given_up"
FAILED = ("rollouts/failed",)
HANGS, HANGS_TWICE = deadline("tool_timeout"), deadline("tool_timeout", steps=2)


def fails(what: str, parts: Callable[[Scene], dict[str, Any]], *says: str, **more: Any) -> Case:
    return Case(what, FAILS, parts, says, FAILED, **more)


def fails_with_tools(what: str, parts: Callable[[Scene], dict[str, Any]], *says: str, **more: Any) -> Case:
    return fails(what, parts, *says, benign=BENIGN_TOOLS, **more)


ENVIRONMENTS = [
    fails(
        "An environment raises in reset",
        text(reset=raises(lambda: ValueError("no"))),
        "Talk.reset raised ValueError: no",
    ),
    fails("An environment raises SystemExit in reset", text(reset=raises(SystemExit)), "reset raised SystemExit"),
    fails("An environment raises what cannot be printed", text(reset=raises(UnprintableError)), "UnprintableError"),
    fails("An environment loops forever in reset", text(reset=loops), "Talk.reset took longer", settings=HANGS),
    fails("An async environment never answers", async_text(never_answers), "Talk.reset took longer", settings=HANGS),
    fails("An environment returns something else from reset", text(reset=returns(5)), "Talk.reset returned 5"),
    fails("An environment returns what cannot be printed", text(reset=returns(Unprintable())), "cannot be printed"),
    fails(
        "An environment's answer takes forever to print",
        text(reset=returns(Endless())),
        "took longer",
        settings=HANGS,
        shown_by=FAULT,
    ),
    fails("An environment begins with 1 GB of text", text(reset=large), "leaves no room to answer"),
    Case(
        "An environment answers with 1 GB of text",
        SHOWN,
        text(step=lambda scene: (large(scene), 1.0, False, {})),
        check=is_full,
    ),
    fails("An environment raises in step", text(step=raises(KeyError)), "Talk.step raised KeyError"),
    fails(
        "An environment waits for a lock in step",
        text(step=waits),
        "step took longer",
        settings=HANGS_TWICE,
        lingers=True,
    ),
    fails("An environment returns something else from step", text(step=returns("on")), "Talk.step returned 'on'"),
    fails(
        "An environment rewards with NaN", text(step=returns(("", float("nan"), True, {}))), "returned the reward nan"
    ),
    fails("An environment rewards with text", text(step=returns(("", "1", True, {}))), "returned the reward '1'"),
    fails("An environment says nothing and continues", text(step=returns((None, 1.0, False, {}))), "no observation"),
    fails_with_tools(
        "An environment raises in get_reward", tools(get_reward=raises(lambda: ValueError("no"))), "get_reward raised"
    ),
    fails_with_tools("An environment's get_reward is NaN", tools(get_reward=returns(float("nan"))), "reward nan"),
    fails_with_tools(
        "An environment loops forever in get_reward",
        tools(get_reward=loops),
        "took longer",
        settings=HANGS,
        shown_by=FAULT,
    ),
    fails_with_tools(
        "A method of an environment loops forever",
        tools(act=loops),
        "World.act was given up",
        settings=HANGS,
        shown_by=FAULT,
    ),
    Case(
        "A method of an environment raises",
        CALL_FAILS,
        tools(act=raises(lambda: ValueError("no"))),
        ("{'error': 'no'}",),
        ("tools/failures/exception",),
        benign=BENIGN_TOOLS,
    ),
    Case("An environment raises in close", NOTHING, text(close=raises(lambda: ValueError("no"))), harmless=True),
    Case(
        "An environment loops forever in close",
        NOTHING,
        text(close=loops),
        settings=HANGS_TWICE,
        harmless=True,
        shown_by=HANGING_CLOSE,
    ),
    Case("An environment leaves threads behind", NOTHING, text(reset=leaves_threads), harmless=True),
]
