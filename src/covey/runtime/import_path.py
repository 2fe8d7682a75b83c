"""Import paths of functions on command lines: `path/to/file.py:name`, `module:name` or `module.name`."""

import difflib
import functools
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from covey.runtime.definitions import (
    ADVICE,
    RunsWhenLoaded,
    definitions_only,
    load_file,
    names_of_functions,
    script_line,
)
from covey.runtime.user_code import format_error, place_of, warn

FORMS = "'path/to/file.py:name', 'module:name' or 'module.name'"


def is_reference(text: str) -> bool:
    source, colon, attribute = text.rpartition(":")
    if colon:
        return source.endswith(".py") or (_is_dotted(source) and attribute.isidentifier())
    return "." in text and _is_dotted(text)


def resolve(text: str, kind: str, forms: str = FORMS, needs_call: bool = True) -> Any:
    """Import a function (with `needs_call=False` any object); ValueError for text in none of the `forms`.

    A training script is not run again: if a file trains at its top level, only the statements that the name needs are
    executed. `RunsWhenLoaded` if these are the ones that train.
    """
    text = text.strip()
    if not is_reference(text):
        raise ValueError(f"{kind} {text!r} names no function. Write {forms}.")
    source, _, attribute = text.rpartition(":" if ":" in text else ".")
    if ":" in text and source.endswith(".py"):
        module = _load_file(check_file(source, kind))
    else:
        module = _import(source, f"{kind} {text!r}", forms)
    try:
        found = getattr(module, attribute, None)
    except (KeyboardInterrupt, RunsWhenLoaded):
        raise
    except BaseException as error:  # of what a script's function needs
        raise _not_run(source, error) from error
    if found is not None and (callable(found) or not needs_call):
        return found
    reason = "is not callable" if found is not None else "does not exist"
    there = ", ".join(names_of_functions(module)[:30]) or "no functions"
    raise ValueError(f"{kind} {text!r}: {attribute!r} {reason}. There: {there}.")


def check_file(source: str, kind: str) -> Path:
    """The absolute path of a Python file; ValueError, with the closest name in its folder, if it does not exist."""
    path = Path(source).expanduser().resolve()
    if not path.is_file():
        there = [entry.name for entry in path.parent.glob("*.py")]
        close = difflib.get_close_matches(path.name, there, n=1)
        proposal = f" Did you mean {str(path.with_name(close[0]))!r}?" if close else ""
        raise ValueError(f"{kind} file {str(path)!r} does not exist.{proposal}")
    return path


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _import(module: str, what: str, forms: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        with definitions_only(named=module):
            return importlib.import_module(module)
    except (KeyboardInterrupt, RunsWhenLoaded):
        raise
    except BaseException as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (module == missing or module.startswith(missing + ".")):
            raise ValueError(f"{what}: there is no module {missing!r}. Write {forms}.") from error
        raise _not_run(f"{what}: the module {module!r}", error) from error


@functools.cache
def _load_file(path: Path) -> Any:
    name = path.stem
    while name in sys.modules:  # never replace a module
        name = f"covey_file_{name}"
    try:
        module = load_file(name, path)
    except (KeyboardInterrupt, RunsWhenLoaded):
        raise
    except BaseException as error:
        raise _not_run(str(path), error) from error
    if (line := script_line(module)) is not None:
        shown = f"line {line} of {path} runs something whenever the file is imported" if line else f"{path} trains"
        warn(
            f"{shown}, so the file was not run: the functions that are asked for were taken from it, and what they"
            f" need. {ADVICE}",
            UserWarning,
        )
    return module


def _not_run(what: str, error: BaseException) -> ImportError:
    """The ValueError for a file that raises, calls sys.exit or is not Python, in place of its own exception."""
    return ImportError(f"{what} cannot be imported: {format_error(error)}{place_of(error)}.")
