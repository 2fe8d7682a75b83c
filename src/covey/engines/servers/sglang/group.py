"""Process group in which the trainer, rank 0, broadcasts weights to the processes of one SGLang server.

SGLang creates its end with torch's helper for named groups; this is the same with a deadline on every step. Any failure
ends the group, and the next update creates another.
"""

import time
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from covey.engines.servers.weights.channels import nccl_that_raises, open_store

SPARE_SECONDS = 3600.0
"""Beyond the deadline here, so that NCCL's own timeout does not come first."""


class SglangGroup:
    """Rank 0 of a group that the server joins at `address` and `port`, as `name`; a `WeightChannel`.

    Args:
        address: of this machine, as the server reaches it; the store listens on it alone.
        size: number of processes, this one included.
        backend: "nccl" or "gloo".
        port: to listen on; 0 takes a free one.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """

    def __init__(self, address: str, size: int, backend: str, port: int = 0):
        self.address, self.size, self.backend = address, size, backend
        self.name = f"covey-{uuid.uuid4().hex}"
        self._store: Any = open_store(address, port, SPARE_SECONDS)
        self._group: Any = None

    @property
    def port(self) -> int:
        """Port that it listens on."""
        return int(self._store.port)

    def join(self, seconds: float) -> None:
        """Wait for the other members.

        Raises:
            RuntimeError: they did not join in time, or could not be connected.
        """
        # The two ends meet under keys of the store that only this private helper knows; the server uses it too.
        from torch.distributed.distributed_c10d import Backend, _new_process_group_helper

        self._store.set_timeout(timedelta(seconds=max(seconds, 0.001)))
        with nccl_that_raises():
            group, _ = _new_process_group_helper(
                self.size,
                0,
                [],
                Backend(self.backend),
                dist.PrefixStore(self.name, self._store),
                group_name=self.name,  # type: ignore[arg-type]
                timeout=timedelta(seconds=seconds if self.backend == "gloo" else seconds + SPARE_SECONDS),
            )
        self._group = group

    def send(self, data: Tensor, seconds: float) -> None:
        """Broadcast to all members, and wait until it is done.

        Raises:
            RuntimeError: the connection broke, or it took longer; the group is unusable then.
        """
        if self._group is None:
            raise RuntimeError("the connection was closed")
        work = self._group.broadcast(data, 0)
        until, pause = time.monotonic() + seconds, 1e-4
        while not work.is_completed():
            if time.monotonic() > until:
                raise RuntimeError(f"timed out: {data.nbytes} bytes were not taken within {seconds:g} seconds")
            time.sleep(pause)
            pause = min(2 * pause, 0.005)
        work.wait()

    def close(self) -> None:
        """Leave in any state; members that still wait get an error."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(Exception):
                group.abort()
            with suppress(Exception):
                dist.destroy_process_group(group)
        self._store = None
