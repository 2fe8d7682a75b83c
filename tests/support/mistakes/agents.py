"""Mistakes about tools, rollout functions and environments."""

import asyncio
import re
import threading
from typing import Any

from covey.core.findings import CheckWarning
from covey.rewards import CharEnd, RewardError
from covey.rollout.tools.calls import AssistantTurn, ToolCall
from covey.rollout.tools.tool import Tool
from covey.rollout.tools.toolbox import Toolbox
from covey.rollout.user_functions import RolloutError
from covey.runtime.deadlines import MAX_STILL_RUNNING, LateCallWarning
from covey.trainer.rollout_reports import RolloutWarning
from tests.support import tiny
from tests.support.mistakes.cases import CONFIG, TRAINING, Bench, Mistake, checked
from tests.trainer.agents.test_tools import TEMPLATE, add

UNSTABLE = TEMPLATE.replace("<bos>{{ m['role'] }}", "<bos>{{ messages | length }}{{ m['role'] }}")


def conversations(bench: Bench, template: str = TEMPLATE, **arguments: Any) -> Any:
    """A trainer on conversations, with a chat template that knows tools."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    return bench.build(**{"train_dataset": tiny.rows(conversational=True), "processing_class": tokenizer, **arguments})


async def many_hang():
    """Calls of a tool that waits where nothing can stop it, each for its whole deadline."""
    waits = threading.Event()
    search = Tool("search", {"type": "function", "function": {"name": "search"}}, lambda: waits.wait(60))
    box, call = Toolbox([search], timeout=0.02), AssistantTurn("", [ToolCall("search", {})])
    try:
        for _ in range(MAX_STILL_RUNNING + 1):
            await box.answer(call)
    finally:
        waits.set()


def without_hints(a, b):
    return a + b


async def nobody(row, engine):
    return None


def encoded_again(prompts, trainer):
    """Completions whose text went through a tokenizer that knows no digits but 7."""
    replies = trainer.generate_completions(prompts)
    texts = [re.sub("[0-9]", "7", reply["text"]) for reply in replies]
    ids = [trainer.processing_class(text, add_special_tokens=False)["input_ids"] for text in texts]
    return {
        "prompt_ids": [reply["prompt_ids"] for reply in replies],
        "completion_ids": [own[: len(reply["logprobs"])] for own, reply in zip(ids, replies, strict=True)],
        "logprobs": [reply["logprobs"][: len(own)] for own, reply in zip(ids, replies, strict=True)],
    }


async def sometimes(row, engine):
    if engine.sibling == 0:
        raise RuntimeError("no luck")
    episode = engine.begin()
    await episode.sample()
    return episode.done()


def characters_of_a_conversation(completions, **kwargs):
    return [[(CharEnd(1), 1.0)] for _ in completions]


async def asked_again(row, engine):
    episode = engine.begin()
    await episode.sample(max_tokens=2)
    episode.write("and?")
    await episode.sample()
    return episode.done()


async def too_few(row, engine, n):
    episode = engine.begin()
    await episode.sample()
    return [episode.done()]


async def waits(prompts, trainer):
    return {}


AGENTS = [
    checked(
        "Gave tools and a rollout_func",
        lambda b: conversations(b, tools=[add], rollout_func=nobody),
        "players-several",
        "`rollout_func` .*`tools`",
    ),
    checked(
        "Gave tools that are not in a list",
        lambda b: conversations(b, tools=add),
        "player-type",
        "`tools` .* function",
    ),
    Mistake(
        "Gave a tool without type hints or docstring",
        lambda b: conversations(b, tools=[without_hints]),
        ("'without_hints'",),
    ),
    checked(
        "Gave tools with prompts that are strings",
        lambda b: conversations(b, tools=[add], train_dataset=tiny.rows()),
        "prompt-messages",
        "row 0 of `train_dataset`",
        '"role": "user"',
    ),
    Mistake(
        "Gave tools with a chat template that changes earlier turns",
        lambda b: conversations(b, UNSTABLE, tools=[add]),
        ("`tokenizer.chat_template`", "unstable_chat_template='keep'"),
    ),
    checked(
        "Gave tools with a chat template that does not show them",
        lambda b: conversations(b, TEMPLATE[TEMPLATE.index("{% for m in") :], tools=[add]),
        "template-tools",
        "tool_parser",
        kind=CheckWarning,
    ),
    checked(
        "Gave a rollout_func that is no function",
        lambda b: b.build(rollout_func="rollout.py"),
        "player-type",
        "`rollout_func`",
    ),
    Mistake(
        "Wrote an async rollout function with other arguments",
        lambda b: b.build(rollout_func=waits),
        (r"\(prompts, trainer\)",),
    ),
    Mistake(
        "Wrote a rollout function of (prompts, args, processing_class)",
        lambda b: b.build(rollout_func=lambda prompts, args, processing_class: {}),
        ("processing_class", "`trainer.args`"),
    ),
    Mistake(
        "Wrote a rollout function of (row, engine) without async",
        lambda b: b.build(rollout_func=lambda row, engine: None),
        ("`async def`",),
    ),
    checked(
        "Set speculative_reuse with tools or a rollout_func",
        lambda b: conversations(b, tools=[add], settings={"speculative_reuse": "exact"}),
        "draft-reuse",
        "speculative_reuse='exact'",
    ),
    checked(
        "Set max_tool_calling_iterations without tools",
        lambda b: b.build({"max_tool_calling_iterations": 2}),
        "setting-unread",
        "max_tool_calling_iterations=2",
        kind=CheckWarning,
    ),
    Mistake(
        "Wrote a rollout function that returns something else",
        lambda b: b.build(rollout_func=nobody).train(),
        ("NoneType",),
        when=TRAINING,
        kind=RolloutError,
    ),
    Mistake(
        "Wrote a group's rollout function that returns too few",
        lambda b: b.build(rollout_func=too_few).train(),
        ("4 Rollouts", "1 of Rollout"),
        when=TRAINING,
        kind=RolloutError,
    ),
    Mistake(
        "Wrote a rollout function that fails now and then",
        lambda b: b.build(rollout_func=sometimes).train(),
        ("RuntimeError",),
        when=TRAINING,
        kind=RolloutWarning,
    ),
    Mistake(
        "Wrote a rollout_func that returns too few or other fields",
        lambda b: b.build(rollout_func=lambda prompts, trainer: {"prompt_ids": []}).train(),
        ("completion_ids", "'prompt_ids'"),
        when=TRAINING,
        kind=RolloutError,
    ),
    Mistake(
        "Encoded text again in a rollout function",
        lambda b: b.build(rollout_func=encoded_again).train(),
        ("LlamaForCausalLM",),
        when=TRAINING,
    ),
    Mistake(
        "Gave a character of a conversation as the end of a step",
        lambda b: conversations(
            b,
            settings={"max_completion_length": 40},
            rollout_func=asked_again,
            reward_funcs=characters_of_a_conversation,
        ).train(),
        ("CharEnd", "TurnEnd"),
        when=TRAINING,
        kind=RewardError,
    ),
    checked(
        "Named a tool_parser that does not exist",
        lambda b: b.config(tool_parser="hermess"),
        "setting-word",
        "tool_parser='hermess'",
        "'hermes'",
        "TOOL_PARSERS",
        when=CONFIG,
    ),
    *(
        checked(
            "Gave tools or rollouts no time, or endless time",
            lambda b, name=name, value=value: b.config(**{name: value}),
            "setting-range",
            f"{name}={value!r} .* 0 .* 1000000000",
            when=CONFIG,
        )
        for name, value in {"tool_timeout": 0, "rollout_timeout": float("inf")}.items()
    ),
    Mistake(
        "Wrote a tool, or another function, that hangs in C code",
        lambda b: asyncio.run(many_hang()),
        ("'search'",),
        kind=LateCallWarning,
    ),
    checked(
        "Counted rounds of tool calls below 0",
        lambda b: b.config(max_tool_calling_iterations=-1),
        "setting-range",
        "max_tool_calling_iterations=-1 .* 0 ",
        when=CONFIG,
    ),
]
