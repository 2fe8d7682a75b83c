"""Sessions: all requests of one program, as the strands of one rollout.

A request whose messages begin with those of an earlier request and the policy's reply to it continues that conversation
token for token: sampled tokens are never encoded again. Any other request starts a new strand, which shares the longest
prefix of tokens with an earlier one. In the rollout each sampled token occurs once.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from covey.core.engine import SampleRequest
from covey.core.records import PER_TOKEN, Completion, FinishReason, Message, Rollout
from covey.core.routes import are_known, some, unknown_like
from covey.core.special_tokens import opened_thinking
from covey.rollout.episode import Episode, EpisodeEngine, Reply, first_tokens
from covey.rollout.images import has_images
from covey.rollout.prompts import PromptTooLong, are_messages
from covey.rollout.seats import Seats
from covey.rollout.tool_agent import as_message
from covey.rollout.tools.parsers import TOOL_PARSERS, parser_for, read_turn

MAX_STRANDS = 64  # most strands of a rollout
FULL = "context_length_exceeded"  # error code of a request that leaves no room for an answer


class RequestError(Exception):
    """A request that cannot be answered; message, code and field name are returned to the program."""

    def __init__(self, message: str, code: str = "invalid_request_error", status: int = 400, param: str | None = None):
        super().__init__(message)
        self.code, self.status, self.param = code, status, param


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request in any of the APIs."""

    messages: list[Message]  # images as PIL images; arguments of calls as objects
    tools: list[dict[str, Any]]  # schemas as OpenAI's chat completions have them
    n: int = 1
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None

    def digests(self) -> list[bytes]:
        """A digest of the tools, and then one of each prefix of the conversation."""
        return list(accumulate(self.messages, digest_after, initial=_digest(b"", self.tools)))

    def digest(self) -> bytes:
        return self.digests()[-1]


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion of a request."""

    message: Message  # in the form of OpenAI's chat completions
    finish: str  # "stop", "length" or "tool_calls"
    reply: Reply
    prompt_tokens: int


@dataclass(eq=False)
class _Strand:
    episode: Episode
    own: int  # tokens, including the prompt, that it shares with the episode that it was forked from


class _Turn(NamedTuple):
    """The end of a turn of the policy, which a request may continue."""

    strand: _Strand
    turns: int


def digest_after(digest: bytes, message: Message) -> bytes:
    """Digest of a conversation and one more message; ids of calls and white space around a reply are ignored."""
    content = message.get("content") or ""
    if message["role"] == "assistant" and isinstance(content, str):
        content = content.strip()
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return _digest(digest, [message["role"], content, calls])


def _digest(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, default=lambda image: [image.size, blake2b(image.tobytes()).hexdigest()])
    return blake2b(before + text.encode(), digest_size=16).digest()


@dataclass(eq=False, repr=False)
class AgentSession:
    """Requests of one rollout's program. Tokens that its engine samples count towards the rollout's token budget."""

    engine: EpisodeEngine
    seats: Seats = field(default_factory=dict)  # other models, by the name in a request
    full: bool = False  # a request found no room
    refused: str | None = None  # the first request that could not be answered, and why
    before_reply: Callable[[], None] | None = None  # called once, before the first reply leaves
    _strands: list[_Strand] = field(default_factory=list)
    _known: dict[bytes, _Turn] = field(default_factory=dict)
    _seen: set[bytes] = field(default_factory=set)
    _prompt: list[Message] = field(default_factory=list)
    _transcript: list[Message] = field(default_factory=list)
    _turns: list[_Turn] = field(default_factory=list)  # in the order in which they ended
    _undelivered: dict[tuple[bytes, int], list[Answer]] = field(default_factory=dict)
    _calls: int = 0

    def __post_init__(self) -> None:
        self._generate, self.engine.send = self.engine.send, self._send
        name = self.engine.templates.parser or parser_for(self.engine.tokenizer.chat_template)
        self._parser, self._most = TOOL_PARSERS[name], self.engine.params.max_tokens

    @property
    def asked(self) -> bool:
        return bool(self._turns)

    def of(self, model: Any, headers: Mapping[str, str]) -> "AgentSession":
        """The session that a request belongs to: this one; subclasses may choose by model name or headers."""
        return self

    def reply(self) -> None:
        """Call `before_reply` once, before the first reply is sent: later processes may be started by the policy."""
        if self.before_reply is not None:
            self.before_reply()
            self.before_reply = None

    async def answer(self, request: ChatRequest) -> list[Answer]:
        """Sample the completions of a request; RequestError if the request cannot be answered."""
        digest = request.digest()
        if (undelivered := self._undelivered.pop((digest, request.n), None)) is not None:
            return undelivered
        if self._left <= 0:
            raise self._no_room(f"the rollout has {self._most} sampled tokens, as max_completion_length allows.")
        strands = self._begin(request)
        replies = await asyncio.gather(*(self._sample(strand.episode, request) for strand in strands))
        if not any(replies):
            raise self._no_room("the conversation leaves no room for another turn.")
        found = zip(strands, replies, strict=True)
        return [self._record(request, digest, strand, reply) for strand, reply in found if reply is not None]

    async def answer_from(self, seat: Any, request: ChatRequest) -> list[Answer]:
        """Completions of a seat's engine or function, which are not part of the rollout."""
        if not hasattr(seat, "generate"):
            texts = [await seat.answer(request.messages) for _ in range(request.n)]
            replies = [Reply(text, [], FinishReason.STOP) for text in texts]
            return [self._answer({"role": "assistant", "content": one.text}, one, 0) for one in replies]
        kwargs = self.engine.row.get("chat_template_kwargs")
        try:
            encoded = self.engine.templates.codec.read(request.messages, kwargs, request.tools)
        except ValueError as error:  # the chat template, or the length
            raise RequestError(str(error), param="messages") from error
        params = replace(self.engine.params, max_tokens=min(request.max_tokens or self._most, self._most))
        seeds = [self.engine.seed(encoded.ids, ("seat",)) for _ in range(request.n)]
        sampled = await seat.generate(SampleRequest(encoded.ids, request.n, params, seeds, media=encoded.media))
        opened = opened_thinking(self.engine.tokenizer, encoded.ids)
        replies = [Reply.of(one, self.engine.templates.codec.text_of) for one in sampled]
        messages = [self._message(request, request.tools, reply, opened) for reply in replies]
        return [self._answer(*pair, len(encoded.ids)) for pair in zip(messages, replies, strict=True)]

    def return_later(self, request: ChatRequest, answers: list[Answer]) -> None:
        """Keep the answers to a request whose client has disconnected, in case it sends the same request again."""
        self._undelivered[request.digest(), request.n] = answers

    @property
    def _left(self) -> int:
        """Tokens that may still be sampled."""
        return self._most - sum(
            sum(one.episode.sampled[one.own - len(one.episode.prompt_ids) :]) for one in self._strands
        )

    async def _send(self, request: SampleRequest) -> list[Completion]:
        """Completions, cut to the rest of the token budget.

        Concurrent requests are each sampled with the whole rest; completions are counted one after the other, so later
        ones may be cut.
        """
        (completion,) = await self._generate(request)
        fits = len(completion.token_ids) <= (left := max(0, self._left))
        return [completion if fits else first_tokens(completion, left, FinishReason.LENGTH)]

    def _no_room(self, reason: str) -> RequestError:
        """The error in the wording by which clients recognise that a retry is useless."""
        self.full = True
        known = "prompt is too long: this model's maximum context length is reached"
        return RequestError(f"{known}, as {reason}", FULL)

    def _begin(self, request: ChatRequest) -> list[_Strand]:
        """The strands to sample the request in: the one that it continues, or new ones."""
        if len(self._strands) + request.n > MAX_STRANDS:
            raise self._no_room(f"a rollout has at most {MAX_STRANDS} conversations that do not continue one another.")
        if self.engine.templates.codec.vision is None and has_images(request.messages):
            raise RequestError("`messages` have images, and the policy has no vision.", param="messages")
        _, *digests = request.digests()
        last = max((i for i, one in enumerate(request.messages) if one["role"] == "assistant"), default=-1)
        turn = self._known.get(digests[last]) if last >= 0 else None
        if turn is None or (strand := self._continued(turn, request.messages[last + 1 :])) is None:
            try:
                episode = self.engine.begin(request.messages, tools=request.tools)
            except PromptTooLong as error:
                raise self._no_room(str(error)) if self.asked else RequestError(str(error), param="messages") from None
            except ValueError as error:  # the chat template
                raise RequestError(str(error), param="messages") from error
            own_prompt: Any = self.engine.row.get("prompt")
            if are_messages(own_prompt) and digests[-1] == replace(request, messages=own_prompt).digest():
                self.engine.own_ids = episode.prompt_ids
            strand = self._add(episode, len(episode.prompt_ids))
        if not self._turns and not self._prompt:
            self._prompt = list(request.messages)
        else:
            unseen = zip(request.messages, digests, strict=True)
            self._transcript += [m for m, d in unseen if d not in self._seen and m["role"] != "assistant"]
        self._seen.update(digests)
        size = len(strand.episode.prompt_ids) + len(strand.episode.completion_ids)
        return [strand, *(self._add(strand.episode.fork(), size) for _ in range(request.n - 1))]

    def _continued(self, turn: _Turn, added: list[Message]) -> _Strand | None:
        """The strand with these messages appended; None if the chat template would change sampled tokens."""
        episode = turn.strand.episode
        if not added:
            return None
        goes_on = len(episode.turn_ends) == turn.turns and episode.at_turn_end
        if not goes_on:
            episode = episode.fork(turn.turns)
        try:
            fits = episode.write(added)
        except ValueError:
            return None
        if not fits:
            raise self._no_room("the added messages leave no room for another turn.")
        return turn.strand if goes_on else self._add(episode, len(episode.prompt_ids) + episode.turn_ends[-1] + 1)

    def _add(self, episode: Episode, own: int) -> _Strand:
        if self._strands and (episode.media or self._strands[0].episode.media):
            raise RequestError(
                "`messages` of a rollout with images are one conversation: continue with it, and with n=1.",
                param="messages",
            )
        episode.path = ()  # seeds by tokens alone, not by the order of arrival
        self._strands.append(_Strand(episode, own))
        return self._strands[-1]

    async def _sample(self, episode: Episode, request: ChatRequest) -> Reply | None:
        if episode.finish is not None or self._left <= 0:
            return None
        reply = await episode.sample(min(self._left, request.max_tokens or self._most), request.stop)
        self.full |= reply.finish is not FinishReason.STOP and self._left <= 0
        return reply if reply.token_ids else None

    def _record(self, request: ChatRequest, digest: bytes, strand: _Strand, reply: Reply) -> Answer:
        episode = strand.episode
        message = episode.messages[-1] = self._message(request, episode.tools, reply, episode.opened_thinking)
        turn = _Turn(strand, len(episode.turn_ends))
        self._turns.append(turn)
        self._transcript.append(message)
        self._known[digest_after(digest, message)] = turn
        prompt_tokens = len(episode.prompt_ids) + len(episode.completion_ids) - len(reply.token_ids)
        return self._answer(message, reply, prompt_tokens)

    def _message(self, request: ChatRequest, tools: list[dict[str, Any]], reply: Reply, opened: str) -> Message:
        """A reply with its calls parsed, cut at a stop text; `opened` is the text before it that opens thinking."""
        message: Message = {"role": "assistant", "content": reply.text}
        if tools:
            try:
                shown = self.engine.templates.codec.text_of.shown
                parsed = read_turn(
                    self.engine.tokenizer, reply.token_ids, self._parser, tools, opened=opened, shown=shown
                )
            except (AttributeError, TypeError) as error:  # some notations read values by the schema's types
                raise RequestError(f"`tools` has a schema that cannot be read: {error}.", param="tools") from error
            message = as_message(parsed, reply.text)
        for stop in request.stop:
            message["content"] = message["content"].partition(stop)[0]
        return message

    def _answer(self, message: Message, reply: Reply, prompt_tokens: int) -> Answer:
        sent: Message = {"role": "assistant", "content": message["content"]}
        for call in message.get("tool_calls") or ():
            self._calls += 1
            function = call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}
            sent_call = {"id": call.get("id") or f"call{self._calls:05d}", "type": "function", "function": function}
            sent.setdefault("tool_calls", []).append(sent_call)
        cut = reply.finish is not FinishReason.STOP
        finish = "length" if cut else "tool_calls" if message.get("tool_calls") else "stop"
        return Answer(sent, finish, reply, prompt_tokens)

    def rollout(self, finish: FinishReason | None = None, **extras: Any) -> Rollout:
        """The finished rollout; its completion has all messages after the first request, in the order of time."""
        assert self.asked, "the program has asked"
        last = self._turns[-1].strand.episode
        finish = FinishReason.LENGTH if self.full else last.finish or finish or FinishReason.STOP
        answered = {turn.strand for turn in self._turns}  # a request may be open, or have had no reply
        used = [strand for strand in self._strands if strand in answered]
        joined, ends = join_strands([(strand.episode.done(), strand.own) for strand in used])
        turn_ends = [ends[used.index(turn.strand), turn.turns] for turn in self._turns]
        prompt, completion = list(self._prompt), list(self._transcript)
        return replace(joined, prompt=prompt, completion=completion, finish=finish, turn_ends=turn_ends, extras=extras)


def join_strands(parts: Sequence[tuple[Rollout, int]]) -> tuple[Rollout, dict[tuple[int, int], int]]:
    """One rollout with all parts as strands, and the last token of each turn by (part, number of the turn from 1).

    Each part is given with the number of its first tokens, including the prompt, that an earlier part has sampled or
    read. A part shares at least these tokens, and at most those before its own first sampled token: equal tokens that
    were sampled twice are trained on twice.
    """
    first = parts[0][0]
    prompt = len(first.prompt_ids)
    whole = list(first.prompt_ids)  # tokens of the rollout, with its prompt
    found = [(np.array(whole, dtype=np.int64), np.arange(prompt))]  # tokens of the prompt and parts, with positions
    ends: dict[tuple[int, int], int] = {}
    strands: list[tuple[int, int]] = []
    sampled: list[bool] = []
    observed: list[int] = []
    fields: dict[str, Any] = {name: [] for name in PER_TOKEN}
    routes = some([part.routes for part, _ in parts])
    for number, (part, own) in enumerate(parts):
        tokens = np.array([*part.prompt_ids, *part.completion_ids], dtype=np.int64)
        mask = [*[False] * len(part.prompt_ids), *part.sampled]
        begins = next(index for index in range(own, len(mask)) if mask[index])
        lengths = [_common(tokens[:begins], other) for other, _ in found]
        best = max(range(len(found)), key=lengths.__getitem__)
        shared, position = lengths[best], found[best][1][: lengths[best]]
        follows = int(position[-1]) if shared else -1
        if follows != len(whole) - 1:
            strands.append((len(whole) - prompt, follows))
        position = np.concatenate([position, np.arange(len(whole), len(whole) + len(tokens) - shared)])
        found.append((tokens, position))
        whole += tokens[shared:].tolist()
        if routes is not None:
            routes = _with_routes(routes, part.routes, position, len(whole))
        sampled += mask[shared:]
        of_part = part.observed or [0] * len(part.completion_ids)
        observed += [*[0] * len(part.prompt_ids), *of_part][shared:]
        skipped = shared - len(part.prompt_ids)
        for name, values in fields.items():
            given = getattr(part, name)
            if values is None or given is None:
                fields[name] = None
                continue
            filler: Any = [] if name == "sampling_mask" else (given or [0])[0] if name == "versions" else 0.0
            values += given[skipped:] if skipped >= 0 else [*[filler] * -skipped, *given]
        for turn, end in enumerate(part.turn_ends, 1):
            if end + len(part.prompt_ids) >= own:
                ends[number, turn] = int(position[end + len(part.prompt_ids)]) - prompt
    fields |= {"completion": "", "finish": FinishReason.STOP, "strands": strands, "media": first.media}
    fields["observed"], fields["routes"] = observed if any(observed) else None, routes
    return Rollout(first.prompt_ids, whole[prompt:], sampled, **fields), ends


def _with_routes(routes: Tensor, of_part: Tensor | None, position: np.ndarray, tokens: int) -> Tensor:
    """Routes of a rollout's first `tokens` tokens, where tokens without a route get the one from another part."""
    routes = torch.cat([routes, unknown_like(routes, tokens - len(routes))])
    if of_part is not None:
        places = torch.from_numpy(position[: len(of_part)])
        new = ~are_known(routes[places])
        routes[places[new]] = of_part[new]
    return routes


def _common(tokens: np.ndarray, others: np.ndarray) -> int:
    """Length of the common prefix."""
    size = min(len(tokens), len(others))
    differ = np.flatnonzero(tokens[:size] != others[:size])
    return int(differ[0]) if len(differ) else size
