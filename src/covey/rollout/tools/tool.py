"""`Tool`: a callable with the schema that the policy is shown."""

import enum
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from covey.rollout.tools.schema import WrongArgument, checked_object, shown

_HINT = (
    "A tool needs a type hint for every argument and a Google-style docstring that describes itself and each of them"
    " under 'Args:'. A schema written by hand goes in a Tool(name, schema, function)."
)


@dataclass(frozen=True)
class Tool:
    """One tool.

    Attributes:
        name: what the policy calls it.
        schema: as the chat template gets it, `{"type": "function", "function": {"name", "description", "parameters"}}`.
        function: called with the arguments by name; ordinary or `async`.
        enums: arguments that are given as members of an enumeration rather than as their values.
    """

    name: str
    schema: dict[str, Any]
    function: Callable[..., Any]
    enums: dict[str, type[enum.Enum]] = field(default_factory=dict)

    @classmethod
    def of(cls, function: "Callable[..., Any] | Tool") -> "Tool":
        """A function or method, or an object with `__call__`, described by its type hints and docstring.

        Raises:
            ValueError: no schema can be made of it.
        """
        from transformers.utils import get_json_schema

        if isinstance(function, Tool):
            return function
        described: Any = function
        name = getattr(function, "__name__", type(function).__name__)
        if not callable(function) or isinstance(function, type):
            raise ValueError(f"tools must be functions, methods or callable objects, got {shown(function)}. {_HINT}")
        if not (inspect.isfunction(function) or inspect.ismethod(function)):
            described = type(function).__call__
        try:
            _refuse_unnamed(function)
            schema = get_json_schema(described)
            hints = typing.get_type_hints(described)
        except Exception as error:  # transformers raises its own kinds, and others for what it did not expect
            raise ValueError(f"the tool {name!r} cannot be described to the policy: {error} {_HINT}") from error
        schema["function"]["name"] = name
        enums = {key: hint for key, hint in hints.items() if isinstance(hint, type) and issubclass(hint, enum.Enum)}
        return cls(name, schema, function, enums)

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """A call's arguments, checked, as the function gets them.

        Raises:
            WrongArgument: one is missing, unknown or not what the schema allows.
        """
        parameters = self.schema["function"].get("parameters") or {}
        closed = {"properties": {}, "additionalProperties": False, **parameters}
        missing = [name for name in parameters.get("required", ()) if name not in given]
        if missing:
            raise WrongArgument(f"{self.name} needs the arguments: {', '.join(missing)}")
        arguments = checked_object(given, closed, "")
        for name, kind in self.enums.items():
            if arguments.get(name) is not None:
                arguments[name] = kind(arguments[name])
        return arguments


def _refuse_unnamed(function: Callable[..., Any]) -> None:
    """Calls come with arguments by name, each of which is in the schema."""
    unnamed = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    )
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in unnamed:
            raise ValueError(f"its parameter {str(parameter)!r} cannot be given by name.")
