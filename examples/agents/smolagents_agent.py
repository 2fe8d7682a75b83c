"""smolagents' agent that calls tools, which answers by a tool as well: `final_answer`."""

import asyncio

from arithmetic import TOOLS, score
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool


async def play(row, base_url, api_key):
    model = OpenAIModel("policy", api_base=base_url, api_key=api_key, client_kwargs={"max_retries": 0})
    agent = ToolCallingAgent(list(map(tool, TOOLS)), model, max_steps=2, verbosity_level=LogLevel.OFF)
    agent.prompt_templates["system_prompt"] = "\n".join(message["content"] for message in row["prompt"][:-1])
    return score(await asyncio.to_thread(agent.run, row["prompt"][-1]["content"]), row)
