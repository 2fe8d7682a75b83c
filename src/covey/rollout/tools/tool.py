"""Tools: callables with the schema that the policy is shown, and checks of arguments against it."""

import contextlib
import enum
import functools
import inspect
import math
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Union, get_args, get_origin, get_type_hints

from covey.rollout.tools.calls import decode_json
from covey.runtime.deadlines import LateCalls
from covey.runtime.user_code import unwrap_partial

_HINT = (
    "A tool needs a type hint for every argument and a Google-style docstring that describes itself and each of them"
    " under 'Args:', as `name: description` without the type. A schema written by hand goes in a Tool(name, schema,"
    " function)."
)


@dataclass(frozen=True)
class Tool:
    """One tool; `enums` convert values of arguments that are or hold members of an enumeration."""

    name: str
    schema: dict[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}
    function: Callable[..., Any]  # called with the arguments by name; ordinary or `async`
    enums: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    late: LateCalls = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "late", LateCalls(f"tool {self.name!r}"))
        function = self.schema.get("function") if isinstance(self.schema, dict) else None
        if not isinstance(function, dict) or function.get("name") != self.name:
            wanted = (
                f"{{'type': 'function', 'function': {{'name': {self.name!r}, 'description': ..., 'parameters': ...}}}}"
            )
            raise ValueError(f"the schema of Tool({self.name!r}, ...) must be {wanted}, got {shown(self.schema)}.")

    @classmethod
    def of(cls, function: "Callable[..., Any] | Tool") -> "Tool":
        """A function or method, or an object with `__call__`, described by its type hints and docstring.

        Arguments that `functools.partial` has bound already are not shown to the policy.

        Raises:
            ValueError: no schema can be derived from it.
        """
        if isinstance(function, Tool):
            return function
        if not callable(function) or isinstance(function, type):
            raise ValueError(f"tools must be functions, methods or callable objects, got {shown(function)}. {_HINT}")
        name = _name(function)
        try:
            described = _described(function)
            schema = _schema(function, described)
            hints = get_type_hints(described)
        except Exception as error:  # transformers raises its own kinds, and others for what it did not expect
            reason = " ".join(map(str, error.args)).rstrip(".! ")
            raise ValueError(f"the tool {name!r} cannot be described to the policy: {reason}. {_HINT}") from error
        schema["function"]["name"] = name
        enums = {key: make for key, hint in hints.items() if key != "return" and (make := _members(hint))}
        return cls(name, schema, function, enums)

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        parameters = self.schema["function"].get("parameters") or {}
        closed = {"properties": {}, "additionalProperties": False, **parameters}
        missing = [name for name in parameters.get("required", ()) if name not in given]
        if missing:
            raise WrongArgument(f"{self.name} needs the arguments: {', '.join(missing)}")
        arguments = checked_object(given, closed, "")
        for name, members in self.enums.items():
            if arguments.get(name) is not None:
                arguments[name] = members(arguments[name])
        return arguments


def _name(function: Any) -> str:
    function = unwrap_partial(function)
    return str(getattr(function, "__name__", type(function).__name__))


def _described(function: Any) -> Callable[..., Any]:
    if isinstance(function, functools.partial):
        return _unbound(function)
    if inspect.isfunction(function) or inspect.ismethod(function):
        return function
    if hasattr(function, "__wrapped__"):  # functools.cache
        return _described(inspect.unwrap(function))
    return type(function).__call__


def _unbound(function: functools.partial[Any]) -> Callable[..., Any]:
    """A placeholder with the arguments that are not bound yet; hints of the others may be anything."""
    described = _described(function.func)
    signature = inspect.signature(function)
    left = [one for name, one in signature.parameters.items() if name not in function.keywords]
    hints = get_type_hints(described)

    def placeholder() -> None: ...

    placeholder.__name__ = _name(function)
    placeholder.__doc__ = inspect.getdoc(described)
    placeholder.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
    placeholder.__annotations__ = {one.name: hints[one.name] for one in left if one.name in hints}
    return placeholder


def _members(hint: Any) -> Callable[[Any], Any] | None:
    """Converter from a value that the schema allows to members of enumerations; None where the hint names none."""
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint
    origin, inner = get_origin(hint), get_args(hint)
    each = [_members(one) for one in inner]
    if not any(each):
        return None

    def convert(value: Any) -> Any:
        if origin in (Union, types.UnionType):  # the first that takes it
            for make in filter(None, each):
                with contextlib.suppress(ValueError, TypeError):
                    return make(value)
            return value
        if not isinstance(value, dict if origin is dict else list):
            raise TypeError(f"{value!r} is no {hint}")
        if isinstance(value, dict):
            return {key: each[1](item) if each[1] else item for key, item in value.items()}
        makes = each if origin is tuple else each * len(value)
        return [make(item) if make else item for item, make in zip(value, makes, strict=True)]

    return convert


def _schema(function: Callable[..., Any], described: Callable[..., Any]) -> dict[str, Any]:
    """The schema of a function's arguments; raises ValueError where a call by name could not give them all."""
    from transformers.utils import get_json_schema

    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"its parameter {str(parameter)!r} cannot be given by name.")
    schema: dict[str, Any] = get_json_schema(described)
    known = schema["function"]["parameters"]["properties"]
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in known:
            raise ValueError(
                f"its parameter {parameter.name!r} has no value: give a method as that of an object, as in"
                f" `thing.{_name(function)}`."
            )
    return schema


# --- JSON schemas, as far as those made from type hints go -----------------------------------------------------------
# Known: `type` (one or several), `nullable`, `enum`, `anyOf`, `items`, `prefixItems`, `properties`, `required`,
# `additionalProperties`; other keywords allow everything. Values are not converted: a string of digits is no number.

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
    if isinstance(value, dict):
        return checked_object(value, schema, where)
    if not isinstance(value, list):
        return value
    schemas = schema.get("prefixItems")
    if schemas is None:
        schemas = [schema.get("items") or {}] * len(value)
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

    It is the JSON value that it reads as (also Python's True, False and None), if the schema allows that or allows no
    string either. Everything else stays text, which `checked` refuses where a string is not allowed.
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
