"""Programs as agents: `GRPOTrainer(..., agent="python my_agent.py")`.

A program is started for each rollout. Whatever it asks of the OpenAI or Anthropic URL in its environment is sampled
from the policy, and its end is the rollout's.
"""

import asyncio
import inspect
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL
from typing import Any, BinaryIO

from covey.core.records import Rollout
from covey.rollout.agents.endpoint import Service
from covey.rollout.agents.session import AgentSession, checked_seats
from covey.rollout.environments.agent import REWARD
from covey.rollout.environments.interface import EnvironmentFailed, checked_number
from covey.rollout.episode import EpisodeEngine
from covey.runtime.child_process import OVER_LIMITS, ChildProcess, Quota
from covey.runtime.safe_text import printable

AgentFunction = Callable[[dict[str, Any], str, str], Awaitable[float | None]]  # (row, base URL, key) -> the reward

MAX_OUTPUT = 16 << 20  # bytes that a program may write to its standard error
SHOWN = 500  # characters of it in the message of a failure
POLL = 0.01  # seconds
INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "SYSTEMROOT")  # variables that every program gets


class AgentProgram:
    """Plays each rollout with a program of its own, or with a function that talks to the URL.

    Args:
        agent: a command, as one text or as a list, in which `{row}` becomes the path of a file with the dataset row as
            JSON; or `async (row, base_url, api_key) -> reward or None`. A command reads the row from its standard
            input, too, and may write a number into the file that the variable COVEY_REWARD names: the rollout's reward.
        directory: where the command runs; the trainer's working directory by default.
        environment: names of the trainer's variables that the command gets, or their values by name. In addition it
            gets PATH and the URLs and keys; HOME and TMPDIR are a folder that is deleted after the rollout.
        memory: GiB that the command and all its descendants may use.
        processes: how many these may be.
        seats: other models, by the name that requests give as `model`: a `Seat`, or "frozen" for the policy as it is
            when the trainer is made. What they answer is not trained on.

    Raises:
        ValueError: the agent is neither a command nor a coroutine function.
    """

    optional_reward = True  # reward functions, where there are any, come in the place of its own reward
    text_only = True

    def __init__(
        self,
        agent: str | Sequence[str] | AgentFunction,
        *,
        directory: str | os.PathLike[str] | None = None,
        environment: Sequence[str] | Mapping[str, str] = (),
        memory: float = 4.0,
        processes: int = 64,
        seats: Mapping[str, Any] | None = None,
    ):
        self.function: AgentFunction | None = None
        self.command: list[str] = []
        if callable(agent):
            if not inspect.iscoroutinefunction(agent):
                raise ValueError(
                    "`agent` must be a command or a coroutine function, `async def agent(row, base_url, api_key)`; got"
                    f" {agent!r}, which is not async."
                )
            self.function = agent
        else:
            self.command = shlex.split(agent) if isinstance(agent, str) else [str(part) for part in agent]
            if not self.command or shutil.which(self.command[0]) is None:
                raise ValueError(
                    f"`agent` is the command {agent!r}, and there is no such program: name one on the PATH."
                )
        self.seats = checked_seats(seats)
        self.directory, self.limits = directory, Quota(memory, processes)
        if not isinstance(environment, Mapping):
            environment = {name: os.environ[name] for name in environment if name in os.environ}
        self.environment = dict(environment)
        self._service: Service | None = None

    async def play(self, row: dict[str, Any], engine: EpisodeEngine) -> Rollout:
        """One rollout. Always to be called on the same event loop."""
        if self._service is None or self._service.loop is not asyncio.get_running_loop():
            self._service = Service()
        service = self._service
        await asyncio.shield(service.ready)
        session = AgentSession(engine, seats=self.seats)
        key = service.endpoint.open(session)
        try:
            if self.function is not None:
                given = await self.function(row, f"{service.endpoint.url}/v1", key)
            else:
                given = await self._run(row, service.endpoint.url, key, session)
        finally:
            service.endpoint.close(key)
        if not session.asked:
            refused = f", whose first refusal was: {session.refused}" if session.refused else ""
            raise EnvironmentFailed(f"the agent ended without a reply of the policy{refused}")
        extras: dict[str, Any] = {REWARD: checked_number(given, "the agent")}
        return session.rollout(**extras)

    def close(self) -> None:
        service, self._service = self._service, None
        if service is not None:
            service.end()

    async def _run(self, row: dict[str, Any], url: str, key: str, session: AgentSession) -> float | None:
        """Run the command to its end, and end all that it has started. It may fail where a request found no room."""
        folder = Path(tempfile.mkdtemp(prefix="covey-agent-"))
        task, reward, log = folder / "row.json", folder / "reward", folder / "stderr"
        task.write_text(json.dumps(row, default=str))
        variables = {name: os.environ[name] for name in INHERITED if name in os.environ}
        variables |= {"HOME": str(folder), "TMPDIR": str(folder), "COVEY_ROW": str(task), "COVEY_REWARD": str(reward)}
        variables |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": key}
        variables |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key} | self.environment
        child: ChildProcess | None = None
        try:
            with task.open("rb") as stdin, log.open("w+b") as stderr:  # the program may delete it
                child = ChildProcess(
                    [part.replace("{row}", str(task)) for part in self.command],
                    limits=self.limits,
                    stdin=stdin,
                    stdout=DEVNULL,
                    stderr=stderr,
                    cwd=self.directory,
                    env=variables,
                )
                while (status := child.poll()) is None:
                    if os.fstat(stderr.fileno()).st_size > MAX_OUTPUT:
                        raise EnvironmentFailed(
                            f"the agent wrote more than {MAX_OUTPUT >> 20} MiB to its standard error"
                        )
                    await asyncio.sleep(POLL)
                if status and not session.full:
                    raise EnvironmentFailed(self._failure(status, stderr))
            return _read_reward(reward)
        finally:
            await asyncio.shield(asyncio.to_thread(_clear, child, folder))

    def _failure(self, status: int, log: BinaryIO) -> str:
        log.seek(max(0, os.fstat(log.fileno()).st_size - SHOWN))
        end = printable(log.read(SHOWN).decode(errors="replace")).strip()
        limit = OVER_LIMITS.get(status, f"it ended with status {status}").format(*self.limits)
        return f"the agent failed: {limit}{f'. Its last output: {end}' if end else ''}"


def _clear(child: ChildProcess | None, folder: Path) -> None:
    if child is not None:
        child.end()
    shutil.rmtree(folder, ignore_errors=True)


def _read_reward(path: Path) -> float | None:
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            text = file.read(100).decode().strip()
        return float(text) if text else None
    except ValueError as error:
        raise EnvironmentFailed("the agent wrote a reward that is no number into the file COVEY_REWARD") from error


def with_agent(agent: Any, environment_factory: Any, tools: Any = None, rollout_func: Any = None) -> Any:
    """The environments of a trainer: those of its `agent`, if it has one; ValueError if it has both."""
    if agent is None:
        return environment_factory
    others = {"environment_factory": environment_factory, "tools": tools, "rollout_func": rollout_func}
    if given := [name for name, value in others.items() if value]:
        raise ValueError(
            f"`agent` plays the whole rollout, so {', '.join(f'`{name}`' for name in given)} would not be used: give"
            " one of them. The program has its own tools and surroundings."
        )
    return agent if hasattr(agent, "play") else AgentProgram(agent)
