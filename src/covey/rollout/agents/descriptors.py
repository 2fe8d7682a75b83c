"""File descriptors between this process and a program: one for the program's reward, one for its standard error."""

import asyncio
import os
import socket
import struct
import sys
from typing import Any, Self

from covey.rollout.environments.interface import EnvironmentFailed
from covey.rollout.environments.pool import EnvironmentWarning
from covey.runtime.child_process import ChildProcess
from covey.runtime.safe_text import printable
from covey.runtime.user_code import warn

MAX_OUTPUT = 16 << 20  # bytes that a program may write to its standard error
SHOWN = 500  # characters of standard error in the message of a failure
MAX_REWARD = 100  # most bytes of a reward, which is a number as text
MAX_MESSAGES = 1000  # messages that are read at a time: more than the kernel buffers
CREDENTIALS = struct.Struct("3i")  # process, user and group of the sender of a message, filled in by the kernel
SCM_CREDENTIALS = 2  # constant of Linux


class RewardSocket:
    """Socket whose other end, `given`, a program inherits and writes its reward to, a number as text.

    Commands that the policy runs, as in a shell tool, must not set the reward. A program may close the descriptor in
    the processes that it starts. If it does not: a socket cannot be opened through /proc, and on Linux the kernel names
    the sender of each message, of whom only processes that ran before the policy's first reply are trusted (`trust`).
    """

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ours.setblocking(False)
        self._knows_senders = sys.platform.startswith("linux")
        if self._knows_senders:
            self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._trusted: set[int] | None = None  # process ids; None: all, because the policy has not replied yet
        self._text: bytes | None = None
        self._refused = False

    @property
    def given(self) -> int:
        return self._theirs.fileno()

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ours, self._receive)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._loop.remove_reader(self._ours)
        self._ours.close()
        self._theirs.close()

    def trust(self, processes: set[int]) -> None:
        """From now on accept rewards only from these processes."""
        self._receive()
        self._trusted = processes

    def value(self) -> float | None:
        """The reward, or None.

        EnvironmentFailed if it is not a number, or was written by a process that the policy may have started.
        """
        self._receive()
        if self._text is None and self._refused:
            raise EnvironmentFailed(
                "the reward came from a process that was started after the policy's first reply, as what the policy"
                " runs is: write it to COVEY_REWARD_FD in the agent itself, or in a process that runs before it asks"
            )
        if self._text is None:
            return None
        if self._refused:
            warn(
                "a process that an agent started after the policy's first reply wrote a reward to COVEY_REWARD_FD,"
                " which is ignored: the agent's own counts. Close the descriptor in the tools of the agent.",
                EnvironmentWarning,
            )
        try:
            return float(self._text)
        except ValueError as error:
            raise EnvironmentFailed("the agent wrote something other than a number to COVEY_REWARD_FD") from error

    def _receive(self) -> None:
        """Read the messages that have arrived; the last one counts."""
        for _ in range(MAX_MESSAGES):
            try:
                text, more, flags, _ = self._ours.recvmsg(MAX_REWARD, socket.CMSG_SPACE(CREDENTIALS.size))
            except BlockingIOError:
                return
            senders = {CREDENTIALS.unpack(data)[0] for _, kind, data in more if kind == SCM_CREDENTIALS}
            if not self._knows_senders or self._trusted is None or (senders and senders <= self._trusted):
                cut = b"..." if flags & socket.MSG_TRUNC else b""  # a message that was cut must not be read as a number
                self._text = text + cut if text.strip() else self._text
            else:
                self._refused = True


class OutputPipe:
    """Pipe whose end `given` a program writes to; the last characters are kept."""

    def __init__(self) -> None:
        self._ours, self.given = os.pipe()
        os.set_blocking(self._ours, False)
        self._written, self._last = 0, b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        os.close(self._ours)
        os.close(self.given)

    async def until_end(self, child: ChildProcess) -> int:
        """Read until the child has ended, and return its exit status; EnvironmentFailed if it writes too much."""
        loop = asyncio.get_running_loop()
        full = loop.create_future()

        def read() -> None:
            self._read()
            if self._written > MAX_OUTPUT and not full.done():
                full.set_result(None)

        ended = asyncio.ensure_future(child.wait())
        loop.add_reader(self._ours, read)
        try:
            await asyncio.wait({ended, full}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                raise EnvironmentFailed(f"the agent wrote more than {MAX_OUTPUT >> 20} MiB to its standard error")
            return ended.result()
        finally:
            loop.remove_reader(self._ours)
            ended.cancel()

    def end(self) -> str:
        """The last characters that were written."""
        while self._read():
            pass
        return printable(self._last[-SHOWN:].decode(errors="replace")).strip()

    def _read(self) -> int:
        """Read the current content of the pipe, once."""
        try:
            data = os.read(self._ours, 1 << 16)
        except BlockingIOError:
            return 0
        self._written += len(data)
        self._last = (self._last + data)[-SHOWN:]
        return len(data)
