"""Findings about chat templates that drop or rewrite parts of a prompt, or do not begin the policy's turn."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from covey.core.findings import Finding
from covey.core.transcript import content_text
from covey.rollout.prompts import PromptCodec, is_conversational, row_tools

_ANSWER = "coveySAID"
_ADVICE = "Change `tokenizer.chat_template`"


def unread_arguments(given: Any, tokenizer: Any) -> list[str]:
    """Keyword arguments that the chat template does not mention."""
    template = getattr(tokenizer, "chat_template", None)
    texts = list(template.values()) if isinstance(template, dict) else [template or ""]
    return [name for name in given or {} if not any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts)]


def check_template(rows: Mapping[int, Any], role: str, codec: PromptCodec) -> Iterator[Finding]:
    """Warnings, at most one per kind, of problems of the chat template with these rows, given by number."""
    said: set[str] = set()
    for number, row in rows.items():
        for kind, text, fix in _complaints(row, codec):
            if kind not in said:
                said.add(kind)
                yield Finding.warning("template", f"row {number} of `{role}`: {text}", fix)


def _complaints(row: Any, codec: PromptCodec) -> Iterator[tuple[str, str, str]]:
    prompt, tools = row.get("prompt"), row_tools(row)
    if row.get("tools") and not tools:
        yield (
            "tools",
            "the column `tools` holds no schemas of functions, so no prompt shows it; only reward functions and"
            " environments get it.",
            "Give dictionaries with a name, a description and parameters, or rename the column.",
        )
    if not is_conversational(prompt):
        if tools:
            yield (
                "tools",
                "the schemas in the column `tools` are not shown, because the prompt is a string, which no chat"
                " template renders.",
                "Write it as messages, or put the tools into the text.",
            )
        if row.get("chat_template_kwargs") and isinstance(prompt, str):
            yield (
                "arguments",
                "the column `chat_template_kwargs` has no effect, because the prompt is a string, which no chat"
                " template renders.",
                "Write it as messages, or remove the column.",
            )
        return
    if codec.vision is not None or getattr(codec.tokenizer, "chat_template", None) is None:
        return
    if unread := unread_arguments(row.get("chat_template_kwargs"), codec.tokenizer):
        yield (
            "arguments",
            f"the column `chat_template_kwargs` has {', '.join(map(repr, unread))}, which the chat template does not"
            " mention, so the prompt is the same without.",
            "",
        )
    kwargs = codec.template_kwargs(row.get("chat_template_kwargs"))
    shown = _rendered(codec, prompt, {"tools": tools or list(codec.tools) or None, **kwargs})
    if tools and shown == _rendered(codec, prompt, {**kwargs, "tools": None}):
        text = "the chat template leaves out the schemas in the column `tools`."
        yield "tools", text, f"{_ADVICE}, or remove the column."
    for message in prompt:
        content, name = content_text(message.get("content")), message["role"]
        if name != "assistant" and _dense(content) not in _dense(shown):
            how = "rewrites" if _shares_words(content, shown) else "leaves out"
            yield (
                f"{name} {how}",
                f"the chat template {how} the message of the role {name!r} ({content[:60]!r}), so the policy reads"
                " something else than the row says.",
                f"{_ADVICE}, or put the text into another message.",
            )
    if prompt[-1]["role"] != "assistant" and (opening := _missing_opening(codec, prompt, kwargs)):
        yield (
            "generation prompt",
            "the chat template has no generation prompt: it writes the same with and without `add_generation_prompt`,"
            f" though an assistant's turn begins with {opening!r}. The policy has to sample that text itself, or"
            " answers in another role.",
            f"{_ADVICE}: end it by {{% if add_generation_prompt %}}{opening!r}{{% endif %}}.",
        )


def _missing_opening(codec: PromptCodec, prompt: Any, kwargs: dict[str, Any]) -> str:
    """Text that the template writes between a prompt and an answer but not as generation prompt; else an empty text."""
    plain = {**kwargs, "add_generation_prompt": False}
    begun = _rendered(codec, prompt, kwargs)
    if begun != _rendered(codec, prompt, plain):
        return ""
    whole = _rendered(codec, [*prompt, {"role": "assistant", "content": _ANSWER}], plain)
    at = whole.find(_ANSWER)
    between = whole[len(begun) : at] if at >= 0 and whole.startswith(begun) else ""
    return between if between.strip() else ""


def _rendered(codec: PromptCodec, messages: Any, kwargs: dict[str, Any]) -> str:
    prefilled = messages[-1]["role"] == "assistant"
    settings = {"add_generation_prompt": not prefilled, **kwargs, "tokenize": False}
    try:
        return str(codec.tokenizer.apply_chat_template(codec.plain_messages(messages), **settings))
    except Exception:  # templates are programs of their authors; one that fails on its row is refused elsewhere
        return ""


def _dense(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _shares_words(content: str, shown: str) -> bool:
    terms = [term for term in re.findall(r"\w+", content.casefold()) if len(term) > 2]
    return bool(terms) and sum(term in shown.casefold() for term in terms) * 2 >= len(terms)
