"""The process group in which a trainer broadcasts weights to one SGLang server: rank 0 here, the others there.

SGLang makes its end with torch's own helper for named groups; this is the same with a deadline on every step. Any
failure ends the group, and the next update makes another.
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
"""Beyond a deadline of ours: NCCL's own expiry is not to come first."""


class SglangGroup:
    """Rank 0 of a group that the server is told to join at `address` and `port`, as `name`.

    Args:
        address: of this machine, as the server reaches it; nothing listens wider.
        size: processes in all, this one included.
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
        """That it listens on."""
        return int(self._store.port)

    def join(self, seconds: float) -> None:
        """Wait for the others.

        Raises:
            RuntimeError: they did not come in time, or could not be connected.
        """
        # The two ends look for each other under keys of the store that this helper alone knows; the server uses it
        # too, which is why a private function is called here.
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

    def broadcast(self, data: Tensor, seconds: float) -> None:
        """Send to everyone, and wait until it is out.

        Raises:
            RuntimeError: the connection broke, or it took longer; the group is of no more use then.
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
        """Leave, whatever state it is in; members that still wait get an error."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(Exception):
                group.abort()
            with suppress(Exception):
                dist.destroy_process_group(group)
        self._store = None
