"""Episodes: rollouts of several turns, as conversations whose tokens are only appended to, and the engine for them."""

import asyncio
import copy
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
from torch import Tensor

from covey.core.engine import SampleRequest, SamplingParams
from covey.core.media import Media
from covey.core.records import PER_TOKEN, WRITERS, Completion, FinishReason, Message, Rollout
from covey.core.routes import continued
from covey.core.special_tokens import CompletionDecoder, opened_thinking
from covey.rollout.images import embed_images
from covey.rollout.prompts import (
    LONGEST_TOKEN,
    Prompt,
    characters,
    is_conversational,
    prefill,
    row_images,
    row_tools,
    sample_seed,
)
from covey.rollout.seats import Seat, SeatEngine, Seats, TextSeat, seat_named
from covey.rollout.tools.turn_template import TurnTemplates
from covey.rollout.vision import Encoded

Generate = Callable[[SampleRequest], Coroutine[Any, Any, list[Completion]]]


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn of the policy.

    Attributes:
        text: decoded, without special tokens except marks such as <think>.
        token_ids: as sampled, including the token that ends the turn.
        finish: STOP, or LENGTH if the turn was cut off.
        logprobs: as the engine reported them, or None.
        tokens: text of each token.
    """

    text: str
    token_ids: list[int]
    finish: FinishReason
    logprobs: list[float] | None = None
    tokenizer: Any = field(default=None, repr=False, compare=False)

    @property
    def tokens(self) -> list[str]:
        return [self.tokenizer.decode([token]) for token in self.token_ids]

    @classmethod
    def of(cls, completion: Completion, text_of: CompletionDecoder) -> "Reply":
        ids = list(completion.token_ids)
        return cls(text_of(ids), ids, completion.finish, completion.logprobs, text_of.tokenizer)


@dataclass(eq=False, repr=False)
class EpisodeEngine:
    """The engine of one rollout.

    Attributes:
        row: the rollout's own copy of the dataset row.
        sibling: index of this rollout among the rollouts of its prompt, from 0 to G - 1.
        tokenizer: of the policy.
        episodes: every episode begun so far, in order.
        failure: the exception of the engine, if the engine failed rather than the rollout.
        timeout: the deadline of the rollout.

    Example:
        A rollout that lets the policy check its first answer:

            async def rollout(row, engine):
                episode = engine.begin()
                await episode.sample()
                if episode.write("Check your answer and give it again."):
                    await episode.sample()
                return episode.done()
    """

    send: Generate  # samples a request
    templates: TurnTemplates
    params: SamplingParams  # `max_tokens` bounds a whole completion
    seed_key: tuple[int | str, ...]  # names this sample: another key gives other tokens
    row: dict[str, Any]
    sibling: int
    expands_images: bool = False  # the engine itself expands image tokens, so that it must find them in the prompt
    max_turn_length: int | None = None  # most tokens of one call of `Episode.sample`
    seats: Seats = field(default_factory=dict)  # opponents by name
    trains: bool = True  # False for an opponent, whose turns are not trained on
    episodes: "list[Episode]" = field(default_factory=list, init=False)
    failure: BaseException | None = field(default=None, init=False)
    timeout: asyncio.Timeout | None = field(default=None, init=False)
    ages: dict[int, int] = field(default_factory=dict, init=False)  # by game: optimizer steps that its opponent is old
    _generate_calls: int = field(default=0, init=False)
    _opponents: "dict[tuple[str, int], EpisodeEngine | TextSeat]" = field(default_factory=dict, init=False)
    own_ids: list[int] | None = field(default=None, init=False)  # of the row's prompt
    _sent: Counter[tuple[Any, ...]] = field(default_factory=Counter, init=False)
    _named: dict[tuple[int | str, ...], Counter[tuple[Any, ...]]] = field(default_factory=dict, init=False)
    closed: bool = field(default=False, init=False)  # refuse requests, such as those of tasks left running

    def __post_init__(self) -> None:
        self.tokenizer = self.templates.codec.tokenizer

    def begin(
        self, prompt: Prompt | None = None, tools: Sequence[dict[str, Any]] | None = None, role: str = "", game: int = 0
    ) -> "Episode":
        """Start an episode.

        Args:
            prompt: a string or messages; the row's prompt by default.
            tools: schemas for the chat template to show; by default the row's `tools`, or the run's.
            role: seat of a game that it is played in. Known from here on, it is also that of a failed game's rollout.
            game: number of the game among the games of the prompt, from 0.

        Raises:
            ValueError: the prompt cannot be encoded, or this is no role or number of a game.
        """
        if problem := seat_problem(role, game):
            raise ValueError(f"an episode {problem}")
        codec = self.templates.codec
        tools = (row_tools(self.row) or codec.tools) if tools is None else tools
        images = row_images(self.row) if prompt is None else ()
        own_prompt: Any = self.row.get("prompt") if prompt is None else prompt
        encoded = codec.read(own_prompt, self.row.get("chat_template_kwargs"), tools, images)
        if encoded.media:
            own_prompt = embed_images(own_prompt, images)[0]  # as reward functions get it
        path: tuple[int | str, ...] = ("episode", len(self.episodes)) if self.episodes else ()
        episode = Episode(self, own_prompt, encoded.ids, list(tools), path, media=encoded.media, role=role, game=game)
        self.episodes.append(episode)
        if prompt is None:
            self.own_ids = encoded.ids
        return episode

    def seat(self, name: str, game: int = 0) -> "EpisodeEngine | TextSeat":
        """The engine of an opponent, whose episodes work like this engine's and are not trained on.

        A server or a function answers in text: its `begin(prompt)` returns a conversation with `sample` and `write`.

        Args:
            name: name of the opponent in the trainer's `seats`.
            game: number of the game, which decides which of several earlier policies plays.

        Raises:
            ValueError: there is no such seat.
        """
        if (name, game) not in self._opponents:
            seat = self.seated(seat_named(self.seats, name), game)
            text = isinstance(seat, Seat) or not hasattr(seat, "generate")
            settings = self.params.max_tokens, self.params.temperature
            self._opponents[name, game] = TextSeat(name, seat, *settings) if text else self._playing(seat, name, game)
        return self._opponents[name, game]

    def seated(self, seat: Any, game: int = 0) -> Any:
        """The seat, or the one of several earlier policies that plays this game."""
        if not hasattr(seat, "chosen"):
            return seat
        chosen, self.ages[game] = seat.chosen((*self.seed_key, game))
        return chosen

    def _playing(self, seat: SeatEngine, name: str, game: int) -> "EpisodeEngine":
        async def send(request: SampleRequest) -> list[Completion]:
            if self.closed:
                raise ValueError("the rollout has ended: nothing is sampled for it any more.")
            return await seat.generate(request)

        return replace(self, send=send, seed_key=(*self.seed_key, "seat", name, game), seats={}, trains=False)

    def another(self, *name: int | str) -> "EpisodeEngine":
        """A further engine for a rollout function that returns several rollouts, one per engine.

        Args:
            name: of the player; seeds depend on it. Engines of one name get seeds by the tokens before a sample, and by
                the number of earlier samples after the same tokens.
        """
        made = replace(self, send=self.submit, seed_key=(*self.seed_key, *name))
        made._sent = self._named.setdefault(name, Counter())
        return made

    def seed(self, ids: list[int], path: tuple[int | str, ...] = ()) -> int:
        """Seed of a sample after these tokens, whatever else was sampled; after the row's prompt, a plain sample's."""
        digest = blake2b(np.array(ids, dtype=np.int64).tobytes(), digest_size=16).hexdigest()
        number, self._sent[path, digest] = self._sent[path, digest], self._sent[path, digest] + 1
        if not number and not path and ids == self.own_ids:
            return sample_seed(*self.seed_key)
        return sample_seed(*self.seed_key, *path, "prefix", digest, number)

    async def generate(
        self, prompt: Prompt, n: int = 1, max_tokens: int | None = None, temperature: float | None = None
    ) -> list[Reply]:
        """Sample completions that are not trained on, such as a judge's, a sub-agent's or drafts to choose from.

        Args:
            prompt: a string or messages.
            n: number of completions.
            max_tokens: most tokens of each; the config's `max_completion_length` by default.
            temperature: the config's by default.

        Raises:
            ValueError: the prompt cannot be encoded, or a number is out of its range.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"n={n!r} of `engine.generate` must be a whole number, 1 or more.")
        given = {"max_tokens": max_tokens, "temperature": temperature}
        changes = {name: value for name, value in given.items() if value is not None}
        params = self.params.changed(changes, "engine.generate")
        encoded = self.templates.codec.read(prompt, self.row.get("chat_template_kwargs"), ())
        seeds = [sample_seed(*self.seed_key, "aside", self._generate_calls, i) for i in range(n)]
        self._generate_calls += 1
        completions = await self.submit(SampleRequest(encoded.ids, n, params, seeds, media=encoded.media))
        return [Reply.of(completion, self.templates.codec.text_of) for completion in completions]

    async def submit(self, request: SampleRequest) -> list[Completion]:
        """Completions of a request; an exception of the engine is stored in `failure` and raised."""
        if self.closed:
            raise ValueError("the rollout has ended: nothing is sampled for it any more.")
        try:
            return await self.send(request)
        except Exception as error:
            self.failure = error
            raise

    @contextmanager
    def paused_timeout(self) -> Iterator[None]:
        """Context in which the rollout's time limit is paused, because it waits for other rollouts."""
        loop, timeout = asyncio.get_running_loop(), self.timeout
        if timeout is None or (until := timeout.when()) is None:
            yield
            return
        left = until - loop.time()
        timeout.reschedule(None)
        try:
            yield
        finally:
            timeout.reschedule(loop.time() + left)


@dataclass(eq=False)
class Episode:
    """A conversation to which turns and messages are appended. Made by `EpisodeEngine.begin`.

    Attributes:
        engine: the engine that samples it.
        prompt: as it was given.
        prompt_ids: the prompt's tokens.
        tools: schemas that the chat template shows.
        completion_ids: all tokens after the prompt.
        sampled: True where the policy chose the token.
        messages: the completion as messages: turns of the policy and the messages written between them.
        logprobs: one per completion token, 0.0 where it was not sampled; None if the engine reports none.
        entropies, versions, sampling_mask: one per completion token or None, as in a `Rollout`.
        routes: experts of the first tokens of prompt and completion, as in a `Rollout`; None without.
        observed: writer of each token, as in a `Rollout`; messages of several roles count as the last one's.
        turn_ends: index of the last token of each turn of the policy.
        finish: why the episode cannot continue, or None: LENGTH if no room is left. It stays None after a turn that the
            policy ended itself, since messages may follow.
        calls: number of tool calls by outcome, as in a `Rollout`.
        tool_seconds: seconds spent waiting for tools.
        media: images in the prompt and the messages.
        returned: lists that tools returned, by the index of their message, as in a `Rollout`.
        role: seat of a game that it is played in; "" for none.
        game: number of the game among the games of the prompt, from 0.
    """

    engine: EpisodeEngine
    prompt: Prompt
    prompt_ids: list[int]
    tools: list[dict[str, Any]]
    path: tuple[int | str, ...] = ()
    completion_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    observed: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    calls: dict[str, int] = field(default_factory=dict)
    tool_seconds: float = 0.0
    media: tuple[Media, ...] = ()
    logprobs: list[float] | None = field(default_factory=list)
    entropies: list[float] | None = field(default_factory=list)
    versions: list[int] | None = field(default_factory=list)
    sampling_mask: list[list[int]] | None = field(default_factory=list)
    routes: Tensor | None = None
    returned: dict[int, list[Any]] = field(default_factory=dict)
    role: str = ""
    game: int = 0
    _forks: int = 0
    _turn_start: int | None = (
        None  # index where the last turn of the policy begins; None where the policy continues next
    )
    _open: bool = False  # that turn was cut off by its own limit, and may continue
    _sampling: bool = False

    @property
    def room(self) -> int:
        limit, context = self.engine.params.max_tokens, self.engine.templates.codec.max_context
        return (limit if context is None else min(limit, context - len(self.prompt_ids))) - len(self.completion_ids)

    @property
    def prefill(self) -> str:
        """Text at the end of the prompt that the last message continues (a prefilled answer)."""
        return prefill(self.prompt) if len(self.messages) == 1 and is_conversational(self.prompt) else ""

    @property
    def opened_thinking(self) -> str:
        """Mark at the end of the tokens before the last turn that opens thinking, such as `<think>`; else empty."""
        before = self.prompt_ids + self.completion_ids[: self._turn_start]
        return "" if self._turn_start is None or self.prefill else opened_thinking(self.engine.tokenizer, before)

    @property
    def at_turn_end(self) -> bool:
        """True if the conversation ends with a turn of the policy, so that messages may be written."""
        return self.finish is None and self._turn_start is not None and not self._sampling

    async def sample(self, max_tokens: int | None = None, stop: Sequence[str] = (), train: bool = True) -> Reply:
        """Sample the policy's next turn, or continue one that `max_tokens` has cut off.

        Args:
            max_tokens: most tokens of this call. A turn that it cuts off stays open: the next `sample` continues it,
                and `write` ends it.
            stop: texts that end the turn, with the token that completes one of them; tokens after it are dropped.
            train: False to use the tokens only as context for later turns, and not train on them.

        Returns:
            The text sampled by this call. Its `finish` is STOP if the policy has ended its turn.

        Raises:
            ValueError: the episode has ended (`finish` is set, or the last `write` returned False), or `max_tokens` is
                below 1.
        """
        if self.finish is not None:
            raise ValueError(
                f"the episode has ended ({self.finish}), so nothing more can be sampled: look at `episode.finish`, or"
                " at what `episode.write` returned, before you sample."
            )
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} of a turn must be at least 1.")
        self._refuse_while_sampling("sampled")
        room = self.room
        if room <= 0:
            self.finish = FinishReason.LENGTH
            return Reply("", [], FinishReason.LENGTH)
        limit = min(one for one in (room, max_tokens, self.engine.max_turn_length) if one is not None)
        request = self._request(limit)
        self._sampling = True
        try:
            (completion,) = await self.engine.submit(request)
        finally:
            self._sampling = False
        if stop:
            completion = _stopped(completion, stop, self.engine.templates.codec.text_of)
        if not self.engine.trains:  # of another policy
            train, completion = False, replace(completion, logprobs=[0.0] * len(completion.token_ids))
        self._append_turn(completion, train)
        if completion.finish is not FinishReason.STOP:
            self._open = limit < room and len(completion.token_ids) >= limit
            self.finish = None if self._open else completion.finish
        return Reply.of(completion, self.engine.templates.codec.text_of)

    def _request(self, limit: int) -> SampleRequest:
        engine, ids = self.engine, self.prompt_ids + self.completion_ids
        vision = engine.templates.codec.vision
        if engine.expands_images and vision is not None and vision.has_stray_placeholder(ids, self.media):
            raise ValueError(
                "the policy has written a token that stands for an image, and was shown another image after it: the"
                " engine would look for the image at the wrong position."
            )
        params = engine.params if limit >= engine.params.max_tokens else replace(engine.params, max_tokens=limit)
        return SampleRequest(
            ids, 1, params, [engine.seed(ids, self.path)], shared=len(self.prompt_ids), media=self.media
        )

    def _append_turn(self, completion: Completion, train: bool) -> None:
        continues, self._open = self._open, False
        if not continues:
            self._turn_start = len(self.completion_ids)
            self.messages.append({"role": "assistant", "content": ""})
        self._append(completion.token_ids, train, {name: getattr(completion, name) for name in PER_TOKEN})
        if (
            completion.routes is not None
        ):  # routes of the whole request: of earlier turns, and of messages written since
            self.routes = continued(self.routes, completion.routes)
        if completion.token_ids:
            self.turn_ends = [*(self.turn_ends[:-1] if continues else self.turn_ends), len(self.completion_ids) - 1]
        text = self.engine.templates.codec.text_of(self.completion_ids[self._turn_start :])
        self.messages[-1]["content"] = self.prefill + text

    def write(self, content: str | Message | Sequence[Message]) -> bool:
        """Append messages after a turn of the policy, and the tokens that begin the policy's next turn.

        Args:
            content: all messages before the policy's next turn: results of tools (`{"role": "tool", "content": ...}`)
                or messages of a user. A string is a message of the user or, if the prompt is a string, plain text.

        Returns:
            True if the policy can continue. False if the episode has ended, or the messages leave no room to answer;
            then `finish` is LENGTH and nothing is appended.

        Raises:
            ValueError: the chat template cannot render the messages, or no turn of the policy precedes them.
        """
        if not isinstance(content, str) and not is_conversational(self.prompt):
            raise ValueError("messages need a prompt of messages: after a prompt that is a string, write a string.")
        if isinstance(content, str):
            messages: list[Message] = [{"role": "user", "content": content}]
        else:
            messages = [dict(message) for message in ([content] if isinstance(content, dict) else content)]
        self._refuse_while_sampling("written")
        if self.finish is not None:
            return False
        room = self.room
        encoded = self._encode_messages(messages) if characters(messages) <= LONGEST_TOKEN * room else None
        if encoded is None or len(encoded.ids) >= room:
            self.finish = FinishReason.LENGTH
            return False
        self.media += encoded.media
        last_version = (self.versions or [0])[-1]
        written = {"logprobs": 0.0, "entropies": 0.0, "versions": last_version, "sampling_mask": []}
        role = messages[-1].get("role")
        writer = 1 + WRITERS.index(role) if role in WRITERS else 0
        self._append(encoded.ids, False, {name: [value] * len(encoded.ids) for name, value in written.items()}, writer)
        self.messages += messages
        self._turn_start, self._open = None, False
        return True

    def _encode_messages(self, messages: list[Message]) -> Encoded:
        if not is_conversational(self.prompt):
            text = messages[0]["content"]
            return Encoded(list(self.engine.tokenizer(text, add_special_tokens=False)["input_ids"]))
        if not messages:
            raise ValueError("there is nothing to write: the list of messages is empty.")
        if self._turn_start is None:
            raise ValueError(
                "messages follow a turn of the policy, and there is none yet. Put messages before its first turn into"
                " the prompt, `engine.begin(prompt)`, and all messages before any other turn into one `write`."
            )
        template = self.engine.templates.of(self.tools, self.engine.row.get("chat_template_kwargs"))
        last = self.completion_ids[-1] if self.completion_ids else None
        cut = self._open or not template.ends_with(last)  # by its own limit, or by a text that a server stops at
        ending = template.ending() if cut else []
        start = len(self.prompt_ids) + len(self.completion_ids) + len(ending)
        following = template.answer(messages, ended_with=None if cut else last, start=start)
        return Encoded([*ending, *following.ids], following.media)

    def _refuse_while_sampling(self, action: str) -> None:
        if self._sampling:
            raise ValueError(
                f"a turn of this episode is being sampled, so nothing else can be {action} now: await it first,"
                " or `fork()` the episode for every branch."
            )

    def fork(self, turns: int | None = None) -> "Episode":
        """A copy that begins with the same tokens and continues independently, with its own samples.

        Args:
            turns: number of the policy's turns to keep, in a conversation without images. By default all are kept, with
                the messages written after them.
        """
        if turns is None:
            self._refuse_while_sampling("forked")
        other = copy.copy(self)
        for name in ("completion_ids", "sampled", "observed", "turn_ends", "calls", "returned", *PER_TOKEN):
            setattr(other, name, copy.copy(getattr(self, name)))
        other.messages = [dict(message) for message in self.messages]
        if turns is not None:
            other._keep(turns)
        self._forks += 1
        other.path, other._forks = (*self.path, "fork", self._forks), 0
        return other

    def _keep(self, turns: int) -> None:
        end, sampled = self.turn_ends[turns - 1] + 1, [m["role"] == "assistant" for m in self.messages]
        for name in ("completion_ids", "sampled", "observed", *PER_TOKEN):
            if (values := getattr(self, name)) is not None:
                del values[end:]
        last = [index for index, by_policy in enumerate(sampled) if by_policy][turns - 1]
        if self.routes is not None:
            self.routes = self.routes[: len(self.prompt_ids) + end]
        del self.turn_ends[turns:], self.messages[last + 1 :]
        self.returned = {index: value for index, value in self.returned.items() if index <= last}
        self._turn_start = self.turn_ends[-2] + 1 if turns > 1 else 0
        self.finish, self._open, self._sampling = None, False, False

    def done(
        self,
        finish: FinishReason | None = None,
        error: str | None = None,
        role: str = "",
        game: int | None = None,
        **extras: Any,
    ) -> Rollout:
        """The finished rollout.

        Args:
            finish: why it ended; by default the episode's `finish`; else LENGTH if the last turn is open, or STOP.
            error: message of the failure, if `finish` is ERROR.
            role: seat of a game that the policy played in; decides which rollouts it is compared with (`compare`). By
                default the episode's.
            game: number of the game among the games of the prompt, from 0. By default the episode's.
            extras: further fields, which reward functions get as keyword arguments.
        """
        text = self.engine.templates.codec.text_of(self.completion_ids)
        return Rollout(
            prompt_ids=self.prompt_ids,
            completion_ids=list(self.completion_ids),  # a copy: code that failed may still be at work on the original
            sampled=list(self.sampled),
            completion=list(self.messages) if is_conversational(self.prompt) else text,
            finish=finish or self.finish or (FinishReason.LENGTH if self._open else FinishReason.STOP),
            extras=extras,
            turn_ends=list(self.turn_ends),
            calls=dict(self.calls),
            error=error,
            tool_seconds=self.tool_seconds,
            prompt=self.prompt,
            media=self.media,
            returned=dict(self.returned),
            observed=list(self.observed) if any(self.observed) else None,
            routes=self.routes,
            role=role or self.role,
            game=self.game if game is None else game,
            **{name: getattr(self, name) for name in PER_TOKEN},
        )

    def _append(self, token_ids: list[int], sampled: bool, per_token: dict[str, Any], writer: int = 0) -> None:
        self.completion_ids += token_ids
        self.sampled += [sampled] * len(token_ids)
        self.observed += [writer] * len(token_ids)
        for name, values in per_token.items():
            known = getattr(self, name)  # None where an engine did not report it for an earlier turn
            setattr(self, name, None if known is None or values is None else known + values)


def seat_problem(role: str, game: int) -> str | None:
    """The problem with a role or a number of a game, as the end of a sentence; None without any."""
    if role and not re.fullmatch(r"[\w.-]+", role):
        return (
            f"has the role {role!r}: a role is a name of letters, digits, '_', '-' and '.', which metrics are named"
            " after."
        )
    return f"is of game {game}: games of a prompt are counted from 0." if game < 0 else None


def _stopped(completion: Completion, stop: Sequence[str], text_of: CompletionDecoder) -> Completion:
    """The completion up to the token that completes one of the stop texts."""

    def found(tokens: int) -> bool:
        text = text_of(completion.token_ids[:tokens])
        return any(one in text for one in stop)

    size = len(completion.token_ids)
    end = bisect_left(range(size + 1), True, key=found)
    return completion if end > size else first_tokens(completion, end, FinishReason.STOP)


def first_tokens(completion: Completion, end: int, finish: FinishReason) -> Completion:
    """The completion without its tokens from index `end` on."""
    cut: dict[str, Any] = {
        name: None if (values := getattr(completion, name)) is None else values[:end]
        for name in ("token_ids", *PER_TOKEN)
    }
    if completion.routes is not None:
        dropped = len(completion.token_ids) - end
        cut["routes"] = completion.routes[: max(0, len(completion.routes) - dropped)]
    return replace(completion, **cut, finish=finish, reused=min(completion.reused, end))
