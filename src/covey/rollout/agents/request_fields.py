"""Reading of request fields, with errors that name the field, and the parts that all APIs have in common."""

import base64
import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from covey.rollout.agents.session import RequestError
from covey.rollout.images import read_image

Body = dict[str, Any]

NO_GRAMMAR = (
    "no grammar is sampled under, as its probabilities are not those that are trained; ask for the form in a message"
)
TEXTS, IMAGES = ("text", "input_text", "output_text"), ("image_url", "input_image", "image")  # kinds of parts
TYPES = {str: "a string", bool: "true or false", int: "a whole number", list: "a list", dict: "an object"}


class Fields:
    """An object in a request with its path, for errors; fields that are null count as missing."""

    def __init__(self, given: Any, path: str):
        if not isinstance(given, dict):
            raise RequestError(f"`{path or 'body'}` is {json.dumps(given)[:99]}, not an object.", param=path or None)
        self.given, self.path, self._prefix = given, path, f"{path}." if path else ""

    def get(self, name: str, *types: type, needed: bool = False) -> Any:
        value = self.given.get(name)
        if type(value) in types or (value is None and not needed):  # true is no number
            return value
        raise self.wrong(name, " or ".join(TYPES[one] for one in types))

    def wrong(self, name: str, allowed: str) -> RequestError:
        path, shown = self._prefix + name, json.dumps(self.given.get(name))[:100]
        return RequestError(f"`{path}` is {shown}; it must be {allowed}.", param=path)

    def inner(self, name: str, needed: bool = False) -> "Fields":
        return Fields(self.get(name, dict, needed=needed) or {}, self._prefix + name)

    def objects(self, name: str, needed: bool = False) -> list["Fields"]:
        values = self.get(name, list, needed=needed) or []
        return [Fields(one, f"{self._prefix}{name}[{i}]") for i, one in enumerate(values)]

    def choice(self, name: str, allowed: Collection[str], otherwise: str | None = None) -> str:
        value: str = self.get(name, str, needed=otherwise is None) or otherwise or ""
        if value not in allowed:
            raise self.wrong(name, " or ".join(map(json.dumps, allowed)))
        return value

    def refuse(self, *names: str, instead: str) -> None:
        for name in names:
            if self.given.get(name):
                raise self.wrong(name, f"left out, as it is not supported: {instead}")

    def content(self, name: str) -> Any:
        """A message's content: its text, or text and images as parts. Thinking that a client sends back is dropped."""
        content = self.get(name, str, list)
        return joined_content(self.objects(name)) if isinstance(content, list) else content or ""

    def call(self, arguments: str) -> Body:
        """A function call, whose arguments may be an object or JSON text."""
        value = self.get(arguments, str, dict) or {}
        with suppress(ValueError, RecursionError):
            value = json.loads(value.strip() or "{}") if isinstance(value, str) else value
        if not isinstance(value, dict):
            raise self.wrong(arguments, "an object, or the JSON of one")
        return {"type": "function", "function": {"name": self.get("name", str, needed=True), "arguments": value}}

    def limit(self, name: str) -> int | None:
        if (limit := self.get(name, int)) is not None and limit < 1:
            raise self.wrong(name, "at least 1")
        return limit

    def stops(self, name: str) -> tuple[str, ...]:
        value = self.get(name, str, list) or []
        stops = [value] if isinstance(value, str) else value
        if not all(isinstance(one, str) for one in stops):
            raise self.wrong(name, "a list of strings")
        return tuple(filter(None, stops))

    def refuse_grammar(self) -> None:
        if self.get("type", str) not in (None, "text"):
            raise self.wrong("type", f'"text": {NO_GRAMMAR}')

    def function(self, schema: str, kind: str = "function") -> Body:
        """The schema of a tool, as OpenAI's chat completions have it."""
        self.choice("type", (kind,), kind)
        parameters, description = self.inner(schema), self.get("description", str) or ""
        shown = parameters.given or {"type": "object", "properties": {}}
        function = {"name": self.get("name", str, needed=True), "description": description, "parameters": shown}
        return {"type": "function", "function": function}


def joined_content(parts: Sequence[Fields]) -> Any:
    kinds = (*TEXTS, *IMAGES, "thinking", "redacted_thinking", "reasoning")
    shown = [(part, kind) for part in parts if (kind := part.choice("type", kinds, "text")) in TEXTS + IMAGES]
    if all(kind in TEXTS for _, kind in shown):
        return "\n".join(part.get("text", str, needed=True) for part, _ in shown)
    return [
        {"type": "text", "text": part.get("text", str, needed=True)}
        if kind in TEXTS
        else {"type": "image", "image": _image(part, kind)}
        for part, kind in shown
    ]


def _image(part: Fields, kind: str) -> Any:
    """The image of a part, only as base64: with an address, this process would read files or contact servers."""
    if kind == "image":
        source = part.inner("source", needed=True)
        source.choice("type", ("base64",))
        data = source.get("data", str, needed=True)
    else:
        holder, name = (part.inner("image_url", needed=True), "url") if kind == "image_url" else (part, "image_url")
        data = holder.get(name, str, needed=True)
        if not data.startswith("data:image/") or "," not in data:
            raise holder.wrong(name, "an image as data:image/...;base64,...")
        data = data.partition(",")[2]
    try:
        return read_image(base64.b64decode(data, validate=True))
    except ValueError as error:
        raise RequestError(f"an image cannot be read: {error}", param=part.path) from error
