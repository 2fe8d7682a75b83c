"""Requests with fields of any type: each is answered, or refused with the name of the field."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.rollout.agents.session import AgentSession, RequestError
from covey.rollout.agents.wire import APIS, read_request
from covey.rollout.user_functions import RolloutFunction, RolloutValidator
from tests.support.playing import TOKENIZER, call, play, says

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"name": "add", "description": "adds", "parameters": SCHEMA}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
TEXT = [{"type": "text", "text": "go"}]
BODIES = {
    "/v1/chat/completions": {
        "model": "policy",
        "messages": [
            {"role": "user", "content": TEXT, "name": "me"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "5"},
        ],
        "tools": [{"type": "function", "function": ADD}],
        "n": 1,
        "stop": ["x"],
        "max_tokens": 9,
        "max_completion_tokens": 9,
        "logprobs": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "text"},
    },
    "/v1/responses": {
        "model": "policy",
        "instructions": "be brief",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 2}'},
            {"type": "function_call_output", "call_id": "c", "output": "5"},
        ],
        "tools": [{"type": "function", **ADD}],
        "max_output_tokens": 9,
        "stream": True,
        "text": {"format": {"type": "text"}},
    },
    "/v1/messages": {
        "model": "policy",
        "system": TEXT,
        "messages": [
            {"role": "user", "content": TEXT},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {"a": 2}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": TEXT}]},
        ],
        "tools": [{"name": "add", "description": "adds", "input_schema": SCHEMA}],
        "max_tokens": 9,
        "stop_sequences": ["x"],
        "stream": True,
    },
}
OTHERS = (None, True, 0, -1, 1.5, 10**30, "", "x", [], [7], [[]], [None], [{}], {}, {"x": 7}, {"type": 7})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "text", "function", "\ud800"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "text", "x"]), inner),
    max_leaves=4,
)


def paths(value, path=()):
    """Every place of a JSON value but the whole."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from paths(value[key], (*path, key))


def changed(body, path, value):
    """The body with another value at a place, if the place is still there."""
    body = inner = json.loads(json.dumps(body))
    for key in path[:-1]:
        try:
            inner = inner[key]
        except (KeyError, IndexError, TypeError):
            return body
    if isinstance(inner, dict) or (isinstance(inner, list) and path[-1] in range(len(inner))):
        inner[path[-1]] = value
    return body


@pytest.mark.parametrize("path", APIS)
def test_a_field_of_another_type_is_named(path):
    """Each field of a full request with each of many values: the error names the field, or one around it or in it."""
    body, api = BODIES[path], APIS[path]
    read_request(api, body)
    refused = set()
    for place in paths(body):
        for value in OTHERS:
            try:
                read_request(api, changed(body, place, value))
            except RequestError as error:
                named = error.param.replace("[", ".").replace("]", "").split(".")
                common = min(len(named), len(place) - (place[-1] == "type"))  # another type needs other fields
                assert named[:common] == [str(key) for key in place[:common]] and error.param in str(error)
                refused.add(place)
    assert {place[0] for place in refused} == set(body)


@pytest.mark.slow
@pytest.mark.parametrize("path", APIS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_requests_are_answered_or_refused(path, data):
    """As the endpoint does it: the chat template may raise a ValueError, too, and anything else is a status of 500."""
    body, api = BODIES[path], APIS[path]
    for place in data.draw(st.lists(st.sampled_from(list(paths(body))), min_size=1, max_size=3)):
        body = changed(body, place, data.draw(JSON))
    outcomes = []

    async def rollout(row, engine):
        session = AgentSession(engine)
        try:
            answers = await session.answer(read_request(api, body))
            response = api.response(body, answers)
            outcomes.append(json.dumps([response, list(api.events(body, response))]))
        except (RequestError, ValueError) as error:
            outcomes.append(str(error))
        return replace(engine.begin([{"role": "user", "content": "go"}]).done(), sampling_mask=None)

    (played,) = play(RolloutFunction(rollout, 20, RolloutValidator(len(TOKENIZER), None)), says(call("add", a=2)))
    assert outcomes and played.error is None


@pytest.mark.parametrize("properties", [7, [7], {"a": 7}, {"a": {"type": 7}}, {"a": {"anyOf": [7]}}])
def test_schemas_that_cannot_be_read_are_refused(properties):
    """This notation reads an argument as the type that the tool's schema gives it."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": properties}}}
    request = read_request(APIS["/v1/chat/completions"], {"messages": [{"role": "user"}], "tools": [tool]})

    async def rollout(row, engine):
        engine.templates.parser = "qwen3_coder"
        with pytest.raises(RequestError, match="`tools` has a schema that cannot be read"):
            await AgentSession(engine).answer(request)
        return replace(engine.begin([{"role": "user", "content": "go"}]).done(), sampling_mask=None)

    policy = says("<tool_call><function=add><parameter=a>3</parameter></function></tool_call>")
    (played,) = play(RolloutFunction(rollout, 20, RolloutValidator(len(TOKENIZER), None)), policy)
    assert played.error is None


@pytest.mark.parametrize(
    ("path", "added", "field", "advice"),
    [
        ("/v1/chat/completions", {"response_format": {"type": "json_schema"}}, "response_format.type", '"text"'),
        ("/v1/chat/completions", {"functions": [ADD]}, "functions", "`tools`"),
        ("/v1/chat/completions", {"top_logprobs": 5}, "top_logprobs", "`logprobs`"),
        ("/v1/responses", {"previous_response_id": "r"}, "previous_response_id", "send all messages as `input`"),
        ("/v1/responses", {"conversation": {"id": "c"}}, "conversation", "send all messages as `input`"),
        ("/v1/responses", {"text": {"format": {"type": "json_schema"}}}, "text.format.type", '"text"'),
        ("/v1/responses", {"tools": [{"type": "web_search"}]}, "tools[0].type", '"function"'),
        ("/v1/messages", {"output_config": {"format": {}, "effort": "low"}}, None, ""),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format", "grammar"),
        ("/v1/messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", '"custom"'),
    ],
)
def test_options_that_would_do_nothing_are_refused(path, added, field, advice):
    body = BODIES[path] | added
    if field is None:
        read_request(APIS[path], body)
        return
    with pytest.raises(RequestError) as refused:
        read_request(APIS[path], body)
    assert refused.value.param == field and advice in str(refused.value)
