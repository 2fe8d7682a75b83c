"""Agents: coroutines that play one rollout, and the built-in one that calls tools.

An agent is any `async (row, engine) -> Rollout`: plain code around `await episode.sample()`. All agents of a generation
run side by side, and the engine batches what they ask for. A function of the user's own has the same form
(`covey.rollout.user_functions`). Not here: what a conversation is as tokens (`episode`), how calls are read and
executed (`tools`).
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

from covey.core.rollout import FinishReason, Message, Rollout
from covey.rollout.episode import Episode, EpisodeEngine, Reply
from covey.rollout.prompts import is_conversational, prefill
from covey.rollout.tools.calls import AssistantTurn
from covey.rollout.tools.parsers import ToolParser, read_turn
from covey.rollout.tools.toolbox import Toolbox, count_fates

Agent = Callable[[dict[str, Any], EpisodeEngine], Awaitable[Rollout]]
"""(dataset row, engine) -> the finished rollout."""


class ToolAgent:
    """Lets the policy call tools until it answers without a call.

    Args:
        toolbox: the tools.
        parser: how the model writes calls.
        max_iterations: rounds of calls that are executed; None: until the policy stops calling. A policy that calls
            once more ends with `FinishReason.TOOL_BUDGET`.
    """

    def __init__(self, toolbox: Toolbox, parser: ToolParser, max_iterations: int | None = None):
        self.toolbox = toolbox
        self.parser = parser
        self.max_iterations = max_iterations

    async def __call__(self, row: dict[str, Any], engine: EpisodeEngine) -> Rollout:
        """Play the row's prompt to its end."""
        episode = engine.begin(tools=self.toolbox.schemas)
        await self.play(episode, self.toolbox)
        return episode.done()

    async def play(self, episode: Episode, toolbox: Toolbox) -> None:
        """Go on with an episode until the policy answers without a call, or may not go on.

        Args:
            episode: begun with the toolbox's schemas.
            toolbox: executes the calls.
        """
        rounds, executed = 0, 0
        while True:
            reply = await episode.sample()
            if not reply.token_ids:
                return
            turn = self._read(episode, reply)
            if reply.finish is not FinishReason.STOP or not turn.asks:
                return
            if rounds == self.max_iterations:
                episode.finish = FinishReason.TOOL_BUDGET
                return
            began = perf_counter()
            try:
                results = await toolbox.answer(turn, executed)
            finally:
                episode.tool_seconds += perf_counter() - began
            if not episode.engine.shows_images:
                results = [result.without_images() for result in results]
            rounds, executed = rounds + 1, executed + len(results)
            episode.calls = dict(Counter(episode.calls) + count_fates(results))
            if not episode.write([result.message() for result in results]):
                return

    def _read(self, episode: Episode, reply: Reply) -> AssistantTurn:
        """Take the turn apart, in the episode's last message too."""
        first = len(episode.messages) == 1 and is_conversational(episode.prompt)
        before = prefill(episode.prompt) if first else ""
        turn = read_turn(episode.engine.tokenizer, reply.token_ids, self.parser, episode.tools, before)
        episode.messages[-1] = as_message(turn, episode.messages[-1]["content"])
        return turn


def as_message(turn: AssistantTurn, text: str) -> Message:
    """A turn as chat templates and reward functions get it.

    Args:
        turn: as it was read.
        text: of the turn; the message holds all of it where a call in it could not be read.
    """
    message: Message = {"role": "assistant", "content": text if turn.malformed else turn.content}
    if turn.calls:
        message["tool_calls"] = [
            {
                "type": "function",
                **({"id": call.call_id} if call.call_id else {}),
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in turn.calls
        ]
    return message
