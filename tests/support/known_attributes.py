"""Assigning an attribute that Covey's objects do not have is an error in tests.

A test that replaces `trainer.compute_los` would otherwise replace nothing and pass. `guard` covers the classes and
modules of Covey that are imported by then; conftest.py calls it before every test, and `runs.trainer` in scripts.
"""

import inspect
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from covey.runtime.packages import is_own

TESTS = str(Path(__file__).parents[1])
_seen: set[str] = set()


def guard() -> None:
    """Refuse unknown attributes from now on, in every module of Covey that is new since the last call."""
    if len(sys.modules) == len(_seen):
        return
    new = sys.modules.keys() - _seen
    _seen.update(new)
    for name in (name for name in new if is_own(name)):
        module = sys.modules[name]
        module.__class__ = _GuardedModule
        for kind in list(vars(module).values()):
            if isinstance(kind, type) and kind.__module__ == name:
                _guard_class(kind)


class _GuardedModule(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        _check(self, name, sys._getframe(1))
        super().__setattr__(name, value)


def _guard_class(kind: type) -> None:
    refuses_anyway = "__slots__" in vars(kind) or isinstance(vars(kind).get("__setattr__"), FunctionType)
    inherited: Any = kind.__setattr__
    if refuses_anyway or issubclass(kind, (BaseException, type)) or hasattr(inherited, "checks_names"):
        return

    def __setattr__(self: Any, name: str, value: Any) -> None:
        _check(self, name, sys._getframe(1))
        inherited(self, name, value)

    __setattr__.checks_names = True  # type: ignore[attr-defined]
    kind.__setattr__ = __setattr__  # type: ignore[assignment]


def _check(owner: Any, name: str, caller: Any) -> None:
    path = caller.f_code.co_filename
    if not path.startswith(TESTS) or path == __file__ or name.startswith("__") or _has(owner, name):
        return
    if caller.f_locals.get("self") is owner:  # a test's own subclass
        return
    what = owner.__name__ if isinstance(owner, ModuleType) else type(owner).__name__
    raise AttributeError(
        f"{Path(path).name}:{caller.f_lineno} assigns {what}.{name}, which does not exist, so nothing would read it."
        " Replace something that is there (monkeypatch.setattr checks the same), or keep the value elsewhere."
    )


def _has(owner: Any, name: str) -> bool:
    declared = () if isinstance(owner, ModuleType) else map(inspect.get_annotations, type(owner).__mro__)
    return hasattr(type(owner), name) or any(name in names for names in declared) or hasattr(owner, name)
