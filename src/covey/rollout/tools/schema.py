"""Checks of call arguments against JSON schemas, by `jsonschema`; errors are written for the policy, which may retry.

Schemas may be made by transformers from type hints, or by hand. `nullable` works as in OpenAPI, and a property is
refused unless `properties` names it or `additionalProperties` allows it.
"""

import math
from typing import Any

from covey.rollout.tools.calls import decode_json

MAX_MESSAGE = 200  # most characters of an error that jsonschema has written, which quotes the value
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_COMPOSED = {"$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties", "unevaluatedProperties"}
"""Keywords whose subschemas may name further properties of the same object."""


class WrongArgument(Exception):
    """A value that the schema does not allow; the message is written for the policy."""


class ArgumentSchema:
    """The schema of all arguments of a tool, or of one argument; ValueError if it is not a JSON schema."""

    def __init__(self, schema: dict[str, Any]):
        from jsonschema import exceptions, validators  # takes a tenth of a second, and needs no run without tools
        from referencing import Registry

        standard = _standard(schema)
        kind = validators.extend(
            validators.validator_for(standard, default=validators.Draft202012Validator),
            type_checker=validators.Draft202012Validator.TYPE_CHECKER.redefine("number", _is_number),
        )
        try:
            kind.check_schema(standard)
        except exceptions.SchemaError as error:
            raise ValueError(f"{'.'.join(map(str, error.path)) or 'the schema'}: {error.message}") from error
        self._validator = kind(standard, registry=Registry())  # nothing is fetched for a reference

    def checked(self, value: Any) -> Any:
        """`value` if the schema allows it, with 3.0 as 3 where the schema needs an integer; else WrongArgument."""
        from referencing.exceptions import Unresolvable

        try:
            error = min(self._validator.iter_errors(value), key=_by_depth, default=None)
        except Unresolvable as missing:
            raise WrongArgument(f"the tool's schema has a reference that leads nowhere: {missing}") from missing
        if error is not None:
            raise WrongArgument(_message(error))
        return _with_integers(value, self._validator)


def from_text(text: str, schema: dict[str, Any]) -> Any:
    """The value of `text` in a notation that writes every value as plain text, without quotes.

    If the text is JSON (or Python's True, False or None) and the schema allows that value, or does not allow strings,
    it is that value. Otherwise it is the text itself, which a check refuses if the schema does not allow strings.
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
        return ArgumentSchema(schema).checked(value)
    except WrongArgument:
        return text


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_number(checker: Any, value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _standard(schema: Any, closes: bool = True) -> Any:
    """The schema in standard JSON Schema: without `nullable`, objects closed, tuples of a fixed length."""
    if isinstance(schema, list):
        return [_standard(one, closes) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    overlaps = "properties" in made and bool(_COMPOSED & made.keys())  # the parts describe one object together
    for name in ("items", "prefixItems", "additionalProperties"):
        if name in made:
            made[name] = _standard(made[name])
    for name in ("anyOf", "oneOf", "allOf", "not", "if", "then", "else"):
        if name in made:
            made[name] = _standard(made[name], closes=name in ("anyOf", "oneOf") and not overlaps)
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(made.get(name), dict):
            made[name] = {key: _standard(one) for key, one in made[name].items()}
    if closes and "properties" in made and not overlaps:
        made.setdefault("additionalProperties", False)
    if "prefixItems" in made and "items" not in made:
        made |= {"minItems": len(made["prefixItems"]), "maxItems": len(made["prefixItems"])}
    return {"anyOf": [{"type": "null"}, made]} if made.pop("nullable", False) else made


def _with_integers(value: Any, validator: Any) -> Any:
    """A valid value, with 3.0 replaced by 3 where the schema needs an integer."""
    schema = validator.schema
    if not isinstance(schema, dict):
        return value
    for name in ("anyOf", "oneOf"):
        for one in schema.get(name, ()):
            inner = validator.evolve(schema=one)
            if inner.is_valid(value):
                return _with_integers(value, inner)
    if isinstance(value, float) and value.is_integer():
        kinds = schema.get("type", ())
        kinds = {kinds} if isinstance(kinds, str) else set(kinds)
        return int(value) if "integer" in kinds and "number" not in kinds else value
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        return {
            name: _with_integers(item, validator.evolve(schema=known.get(name, others))) for name, item in value.items()
        }
    if isinstance(value, list):
        first, others = schema.get("prefixItems", []), schema.get("items", True)
        schemas = [*first[: len(value)], *[others] * (len(value) - len(first))]
        return [_with_integers(item, validator.evolve(schema=one)) for item, one in zip(value, schemas, strict=True)]
    return value


def _types(schema: dict[str, Any]) -> set[str]:
    """Names of the types that a schema allows; empty if it allows any."""
    if "anyOf" in schema:
        each = [_types(one) for one in schema["anyOf"]]
        types = set().union(*each) if all(each) else set()
    else:
        types = {schema["type"]} if isinstance(schema.get("type"), str) else set(schema.get("type") or ())
    return types | {"null"} if types and schema.get("nullable") else types


# ---- errors ----------------------------------------------------------------------------------------------------------


def _by_depth(error: Any) -> tuple[int, bool]:
    """Sorting key of errors: an error of a whole value comes before errors of its parts."""
    return len(error.path), error.validator in ("anyOf", "oneOf")


def _place(path: Any) -> str:
    """`argument 'table'.rows[2]`, or nothing for all arguments together."""
    names = list(path)
    if not names:
        return ""
    parts = [f"[{name}]" if isinstance(name, int) else f".{name[:60]}" for name in names[1:]]
    return "".join([f"argument {names[0][:60]!r}" if isinstance(names[0], str) else f"[{names[0]}]", *parts])


def _message(error: Any) -> str:
    where, expected, value = _place(error.absolute_path), error.validator_value, error.instance
    match error.validator:
        case "type":
            kinds = [expected] if isinstance(expected, str) else expected
            return f"{where} must be of type {' or '.join(kinds)}, not {shown(value)}"
        case "enum":
            return f"{where} must be one of {expected}, not {shown(value)}"
        case "required":
            return f"{where or 'the call'} lacks {', '.join(name for name in expected if name not in value)}"
        case "additionalProperties" if expected is False:
            known = error.schema.get("properties", {})
            other = next(name for name in value if name not in known)
            named = f"are: {', '.join(known)}" if known else "are none"
            return f"there is no {_place([*error.absolute_path, other])}; there {named}"
        case "minItems" | "maxItems" if "prefixItems" in error.schema:
            return f"{where} must have {expected} items, not {len(value)}"
        case "anyOf" | "oneOf" if error.context:
            first = {one.schema_path[0]: one for one in reversed(error.context)}
            nulls = [one for one in error.context if one.validator == "type" and one.validator_value == "null"]
            reasons = [_message(one) for _, one in sorted(first.items()) if one not in nulls]
            return "; or ".join(reasons or map(_message, nulls))
    text = error.message if len(error.message) <= MAX_MESSAGE else f"{error.message[:MAX_MESSAGE]}..."
    return f"{where or 'the call'}: {text}"
