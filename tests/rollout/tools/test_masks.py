"""What is trained on is the conversation as its template renders it, and `sampled` marks what the policy said of it.

Random conversations are played by the real collector, agent, toolbox and episodes; only the engine follows a script,
which says what a policy that keeps to the template would say, or a call that nobody can read.
"""

import json
import re
from dataclasses import dataclass, replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.core.engine import SamplingParams
from covey.core.records import FinishReason
from covey.engines.scripted import ScriptedEngine
from covey.rollout.collector import Collector, PromptSample, RolloutSpec
from covey.rollout.episode import TurnTemplates
from covey.rollout.prompts import PromptCodec
from covey.rollout.tool_agent import ToolAgent
from covey.rollout.tools.parsers import TOOL_PARSERS, parser_for
from covey.rollout.tools.toolbox import Toolbox
from tests.support.families import FAMILIES, TOKENIZERS

OUTPUTS: dict[str, str] = {}
"""What the tool returns for each word of the conversation that is being played."""


def lookup(q: str) -> str:
    """Look a word up.

    Args:
        q: The word.
    """
    return OUTPUTS[q]


TOOLBOX = Toolbox([lookup])


@cache
def templates_of(name: str) -> TurnTemplates:
    tokenizer = TOKENIZERS[name]
    ends = [tokenizer.convert_tokens_to_ids(token) for token in FAMILIES[name].ends]
    codec = PromptCodec(tokenizer, None, None, TOOLBOX.schemas)
    return TurnTemplates(codec, ends)


# --- conversations -----------------------------------------------------------------------------------------------

FIRST_MARK = 0xE000  # the private characters from here on stand for control tokens that are text

# Without control tokens, and without white space at the ends, which some templates trim.
words = st.text(st.characters(exclude_categories=["Cs", "Cc", "Co"], exclude_characters="<>[]{}｜`"), max_size=12)
plain = st.lists(words.map(str.strip), max_size=3).map("\n".join).map(str.strip)
CONTROL = "|CONTROL|"
"""Stands for a control token of the family."""
texts = plain | st.sampled_from(
    [
        CONTROL,
        f"before {CONTROL} after",
        "<think>\nWhich tool?\n</think>\n\nI look.",
        "Ça coûte 3 €, 漢字, 🙂‍↔️, e\u0301",
        "</tool_response>",
        "```",
        "42",
    ]
)
results = texts | st.just("")


@dataclass
class Turn:
    """What the policy says in one turn, and what it is answered.

    Attributes:
        text: beside the calls.
        outputs: what the tool returns for each call.
        broken: whether there is a call that cannot be read.
        user: what a user says after it, where it asked for nothing.
    """

    text: str
    outputs: list[str]
    broken: bool
    user: str


turns = st.builds(Turn, texts, st.lists(results, max_size=3), st.sampled_from([False, False, True]), texts)
conversations = st.lists(turns, min_size=1, max_size=4)


class Scene:
    """One conversation in one family: what the policy says, token by token, and what became of it."""

    def __init__(self, name: str, question: str, script: list[Turn], control: int):
        self.family, self.tokenizer = FAMILIES[name], TOKENIZERS[name]
        specials = ["<bos>", *(token for token in self.family.special if token not in self.family.ends)]
        if not self.family.broken:
            specials.remove("<start_function_call>")
        self.control = specials[control % len(specials)]
        self.prompt = [{"role": "user", "content": self._with_control(question)}]
        OUTPUTS.clear()
        self.script = [replace(turn, text=self._with_control(turn.text)) for turn in script]
        self.script.append(Turn("Done.", [], False, ""))  # after the answers to what the last turn asks
        self.messages = [self._message(number, turn) for number, turn in enumerate(self.script)]
        self.turns = [self._encode(self._said(message)) for message in self.messages]
        self.templates = templates_of(name)
        self.agent = ToolAgent(TOOLBOX, TOOL_PARSERS[parser_for(self.family.template)])

    def play(self, max_tokens: int = 100_000):
        """The rollout, by the real parts."""
        engine = ScriptedEngine(
            lambda prompt, seed: self.turns[len(engine.served) - 1], logprobs=lambda prompt, ids: [-0.5] * len(ids)
        )
        agency = RolloutSpec(self._converse, self.templates, timeout=60)
        collector = Collector(engine, self.templates.codec, 0, agency)
        (rollout,) = collector.collect(
            [PromptSample({"prompt": self.prompt}, 0, 0)], SamplingParams(max_tokens), ("train", 0)
        )
        assert rollout.error is None
        return rollout

    async def _converse(self, row, engine):
        """Calls are answered by the tool, everything else by a user."""
        episode = engine.begin(tools=TOOLBOX.schemas)
        while True:
            await self.agent.play(episode, TOOLBOX)
            turn = len(episode.turn_ends) - 1
            if turn == len(self.script) - 1 or not episode.write(self._with_control(self.script[turn].user)):
                return episode.done()

    def whole(self, completion) -> str:
        """The conversation as the template renders it, up to the end of its last turn.

        Args:
            completion: the rollout's messages: of these only what the policy did not say.
        """
        said, answers = iter(self.messages), []
        conversation = [{**message, "content": self._harmless(message["content"])} for message in self.prompt]
        for message in completion:
            if message["role"] != "assistant":
                answers.append({**message, "content": self._harmless(message["content"])})
                continue
            conversation += [*self._as_rendered(answers), next(said)]
            answers = []
        assert not answers, "the policy has the last word"
        rendered = self._render(conversation, answer=False)
        if self.family.ends_with:
            return rendered + self.family.ends_with
        return rendered[: max(rendered.rfind(token) + len(token) for token in self._ends() if token in rendered)]

    # --- how a family says it ------------------------------------------------------------------------------------

    def _message(self, number: int, turn: Turn):
        family, calls = self.family, [f"w{number}c{i}" for i in range(len(turn.outputs))]
        OUTPUTS.update(zip(calls, map(self._with_control, turn.outputs), strict=True))
        if turn.broken and family.broken:
            return {"role": "assistant", "content": f"{turn.text}\n{family.broken}".strip()}
        if not calls:
            return {"role": "assistant", "content": turn.text}
        if len(calls) > family.calls:  # the template cannot say it, so it is content
            before = "" if family.calls else turn.text + "\n"
            return {"role": "assistant", "content": (before + family.written(calls)).strip()}
        asked = [{"q": word} if family.arguments is dict else json.dumps({"q": word}) for word in calls]
        return {
            "role": "assistant",
            "content": turn.text,
            "tool_calls": [
                {"type": "function", "id": f"call{i:05d}", "function": {"name": "lookup", "arguments": arguments}}
                for i, arguments in enumerate(asked)
            ],
        }

    def _said(self, message) -> str:
        """From the generation prompt to the end of the turn."""
        before = [{"role": "user", "content": "x"}]
        prompt, whole = self._render(before), self._render([*before, message], answer=False)
        assert whole.startswith(prompt)
        said = whole[len(prompt) :]
        asks = message.get("tool_calls") or (self.family.broken and self.family.broken in message["content"])
        if asks and self.family.asks_with:
            return said + self.family.asks_with
        if self.family.ends_with:
            return said + self.family.ends_with
        return said[: max(said.rfind(token) + len(token) for token in self._ends() if token in said)]

    def _as_rendered(self, answers):
        if self.family.role == "tool" or not answers:
            return answers
        texts = [
            f"```tool_output\n{one['content']}\n```" if one["role"] == "tool" else one["content"] for one in answers
        ]
        return [{"role": "user", "content": "\n".join(texts)}]

    def _harmless(self, text: str) -> str:
        """Control tokens are text: `_encode` reads a mark for each as that."""
        for mark, token in self._marks().items():
            text = text.replace(token, mark)
        return text

    def _marks(self) -> dict[str, str]:
        tokens = sorted(self.tokenizer.get_added_vocab(), key=len, reverse=True)
        return {chr(FIRST_MARK + number): token for number, token in enumerate(tokens)}

    def _with_control(self, text: str) -> str:
        return text.replace(CONTROL, self.control)

    def _ends(self):
        return self.family.ends or (self.family.eos,)

    def _render(self, messages, answer=True) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=TOOLBOX.schemas, tokenize=False, add_generation_prompt=answer
        )

    def _encode(self, text: str) -> list[int]:
        marks, ids = self._marks(), []
        for piece in re.split(f"([{''.join(marks)}])", text):
            settings = {"split_special_tokens": True} if piece in marks else {}
            ids += self.tokenizer(marks.get(piece, piece), add_special_tokens=False, **settings)["input_ids"]
        return ids


@pytest.mark.parametrize("name", FAMILIES)
def test_the_calls_of_each_family_are_read_and_answered(name):
    """So that the conversations below have in them what they are about."""
    script = [Turn("I look.", ["1", "2"], False, ""), Turn("Again.", [], True, "And?"), Turn("3", [], False, "Sure?")]
    rollout = Scene(name, "1 + 2?", script, 0).play()
    answered = [message["content"] for message in rollout.completion if message["role"] == "tool"]
    assert answered[:2] == ["1", "2"]
    assert rollout.calls == ({"ok": 2, "malformed": 1} if FAMILIES[name].broken else {"ok": 2})
    assert [m["content"] for m in rollout.completion if m["role"] == "user"][-1] == "Sure?"
    assert rollout.completion[-1] == {"role": "assistant", "content": "Done."}


scenes = {"question": texts, "script": conversations, "control": st.integers(0, 5)}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@given(**scenes)
def test_prompt_turns_and_answers_are_the_rendered_conversation(name, question, script, control):
    """And `sampled` marks precisely what the policy said."""
    scene = Scene(name, question, script, control)
    rollout = scene.play()
    assert rollout.finish is FinishReason.STOP
    assert rollout.prompt_ids + rollout.completion_ids == scene._encode(scene.whole(rollout.completion))
    runs, begin = [], 0
    for end in rollout.turn_ends:
        run = [i for i in range(begin, end + 1) if rollout.sampled[i]]
        assert run == list(range(run[0], end + 1)), "a turn is one run of tokens"
        runs.append([rollout.completion_ids[i] for i in run])
        begin = end + 1
    assert runs == scene.turns
    assert not any(rollout.sampled[begin:])
    assert rollout.logprobs == [-0.5 if one else 0.0 for one in rollout.sampled]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@given(**scenes, data=st.data())
def test_less_room_gives_the_beginning_of_the_same_conversation(name, question, script, control, data):
    scene = Scene(name, question, script, control)
    whole = scene.play()
    tokens = len(whole.completion_ids)
    edges = [i for i in range(1, tokens) if whole.sampled[i] != whole.sampled[i - 1]]
    room = data.draw(st.integers(1, tokens) | st.sampled_from([*edges, tokens]))
    part = scene.play(room)
    count = len(part.completion_ids)
    assert count <= room
    assert part.completion_ids == whole.completion_ids[:count]
    assert part.sampled == whole.sampled[:count]
    assert part.sampled[-1], "what leaves no room for an answer is not said"
    assert part.finish is (FinishReason.STOP if count == tokens else FinishReason.LENGTH)
