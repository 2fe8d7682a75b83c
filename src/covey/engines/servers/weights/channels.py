"""Channels that send flat buffers of bytes from a trainer to the processes of a server, over gloo or NCCL: both ends.

Their process groups are independent of torch's global process group, and every operation on them has a deadline.
"""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from covey.runtime.deadlines import WorkerThread, torch_settings

T = TypeVar("T")

CHANNELS = ("gloo", "nccl")


class Channel(Protocol):
    """Connection from a trainer, which is rank 0, to all processes of one server."""

    def send(self, data: Tensor, seconds: float) -> None:
        """Send the bytes to every process of the server; RuntimeError after `seconds`."""

    def close(self) -> None:
        """Release all resources."""


class Group:
    """A gloo or NCCL process group of one trainer (rank 0) and one server, which meet under `name` in a store."""

    def __init__(self, backend: str, store: Any, name: str, rank: int, world_size: int, address: str, seconds: float):
        self.backend, self._store = backend, store  # keeps the store alive for `shared_store`
        own = dist.PrefixStore(name, store)
        _gather_members(own, rank, world_size, seconds)
        timeout = timedelta(seconds=seconds)
        if backend == "gloo":
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices, options._timeout = [gloo.create_device(hostname=address)], timeout
            self._group: Any = gloo(own, rank, world_size, options)
            return
        with nccl_that_raises():
            nccl_options = dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(own, rank, world_size, nccl_options)

    def send(self, data: Tensor, seconds: float) -> None:
        self._broadcast(data.cpu() if self.backend == "gloo" else data, seconds)

    def receive(self, nbytes: int, device: torch.device, seconds: float) -> Tensor:
        """Receive rank 0's broadcast into a new buffer, because loading may keep views of an earlier one."""
        where = torch.device("cpu") if self.backend == "gloo" else device
        data = torch.empty(nbytes, dtype=torch.uint8, device=where)
        self._broadcast(data, seconds)
        return data.to(device)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None and self.backend == "nccl":
            group.abort()

    def _broadcast(self, data: Tensor, seconds: float) -> None:
        # Keep a reference: destroying a gloo group waits for its operations while it holds the GIL.
        group = self._group
        if group is None:
            raise RuntimeError("the connection was closed")
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=max(seconds, 0.001))
        try:
            group.broadcast([data], options).wait(options.timeout)
        except RuntimeError as error:
            if "imed out" not in str(error):
                raise
            message = f"timed out: {data.nbytes} bytes were not transferred within {seconds:g} seconds"
            raise RuntimeError(message) from error
        if data.is_cuda:
            torch.cuda.current_stream(data.device).synchronize()


def _gather_members(store: Any, rank: int, world_size: int, seconds: float) -> None:
    """Wait for all members before the group is created, because torch would wait for them while holding the GIL."""
    store.set(f"here/{rank}", "")
    until = time.monotonic() + seconds
    for other in range(world_size):
        while not store.check([f"here/{other}"]):
            if time.monotonic() >= until:
                raise RuntimeError(f"timed out: member {other} of {world_size} did not join within {seconds:g} seconds")
            time.sleep(0.005)


@contextmanager
def nccl_that_raises() -> Iterator[None]:
    """Context in which new NCCL groups raise an error on a timeout; torch's default is to end the process."""
    wanted = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    with _environment:  # a lock: groups of several servers form at once, each in a thread
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


_environment = threading.Lock()


def join(channel: str, address: str, port: int, name: str, rank: int, world_size: int, seconds: float) -> Group:
    """The server's end of a channel to the trainer at `address` and `port`; RuntimeError if it is not there in time."""
    if channel not in CHANNELS:
        raise ValueError(f"channel {channel!r} is not known; choose one of: {', '.join(CHANNELS)}")
    store = dist.TCPStore(address, port, None, False, timedelta(seconds=seconds), wait_for_workers=False)
    return Group(channel, store, name, rank, world_size, own_address(address, port), seconds)


def open_store(address: str, port: int, seconds: float) -> Any:
    """A store where a group's members meet, listening only on `address`; OSError if the port is taken."""
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((address, port), family=family, backlog=128) as listening:
        port, fd = listening.getsockname()[1], listening.detach()
    timeout = timedelta(seconds=seconds)
    return dist.TCPStore(address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=fd)


def shared_store(address: str, port: int) -> Any:
    """`open_store`, or the store that this process has already opened there and has not freed yet."""
    store = _shared.get((address, port))
    if store is None:
        store = open_store(address, port, seconds=60.0)
        if port:
            _shared[address, port] = store
    return store


_shared: WeakValueDictionary[tuple[str, int], Any] = WeakValueDictionary()


def own_address(host: str, port: int) -> str:
    """Address of this machine as `host` sees it; OSError without a route to `host`. No packet is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def boot_id() -> str | None:
    """Id that all processes on the same running kernel share; None if the system has none."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.is_file() else None


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a new daemon thread, with this thread's current GPU (torch has one per thread)."""
    worker = WorkerThread("covey-weights", torch_settings())
    future = worker.submit(work)
    worker.close()
    return await asyncio.wrap_future(future)


async def all_of(awaitables: Any) -> None:
    """Wait for all awaitables to end, then raise the first error."""
    for result in await asyncio.gather(*awaitables, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
