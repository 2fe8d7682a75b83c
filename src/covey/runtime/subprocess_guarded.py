"""Child processes that end with this one: when it ends, is interrupted or terminated, and also on `kill -9`.

Used for inference servers and for worker processes of rewards. What a child does, says or writes is not looked at here.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GUARD = Path(__file__).with_name("process_guard.py")


class Child:
    """A command that runs under `covey.runtime.process_guard`, in a session of its own: a Ctrl-C in the terminal is not
    for it.

    Elsewhere than on POSIX systems it is an ordinary child.

    Args:
        command: program and arguments.
        grace: seconds between the request to end (SIGTERM) and the kill; 0 kills at once.
        options: of `subprocess.Popen`.
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
            self._let_go()
            raise
        finally:
            os.close(ours)

    @property
    def pid(self) -> int:
        """Of the guard, whose only child the command is."""
        return self.process.pid

    def poll(self) -> int | None:
        """The exit status (128 + n after signal n), or None while it runs. A forked process knows of no end."""
        return self.process.poll() if self._owner == os.getpid() else None

    def end(self) -> None:
        """End the command and all that it started, and wait for that. Does nothing in a forked process."""
        if self._owner != os.getpid():
            return
        self._let_go()
        self.process.terminate()  # a forked process may hold the pipe open
        try:
            self.process.wait(self._grace + 15.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _let_go(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
