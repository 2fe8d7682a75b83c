"""Child processes that end when this process ends in any way, including `kill -9`."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

GUARD = Path(__file__).with_name("process_guard.py")
OVER_LIMITS = {201: "it needed more than {0:g} GiB of memory", 202: "it started more than {1} processes"}
"""Reasons by exit status of the guard, when it has ended a command that exceeded its limits."""


class Quota(NamedTuple):
    """Limits of a command and all its descendants (on Linux), and the seconds that a worker process has to start."""

    memory: float  # GiB, resident
    processes: int
    start: float = 120.0


class ChildProcess:
    """A command that runs under `covey.runtime.process_guard`, in a session of its own, so Ctrl-C does not reach it.

    On systems that are not POSIX it is an ordinary child process. `grace` is the number of seconds between SIGTERM and
    SIGKILL. The command inherits the file descriptor `descriptor`, if given, as number 3.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        grace: float = 0.0,
        limits: Quota | None = None,
        descriptor: int | None = None,
        **options: Any,
    ):
        self._owner = os.getpid()
        self._grace = grace
        self._pipe: int | None = None
        if os.name != "posix":
            self.process = subprocess.Popen(command, **options)
            return
        ours, self._pipe = os.pipe()
        memory, processes, _ = limits or (0, 0, 0)
        numbers = (
            self._owner,
            ours,
            grace,
            int(memory * (1 << 30)),
            processes,
            -1 if descriptor is None else descriptor,
        )
        inherited = (ours,) if descriptor is None else (ours, descriptor)
        self._mark = f"COVEY_CHILD={os.urandom(8).hex()}"
        options["env"] = {**(options.get("env") or os.environ), "COVEY_CHILD": self._mark.partition("=")[2]}
        guard = [sys.executable, "-I", "-S", str(GUARD), *map(str, numbers)]
        try:
            self.process = subprocess.Popen([*guard, *command], start_new_session=True, pass_fds=inherited, **options)
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
        """True in the process that started the command, False in a process forked from it."""
        return self._owner == os.getpid()

    def poll(self) -> int | None:
        """Exit status (128 + n after signal n), or None while it runs. Always None in a forked process."""
        return self.process.poll() if self.is_own else None

    async def wait(self) -> int:
        """Exit status, once the command has ended (an event of the kernel on Linux, else a thread that waits)."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def settle() -> None:
            if not ended.done():
                ended.set_result(None)

        if (status := self.process.poll()) is not None:
            return status
        try:
            handle = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # another system, or an old kernel

            def wait() -> None:
                self.process.wait()
                with suppress(RuntimeError):  # the loop was closed
                    loop.call_soon_threadsafe(settle)

            threading.Thread(target=wait, name="covey-child", daemon=True).start()
            await ended
            return self.process.wait()
        loop.add_reader(handle, settle)
        try:
            await ended
        finally:
            loop.remove_reader(handle)
            os.close(handle)
        return self.process.wait()

    def descendants(self) -> set[int]:
        """Ids of the processes of the command, as the kernel lists them; on Linux."""
        found: set[int] = set()
        todo = {self.pid}
        while todo:
            tasks, children = Path(f"/proc/{todo.pop()}/task"), set[int]()
            with suppress(OSError):  # it ended meanwhile
                for task in tasks.iterdir():
                    children |= set(map(int, (task / "children").read_text().split()))
            todo |= children - found
            found |= children
        return found

    def end(self) -> None:
        """End the command and all its descendants, and wait until they have ended. Does nothing in a forked process."""
        if not self.is_own:
            return
        self._close_pipe()
        self.process.terminate()  # a forked process may hold the pipe open
        if os.name == "posix":
            self.process.send_signal(signal.SIGCONT)  # the command may have stopped it
        try:
            self.process.wait(self._grace + 15.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if os.name == "posix" and self.process.returncode < 0:  # the guard was killed, by the command perhaps
            for _ in range(10):
                for one in self._left():
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(one, signal.SIGKILL)

    def _left(self) -> Iterator[int]:
        """Ids of processes that outlive their guard, recognised by the environment that they were started with."""
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if self._mark.encode() in path.read_bytes().split(b"\0"):
                    yield int(path.parent.name)

    def _close_pipe(self) -> None:
        pipe, self._pipe = self._pipe, None  # another thread may do the same
        if pipe is not None:
            os.close(pipe)
