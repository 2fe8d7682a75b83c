"""Attributes of Covey's objects that other objects assign."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import covey

SOURCE = str(Path(covey.__file__).parent)


@contextmanager
def noted(*packages: str) -> Iterator[list[str]]:
    """Within, assignments to objects of classes of these packages by code of Covey that is no method of theirs.

    An assignment is an object's own if `self` of the assigning function is that object. Generated code, such as that of
    dataclasses, has no file and is left out.
    """
    found: list[str] = []
    with ExitStack() as patched:
        for kind in sorted(_classes(packages), key=lambda kind: len(kind.__mro__)):
            patched.enter_context(mock.patch.object(kind, "__setattr__", _noting(kind, found)))
        yield found


def _classes(packages: tuple[str, ...]) -> set[type]:
    modules = [module for name, module in sys.modules.items() if name.startswith(packages)]
    kinds = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    own = {kind for kind in kinds if kind.__module__.startswith(packages)}
    return {kind for kind in own if not issubclass(kind, (BaseException, type))}


def _noting(kind: type, found: list[str]) -> Any:
    assign = kind.__setattr__

    def __setattr__(self: Any, name: str, value: Any) -> None:
        caller = sys._getframe(1)
        path = caller.f_code.co_filename
        if path.startswith(SOURCE) and caller.f_locals.get("self") is not self:
            place = f"{Path(path).relative_to(SOURCE)}:{caller.f_lineno}"
            found.append(f"{place} {caller.f_code.co_qualname} assigns {type(self).__name__}.{name}")
        assign(self, name, value)

    return __setattr__
