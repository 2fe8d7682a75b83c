"""Whether a value is plain: made of what a checkpoint holds and gives back without running anybody's code."""

from typing import Any

from torch import Tensor

ATOMS = (type(None), bool, int, float, str, Tensor)
CONTAINERS = (list, tuple, set)


def odd_part(value: Any, name: str) -> str | None:
    """The first part of a value that is not plain, in words; None if there is none.

    Args:
        value: numbers, text, tensors, and lists, tuples, sets and dictionaries of them are plain.
        name: of the value.

    Example:
        >>> odd_part({"scores": [1.0, 2.0], "judge": object()}, "extras")
        "extras['judge'] is a object"
        >>> odd_part([1, ("a", None)], "extras")
    """
    if type(value) in ATOMS:  # not a subclass: numpy's numbers are some, and come with code of their own
        return None
    if type(value) is dict:
        keys = next((f"a key of {name} is a {type(key).__name__}" for key in value if type(key) not in ATOMS), None)
        return keys or _first(odd_part(part, f"{name}[{key!r}]") for key, part in value.items())
    if type(value) in CONTAINERS:
        return _first(odd_part(part, f"{name}[{place}]") for place, part in enumerate(value))
    return f"{name} is a {type(value).__name__}"


def _first(found: Any) -> str | None:
    return next((one for one in found if one is not None), None)
