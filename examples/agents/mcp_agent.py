"""A client of the Model Context Protocol: a server of its own has the tools, and Anthropic's SDK runs them."""

import sys
from pathlib import Path

from anthropic import AsyncAnthropic
from anthropic.lib.tools.mcp import async_mcp_tool
from arithmetic import TOOLS, score
from mcp import ClientSession, StdioServerParameters, stdio_client


async def play(row, base_url, api_key):
    system, *conversation = row["prompt"]
    server = StdioServerParameters(command=sys.executable, args=[str(Path(__file__))])
    client = AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0)
    async with client, stdio_client(server) as streams, ClientSession(*streams) as session:
        await session.initialize()
        tools = [async_mcp_tool(tool, session) for tool in (await session.list_tools()).tools]
        runner = client.beta.messages.tool_runner(
            model="policy",
            max_tokens=200,
            max_iterations=2,
            system=system["content"],
            messages=list(map(block, conversation)),
            tools=tools,
        )
        last = await runner.until_done()
    return score("".join(part.text for part in last.content if part.type == "text"), row)


def block(message):
    if message["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": "example", "content": message["content"]}
        return {"role": "user", "content": [result]}
    return message


if __name__ == "__main__":
    from mcp.server.mcpserver import MCPServer

    serving = MCPServer("calculator")
    for function in TOOLS:
        serving.tool()(function)
    serving.run("stdio")
