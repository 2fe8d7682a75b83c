"""Agents that run elsewhere: sessions over HTTP, from the rollout that waits to its reward."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import aiohttp
import pytest

from covey.core.records import FinishReason
from covey.rollout.agents import RemoteAgents, program
from covey.rollout.environments.agent import REWARD, PlayedEnvironment
from covey.rollout.user_functions import RolloutValidator
from tests.support.launching import free_port
from tests.support.playing import TOKENIZER, play, says

KEY = "a key of the test"


def played(agent, rows, seconds=20.0, runs=None):
    """Rollouts that `agent(post)` plays from a thread of its own, `post(path, key, **body)` in its hands."""
    port = free_port()
    found = []

    async def work():
        async with aiohttp.ClientSession() as client:

            async def post(path, key=KEY, **body):
                for _ in range(200):
                    try:
                        headers = {"Authorization": f"Bearer {key}"}
                        async with client.post(
                            f"http://127.0.0.1:{port}{path}", json=body, headers=headers
                        ) as response:
                            return response.status, await response.json()
                    except aiohttp.ClientConnectorError:
                        await asyncio.sleep(0.05)
                raise AssertionError("the endpoint does not listen")

            found.append(await agent(post))

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    player = PlayedEnvironment(RemoteAgents(port, key=KEY), seconds, RolloutValidator(len(TOKENIZER), None))
    thread.start()
    rollouts = runs(player) if runs else play(player, says("1", "2"), rows=rows, seconds=seconds)
    thread.join(10)
    player.close()
    return rollouts, found[0] if found else None


async def asked(post, session):
    body = {"messages": [{"role": "user", "content": session["row"]["question"]}]}
    return await post("/v1/chat/completions", session["api_key"], **body)


def test_agents_take_rollouts_and_reward_them():
    async def agent(post):
        async def one():
            _, session = await post("/sessions")
            assert (await asked(post, session))[0] == 200
            reward = float(session["row"]["question"])
            status, _ = await post(f"/sessions/{session['id']}/reward", session["reward_key"], reward=reward)
            return status, (await post(f"/sessions/{session['id']}/reward", reward=1.0))[0]

        return await asyncio.gather(*(one() for _ in range(3)))

    rollouts, statuses = played(agent, [{"prompt": None, "question": str(number)} for number in range(3)])
    assert [one.extras[REWARD] for one in rollouts] == [0.0, 1.0, 2.0] and statuses == [(200, 404)] * 3
    assert [one.prompt[0]["content"] for one in rollouts] == ["0", "1", "2"]


def test_keys_and_bodies_are_checked(monkeypatch):
    monkeypatch.setattr(program, "PATIENCE", 0.05)

    async def agent(post):
        _, session = await post("/sessions")
        where = f"/sessions/{session['id']}/reward"
        refused = [
            await post("/sessions", "wrong"),
            await post(where, "wrong", reward=1),
            await post(where, session["api_key"], reward=1),  # which what the policy runs may know
            await post(where, reward="x"),
        ]
        refused += [await post("/sessions"), await post("/sessions/other/reward", reward=1)]
        await asked(post, session)
        await post(where, error="the task is broken")
        return [status for status, _ in refused]

    (rollout,), statuses = played(agent, [{"prompt": None, "question": "1"}])
    assert statuses == [401, 401, 401, 400, 503, 404]
    assert "the agent reported: the task is broken" in rollout.error


def test_a_session_ends_no_other():
    """The keys of one session open neither the other's end nor new sessions; that of samples gives no reward."""

    async def agent(post):
        (_, one), (_, other) = await post("/sessions"), await post("/sessions")
        refused = [
            (await post(f"/sessions/{id_}/reward", key, reward=9))[0]
            for id_, key in ((other["id"], one["reward_key"]), (one["id"], one["api_key"]), (one["id"], "other"))
        ]
        refused += [(await post("/sessions", one[key]))[0] for key in ("api_key", "reward_key")]
        refused.append((await asked(post, {**one, "api_key": one["reward_key"]}))[0])
        for session in (one, other):
            await asked(post, session)
            await post(f"/sessions/{session['id']}/reward", session["reward_key"], reward=1)
        return refused

    rollouts, statuses = played(agent, [{"prompt": None, "question": "1"}] * 2)
    assert statuses == [401] * 6 and [one.extras[REWARD] for one in rollouts] == [1.0, 1.0]


@pytest.mark.slow
def test_the_runner_of_the_examples_serves_many_rollouts():
    """`examples/agents/run.py calculator --serve URL`: a process that plays whatever waits."""
    runner = Path(__file__).parents[3] / "examples" / "agents" / "run.py"
    port = free_port()
    rows = [{"prompt": [{"role": "user", "content": f"What is {i} plus 1?"}], "answer": 7} for i in range(6)]
    player = PlayedEnvironment(RemoteAgents(port, key=KEY), 60.0, RolloutValidator(len(TOKENIZER), None))
    command = [sys.executable, str(runner), "calculator", "--serve", f"http://127.0.0.1:{port}", "--at-once", "3"]
    worker = subprocess.Popen(command, env=os.environ | {"COVEY_AGENTS_KEY": KEY})
    try:
        rollouts = play(player, says("3 and 4", "7"), rows=rows, seconds=60.0)
    finally:
        player.close()
        worker.kill()
        worker.wait()
    assert [one.error for one in rollouts] == [None] * 6
    assert all(one.num_turns == 2 and one.extras[REWARD] in (0.0, 1.0) for one in rollouts)


def test_an_agent_that_has_gone_gets_no_rollout():
    """Its request for a session still waits at the server; the next rollout is for an agent that is there."""

    async def agent(post):
        _, session = await post("/sessions")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(post("/sessions"), 0.1)
        await post(f"/sessions/{session['id']}/reward", error="over")
        _, session = await post("/sessions")
        await asked(post, session)
        await post(f"/sessions/{session['id']}/reward", reward=1)

    rows = [{"prompt": None, "question": "1"}]
    rollouts = []

    def twice(player):
        rollouts.extend(
            play(player, says("1"), rows=rows, seconds=5.0) + play(player, says("1"), rows=rows, seconds=5.0)
        )
        return rollouts

    played(agent, rows, runs=twice)
    assert "over" in rollouts[0].error and rollouts[1].extras[REWARD] == 1.0


def test_an_agent_that_fails_for_want_of_room_is_cut_off():
    """Each reply has two tokens, and there is room for one reply."""

    async def agent(post):
        _, session = await post("/sessions")
        statuses = [(await asked(post, session))[0] for _ in range(2)]
        await post(f"/sessions/{session['id']}/reward", session["reward_key"], error="the second request was refused")
        return statuses

    rows = [{"prompt": None, "question": "1"}]
    (rollout,), statuses = played(agent, rows, runs=lambda player: play(player, says("1"), rows=rows, room=2))
    assert statuses == [200, 400] and rollout.error is None and rollout.extras == {REWARD: None}
    assert rollout.finish is FinishReason.LENGTH and rollout.num_sampled == 2


def test_a_rollout_that_nobody_takes_is_late():
    async def agent(post):
        return None

    (rollout,), _ = played(agent, [{"prompt": None, "question": "1"}], seconds=0.5)
    assert "took longer" in rollout.error


def test_remote_agents_need_a_key():
    with pytest.raises(ValueError, match="at least 16 characters"):
        RemoteAgents(1, key="short")
