"""Agents: coroutines `async (row, engine) -> Rollout` that play one rollout, and the built-in one that calls tools."""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from covey.core.records import FinishReason, Message, Rollout
from covey.rollout.episode import Episode, EpisodeEngine
from covey.rollout.tools.calls import AssistantTurn
from covey.rollout.tools.parsers import ToolParser, read_turn
from covey.rollout.tools.toolbox import Toolbox, count_outcomes

Agent = Callable[[dict[str, Any], EpisodeEngine], Awaitable[Rollout]]  # (dataset row, engine) -> the finished rollout


@dataclass(eq=False, repr=False)
class ToolAgent:
    """Lets the policy call tools until it answers without a call."""

    toolbox: Toolbox
    parser: ToolParser
    max_iterations: int | None = None

    async def __call__(self, row: dict[str, Any], engine: EpisodeEngine) -> Rollout:
        episode = engine.begin(tools=self.toolbox.schemas)
        await self.play(episode, self.toolbox)
        return episode.done()

    def end_batch(self) -> None:
        self.toolbox.warn_of_failures()

    async def play(self, episode: Episode, toolbox: Toolbox) -> None:
        """Continue an episode until the policy answers without a call, or runs out of rounds or room."""
        rounds, executed = 0, 0
        while True:
            reply = await episode.sample()
            if not reply.token_ids:
                return
            turn = read_turn(
                episode.engine.tokenizer,
                reply.token_ids,
                self.parser,
                episode.tools,
                episode.prefill,
                episode.opened_thinking,
                episode.engine.templates.codec.text_of.shown,
            )
            episode.messages[-1] = as_message(turn, episode.messages[-1]["content"])
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
            if episode.engine.templates.codec.vision is None:
                results = [result.without_images() for result in results]
            rounds, executed = rounds + 1, executed + len(results)
            episode.calls = dict(Counter(episode.calls) + count_outcomes(results))
            following = len(episode.messages)
            if not episode.write([result.message() for result in results]):
                return
            lists = enumerate((result.returned for result in results), following)
            episode.returned |= {index: returned for index, returned in lists if returned is not None}


def as_message(turn: AssistantTurn, text: str) -> Message:
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
