"""Protection against users' code: its exceptions, the data that it gets, and the process state that it changes."""

import asyncio
import functools
import inspect
import os
import re
import signal
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

from covey.core.findings import CheckError, CheckWarning, Finding
from covey.runtime.interrupts import run_alone
from covey.runtime.packages import OWN, is_own
from covey.runtime.safe_text import printable, without_secrets

T = TypeVar("T")

INSTALLED = tuple(
    str(folder) + os.sep
    for folder in (*(Path(__file__).parents[2] / name for name in OWN), Path(sysconfig.get_paths()["stdlib"]))
)
"""Folders of Covey and of Python's standard library."""

MAX_MESSAGE_CHARS = 500
MAX_VALUE_CHARS = 120


class UserCodeError(Exception):
    """Wrapper of an exception that a user's code raised, since some exceptions cannot pass through a coroutine."""

    def __init__(self, error: BaseException):
        self.text = format_error(error)  # where the code ran, under its deadline
        self.message = self.text.removeprefix(type(error).__name__).removeprefix(": ") or self.text
        self.place = place_of(error)
        super().__init__(self.text + self.place)
        self.error = error

    def release(self) -> str:
        """Return the text with its location, and drop the exception, whose traceback keeps the user's objects alive."""
        self.error = RuntimeError(self.text)
        return self.text + self.place


def settle(future: "Future[T]", result: Any = None, error: BaseException | None = None, wrap: bool = True) -> None:
    """Set the result or the error of a future, by default as `UserCodeError`, unless it has been cancelled."""
    with suppress(InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(UserCodeError(error) if wrap else error)


def format_error(error: BaseException) -> str:
    """Type and message of an exception, without secrets, even if its `__str__` fails.

    `__str__` is the user's code and may not return: call this under the deadline of the code that raised.
    """
    try:
        text = str.__str__(str(error))[: 4 * MAX_MESSAGE_CHARS]
        text = printable(_shortened(without_secrets(text), MAX_MESSAGE_CHARS))
    except BaseException:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def place_of(error: BaseException) -> str:
    """The line of the user's code that failed, as ` (rewards.py, line 12)`; empty if no file of the user is known.

    It is the last line that is neither in Covey nor in an installed package.
    """
    if isinstance(error, SyntaxError):
        return ""  # which says it itself
    frames = [
        (frame.filename, frame.lineno or 0)
        for frame in traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
    ]
    for note in getattr(error, "__notes__", ()):  # the traceback in another process
        frames += [(name, int(line)) for name, line in re.findall(r'File "([^"]+)", line (\d+)', str(note))]
    own = [(name, line) for name, line in frames if _is_of_the_user(name)]
    if not own:
        return ""
    name, line = own[-1]
    with suppress(ValueError, OSError):  # elsewhere, or the working directory is gone
        name = str(Path(name).relative_to(Path.cwd()))
    return printable(f" ({name}, line {line})")


def _is_of_the_user(file: str) -> bool:
    if file.startswith("<") or {"site-packages", "dist-packages"} & set(Path(file).parts):
        return False
    return not file.startswith(INSTALLED)


def report(findings: Iterable[Finding]) -> None:
    """Warn of each finding that is not an error, then raise one `CheckError` with all errors."""
    found = list(dict.fromkeys(findings))  # two datasets may lack the same
    for finding in found:
        if finding.level == "warning":
            warn(CheckWarning(finding))
    if errors := [finding for finding in found if finding.grave]:
        raise CheckError(*errors)


def warn(message: str | Warning, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line of the user's code on the stack, or else the innermost line outside of Covey."""
    frame, level, outside = sys._getframe(1), 2, 0
    while not _is_of_the_user(frame.f_code.co_filename):
        # The `__init__` that dataclasses generate for a class of the user's stands in the user's module.
        generated = frame.f_code.co_name == "__init__" and frame.f_code.co_filename == "<string>"
        if not (outside or generated or is_own(frame.f_globals.get("__name__"))):
            outside = level
        if frame.f_back is None:
            level = outside or 2
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def format_value(value: Any) -> str:
    """Shortened `repr` and type of a value, even if its `__repr__` fails."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"a value that cannot be printed: {format_error(error)}"
    return f"{_shortened(text, MAX_VALUE_CHARS)} ({type(value).__name__})"


def _shortened(text: str, length: int) -> str:
    return f"{text[:length]}..." if len(text) > length else text


def unwrap_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def is_async(function: Callable[..., Any]) -> bool:
    """True for an `async def`, an object with an async `__call__`, and a `functools.partial` of these."""
    function = unwrap_partial(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def call_and_wait(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Result of an ordinary function, which may return an awaitable."""
    result = function(*args, **kwargs)

    async def wait() -> Any:
        return await result

    if not inspect.isawaitable(result):
        return result
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_alone(wait())
    with ThreadPoolExecutor(1) as thread:  # this one has a loop already, as in a notebook
        return thread.submit(run_alone, wait()).result()


def call_all(*steps: Callable[[], Any]) -> None:
    """Call all functions in order, even if one raises; the first error is raised at the end."""
    errors: list[BaseException] = []
    for step in steps:
        try:
            step()
        except BaseException as error:
            errors.append(error)
    for later in errors[1:]:
        errors[0].add_note(f"Then another step of the end failed: {format_error(later)}")
    if errors:
        raise errors[0]


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """None for a function without a signature, as some written in C."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        return None


# ---- data that users' code is given or returns -----------------------------------------------------------------------

ATOMS = frozenset({int, float, bool, str, bytes, complex, NoneType})
SAVEABLE = (NoneType, bool, int, float, str)  # and tensors


class PlainCopies:
    """Deep copies of lists, tuples, dictionaries and sets, each copied once; all other objects are shared."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Any, Any]] = {}  # with the originals, or their ids could be used again

    def copy(self, value: Any) -> Any:
        kind = type(value)
        if kind not in (list, tuple, dict, set):
            return value
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        if kind is not dict and ATOMS.issuperset(map(type, value)):
            copied: Any = value if kind is tuple else value.copy()  # the fast path for long lists of numbers
            self._copies[id(value)] = value, copied
        elif kind is tuple:
            copied = tuple(map(self.copy, value))
            self._copies[id(value)] = value, copied
        else:
            copied = kind()
            self._copies[id(value)] = value, copied  # before the items, since it may contain itself
            if kind is dict:
                copied.update((key, self.copy(item)) for key, item in value.items())
            else:
                extend = copied.extend if kind is list else copied.update
                extend(list(map(self.copy, value)))
        return copied


def unsaveable_part(value: Any, name: str) -> str | None:
    """Description of the first part of a value that a checkpoint of plain data cannot hold; None without any."""
    from torch import Tensor

    kind, saveable = type(value), (*SAVEABLE, Tensor)
    if kind in saveable:
        return None
    if kind is dict:
        for key in value:
            if type(key) not in saveable:
                return f"a key of {name} is a {type(key).__name__}"
        items = value.items()
    elif kind in (list, tuple, set):
        items = enumerate(value)
    else:
        return f"{name} is a {kind.__name__}"
    parts = (unsaveable_part(item, f"{name}[{key!r}]") for key, item in items)
    return next((part for part in parts if part is not None), None)


# ---- state of the process --------------------------------------------------------------------------------------------


class ProcessStateWarning(UserWarning):
    """Warning that a tool, an environment or a reward changed the state of the process, and the change was reverted."""


@contextmanager
def preserve_process_state() -> Iterator[None]:
    """Context that reverts, with a warning, changes of the state that `_state` lists."""
    before = _state()
    try:
        yield
    finally:
        for name, value in _state().items():
            if value != before[name] and before[name] is not None:
                with suppress(OSError, ValueError):  # the directory was deleted; another thread sets no handlers
                    _RESTORE[name](before[name])
                change = "" if isinstance(value, dict | list) else f" from {before[name]} to {value}"
                warnings.warn(
                    f"{name} was changed{change} while rollouts were sampled and rewarded, and was changed back. Let"
                    " tools, environments and rewards leave it as it is: it belongs to the whole process.",
                    ProcessStateWarning,
                    stacklevel=3,
                )


def _state() -> dict[str, Any]:
    """Values by name; None where there is none."""
    import torch

    folder, streams = None, []
    with suppress(OSError):  # it was deleted
        folder = os.getcwd()
    for number in range(3):
        with suppress(OSError):
            os.fstat(number)
            streams.append(number)
    return {
        "the working directory": folder,
        "the handling of SIGINT and SIGTERM": [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)],
        "the set of open standard streams": streams,
        "torch's default device": torch.get_default_device(),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's gradient mode": torch.is_grad_enabled(),  # of this thread
    }


def _set_stop_handlers(handlers: list[Any]) -> None:
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
        if handler is not None:  # one that was set in C cannot be set from here
            signal.signal(number, handler)


def _fill_streams(were_open: list[int]) -> None:
    """Open closed standard streams on the null device; else the next opened file would get their output."""
    for number in were_open:  # a new one gets the lowest number that is free
        try:
            os.fstat(number)
        except OSError:
            if (opened := os.open(os.devnull, os.O_RDWR)) != number:
                os.dup2(opened, number)
                os.close(opened)


def _set_default_device(device: Any) -> None:
    import torch

    torch.set_default_device(None if device.type == "cpu" else device)


def _of_torch(name: str) -> Callable[[Any], Any]:
    def restore(value: Any) -> None:
        import torch

        getattr(torch, name)(value)

    return restore


_RESTORE: dict[str, Callable[[Any], Any]] = {
    "the working directory": os.chdir,
    "the handling of SIGINT and SIGTERM": _set_stop_handlers,
    "the set of open standard streams": _fill_streams,
    "torch's default device": _set_default_device,
    "torch's default dtype": _of_torch("set_default_dtype"),
    "torch's number of threads": _of_torch("set_num_threads"),
    "torch's gradient mode": _of_torch("set_grad_enabled"),
}
