"""Which weights servers hold: sends them the policy's, and knows who has them, whatever fails meanwhile.

Everything here belongs to the event loop of the `ServerPool`. Not here: how weights travel (a `WeightTransport`), or
what is sampled with them (`RemoteEngine`).
"""

import asyncio
import contextlib
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Sequence

import torch

from covey.core.weights import WeightUpdate
from covey.engines.servers.errors import (
    RETRIED,
    DeadlineExceeded,
    GroupNotJoined,
    ServerBusy,
    ServerError,
    ServerRefused,
    ServerUnreachable,
)
from covey.engines.servers.handshake import LOOK_SECONDS
from covey.engines.servers.protocols import ServerApi, WeightTransport
from covey.engines.servers.server_pool import QUICK_SECONDS, PoolMember, ServerPool
from covey.engines.servers.sleep import SleepMode

GRACE_SECONDS = 5.0
"""After a pause, for what was in flight to come back."""

SEND_ATTEMPTS = 3
"""How often weights are sent to servers that live and fail at taking them."""


class ServerWeights:
    """Brings servers to versions of the policy.

    Args:
        fleet: the servers.
        dialect: how they are spoken to.
        transport: how weights reach them.
        sleep: those that sleep are woken to be sent weights.
        timeout: seconds an update may take in all.
        resend: see `RemoteEngine`.

    Attributes:
        version: of the weights that completions are sampled with; None before any were sent.
        sends: it is this process that sends them.
        changing: held while weights change, or servers fall asleep or wake.
    """

    def __init__(
        self,
        fleet: ServerPool,
        dialect: ServerApi,
        transport: WeightTransport,
        sleep: SleepMode,
        *,
        timeout: float,
        resend: bool,
    ):
        self.version: int | None = None
        self.sends = False
        self.changing = asyncio.Lock()
        self._fleet = fleet
        self._dialect = dialect
        self._transport = transport
        self._sleep = sleep
        self._timeout = timeout
        self._resend = resend
        self._run = uuid.uuid4().hex[:8]
        self._hopeless: dict[PoolMember, ServerError] = {}  # they live and take no weights
        self._latest: WeightUpdate | None = None
        self._news = asyncio.Event()

    @property
    def holders(self) -> list[str]:
        """URLs of the servers that have the current version."""
        return [member.url for member in self._fleet.members if member.up and member.version == self.version]

    # ---- sending ---------------------------------------------------------------------------------------------------

    async def load(self, update: WeightUpdate, device: int | None) -> None:
        """Bring every server that lives to `update`, within the timeout.

        Args:
            update: the weights.
            device: CUDA device of the thread that has them; None: no GPU is used.
        """
        if device is not None:
            torch.cuda.set_device(device)  # threads have a device each
        self.sends = True
        until = time.monotonic() + self._timeout
        doing = f"send weights of version {update.version}"
        async with self.changing:
            with self._fleet.held():
                self._latest, self.version = update, update.version
                try:
                    await self._bring(update, until, doing)
                except BaseException as error:
                    for member in self._fleet.up:  # nobody knows what they hold now
                        self._fleet.leave_out(member, error)
                    raise
        self._tell_news()

    async def _bring(self, update: WeightUpdate, until: float, doing: str) -> None:
        """Send until somebody has it; one that lives and fails is tried again by itself, after the others."""
        failures: Counter[PoolMember | None] = Counter()  # None: nobody's in particular
        done = False
        while True:
            reachable = await self._fleet.reachable(until, doing)
            failing = [member for member in reachable if failures[member]]
            members = failing if done else [member for member in reachable if member not in failing] or failing
            if not members:
                return
            try:
                if await self._update(members, update, until, doing):
                    done = True
                    for member in members:
                        del failures[member]
            except ServerRefused:
                raise
            except ServerError as error:
                if not await self._lose(members, error):
                    blamed = next((member for member in members if member.url == error.url), None)
                    failures[blamed] += SEND_ATTEMPTS if isinstance(error, GroupNotJoined) else 1
                    if failures[blamed] >= SEND_ATTEMPTS:
                        others = [m for m in self._fleet.members if m is not blamed and m not in self._hopeless]
                        if blamed is None or not others:
                            raise
                        self._give_up(blamed, error)
                if time.monotonic() >= until:
                    if not done:
                        raise
                    for member in members:
                        if member.up:
                            self._fleet.leave_out(member, error)
                    return

    def _give_up(self, member: PoolMember, error: ServerError) -> None:
        """Send a server no more weights until it has been away, as it is while it is started anew."""
        self._fleet.leave_out(member, error)
        self._hopeless[member] = error
        warnings.warn(
            f"{error} It lives and takes no weights, so the run goes on without it; start it anew to have it back.",
            stacklevel=2,
        )

    async def _update(self, members: list[PoolMember], update: WeightUpdate, until: float, doing: str) -> bool:
        """Pause, send, resume; whether any of `members` has the new weights."""
        for member in members:
            if not member.up:
                self._transport.forget(member.server)
        await self._sleep.wake(members)
        try:
            members = await self._fleet.each(members, self._dialect.pause)
            await self._fleet.drain(members, GRACE_SECONDS)
            if members:
                await self._send(members, update, until, doing)
                members = await self._fleet.each(members, self._dialect.forget_prefixes)
                stamp = self._stamp(update.version)
                members = await self._fleet.each(
                    members, lambda server, deadline: self._dialect.write_stamp(server, stamp, deadline)
                )
        finally:
            members = await self._fleet.each(members, self._dialect.resume)
        for member in members:
            member.version = update.version
            self._fleet.admit(member)
        return bool(members)

    async def _send(self, members: list[PoolMember], update: WeightUpdate, until: float, doing: str) -> None:
        """Have the transport send; a server that dies meanwhile ends it, whatever the transport waits for."""
        left = max(1.0, until - time.monotonic())
        servers = [member.server for member in members]
        with torch.no_grad():
            sending = asyncio.ensure_future(self._transport.send(servers, update, left))
        watching = asyncio.ensure_future(self._fleet.watch(members))
        try:
            await asyncio.wait([sending, watching], timeout=left + 1.0, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                return sending.result()
            if watching.done():
                gone = watching.result()
                raise ServerUnreachable(gone.url, doing, f"it died meanwhile ({gone.words or 'it does not answer'})")
            urls = ", ".join(member.url for member in members)
            raise DeadlineExceeded(urls, doing, f"{self._transport.name} took longer than {left:.0f} seconds")
        except GroupNotJoined:
            raise  # that has a limit of its own
        except DeadlineExceeded as error:
            raise DeadlineExceeded.of(self._dialect.settings.sync_timeout, error) from error
        finally:
            for task in (sending, watching):
                task.cancel()
            await asyncio.wait([sending, watching], timeout=GRACE_SECONDS)

    async def _lose(self, members: list[PoolMember], error: ServerError) -> bool:
        """Leave out whoever is to blame for `error`; whether anybody is."""
        asked = [member for member in members if not member.words]
        for member in await self._fleet.each(asked, self._dialect.alive):
            if member.url == error.url and isinstance(error, RETRIED) and not isinstance(error, GroupNotJoined):
                self._fleet.leave_out(member, error)
        return any(member.words for member in asked)

    # ---- who holds what --------------------------------------------------------------------------------------------

    async def adopt(self, version: int, urls: Sequence[str] | None) -> None:
        """Learn that `urls` hold `version`, which another process has sent; None: all that are up."""
        self.version = version
        for member in self._fleet.members:
            if member.url in urls if urls is not None else member.up or member.behind:
                member.version = version
                self._fleet.admit(member)
            elif member.up:
                self._fleet.leave_out(member, "it did not get the latest weights")
        self._tell_news()

    async def readmit(self, member: PoolMember) -> bool:
        """Whether a server that was left out may sample: it lives, and holds the current weights."""
        try:
            await self._fleet.alive(member)
        except (ServerUnreachable, ServerBusy):
            self._hopeless.pop(member, None)
            raise
        if (hopeless := self._hopeless.get(member)) is not None:
            raise ServerError(hopeless.url, hopeless.doing, hopeless.said, "Start it anew to have it back.")
        await self._sleep.wake_returning(member)
        if self.version is None:
            return True
        if member.version == self.version and await self._is_ours(member):
            return True
        update = self._latest
        if not self._resend or update is None or self.changing.locked():
            return False
        async with self.changing:
            member.facts = await self._dialect.look(member.server, LOOK_SECONDS)
            until = time.monotonic() + self._timeout
            try:
                return await self._update([member], update, until, f"send weights of version {update.version}")
            except GroupNotJoined as error:
                self._give_up(member, error)
                raise

    async def recheck(self) -> None:
        """Leave out servers that lost what they were sent, as by being started anew since their last answer.

        Raises:
            ServerRefused: another run sent a server weights.
        """
        if self.version is not None:
            await asyncio.gather(*(self._recheck(member) for member in self._fleet.up))

    async def _recheck(self, member: PoolMember) -> None:
        try:
            if not await self._is_ours(member):
                self._fleet.leave_out(member, "it was started anew and lost the weights it was sent")
        except RETRIED as error:
            self._fleet.leave_out(member, error)

    def _stamp(self, version: int) -> str:
        return f"covey-{self._run}-{version}"

    async def _is_ours(self, member: PoolMember) -> bool:
        """Whether the server still holds what it was sent.

        Raises:
            ServerRefused: another run sends it weights.
        """
        stamp = await self._dialect.read_stamp(member.server, QUICK_SECONDS)
        if stamp is None:  # it keeps no notes: believe it unless it may have been started anew
            return member.up
        _, _, rest = stamp.partition("covey-")
        run, _, version = rest.partition("-")
        if run and self.sends and run != self._run:
            raise ServerRefused(
                member.url,
                "sample for this run",
                f"another run has sent it weights (it is stamped {stamp!r})",
                "Give every run servers of its own.",
            )
        return version == str(member.version)

    async def wait_for_news(self, version: int | None) -> None:
        """Where another process sends the weights, an aborted request means that it does so now."""
        if self.sends or version is None or self.version != version:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), self._timeout)

    def _tell_news(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
