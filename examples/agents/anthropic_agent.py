"""Anthropic's SDK, whose tool runner talks in the messages API."""

from anthropic import AsyncAnthropic, beta_async_tool
from arithmetic import TOOLS, score


def asynchronous(function):
    async def call(**arguments):
        return str(function(**arguments))

    return beta_async_tool(call, name=function.__name__, description=function.__doc__, input_schema=SCHEMA)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


async def play(row, base_url, api_key):
    system, *conversation = row["prompt"]
    async with AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0) as client:
        runner = client.beta.messages.tool_runner(
            model="policy",
            max_tokens=200,
            max_iterations=2,
            system=system["content"],
            messages=list(map(block, conversation)),
            tools=list(map(asynchronous, TOOLS)),
        )
        last = await runner.until_done()
    return score("".join(part.text for part in last.content if part.type == "text"), row)


def block(message):
    if message["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": "example", "content": message["content"]}
        return {"role": "user", "content": [result]}
    return message
