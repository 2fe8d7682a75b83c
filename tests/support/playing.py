"""Plays rollouts of environments with a policy that follows a script: for the tests of this folder."""

from covey.core.engine import SamplingParams
from covey.engines.scripted import ScriptedEngine
from covey.rollout.collector import Collector, PromptSample, RolloutSpec
from covey.rollout.environments import EnvironmentPool, TextEnvironmentAgent, ToolEnvironmentAgent
from covey.rollout.environments.interface import tool_methods
from covey.rollout.prompts import PromptCodec
from covey.rollout.tool_agent import ToolAgent
from covey.rollout.tools.parsers import TOOL_PARSERS
from covey.rollout.tools.toolbox import Toolbox
from covey.rollout.tools.turn_template import TurnTemplates
from tests.support import tiny

# The chat template of tiny conversations, with tools in it and results.
TEMPLATE = (
    "{% for t in tools or [] %}<bos>tool: {{ t.function.name }}<eos>{% endfor %}"
    "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<bos>assistant: {% endif %}"
)


def tokenizer():
    made = tiny.tokenizer()
    made.chat_template = TEMPLATE
    return made


TOKENIZER = tokenizer()


def call(name, **arguments):
    """A call as the policy writes it."""
    import json

    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class RecordingEngine(ScriptedEngine):
    """Keeps the prompts that it was given, as text, in `received`."""

    received: list[str]


def says(*turns):
    """A policy that says these texts, turn after turn, and then the last of them again. Records what it received."""
    received = []

    def script(prompt_ids, seed):
        text = TOKENIZER.decode(prompt_ids)
        received.append(text)
        said = text.count("<bos>assistant: ") - 1
        return [*TOKENIZER(turns[min(said, len(turns) - 1)])["input_ids"], TOKENIZER.eos_token_id]

    engine = RecordingEngine(script)
    engine.received = received
    return engine


def tool_agent(factory, seconds=5.0, tools=(), max_iterations=None):
    """An agent of environments whose methods are tools."""
    pool = EnvironmentPool(factory, seconds)
    example = factory()
    reward = hasattr(example, "get_reward")
    methods = tool_methods(example)
    agent = ToolAgent(Toolbox([*methods, *tools], timeout=seconds), TOOL_PARSERS["hermes"], max_iterations)
    names = list(agent.toolbox.tools)[: len(methods)]
    return ToolEnvironmentAgent(pool, reward, agent=agent, methods=names)


def text_agent(factory, seconds=5.0, max_turns=None, limit=None, turn_end=None):
    """An agent of text environments."""
    pool = EnvironmentPool(factory, seconds, limit)
    return TextEnvironmentAgent(pool, True, max_turns=max_turns, turn_end=turn_end)


def play(
    agent,
    engine,
    rows=({"prompt": [{"role": "user", "content": "go"}]},),
    group=1,
    room=400,
    seconds=20.0,
    context=None,
    **settings,
):
    """The rollouts of `group` samples of each row; `settings` of the spec."""
    codec = PromptCodec(TOKENIZER, None, context)
    spec = RolloutSpec(agent, TurnTemplates(codec, [TOKENIZER.eos_token_id]), seconds, **settings)
    draws = [PromptSample(row, number, sample) for number, row in enumerate(rows) for sample in range(group)]
    return Collector(engine, codec, 0, spec).collect(draws, SamplingParams(max_tokens=room), ("test", 0))
