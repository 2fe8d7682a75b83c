"""Arguments against a tool's JSON schema, as far as schemas made from type hints go.

Known: `type` (one or several), `nullable`, `enum`, `anyOf`, `items`, `prefixItems`, `properties`, `required`,
`additionalProperties`. Other keywords allow everything. Nothing is guessed: a string of digits is no number. Only where
a notation writes every value as plain text does `from_text` ask the schema what it is.
"""

import math
from collections.abc import Callable
from typing import Any

from covey.rollout.tools.calls import decode_json

_IS: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


class WrongArgument(Exception):
    """A value that the schema does not allow; the message is written for the policy."""


def checked(value: Any, schema: dict[str, Any], where: str) -> Any:
    """`value` if the schema allows it. A whole number written as 3.0 becomes 3 where an integer is asked for.

    Args:
        value: a JSON value.
        schema: what it must be.
        where: how the message calls it.

    Raises:
        WrongArgument: it is not allowed.
    """
    if value is None and schema.get("nullable"):
        return None
    if "anyOf" in schema:
        return _any_of(value, schema, where)
    types = schema.get("type")
    if types is not None:
        value = _typed(value, [types] if isinstance(types, str) else list(types), where)
    if "enum" in schema and value not in schema["enum"]:
        raise WrongArgument(f"{where} must be one of {schema['enum']}, not {shown(value)}")
    if isinstance(value, list):
        return _items(value, schema, where)
    if isinstance(value, dict):
        return checked_object(value, schema, where)
    return value


def checked_object(value: dict[str, Any], schema: dict[str, Any], where: str) -> dict[str, Any]:
    """An object with the properties that the schema asks for; of others only if it says what they may be."""
    properties = schema.get("properties")
    missing = [name for name in schema.get("required", ()) if name not in value]
    if missing:
        raise WrongArgument(f"{where} lacks {', '.join(missing)}")
    others = schema.get("additionalProperties", properties is None)
    out = {}
    for name, item in value.items():
        inner = f"{where}.{name[:60]}" if where else f"argument {name[:60]!r}"
        if properties and name in properties:
            out[name] = checked(item, properties[name], inner)
        elif others is False:
            raise WrongArgument(f"there is no {inner}; there {_are(properties or {})}")
        else:
            out[name] = checked(item, others, inner) if isinstance(others, dict) else item
    return out


def from_text(text: str, schema: dict[str, Any]) -> Any:
    """What `text` means in a notation that writes every value as plain text, without quotes.

    It is a string where only a string is asked for. Otherwise it is the JSON value that it reads as, if the schema
    allows that or allows no string either; Python's words for truth and nothing count as JSON's, since chat templates
    write them. Everything else stays text, which `checked` refuses where it must not be.

    Args:
        text: as written.
        schema: what the value must be; `{}` if nobody knows.

    Example:
        >>> from_text("5", {"type": "integer"}), from_text("5", {"type": "string"}), from_text("5", {})
        (5, '5', 5)
    """
    types = _types(schema)
    if types == {"string"}:
        return text
    word = text.strip()
    value = _WORDS[word] if word in _WORDS else decode_json(text)
    if isinstance(value, str):  # no JSON, or a string in quotes, which are part of it here
        return text
    if "string" not in types:
        return value
    try:
        return checked(value, schema, "")
    except WrongArgument:
        return text


def shown(value: Any) -> str:
    """A value in a message: short, whatever it is."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


def _types(schema: dict[str, Any]) -> set[str]:
    """The names of what a value may be; empty if it may be anything."""
    if "anyOf" in schema:
        each = [_types(one) for one in schema["anyOf"]]
        types = set().union(*each) if all(each) else set()
    else:
        types = {schema["type"]} if isinstance(schema.get("type"), str) else set(schema.get("type") or ())
    return types | {"null"} if types and schema.get("nullable") else types


def _typed(value: Any, types: list[str], where: str) -> Any:
    if any(name not in _IS or _IS[name](value) for name in types):
        return value
    if "integer" in types and isinstance(value, float) and value.is_integer():
        return int(value)
    raise WrongArgument(f"{where} must be of type {' or '.join(types)}, not {shown(value)}")


def _any_of(value: Any, schema: dict[str, Any], where: str) -> Any:
    reasons = []
    for one in schema["anyOf"]:
        try:
            return checked(value, one, where)
        except WrongArgument as wrong:
            reasons.append(str(wrong))
    raise WrongArgument("; or ".join(reasons))


def _items(value: list[Any], schema: dict[str, Any], where: str) -> list[Any]:
    first = schema.get("prefixItems")
    if first is not None:
        if len(value) != len(first):
            raise WrongArgument(f"{where} must have {len(first)} items, not {len(value)}")
        return [checked(item, one, f"{where}[{i}]") for i, (item, one) in enumerate(zip(value, first, strict=True))]
    each = schema.get("items")
    return value if each is None else [checked(item, each, f"{where}[{i}]") for i, item in enumerate(value)]


def _are(properties: dict[str, Any]) -> str:
    return f"are: {', '.join(properties)}" if properties else "are none"
