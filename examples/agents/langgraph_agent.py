"""LangGraph's prebuilt agent, which talks in chat completions."""

from arithmetic import TOOLS, score
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent


async def play(row, base_url, api_key):
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, max_retries=0, use_responses_api=False)
    agent = create_react_agent(model, TOOLS)
    messages = [
        message | ({"tool_call_id": "example"} if message["role"] == "tool" else {}) for message in row["prompt"]
    ]
    try:
        state = await agent.ainvoke({"messages": messages}, {"recursion_limit": 4})
    except GraphRecursionError:  # a call too many
        return 0.0
    return score(state["messages"][-1].content, row)
