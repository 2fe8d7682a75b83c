"""Chat completions server in which each session is one rollout: for programs that use OpenAI's interface.

Such a program sends the whole conversation with every request. Each request must continue the last one: the added
messages are written to the session's `Episode`, and the policy's next turn is sampled there, so the tokens that are
trained on are the sampled ones and never a rendering of them. The server listens on 127.0.0.1 at a secret path.
"""

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from covey.core.records import Message
from covey.rollout.episode import Episode, EpisodeEngine, Reply
from covey.rollout.tool_agent import as_message
from covey.rollout.tools.parsers import ToolParser, read_turn

SESSION_HEADER = "X-Session-ID"  # header that names the rollout of a request
MAX_BODY = 64 << 20  # bytes of a request


class RequestError(Exception):
    """A request that cannot be answered; the message and the code go back to the program."""

    def __init__(self, message: str, code: str = "invalid_request"):
        super().__init__(message)
        self.code = code


@dataclass(eq=False, repr=False)
class ChatSession:
    """The conversation of one rollout."""

    engine: EpisodeEngine
    parser: ToolParser
    episode: Episode | None = None
    full: bool = False
    refused: str | None = None
    _request: list[Message] = field(default_factory=list)
    _response: dict[str, Any] | None = None
    _reply: Message = field(default_factory=dict)

    async def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """The response to a request, both in OpenAI's format. The same request again gets the same response."""
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
            raise RequestError("`messages` must be a list of messages.")
        if body.get("n", 1) != 1:
            raise RequestError("n must be 1: a rollout has one completion.")
        messages = [_normalized(message) for message in messages]
        if self._response is not None and messages == self._request:
            return self._response
        episode = self._extend_episode(messages, body.get("tools") or [])
        reply = None if episode.finish is not None else await episode.sample()
        if reply is None or not reply.token_ids:
            self.full = True
            raise RequestError("the completion has no room for another turn.", "context_length_exceeded")
        self._request = messages
        self._response = self._respond(episode, reply)
        return self._response

    def _extend_episode(self, messages: list[Message], tools: list[dict[str, Any]]) -> Episode:
        if self.episode is None:
            self.episode = self.engine.begin(messages, tools=tools)
            return self.episode
        known = [*self._request, self._reply]
        if messages[: len(known)] != known or len(messages) == len(known):
            raise RequestError(
                "the conversation does not continue the last request: messages were changed, left out or compacted."
                " Only conversations that grow can be trained on."
            )
        added = messages[len(known) :]
        if any(message["role"] == "assistant" for message in added):
            raise RequestError("a message of the assistant was added that the policy did not write.")
        if self.episode.finish is None:
            self.episode.write(added)
        return self.episode

    def _respond(self, episode: Episode, reply: Reply) -> dict[str, Any]:
        message: Message = {"role": "assistant", "content": reply.text}
        if episode.tools:
            turn = read_turn(episode.engine.tokenizer, reply.token_ids, self.parser, episode.tools)
            message = episode.messages[-1] = as_message(turn, reply.text)
        number = len(episode.turn_ends)
        calls = [
            {
                "id": f"call_{number}_{i}",
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": json.dumps(call["function"]["arguments"])},
            }
            for i, call in enumerate(message.get("tool_calls", ()))
        ]
        sent: Message = {"role": "assistant", "content": message["content"], **({"tool_calls": calls} if calls else {})}
        self._reply = _normalized(sent)
        finish = "length" if episode.finish is not None else "tool_calls" if calls else "stop"
        written = len(reply.token_ids)
        total = len(episode.prompt_ids) + len(episode.completion_ids)
        return {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": "policy",
            "choices": [{"index": 0, "message": sent, "logprobs": None, "finish_reason": finish}],
            "usage": {"prompt_tokens": total - written, "completion_tokens": written, "total_tokens": total},
        }


class ChatEndpoint:
    """The server. Use it as an async context; sessions are opened by the code that runs the programs."""

    def __init__(self) -> None:
        self.base_url = ""
        self._sessions: dict[str, ChatSession] = {}
        self._runner: web.AppRunner | None = None

    def open(self, name: str, session: ChatSession) -> None:
        self._sessions[name] = session

    def close(self, name: str) -> None:
        self._sessions.pop(name, None)

    async def __aenter__(self) -> "ChatEndpoint":
        secret = secrets.token_urlsafe(24)
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post(f"/{secret}/v1/chat/completions", self._post)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.base_url = f"http://127.0.0.1:{port}/{secret}/v1"
        return self

    async def __aexit__(self, *raised: Any) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _post(self, request: web.Request) -> web.StreamResponse:
        session = self._sessions.get(request.headers.get(SESSION_HEADER, ""))
        if session is None:
            return _refusal(f"there is no such session; name one in the header {SESSION_HEADER}.", "no_session", 404)
        body = await request.json()
        try:
            answer = await session.answer(body)
        except RequestError as error:
            if error.code != "context_length_exceeded":
                session.refused = session.refused or str(error)
            return _refusal(str(error), error.code, 400)
        except Exception as error:
            session.refused = session.refused or f"{type(error).__name__}: {error}"
            return _refusal(session.refused, "server_error", 500)
        return await _streamed(request, answer) if body.get("stream") else web.json_response(answer)


def _refusal(message: str, code: str, status: int) -> web.Response:
    return web.json_response({"error": {"message": message, "type": code, "code": code}}, status=status)


async def _streamed(request: web.Request, answer: dict[str, Any]) -> web.StreamResponse:
    """The answer as server-sent events, for programs that ask for a stream."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    choice = answer["choices"][0]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    shared = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    first = {"index": 0, "delta": delta, "finish_reason": None}
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    for chunk in ({"choices": [first]}, {"choices": [last]}, {"choices": [], "usage": answer["usage"]}):
        chunk = shared | chunk
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


def _normalized(message: dict[str, Any]) -> Message:
    """A message with the keys that chat templates read, in one format, so that two can be compared."""
    content = message.get("content")
    if isinstance(content, list):
        other = next((part.get("type") for part in content if part.get("type") != "text"), None)
        if other is not None:
            raise RequestError(f"messages hold text alone, not {other!r}.")
        content = "\n".join(part["text"] for part in content)
    normal: Message = {"role": message.get("role", "user"), "content": content or ""}
    if message.get("tool_calls"):
        normal["tool_calls"] = [_normalized_call(one["function"]) for one in message["tool_calls"]]
    for name in ("tool_call_id", "name"):
        if message.get(name):
            normal[name] = message[name]
    return normal


def _normalized_call(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else {}
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
