"""Encoding of prompts and decoding of completions. A prompt too long for the context is an error, never truncated."""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from covey.core.findings import CheckError
from covey.core.records import Message
from covey.core.special_tokens import CompletionDecoder, added_prefix, without_second
from covey.core.transcript import content_text, without_none
from covey.rollout.images import ImageError, as_parts, has_images, refuse_unsupported_parts, with_images
from covey.rollout.vision import Encoded, Vision

Prompt = str | list[Message]

IMAGE_COLUMNS = ("image", "images")  # columns of a dataset that hold the images of a row: one, or a list of them
_ASKS_FOR_NONE = re.compile(r"content['\"\]]*\s+is\s+(?:not\s+)?none", re.IGNORECASE)  # of chat templates
LONGEST_TOKEN = 256  # characters per token, at most, by which gigabytes of text are refused without encoding them


def sample_seed(*key: int | str) -> int:
    """A 63-bit seed, hashed from the parts of the key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def is_conversational(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict) and "role" in prompt[0]


def are_messages(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(map(_is_message, prompt))


def _is_message(message: Any) -> bool:
    """True for a message with a role and with content or tool calls; each text part must have text."""
    if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
        return False
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return (isinstance(content, str | list) and all(map(_is_part, parts))) or bool(message.get("tool_calls"))


def _is_part(part: Any) -> bool:
    """True for a text part; in a table, parts of other types have None as their text."""
    if not isinstance(part, dict):
        return isinstance(part, str)
    text = part.get("text")
    return isinstance(text, str) or (text is None and part.get("type", "text") != "text")


def characters(prompt: Any) -> int:
    """Number of characters of a text, or of all texts in messages."""
    if isinstance(prompt, list):
        return sum(characters(item.get("content", item.get("text"))) for item in prompt if isinstance(item, dict))
    return len(prompt) if isinstance(prompt, str) else 0


def row_images(row: Mapping[str, Any]) -> list[Any]:
    """The images in a row's columns as they are given; [] without any. ValueError if both columns have some."""
    found: list[Any] = []
    for name in IMAGE_COLUMNS:
        value = row.get(name)
        if value is None or (isinstance(value, list | tuple) and not value):
            continue
        if found:
            raise ImageError("both columns, 'image' and 'images', hold images. Put a row's images into one of them.")
        found = list(value) if isinstance(value, list | tuple) else [value]
    return [image for image in found if image is not None] if found else found


def row_tools(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tool schemas in a row's column `tools`, a list or JSON; [] if it holds anything else."""
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            return []
    found = without_none(tools) if isinstance(tools, list | tuple) else []
    return found if all(map(_is_schema, found)) else []


def _is_schema(tool: Any) -> bool:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


class ControlTokens:
    """Control tokens in the text of messages, which are replaced by private characters (`hidden`) while rendering."""

    def __init__(self, tokenizer: Any, allowed: bool = False):
        texts = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special} - {""}
        self.tokenizer, self.texts = tokenizer, [] if allowed else sorted(texts, key=len, reverse=True)
        # Private characters that a message already has are replaced as well, so that none is taken for a control token.
        patterns = [] if allowed else [*map(re.escape, self.texts), "[\U000f0000-\U0010ffff]"]
        self._pattern = re.compile("|".join(patterns) or "(?!)")
        # Of texts that were hidden: asking the tokenizer switches its state.
        self._ids: dict[tuple[str, bool], list[int]] = {}

    def hide(self, text: str, hidden: dict[str, str]) -> str:
        """The text with control tokens replaced by private characters, which are added to `hidden`."""
        return self._pattern.sub(lambda found: hidden.setdefault(found[0], chr(0xF0000 + len(hidden))), text)

    def encode(self, rendered: str, hidden: dict[str, str]) -> list[int]:
        """Tokens of a rendered conversation, in which each private character becomes the text that it replaced."""
        ids: list[int] = []
        before = ""
        controls = {character: control for control, character in hidden.items()}
        for piece in re.split(f"([{''.join(controls)}])", rendered) if hidden else [rendered]:
            inside = bool(before) and self._prefixes_text
            if inside and before.endswith(tuple(self.texts)):
                inside = not self._prefixes_after_control
            ids += self._as_text(controls[piece], inside) if piece in controls else self._tokens(piece, False, inside)
            before = piece or before
        return ids

    @cached_property
    def _prefixes_text(self) -> bool:
        """True if the tokenizer puts a space before every text (sentencepiece); pieces of a text must not have it."""
        return self._tokens("b", False, False) != self._tokens("b", False, True)

    @cached_property
    def _prefixes_after_control(self) -> bool:
        return self._tokens(self.texts[0] + "b", False, False)[1:] == self._tokens("b", False, False)

    def _as_text(self, control: str, inside: bool) -> list[int]:
        if (control, inside) not in self._ids:
            self._ids[control, inside] = self._tokens(control, True, inside)
        return self._ids[control, inside]

    def _tokens(self, text: str, is_text: bool, inside: bool) -> list[int]:
        """Tokens of a text; `inside`: without the space that the tokenizer puts before every text."""
        both = ["\n", "\n" + text] if inside else [text]
        found = self.tokenizer(both, add_special_tokens=False, split_special_tokens=is_text)["input_ids"]
        return list(found[-1][len(found[0]) if inside else 0 :])


class PromptTooLong(CheckError):
    """A prompt that leaves no room for a completion in the model's context."""


@dataclass(eq=False, repr=False)
class PromptCodec:
    """Encodes prompts and decodes completions with one tokenizer."""

    tokenizer: Any
    chat_template_kwargs: dict[str, Any] | None
    max_context: int | None
    tools: Sequence[dict[str, Any]] = ()
    vision: Vision | None = None
    allow_control_tokens: bool = False  # control tokens in the text of messages are control tokens, not their text
    shown_tokens: Collection[str] = ()  # further special tokens to keep in the text of completions

    def read_row(self, row: dict[str, Any]) -> Encoded:
        """Tokens of a dataset row's prompt, with the images in its columns; ValueError as in `read`."""
        prompt = row.get("prompt")
        if not isinstance(prompt, str) and not are_messages(prompt):
            raise _no_prompt(prompt)
        tools = row_tools(row) if is_conversational(prompt) else []
        return self.read(prompt, row.get("chat_template_kwargs"), tools or None, row_images(row))

    def read(
        self,
        prompt: Prompt | None,
        row_kwargs: dict[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        images: Sequence[Any] = (),
    ) -> Encoded:
        """Tokens of a prompt, and its images; a last message of the assistant is continued by the policy.

        ValueError (CheckError, ImageError) if the prompt is empty, too long, or cannot be rendered.
        """
        chat = is_conversational(prompt)
        if self.max_context is not None and characters(prompt) > LONGEST_TOKEN * self.max_context:
            raise PromptTooLong.of(
                "prompt-round-trip",
                f"a prompt of {characters(prompt)} characters leaves no room to answer in the model's context of"
                f" {self.max_context} tokens.",
                "Prompts are never truncated; shorten or filter such rows.",
            )
        if chat:
            refuse_unsupported_parts(prompt)
        if self.vision is None and (images or (chat and has_images(prompt))):
            raise ImageError(
                "there are images in the prompt or in a column 'image' or 'images', and this model would not see them:"
                " it is trained with a tokenizer alone. Give a vision-language model and its processor"
                " (`processing_class`), or remove them, as by `dataset.remove_columns('image')`."
            )
        if chat:
            encoded = self._encode_chat(prompt, row_kwargs, self.tools if tools is None else tools, images)
        else:
            encoded = self._encode_text(prompt, images)
        if not encoded.ids:
            evidence = f"the prompt {_shorten(prompt)} is empty: it encodes to no tokens."
            raise CheckError.of("prompt-round-trip", evidence, "Remove the row.")
        if self.max_context is not None and len(encoded.ids) >= self.max_context:
            raise PromptTooLong.of(
                "prompt-round-trip",
                f"a prompt of {len(encoded.ids)} tokens leaves no room to answer in the model's context of"
                f" {self.max_context}: {_shorten(prompt)}.",
                "Prompts are never truncated; shorten or filter such rows.",
            )
        return encoded

    def _encode_text(self, prompt: Any, images: Sequence[Any]) -> Encoded:
        if not isinstance(prompt, str):
            raise _no_prompt(prompt)
        prompt.encode()  # half of a surrogate pair is a ValueError here and a TypeError of the tokenizer
        if images and self.vision is not None:
            return self.vision.encode(prompt, images, **self._unless_begun(prompt))
        ids = without_second(list(self.tokenizer(prompt)["input_ids"]), self._prefix)
        if ids and ids[-1] == self.tokenizer.eos_token_id and not prompt.endswith(self.tokenizer.eos_token):
            ids.pop()  # a tokenizer that closes every text would have the policy continue after the end
        return Encoded(ids)

    def template_kwargs(self, row_kwargs: dict[str, Any] | None) -> dict[str, Any]:
        """Arguments of the chat template for a row: the config's and the row's own."""
        if not isinstance(row_kwargs or {}, dict):
            raise CheckError.of(
                "row-type",
                f"`chat_template_kwargs` of a row must be a dictionary, got {type(row_kwargs).__name__}:"
                f" {_shorten(row_kwargs)}.",
                "Write arguments of the chat template by name, or remove the column.",
            )
        return {**(self.chat_template_kwargs or {}), **without_none(row_kwargs or {})}

    def _encode_chat(
        self, messages: Any, row_kwargs: dict[str, Any] | None, tools: Sequence[dict[str, Any]], images: Sequence[Any]
    ) -> Encoded:
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise CheckError.of(
                "template",
                "the dataset's prompts are conversations but the tokenizer has no chat template.",
                "Set `tokenizer.chat_template`, use an instruction-tuned model, or give prompts as plain strings.",
            )
        kwargs = self.template_kwargs(row_kwargs)
        prefilled = messages[-1]["role"] == "assistant"  # the policy continues its message
        if self.vision is not None:
            messages, images = with_images(messages, images)
        messages = list(map(self._without_none, messages))
        hidden: dict[str, str] = {}
        if self.vision is None:
            messages = self._plain(messages, hidden)
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=not prefilled,
                continue_final_message=prefilled,
                tokenize=self.vision is None and not hidden,
                return_dict=False,
                **{**({"tools": list(tools)} if tools else {}), **kwargs},
            )
        except Exception as error:  # templates are programs of their authors: they raise anything
            raise CheckError.of(
                "template",
                f"the tokenizer's chat template cannot render {_shorten(messages)}: {type(error).__name__}: {error}.",
                "Change the messages (roles, order, content), `chat_template_kwargs` or `tokenizer.chat_template`.",
            ) from error
        if self.vision is None:
            return Encoded(self.controls.encode(rendered, hidden) if hidden else list(rendered))
        return self.vision.encode(rendered, images, **self._unless_begun(rendered))

    @cached_property
    def _prefix(self) -> list[int]:
        return added_prefix(self.tokenizer)

    def _unless_begun(self, text: str) -> dict[str, bool]:
        """Settings of a processor, which unlike a tokenizer adds special tokens only if the text lacks them."""
        bos = self.tokenizer.bos_token
        ids = list(self.tokenizer(text[:LONGEST_TOKEN])["input_ids"])
        begun = without_second(ids, self._prefix) is not ids or (bos is not None and text.startswith(bos))
        return {"add_special_tokens": False} if begun else {}

    @cached_property
    def text_of(self) -> CompletionDecoder:
        """Decodes completions as reward functions see them."""
        return CompletionDecoder(self.tokenizer, self.shown_tokens)

    def plain_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as the chat template gets them, except that control tokens are not replaced."""
        plain = list(map(self._without_none, messages))
        if self._prints_parts:
            plain = [{**one, "content": content_text(one["content"])} if one["content"] else one for one in plain]
        return plain

    def _without_none(self, message: Message) -> Message:
        """A message without keys that are None; missing content becomes None or "", as the template expects."""
        found = without_none(message)
        if found.get("content") is None:
            found["content"] = None if _ASKS_FOR_NONE.search(str(self.tokenizer.chat_template)) else ""
        return found

    @cached_property
    def controls(self) -> "ControlTokens":
        return ControlTokens(self.tokenizer, self.allow_control_tokens)

    @cached_property
    def _prints_parts(self) -> bool:
        """True if the chat template cannot render a list of text parts: it prints or drops the list."""
        probe = [{"role": "user", "content": [{"type": "text", "text": "probe"}]}]
        try:
            shown = self.tokenizer.apply_chat_template(probe, tokenize=False)
        except Exception:  # templates are programs of their authors: they raise anything
            return True
        return "'text'" in shown or "probe" not in shown

    def _plain(self, messages: Any, hidden: dict[str, str]) -> Any:
        """Messages for the template: text parts joined, control tokens replaced except in the assistant's messages."""
        plain = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, list):
                content = content_text(content) if self._prints_parts else as_parts(content)
            shown = {**message, "role": self.controls.hide(message["role"], hidden)}
            if message["role"] != "assistant":
                content = self._hide(content, hidden)
            if content is not message.get("content"):
                shown["content"] = content
            plain.append(shown)
        return plain

    def _hide(self, content: Any, hidden: dict[str, str]) -> Any:
        if isinstance(content, str):
            return self.controls.hide(content, hidden)
        if isinstance(content, list):
            return [self._hide(part, hidden) for part in content]
        if isinstance(content, dict) and isinstance(text := content.get("text"), str):
            return {**content, "text": self.controls.hide(text, hidden)}
        return content

    def decode(self, prompt: Prompt, completion_ids: list[int]) -> str | list[Message]:
        """The completion as reward functions get it: text, or one assistant message (with its prefill, if any)."""
        text = self.text_of(completion_ids)
        if not is_conversational(prompt):
            return text
        return [{"role": "assistant", "content": prefill(prompt) + text}]


def prefill(messages: Any) -> str:
    """Text of the assistant's message that the policy continues; empty if the policy begins a new one."""
    content = messages[-1].get("content") if messages[-1]["role"] == "assistant" else ""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content or ""


def _no_prompt(prompt: Any) -> CheckError:
    return CheckError.of(
        "prompt-type",
        f"a prompt must be a string or a non-empty list of messages with 'role' and 'content', got"
        f" {type(prompt).__name__}: {_shorten(prompt)}",
    )


def _shorten(value: Any, width: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= width else text[: width - 1] + "…"
