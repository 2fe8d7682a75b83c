"""Gymnasium environments as text environments: `environment_factory=GymEnvironment("FrozenLake-v1", ...)`."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from covey.core.records import Message
from covey.rollout.environments.interface import instructed, library
from covey.runtime.calling_thread import threaded


@threaded
class GymEnvironment:
    """Factory of text environments from a gymnasium environment, and of dataset rows to start them from.

    Args:
        make: the environment's id, or a function without arguments that makes one.
        actions: an action for each word; the last of these words in the policy's text counts.
        parse: instead of `actions`: the policy's text -> an action. It raises `ValueError` for text that is not an
            action; the policy is shown the message.
        show: (observation, environment) -> text or messages for the policy. By default a text observation itself, the
            rendering of an environment with `render_mode="ansi"`, or `str` of anything else.
        instructions: the user's message before the first observation.
        system: a system message, or None.
        invalid_reward: reward of text that is not an action; the environment does not change.
        turn_rewards: reward each turn separately, instead of the completion with the sum.
        max_turns: most turns of the policy.
        settings: further arguments of `gymnasium.make`.

    Example:
        >>> lake = GymEnvironment(
        ...     "FrozenLake-v1", actions={"left": 0, "down": 1, "right": 2, "up": 3},
        ...     render_mode="ansi", is_slippery=False,
        ... )
        >>> walk = lake()
        >>> print(walk.reset(seed=0))
        <BLANKLINE>
        [S]FFF
        FHFH
        FFFH
        HFFG
        <BLANKLINE>
        >>> walk.step("I go right.")[1:3]
        (0, False)
    """

    def __init__(
        self,
        make: str | Callable[[], Any],
        *,
        actions: Mapping[str, Any] | None = None,
        parse: Callable[[str], Any] | None = None,
        show: Callable[[Any, Any], str | list[Message]] | None = None,
        instructions: str = "",
        system: str | None = None,
        invalid_reward: float = 0.0,
        turn_rewards: bool = False,
        max_turns: int | None = None,
        **settings: Any,
    ):
        if actions is not None and parse is not None:
            raise ValueError("`actions` and `parse` both map text to actions; give one of the two.")
        if settings and not isinstance(make, str):
            raise ValueError(f"{', '.join(settings)}: settings go with an environment's id, not with a function.")
        self.make, self.settings = make, settings
        self.parse, self.show = _parse_words(actions) if actions is not None else parse, show or _shown
        self.instructions, self.system = instructions, system
        self.invalid_reward, self.turn_rewards, self.max_turns = invalid_reward, turn_rewards, max_turns

    def __call__(self) -> "GymText":
        if isinstance(self.make, str):
            environment = library("gymnasium", "gymnasium").make(self.make, **self.settings)
        else:
            environment = self.make()
        if self.parse is None and type(environment.action_space).__name__ != "Text":
            raise ValueError(
                f"text is not an action of {environment.action_space}. Give actions={{'left': 0, ...}} with a word"
                " for each action, or parse=function from text to an action."
            )
        return GymText(environment, self.parse or str.strip, self.show, self.invalid_reward)

    def dataset(self, size: int, seed: int = 0) -> list[dict[str, Any]]:
        """Rows for `train_dataset`, each with a seed for `reset` that all rollouts of the row share.

        Args:
            size: number of rows.
            seed: seed of the first row; the others count up from it.
        """
        return [{"prompt": instructed(self), "seed": seed + i} for i in range(size)]


@dataclass(eq=False)
class GymText:
    """One gymnasium environment with `step(text)`."""

    reward_name: ClassVar[str] = "environment"

    environment: Any
    parse: Callable[[str], Any]
    show: Callable[[Any, Any], str | list[Message]]
    invalid_reward: float

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> str | list[Message]:
        observation, _ = self.environment.reset(seed=seed, options=options)
        return self.show(observation, self.environment)

    def step(self, text: str) -> tuple[str | list[Message], Any, bool, bool, dict[str, Any]]:
        try:
            action = self.parse(text)
        except ValueError as error:
            return str(error), self.invalid_reward, False, False, {"invalid": True}
        observation, reward, terminated, truncated, info = self.environment.step(action)
        return self.show(observation, self.environment), reward, bool(terminated), bool(truncated), info

    def close(self) -> None:
        self.environment.close()


def _parse_words(actions: Mapping[str, Any]) -> Callable[[str], Any]:
    if not actions:
        raise ValueError("`actions` is empty; give a word for each action, such as {'left': 0, 'right': 1}.")
    known = {name.lower(): action for name, action in actions.items()}
    longest_first = sorted(map(re.escape, known), key=len, reverse=True)
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)")

    def parse(text: str) -> Any:
        words = pattern.findall(text.lower())
        if not words:
            raise ValueError(f"That is no action. Say one of: {', '.join(actions)}.")
        return known[words[-1]]

    return parse


def _shown(observation: Any, environment: Any) -> str:
    if isinstance(observation, str):
        return observation
    if getattr(environment, "render_mode", None) == "ansi":
        return re.sub(r"\x1b\[41m(.*?)\x1b\[0m", r"[\1]", environment.render())  # the highlighted cell
    return str(observation)
