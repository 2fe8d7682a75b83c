"""Tools: callables with a schema, which the policy is shown and arguments are checked against."""

import contextlib
import enum
import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from covey.rollout.tools.schema import ArgumentSchema, WrongArgument, shown
from covey.runtime.deadlines import LateCalls
from covey.runtime.user_code import unwrap_partial

_HINT = (
    "A tool needs a type hint for every argument and a Google-style docstring that describes itself and each of them"
    " under 'Args:', as `name: description` without the type. A schema written by hand goes in a Tool(name, schema,"
    " function)."
)

_SCALARS: dict[Any, Any] = {str: str, int: int, float: (int, float), bool: bool, types.NoneType: types.NoneType}
"""Types in hints whose values are recognised without a schema, with the types that JSON gives for them."""


@dataclass(frozen=True)
class Tool:
    """One tool; `enums` convert arguments whose type hints name enumerations."""

    name: str
    schema: dict[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}
    function: Callable[..., Any]  # called with the arguments by name; ordinary or `async`
    enums: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    allowed: ArgumentSchema = field(init=False, repr=False, compare=False)
    late: LateCalls = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "late", LateCalls(f"tool {self.name!r}"))
        function = self.schema.get("function") if isinstance(self.schema, dict) else None
        if not isinstance(function, dict) or function.get("name") != self.name:
            wanted = (
                f"{{'type': 'function', 'function': {{'name': {self.name!r}, 'description': ..., 'parameters': ...}}}}"
            )
            raise ValueError(f"the schema of Tool({self.name!r}, ...) must be {wanted}, got {shown(self.schema)}.")
        parameters = {"properties": {}, "additionalProperties": False, **(function.get("parameters") or {})}
        try:
            object.__setattr__(self, "allowed", ArgumentSchema(parameters))
        except ValueError as error:
            raise ValueError(
                f"the `parameters` in the schema of Tool({self.name!r}, ...) are no JSON schema: {error}."
            ) from error

    @classmethod
    def of(cls, function: "Callable[..., Any] | Tool") -> "Tool":
        """A function or method, or an object with `__call__`, described by its type hints and docstring.

        Arguments that are already bound by `functools.partial` are not shown to the policy.

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
        missing = [name for name in parameters.get("required", ()) if name not in given]
        if missing:
            raise WrongArgument(f"{self.name} needs the arguments: {', '.join(missing)}")
        arguments: dict[str, Any] = self.allowed.checked(given)
        for name, members in self.enums.items():
            if arguments.get(name) is not None:
                try:
                    arguments[name] = members(arguments[name])
                except (ValueError, TypeError) as error:  # some versions of transformers describe unions less exactly
                    raise WrongArgument(f"argument {name!r}: {error}") from error
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
    """A placeholder function with only the arguments that are not bound; bound ones may have any type hint."""
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
    """Function that converts allowed values to members of enumerations; None if the type hint has none."""
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
            others = [one for one, make in zip(inner, each, strict=True) if make is None]
            if all(one in _SCALARS and not isinstance(value, _SCALARS[one]) for one in others):
                raise TypeError(f"{value!r} is no {hint}")
            return value  # its schema has checked other kinds
        if not isinstance(value, dict if origin is dict else list):
            raise TypeError(f"{value!r} is no {hint}")
        if isinstance(value, dict):
            return {key: each[1](item) if each[1] else item for key, item in value.items()}
        makes = each if origin is tuple else each * len(value)
        return [make(item) if make else item for item, make in zip(value, makes, strict=True)]

    return convert


def _with_literals(described: Callable[..., Any]) -> Callable[..., Any]:
    """A placeholder with the values of enumerations as literals, which all versions of transformers describe."""
    hints = get_type_hints(described)
    if not any(_members(hint) for hint in hints.values()):
        return described

    def placeholder() -> None: ...

    placeholder.__name__ = _name(described)
    placeholder.__doc__ = inspect.getdoc(described)
    placeholder.__signature__ = inspect.signature(described)  # type: ignore[attr-defined]
    placeholder.__annotations__ = {name: _literal(hint) for name, hint in hints.items()}
    return placeholder


def _literal(hint: Any) -> Any:
    """A type hint with `Literal`s in place of enumerations."""
    if _members(hint) is None:
        return hint
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return Literal[tuple(member.value for member in hint)]
    origin, inner = get_origin(hint), tuple(_literal(one) for one in get_args(hint))
    return Union[inner] if origin in (Union, types.UnionType) else origin[inner]  # noqa: UP007  # of a tuple


def _schema(function: Callable[..., Any], described: Callable[..., Any]) -> dict[str, Any]:
    """The schema of a function's arguments; ValueError if one of them cannot be given by name."""
    from transformers.utils import get_json_schema

    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"its parameter {str(parameter)!r} cannot be given by name.")
    schema: dict[str, Any] = get_json_schema(_with_literals(described))
    known = schema["function"]["parameters"]["properties"]
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in known:
            raise ValueError(
                f"its parameter {parameter.name!r} has no value: pass the method of an object, as in"
                f" `thing.{_name(function)}`."
            )
    return schema
