"""Inference server as a child process, which ends when this process ends for any reason (`runtime.child_process`)."""

import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.request
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from covey.runtime.child_process import ChildProcess

TAIL_LINES = 30  # lines of the log that an error repeats: enough for a traceback
STOP_SECONDS = 10.0  # for a server to end after SIGTERM, before it is killed
POLL_SECONDS = 0.25
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy: it could not reach this machine


class LaunchFailed(RuntimeError):
    """A server ended, or was not ready in time. The message contains the end of its log."""


@dataclass(eq=False)
class ServerProcess:
    """An inference server that runs within `with`, or from `start` until `stop`; all its processes end with it."""

    command: Sequence[str]  # without secrets: any user of the machine can read it
    ready: str | Callable[[], bool]  # URL that answers 200 when the server can sample, or a function
    _: KW_ONLY
    log_path: Path  # for its output; folders are created, an older file is replaced
    deadline: float  # seconds until it must be ready
    # Variables added to those of this process. It may hold an API key, so it is not shown.
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    name: str = "the server"  # for messages
    _child: ChildProcess | None = None
    _stop: Callable[[], object] = lambda: None

    def start(self) -> "ServerProcess":
        """Start the server and wait until it is ready; LaunchFailed if it is not, after its processes were ended."""
        if self.running:
            raise RuntimeError(f"{self.name} runs already (process {self.pid}); stop it before starting it again.")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._child = ChildProcess(
                self.command,
                grace=STOP_SECONDS,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.env},
            )
        self._stop = weakref.finalize(self, self._child.end)  # also when this process exits in the ordinary way
        try:
            self._wait(self._child, time.monotonic() + self.deadline)
        except BaseException:  # a Ctrl-C during the wait as well
            self.stop()
            raise
        return self

    def stop(self) -> None:
        self._stop()

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    @property
    def pid(self) -> int | None:
        """Id of the process that guards it: killing that one ends the server as well."""
        return self._child.pid if self._child else None

    def log_tail(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines() if self.log_path.is_file() else []
        return "\n".join(lines[-TAIL_LINES:]) or "(it printed nothing)"

    def __enter__(self) -> "ServerProcess":
        return self if self.running else self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _wait(self, child: ChildProcess, until: float) -> None:
        while True:
            status = child.poll()
            if status is not None:
                name = f" ({signal.Signals(status - 128).name})" if status - 128 in set(signal.Signals) else ""
                raise LaunchFailed(self._failure(f"ended with exit status {status}{name} before it was ready"))
            if answers(self.ready) if isinstance(self.ready, str) else self.ready():
                return
            if time.monotonic() > until:
                late = f"was not ready within {self.deadline:g} seconds and was stopped; it may need more"
                raise LaunchFailed(self._failure(late))
            time.sleep(POLL_SECONDS)

    def _failure(self, happened: str) -> str:
        return (
            f"{self.name} {happened}\ncommand: {shlex.join(self.command)}\n"
            f"the end of its log ({self.log_path}):\n{self.log_tail()}"
        )


def answers(url: str, seconds: float = 2.0) -> bool:
    try:
        with _DIRECT.open(url, timeout=seconds) as answer:
            return answer.status == 200
    except (OSError, ValueError):
        return False


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free now; another process may take it before you do."""
    with socket.socket() as one:
        one.bind((host, 0))
        return one.getsockname()[1]
