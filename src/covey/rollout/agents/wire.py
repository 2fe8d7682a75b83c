"""APIs that programs talk in, as translations to `ChatRequest` and back: OpenAI's two and Anthropic's.

To add one, write an `Api` and add it to `APIS`.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from covey.core.records import Message
from covey.rollout.agents.session import Answer, ChatRequest, RequestError

Body = dict[str, Any]
Event = tuple[str | None, Body]  # name, if the API names its events, and data

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MAX_CHOICES = 16


@dataclass(frozen=True)
class Api:
    """One API."""

    read: Callable[[Body], ChatRequest]
    response: Callable[[Body, list[Answer]], Body]
    events: Callable[[Body, Body], Iterable[Event]]  # of (request, response), for a stream
    error: Callable[[str, str, int], Body]  # of (message, code, status)


def read_request(api: Api, body: Any) -> ChatRequest:
    """The request; RequestError where it is none, whatever it holds."""
    try:
        if not isinstance(body, dict):
            raise TypeError("it must be a JSON object")
        request = api.read(body)
        if not request.messages:
            raise ValueError("there are no messages")
        return request
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise RequestError(f"the request cannot be read: {type(error).__name__}: {str(error)[:200]}.") from error


# ---- parts of all ----------------------------------------------------------------------------------------------------


def _text(content: Any) -> str:
    """The text of a message's content; thinking that comes back is left out."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        kind = part.get("type", "text")
        if kind in ("text", "input_text", "output_text"):
            texts.append(str(part["text"]))
        elif kind not in ("thinking", "redacted_thinking", "reasoning"):
            raise ValueError(f"messages hold text alone, not {kind!r}")
    return "\n".join(texts)


def _call(name: Any, arguments: Any) -> Body:
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else {}
    return {"type": "function", "function": {"name": str(name), "arguments": arguments}}


def _limit(*values: Any) -> int | None:
    given = next((value for value in values if value is not None), None)
    if given is not None and (not isinstance(given, int) or given < 1):
        raise ValueError(f"the limit of tokens is {given!r}; it must be at least 1")
    return given


def _stops(value: Any) -> tuple[str, ...]:
    return tuple(one for one in ([value] if isinstance(value, str) else value or ()) if isinstance(one, str) and one)


def _function(tool: Body, parameters: str) -> Body:
    schema = tool.get(parameters) or {"type": "object", "properties": {}}
    function = {"name": str(tool["name"]), "description": str(tool.get("description") or ""), "parameters": schema}
    return {"type": "function", "function": function}


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


def _openai_error(message: str, code: str, status: int) -> Body:
    return {"error": {"message": message, "type": code, "param": None, "code": code}}


# ---- OpenAI chat completions -----------------------------------------------------------------------------------------


def _read_chat(body: Body) -> ChatRequest:
    if not isinstance(body.get("messages"), list):
        raise TypeError("`messages` must be a list of messages")
    if (body.get("response_format") or {}).get("type", "text") != "text":
        raise ValueError("response_format is not supported: the policy is sampled as it is")
    n = body.get("n") or 1
    if not isinstance(n, int) or not 1 <= n <= MAX_CHOICES:
        raise ValueError(f"n={n!r} must be 1 to {MAX_CHOICES}")
    messages = [_chat_message(message) for message in body["messages"]]
    limit = _limit(body.get("max_completion_tokens"), body.get("max_tokens"))
    return ChatRequest(
        messages, [_chat_tool(one) for one in body.get("tools") or ()], n, _stops(body.get("stop")), limit
    )


def _chat_tool(tool: Body) -> Body:
    if tool.get("type") != "function":
        raise ValueError(f"tools are functions, not {tool.get('type')!r}")
    return {"type": "function", "function": dict(tool["function"]) | {"name": str(tool["function"]["name"])}}


def _chat_message(message: Body) -> Message:
    """A message with the keys that chat templates read."""
    made: Message = {"role": ROLES[message.get("role", "user")], "content": _text(message.get("content"))}
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [
            {
                **({"id": one["id"]} if one.get("id") else {}),
                **_call(one["function"]["name"], one["function"]["arguments"]),
            }
            for one in calls
        ]
    return made | {name: str(message[name]) for name in ("tool_call_id", "name") if message.get(name)}


def _chat_response(body: Body, answers: list[Answer]) -> Body:
    written, read = sum(len(one.reply.token_ids) for one in answers), answers[0].prompt_tokens
    return {
        "id": _new_id("chatcmpl"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": str(body.get("model") or "policy"),
        "choices": [
            {
                "index": index,
                "message": one.message,
                "logprobs": _logprobs(one) if body.get("logprobs") else None,
                "finish_reason": one.finish,
            }
            for index, one in enumerate(answers)
        ],
        "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written},
    }


def _logprobs(answer: Answer) -> Body | None:
    reply = answer.reply
    if reply.logprobs is None:
        return None
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(reply.tokens, reply.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _chat_events(body: Body, response: Body) -> Iterator[Event]:
    shared = {name: response[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for choice in response["choices"]:
        index, delta = choice["index"], dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
        first = {"index": index, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
        last = {"index": index, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
        for chunk in (first, last):
            yield None, shared | {"choices": [chunk]}
    if (body.get("stream_options") or {}).get("include_usage"):
        yield None, shared | {"choices": [], "usage": response["usage"]}


# ---- OpenAI responses ------------------------------------------------------------------------------------------------


def _read_response(body: Body) -> ChatRequest:
    if body.get("previous_response_id"):
        raise ValueError("previous_response_id is not supported: send the whole conversation as `input`")
    messages: list[Message] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": str(body["instructions"])})
    given = body.get("input")
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given or ():
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": ROLES[item["role"]], "content": _text(item.get("content"))})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = {"id": str(item["call_id"]), **_call(item["name"], item.get("arguments"))}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _text(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": str(item["call_id"]), "content": content})
        elif kind != "reasoning":
            raise ValueError(f"items of the input are messages and calls of functions, not {kind!r}")
    tools = [_function(tool, "parameters") for tool in body.get("tools") or () if tool.get("type") == "function"]
    return ChatRequest(messages, tools, max_tokens=_limit(body.get("max_output_tokens")))


def _response(body: Body, answers: list[Answer]) -> Body:
    (answer,) = answers
    message, written = answer.message, len(answer.reply.token_ids)
    output: list[Body] = []
    if message["content"] or not message.get("tool_calls"):
        text = {"type": "output_text", "text": message["content"], "annotations": []}
        output.append(
            {"type": "message", "id": _new_id("msg"), "role": "assistant", "status": "completed", "content": [text]}
        )
    for call in message.get("tool_calls", ()):
        output.append(
            {"type": "function_call", "id": _new_id("fc"), "call_id": call["id"], "status": "completed"}
            | call["function"]
        )
    cut = answer.finish == "length"
    return {
        "id": _new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "model": str(body.get("model") or "policy"),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "output": output,
        "instructions": body.get("instructions"),
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools") or [],
        "top_p": None,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + written,
        },
    }


def _response_events(body: Body, response: Body) -> Iterator[Event]:
    for number, (name, data) in enumerate(_response_parts(response)):
        yield name, {"type": name, "sequence_number": number, **data}


def _response_parts(response: Body) -> Iterator[tuple[str, Body]]:
    begun = response | {"status": "in_progress", "output": []}
    yield "response.created", {"response": begun}
    for index, item in enumerate(response["output"]):
        where = {"item_id": item["id"], "output_index": index}
        empty: Body = {"content": []} if item["type"] == "message" else {"arguments": ""}
        yield "response.output_item.added", {"output_index": index, "item": item | empty}
        if item["type"] == "message":
            (part,) = item["content"]
            yield "response.content_part.added", {**where, "content_index": 0, "part": part | {"text": ""}}
            yield "response.output_text.delta", {**where, "content_index": 0, "delta": part["text"], "logprobs": []}
            yield "response.output_text.done", {**where, "content_index": 0, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**where, "content_index": 0, "part": part}
        else:
            yield "response.function_call_arguments.delta", {**where, "delta": item["arguments"]}
            done = {**where, "name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", done
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{response['status']}", {"response": response}


# ---- Anthropic messages ----------------------------------------------------------------------------------------------


def _read_anthropic(body: Body) -> ChatRequest:
    messages: list[Message] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _text(body["system"])})
    for message in body["messages"]:
        blocks = message.get("content")
        blocks = [{"type": "text", "text": blocks}] if isinstance(blocks, str) else blocks
        others = [one for one in blocks if one["type"] not in ("tool_use", "tool_result")]
        for one in blocks:
            if one["type"] == "tool_result":
                content, number = _text(one.get("content")), str(one["tool_use_id"])
                messages.append({"role": "tool", "tool_call_id": number, "content": content})
        calls = [
            {"id": str(one["id"]), **_call(one["name"], one["input"])} for one in blocks if one["type"] == "tool_use"
        ]
        if others or calls:
            made: Message = {"role": ROLES[message["role"]], "content": _text(others)}
            messages.append(made | ({"tool_calls": calls} if calls else {}))
    tools = [_function(tool, "input_schema") for tool in body.get("tools") or ()]
    limit = _limit(body.get("max_tokens"))
    return ChatRequest(messages, tools, stop=_stops(body.get("stop_sequences")), max_tokens=limit)


def _anthropic_response(body: Body, answers: list[Answer]) -> Body:
    (answer,) = answers
    message = answer.message
    content: list[Body] = [{"type": "text", "text": message["content"]}] if message["content"] else []
    for call in message.get("tool_calls", ()):
        given = json.loads(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given})
    stopped = next((stop for stop in _stops(body.get("stop_sequences")) if stop in answer.reply.text), None)
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return {
        "id": _new_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": str(body.get("model") or "policy"),
        "content": content,
        "stop_reason": "stop_sequence" if stopped is not None else reasons[answer.finish],
        "stop_sequence": stopped,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": len(answer.reply.token_ids)},
    }


def _anthropic_events(body: Body, response: Body) -> Iterator[Event]:
    for data in _anthropic_parts(response):
        yield data["type"], data


def _anthropic_parts(response: Body) -> Iterator[Body]:
    yield {"type": "message_start", "message": response | {"content": [], "stop_reason": None, "stop_sequence": None}}
    for index, block in enumerate(response["content"]):
        if block["type"] == "text":
            empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty, delta = (
                block | {"input": {}},
                {"type": "input_json_delta", "partial_json": json.dumps(block["input"])},
            )
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {name: response[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ended, "usage": response["usage"]}
    yield {"type": "message_stop"}


def _anthropic_error(message: str, code: str, status: int) -> Body:
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 500: "api_error"}
    return {"type": "error", "error": {"type": kinds.get(status, "invalid_request_error"), "message": message}}


APIS = {
    "/v1/chat/completions": Api(_read_chat, _chat_response, _chat_events, _openai_error),
    "/v1/responses": Api(_read_response, _response, _response_events, _openai_error),
    "/v1/messages": Api(_read_anthropic, _anthropic_response, _anthropic_events, _anthropic_error),
}
"""The APIs by path."""
