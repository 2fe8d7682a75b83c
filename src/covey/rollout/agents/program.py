"""Programs as agents: `GRPOTrainer(..., agent="python my_agent.py")`, or `RemoteAgents(port)` for remote programs.

A program is started for each rollout, or requests one over HTTP. It gets the URL of an OpenAI or Anthropic API, whose
completions are sampled from the policy. The rollout ends when the program ends.
"""

import asyncio
import inspect
import json
import os
import secrets
import shlex
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from aiohttp import web

from covey.core.records import Rollout
from covey.rollout.agents.descriptors import OutputPipe, RewardSocket
from covey.rollout.agents.endpoint import AgentEndpoint, Service
from covey.rollout.agents.session import AgentSession
from covey.rollout.environments.agent import REWARD
from covey.rollout.environments.interface import EnvironmentFailed, checked_number
from covey.rollout.episode import EpisodeEngine
from covey.rollout.seats import checked_seats
from covey.runtime.child_process import OVER_LIMITS, ChildProcess, Quota
from covey.runtime.user_code import warn

AgentFunction = Callable[[dict[str, Any], str, str], Awaitable[float | None]]  # (row, base URL, key) -> the reward

INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "SYSTEMROOT")  # variables that every program gets
PATIENCE = 30.0  # seconds that a request for a session waits for a rollout to play
KEY_VARIABLE = "COVEY_AGENTS_KEY"


class _ServedAgent:
    """Agent whose programs send requests to an endpoint of this process, which is started with the first rollout."""

    optional_reward = True  # reward functions, if there are any, replace the agent's own reward
    text_only = True
    seats: Mapping[str, Any] = {}
    _service: Service | None = None

    def _start(self) -> Service:
        return Service()

    async def _play(self, row: dict[str, Any], url: str, key: str, session: AgentSession) -> float | None:
        """Let a program play the rollout; returns its reward."""
        raise NotImplementedError

    async def play(self, row: dict[str, Any], engine: EpisodeEngine) -> Rollout:
        """Play one rollout. Must always be called on the same event loop."""
        if self._service is None or self._service.loop is not asyncio.get_running_loop():
            self._service = self._start()
        service = self._service
        await asyncio.shield(service.ready)
        names = {**engine.seats, **self.seats}
        session = AgentSession(engine, seats={name: engine.seated(seat) for name, seat in names.items()})
        key = service.endpoint.open(session)
        try:
            reward = await self._play(row, service.endpoint.url, key, session)
        finally:
            service.endpoint.close(key)
        if not session.asked:
            refused = f", whose first refusal was: {session.refused}" if session.refused else ""
            raise EnvironmentFailed(f"the agent ended without a reply of the policy{refused}")
        extras: dict[str, Any] = {REWARD: checked_number(reward, "the agent")}
        return session.rollout(**extras)

    def close(self) -> None:
        service, self._service = self._service, None
        if service is not None:
            service.end()


class AgentProgram(_ServedAgent):
    """Plays each rollout with a program of its own, or with a function that talks to the URL.

    Args:
        agent: a command, as a text or a list, or `async (row, base_url, api_key) -> reward or None`. In a command,
            `{row}` is replaced by the path of a file with the dataset row as JSON; the row is also its standard input.
            It may write the rollout's reward, a number, to the file descriptor whose number is in the variable
            COVEY_REWARD_FD. Processes that it starts after the policy's first reply cannot.
        directory: where the command runs; the trainer's working directory by default.
        environment: names of the trainer's environment variables that the command gets, or variables with values. It
            also gets PATH, the URLs and the keys; HOME and TMPDIR are a folder that is deleted after the rollout.
        memory: most GiB that the command and all its descendants may use together.
        processes: most processes that the command and its descendants may have.
        seats: other models, by the name that requests give as `model`: a `Seat`, "frozen" for the policy as it is
            when the trainer is made, or "policy:n" for the policy as it was n optimizer steps ago. Their answers are
            not trained on. The trainer's `seats` can be used as well.

    Raises:
        ValueError: the agent is neither a command nor a coroutine function.
    """

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
            given: dict[str, Any] = {"directory": directory, "environment": environment or None}
            given |= {"memory": None if memory == 4.0 else memory, "processes": None if processes == 64 else processes}
            for name, value in given.items():
                if value is not None:
                    warn(f"AgentProgram({name}=...) has no effect: a function runs in the trainer's process.")
        else:
            self.command = shlex.split(agent) if isinstance(agent, str) else [str(part) for part in agent]
            if not self.command or shutil.which(self.command[0]) is None:
                raise ValueError(
                    f"`agent` is the command {agent!r}, and there is no such program: name one on the PATH."
                )
        self.seats = checked_seats(seats)
        self.directory, self.limits = directory, Quota(memory, processes)
        if directory is not None and not Path(directory).is_dir():
            raise ValueError(f"AgentProgram(directory={os.fspath(directory)!r}): there is no such folder.")
        if not isinstance(environment, Mapping):
            if missing := [name for name in environment if name not in os.environ]:
                warn(f"AgentProgram(environment=...) names {', '.join(missing)}, which no variable here is called.")
            environment = {name: os.environ[name] for name in environment if name in os.environ}
        self.environment = dict(environment)

    async def _play(self, row: dict[str, Any], url: str, key: str, session: AgentSession) -> float | None:
        """Run the command to its end, and end all processes that it started.

        EnvironmentFailed if it fails, unless the conversation had outgrown the model's context or the token budget.
        """
        if self.function is not None:
            return await self.function(row, f"{url}/v1", key)
        folder = Path(tempfile.mkdtemp(prefix="covey-agent-"))
        task = folder / "row.json"
        task.write_text(json.dumps(row, default=str))
        variables = {name: os.environ[name] for name in INHERITED if name in os.environ}
        variables |= {"HOME": str(folder), "TMPDIR": str(folder), "COVEY_ROW": str(task), "COVEY_REWARD_FD": "3"}
        variables |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": key}
        variables |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key} | self.environment
        child: ChildProcess | None = None
        try:
            with RewardSocket() as reward, OutputPipe() as output, task.open("rb") as stdin:
                child = ChildProcess(
                    [part.replace("{row}", str(task)) for part in self.command],
                    limits=self.limits,
                    descriptor=reward.given,
                    stdin=stdin,
                    stdout=DEVNULL,
                    stderr=output.given,
                    cwd=self.directory,
                    env=variables,
                )
                session.before_reply = partial(_trust_processes, reward, child)
                status = await output.until_end(child)
                if status and not session.full:
                    raise EnvironmentFailed(self._failure(status, output.end()))
                return reward.value()
        finally:
            await asyncio.shield(asyncio.to_thread(_clear, child, folder))

    def _failure(self, status: int, end: str) -> str:
        limit = OVER_LIMITS.get(status, f"it ended with status {status}").format(*self.limits)
        return f"the agent failed: {limit}{f'. Its last output: {end}' if end else ''}"


def _clear(child: ChildProcess | None, folder: Path) -> None:
    if child is not None:
        child.end()
    shutil.rmtree(folder, ignore_errors=True)


def _trust_processes(reward: RewardSocket, child: ChildProcess) -> None:
    reward.trust(child.descendants())


@dataclass(eq=False)
class _Open:
    """A rollout that waits for an agent, or for the agent's end."""

    row: dict[str, Any]
    key: str  # of its session at the endpoint
    reward: asyncio.Future[Any]
    reward_key: str = field(default_factory=partial(secrets.token_urlsafe, 24))  # which no request for samples needs


class RemoteAgents(_ServedAgent):
    """Rollouts for agents that run elsewhere; `rollout_timeout` includes the wait for an agent.

    `POST /sessions` returns `{"id", "row", "base_url", "api_key", "reward_key"}` of a rollout and needs `key` as
    `Authorization: Bearer`. `POST /sessions/ID/reward` with `{"reward": number or null}` or `{"error": text}` ends the
    rollout and needs `key` or the rollout's `reward_key`. The `api_key` can only sample, because commands that the
    policy runs may read it.

    Args:
        port: of the endpoint.
        host: address to listen on; addresses other than 127.0.0.1 are open to the network, without encryption.
        key: key with which agents get sessions; by default the environment variable COVEY_AGENTS_KEY.
        seats: as in `AgentProgram`.

    Raises:
        ValueError: there is no key, or one of fewer than 16 characters.
    """

    def __init__(
        self, port: int, *, host: str = "127.0.0.1", key: str | None = None, seats: Mapping[str, Any] | None = None
    ):
        self.seats = checked_seats(seats)
        self._address, self._key = (host, port), key or os.environ.get(KEY_VARIABLE, "")
        if len(self._key) < 16:
            raise ValueError(
                f"remote agents need a key of at least 16 characters, got {len(self._key)}: give `key`, or set the"
                f" variable {KEY_VARIABLE}."
            )
        self._waiting: asyncio.Queue[_Open] = asyncio.Queue()
        self._open: dict[str, _Open] = {}

    def _start(self) -> Service:
        self._waiting = asyncio.Queue()
        routes = [web.post("/sessions", self._begin), web.post("/sessions/{id}/reward", self._end)]
        return Service(endpoint=AgentEndpoint(*self._address, routes))

    async def _play(self, row: dict[str, Any], url: str, key: str, session: AgentSession) -> float | None:
        waiting = _Open(row, key, asyncio.get_running_loop().create_future())
        self._waiting.put_nowait(waiting)
        try:
            return await waiting.reward
        except EnvironmentFailed:
            if not session.full:  # as programs may fail where a request found no room
                raise
            return None
        finally:
            waiting.reward.cancel()  # no agent gets it any more
            self._open = {number: one for number, one in self._open.items() if one is not waiting}

    async def _begin(self, request: web.Request) -> web.Response:
        if not self._allowed(request):
            return _error("this is not the key for sessions.", 401)
        try:
            async with asyncio.timeout(PATIENCE):
                one = await self._waiting.get()
                while one.reward.done():  # its rollout has ended
                    one = await self._waiting.get()
        except TimeoutError:
            return _error("no rollout waits for an agent: ask again.", 503)
        if request.transport is None or request.transport.is_closing():
            self._waiting.put_nowait(one)  # for another
            return _error("the agent has gone.", 499)
        number = secrets.token_hex(8)
        self._open[number] = one
        access = {"base_url": f"http://{request.host}/v1", "api_key": one.key, "reward_key": one.reward_key}
        return web.json_response(
            {"id": number, "row": one.row, **access}, dumps=lambda value: json.dumps(value, default=str)
        )

    async def _end(self, request: web.Request) -> web.Response:
        one = self._open.get(request.match_info["id"])
        if not self._allowed(request, "" if one is None else one.reward_key):
            return _error("this is not the reward_key of the session, nor the key for sessions.", 401)
        if one is None or one.reward.done():
            return _error("there is no such session, or it has ended.", 404)
        try:
            body = await request.json()
            error, reward = body.get("error"), checked_number(body.get("reward"), "the agent")
        except (ValueError, AttributeError, EnvironmentFailed) as wrong:
            return _error(f"the body must be JSON with a reward: {wrong}.", 400)
        if error:
            one.reward.set_exception(EnvironmentFailed(f"the agent reported: {str(error)[:500]}"))
        else:
            one.reward.set_result(reward)
        return web.json_response({})

    def _allowed(self, request: web.Request, *more: str) -> bool:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip().encode()
        return any(secrets.compare_digest(given, key.encode()) for key in (self._key, *more) if key)


def _error(message: str, status: int) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def with_agent(agent: Any, environment_factory: Any, tools: Any = None, rollout_func: Any = None) -> Any:
    """The agent's environments if there is an `agent`, else `environment_factory`.

    ValueError if an agent is given together with tools, a rollout function or environments.
    """
    if agent is None:
        return environment_factory
    others = {"environment_factory": environment_factory, "tools": tools, "rollout_func": rollout_func}
    if given := [name for name, value in others.items() if value]:
        raise ValueError(
            f"`agent` plays the whole rollout, so {', '.join(f'`{name}`' for name in given)} would not be used: give"
            " one of them. The program has its own tools and surroundings."
        )
    return agent if hasattr(agent, "play") else AgentProgram(agent)
