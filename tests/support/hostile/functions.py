"""Hostile rollout functions, of the form for one rollout and of the form for a whole rollout batch."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from covey.core.records import FinishReason, Rollout
from covey.engines.scripted import ScriptedEngine
from covey.rollout.user_functions import RolloutError
from tests.support.hostile.cases import ENDS, FAILS, NOTHING, OWN, Case, Scene, deadline
from tests.support.hostile.tools import Unprintable, UnprintableError

HOSTILE = 1
"""The hostile one of a group of four."""

Play = Callable[[Scene, Any, Any], Awaitable[Any]]


async def once(row: Any, engine: Any) -> Rollout:
    episode = engine.begin()
    await episode.sample()
    return episode.done()


def function(bad: Play) -> Callable[[Scene], dict[str, Any]]:
    """A function that plays `bad(scene, row, engine)` for one sibling of each group."""

    def parts(scene: Scene) -> dict[str, Any]:
        async def play(row: Any, engine: Any) -> Any:
            return await (bad(scene, row, engine) if engine.sibling == HOSTILE else once(row, engine))

        return {"rollout_func": play}

    return parts


def changed(**fields: Any) -> Callable[[Scene], dict[str, Any]]:
    """A function that gives one sibling's rollout other fields."""

    async def play(scene: Scene, row: Any, engine: Any) -> Rollout:
        rollout = await once(row, engine)
        rollout.logprobs = rollout.entropies = rollout.versions = None
        rollout.turn_ends = []
        for name, value in fields.items():
            setattr(rollout, name, value)
        return rollout

    return function(play)


def raises(error: Callable[[], BaseException]) -> Callable[[Scene], dict[str, Any]]:
    async def play(scene: Scene, row: Any, engine: Any) -> Rollout:
        await engine.begin().sample()
        raise error()

    return function(play)


def returns(value: Any) -> Callable[[Scene], dict[str, Any]]:
    async def play(scene: Scene, row: Any, engine: Any) -> Any:
        return value

    return function(play)


async def never_returns(scene: Scene, row: Any, engine: Any) -> None:
    await asyncio.Event().wait()


async def blocks(scene: Scene, row: Any, engine: Any) -> Rollout:
    rollout = await once(row, engine)
    scene.release.wait()
    return rollout


async def will_not_be_cancelled(scene: Scene, row: Any, engine: Any) -> None:
    while not scene.release.is_set():
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue


async def returns_anothers(scene: Scene, row: Any, engine: Any) -> Rollout:
    """The first one that was played in this rollout batch."""
    rollout_batch = len(scene.rollout_batches)
    if len(scene.kept) == rollout_batch:
        scene.kept.append(None)
        scene.kept[rollout_batch] = await once(row, engine)
    while scene.kept[rollout_batch] is None:
        await asyncio.sleep(0.01)
    return scene.kept[rollout_batch]


async def returns_an_old_one(scene: Scene, row: Any, engine: Any) -> Rollout:
    scene.kept.append(await once(row, engine))
    return scene.kept[0]


async def spoils_its_episode(scene: Scene, row: Any, engine: Any) -> Rollout:
    episode = engine.begin()
    await episode.sample()
    episode.completion_ids.append(10**9)
    episode.messages.clear()
    raise ValueError("enough")


async def spoils_its_row(scene: Scene, row: Any, engine: Any) -> Rollout:
    rollout = await once(row, engine)
    row["prompt"].clear()
    row["answer"] = None
    rollout.prompt_ids, rollout.prompt = list(rollout.prompt_ids), None
    return rollout


async def spoils_its_rollout_later(scene: Scene, row: Any, engine: Any) -> Rollout:
    rollout = await once(row, engine)
    for spoilt in (rollout.prompt_ids, rollout.completion_ids, rollout.sampled, rollout.completion[0]):
        asyncio.get_running_loop().call_soon(spoilt.clear)
    return rollout


async def samples_on(scene: Scene, row: Any, engine: Any) -> Rollout:
    async def on() -> None:
        while True:
            await engine.generate("more", max_tokens=1)

    task = asyncio.get_running_loop().create_task(on())
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    scene.kept.append(task)
    return await once(row, engine)


def engine_fails(scene: Scene) -> dict[str, Any]:
    """The engine fails, and the function makes nothing of it."""

    def script(prompt_ids: Any, seed: int) -> Any:
        raise RuntimeError("the engine is out of order")

    async def play(row: Any, engine: Any) -> Rollout:
        try:
            return await once(row, engine)
        except Exception:
            return Rollout([5], [6], [True], None, [{"role": "assistant", "content": "?"}], FinishReason.STOP)

    return {"rollout_func": play, "engine": ScriptedEngine(script)}


# ---- for a whole rollout batch ------------------------------------------------------------------------------------


def batch(bad: Callable[[Scene, Any, Any], Any] | None = None) -> Callable[[Scene], dict[str, Any]]:
    """A function `(prompts, trainer)`; `bad(scene, prompts, sampled)` may change its answer."""

    def parts(scene: Scene) -> dict[str, Any]:
        def play(prompts: Any, trainer: Any) -> Any:
            sampled = trainer.generate_completions(prompts)
            answer = {key: [one[key] for one in sampled] for key in ("prompt_ids", "completion_ids", "logprobs")}
            return answer if bad is None else bad(scene, prompts, answer)

        return {"rollout_func": play}

    return parts


def spoils_its_prompts(scene: Scene, prompts: Any, answer: Any) -> Any:
    for prompt in prompts:
        prompt.clear()
    prompts.clear()
    return answer


def refuses(error: type[BaseException]) -> Callable[[Scene, Any, Any], Any]:
    def bad(scene: Scene, prompts: Any, answer: Any) -> Any:
        raise error("no")

    return bad


BENIGN = Case("nothing", NOTHING, function(lambda scene, row, engine: once(row, engine)))
BENIGN_BATCH = Case("nothing", NOTHING, batch())

FAILED = ("rollouts/failed",)
HANGS, HANGS_TWICE = deadline("rollout_timeout"), deadline("rollout_timeout", steps=2)
LATE = ("took longer than rollout_timeout=0.5 s",)


def fails(what: str, parts: Callable[[Scene], dict[str, Any]], *says: str, **more: Any) -> Case:
    return Case(what, FAILS, parts, says, FAILED, **more)


def ends(what: str, parts: Callable[[Scene], dict[str, Any]], *says: str, **more: Any) -> Case:
    return Case(what, ENDS, parts, says, **{"kind": RolloutError, **more})


FUNCTIONS = [
    fails("A rollout function never returns", function(never_returns), *LATE, settings=HANGS),
    fails(
        "A rollout function blocks its event loop",
        function(blocks),
        *LATE,
        settings=HANGS_TWICE,
        lingers=True,
        delays=True,
    ),
    fails(
        "A rollout function catches its cancellation",
        function(will_not_be_cancelled),
        *LATE,
        settings=HANGS,
        lingers=True,
    ),
    fails("A rollout function raises SystemExit", raises(SystemExit), "SystemExit"),
    fails("A rollout function raises what cannot be printed", raises(UnprintableError), "UnprintableError"),
    fails("A rollout function returns something else", returns("done"), "returned str"),
    fails(
        "A rollout has tokens outside of the vocabulary",
        changed(completion_ids=[5, 10**6], sampled=[True] * 2),
        "token 1000000",
    ),
    fails("A rollout has no prompt", changed(prompt_ids=[]), "empty prompt"),
    fails(
        "A rollout has log-probs that are NaN",
        changed(logprobs=[float("nan")] * 3, completion_ids=[5] * 3, sampled=[True] * 3),
        "not finite",
    ),
    fails(
        "A rollout has log-probs above 0",
        changed(logprobs=[1e30] * 3, completion_ids=[5] * 3, sampled=[True] * 3),
        "probabilities are at most 1",
    ),
    fails(
        "A rollout is longer than the model's context",
        changed(completion_ids=[5] * 5000, sampled=[True] * 5000, logprobs=None),
        "exceeds the model's context",
    ),
    fails("A rollout has fields of other types", changed(completion=Unprintable()), "text or a list of messages"),
    fails(
        "A message of a rollout cannot be printed",
        changed(completion=[{"role": "assistant", "content": Unprintable()}]),
        "no words",
    ),
    fails(
        "A rollout function puts tokens that do not exist into its episode",
        function(spoils_its_episode),
        "ValueError: enough",
    ),
    Case("A rollout function returns the rollout of another prompt", OWN, function(returns_anothers)),
    Case("A rollout function changes its row", NOTHING, function(spoils_its_row), harmless=True),
    Case("A rollout function changes its rollout later", NOTHING, function(spoils_its_rollout_later), harmless=True),
    Case("A rollout function leaves tasks that sample on", NOTHING, function(samples_on), harmless=True),
    Case(
        "A function for a rollout batch changes its prompts",
        NOTHING,
        batch(spoils_its_prompts),
        harmless=True,
        benign=BENIGN_BATCH,
    ),
    ends(
        "A rollout function returns rollouts of an earlier step",
        function(returns_an_old_one),
        "kept from an earlier step",
        kind=RuntimeError,
    ),
    ends(
        "A rollout function makes nothing of the engine's failure",
        engine_fails,
        "the engine is out of order",
        kind=RuntimeError,
    ),
    ends("A function for a rollout batch raises", batch(refuses(KeyError)), "no", kind=KeyError),
    ends(
        "A function for a rollout batch raises SystemExit",
        batch(lambda *_: sys.exit(0)),
        "rollout_func raised SystemExit",
    ),
    ends(
        "A function for a rollout batch never returns",
        batch(lambda scene, *_: scene.release.wait()),
        "rollout_func took longer than rollout_timeout=0.5 s",
        settings=HANGS,
        lingers=True,
    ),
    ends(
        "A function for a rollout batch returns too few",
        batch(lambda scene, prompts, answer: {**answer, "prompt_ids": []}),
        "0 elements in 'prompt_ids' for 8 prompts",
    ),
    ends(
        "A function for a rollout batch returns tokens outside of the vocabulary",
        batch(lambda scene, prompts, answer: {**answer, "completion_ids": [[10**6]] * 8, "logprobs": None}),
        "token 1000000",
    ),
]
