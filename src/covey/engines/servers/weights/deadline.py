"""Deadlines of weight transfers: requests and transfers that run at the same time, and whose failure is reported."""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from covey.engines.servers.errors import DeadlineExceeded, GroupNotJoined, ServerError, ServerUnreachable
from covey.engines.servers.http_client import ServerClient

ERROR_SECONDS = 5.0
"""For a server to report why it left a transfer."""

JOIN_SECONDS = 60.0
"""For a server to join a group: a firewall that drops its packets must not use up the time of the other servers."""

R = TypeVar("R")
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass
class Deadline:
    """A moment in time, and the work that must end by then."""

    doing: str
    seconds: float
    at: float = field(init=False)

    def __post_init__(self) -> None:
        self.at = time.monotonic() + self.seconds

    def left(self, server: ServerClient) -> float:
        """Seconds until the deadline.

        Raises:
            DeadlineExceeded: it has passed.
        """
        left = self.at - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(server.url, self.doing, f"not done within {self.seconds:g} seconds")
        return left


async def together(server: ServerClient, doing: str, request: Awaitable[R], transfer: Callable[[], T]) -> tuple[R, T]:
    """Run a request and the transfer it announces; both must succeed.

    When the transfer fails, the server's own error is awaited shortly: it is clearer than "connection closed".

    Raises:
        ServerError: either failed.
    """
    asked = asyncio.ensure_future(request)
    moved = asyncio.ensure_future(in_thread(transfer))
    try:
        await asyncio.wait([asked, moved], return_when=asyncio.FIRST_EXCEPTION)
        if moved.done() and moved.exception() is not None:
            await asyncio.wait([asked], timeout=ERROR_SECONDS)
        if asked.done() and (error := asked.exception()) is not None:
            raise error
        if moved.done() and (cause := moved.exception()) is not None:
            if isinstance(cause, (RuntimeError, OSError)):
                late = "imed out" in str(cause) or "imeout" in str(cause)
                raise (DeadlineExceeded if late else ServerUnreachable)(
                    server.url, doing, _first_line(cause)
                ) from cause
            raise cause
        return asked.result(), moved.result()
    finally:  # cancelled, or one of them failed; the thread ends at its own deadline, or when the channel is closed
        asked.cancel()
        moved.cancel()
        await asyncio.gather(asked, moved, return_exceptions=True)


async def meet(
    server: ServerClient,
    doing: str,
    until: Deadline,
    where: str,
    request: Callable[[float], Awaitable[Any]],
    join: Callable[[float], T],
) -> T:
    """Form a group of a server and this process.

    Args:
        server: the other member.
        doing: for errors.
        until: deadline of the whole update; joining has a limit of its own within that.
        where: address that the server must connect to, for the error.
        request: request to the server to join, given its seconds.
        join: this process's part, given the same; its result is returned.

    Raises:
        GroupNotJoined: not in time.
        ServerError: the server refused.
    """
    seconds = min(JOIN_SECONDS, until.left(server))
    ends = time.monotonic() + seconds
    try:
        _, joined = await together(server, doing, request(seconds), lambda: join(seconds))
    except ServerError as error:
        if not isinstance(error, DeadlineExceeded) and time.monotonic() < ends:
            raise
        hint = f"It must be able to connect to this machine at {where}: open that to it, or send weights as files."
        raise GroupNotJoined(server.url, doing, error.message, hint) from error
    return joined


def _first_line(error: BaseException) -> str:
    """The first line of a message, without the source file that torch puts before it."""
    line = str(error).strip().partition("\n")[0]
    return line.split("] ", 1)[-1].split(" This is typically", 1)[0]


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread of its own, with this thread's current GPU (torch keeps one for each thread)."""
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
    gpu = torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def settle(result: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error is not None else done.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            result = work()
        except BaseException as caught:
            error = caught
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:  # the loop was closed: no task waits any more
            log.debug("a transfer ended after its loop: %r", error)

    threading.Thread(target=run, daemon=True, name="covey-weights").start()
    return await done


async def all_of(awaitables: Any) -> None:
    """Wait for all to end, then raise the first error."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
