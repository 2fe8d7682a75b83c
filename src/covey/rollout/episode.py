"""One rollout under way: what has been said so far as tokens, and the means to say more.

`Episode` is a conversation that only ever grows: `sample` appends a turn of the policy as it was sampled, `write`
appends what others say, as the chat template renders it. Nothing is decoded and encoded again. `EpisodeEngine` is the
engine as one rollout sees it: prompts as users write them, seeds and limits taken care of. Not here: who plays
(`agent`), which rollouts there are (`collector`), how turns are rendered (`tools.template`).
"""

import asyncio
import copy
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from covey.core.engine import SampleRequest, SamplingParams
from covey.core.media import Media
from covey.core.rollout import Completion, FinishReason, Message, Rollout
from covey.rollout.images import images_of
from covey.rollout.prompts import LONGEST_TOKEN, Prompt, begun, characters, is_conversational
from covey.rollout.seeds import sample_seed
from covey.rollout.tools.turn_template import TurnTemplate, TurnTemplates
from covey.rollout.vision import Encoded

Ask = Callable[[SampleRequest], Coroutine[Any, Any, list[Completion]]]


@dataclass(frozen=True, slots=True)
class Reply:
    """What the policy said in one turn.

    Attributes:
        text: decoded, without special tokens.
        token_ids: as sampled, the token that ends the turn included.
        finish: STOP, or LENGTH where the turn was cut off.
        logprobs: as the engine reported them, or None.
    """

    text: str
    token_ids: list[int]
    finish: FinishReason
    logprobs: list[float] | None = None


class EpisodeEngine:
    """The engine as one rollout sees it.

    Args:
        ask: samples a request.
        templates: renders prompts and turns.
        params: how to sample; `max_tokens` bounds a whole completion.
        seed_key: names this sample: another key gives other tokens.
        row: the dataset row.
        sibling: which of the prompt's completions this is, 0 ... G-1.
        expands_images: the engine looks itself for tokens that stand for images.

    Attributes:
        row, sibling: as above; the row is the rollout's own copy.
        tokenizer: of the policy.
        episodes: every episode begun so far, in order.
        failure: what the engine raised, if it did: no fault of the rollout's.
        clock: ends the rollout when its time is over.

    Example:
        A rollout that lets the policy check its first answer:

            async def rollout(row, engine):
                episode = engine.begin()
                await episode.sample()
                if episode.write("Check your answer and give it again."):
                    await episode.sample()
                return episode.done()
    """

    def __init__(
        self,
        ask: Ask,
        templates: TurnTemplates,
        params: SamplingParams,
        seed_key: tuple[int | str, ...],
        row: dict[str, Any],
        sibling: int,
        expands_images: bool = False,
    ):
        self.row = row
        self.sibling = sibling
        self.tokenizer = templates.codec.tokenizer
        self.episodes: list[Episode] = []
        self.failure: BaseException | None = None
        self.clock: asyncio.Timeout | None = None
        self._ask = ask
        self._templates = templates
        self._params = params
        self._seed_key = seed_key
        self._expands_images = expands_images
        self._asides = 0
        self._closed = False

    @property
    def shows_images(self) -> bool:
        """Whether the policy can be shown images."""
        return self._templates.codec.vision is not None

    def begin(self, prompt: Prompt | None = None, tools: Sequence[dict[str, Any]] | None = None) -> "Episode":
        """Start an episode.

        Args:
            prompt: a string or messages; the row's prompt by default.
            tools: schemas that the chat template is to show; those of the run by default.

        Raises:
            ValueError: the prompt cannot be encoded.
        """
        given: Any = self.row.get("prompt") if prompt is None else prompt
        codec = self._templates.codec
        tools = codec.tools if tools is None else tools
        images = images_of(self.row) if prompt is None else ()
        encoded = codec.read(given, self.row.get("chat_template_kwargs"), tools, images)
        path: tuple[int | str, ...] = ("episode", len(self.episodes)) if self.episodes else ()
        episode = Episode(self, given, encoded.ids, list(tools), path, media=encoded.media)
        self.episodes.append(episode)
        return episode

    async def generate(
        self, prompt: Prompt, n: int = 1, max_tokens: int | None = None, temperature: float | None = None
    ) -> list[Reply]:
        """Completions that nobody trains on: of a judge, a sub-agent, a draft to choose from.

        Args:
            prompt: a string or messages.
            n: how many.
            max_tokens: of each; the config's `max_completion_length` by default.
            temperature: likewise the config's.

        Raises:
            ValueError: the prompt cannot be encoded, or a number is out of its range.
        """
        for name, value, least in (("n", n, 1), ("max_tokens", max_tokens, 1), ("temperature", temperature, 0)):
            if value is not None and not value >= least:
                raise ValueError(f"{name}={value} of `engine.generate` must be at least {least}.")
        encoded = self._templates.codec.read(prompt, self.row.get("chat_template_kwargs"), ())
        params = self._params
        if max_tokens is not None:
            params = replace(params, max_tokens=max_tokens)
        if temperature is not None:
            params = replace(params, temperature=temperature)
        aside, self._asides = self._asides, self._asides + 1
        seeds = [sample_seed(*self._seed_key, "aside", aside, i) for i in range(n)]
        request = SampleRequest(encoded.ids, n, params, seeds, media=encoded.media)
        return [self._reply(one) for one in await self._sampled(request)]

    @contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """Within this context the rollout waits for others, and its own time stands still."""
        loop, clock = asyncio.get_running_loop(), self.clock
        until = None if clock is None else clock.when()
        if clock is None or until is None:
            yield
            return
        left = until - loop.time()
        clock.reschedule(None)
        try:
            yield
        finally:
            clock.reschedule(loop.time() + left)

    def close(self) -> None:
        """Sample nothing more: the rollout is done, and so is whatever it has started and not awaited."""
        self._closed = True

    def ask_through(self, wrap: Callable[[Ask], Ask]) -> None:
        """Ask the engine in another way, such as from another event loop."""
        self._ask = wrap(self._ask)

    async def _turn(self, episode: "Episode", limit: int, path: tuple[int | str, ...]) -> Completion:
        params = self._params if limit >= self._params.max_tokens else replace(self._params, max_tokens=limit)
        seed = sample_seed(*self._seed_key, *path)
        said, shared = episode.prompt_ids + episode.completion_ids, len(episode.prompt_ids)
        vision = self._templates.codec.vision
        if self._expands_images and vision is not None and vision.misleads(said, episode.media):
            raise ValueError(
                "the policy has written a token that stands for an image, and was shown another image after it: the"
                " engine would look for the image in the wrong place."
            )
        request = SampleRequest(said, 1, params, [seed], shared=shared, media=episode.media)
        (completion,) = await self._sampled(request)
        return completion

    async def _sampled(self, request: SampleRequest) -> list[Completion]:
        if self._closed:
            raise ValueError("the rollout has ended: nothing is sampled for it any more.")
        try:
            return await self._ask(request)
        except Exception as error:
            self.failure = error
            raise

    def _reply(self, completion: Completion) -> Reply:
        text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        return Reply(text, list(completion.token_ids), completion.finish, completion.logprobs)

    def _room(self, prompt_ids: list[int]) -> int:
        context = self._templates.codec.max_context
        free = self._params.max_tokens if context is None else context - len(prompt_ids)
        return min(self._params.max_tokens, free)

    def _template(self, tools: Sequence[dict[str, Any]]) -> TurnTemplate:
        return self._templates.of(tools, self.row.get("chat_template_kwargs"))


@dataclass(eq=False)
class Episode:
    """A conversation that grows. Made by `EpisodeEngine.begin`.

    Attributes:
        engine: that samples it.
        prompt: as it was given.
        prompt_ids: its tokens.
        tools: schemas that the chat template shows.
        completion_ids: all tokens after the prompt.
        sampled: True where the policy chose the token.
        messages: what the completion is as messages: turns of the policy and what was written between them.
        turn_ends: index of the last token of each turn of the policy.
        finish: why the episode can go no further, or None: LENGTH where no room is left. A turn that the policy ended
            itself leaves it None, since something may be written after it.
        calls: how many calls of tools had which fate, as in a `Rollout`.
        tool_seconds: spent waiting for tools.
        media: the images that the prompt and the messages show.
    """

    engine: EpisodeEngine
    prompt: Prompt
    prompt_ids: list[int]
    tools: list[dict[str, Any]]
    path: tuple[int | str, ...] = ()
    completion_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    calls: dict[str, int] = field(default_factory=dict)
    tool_seconds: float = 0.0
    media: tuple[Media, ...] = ()
    _logprobs: list[float] | None = field(default_factory=list)
    _entropies: list[float] | None = field(default_factory=list)
    _versions: list[int] | None = field(default_factory=list)
    _samples: int = 0
    _forks: int = 0
    _turn_begins: int | None = None
    """Where the turn begins that the policy has said last; None where it is to say something next."""
    _open: bool = False
    """That turn was cut off by its own limit, and may go on."""
    _sampling: bool = False

    @property
    def logprobs(self) -> list[float] | None:
        """Of every completion token as the engine saw it, 0.0 where it was not sampled; None if it reports none."""
        return self._logprobs

    @property
    def room(self) -> int:
        """How many tokens may still follow."""
        return self.engine._room(self.prompt_ids) - len(self.completion_ids)

    async def sample(self, max_tokens: int | None = None) -> Reply:
        """Let the policy say its next turn, or go on with one that `max_tokens` has cut off.

        Args:
            max_tokens: of this call, where that is less than there is room for. What it cuts off stays open: the next
                `sample` goes on with it, and `write` ends it.

        Returns:
            What was said now. Its `finish` is STOP where the policy has ended its turn.

        Raises:
            ValueError: the episode has ended, which `finish` and the last `write` said; or `max_tokens` is below 1.
        """
        if self.finish is not None:
            raise ValueError(
                f"the episode has ended ({self.finish}), so nothing more can be sampled: look at `episode.finish`, or"
                " at what `episode.write` returned, before you sample."
            )
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} of a turn must be at least 1.")
        self._refuse_sampling("sampled")
        room = self.room
        if room <= 0:
            self.finish = FinishReason.LENGTH
            return Reply("", [], FinishReason.LENGTH)
        path = (*self.path, "turn", self._samples) if self._samples or self.path else ()
        limit = room if max_tokens is None else min(max_tokens, room)
        self._sampling = True
        try:
            completion = await self.engine._turn(self, limit, path)
        finally:
            self._sampling = False
        self._samples += 1
        self._say(completion)
        if completion.finish is not FinishReason.STOP:
            self._open = limit < room and len(completion.token_ids) >= limit
            self.finish = None if self._open else completion.finish
        return self.engine._reply(completion)

    def _say(self, completion: Completion) -> None:
        """Append what the policy said, to its open turn if there is one."""
        goes_on, self._open = self._open, False
        if not goes_on:
            self._turn_begins = len(self.completion_ids)
            self.messages.append({"role": "assistant", "content": ""})
        self._append(completion.token_ids, True, completion.logprobs, completion.entropies, completion.versions)
        if completion.token_ids:
            self.turn_ends = [*(self.turn_ends[:-1] if goes_on else self.turn_ends), len(self.completion_ids) - 1]
        said = self.engine.tokenizer.decode(self.completion_ids[self._turn_begins :], skip_special_tokens=True)
        first = begun(self.prompt) if len(self.messages) == 1 and is_conversational(self.prompt) else ""
        self.messages[-1]["content"] = first + said

    def write(self, said: str | Message | Sequence[Message]) -> bool:
        """Append what somebody else says after a turn of the policy, up to where the policy goes on.

        Args:
            said: results of tools (`{"role": "tool", "content": ...}`) or messages of a user, all that are to be read
                before the policy goes on; a string is a message of the user, or, after a prompt that is a string, that
                text as it is.

        Returns:
            Whether the policy can go on. False where the episode has ended, or what is said leaves no room to answer:
            `finish` is LENGTH then. Nothing is appended.

        Raises:
            ValueError: the chat template cannot render it, or there is no turn of the policy that it could follow.
        """
        chat, messages = is_conversational(self.prompt), _as_messages(said)
        if not chat and not isinstance(said, str):
            raise ValueError("messages need a prompt of messages: after a prompt that is a string, write a string.")
        self._refuse_sampling("written")
        if self.finish is not None:
            return False
        too_long = characters(messages) > LONGEST_TOKEN * self.room
        written = Encoded([])
        if not too_long:
            written = self._rendered(messages) if chat else Encoded(self._encoded(messages[0]["content"]))
        ids = written.ids
        if too_long or len(ids) >= self.room:
            self.finish = FinishReason.LENGTH
            return False
        self.media += written.media
        zeros, last = [0.0] * len(ids), self._versions[-1:] if self._versions else [0]
        self._append(ids, False, zeros, zeros, last * len(ids))
        self.messages += messages
        self._turn_begins, self._open = None, False
        return True

    def _rendered(self, messages: list[Message]) -> Encoded:
        if not messages:
            raise ValueError("there is nothing to write: the list of messages is empty.")
        if self._turn_begins is None:
            raise ValueError(
                "messages follow a turn of the policy, and it has said nothing yet. Put what comes before its first"
                " turn into the prompt, `engine.begin(prompt)`, and what comes before any other into one `write`."
            )
        template = self.engine._template(self.tools)
        last = self.completion_ids[-1] if self.completion_ids else None
        cut = self._open or not template.ends_with(last)  # by its own limit, or by a text that a server stops at
        before = template.ending() if cut else []
        start = len(self.prompt_ids) + len(self.completion_ids) + len(before)
        follows = template.answer(messages, ended_with=None if cut else last, start=start)
        return Encoded([*before, *follows.ids], follows.media)

    def _encoded(self, text: str) -> list[int]:
        return list(self.engine.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _refuse_sampling(self, what: str) -> None:
        if self._sampling:
            raise ValueError(
                f"a turn of this episode is being sampled, so nothing else can be {what} meanwhile: await it first, or"
                " `fork()` the episode for every branch."
            )

    def fork(self) -> "Episode":
        """An episode that begins with the same tokens and goes on by itself, with samples of its own."""
        self._refuse_sampling("forked")
        other = copy.copy(self)
        for name in ("completion_ids", "sampled", "turn_ends", "_logprobs", "_entropies", "_versions"):
            value = getattr(self, name)
            setattr(other, name, None if value is None else list(value))
        other.messages, other.calls = [dict(message) for message in self.messages], dict(self.calls)
        self._forks += 1
        other.path, other._forks, other._samples = (*self.path, "fork", self._forks), 0, 0
        return other

    def done(self, finish: FinishReason | None = None, error: str | None = None, **extras: Any) -> Rollout:
        """The finished episode.

        Args:
            finish: why it ended; by default what it ended with, or STOP, or LENGTH where the last turn is still open.
            error: what failed, where that is why.
            extras: further fields, which reward functions get as keyword arguments.
        """
        text = self.engine.tokenizer.decode(self.completion_ids, skip_special_tokens=True)
        as_it_is = FinishReason.LENGTH if self._open else FinishReason.STOP
        return Rollout(
            prompt_ids=self.prompt_ids,
            completion_ids=list(self.completion_ids),  # a copy: what failed may still be at work on the original
            sampled=list(self.sampled),
            logprobs=self._logprobs,
            completion=list(self.messages) if is_conversational(self.prompt) else text,
            finish=finish or self.finish or as_it_is,
            entropies=self._entropies,
            versions=self._versions,
            extras=extras,
            turn_ends=list(self.turn_ends),
            calls=dict(self.calls),
            error=error,
            tool_seconds=self.tool_seconds,
            prompt=self.prompt,
            media=self.media,
        )

    def _append(
        self,
        token_ids: list[int],
        sampled: bool,
        logprobs: list[float] | None,
        entropies: list[float] | None,
        versions: list[int] | None,
    ) -> None:
        self.completion_ids += token_ids
        self.sampled += [sampled] * len(token_ids)
        # What an engine does not report of one turn is unknown of the whole.
        self._logprobs = None if self._logprobs is None or logprobs is None else self._logprobs + logprobs
        self._entropies = None if self._entropies is None or entropies is None else self._entropies + entropies
        self._versions = None if self._versions is None or versions is None else self._versions + versions


def _as_messages(said: str | Message | Sequence[Message]) -> list[Message]:
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    return [dict(said)] if isinstance(said, dict) else [dict(message) for message in said]
