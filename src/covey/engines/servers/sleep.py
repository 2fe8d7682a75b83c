"""Servers that give their memory back between samplings, where a run has them to itself.

Not here: when they sleep (`RemoteEngine.awake`), or how a make of server is told to (its `ServerApi`).
"""

from collections.abc import Sequence

from covey.engines.servers.protocols import ServerApi
from covey.engines.servers.server_pool import PoolMember, ServerPool


class SleepMode:
    """Lays servers down and wakes them.

    Args:
        fleet: the servers.
        dialect: how they are spoken to.
        used: False: they are always awake.
        seconds: to fall asleep or wake up; as long as for new weights, since as many bytes move.
    """

    def __init__(self, fleet: ServerPool, dialect: ServerApi, used: bool, seconds: float):
        self._fleet = fleet
        self._dialect = dialect
        self._used = used
        self._seconds = seconds
        self._asleep = False

    async def wake(self, wanted: Sequence[PoolMember] = ()) -> None:
        """Wake who sleeps; among the `wanted`, also those that were left out, who may have been asleep then."""
        lying = self._fleet.up if self._asleep else []
        if self._used:
            lying += [member for member in wanted if not member.up]
        await self._fleet.each(lying, self._dialect.wake, self._seconds)
        self._asleep = False

    async def wake_returning(self, member: PoolMember) -> None:
        """Wake one that comes back while the others are awake: it may have been left out asleep."""
        if self._used and not self._asleep:
            await self._dialect.wake(member.server, self._seconds)

    async def lie_down(self) -> None:
        """Have all that are up release their memory."""
        self._asleep = True
        await self._fleet.each(
            self._fleet.up, lambda server, deadline: self._dialect.sleep(server, 1, deadline), self._seconds
        )
