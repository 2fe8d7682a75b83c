"""Turn templates: the tokens that a chat template writes between one turn of the policy and the next.

They are found by rendering a placeholder turn with marks in it. Appending them gives the conversation that the template
itself would render only if the template is *prefix-stable*: a longer conversation begins with the tokens of the shorter
one.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from covey.core.records import Message
from covey.rollout.images import as_parts, with_images
from covey.rollout.prompts import ControlTokens, PromptCodec
from covey.rollout.vision import Encoded, Vision
from covey.runtime.user_code import warn

_TEXT, _NAME, _RESULT, _THOUGHT = "coveySAID", "coveyNAME", "coveyRESULT", "coveyTHOUGHT"  # marks in placeholders
_USER: Message = {"role": "user", "content": "coveyASK"}
_CALLS = ("object", "string", "none")  # calls of a placeholder: arguments as an object, as a JSON string, or no call
CACHED_TEMPLATES = 256  # limit, because rows may have template arguments of their own


class UnstableTemplate(ValueError):
    """Error for a chat template that renders earlier turns differently once later ones follow."""


class TurnTemplate:
    """The tokenizer's chat template for conversations with tools; `reasons` says why it is not prefix-stable, if so."""

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[dict[str, Any]] = (),
        end_ids: Iterable[int] = (),  # that end a turn, in addition to the tokenizer's end of sequence
        chat_template_kwargs: dict[str, Any] | None = None,
        unstable: str = "raise",  # or "rewrite": refuse one that is not prefix-stable; "keep": turns stay as sampled
        vision: Vision | None = None,
        allow_control_tokens: bool = False,
    ):
        if unstable not in ("raise", "keep", "rewrite"):
            raise ValueError(f"unstable={unstable!r} is not known; choose 'raise', 'keep' or 'rewrite'.")
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "tools need a chat template and the tokenizer has none. Set `tokenizer.chat_template` or use an"
                " instruction-tuned model."
            )
        self.tokenizer, self.vision = tokenizer, vision
        self.tools, self.kwargs = list(tools), chat_template_kwargs or {}
        ends = {tokenizer.eos_token_id, *end_ids} - {None}
        self._ends = {str(tokenizer.convert_ids_to_tokens(end)): end for end in sorted(ends)}
        self._controls = ControlTokens(tokenizer, allow_control_tokens)
        self.result_role, self._calls = self._find_result_format()
        self.shows_tools = self._renders_tools()
        self.reasons = self._instabilities([_result("1")], [_result("2")])
        self._check_users = unstable != "keep"
        self._advice = (
            "unstable_chat_template='rewrite' does not help here: change"
            if unstable == "rewrite"
            else "Set unstable_chat_template='rewrite', if thinking is dropped; or change"
        )
        if self.reasons and unstable != "keep":
            raise UnstableTemplate(
                f"the chat template is not prefix-stable: {'; '.join(self.reasons)}. A conversation trained on would"
                f" not be the one that the template renders. {self._advice} `tokenizer.chat_template` so that earlier"
                " turns stay as they were; or set unstable_chat_template='keep' and keep them yourself wherever the"
                " model is used."
            )

    def continuation(self, results: Sequence[Message], ended_with: int | None = None) -> list[int]:
        """Tokens that follow a sampled turn; `answer` without the index."""
        return self.answer(results, ended_with).ids

    def answer(self, results: Sequence[Message], ended_with: int | None = None, start: int = 0) -> Encoded:
        """Tokens that follow a sampled turn up to where the policy continues; `start` is the index of the first one.

        `ended_with`, the turn's last token, is not repeated where the template begins the results with it.
        """
        images: list[Any] = []
        if self.vision is not None:
            results, images = with_images(results, ())
        hidden: dict[str, str] = {}
        messages = self._result_messages(results, hidden)
        if self._check_users and any(result["role"] == "user" for result in results):
            self._check_users = False
            self._warn_of_users()
        try:
            text = self._after_turn(messages)
        except ValueError:
            text = self._after_single_calls(messages)
        ids = self._encode_after_end(text, hidden)
        repeated = ended_with is not None and ids[:1] == [ended_with]
        if not images:
            return Encoded(ids[1:] if repeated else ids)
        assert self.vision is not None, "images were read for it"
        end = next(iter(self._ends), "")
        encoded = self.vision.encode(end + text, images, start, add_special_tokens=False)
        skipped = int(bool(end)) + int(repeated)
        (media,) = encoded.media
        media = replace(
            media,
            marks={name: marks[skipped:] for name, marks in media.marks.items()},
            length=media.length - skipped,
            short_ids=media.short_ids[skipped:],
        )
        return Encoded(encoded.ids[skipped:], (media,))

    def ends_with(self, token: int | None) -> bool:
        """True if a turn with this last token has ended; always True if no token ends turns."""
        return token in self._ends.values() or not self._ends

    def ending(self) -> list[int]:
        """Tokens that end a turn which the policy has not ended itself; `continuation` follows them."""
        text = self._render([_USER, {"role": "assistant", "content": _TEXT}], answer=False)
        _, marked, cut = self._end_of_turn(text)
        return list(self.tokenizer(text[marked:cut], add_special_tokens=False)["input_ids"])

    def _render(self, messages: Sequence[Message], answer: bool = True, tools: Sequence[Any] | None = None) -> str:
        if self.vision is not None:  # their templates may accept no contents but parts
            messages = [{**message, "content": as_parts(message.get("content"))} for message in messages]
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools or self.tools or None,
                tokenize=False,
                add_generation_prompt=answer,
                **self.kwargs,
            )
        except Exception as error:  # templates are programs of their authors: they raise anything
            raise ValueError(
                f"the chat template cannot render roles {[message['role'] for message in messages]}:"
                f" {type(error).__name__}: {error}"
            ) from error

    def _after_single_calls(self, results: Sequence[Message]) -> str:
        """Several results, for a template that allows one call per turn: after a single call, or one by one."""
        try:
            return self._after_turn(results, self._turn(results[:1]))
        except ValueError:
            *first, last = results
            texts = [self._after_turn([result], answer=False) for result in first]
            return "".join([*texts, self._after_turn([last])])

    def _after_turn(self, results: Sequence[Message], turn: Message | None = None, answer: bool = True) -> str:
        turn = turn or self._turn(results)
        alone, whole = self._render([_USER, turn], False), self._render([_USER, turn, *results], answer)
        begin, _, cut = self._end_of_turn(alone)
        ended, at = alone[begin:cut], -1
        for _ in range(alone[:cut].count(ended)):  # calls may look alike; a result may hold the text of one
            at = whole.find(ended, at + 1)
        if begin < 0 or at < 0:
            raise ValueError(f"the chat template changes a turn when results follow: {_difference(alone, whole)}")
        return whole[at + len(ended) :]

    def _end_of_turn(self, text: str) -> tuple[int, int, int]:
        """Begin and end of the last mark in a rendered turn, and the end of the turn."""
        begin, mark = max((text.rfind(mark), mark) for mark in (_TEXT, _NAME))
        marked = begin + len(mark)
        cut = min((text.find(end, marked) + len(end) for end in self._ends if end in text[marked:]), default=None)
        if cut is None:  # the template does not end turns with a token: all text after the turn follows it
            cut = marked if mark == _TEXT else len(text)
        return begin, marked, cut

    def _turn(self, results: Sequence[Message], thought: str = "", number: str = "") -> Message:
        message: Message = {"role": "assistant", "content": thought + _TEXT + number}
        if self._calls == "none" or self.result_role != "tool":
            return message
        function = {"name": _NAME, "arguments": {} if self._calls == "object" else "{}"}
        calls = [
            {"type": "function", "id": result.get("tool_call_id", f"call{i:05d}"), "function": dict(function)}
            for i, result in enumerate(results)
            if result["role"] == "tool"
        ]
        if calls:  # an empty list is a turn with calls to templates that ask whether there is one
            message["tool_calls"] = calls
        return message

    def _result_messages(self, results: Sequence[Message], hidden: dict[str, str]) -> list[Message]:
        """Results in the role that the template knows, with control tokens replaced, so that none can end the turn."""
        clean = [{**result, "content": self._without_control(result.get("content"), hidden)} for result in results]
        if self.result_role == "tool":
            return clean
        parts: list[dict[str, Any]] = []
        for number, result in enumerate(clean):
            begin, end = ("```tool_output\n", "\n```") if result["role"] == "tool" else ("", "")
            parts += [*as_parts("\n" if number else ""), *as_parts(begin), *as_parts(result["content"]), *as_parts(end)]
        if all(part.get("type") == "text" for part in parts):
            return [{"role": "user", "content": "".join(part["text"] for part in parts)}]
        return [{"role": "user", "content": parts}]

    def _without_control(self, content: Any, hidden: dict[str, str]) -> Any:
        """Content whose control tokens are replaced or, if a processor encodes it, broken by a zero-width space."""
        if isinstance(content, list) and all(part.get("type") == "text" for part in content):
            content = "\n".join(part["text"] for part in content)
        if isinstance(content, list) and self.vision is not None:
            return [
                {**part, "text": self._without_control(part["text"], hidden)} if part.get("type") == "text" else part
                for part in content
            ]
        if not isinstance(content, str):
            raise ValueError(
                f"the content of a result must be text, got {type(content).__name__}: images among the results of tools"
                " need a vision-language model and its processor (`processing_class`)."
            )
        if self.vision is None:
            return self._controls.hide(content, hidden)
        for token in self._controls.texts:
            content = content.replace(token, f"{token[:1]}\u200b{token[1:]}")
        return content

    def _encode_after_end(self, text: str, hidden: dict[str, str]) -> list[int]:
        """Tokens of `text` after the token that ends a turn; some tokenizers encode a text's beginning differently."""
        if not self._ends:
            return self._controls.encode(text, hidden)
        end, end_id = next(iter(self._ends.items()))
        ids = self._controls.encode(end + text, hidden)
        if not ids or ids[0] != end_id:
            raise ValueError(f"the tokenizer does not encode {end!r} as one token, so turns have no end of their own.")
        return ids[1:]

    def _find_result_format(self) -> tuple[str, str]:
        reason = "it leaves them out"
        for role, calls in [*(("tool", calls) for calls in _CALLS), ("user", "none")]:
            self.result_role, self._calls = role, calls
            try:
                if _RESULT in self._after_turn(self._result_messages([_result()], {})):
                    return role, calls
            except ValueError as error:
                reason = str(error)
        raise ValueError(f"the chat template does not render the results of tools: {reason}")

    def _renders_tools(self) -> bool:
        schema = {"name": _NAME, "description": "", "parameters": {"type": "object", "properties": {}}}
        try:
            return _NAME in self._render([_USER], tools=[{"type": "function", "function": schema}])
        except ValueError:
            return False

    def _warn_of_users(self) -> None:
        """Warn of a template that keeps earlier turns if tool results follow, but changes them if a user follows."""
        reasons = self._instabilities(*([{"role": "user", "content": _RESULT + number}] for number in "12"))
        if reasons:
            warn(
                f"the chat template is not prefix-stable where a user continues: {'; '.join(reasons)}. Earlier turns"
                f" stay as they were sampled, which is not how the template renders the conversation. {self._advice}"
                " `tokenizer.chat_template`; or set unstable_chat_template='keep' and keep them wherever the model is"
                " used.",
            )

    def _instabilities(self, *answers: list[Message]) -> list[str]:
        """Reasons why the template is not prefix-stable over two turns, each with a result after it."""
        opening = self._render([_USER])
        begun = opening.rstrip()
        thinks = "</think>" in json.dumps(self.tokenizer.chat_template) and not begun.endswith("</think>")
        thinks = thinks or begun.endswith("<think>")
        results = [self._result_messages(answer, {}) for answer in answers]
        turns = [
            self._turn(result, f"<think>\n{_THOUGHT}{i}\n</think>\n\n" if thinks else "", str(i))
            for i, result in enumerate(results, 1)
        ]
        first = self._render([_USER, turns[0], *results[0]])
        second = self._render([_USER, turns[0], *results[0], turns[1], *results[1]])
        if thinks and (f"{_THOUGHT}1" not in first or f"{_THOUGHT}1" not in second):
            return ["it drops the thinking of earlier turns"]
        reasons = []
        if not first.startswith(opening):
            reasons.append(f"a turn does not begin with the generation prompt: {_difference(opening, first)}")
        if not second.startswith(first):
            reasons.append(f"a later turn changes earlier ones: {_difference(first, second)}")
        alone = self._after_turn(results[1])
        if not reasons and not second.endswith(alone):
            reasons.append(f"results are rendered differently later on: {_difference(alone, second[-len(alone) :])}")
        return reasons


class TurnTemplates:
    """Turn templates of one chat template, one per set of tools and template arguments."""

    def __init__(self, codec: PromptCodec, end_ids: Sequence[int], unstable: str = "raise", parser: str | None = None):
        if unstable == "rewrite":
            _rewrite(codec)
        self.codec, self._end_ids, self._unstable = codec, tuple(end_ids), unstable
        self.parser = parser  # name of the notation of calls; None: the one whose marks the chat template has
        self._cache: dict[str, TurnTemplate] = {}  # least recently used first

    def of(self, tools: Sequence[dict[str, Any]], row_kwargs: dict[str, Any] | None) -> TurnTemplate:
        kwargs = self.codec.template_kwargs(row_kwargs)
        key = json.dumps([list(tools), kwargs], sort_keys=True, default=repr)
        template = self._cache.pop(key, None)
        if template is None:
            try:
                template = self._made(tools, kwargs)
            except UnstableTemplate as unstable:
                template = self._made_without_thinking(tools, kwargs, unstable)
        self._cache[key] = template
        if len(self._cache) > CACHED_TEMPLATES:
            del self._cache[next(iter(self._cache))]
        return template

    def _made(self, tools: Sequence[dict[str, Any]], kwargs: dict[str, Any]) -> TurnTemplate:
        codec = self.codec
        return TurnTemplate(
            codec.tokenizer, tools, self._end_ids, kwargs, self._unstable, codec.vision, codec.allow_control_tokens
        )

    def _made_without_thinking(
        self, tools: Sequence[dict[str, Any]], kwargs: dict[str, Any], unstable: "UnstableTemplate"
    ) -> TurnTemplate:
        """The template; if prompts switch thinking off, rewritten to keep the empty thinking of earlier turns.

        This does not change any token that is trained on or read: turns stay as they were sampled either way.
        """
        tokenizer = self.codec.tokenizer
        old, opening = tokenizer.chat_template, _rendered(tokenizer, _TURNS[0], tools, kwargs)
        if self._unstable != "raise" or opening is None or not opening.rstrip().endswith("</think>"):
            raise unstable
        try:
            prompts = [_rendered(tokenizer, turns, tools, kwargs) for turns in _TURNS[:2]]
            _rewrite(self.codec)
            if prompts != [_rendered(tokenizer, turns, tools, kwargs) for turns in _TURNS[:2]]:
                raise unstable
            template = self._made(tools, kwargs)
        except ValueError:
            _set_template(self.codec, old)
            raise unstable from None
        warn(
            "the chat template opens a turn without thinking by an empty block of thinking, and drops the block from"
            " earlier turns. It was rewritten to keep it, as training does, and is saved with the model in that form."
            " Set unstable_chat_template='rewrite' to silence this, or 'keep' to save it as it was.",
        )
        return template


def _result(number: str = "") -> Message:
    return {"role": "tool", "name": "lookup", "tool_call_id": "call00000", "content": _RESULT + number}


def _difference(one: str, other: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return f"{one[at : at + 40]!r} becomes {other[at : at + 40]!r} after {one[max(0, at - 20) : at]!r}"


# --- templates that drop the thinking of earlier turns once a user continues, rewritten to keep it --------------------

SWITCHES = {"preserve_thinking": "true", "truncate_history_thinking": "false", "clear_thinking": "false"}
"""Template variables of Qwen 3.6 and LFM 2.5, of Nemotron 3, and of GLM 4.7, with values that keep all thinking."""
CONDITIONS = {
    r"loop\.index0 > ns\.last_(query|user)_index": "true",  # Qwen 3 and 3.5, GLM 4.5 and 4.6, MiniMax M2
    r"loop\.last or \(not loop\.last and reasoning_content\)": "true",  # Qwen 3: in what is called no thinking
    r"\{%-? *if '</think>' in content *-?%\}\s*\{%-? *set content = content\.split\('</think>'\)\[-1\] *-?%\}\s*"
    r"\{%-? *endif *-?%\}": "",  # DeepSeek R1 and its distillates
}
"""Parts of templates without such a variable, and their replacements."""
_TURNS: tuple[list[Message], ...] = (
    [_USER],
    [{"role": "system", "content": "coveyRULES"}, _USER],
    [_USER, {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_TEXT}"}],
)


def keep_thinking(tokenizer: Any) -> None:
    """Rewrite a tokenizer's chat template so that it keeps the thinking of all turns, also when it is saved.

    A template without a part that is known to drop thinking is not changed. ValueError if the new template would change
    the first turn.
    """
    old = tokenizer.chat_template
    before = [_rendered(tokenizer, turns) for turns in _TURNS]
    tokenizer.chat_template = (
        {name: rewritten(text) for name, text in old.items()} if isinstance(old, dict) else rewritten(old)
    )
    after = [_rendered(tokenizer, turns) for turns in _TURNS]
    drops_at_once = before[-1] is not None and _THOUGHT not in before[-1]  # as DeepSeek R1's does
    if after[:-1] != before[:-1] or (after[-1] != before[-1] and not drops_at_once):
        tokenizer.chat_template = old
        raise ValueError(
            "unstable_chat_template='rewrite' would change what this chat template writes for the first turn, so it is"
            " one that Covey cannot rewrite. Change `tokenizer.chat_template` yourself, or choose 'keep'."
        )


def rewritten(template: str) -> str:
    """Source of a chat template that keeps thinking, with `SWITCHES` set or `CONDITIONS` replaced."""
    switches = [
        f"{{% set {name} = {value} %}}" for name, value in SWITCHES.items() if re.search(rf"\b{name}\b", template)
    ]
    if switches:
        beginning = "".join(switches)
        return template if template.startswith(beginning) else beginning + template
    for part, replacement in CONDITIONS.items():
        template = re.sub(part, replacement, template)
    return template


def _rewrite(codec: PromptCodec) -> None:
    keep_thinking(codec.tokenizer)
    _set_template(codec, codec.tokenizer.chat_template)


def _set_template(codec: PromptCodec, template: Any) -> None:
    codec.tokenizer.chat_template = template
    if codec.vision is not None:  # its processor is what is saved
        codec.vision.processor.chat_template = template


def _rendered(
    tokenizer: Any, turns: list[Message], tools: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
) -> str | None:
    last = turns[-1]["role"] == "user"
    try:
        return str(
            tokenizer.apply_chat_template(
                turns, tools=list(tools) or None, tokenize=False, add_generation_prompt=last, **(kwargs or {})
            )
        )
    except Exception:  # templates are programs of their authors: some take no system message
        return None
