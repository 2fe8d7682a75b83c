"""Environments of the verifiers library: `environment_factory=VerifiersEnvironment("marble-v1")`.

The environment runs unmodified: its tasks are the dataset, its rewards the reward. The model that its programs talk to
is an endpoint in this process (`covey.rollout.agents`), where every rollout is sampled token by token from the policy.
"""

import asyncio
from collections.abc import Mapping
from itertools import islice
from typing import Any

from covey.core.records import FinishReason, Rollout
from covey.rollout.agents.endpoint import Service
from covey.rollout.agents.session import AgentSession
from covey.rollout.environments.agent import REWARD, SCORES
from covey.rollout.environments.interface import EnvironmentFailed, checked_number, library
from covey.rollout.environments.pool import EnvironmentWarning
from covey.rollout.episode import EpisodeEngine
from covey.runtime.user_code import warn


class VerifiersEnvironment:
    """Plays the tasks of an installed taskset.

    Args:
        taskset: its id, as verifiers knows it: the name of the package.
        options: of the taskset (`--env.taskset.*`).
        environment: further settings of the environment (`--env.*`), such as `{"agent": {"max_turns": 4}}`. They
            override the two below.
        harness: the id of the program that plays; None: a conversation in this process, which calls no tools.
        max_turns: turns of the policy.

    Raises:
        ImportError: verifiers is not installed.
        ValueError: the environment is played by several agents.
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
        if len(roles) != 1:
            raise ValueError(
                f"{taskset!r} is played by {len(roles)} agents ({', '.join(roles)}); one policy plays one of them, so"
                " only environments with a single agent can be trained on."
            )
        seat = {"harness": {"id": harness or HARNESS}, "runtime": {"type": "subprocess"}, "max_turns": max_turns}
        given[roles[0]] = {**seat, **dict(given.get(roles[0]) or {})}
        self.environment = vf.load_environment(vf.resolve_env_config(given))
        self._tasks: list[Any] = []
        self._stream: Any = None
        self._service: Service | None = None

    def dataset(self, size: int) -> list[dict[str, Any]]:
        """The first tasks of the taskset as rows for `train_dataset`.

        Args:
            size: how many; fewer if there are no more.
        """
        return [_row(task, number) for number, task in enumerate(self._first(size))]

    async def play(self, row: dict[str, Any], engine: EpisodeEngine) -> Rollout:
        """One episode of a row's task. Always to be called on the same event loop."""
        import verifiers.v1 as vf

        task = self._task(row)
        if self._service is None or self._service.loop is not asyncio.get_running_loop():
            self._service = Service(self.environment.serving())
        service = self._service
        try:
            await asyncio.shield(service.ready)
        except Exception as error:
            raise EnvironmentFailed(f"the environment's servers do not start: {error}") from error
        session = AgentSession(engine)
        key = service.endpoint.open(session)
        # No key is read from the environment's variables: the address has it.
        client = vf.EvalClientConfig(base_url=f"{service.endpoint.url}/{key}/v1", api_key_var="COVEY_NO_KEY")
        try:
            return _rollout(session, await self.environment.run_episode(task, vf.ModelContext("policy", client)))
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
                f"the row's 'task' is {number!r}, which is no task of the taskset; take the rows from `dataset(size)`"
            )
        return self._tasks[number]


def _row(task: Any, number: int) -> dict[str, Any]:
    from covey.rollout.environments.verifiers_harness import conversation

    if task.data.prompt is None:
        return {"task": number}
    return {"prompt": conversation(task.data.system_prompt, task.data.prompt), "task": number}


def _rollout(session: AgentSession, played: Any) -> Rollout:
    if session.refused is not None:
        raise EnvironmentFailed(session.refused)
    errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
    if not played.ok and errors:
        raise EnvironmentFailed(f"the environment failed: {errors[-1].type}: {errors[-1].message[:500]}")
    if len(played.traces) != 1:
        raise EnvironmentFailed(f"the episode was played by {len(played.traces)} agents; one can be trained")
    if not session.asked:
        raise EnvironmentFailed("the environment ended before the policy's first turn")
    (trace,) = played.traces
    scores = {name: one.score for name, one in trace.rewards.items() if one is not None}
    scores |= {name: value for name, value in trace.metrics.items() if value is not None}
    finish = FinishReason.TOOL_BUDGET if trace.is_timeout or trace.is_truncated else None
    extras: dict[str, Any] = {REWARD: checked_number(trace.reward, "the environment"), SCORES: scores}
    return session.rollout(finish, **extras)
