"""Import paths of functions on command lines: `path/to/file.py:name`, `module:name` or `module.name`."""

import functools
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

FORMS = "'path/to/file.py:name', 'module:name' or 'module.name'"


def is_reference(text: str) -> bool:
    source, colon, attribute = text.rpartition(":")
    if colon:
        return source.endswith(".py") or (_is_dotted(source) and attribute.isidentifier())
    return "." in text and _is_dotted(text)


def resolve(text: str, kind: str, forms: str = FORMS, needs_call: bool = True) -> Any:
    """Import a function, or any object unless it `needs_call`; ValueError for text without one of the `forms`."""
    text = text.strip()
    if not is_reference(text):
        raise ValueError(f"{kind} {text!r} names no function. Write {forms}.")
    source, _, attribute = text.rpartition(":" if ":" in text else ".")
    if ":" in text and source.endswith(".py"):
        path = Path(source).resolve()
        if not path.is_file():
            raise ValueError(f"{kind} file {str(path)!r} does not exist.")
        module = _load_file(path)
    else:
        module = _import(source, f"{kind} {text!r}", forms)
    found = getattr(module, attribute, None)
    if found is not None and (callable(found) or not needs_call):
        return found
    functions = sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
    reason = "is not callable" if found is not None else "does not exist"
    there = ", ".join(functions[:30]) or "no functions"
    raise ValueError(f"{kind} {text!r}: {attribute!r} {reason}. There: {there}.")


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _import(module: str, what: str, forms: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise  # the module exists; something it imports does not
        raise ValueError(f"{what}: there is no module {error.name!r}. Write {forms}.") from error


@functools.cache
def _load_file(path: Path) -> Any:
    name = path.stem if path.stem not in sys.modules else f"covey_file_{path.stem}"  # never replace a module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that what it defines can be pickled
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
