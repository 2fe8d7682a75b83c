"""The default harness (program that plays a rollout) for tasks of verifiers: a conversation in this process."""

import sys
from typing import Any

import aiohttp
from verifiers.v1.clients import ModelContext
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness, HarnessConfig
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

__all__ = ["ConversationHarness"]

HARNESS = "covey_conversation"  # as `harness.id` of verifiers, which finds this module by it
sys.modules.setdefault(HARNESS, sys.modules[__name__])


def conversation(system: str | None, prompt: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return messages + [message_to_wire(message) for message in prompt or ()]


class ConversationHarness(Harness[HarnessConfig]):
    """Asks the model once for each segment: the conversation so far goes in, a reply comes out."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Send one request. A conversation that has reached the context's end is finished here without an error."""
        if mcp_urls:
            raise ValueError(
                f"the task offers tools ({', '.join(mcp_urls)}), which need a harness that calls them: harness='null'."
            )
        messages = conversation(*self.resolve_prompt(data))
        no_timeout = aiohttp.ClientTimeout(total=None)  # a whole rollout has a deadline, and sampling may take long
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {secret}"}, timeout=no_timeout) as client,
            client.post(f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": messages}) as response,
        ):
            text = await response.text()
        if response.status >= 400 and "context_length_exceeded" not in text:
            return ProgramResult(1, "", f"{response.status}: {text[:2000]}")
        return ProgramResult(0, "", "")
