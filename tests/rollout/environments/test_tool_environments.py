"""Environments whose methods are tools: one object per rollout, from `reset` to the reward."""

import asyncio
import threading

import pytest

from covey.core.records import FinishReason
from tests.support.playing import call, play, says, tool_agent

ROW = {"prompt": [{"role": "user", "content": "Count to 3."}], "start": 1}


class Counter:
    """Counts in its own state."""

    made = 0

    def __init__(self):
        Counter.made += 1
        self.value = None
        self.closed = 0

    def reset(self, start=0, **row):
        self.value = start
        return f" You start at {start}."

    def add(self, by: int) -> str:
        """Add to the counter.

        Args:
            by: how much.
        """
        self.value += by
        return f"now {self.value}"

    def get_reward(self):
        return float(self.value == 3)

    def close(self):
        self.closed += 1

    def _secret(self):
        raise AssertionError("no tool")


@pytest.fixture(autouse=True)
def _count_anew():
    Counter.made = 0


def test_a_rollout_from_reset_to_reward():
    engine = says(call("add", by=2), "done")
    agent = tool_agent(Counter)
    (rollout,) = play(agent, engine, [ROW])
    assert engine.received[0] == (
        "<bos>tool: add<eos><bos>user: Count to 3. You start at 1.<eos><bos>assistant: "
    )  # the opening is added to the user's message; reset, get_reward, close and _secret are no tools
    assert [message["content"] for message in rollout.completion] == ["", "now 3", "done"]
    assert rollout.extras["environment_reward"] == 1.0
    assert rollout.extras["environments"].value == 3
    assert rollout.finish is FinishReason.STOP and rollout.calls == {"ok": 1}
    assert ROW["prompt"] == [{"role": "user", "content": "Count to 3."}]


def test_a_rollout_owns_its_environment_until_it_is_scored():
    agent = tool_agent(Counter)  # makes one to look at
    rollouts = play(agent, says(call("add", by=2), "done"), [ROW], group=4)
    objects = [rollout.extras["environments"] for rollout in rollouts]
    assert len({id(one) for one in objects}) == 4 and all(one.value == 3 for one in objects)
    assert Counter.made == 5
    agent.release(rollouts)
    assert all("environments" not in rollout.extras for rollout in rollouts)
    play(agent, says("done"), [ROW], group=4)
    assert Counter.made == 5  # the same objects, reset
    agent.close()
    assert [one.closed for one in objects] == [1, 1, 1, 1]


def test_tools_of_the_run_stand_beside_those_of_the_environment():
    def double(x: int) -> int:
        """Double a number.

        Args:
            x: a number.
        """
        return 2 * x

    (rollout,) = play(tool_agent(Counter, tools=[double]), says(call("double", x=4) + call("add", by=1), "so"), [ROW])
    assert [message["content"] for message in rollout.completion] == ["", "8", "now 2", "so"]


class Asynchronous:
    """The same in async methods; its lock belongs to the event loop on which it was made."""

    def __init__(self):
        self.busy = 0
        self.seen = []

    async def reset(self):
        self.lock = asyncio.Lock()

    async def look(self) -> str:
        """Look around."""
        async with self.lock:
            self.busy += 1
            self.seen.append(self.busy)
            await asyncio.sleep(0.01)
            self.busy -= 1
        return "a wall"

    async def get_reward(self):
        return 0.5

    async def close(self):
        self.seen.append("closed")


def test_async_environments():
    agent = tool_agent(Asynchronous)
    (rollout,) = play(agent, says(call("look") + call("look") + call("look"), "ok"))
    environment = rollout.extras["environments"]
    assert rollout.extras["environment_reward"] == 0.5
    assert environment.seen == [1, 1, 1]  # calls of one turn follow one another
    agent.close()
    assert environment.seen[-1] == "closed"


class OneThread:
    """Like a database connection: only the thread that made it may use it."""

    def __init__(self):
        self.threads = {threading.get_ident()}

    def reset(self):
        self.threads.add(threading.get_ident())

    def read(self) -> str:
        """Read."""
        self.threads.add(threading.get_ident())
        return "read"


def test_ordinary_methods_run_on_one_thread():
    (rollout,) = play(tool_agent(OneThread), says(call("read") + call("read"), "ok"))
    assert len(rollout.extras["environments"].threads) == 1


def test_messages_of_reset_follow_the_prompt_of_the_row():
    class Opens(OneThread):
        def reset(self, **row):
            return [{"role": "system", "content": "rules"}, {"role": "user", "content": "move"}]

    engine = says("ok")
    play(tool_agent(Opens), engine, [ROW, {"start": 1}])
    first, second = sorted(engine.received, key=len, reverse=True)
    opening = "<bos>system: rules<eos><bos>user: move<eos><bos>assistant: "
    assert first == "<bos>tool: read<eos><bos>user: Count to 3.<eos>" + opening
    assert second == "<bos>tool: read<eos>" + opening


def test_text_of_reset_is_the_prompt_of_a_row_without_one():
    engine = says("ok")
    (rollout,) = play(tool_agent(Counter), engine, [{"start": 7}])
    assert engine.received == ["<bos>tool: add<eos><bos>user:  You start at 7.<eos><bos>assistant: "]
    assert rollout.finish is FinishReason.STOP


def test_an_exception_of_a_method_is_told_to_the_policy():
    class Strict(Counter):
        def add(self, by: int) -> str:
            """Add.

            Args:
                by: how much.
            """
            raise KeyError("no more")

    (rollout,) = play(tool_agent(Strict), says(call("add", by=1), "ok"), [ROW])
    assert rollout.completion[1]["content"] == str({"error": "'no more'"})
    assert rollout.finish is FinishReason.STOP and rollout.calls == {"exception": 1}


def test_steps_are_rewards_too():
    class Steps(Counter):
        def get_reward(self):
            return [(3, 1), (7, None)]

    (rollout,) = play(tool_agent(Steps), says("ok"), [ROW])
    assert rollout.extras["environment_reward"] == [(3, 1.0), (7, None)]


def test_environments_without_get_reward_give_no_reward():
    (rollout,) = play(tool_agent(OneThread), says("ok"))
    assert list(rollout.extras) == ["environments"]
