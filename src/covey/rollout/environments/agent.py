"""Agents for environments: they take an environment from the pool and play a rollout from `reset` to its reward."""

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from covey.core.records import FinishReason, Rollout, absent_rollout
from covey.rollout.environments import interface
from covey.rollout.environments.pool import EnvironmentPool, EnvironmentWarning, Lease, close_environment
from covey.rollout.episode import Episode, EpisodeEngine
from covey.rollout.tool_agent import ToolAgent
from covey.rollout.tools.calls import AssistantTurn
from covey.rollout.tools.tool import Tool
from covey.rollout.tools.toolbox import Rendered, Toolbox, ToolResult
from covey.rollout.user_functions import GroupFunction, RolloutFunction, RolloutValidator
from covey.runtime.deadlines import CallTimeout
from covey.runtime.user_code import call_all, warn

OBJECTS, REWARD, SCORES = "environments", "environment_reward", "environment_scores"
"""Keyword arguments of reward functions: the objects, the reward that each gave its rollout, its scores by name."""
REWARD_NUMBER = "environment_reward_number"
"""Keyword argument of reward functions: index of the environment's reward among several (`RewardSource`)."""


@dataclass(frozen=True)
class RewardSource:
    """Environments of one class, which give a reward of their own."""

    kind: Any  # the class
    name: str  # of the reward: the class's `reward_name`, else its name

    @classmethod
    def of(cls, environment: Any) -> "RewardSource":
        kind = type(environment)
        return cls(kind, getattr(environment, "reward_name", kind.__name__))


@dataclass(eq=False)
class EnvironmentAgent:
    """Plays rollouts in environments of a pool; here rollouts of one turn, for environments that only have `reset`."""

    pool: EnvironmentPool
    gives_reward: bool
    needs: Sequence[str] = ()  # columns that `reset` needs, because its arguments have no defaults
    source: RewardSource = RewardSource(object, "environment")  # of the environment's reward, if it gives one

    def __post_init__(self) -> None:
        self.gives_objects = self.pool.limit is None
        self.schemas: Sequence[dict[str, Any]] = ()  # of tools, for the chat template
        self.sources = [self.source] if self.gives_reward else []

    async def __call__(self, row: dict[str, Any], engine: EpisodeEngine) -> Rollout:
        with engine.paused_timeout():  # other rollouts may use all environments
            lease = await self.pool.acquire()
        try:
            columns = interface.accepted(lease.environment.reset, row)
            opening = await lease.call("reset", interface.checked_observation, **columns)
            prompt = interface.initial_prompt(engine.row.get("prompt"), opening)
            episode = engine.begin(prompt, tools=self.schemas or None)
            reward = await self._play(lease, episode)
            if hasattr(lease.environment, "get_reward"):
                reward = await lease.call("get_reward", interface.checked_reward)
            extras: dict[str, Any] = {REWARD: reward} if self.gives_reward else {}
            if self.gives_objects:
                extras[OBJECTS] = lease.environment
            rollout = episode.done(**extras)
        except BaseException:
            self.pool.release(lease.environment, usable=False)  # its state is unknown
            raise
        if not self.gives_objects:  # other rollouts wait for it
            self.pool.release(lease.environment)
        return rollout

    def release(self, rollouts: Iterable[Rollout]) -> None:
        for rollout in rollouts:
            if (environment := rollout.extras.pop(OBJECTS, None)) is not None:
                self.pool.release(environment)

    def end_batch(self) -> None:
        self.pool.close_lost()

    def close(self) -> None:
        self.pool.close()

    async def _play(self, lease: Lease, episode: Episode) -> interface.Reward:
        """Play from the prompt to the end; returns the rewards of turns, if the environment gives them."""
        await episode.sample()
        return None


@dataclass(eq=False)
class ToolEnvironmentAgent(EnvironmentAgent):
    """Plays environments whose public methods are tools."""

    _: KW_ONLY
    agent: ToolAgent  # its tools are the methods of one of the environments, and further tools
    methods: Collection[str]  # names of the tools that are methods of the environment

    def __post_init__(self) -> None:
        super().__post_init__()
        self.schemas = self.agent.toolbox.schemas

    def end_batch(self) -> None:
        super().end_batch()
        self.agent.end_batch()

    async def _play(self, lease: Lease, episode: Episode) -> None:
        await self.agent.play(episode, EnvironmentToolbox(lease, self.agent.toolbox, self.methods))


class EnvironmentToolbox(Toolbox):
    """Toolbox of one environment's methods, with schemas taken from another one of its class, and of further tools."""

    def __init__(self, lease: Lease, described: Toolbox, methods: Collection[str]):
        super().__init__(list(described.tools.values()), timeout=lease.seconds, loop=lease.loop)
        self._outcomes = described._outcomes
        self._lease, self._methods = lease, methods

    async def answer(self, turn: AssistantTurn, first_id: int = 0) -> list[ToolResult]:
        """As `Toolbox.answer`; EnvironmentFailed if a method was abandoned, since its state is unknown."""
        results = await super().answer(turn, first_id)
        if self._lease.lost is not None:
            raise interface.EnvironmentFailed(self._lease.lost)
        return results

    async def _call(self, tool: Tool, arguments: dict[str, Any]) -> Rendered:
        if tool.name not in self._methods:
            return await super()._call(tool, arguments)
        lease = self._lease
        name, method = f"{lease.kind}.{tool.name}", getattr(lease.environment, tool.name)
        try:  # rendering runs the environment's code, so it is where the method runs, under the same deadline
            return await lease.raw_call(name, method, lambda result, _: self.rendered(result), **arguments)
        except (TimeoutError, interface.EnvironmentFailed):  # the environment was lost to this call or to another
            lease.lose(name)
            raise CallTimeout from None


@dataclass(eq=False)
class TextEnvironmentAgent(EnvironmentAgent):
    """Plays environments with `step(text)`: a turn of the policy is the action, the observation answers it."""

    max_turns: int | None = None
    turn_end: Callable[[int], Any] | None = None  # turn number -> its end (`TurnEnd`); None: rewards of turns add up

    async def _play(self, lease: Lease, episode: Episode) -> interface.Reward:
        rewards: list[float | None] = []
        while True:
            reply = await episode.sample()
            if not reply.token_ids:  # no room for a turn, so there is no action
                break
            observation, reward, done, truncated = await lease.call("step", interface.checked_step, reply.text)
            rewards.append(reward)
            if reply.finish is not FinishReason.STOP:
                break
            last = len(rewards) == self.max_turns
            if truncated or (last and not done):
                episode.finish = FinishReason.TOOL_BUDGET
            if done or last:
                break
            assert observation is not None, "checked"
            if not episode.write(interface.as_messages(observation)):
                break
        if self.turn_end is not None:
            return [(self.turn_end(turn), reward) for turn, reward in enumerate(rewards)]
        given = [reward for reward in rewards if reward is not None]
        return sum(given) if given else None


class PlayedEnvironment(RolloutFunction):
    """Plays rollouts by an environment's own `async play(row, engine)`, and closes the environment at the end."""

    gives_reward = True

    def __init__(self, environment: Any, timeout: float, limits: RolloutValidator):
        super().__init__(environment.play, timeout, limits)
        self.source = RewardSource(type(environment), getattr(environment, "reward_name", "environment"))
        self.sources = [self.source]
        self.optional_reward = getattr(environment, "optional_reward", False)
        self.text_only = getattr(environment, "text_only", False)  # True: it does not see images of rows
        self._environment = environment
        self._at_end = weakref.finalize(self, _close, environment)

    def close(self) -> None:
        _close(self._environment)


class PlayedTeam(GroupFunction):
    """Plays episodes of several agents by an environment's own `async play_team(row, engine, n) -> n rollouts`."""

    gives_reward = True

    def __init__(self, environment: Any, timeout: float, limits: RolloutValidator):
        super().__init__(environment.play_team, timeout, limits)
        self.source = RewardSource(type(environment), getattr(environment, "reward_name", "environment"))
        self.sources = [self.source]
        self.optional_reward = getattr(environment, "optional_reward", False)
        self.text_only = getattr(environment, "text_only", False)
        self._environment = environment
        self._at_end = weakref.finalize(self, _close, environment)

    def close(self) -> None:
        _close(self._environment)


def filled_up(rollouts: Sequence[Rollout], n: int) -> list[Rollout]:
    """Rollouts of an episode, filled up to `n` with absent ones, which are not trained on."""
    if not 0 < len(rollouts) <= n:
        raise interface.EnvironmentFailed(
            f"the episode has {len(rollouts)} rollouts that are trained, and rollouts_per_game={n} allows 1 to {n}: set"
            " it to the most that an episode of any task has"
        )
    return [*rollouts, *(absent_rollout(rollouts[0].prompt_ids, []) for _ in range(n - len(rollouts)))]


def _close(environment: Any) -> None:
    if (error := close_environment(environment)) is not None:
        warn(f"an environment could not be closed: {error}.", EnvironmentWarning)


class NamedEnvironments:
    """Plays each rollout in the environment named in its row's column `environment`."""

    COLUMN = "environment"

    def __init__(self, agents: Mapping[str, EnvironmentAgent | PlayedEnvironment]):
        self.agents = dict(agents)
        self._pooled = [agent for agent in self.agents.values() if isinstance(agent, EnvironmentAgent)]
        giving = [agent for agent in self.agents.values() if getattr(agent, "gives_reward", False)]
        self.gives_reward = bool(giving)
        self.sources = list(dict.fromkeys(agent.source for agent in giving))  # two names may have one class
        self.gives_objects = all(getattr(agent, "gives_objects", False) for agent in self.agents.values())
        self.needs = list(dict.fromkeys(name for agent in self._pooled for name in agent.needs))
        self.schemas = [schema for agent in self._pooled for schema in agent.schemas]

    async def __call__(self, row: dict[str, Any], engine: EpisodeEngine) -> Rollout:
        name = self.checked_name(row)
        rollout = await self.agents[name](row, engine)
        if REWARD in rollout.extras:
            rollout.extras[REWARD_NUMBER] = self.sources.index(self.agents[name].source)
        reward = rollout.extras.get(REWARD)
        given = [one for _, one in reward if one is not None] if isinstance(reward, list) else [reward]
        if given and all(isinstance(one, int | float) for one in given):
            scores = rollout.extras.get(SCORES) or {}
            rollout.extras[SCORES] = {**scores, f"{name}/reward": sum(given)}
        return rollout

    def checked_name(self, row: Mapping[str, Any]) -> str:
        name = row.get(self.COLUMN)
        if name in self.agents:
            return str(name)
        known = ", ".join(map(repr, self.agents))
        raise interface.EnvironmentFailed(f"its column `{self.COLUMN}` is {name!r}, and the environments are {known}")

    def release(self, rollouts: Iterable[Rollout]) -> None:
        for rollout in rollouts:
            if (environment := rollout.extras.pop(OBJECTS, None)) is not None:
                for agent in self._pooled:
                    agent.pool.release(environment)  # the others' pools do not know it

    def end_batch(self) -> None:
        for agent in self._pooled:
            agent.end_batch()

    def close(self) -> None:
        call_all(*(agent.close for agent in self.agents.values()))
