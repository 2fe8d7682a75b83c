"""Dictionary of named values that users extend."""

import difflib
from typing import TypeVar

T = TypeVar("T")


class Registry(dict[str, T]):
    """Values of one kind by name; an unknown name raises an error with the known ones."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def register(self, name: str, value: T) -> T:
        """Add `value` under `name` and return it. Raises ValueError if another value has the name."""
        if name in self and self[name] is not value:
            raise ValueError(f"{self.kind} {name!r} is already registered; choose another name.")
        self[name] = value
        return value

    def __missing__(self, name: str) -> T:
        close = difflib.get_close_matches(str(name), self, n=1)
        hint = f" did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown {self.kind} {name!r};{hint} Known: {', '.join(sorted(self))}.")
