"""Interface of a backend's weight transfer: the requests that `WeightSender` needs, and their deadlines.

A backend that only reads folders overrides four methods; see `CheckpointApi` in tests/support/servers/senders.py.
"""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch

from covey.engines.servers.errors import DeadlineExceeded, GroupNotJoined, ServerError, ServerRefused, ServerUnreachable
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.weights.buckets import Bucket
from covey.engines.servers.weights.channels import Channel, in_thread, own_address, shared_store

AS_STARTED = "default"  # stamp that vLLM and SGLang report until a trainer sends weights
ERROR_SECONDS = 5.0  # deadline for a server to report why it ended a transfer
OPENINGS = 3  # attempts to open an update: vLLM closes one that broke off only at the second request
JOIN_SECONDS = 60.0  # deadline for joining a group, so that a firewall that drops packets does not use up all the time

T = TypeVar("T")


class Deadline:
    """A time limit, and the purpose of the work that must end by then, for messages."""

    def __init__(self, doing: str, seconds: float):
        self.doing, self.seconds, self.at = doing, seconds, time.monotonic() + seconds

    def left(self, server: ServerClient) -> float:
        """Seconds until the deadline; raises `DeadlineExceeded` once it has passed."""
        left = self.at - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(server.url, self.doing, f"not done within {self.seconds:g} seconds")
        return left


@dataclass(frozen=True, eq=False)
class WeightEndpoint:
    """A server, and its properties for sending weights (`WeightApi.probe`)."""

    server: ServerClient
    processes: int = 1  # number of processes that hold weights
    start_id: str = ""  # differs between two starts of the server; "" if the server does not report it
    same_machine: bool = False  # True if the server certainly runs on this machine
    obstacles: dict[str, str] = field(
        default_factory=dict
    )  # reason by method that it does not support, "adapter", "differences"
    details: dict[str, Any] = field(default_factory=dict)  # further facts for the backend itself


class WeightApi(ABC):
    """Requests that send weights to one backend; each ends by its deadline.

    A backend that takes buckets overrides `push` and, if it needs them, `begin`, `end` and `abandon`, or is a
    `GroupApi`. One that takes adapters overrides `models`, `load_adapter` and `unload_adapter`. Methods of transfer
    that `methods` does not list are never called.
    """

    name: str  # for messages
    methods: tuple[str, ...] = ("disk",)  # methods of transfer: "disk", or the backend's own names, which take buckets
    automatic: tuple[str, ...] = ("disk",)  # methods that "auto" chooses from, in order of preference
    folder_setting = "the shared folder"  # name of the setting for the folder that servers on other machines see
    method_hint = "Set a folder that the server sees under the same name."  # if it does not support the method
    reopens_folder = False  # the server may read its last folder again, so it is deleted only after the next update
    dense = False  # its buckets have no gaps
    takes_differences = (
        False  # its servers can keep a copy of the weights, and be sent what changed (`buckets.Receiver`)
    )
    bucket_device: torch.device | None = None  # of its buckets; None: the device of the policy's tensors
    adapters_from_disk = False  # servers that share a disk load adapters from a folder; otherwise the bytes are sent
    adapters_kept = 1  # adapter versions that a server keeps: the current one, and those of requests still in flight
    adapter_hint = "Start it with adapters enabled."  # if it takes none

    @abstractmethod
    async def probe(self, server: ServerClient, until: Deadline) -> WeightEndpoint:
        """Find out which transfer methods the server supports; `ServerRefused` if its routes for weights are closed."""

    @abstractmethod
    async def load_folder(self, endpoint: WeightEndpoint, folder: Path, stamp: str, until: Deadline) -> None:
        """Make the server read its weights from `folder`, and record their stamp (`WeightSender.stamp`)."""

    @abstractmethod
    async def read_stamp(self, server: ServerClient, deadline: float) -> str:
        """Stamp that the server recorded with its last update, and has forgotten if it lost these weights."""

    @abstractmethod
    async def write_stamp(self, server: ServerClient, stamp: str, deadline: float) -> None:
        """Make the server record a stamp, for updates whose requests have no place for one, such as adapters."""

    async def join_group(self, endpoint: WeightEndpoint, on_gpu: bool, until: Deadline) -> Channel | None:
        """Connect to the server to send buckets (`on_gpu`: from a GPU); None if requests carry the bytes."""
        return None

    async def begin(self, endpoint: WeightEndpoint, until: Deadline) -> None:
        """Begin an update at the server; an update that another trainer left open is closed first."""
        return None

    async def push(
        self, endpoint: WeightEndpoint, channel: Channel | None, bucket: Bucket, stamp: str, until: Deadline
    ) -> None:
        """Send one bucket of an update."""
        raise NotImplementedError(f"{self.name} promises a transfer method for buckets and has no `push`")

    async def end(self, endpoint: WeightEndpoint, stamp: str, until: Deadline) -> None:
        """Put the new weights in use, and record their stamp unless a bucket had it."""
        return None

    async def abandon(self, endpoint: WeightEndpoint) -> None:
        """Clean up after a failed update; raises nothing."""
        return None

    async def has_base(self, endpoint: WeightEndpoint, model: str, until: Deadline) -> bool:
        """Tell whether the server was started with `model`, and no run has sent it weights since."""
        stamp = await self.read_stamp(endpoint.server, until.left(endpoint.server))
        return stamp == AS_STARTED and model in await self.models(endpoint, until)

    async def models(self, endpoint: WeightEndpoint, until: Deadline) -> list[str]:
        """Names and paths of the model that the server was started with; none if it takes no adapters."""
        return []

    def encode_adapter(self, bucket: Bucket) -> Any:
        """An adapter in the form that `load_adapter` takes; computed once for all servers, in a thread."""
        return bucket

    async def load_adapter(
        self, endpoint: WeightEndpoint, name: str, config: Any, source: Any, channel: Channel | None, until: Deadline
    ) -> None:
        """Load an adapter from a folder or from the result of `encode_adapter`, whose bytes `channel` may carry."""
        raise NotImplementedError(f"{self.name} takes no adapters, and one was sent")

    async def unload_adapter(self, endpoint: WeightEndpoint, name: str, until: Deadline) -> None:
        """Unload an adapter that no request samples from."""
        return None


@dataclass(frozen=True)
class Rendezvous:
    """Place and name of a group of one server's processes and the trainer, which is rank 0."""

    backend: str  # "gloo" or "nccl"
    address: str
    port: int
    name: str
    world_size: int


class GroupApi(WeightApi):
    """Base of backends that take buckets over a process group: requests announce buckets, the trainer broadcasts them.

    The order of requests is here: invite, then for each update open, announce every bucket, close. A backend adds the
    requests' paths and bodies, and its end of the group.

    `port` is the port at which servers join the group (0: free ports); further servers use the next ports, unless they
    can share one.
    """

    methods = automatic = ("group", "disk")
    shares_port = True
    port_hint: str  # if the port is taken
    already_open: str  # part of the server's refusal to open an update while one is open

    def __init__(self, port: int = 0):
        self._port = port
        self._places: dict[str, int] = {}  # of servers, by URL

    @abstractmethod
    def group_backend(self, endpoint: WeightEndpoint, on_gpu: bool) -> str:
        """Backend of the process group: "gloo" or "nccl"."""

    @abstractmethod
    async def invite(self, endpoint: WeightEndpoint, where: Rendezvous, seconds: float) -> None:
        """Ask the server to join; the request returns when the group has formed."""

    @abstractmethod
    def form_group(self, where: Rendezvous, store: Any, seconds: float) -> Channel:
        """Form the group, whose members meet at `store`; returns the trainer's end."""

    @abstractmethod
    async def open_update(self, endpoint: WeightEndpoint, until: Deadline) -> None:
        """Ask the server to prepare for buckets."""

    @abstractmethod
    async def close_update(self, endpoint: WeightEndpoint, stamp: str | None, until: Deadline) -> None:
        """Ask the server to put the weights in use, with their stamp; None: they are incomplete."""

    @abstractmethod
    async def announce(self, endpoint: WeightEndpoint, bucket: Bucket, stamp: str, doing: str, seconds: float) -> None:
        """Ask the server to receive a bucket over the group."""

    async def join_group(self, endpoint: WeightEndpoint, on_gpu: bool, until: Deadline) -> Channel:
        server = endpoint.server
        place = 0 if self.shares_port else self._places.setdefault(server.url, len(self._places))
        address, store = listen_for(server, self._port and self._port + place, self.port_hint)
        backend, name = self.group_backend(endpoint, on_gpu), f"covey-{uuid.uuid4().hex}"
        where = Rendezvous(backend, address, store.port, name, 1 + endpoint.processes)
        return await meet(
            server,
            f"join a {backend} group for weights",
            until,
            f"{address}, port {store.port}",
            partial(self.invite, endpoint, where),
            partial(self.form_group, where, store),
        )

    async def begin(self, endpoint: WeightEndpoint, until: Deadline) -> None:
        for attempt in range(OPENINGS):
            try:
                await self.open_update(endpoint, until)
                return
            except ServerError as error:
                if attempt + 1 == OPENINGS or self.already_open not in error.message:
                    raise
            with suppress(ServerError):  # which reports that the update that broke off is incomplete
                await self.close_update(endpoint, None, until)

    async def end(self, endpoint: WeightEndpoint, stamp: str, until: Deadline) -> None:
        await self.close_update(endpoint, stamp, until)

    async def push(
        self, endpoint: WeightEndpoint, channel: Channel | None, bucket: Bucket, stamp: str, until: Deadline
    ) -> None:
        assert channel is not None, "`join_group` made it"
        doing, seconds = f"{until.doing} ({bucket})", until.left(endpoint.server)
        request = self.announce(endpoint, bucket, stamp, doing, seconds)
        await together(endpoint.server, doing, request, partial(channel.send, bucket.data, seconds))


def is_local(server: ServerClient) -> bool:
    return urlsplit(server.url).hostname in ("127.0.0.1", "localhost", "::1")


def listen_for(server: ServerClient, port: int, hint: str) -> tuple[str, Any]:
    """This machine's address as the server sees it, and a store that listens there (0: at any free port).

    Raises:
        ServerRefused: the port is taken.
    """
    target = urlsplit(server.url)
    assert target.hostname is not None, "checked by `ServerClient`"
    try:
        address = own_address(target.hostname, target.port or 80)
        return address, shared_store(address, port)
    except OSError as error:
        message = f"this machine cannot listen on port {port} for it ({error})"
        raise ServerRefused(server.url, "join a group for weights", message, hint) from error


async def together(server: ServerClient, doing: str, request: Awaitable[T], transfer: Callable[[], object]) -> T:
    """Result of a request, run together with the transfer that it announces; `ServerError` unless both succeed."""
    asked = asyncio.ensure_future(request)
    moved = asyncio.ensure_future(in_thread(transfer))
    try:
        await asyncio.wait([asked, moved], return_when=asyncio.FIRST_EXCEPTION)
        if moved.done() and moved.exception() is not None:  # the server's own error is clearer than "connection closed"
            await asyncio.wait([asked], timeout=ERROR_SECONDS)
        if asked.done() and (error := asked.exception()) is not None:
            raise error
        if moved.done() and (cause := moved.exception()) is not None:
            if not isinstance(cause, (RuntimeError, OSError)):
                raise cause
            late = "imed out" in str(cause) or "imeout" in str(cause)
            kind = DeadlineExceeded if late else ServerUnreachable
            line = str(cause).strip().partition("\n")[0]
            line = line.split("] ", 1)[-1].split(" This is typically", 1)[0]  # torch puts the source file before it
            raise kind(server.url, doing, line) from cause
        return asked.result()
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
    join: Callable[[float], Channel],
) -> Channel:
    """Form a group with a server: `request` asks it to connect to `where`, while this process calls `join`.

    Both are given the remaining seconds, at most `JOIN_SECONDS`. Returns the result of `join`; `GroupNotJoined` if the
    server does not connect in time.
    """
    seconds = min(JOIN_SECONDS, until.left(server))
    ends = time.monotonic() + seconds
    joined: list[Channel] = []
    try:
        await together(server, doing, request(seconds), lambda: joined.append(join(seconds)))
        return joined.pop()
    except ServerError as error:
        if not isinstance(error, DeadlineExceeded) and time.monotonic() < ends:
            raise
        hint = f"It must be able to connect to this machine at {where}: open that to it, or send weights as files."
        raise GroupNotJoined(server.url, doing, error.message, hint) from error
    finally:
        for channel in joined:  # the server failed meanwhile
            channel.close()
