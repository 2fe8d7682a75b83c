"""Tools: callables with the schema that the policy is shown."""

import contextlib
import enum
import functools
import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from covey.rollout.tools.schema import WrongArgument, checked_object, shown

_HINT = (
    "A tool needs a type hint for every argument and a Google-style docstring that describes itself and each of them"
    " under 'Args:', as `name: description` without the type. A schema written by hand goes in a Tool(name, schema,"
    " function)."
)


@dataclass(frozen=True)
class Tool:
    """One tool.

    Attributes:
        name: of the tool for the policy.
        schema: as the chat template gets it, `{"type": "function", "function": {"name", "description", "parameters"}}`.
        function: called with the arguments by name; ordinary or `async`.
        enums: for arguments that are or hold members of an enumeration: converts values to members.
    """

    name: str
    schema: dict[str, Any]
    function: Callable[..., Any]
    enums: dict[str, Callable[[Any], Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError for a schema that is not of a function of this name."""
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
        from transformers.utils import get_json_schema

        if isinstance(function, Tool):
            return function
        if not callable(function) or isinstance(function, type):
            raise ValueError(f"tools must be functions, methods or callable objects, got {shown(function)}. {_HINT}")
        name = _name(function)
        try:
            described = _described(function)
            _refuse_positional(function)
            schema = get_json_schema(described)
            _refuse_missing(function, schema)
            hints = typing.get_type_hints(described)
        except Exception as error:  # transformers raises its own kinds, and others for what it did not expect
            reason = " ".join(map(str, error.args)).rstrip(".! ")
            raise ValueError(f"the tool {name!r} cannot be described to the policy: {reason}. {_HINT}") from error
        schema["function"]["name"] = name
        enums = {key: make for key, hint in hints.items() if key != "return" and (make := _members(hint))}
        return cls(name, schema, function, enums)

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """A call's arguments, checked, as the function gets them."""
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
    if isinstance(function, functools.partial):
        return _name(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def _described(function: Any) -> Callable[..., Any]:
    """The function with the type hints and docstring of a callable."""
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
    hints = typing.get_type_hints(described)

    def placeholder() -> None: ...

    placeholder.__name__ = _name(function)
    placeholder.__doc__ = inspect.getdoc(described)
    placeholder.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
    placeholder.__annotations__ = {one.name: hints[one.name] for one in left if one.name in hints}
    return placeholder


def _members(hint: Any) -> Callable[[Any], Any] | None:
    """Converter from a value that the schema allows to members of enumerations; None where the hint names none.

    It raises ValueError or TypeError for a value of another kind; in a union the next one is tried.
    """
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    each = [_members(one) for one in inner]
    if not any(each):
        return None

    def made(value: Any, make: Callable[[Any], Any] | None) -> Any:
        return value if make is None else make(value)

    def in_union(value: Any) -> Any:
        for make in filter(None, each):
            with contextlib.suppress(ValueError, TypeError):
                return make(value)
        return value

    def in_mapping(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise TypeError(f"{value!r} is no {hint}")
        return {key: made(item, each[1]) for key, item in value.items()}

    def in_list(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise TypeError(f"{value!r} is no {hint}")
        makes = each if origin is tuple else each * len(value)
        return [made(item, make) for item, make in zip(value, makes, strict=True)]

    if origin is dict:
        return in_mapping
    return in_union if origin in (typing.Union, types.UnionType) else in_list


def _refuse_positional(function: Callable[..., Any]) -> None:
    """Raise ValueError for parameters that cannot be given by name, as calls give them."""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"its parameter {str(parameter)!r} cannot be given by name.")


def _refuse_missing(function: Callable[..., Any], schema: dict[str, Any]) -> None:
    """Raise ValueError for a parameter without a default that the schema lacks."""
    known = schema["function"]["parameters"]["properties"]
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is parameter.empty and parameter.name not in known:
            raise ValueError(
                f"its parameter {parameter.name!r} has no value: give a method as that of an object, as in"
                f" `thing.{_name(function)}`."
            )
