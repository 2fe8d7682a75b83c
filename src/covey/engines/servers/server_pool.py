"""Pool of inference servers in one event loop: the least loaded gets the next request, failed ones are left out."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from covey.engines.servers.errors import RETRIED, DeadlineExceeded, NoServerLeft, ServerError, ServerRefused
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.protocols import ScoringApi, ServerApi, ServerFacts, SettingNames
from covey.runtime.user_code import warn

T = TypeVar("T")
Request = Callable[[ServerClient, float], Awaitable[None]]  # (server, deadline in seconds)
ATTEMPTS = 3  # unusable answers to one request before it fails
LATE = 2  # missed deadlines of one request before it fails: a server that is too slow stays too slow
QUICK_SECONDS = 15.0  # deadline of health checks and pauses; long, because a server may be busy
PROBE_SECONDS = 30.0  # deadline for a server to report its properties
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0  # seconds until a server that failed is checked again, doubled every time
WATCH_EVERY = 10.0  # seconds between health checks during requests: a frozen server keeps its connections open
MISSES = 2  # health checks in a row that must fail before a server loses its requests in flight


@dataclass(eq=False)
class PoolMember:
    server: ServerClient
    facts: ServerFacts
    version: int | None = None  # of the weights it holds; None: it holds the weights it was started with
    up: bool = True  # it may get requests
    load: int = 0  # completions in flight
    last_error: str = ""  # text of its last failure; empty if it is healthy, even if it still lacks weights
    calls: set[asyncio.Task[Any]] = field(default_factory=set)  # requests in flight
    misses: int = 0  # failed health checks in a row
    joined: bool = False  # after the run began

    @property
    def url(self) -> str:
        return self.server.url


@dataclass(eq=False)
class ServerPool:
    members: list[PoolMember]
    api: ServerApi | ScoringApi
    readmit: Callable[[PoolMember], Awaitable[bool]]  # True if a server that was left out may take part again
    concurrency: int  # most completions in flight at a server; a larger request has a server to itself
    timeout: float  # seconds to wait for a server when none is left
    doing: str = "generate"  # purpose of the requests as an infinitive, for errors
    _held: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _revivals: dict[PoolMember, asyncio.Task[None]] = field(default_factory=dict)
    _joining: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # by URL; finished tasks: it was refused
    _join_errors: dict[str, str] = field(default_factory=dict)  # last error of servers that are to join, by URL
    _watch: asyncio.Task[None] | None = None

    @property
    def up(self) -> list[PoolMember]:
        return [member for member in self.members if member.up]

    async def run(self, call: Callable[[PoolMember], Coroutine[Any, Any, T]], load: int = 1) -> T:
        """Send a request to a server; if it fails with an error that may pass, try another server or the same later.

        `call` may be started several times; `load` is its number of completions. Raises `ServerRefused`, the last
        `ServerError` of a server that responds, or `NoServerLeft` if all failed and none came back in time.
        """
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._watch_requests())
        failed: set[PoolMember] = set()
        strikes = late = lost = 0
        since: float | None = None
        while True:
            member = await self._select(load, failed)
            task = asyncio.create_task(call(member))
            member.calls.add(task)
            member.load += load
            try:
                return await task
            except asyncio.CancelledError:
                caller = asyncio.current_task()
                if caller is not None and caller.cancelling():
                    raise
                # otherwise `recall` cancelled it: the server froze, or its weights are about to change
            except RETRIED as error:
                lost += 1
                if isinstance(error, DeadlineExceeded):
                    late += 1
                    failed.add(member)
                since = since or time.monotonic()
                if late == LATE or (lost >= ATTEMPTS and time.monotonic() - since >= self.timeout):
                    raise
                self.leave_out(member, error)
            except ServerRefused:
                raise
            except ServerError as error:
                strikes += 1
                if strikes == ATTEMPTS:
                    raise
                failed.add(member)
                if type(error) is ServerError:  # HTTP 500: the server may be failing
                    self.leave_out(member, error)
            finally:
                member.calls.discard(task)
                member.load -= load
                self._notify()

    async def _select(self, load: int, failed: set[PoolMember]) -> PoolMember:
        """The least loaded member with room, preferably one that has not failed this request."""
        empty_since: float | None = None
        while True:
            patience: float | None = None
            if not self._held and self.up:
                empty_since = None
                pool = [member for member in self.up if member not in failed] or self.up
                free = [member for member in pool if not member.load or member.load + load <= self.concurrency]
                if free:
                    return min(free, key=lambda member: member.load)
            elif not self._held:
                empty_since = empty_since or time.monotonic()
                patience = empty_since + self.timeout - time.monotonic()
                if patience <= 0:
                    raise self.none_left(self.doing, self.timeout)
            await self.wait(patience)

    def none_left(self, doing: str, waited: float) -> NoServerLeft:
        return NoServerLeft(
            f"cannot {doing}: none of {len(self.members)} inference servers can be used, and none came back within"
            f" {waited:g} seconds. Start one again at its address and resume from the last checkpoint, or wait longer"
            f" ({self.api.settings.timeout}). The last error of each:",
            {**self._join_errors, **{member.url: member.last_error for member in self.members}},
        )

    def follow(
        self,
        servers: Iterable[ServerClient],
        obstacle: Callable[[ServerFacts], str | None],
        joins: Callable[[ServerClient, ServerFacts], None] = lambda server, facts: None,
    ) -> list[PoolMember]:
        """Make `servers` the servers of the pool: new ones join once they are up and hold the weights.

        `obstacle` returns the reason why a server with these properties cannot join, or None; `joins` is called where
        there is none. Returns the members that were removed.
        """
        wanted = {server.url: server for server in servers}
        left = [member for member in self.members if member.url not in wanted]
        for member in left:
            self.remove(member)
        for url in self._joining.keys() - wanted.keys():
            self._joining.pop(url).cancel()
            self._join_errors.pop(url, None)
        for url in wanted.keys() - self._joining.keys() - {member.url for member in self.members}:
            self._joining[url] = asyncio.create_task(self._join(wanted[url], obstacle, joins))
        return left

    async def _join(
        self,
        server: ServerClient,
        obstacle: Callable[[ServerFacts], str | None],
        joins: Callable[[ServerClient, ServerFacts], None],
    ) -> None:
        """Wait for a server to be up and add it to the pool; warn if it does not suit the run."""
        pause, api = FIRST_PAUSE, cast(ServerApi, self.api)  # servers that only score tokens never join
        while True:
            try:
                facts = await api.probe(server, PROBE_SECONDS)
                if (why := obstacle(facts)) is not None:
                    raise ServerRefused(server.url, "join the pool of servers", why, "Start it like the others.")
                await api.resume(server, QUICK_SECONDS)  # a run that was killed may have left it paused
                break
            except ServerRefused as error:
                self._join_errors[server.url] = str(error)
                warn(f"{error} The run continues without it; list it again once it suits.")
                return
            except ServerError as error:
                self._join_errors[server.url] = str(error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        joins(server, facts)
        member = PoolMember(server, facts, joined=True)
        self.members.append(member)
        del self._joining[server.url]
        self._join_errors.pop(server.url, None)
        self.leave_out(member, "it joined and has no weights yet")
        member.last_error = ""  # it is healthy, and the next update reaches it

    def remove(self, member: PoolMember) -> None:
        """Send a server no more requests; those in flight continue, and start again elsewhere if they fail."""
        self.members.remove(member)
        member.up = False
        revival = self._revivals.pop(member, None)
        if revival is not None:
            revival.cancel()
        self._notify()

    def leave_out(self, member: PoolMember, error: BaseException | str) -> None:
        """Send a member no more requests until it has recovered; requests in flight continue."""
        member.last_error = str(error) or type(error).__name__
        member.up = False
        if member not in self._revivals and member in self.members:
            self._revivals[member] = asyncio.create_task(self._revive(member))
        self._notify()

    def admit(self, member: PoolMember) -> None:
        member.up, member.last_error, member.misses = True, "", 0
        revival = self._revivals.pop(member, None)
        if revival is not None and revival is not asyncio.current_task():
            revival.cancel()
        self._notify()

    async def _revive(self, member: PoolMember) -> None:
        pause = FIRST_PAUSE
        while not member.up:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            try:
                if await self.readmit(member):
                    self.admit(member)
                else:
                    member.last_error = ""
            except Exception as error:  # perhaps not the server's fault, as when a disk is full; it is checked again
                member.last_error = str(error) or type(error).__name__

    async def first_dead(self, members: list[PoolMember]) -> PoolMember:
        """Check the health of `members` until one fails `MISSES` checks in a row, and return that one."""
        while True:
            await asyncio.sleep(WATCH_EVERY)
            await asyncio.gather(*(self._check(member) for member in members))
            dead = next((member for member in members if member.misses >= MISSES), None)
            if dead is not None:
                return dead

    async def _watch_requests(self) -> None:
        while any(member.calls for member in self.members) or self._revivals:
            await asyncio.sleep(WATCH_EVERY)
            await asyncio.gather(*(self._check(member) for member in self.members if member.calls))

    async def _check(self, member: PoolMember) -> None:
        try:
            await self.api.check_alive(member.server, QUICK_SECONDS)
            member.misses = 0
        except ServerError as error:
            member.misses += 1
            if member.misses >= MISSES and (member.up or member.calls):  # a member left out may still have requests
                self.leave_out(member, error)
                self.recall([member])

    async def each(self, members: list[PoolMember], do: Request, seconds: float | None = None) -> list[PoolMember]:
        """Send `do` to all `members` at once; returns those that succeed and leaves out the others.

        A `ServerRefused` is raised.
        """
        deadline = QUICK_SECONDS if seconds is None else seconds
        results = await asyncio.gather(*(do(member.server, deadline) for member in members), return_exceptions=True)
        for member, error in zip(members, results, strict=True):
            if isinstance(error, ServerError) and not isinstance(error, ServerRefused):
                self.leave_out(member, error)
            elif isinstance(error, BaseException):
                raise error
        return [member for member, error in zip(members, results, strict=True) if error is None]

    async def hold(self) -> None:
        """Make new requests wait until `unhold`."""
        self._held += 1

    async def unhold(self) -> None:
        self._held -= 1
        self._notify()

    def recall(self, members: Iterable[PoolMember]) -> None:
        """Cancel requests in flight; `run` starts them again."""
        for member in members:
            for task in list(member.calls):
                task.cancel()

    async def drain(self, members: Iterable[PoolMember], seconds: float) -> None:
        """Wait for the answers of requests in flight, at most `seconds`, and recall the others: they had not begun."""
        calls = [task for member in members for task in member.calls]
        if calls:
            await asyncio.wait(calls, timeout=seconds)
        self.recall(members)

    async def reachable(self, until: float, doing: str) -> list[PoolMember]:
        """Members that can be sent weights; waits for the first one, at most until `until` (`time.monotonic`)."""
        began = time.monotonic()
        until = min(until, began + self.timeout)
        while all(member.last_error for member in self.members):
            left = until - time.monotonic()
            if left <= 0:
                raise self.none_left(doing, round(until - began, 1))
            await self.wait(min(left, FIRST_PAUSE))
        return [member for member in self.members if not member.last_error]

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, seconds: float | None) -> None:
        """Wait until a server is admitted or left out, or a request ends, for `seconds` at most."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)


async def probe_all(
    servers: Sequence[ServerClient],
    probe: Callable[[ServerClient, float], Awaitable[T]],
    name: str,
    settings: SettingNames,
    timeout: float,
) -> list[T]:
    """Results of `probe(server, seconds)` for each server as soon as it is up, in the order of the servers.

    `name` is the backend's name in messages. Raises NoServerLeft if some are not up within `timeout` seconds, and any
    error of a probe of a server that is up.
    """
    found = await asyncio.gather(*(_first_probe(server, probe, timeout) for server in servers))
    lost = {server.url: str(one) for server, one in zip(servers, found, strict=True) if isinstance(one, _NotUp)}
    if lost:
        raise NoServerLeft(
            f"{len(lost)} of {len(servers)} {name} servers did not come up within {timeout:g} seconds."
            " Check the addresses and start them; one that loads a large model may need a longer"
            f" {settings.timeout}. The last error of each:",
            lost,
        )
    return [one for one in found if not isinstance(one, _NotUp)]


@dataclass(frozen=True)
class _NotUp:
    """The last failure of a server that is not up in time."""

    error: ServerError

    def __str__(self) -> str:
        return str(self.error)


async def _first_probe(
    server: ServerClient, probe: Callable[[ServerClient, float], Awaitable[T]], timeout: float
) -> "T | _NotUp":
    until = time.monotonic() + timeout
    while True:
        try:
            return await probe(server, min(PROBE_SECONDS, max(1.0, until - time.monotonic())))
        except RETRIED as error:
            if time.monotonic() + FIRST_PAUSE >= until:
                return _NotUp(error)
        await asyncio.sleep(FIRST_PAUSE)
