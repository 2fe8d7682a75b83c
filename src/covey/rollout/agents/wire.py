"""APIs for programs, as translations to and from `ChatRequest`: OpenAI's chat completions and responses, Anthropic's.

To add one, write an `Api` and add it to `APIS`.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from covey.core.records import Message
from covey.rollout.agents.request_fields import NO_GRAMMAR, Body, Fields, joined_content
from covey.rollout.agents.session import Answer, ChatRequest, RequestError

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MAX_CHOICES = 16


@dataclass(frozen=True)
class Api:
    """One API."""

    read: Callable[[Fields], ChatRequest]
    response: Callable[[Body, list[Answer]], Body]
    events: Callable[[Body, Body], Iterable[Body]]  # of (request, response), for a stream; named by their "type"
    error: Callable[[str, str, int, str | None], Body]  # of (message, code, status, field of the request)


def read_request(api: Api, body: Any) -> ChatRequest:
    """The request; RequestError, with the name of the field, where it cannot be read."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request's body cannot be written as UTF-8: {str(error)[:200]}.") from error
    fields = Fields(body, "")
    fields.get("stream", bool), fields.get("model", str)
    request = api.read(fields)
    if not request.messages:
        raise fields.wrong("input" if api.read is _read_response else "messages", "a list with messages")
    return request


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


def _openai_error(message: str, code: str, status: int, param: str | None = None) -> Body:
    return {"error": {"message": message, "type": code, "param": param, "code": code}}


# ---- OpenAI chat completions -----------------------------------------------------------------------------------------


def _read_chat(body: Fields) -> ChatRequest:
    body.inner("response_format").refuse_grammar()
    body.inner("stream_options").get("include_usage", bool)
    body.get("logprobs", bool)
    body.refuse("top_logprobs", "functions", instead="there are `logprobs` of the tokens themselves, and `tools`")
    n = body.get("n", int)
    if n is not None and not 1 <= n <= MAX_CHOICES:
        raise body.wrong("n", f"1 to {MAX_CHOICES}")
    messages = [_chat_message(message) for message in body.objects("messages", needed=True)]
    tools, stops = [_chat_tool(one) for one in body.objects("tools")], body.stops("stop")
    limits = [body.limit(name) for name in ("max_completion_tokens", "max_tokens")]
    return ChatRequest(messages, tools, n or 1, stops, limits[0] or limits[1])


def _chat_tool(tool: Fields) -> Body:
    tool.choice("type", ("function",))
    function = tool.inner("function", needed=True)
    function.function("parameters")  # the chat template shows it as it was given
    return {"type": "function", "function": function.given}


def _chat_message(message: Fields) -> Message:
    """A message with the keys that chat templates read."""
    made: Message = {"role": ROLES[message.choice("role", ROLES, "user")], "content": message.content("content")}
    if calls := message.objects("tool_calls"):
        read = [(one.get("id", str), one.inner("function", needed=True).call("arguments")) for one in calls]
        made["tool_calls"] = [{"id": number, **call} if number else call for number, call in read]
    return made | {name: value for name in ("tool_call_id", "name") if (value := message.get(name, str))}


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


def _chat_events(body: Body, response: Body) -> Iterator[Body]:
    shared = {name: response[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for choice in response["choices"]:
        index, delta = choice["index"], dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
        first = {"index": index, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
        last = {"index": index, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
        yield from (shared | {"choices": [chunk]} for chunk in (first, last))
    if (body.get("stream_options") or {}).get("include_usage"):
        yield shared | {"choices": [], "usage": response["usage"]}


# ---- OpenAI responses ------------------------------------------------------------------------------------------------


def _read_response(body: Fields) -> ChatRequest:
    body.refuse("previous_response_id", "conversation", "prompt", "background", instead="send all messages as `input`")
    body.inner("text").inner("format").refuse_grammar()
    messages: list[Message] = []
    if instructions := body.get("instructions", str):
        messages.append({"role": "system", "content": instructions})
    if isinstance(given := body.get("input", str, list), str):
        messages.append({"role": "user", "content": given})
    for item in () if isinstance(given, str) else body.objects("input"):
        kind = item.choice("type", ("message", "function_call", "function_call_output", "reasoning"), "message")
        if kind == "message":
            messages.append({"role": ROLES[item.choice("role", ROLES)], "content": item.content("content")})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = {"id": item.get("call_id", str, needed=True), **item.call("arguments")}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            number = item.get("call_id", str, needed=True)
            messages.append({"role": "tool", "tool_call_id": number, "content": item.content("output")})
    tools = [tool.function("parameters") for tool in body.objects("tools")]
    return ChatRequest(messages, tools, max_tokens=body.limit("max_output_tokens"))


def _response(body: Body, answers: list[Answer]) -> Body:
    (answer,) = answers
    message, written = answer.message, len(answer.reply.token_ids)
    output: list[Body] = []
    if message["content"] or not message.get("tool_calls"):
        text = {"type": "output_text", "text": message["content"], "annotations": []}
        output.append({"type": "message", "id": _new_id("msg"), "role": "assistant", "content": [text]})
    for call in message.get("tool_calls", ()):
        output.append({"type": "function_call", "id": _new_id("fc"), "call_id": call["id"], **call["function"]})
    cut = answer.finish == "length"
    return {
        "id": _new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "model": str(body.get("model") or "policy"),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": [{**item, "status": "completed"} for item in output],
        "instructions": body.get("instructions"),
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools") or [],
        **{"error": None, "metadata": {}, "parallel_tool_calls": True, "temperature": None, "top_p": None},
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + written,
        },
    }


def _response_events(body: Body, response: Body) -> Iterator[Body]:
    for number, (name, data) in enumerate(_response_parts(response)):
        yield {"type": name, "sequence_number": number, **data}


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


def _read_anthropic(body: Fields) -> ChatRequest:
    body.refuse("output_format", "mcp_servers", instead="the policy is sampled as it is")
    body.inner("output_config").refuse("format", instead=NO_GRAMMAR)
    if body.given.get("thread"):  # clients then send all messages
        wrong = body.wrong("thread", "left out: send all messages")
        raise RequestError(str(wrong), "thread_unsupported_request", param="thread")
    messages: list[Message] = []
    if system := body.content("system"):
        messages.append({"role": "system", "content": system})
    for message in body.objects("messages", needed=True):
        role = ROLES[message.choice("role", ROLES)]
        if isinstance(text := message.get("content", str, list, needed=True), str):
            messages.append({"role": role, "content": text})
            continue
        kinds: dict[str, list[Fields]] = {"tool_use": [], "tool_result": [], "": []}
        for block in message.objects("content"):
            kind = block.get("type", str, needed=True)
            kinds[kind if kind in kinds else ""].append(block)
        for one in kinds["tool_result"]:
            number = one.get("tool_use_id", str, needed=True)
            messages.append({"role": "tool", "tool_call_id": number, "content": one.content("content")})
        calls = [{"id": one.get("id", str, needed=True), **one.call("input")} for one in kinds["tool_use"]]
        if kinds[""] or calls:
            made: Message = {"role": role, "content": joined_content(kinds[""])}
            messages.append(made | ({"tool_calls": calls} if calls else {}))
    tools = [tool.function("input_schema", "custom") for tool in body.objects("tools")]
    return ChatRequest(messages, tools, stop=body.stops("stop_sequences"), max_tokens=body.limit("max_tokens"))


def _anthropic_response(body: Body, answers: list[Answer]) -> Body:
    (answer,) = answers
    message = answer.message
    content: list[Body] = [{"type": "text", "text": message["content"]}] if message["content"] else []
    for call in message.get("tool_calls", ()):
        given = json.loads(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given})
    stopped = next((stop for stop in body.get("stop_sequences") or () if stop and stop in answer.reply.text), None)
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


def _anthropic_events(body: Body, response: Body) -> Iterator[Body]:
    yield {"type": "message_start", "message": response | {"content": [], "stop_reason": None, "stop_sequence": None}}
    for index, block in enumerate(response["content"]):
        if block["type"] == "text":
            empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty = block | {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {name: response[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ended, "usage": response["usage"]}
    yield {"type": "message_stop"}


def _anthropic_error(message: str, code: str, status: int, param: str | None = None) -> Body:
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 500: "api_error"}
    error = {"type": kinds.get(status, "invalid_request_error"), "message": message, "details": {"error_code": code}}
    return {"type": "error", "error": error}


APIS = {
    "/v1/chat/completions": Api(_read_chat, _chat_response, _chat_events, _openai_error),
    "/v1/responses": Api(_read_response, _response, _response_events, _openai_error),
    "/v1/messages": Api(_read_anthropic, _anthropic_response, _anthropic_events, _anthropic_error),
}
"""The APIs by path."""
