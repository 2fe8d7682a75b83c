"""OpenAI's Agents SDK, which talks in the responses API."""

from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from arithmetic import TOOLS, score
from openai import AsyncOpenAI

from agents import Agent, ModelSettings, OpenAIResponsesModel, RunConfig, Runner, function_tool


async def play(row, base_url, api_key):
    system, *conversation = row["prompt"]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        agent = Agent(
            name="calculator",
            instructions=system["content"],
            tools=[function_tool(tool) for tool in TOOLS],
            model=OpenAIResponsesModel("policy", client),
            model_settings=ModelSettings(store=False),
        )
        try:
            result = await Runner.run(
                agent, list(map(item, conversation)), max_turns=2, run_config=RunConfig(tracing_disabled=True)
            )
        except (MaxTurnsExceeded, ModelBehaviorError):  # a call too many, or of a tool that is not there
            return 0.0
    return score(result.final_output, row)


def item(message):
    if message["role"] == "tool":
        return {"type": "function_call_output", "call_id": "example", "output": message["content"]}
    return message
