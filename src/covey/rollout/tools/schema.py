"""Validation of arguments against a tool's JSON schema, as far as schemas made from type hints go.

Known: `type` (one or several), `nullable`, `enum`, `anyOf`, `items`, `prefixItems`, `properties`, `required`,
`additionalProperties`. Other keywords allow everything. Values are not converted: a string of digits is no number. Only
where a notation writes every value as plain text does `from_text` ask the schema what it is.
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
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


class WrongArgument(Exception):
    """A value that the schema does not allow; the message is written for the policy."""


def checked(value: Any, schema: dict[str, Any], where: str) -> Any:
    """`value` if the schema allows it. A whole number written as 3.0 becomes 3 where an integer is asked for."""
    if value is None and schema.get("nullable"):
        return None
    if "anyOf" in schema:
        reasons = []
        for one in schema["anyOf"]:
            try:
                return checked(value, one, where)
            except WrongArgument as wrong:
                reasons.append(str(wrong))
        raise WrongArgument("; or ".join(reasons))
    types = schema.get("type")
    if types is not None:
        types = [types] if isinstance(types, str) else list(types)
        if all(name in _IS and not _IS[name](value) for name in types):
            if not ("integer" in types and isinstance(value, float) and value.is_integer()):
                raise WrongArgument(f"{where} must be of type {' or '.join(types)}, not {shown(value)}")
            value = int(value)
    if "enum" in schema and value not in schema["enum"]:
        raise WrongArgument(f"{where} must be one of {schema['enum']}, not {shown(value)}")
    if isinstance(value, list):
        return _checked_items(value, schema, where)
    if isinstance(value, dict):
        return checked_object(value, schema, where)
    return value


def _checked_items(value: list[Any], schema: dict[str, Any], where: str) -> list[Any]:
    schemas = schema.get("prefixItems")
    if schemas is None:
        each = schema.get("items")
        if each is None:
            return value
        schemas = [each] * len(value)
    if len(value) != len(schemas):
        raise WrongArgument(f"{where} must have {len(schemas)} items, not {len(value)}")
    return [checked(item, one, f"{where}[{i}]") for i, (item, one) in enumerate(zip(value, schemas, strict=True))]


def checked_object(value: dict[str, Any], schema: dict[str, Any], where: str) -> dict[str, Any]:
    """An object with the required properties; further ones as `additionalProperties` says. Raises WrongArgument."""
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
            known = f"are: {', '.join(properties)}" if properties else "are none"
            raise WrongArgument(f"there is no {inner}; there {known}")
        else:
            out[name] = checked(item, others, inner) if isinstance(others, dict) else item
    return out


def from_text(text: str, schema: dict[str, Any]) -> Any:
    """The value of `text` in a notation that writes every value as plain text, without quotes.

    It is a string where only a string is asked for. Otherwise it is the JSON value that it reads as, if the schema
    allows that or allows no string either; Python's True, False and None count as JSON's, since chat templates write
    them. Everything else stays text, which `checked` refuses where a string is not allowed.

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
    """A value in a message, shortened to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _types(schema: dict[str, Any]) -> set[str]:
    """Names of the types that a schema allows; empty if it allows any."""
    if "anyOf" in schema:
        each = [_types(one) for one in schema["anyOf"]]
        types = set().union(*each) if all(each) else set()
    else:
        types = {schema["type"]} if isinstance(schema.get("type"), str) else set(schema.get("type") or ())
    return types | {"null"} if types and schema.get("nullable") else types
