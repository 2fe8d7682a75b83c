"""Copies of plain data for other people's code, which may change what it is given."""

from types import NoneType
from typing import Any

ATOMS = frozenset({int, float, bool, str, bytes, complex, NoneType})
"""Types whose values nobody can change."""


class PlainCopies:
    """Copies lists, tuples, dictionaries and sets, all the way down. Everything else is shared.

    What is one object in the original is one in the copy, so a row that many samples share is copied once.

    Example:
        >>> shared = [1, 2]
        >>> copied = PlainCopies().copy([shared, shared, {"a": shared}])
        >>> copied[0].append(3)
        >>> shared, copied
        ([1, 2], [[1, 2, 3], [1, 2, 3], {'a': [1, 2, 3]}])
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Any, Any]] = {}  # with the originals, whose ids nobody else may get meanwhile

    def copy(self, value: Any) -> Any:
        """A copy of `value`, or `value` where nobody can change it or nobody knows how to copy it."""
        kind = type(value)
        if kind not in (list, tuple, dict, set):
            return value
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        if kind is not dict and ATOMS.issuperset(map(type, value)):
            copied: Any = value if kind is tuple else value.copy()  # long lists of numbers, without a look at each
            self._copies[id(value)] = value, copied
        elif kind is tuple:
            copied = tuple([self.copy(item) for item in value])
            self._copies[id(value)] = value, copied
        else:
            copied = kind()
            self._copies[id(value)] = value, copied  # first: it may contain itself
            if kind is dict:
                copied.update((key, self.copy(item)) for key, item in value.items())
            else:
                extend = copied.extend if kind is list else copied.update
                extend([self.copy(item) for item in value])
        return copied
