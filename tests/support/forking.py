"""Starts Python programs in processes that have torch, transformers and Covey imported already.

Importing them takes 7 seconds of a core in every process. A server imports them once for all tests of a session and
forks a process for each program, which then runs as if Python had been started with it. What a launcher of torch's
starts in such a process, and what it calls `os.execv` with, is forked, too. The server ends with the last of the
processes that asked it for one, and a program with the process that asked for it.

Usage as a program:
    forking.py SOCKET         the server
    forking.py -u -c CODE     what `python -u -c CODE` does, in a process of the server's: for workers of pytest-xdist
"""

import array
import contextlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

from filelock import FileLock

SOCKET = "COVEY_TEST_FORK_SERVER"
"""Environment variable: the path of the server's socket."""
PRELOADED = (
    "accelerate.commands.launch",
    "covey.cli.main",
    "datasets",
    "matplotlib.pyplot",
    "optuna",
    "peft",
    "reasoning_gym",
    "tests.support.mixtures",
    "tests.support.runs",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "transformers.models.llama",
    "transformers.trainer",
)
_connection: list[socket.socket] = []
"""This process's, which keeps the server alive."""
_server: list[subprocess.Popen[bytes]] = []
_former: list[types.ModuleType] = []
"""The `__main__` that a program has replaced; without a reference its functions would lose their globals."""


class Forked:
    """A process of the server's, used like a `subprocess.Popen` without pipes."""

    def __init__(
        self,
        command: list[str],
        *,
        env: dict[str, str] | None = None,
        stdout: Any = None,
        stderr: Any = None,
        start_new_session: bool = False,
    ):
        self.args, self.returncode = command, None
        self._answers = _connect(_path())
        files = [0, _number(stdout, 1), _number(stderr, 2)]
        request = {"words": command[1:], "env": dict(env or os.environ), "cwd": os.getcwd()}
        text = json.dumps({**request, "session": start_new_session}).encode()
        self._answers.sendmsg(
            [len(text).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        )
        self._answers.sendall(text)
        self.pid = self._number_from_server()

    def _number_from_server(self) -> int:
        data = b""
        while len(data) < 4:
            if not (more := self._answers.recv(4 - len(data))):
                raise RuntimeError("the fork server is gone")
            data += more
        return int.from_bytes(data, "big", signed=True)

    def poll(self) -> int | None:
        """Give the exit status, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; the exit status, negative for a signal."""
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = self._number_from_server()
            self._answers.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended in between
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """End it by SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.send_signal(signal.SIGKILL)


def run(command: list[str], *, env: dict[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; what it printed. Past the timeout it is killed."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = Forked(command, env=env, stdout=out, stderr=errors, start_new_session=True)
        try:
            process.wait(timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)
        for file in (out, errors):
            file.seek(0)
        return subprocess.CompletedProcess(command, process.returncode or 0, out.read(), errors.read())


def _number(file: Any, usual: int) -> int:
    return usual if file is None else file if isinstance(file, int) else file.fileno()


def _path() -> str:
    """The socket of the server, which is started when there is none."""
    if SOCKET in os.environ:
        return os.environ[SOCKET]
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))[:16]
    path = Path(tempfile.gettempdir(), f"covey-tests-{session}.socket")
    with FileLock(path.with_suffix(".lock")):
        if not _connection:
            try:
                _connection.append(_connect(str(path)))
            except (FileNotFoundError, ConnectionRefusedError):  # none yet, or one that was killed
                path.unlink(missing_ok=True)
                _start(path)
                _connection.append(_connect(str(path)))
    return str(path)


def _start(path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([*filter(None, sys.path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, str(path)]
    _server.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True))
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, "the fork server does not start"
        time.sleep(0.01)


def _connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection


# ---- the server ----------------------------------------------------------------------------------------------------


def serve(path: str) -> dict[str, Any]:
    """Fork processes until nobody is connected; return, in each of them, its request."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)
    preload()
    connected: list[socket.socket] = []
    children: dict[int, socket.socket] = {}
    begun = False
    while connected or children or not begun:
        ready, _, _ = select.select([listener, *connected, *children.values()], [], [], 0.02)
        for child in [child for child, asked in children.items() if asked in ready]:  # who asked for it is gone
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for one in ready:
            if one in children.values():
                continue
            if one is listener:
                begun = True
                connected.append(listener.accept()[0])
                continue
            connected.remove(one)
            data, files, _, _ = socket.recv_fds(one, 4, 3)
            if not data:
                one.close()
                continue
            request = json.loads(one.recv(int.from_bytes(data, "big"), socket.MSG_WAITALL))
            if child := os.fork():
                one.sendall(child.to_bytes(4, "big"))
                children[child] = one
                for file in files:
                    os.close(file)
            else:
                for other in (listener, one, *connected, *children.values()):
                    other.close()
                return {**request, "files": files}
        while children:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                break
            with contextlib.suppress(OSError):
                children[child].sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
            children.pop(child).close()
    for one in (Path(path), Path(path).with_suffix(".lock")):
        one.unlink(missing_ok=True)
    sys.exit()


def preload() -> None:
    """Import what programs need, and have launchers in them fork."""
    import importlib

    for name in PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):  # optional ones
            importlib.import_module(name)
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from tests.support import tiny

    def fork(handler: Any, args: Any, env: dict[str, str]) -> Forked:
        return Forked(list(args), env=env, stdout=handler._stdout, stderr=handler._stderr, start_new_session=True)

    subprocess_handler.SubprocessHandler._popen = fork
    os.execv = lambda _, words: sys.exit(Forked(words).wait())
    tiny.quick()


def become(request: dict[str, Any], path: str) -> None:
    """Be the process that was asked for, and run its program."""
    if request["session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in enumerate(request["files"]):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ |= {**request["env"], SOCKET: path}
    sys.path[:0] = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one and one not in sys.path]
    import numpy

    random.seed()
    numpy.random.seed()
    words = [word for word in request["words"] if word != "-u"]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        module = types.ModuleType("__main__")  # of no file, as Python's own with -c
        _former.append(sys.modules["__main__"])
        sys.modules["__main__"] = module
        exec(compile(words[1], "<string>", "exec"), vars(module))
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent.resolve()))
        runpy.run_path(words[0], run_name="__main__")


def stand_in() -> int:
    """Have the server run the program that Python would have been started with, to its end."""
    sys.path[0] = str(Path(__file__).parents[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest ends its workers in order
    os.environ.setdefault("PYTEST_XDIST_TESTRUNUID", f"of-{os.getppid()}")
    status = Forked([sys.executable, *sys.argv[1:]]).wait()
    if status < 0:
        print(f"A test process was ended by signal {-status}.", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    if sys.argv[1].startswith("-"):
        sys.exit(stand_in())
    become(serve(sys.argv[1]), sys.argv[1])
