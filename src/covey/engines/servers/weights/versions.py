"""Weight versions of servers, in the pool's event loop: sends weights, and records which server holds which."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from covey.core.engine import WeightTransfer, WeightUpdate
from covey.engines.servers.errors import (
    RETRIED,
    DeadlineExceeded,
    GroupNotJoined,
    ServerBusy,
    ServerError,
    ServerRefused,
    ServerUnreachable,
)
from covey.engines.servers.protocols import ServerApi
from covey.engines.servers.server_pool import PROBE_SECONDS, QUICK_SECONDS, PoolMember, ServerPool
from covey.engines.servers.weights.sender import WeightSender
from covey.runtime.user_code import warn

GRACE_SECONDS = 5.0  # that requests in flight may take to return after a pause
SEND_ATTEMPTS = 3  # attempts to send weights to a server that responds but fails to load them


@dataclass(eq=False)
class ServerWeights:
    """Sends versions of the policy to servers within `timeout` seconds; `resend` and `sleeps` as in `RemoteEngine`."""

    pool: ServerPool
    api: ServerApi
    sender: WeightSender
    timeout: float
    resend: bool
    sleeps: bool
    version: int | None = None  # of the weights that completions are sampled with; None before any were sent
    sends: bool = False  # this process sends them
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)  # while weights change, or servers fall asleep or wake
    _asleep: bool = False
    _excluded: dict[PoolMember, ServerError] = field(default_factory=dict)  # they respond but fail to load weights
    _failures: Counter[PoolMember] = field(default_factory=Counter)  # of weight updates to servers that came back
    _latest: dict[str | None, WeightUpdate] = field(default_factory=dict)  # by adapter name; the last one sent is last

    async def load(self, update: WeightUpdate, device: int | None) -> WeightTransfer | None:
        """Send `update` to every server that responds; `device` is the current CUDA device of the caller's thread.

        Returns what was sent, if the sender's `differences` is on, else None.
        """
        if device is not None:
            torch.cuda.set_device(device)  # torch has a current device per thread
        self.sends = True
        until = time.monotonic() + self.timeout
        doing = f"send weights of version {update.version}"
        async with self.changing:
            await self.pool.hold()
            self._latest.pop(update.adapter_name, None)
            self._latest[update.adapter_name], self.version = update, update.version
            try:
                return await self._send_until_held(update, until, doing)
            except BaseException as error:
                if update.adapter_name is not None:
                    del self._latest[update.adapter_name]  # the others can be sent again
                for member in self.pool.up:  # their weights are unknown now
                    self.pool.leave_out(member, error)
                raise
            finally:
                await self.pool.unhold()

    async def _send_until_held(self, update: WeightUpdate, until: float, doing: str) -> WeightTransfer | None:
        """Retry until a server holds the update; one that responds but fails is retried alone, after the others."""
        failures: Counter[PoolMember | None] = Counter()  # None: of no server in particular
        done, sent = False, WeightTransfer(0, 0, 0)
        while True:
            reachable = await self.pool.reachable(until, doing)
            failing = [member for member in reachable if failures[member]]
            members = failing if done else [member for member in reachable if member not in failing] or failing
            if not members:
                return sent if sent.servers else None
            try:
                updated, transfer = await self._update(members, update, until, doing)
                if updated:
                    done, sent = True, sent if transfer is None else sent + transfer
                    for member in members:
                        del failures[member]
            except ServerRefused as error:
                refusing = next((member for member in members if member.url == error.url), None)
                if refusing is None or not refusing.joined or not self._others(refusing):
                    raise  # the run was started with a server that does not suit it
                self._exclude(refusing, error)
            except ServerError as error:
                if not await self._leave_out_failed(members, error):
                    blamed = next((member for member in members if member.url == error.url), None)
                    failures[blamed] += SEND_ATTEMPTS if isinstance(error, GroupNotJoined) else 1
                    if failures[blamed] >= SEND_ATTEMPTS:
                        if blamed is None or not self._others(blamed):
                            raise
                        self._exclude(blamed, error)
                if time.monotonic() >= until:
                    if not done:
                        raise
                    for member in members:
                        if member.up:
                            self.pool.leave_out(member, error)
                    return sent if sent.servers else None

    def _others(self, member: PoolMember) -> list[PoolMember]:
        """Members that load weights, without this one."""
        return [one for one in self.pool.members if one is not member and one not in self._excluded]

    def _exclude(self, member: PoolMember, error: ServerError) -> None:
        """Send a server no more weights until it has stopped responding once, as in a restart."""
        self.pool.leave_out(member, error)
        self._excluded[member] = error
        warn(
            f"{error} It responds but cannot load weights; the run continues without it. Restart it to use it again.",
        )

    async def _update(
        self, members: list[PoolMember], update: WeightUpdate, until: float, doing: str
    ) -> tuple[bool, WeightTransfer | None]:
        """Pause, send and resume; returns True if any of `members` has the weights, and the sender's result."""
        updates, sent = [update], None
        for member in members:
            if not member.up:  # it may have been restarted, and lack the other adapters as well
                self.sender.invalidate(member.server)
                updates = [*self._latest.values()]
        await self.wake(members)
        try:
            members = await self.pool.each(members, self.api.pause)
            await self.pool.drain(members, GRACE_SECONDS)
            if members:
                for one in updates:
                    sent = await self._send(members, one, until, doing)
                members = await self.pool.each(members, self.api.clear_prefix_cache)
        finally:
            members = await self.pool.each(members, self.api.resume)
        for member in members:
            member.version = update.version
            self.pool.admit(member)
        return bool(members), sent

    async def _send(
        self, members: list[PoolMember], update: WeightUpdate, until: float, doing: str
    ) -> WeightTransfer | None:
        """Run the sender, and stop it if a server dies in the meantime, even while it waits for another."""
        left = max(1.0, until - time.monotonic())
        servers = [member.server for member in members]
        with torch.no_grad():
            sending = asyncio.ensure_future(self.sender.send(servers, update, left))
        watching = asyncio.ensure_future(self.pool.first_dead(members))
        try:
            await asyncio.wait([sending, watching], timeout=left + 1.0, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                return sending.result()
            if watching.done():
                dead = watching.result()
                message = f"it died in the meantime ({dead.last_error or 'it does not answer'})"
                raise ServerUnreachable(dead.url, doing, message)
            urls = ", ".join(member.url for member in members)
            raise DeadlineExceeded(urls, doing, f"{self.sender.api.name} took longer than {left:.0f} seconds")
        except GroupNotJoined:
            raise  # it has a limit of its own
        except DeadlineExceeded as error:
            raise DeadlineExceeded.of(self.api.settings.sync_timeout, error) from error
        finally:
            for task in (sending, watching):
                task.cancel()
            await asyncio.wait([sending, watching], timeout=GRACE_SECONDS)

    async def _leave_out_failed(self, members: list[PoolMember], error: ServerError) -> bool:
        healthy = [member for member in members if not member.last_error]
        for member in await self.pool.each(healthy, self.api.check_alive):
            if member.url == error.url and isinstance(error, RETRIED) and not isinstance(error, GroupNotJoined):
                self.pool.leave_out(member, error)
        return any(member.last_error for member in healthy)

    async def wake(self, members: Sequence[PoolMember] = ()) -> None:
        """Wake servers that sleep; of `members` also those left out, which may have been asleep at that time."""
        sleeping = self.pool.up if self._asleep else []
        if self.sleeps:
            sleeping += [member for member in members if not member.up]
        await self.pool.each(sleeping, self.api.wake, self.timeout)
        self._asleep = False

    async def sleep(self) -> None:
        self._asleep = True
        await self.pool.each(self.pool.up, lambda server, deadline: self.api.sleep(server, 1, deadline), self.timeout)

    async def adopt(self, version: int, urls: Sequence[str]) -> None:
        """Record that the servers `urls` hold `version`, which another process sent."""
        self.version = version
        for member in self.pool.members:
            if member.url in urls:
                member.version = version
                self.pool.admit(member)
            elif member.up:
                self.pool.leave_out(member, "it did not get the latest weights")

    async def readmit(self, member: PoolMember) -> bool:
        """Tell whether a server that was left out may sample again: it answers and holds the current weights."""
        try:
            await self.api.check_alive(member.server, QUICK_SECONDS)
        except (ServerUnreachable, ServerBusy):
            self._excluded.pop(member, None)
            del self._failures[member]  # of the server before its restart
            raise
        if (reason := self._excluded.get(member)) is not None:
            raise ServerError(reason.url, reason.doing, reason.message, "Restart it to have it back.")
        if self.sleeps and not self._asleep:  # it may have been left out while it slept
            await self.api.wake(member.server, self.timeout)
        if self.version is None:
            return True
        if member.version == self.version and await self._holds_version(member):
            return True
        if not self.resend or not self._latest or self.changing.locked():
            return False
        update = [*self._latest.values()][-1]
        async with self.changing:
            member.facts = await self.api.probe(member.server, PROBE_SECONDS)
            until = time.monotonic() + self.timeout
            try:
                updated, _ = await self._update([member], update, until, f"send weights of version {update.version}")
            except ServerError as error:
                passes = isinstance(error, RETRIED) and not isinstance(error, GroupNotJoined)
                self._failures[member] += 0 if passes else 1
                attempts = 1 if member.joined and isinstance(error, ServerRefused) else SEND_ATTEMPTS
                last = attempts if self._others(member) else math.inf  # the only one has the pool's deadline
                if isinstance(error, GroupNotJoined) or self._failures[member] >= last:
                    self._exclude(member, error)
                raise
            del self._failures[member]
            return updated

    async def recheck(self) -> None:
        """Leave out servers that lost their weights, as in a restart; `ServerRefused` if another run sent weights."""
        if self.version is not None:
            await asyncio.gather(*(self._recheck(member) for member in self.pool.up))

    async def _recheck(self, member: PoolMember) -> None:
        try:
            if not await self._holds_version(member):
                self.pool.leave_out(member, "it was restarted and lost the weights it was sent")
        except RETRIED as error:
            self.pool.leave_out(member, error)

    async def _holds_version(self, member: PoolMember) -> bool:
        """Tell whether the server holds the weights recorded for it; `ServerRefused` if another run sends it some."""
        stamp = await self.sender.api.read_stamp(member.server, QUICK_SECONDS)
        _, _, rest = stamp.partition("covey-")
        run, _, version = rest.partition("-")
        if run and self.sends and run != self.sender.run:
            message = f"another run has sent it weights (it is stamped {stamp!r})"
            raise ServerRefused(member.url, "sample for this run", message, "Give every run servers of its own.")
        return version == str(member.version)

    async def wait_for_update(self, version: int | None) -> None:
        """Wait for the next version after an aborted request, if another process sends the weights."""
        until = time.monotonic() + self.timeout
        while not self.sends and version is not None and version == self.version and time.monotonic() < until:
            await self.pool.wait(until - time.monotonic())
