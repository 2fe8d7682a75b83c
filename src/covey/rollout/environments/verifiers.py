"""Environments of the verifiers library: `environment_factory=VerifiersEnvironment("marble-v1")`.

The environment runs unmodified: its tasks are the dataset, and it gives the reward. Its programs send requests to an
endpoint in this process (`covey.rollout.agents`), which samples them from the policy. In an environment of several
agents, every trace that is trained is one rollout, with the agent's name as its role.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from covey.core.records import FinishReason, Rollout
from covey.rollout.agents.endpoint import Service
from covey.rollout.agents.session import AgentSession
from covey.rollout.environments.agent import REWARD, SCORES, filled_up
from covey.rollout.environments.interface import EnvironmentFailed, checked_number, library
from covey.rollout.environments.pool import EnvironmentWarning
from covey.rollout.episode import EpisodeEngine
from covey.runtime.user_code import warn

TRACE = "X-Session-ID"  # header of requests: the id of the trace that they are part of


class VerifiersEnvironment:
    """Plays the tasks of an installed taskset.

    Args:
        taskset: id of the taskset in verifiers: the name of its package.
        options: of the taskset (`--env.taskset.*`).
        environment: further settings of the environment (`--env.*`), such as `{"agent": {"max_turns": 4}}`. They
            override the two below.
        harness: the id of the program that plays; None: a conversation in this process, which calls no tools.
        max_turns: turns of the policy.

    Raises:
        ImportError: verifiers is not installed.

    Attributes:
        roles: names of its agents.
    """

    def __init__(
        self,
        taskset: str,
        *,
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, Any] | None = None,
        harness: str | None = None,
        max_turns: int | None = None,
    ):
        vf: Any = library("verifiers.v1", "verifiers")
        from covey.rollout.environments.verifiers_harness import HARNESS

        given: dict[str, Any] = {"taskset": {"id": taskset, **(options or {})}, **(environment or {})}
        kind = vf.env_config_type(taskset, given.get("id", ""))
        roles = [name for name, field in kind.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
        self.roles = tuple(roles)
        seat = {"harness": {"id": harness or HARNESS}, "runtime": {"type": "subprocess"}, "max_turns": max_turns}
        for role in roles:
            named = {"model": role} if len(roles) > 1 else {}
            given[role] = {**seat, **named, **dict(given.get(role) or {})}
        self.environment = vf.load_environment(vf.resolve_env_config(given))
        self._tasks: list[Any] = []
        self._stream: Any = None
        self._service: Service | None = None

    def dataset(self, size: int) -> list[dict[str, Any]]:
        """The first tasks of the taskset as rows for `train_dataset`.

        Args:
            size: number of rows; fewer if the taskset has fewer tasks.
        """
        return [_row(task, number) for number, task in enumerate(self._first(size))]

    async def play(self, row: dict[str, Any], engine: EpisodeEngine) -> Rollout:
        """Play one episode of a row's task, with one rollout. Must always be called on the same event loop."""
        if len(self.roles) > 1:
            (rollout,) = await self.play_team(row, engine, 1)
            return rollout
        session = AgentSession(engine)
        return _rollout(session, await self._episode(row, session))

    async def play_team(self, row: dict[str, Any], engine: EpisodeEngine, n: int) -> list[Rollout]:
        """One episode of several agents: a rollout for each trace that is trained, filled up to n with absent ones."""
        session = TeamSession(engine, self.roles)
        return filled_up(session.rollouts(await self._episode(row, session)), n)

    async def _episode(self, row: dict[str, Any], session: Any) -> Any:
        import verifiers.v1 as vf

        task = self._task(row)
        if self._service is None or self._service.loop is not asyncio.get_running_loop():
            self._service = Service(self.environment.serving())
        service = self._service
        try:
            await asyncio.shield(service.ready)
        except Exception as error:
            raise EnvironmentFailed(f"the environment's servers do not start: {error}") from error
        key = service.endpoint.open(session)
        # No key is read from the environment's variables: the address has it.
        client = vf.EvalClientConfig(base_url=f"{service.endpoint.url}/{key}/v1", api_key_var="COVEY_NO_KEY")
        try:
            return await self.environment.run_episode(task, vf.ModelContext("policy", client))
        finally:
            service.endpoint.close(key)

    def close(self) -> None:
        service, self._service = self._service, None
        if service is not None and not service.end():
            warn("a verifiers environment did not end in time.", EnvironmentWarning)

    def _first(self, size: int) -> list[Any]:
        """The first tasks, each made once and in order: a taskset may take long to make them, or be endless."""
        if self._stream is None:
            self._stream = iter(self.environment.taskset)
        self._tasks += islice(self._stream, max(0, size - len(self._tasks)))
        return self._tasks[:size]

    def _task(self, row: dict[str, Any]) -> Any:
        number = row.get("task")
        if not isinstance(number, int) or number < 0 or len(self._first(number + 1)) <= number:
            raise EnvironmentFailed(
                f"the row's 'task' is {number!r}, which the taskset does not have; take rows from `dataset(size)`"
            )
        return self._tasks[number]


def _row(task: Any, number: int) -> dict[str, Any]:
    from covey.rollout.environments.verifiers_harness import conversation

    if task.data.prompt is None:
        return {"task": number}
    return {"prompt": conversation(task.data.system_prompt, task.data.prompt), "task": number}


def _rollout(session: AgentSession, played: Any) -> Rollout:
    _check(played, [session])
    if len(played.traces) != 1:
        raise EnvironmentFailed(f"the episode was played by {len(played.traces)} agents; one can be trained")
    return _rollout_of(session, played.traces[0])


def _check(played: Any, sessions: Iterable[AgentSession]) -> None:
    """EnvironmentFailed for an episode that failed, or in which a request could not be answered."""
    if refused := [one.refused for one in sessions if one.refused is not None]:
        raise EnvironmentFailed(refused[0])
    errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
    if not played.ok and errors:
        raise EnvironmentFailed(f"the environment failed: {errors[-1].type}: {errors[-1].message[:500]}")


def _rollout_of(session: AgentSession, trace: Any, role: str = "") -> Rollout:
    """The rollout of a trace, with its reward and scores, those of several agents after the agent's name."""
    if not session.asked:
        raise EnvironmentFailed(f"the environment ended before the policy's first turn{f' as {role}' if role else ''}")
    scores = {name: one.score for name, one in trace.rewards.items() if one is not None}
    scores |= {name: value for name, value in trace.metrics.items() if value is not None}
    finish = FinishReason.TOOL_BUDGET if trace.is_timeout or trace.is_truncated else None
    named = {f"{role}/{name}" if role else name: value for name, value in scores.items()}
    extras: dict[str, Any] = {REWARD: checked_number(trace.reward, "the environment"), SCORES: named}
    return replace(session.rollout(finish, **extras), role=role)


@dataclass(eq=False)
class TeamSession:
    """Requests of the agents of one episode: each trace has a session, which is known by a header of its requests.

    Agents whose names are seats are played by opponents, and are not trained.
    """

    engine: EpisodeEngine
    roles: Sequence[str]
    sessions: dict[str, AgentSession] = field(default_factory=dict)  # by id of the trace
    refused: str | None = None  # a request of no agent

    def of(self, model: Any, headers: Mapping[str, str]) -> AgentSession:
        """The session of a request: its model is the agent's name."""
        role = str(model)
        name = headers.get(TRACE, role)
        if name not in self.sessions:
            opponents = {role: self.engine.seated(self.engine.seats[role])} if role in self.engine.seats else {}
            self.sessions[name] = AgentSession(self.engine.another("agent", role), opponents)
        return self.sessions[name]

    def rollouts(self, played: Any) -> list[Rollout]:
        """Rollouts of the traces that are trained, in an order that does not depend on the order of requests."""
        if self.refused is not None:
            raise EnvironmentFailed(self.refused)
        _check(played, self.sessions.values())
        found = []
        for trace in played.traces:
            role = trace.agent.name
            if role in self.engine.seats or not trace.agent.trainable:
                continue
            if (session := self.sessions.get(trace.id)) is None:
                raise EnvironmentFailed(f"the environment ended before the policy's first turn as {role}")
            found.append(_rollout_of(session, trace, role))
        order = {role: place for place, role in enumerate(self.roles)}
        found.sort(key=lambda one: (order.get(one.role, len(order)), one.prompt_ids, one.completion_ids))
        return found
