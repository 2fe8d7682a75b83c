"""Child processes that end with this one, however it ends, `kill -9` included."""

import atexit
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GUARD = Path(__file__).with_name("process_guard.py")


class ChildProcess:
    """Command that runs under `covey.runtime.process_guard`, in a session of its own, which Ctrl-C does not reach.

    On systems that are not POSIX it is an ordinary child. `grace` is the time between SIGTERM and the kill.
    """

    def __init__(self, command: Sequence[str], *, grace: float = 0.0, **options: Any):
        self._owner = os.getpid()
        self._grace = grace
        self._pipe: int | None = None
        if os.name != "posix":
            self.process = subprocess.Popen(command, **options)
            return
        ours, self._pipe = os.pipe()
        guard = [sys.executable, "-I", "-S", str(GUARD), str(self._owner), str(ours), str(grace)]
        try:
            self.process = subprocess.Popen([*guard, *command], start_new_session=True, pass_fds=(ours,), **options)
        except BaseException:
            self._close_pipe()
            raise
        finally:
            os.close(ours)

    @property
    def pid(self) -> int:
        return self.process.pid  # of the guard, whose only child is the command

    @property
    def is_own(self) -> bool:
        """True in the process that started it, False in one forked from that."""
        return self._owner == os.getpid()

    def poll(self) -> int | None:
        """Exit status (128 + n after signal n), or None while it runs. Always None in a forked process."""
        return self.process.poll() if self.is_own else None

    def end(self) -> None:
        """End the command and all its descendants, and wait for that. Does nothing in a forked process."""
        if not self.is_own:
            return
        self._close_pipe()
        self.process.terminate()  # a forked process may hold the pipe open
        try:
            self.process.wait(self._grace + 15.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None


class WorkerFailed(Exception):
    """A worker process did not answer: it was too slow, ran out of memory or crashed."""


class ScriptWorker:
    """Child process that answers JSON lines, started with the first request and killed when an answer is late.

    The script prints `{"ready": true}` after its imports, for which it has `start_seconds`, and then one line for each
    line it reads. It is run by path, with this interpreter and its `sys.path`: `multiprocessing` would run the user's
    training script again, or fork a process that holds CUDA and threads.
    """

    def __init__(self, script: Path, start_seconds: float = 120.0):
        self.script = script
        self.start_seconds = start_seconds
        self._lock = threading.Lock()
        self._process: ChildProcess | None = None
        self._replies: queue.Queue[str | None] = queue.Queue()
        atexit.register(self.close)

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send `request` and return the reply; WorkerFailed if none comes in time, RuntimeError without a start."""
        with self._lock:
            stdin = self._running().process.stdin
            assert stdin is not None
            try:
                stdin.write(json.dumps(request) + "\n")
                stdin.flush()
                return self._reply(seconds)
            except BaseException as error:  # a late answer would be taken for that of the next request
                self.close()
                if isinstance(error, BrokenPipeError):
                    raise WorkerFailed(f"{self.script.name} died") from error
                raise

    def close(self) -> None:
        if self._process is not None:
            self._process.end()
        self._process = None

    def _running(self) -> ChildProcess:
        if self._process is not None and self._process.is_own and self._process.poll() is None:
            return self._process
        self.close()
        self._replies = queue.Queue()
        self._process = ChildProcess(
            [sys.executable, "-P", str(self.script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        forwarded = self._process.process.stdout, self._replies
        threading.Thread(target=_forward_lines, args=forwarded, daemon=True).start()
        try:
            self._reply(self.start_seconds)
        except BaseException as error:
            self.close()
            if isinstance(error, WorkerFailed):
                raise RuntimeError(f"{self.script.name} did not start: {error}") from error
            raise
        return self._process

    def _reply(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._replies.get(timeout=seconds)
        except queue.Empty:
            raise WorkerFailed(f"no answer within {seconds:g} s") from None
        if line is None:
            raise WorkerFailed("the process died")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerFailed(reply["error"])
        return reply


def _forward_lines(stream: Any, into: "queue.Queue[str | None]") -> None:
    """Copy the lines of a pipe, then None, to a queue, which has a deadline on every platform."""
    for line in stream:
        into.put(line)
    into.put(None)
