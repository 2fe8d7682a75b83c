"""Running code that a model wrote: `run_python(code, timeout, memory)`.

A guard against accidents of generated code (endless loops, fork bombs, gigabytes of output, deleted files, network
access), not against attackers. Malicious code needs a virtual machine or a dedicated service: implement `Sandbox` for
it and install it with `use_sandbox`, and every `run_python` uses it.

Code runs in a child process with a temporary directory as its home and without the environment's variables (where keys
are). On Linux a process in between (`child.py`) holds the limits. Where the kernel allows namespaces there is no
network, files outside the temporary directory can be read and not written (without namespaces too, where the kernel has
Landlock), and no process survives; `SandboxResult.guards` says which of these held.
"""

import contextlib
import functools
import itertools
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

MIB = 1 << 20

__all__ = ["MIB", "LocalSandbox", "Sandbox", "SandboxResult", "run_python", "use_sandbox"]


@dataclass(frozen=True)
class SandboxResult:
    """Result of running code.

    Attributes:
        stdout: standard output, up to the limit.
        stderr: standard error, up to the limit; contains the traceback of an uncaught exception.
        exit_code: 0 if it ended normally, 1 after an uncaught exception, -n if signal n ended it.
        stopped: limit for which it was ended: "time", "memory" (of all its processes) or "processes" (too many);
            None if it ended by itself.
        truncated: true if stdout or stderr was longer than the limit.
        duration: seconds.
        guards: which of the guards "network", "files" and "processes" the kernel allowed.
    """

    stdout: str
    stderr: str
    exit_code: int
    stopped: str | None
    truncated: bool
    duration: float
    guards: frozenset[str] = frozenset()

    @property
    def timed_out(self) -> bool:
        """True if it was ended because it took too long."""
        return self.stopped == "time"

    @property
    def ok(self) -> bool:
        """True if it ended without an uncaught exception."""
        return self.exit_code == 0 and self.stopped is None


class Sandbox(Protocol):
    """Interface of a place to run code: implement it for a container, a virtual machine or a remote service."""

    def run(self, code: str, *, timeout: float, memory: int, stdin: str) -> SandboxResult:
        """Run `code` to its end or to a limit; failures of the code are results, not exceptions."""
        ...


def run_python(code: str, timeout: float = 10.0, memory: int = 512 * MIB, stdin: str = "") -> SandboxResult:
    """Run Python code in a child process and return what it printed and how it ended.

    Args:
        code: a program.
        timeout: seconds until it is ended.
        memory: bytes, as a limit of the address space of each process and of the memory of all together.
        stdin: text of its standard input.

    Raises:
        ValueError: a limit out of range, or code that is not text.
        RuntimeError: no child process could be started.

    Example:
        >>> run_python("print(6 * 7)").stdout
        '42\\n'
    """
    for name, text in {"code": code, "stdin": stdin}.items():
        if not isinstance(text, str):
            raise ValueError(f"{name} of run_python must be text, got {type(text).__name__}: {text!r:.80}.")
    for name, limit, most in (("timeout", timeout, 1e9), ("memory", memory, 1e18)):
        if not isinstance(limit, (int, float)) or not 0 < limit <= most:
            raise ValueError(f"{name}={limit!r} of run_python must be greater than 0 and at most {most:g}.")
    return _sandbox.run(code, timeout=timeout, memory=memory, stdin=stdin)


def use_sandbox(sandbox: Sandbox | None) -> None:
    """Make `run_python` use another sandbox in this process from now on; None restores the local one."""
    global _sandbox
    _sandbox = sandbox if sandbox is not None else LocalSandbox()


_CHILD = Path(__file__).with_name("child.py")
_GRACE = 10.0  # seconds in which the child starts and ends, on a busy machine
_CHUNK = 1 << 16
_PREFIX = "covey-sandbox-"


@dataclass(frozen=True)
class LocalSandbox:
    """Sandbox of local child processes.

    Attributes:
        max_output: maximum bytes of stdout and of stderr; the rest is discarded.
        max_file: maximum bytes of a file that the code writes.
        max_processes: maximum number of simultaneous processes, including its own.
        namespaces: use namespaces if the kernel allows it; without them at most the guard "files" is active.
        python: the interpreter, with its packages.
    """

    max_output: int = 100_000
    max_file: int = 64 * MIB
    max_processes: int = 16
    namespaces: bool = True
    python: str = sys.executable

    def run(self, code: str, *, timeout: float, memory: int, stdin: str) -> SandboxResult:
        """See `run_python`."""
        _remove_abandoned()
        with contextlib.ExitStack() as stack:
            folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
            stack.callback(_remove, folder)
            given = stack.enter_context(tempfile.TemporaryFile())
            given.write(stdin.encode("utf-8", "surrogatepass"))
            given.seek(0)
            Path(folder, "main.py").write_bytes(code.encode("utf-8", "surrogatepass"))
            report, reports = os.pipe()
            stack.callback(os.close, report)
            call = {"folder": folder, "timeout": timeout, "memory": int(memory), "caller": os.getpid()}
            limits = {"max_file": self.max_file, "max_processes": self.max_processes, "namespaces": self.namespaces}
            started = time.monotonic()
            try:
                process = subprocess.Popen(
                    [self.python, "-I", "-S", "-B", str(_CHILD), json.dumps(call | limits | {"report": reports})],
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd=folder,
                    env=_environment(folder),
                    pass_fds=(reports,),
                    start_new_session=True,
                )
            except OSError as error:
                raise RuntimeError(f"the sandbox could not start {self.python}: {error}") from error
            finally:
                os.close(reports)
            stack.enter_context(process)
            stack.callback(_end, process)
            assert process.stdout is not None and process.stderr is not None
            streams = [process.stdout.fileno(), process.stderr.fileno(), report]
            (out, err, reported), late = self._read(streams, started + timeout + _GRACE)
        outcome = _outcome(reported)
        if not outcome and not late:
            raise RuntimeError(f"the sandbox did not start: {err.decode(errors='replace')[-500:]}")
        return SandboxResult(
            stdout=out[: self.max_output].decode("utf-8", "replace"),
            stderr=err[: self.max_output].decode("utf-8", "replace"),
            exit_code=outcome.get("exit_code", -signal.SIGKILL),
            stopped="time" if late else outcome.get("stopped"),
            truncated=max(len(out), len(err)) > self.max_output,
            duration=outcome.get("duration", time.monotonic() - started),
            guards=outcome.get("guards", frozenset()),
        )

    def _read(self, streams: list[int], deadline: float) -> tuple[list[bytearray], bool]:
        """Read until all streams are closed, at most one byte beyond the limit; returns True on a timeout, too."""
        kept = {stream: bytearray() for stream in streams}
        with selectors.DefaultSelector() as selector:
            for stream in streams:
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                left = deadline - time.monotonic()
                if left <= 0:
                    return list(kept.values()), True
                for key, _ in selector.select(min(left, 3600.0)):
                    data = os.read(key.fd, _CHUNK)
                    if not data:
                        selector.unregister(key.fd)
                    kept[key.fd] += data[: max(0, self.max_output + 1 - len(kept[key.fd]))]
        return list(kept.values()), False


def _outcome(report: bytearray) -> dict[str, Any]:
    """Facts that the watcher reported; other lines were written by sandboxed code, and are ignored."""
    outcome: dict[str, Any] = {}
    for line in report.splitlines():
        with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError):
            said = json.loads(line)
            end = {name: said[name] for name in ("exit_code", "stopped", "duration")} if "guards" not in said else {}
            outcome |= end or {"guards": frozenset(said["guards"])}
    return outcome


def _remove(folder: str) -> None:
    """Remove a folder of any depth: contents of subfolders are moved up, so that no path gets too long."""
    mark, number = uuid.uuid4().hex, itertools.count()
    with contextlib.suppress(OSError):
        os.chmod(folder, 0o700)
        while entries := list(os.scandir(folder)):
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                for name in os.listdir(entry.path):
                    os.rename(os.path.join(entry.path, name), os.path.join(folder, f"{mark}-{next(number)}"))
                os.rmdir(entry.path)
        os.rmdir(folder)


@functools.cache
def _remove_abandoned() -> None:
    """Remove, once per process, folders left by killed processes that are at least an hour old."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        with contextlib.suppress(OSError, ValueError):
            owner = int(path.name.removeprefix(_PREFIX).partition("-")[0])
            if time.time() - path.stat().st_mtime < 3600 or path.stat().st_uid != os.getuid():
                continue
            try:
                os.kill(owner, 0)
            except ProcessLookupError:
                _remove(str(path))


def _environment(folder: str) -> dict[str, str]:
    """Environment variables for running Python: no keys, and one thread, because each thread reserves address space."""
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")}
    own = {"HOME": folder, "TMPDIR": folder, "PYTHONIOENCODING": "utf-8", "MALLOC_ARENA_MAX": "1", **threads}
    inherited = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT", "TZ")
    return {**{name: os.environ[name] for name in inherited if name in os.environ}, **own}


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the child and its process group; processes outside of the group end with the watcher."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()


_sandbox: Sandbox = LocalSandbox()
