"""Functions in reusable child processes that can be killed (`covey.runtime.function_worker`). Does not import torch."""

import functools
import io
import json
import math
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from types import FunctionType
from typing import Any

from covey.core.findings import CheckError
from covey.runtime.child_process import OVER_LIMITS, ChildProcess, Quota
from covey.runtime.definitions import main_script

WORKER = Path(__file__).with_name("function_worker.py")
WATCH_SECONDS = 0.05
MARK_BYTES = 16
MAX_REPLY = 1 << 26  # bytes
DEFAULT_LIMITS = Quota(memory=4.0, processes=64)  # defaults of `isolated`


def isolated(function: Any = None, *, memory: float = 4.0, processes: int = 64, start: float = 120.0) -> Any:
    """Mark a reward function to run in a process of its own, which is killed if late or over a limit.

    Args:
        function: defined at the top level of a module, or an object that can be pickled; its state stays there.
        memory: GiB that its process and those it starts may use together (on Linux).
        processes: most processes at a time.
        start: seconds for its process to start and import its file, when the trainer is created. When the process is
            started again, calls wait for it until their own deadlines.

    Raises:
        CheckError: a limit is not positive or not finite, or the object cannot be marked.
    """
    if not (0 < memory < math.inf and processes > 0 and processes % 1 == 0 and 0 < start < math.inf):
        raise CheckError.of(
            "reward-isolation",
            f"isolated(memory={memory!r}, processes={processes!r}, start={start!r}): limits must be positive numbers,"
            " that of processes a whole one.",
        )
    if function is None:
        return functools.partial(isolated, memory=memory, processes=processes, start=start)
    try:
        function.covey_isolated = Quota(memory, int(processes), start)
    except AttributeError as error:
        raise CheckError.of(
            "reward-isolation",
            f"isolated({function!r}): a {type(function).__name__} cannot be marked.",
            "Mark a function that calls it, or set reward_isolation='process'.",
        ) from error
    return function


class WorkerFailed(Exception):
    """A worker process did not answer: it was too slow, ran out of memory or crashed."""


class WorkerLate(WorkerFailed):
    """A worker process did not answer in time."""


class FunctionWorker:
    """A child process that runs one function, one call at a time; killed when a call is late, replaced after it ended.

    It is a new interpreter with this one's `sys.path`: `multiprocessing` would run the user's training script again, or
    fork a process that holds CUDA and threads. It ends with this process, or when nothing refers to this object. A
    function may be given as its name and its file, which is not imported here. ValueError if it cannot be sent.
    Arguments are sent as pickles; answers are JSON, since an object would run code where it is read.
    """

    def __init__(
        self,
        function: Any,
        limits: Quota | None = None,
        stderr: int | None = None,
        decode: Callable[[dict[str, Any]], Any] | None = None,  # each object of an answer, as `json.loads` does
    ):
        self._decode = decode
        self._function = _by_file(*function) if isinstance(function, tuple) else _by_pickle(function)
        self._limits, self._stderr = limits, stderr
        self._start_seconds = limits.start if limits else Quota(0, 0).start
        self._starting: tuple[bytes, float] | None = None  # mark of the request to load the function, and its deadline
        self._lock = threading.Lock()
        self._process: ChildProcess | None = None

    def start(self, seconds: float = math.inf) -> None:
        """Start the process unless it is running; RuntimeError, also from `call`, if it cannot load the function.

        WorkerLate if that takes longer than `seconds`; the process still has the rest of its own time to start.
        """
        with self._lock:
            self._running(time.monotonic() + seconds)

    def call(self, arguments: dict[str, Any], seconds: float, recorded: Sequence[str] = ()) -> dict[str, Any]:
        """The reply `{"result": ..., "calls": [...]}` or `{"raised": [type, message, traceback]}`; or WorkerFailed.

        `recorded` are names of further arguments: functions whose calls are in the reply.
        """
        request = pickle.dumps((arguments, recorded), pickle.HIGHEST_PROTOCOL)
        until = time.monotonic() + seconds
        with self._lock:
            process = self._running(until)
            return self._receive(process, self._send(process, request, until), until)

    def close(self) -> None:
        if self._process is not None:
            self._end()
        self._process = None

    def _running(self, until: float) -> ChildProcess:
        """The process, once it has loaded the function."""
        process = self._process
        if process is None or not process.is_own or process.poll() is not None:
            process = self._spawn()
        if self._starting is not None:
            mark, last = self._starting
            left = max(0.0, until - time.monotonic())
            if until < last and os.name == "posix" and not wait([process.process.stdout], left):  # type: ignore[list-item]
                raise WorkerLate("its process had not started in time")
            try:
                reply = self._receive(process, mark, last)
            except WorkerFailed as error:
                raise RuntimeError(f"its process did not start: {error}") from error
            if "raised" in reply:
                self.close()
                raise RuntimeError(f"its process cannot import it: {': '.join(reply['raised'][:2])}")
            self._starting = None
        return process

    def _spawn(self) -> ChildProcess:
        self.close()
        self._process = process = ChildProcess(
            [sys.executable, "-P", str(WORKER)],
            limits=self._limits,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
                "COVEY_PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            },
        )
        self._end = weakref.finalize(self, _end, process)  # also at exit
        self._until = [math.inf]
        threading.Thread(target=_end_if_late, args=(process, self._until), daemon=True).start()
        last = time.monotonic() + self._start_seconds
        self._starting = self._send(process, self._function, last), last
        return process

    def _send(self, process: ChildProcess, request: bytes, until: float) -> bytes:
        """Send a request and return its mark; `_receive` must read the reply."""
        stdin, mark = process.process.stdin, os.urandom(MARK_BYTES // 2).hex().encode()
        assert stdin is not None
        self._until[0] = until
        with suppress(OSError):  # it has ended, so there is no reply either
            pickle.dump((mark, request), stdin)
            stdin.flush()
        return mark

    def _receive(self, process: ChildProcess, mark: bytes, until: float) -> dict[str, Any]:
        """Read the reply to a request; after any error the process is ended."""
        pipes = process.process
        assert pipes.stdout is not None
        self._until[0] = until
        try:
            line = b"\n"
            while line.endswith(b"\n") and not line.startswith(mark):  # what the function wrote to this pipe
                line = pipes.stdout.readline(MAX_REPLY)
            if len(line) == MAX_REPLY:
                raise WorkerFailed(f"its answer has more than {MAX_REPLY >> 20} MiB")
            reply = self._read(line[MARK_BYTES:]) if line.endswith(b"\n") else None  # else it was ended
        except OSError:
            reply = None
        except BaseException:  # a late answer would be taken for that of the next request
            self.close()
            raise
        finally:
            self._until[0] = math.inf
        is_late = time.monotonic() >= until
        if reply is None and not is_late:
            with suppress(subprocess.TimeoutExpired):
                pipes.wait(0.5)  # to its own end, whose cause is then known
        if is_late or reply is None:
            self.close()
        if reply is None and is_late:
            raise WorkerLate("no answer in time")
        if reply is None:
            raise WorkerFailed(self._cause(pipes.returncode))
        return reply

    def _read(self, answer: bytes) -> dict[str, Any]:
        try:
            reply = json.loads(answer, object_hook=self._decode)
        except (ValueError, RecursionError) as error:
            raise WorkerFailed(f"its answer cannot be read: {error}") from error
        return reply if isinstance(reply, dict) else {"raised": ("TypeError", "its answer is not a reply", "")}

    def _cause(self, status: int) -> str:
        if status in OVER_LIMITS:
            return OVER_LIMITS[status].format(*self._limits or ())
        if 0 <= status <= 128:
            return f"its process exited with {status}"
        return f"its process ended by signal {max(-status, status - 128)}"  # its guard, or itself


def _end_if_late(process: ChildProcess, until: list[float]) -> None:
    """Kill the worker at the deadline of its call: reads and writes of pipes may block forever."""
    while process.poll() is None:
        if time.monotonic() > until[0]:
            process.end()
        time.sleep(WATCH_SECONDS)
    process.end()  # of a killed guard the command may continue


def _end(process: ChildProcess) -> None:
    process.end()
    for stream in (process.process.stdin, process.process.stdout):
        with suppress(OSError):  # what was written and not read
            stream.close()  # type: ignore[union-attr]


def _by_file(name: str, path: Path) -> bytes:
    return pickle.dumps((f"c{path.stem}\n{name}\n.".encode(), {path.stem: str(path)}))


def isolation_of(function: Any) -> Quota | None:
    """Limits of a function marked with `isolated`, also inside a `partial`; None without the mark."""
    while isinstance(function, functools.partial) and not hasattr(function, "covey_isolated"):
        function = function.func
    limits = getattr(function, "covey_isolated", None)
    return limits if isinstance(limits, Quota) else None


def check_sendable(function: Callable[..., Any]) -> None:
    """Raise ValueError for a function that cannot be sent to a process of its own."""
    _by_pickle(function)


def _by_pickle(function: Callable[..., Any]) -> bytes:
    pickler = _Pickler(stream := io.BytesIO(), protocol=pickle.HIGHEST_PROTOCOL)
    try:
        pickler.dump(function)
    except Exception as error:  # of the user's own `__reduce__` too
        raise ValueError(f"{error}".rstrip(".")) from error
    files = {name: getattr(sys.modules[name], "__file__", None) for name in pickler.modules}
    files["__main__"] = main_script()
    return pickle.dumps((stream.getvalue(), {name: os.path.abspath(file) for name, file in files.items() if file}))


class _Pickler(pickle.Pickler):
    """Pickler that collects the modules of functions and classes, and refuses objects that cannot be moved."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.modules: set[str] = set()

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.nn.Module):
            raise ValueError("it holds a model, of which a copy would be sent")
        if isinstance(value, FunctionType | type):
            if value.__module__ == "__main__":
                raise ValueError("it is defined in the script, which would be run again to import it")
            self.modules.add(value.__module__)
        return NotImplemented
