"""The public clients of OpenAI and Anthropic, unmodified, against the endpoint of agents.

`make test-environments` has them; elsewhere these tests are skipped.
"""

import pytest

from covey.rollout.agents import AgentProgram
from covey.rollout.environments.agent import REWARD, PlayedEnvironment
from covey.rollout.user_functions import RolloutValidator
from tests.support.playing import TOKENIZER, call, play, says

GO = [{"role": "user", "content": "go"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def played(agent):
    """The rollout of an agent whose policy calls `add`, and then answers 5."""
    player = PlayedEnvironment(AgentProgram(agent), 60.0, RolloutValidator(len(TOKENIZER), None))
    (rollout,) = play(player, says("so " + call("add", a=2), "5"), rows=[{"prompt": None}], room=2000)
    player.close()
    assert rollout.error is None, rollout.error
    return rollout


def test_openais_chat_completions():
    openai = pytest.importorskip("openai")

    async def agent(row, base_url, api_key):
        client, messages = openai.AsyncOpenAI(base_url=base_url, api_key=api_key), list(GO)
        tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": SCHEMA}}]
        reply = await client.chat.completions.create(model="any", messages=messages, tools=tools)
        (asked,) = reply.choices[0].message.tool_calls
        assert (asked.function.name, asked.function.arguments) == ("add", '{"a": 2}')
        messages += [reply.choices[0].message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": asked.id, "content": "5"}]
        stream = await client.chat.completions.create(model="any", messages=messages, tools=tools, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert [one.id async for one in client.models.list()] == ["policy"]
        with pytest.raises(openai.BadRequestError, match="list with messages"):
            await client.chat.completions.create(model="any", messages=[])
        with pytest.raises(openai.AuthenticationError, match="no session"):
            await openai.AsyncOpenAI(base_url=base_url, api_key="other").models.list()
        return float(text == "5")

    rollout = played(agent)
    assert rollout.extras[REWARD] == 1.0 and len(rollout.turn_ends) == 2 and not rollout.strands


def test_openais_responses():
    openai = pytest.importorskip("openai")

    async def agent(row, base_url, api_key):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        tools = [{"type": "function", "name": "add", "description": "", "parameters": SCHEMA, "strict": False}]
        reply = await client.responses.create(model="any", input="go", tools=tools)
        assert reply.output_text == "so"
        result = {"type": "function_call_output", "call_id": reply.output[-1].call_id, "output": "5"}
        items = [*GO, *(item.model_dump() for item in reply.output), result]
        async with client.responses.stream(model="any", input=items, tools=tools) as stream:
            final = await stream.get_final_response()
        return float(final.output_text == "5")

    rollout = played(agent)
    assert rollout.extras[REWARD] == 1.0 and len(rollout.turn_ends) == 2 and not rollout.strands


def test_anthropics_messages():
    anthropic = pytest.importorskip("anthropic")

    async def agent(row, base_url, api_key):
        client = anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
        options = {"model": "any", "max_tokens": 500, "tools": [{"name": "add", "input_schema": SCHEMA}]}
        reply = await client.messages.create(messages=GO, **options)
        assert reply.stop_reason == "tool_use" and reply.content[-1].input == {"a": 2}
        result = {"type": "tool_result", "tool_use_id": reply.content[-1].id, "content": "5"}
        turn = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in reply.content]}
        later = [*GO, turn, {"role": "user", "content": [result]}]
        async with client.messages.stream(messages=later, **options) as stream:
            final = await stream.get_final_message()
        with pytest.raises(anthropic.BadRequestError, match="list with messages"):
            await client.messages.create(messages=[], **options)
        return float(final.content[0].text == "5")

    rollout = played(agent)
    assert rollout.extras[REWARD] == 1.0 and len(rollout.turn_ends) == 2 and not rollout.strands
