"""Interface of a backend's weight transfer, the requests that `WeightSender` needs, and the deadlines they end within.

A backend with folders alone overrides four methods; `CheckpointApi` in tests/support/servers/senders.py is one.
"""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
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

AS_STARTED = "default"  # weight version that vLLM and SGLang report until a trainer sends weights
ERROR_SECONDS = 5.0  # for a server to report why it left a transfer
JOIN_SECONDS = 60.0  # for a server to join a group, lest a firewall that drops packets uses up all the time

T = TypeVar("T")


class Deadline:
    """A moment in time, and the work that must end by then."""

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
    """A server as `WeightApi.probe` found it."""

    server: ServerClient
    processes: int = 1  # that hold weights
    start_id: str = ""  # differs between two starts of the server; "" where the server does not report it
    same_machine: bool = False  # the server certainly runs on this machine
    obstacles: dict[str, str] = field(
        default_factory=dict
    )  # reason by method that it does not support, "adapter", "differences"
    details: dict[str, Any] = field(default_factory=dict)  # further facts for the backend itself


class WeightApi(ABC):
    """Requests of one backend about weights; each ends within the time that is left until its deadline.

    A backend with buckets overrides `push` and what it needs of `begin`, `end` and `abandon`, or is a `GroupApi`; one
    with adapters overrides `has_base`, `load_adapter` and `unload_adapter`. Methods that its `methods` and
    `adapters_kept` do not promise are never called.
    """

    name: str  # for messages
    methods: tuple[str, ...] = ("disk",)  # that may be asked for: "disk", or names of the backend's own for buckets
    automatic: tuple[str, ...] = ("disk",)  # methods that "auto" chooses from, in order of preference
    folder_setting = "the shared folder"  # name of the setting for the folder that servers on other machines see
    method_hint = "Set a folder that the server sees under the same name."  # if it does not support the method
    reopens_folder = False  # the server may read its last folder again, so that is deleted after the next update only
    dense = False  # its buckets have no gaps
    takes_differences = (
        False  # its servers can keep a copy of the weights, and be sent what changed (`buckets.Receiver`)
    )
    bucket_device: torch.device | None = None  # of its buckets; None: that of the policy's tensors
    adapters_from_disk = False  # servers that share a disk load adapters from a folder; otherwise the bytes are sent
    adapters_kept = 1  # adapter versions that a server keeps: the current one, and those of requests still in flight
    adapter_hint = "Start it with adapters enabled."  # if it takes none

    @abstractmethod
    async def probe(self, server: ServerClient, until: Deadline) -> WeightEndpoint:
        """Find out which transfer methods the server supports; `ServerRefused` if its routes for weights are closed."""

    @abstractmethod
    async def load_folder(self, endpoint: WeightEndpoint, folder: Path, version: int, until: Deadline) -> None:
        """Make the server read its weights from `folder`, and record their version."""

    @abstractmethod
    async def read_version(self, server: ServerClient, deadline: float) -> str:
        """Version of its weights that the server reports; an update fails where it is not the one that was sent.

        It also distinguishes a server that still holds this run's weights from one that was restarted, or that another
        run sends weights to.
        """

    @abstractmethod
    async def write_version(self, server: ServerClient, version: str, deadline: float) -> None:
        """Record the version of the server's weights, a text that lasts as long as they do."""

    async def join_group(self, endpoint: WeightEndpoint, on_gpu: bool, until: Deadline) -> Channel | None:
        """Connect to the server, for buckets on a GPU or not; None where requests carry the bytes."""
        return None

    async def begin(self, endpoint: WeightEndpoint, until: Deadline) -> None:
        """Open the server for an update; one that another trainer left open is closed first."""
        return None

    async def push(
        self, endpoint: WeightEndpoint, channel: Channel | None, bucket: Bucket, version: int, until: Deadline
    ) -> None:
        """Send one bucket of a version."""
        raise NotImplementedError(f"{self.name} promises a transfer method for buckets and has no `push`")

    async def end(self, endpoint: WeightEndpoint, version: int, until: Deadline) -> None:
        """Put the new weights in use."""
        return None

    async def abandon(self, endpoint: WeightEndpoint) -> None:
        """Close what a failed update left open; raises nothing."""
        return None

    async def has_base(self, endpoint: WeightEndpoint, model: str | None, until: Deadline) -> bool:
        """Tell whether the server holds `model` as it was started, with no weights sent since."""
        return False

    def encode_adapter(self, bucket: Bucket) -> Any:
        """Form of an adapter's bytes that `load_adapter` takes; computed once for all servers, in a thread."""
        return bucket

    async def load_adapter(
        self, endpoint: WeightEndpoint, name: str, config: Any, source: Any, channel: Channel | None, until: Deadline
    ) -> None:
        """Load an adapter from a folder, or from what `encode_adapter` made; `channel` is for bytes beyond requests."""
        raise NotImplementedError(f"{self.name} takes no adapters, and one was sent")

    async def unload_adapter(self, endpoint: WeightEndpoint, name: str, until: Deadline) -> None:
        """Drop an adapter that no request samples from."""
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
    """Base of backends that take buckets over a group of processes: the trainer broadcasts, requests announce.

    `port` is where servers join it (0: free ports), and the next ones for further servers unless they share it.
    """

    methods = automatic = ("group", "disk")
    shares_port = True
    port_hint: str  # if the port is taken

    def __init__(self, port: int = 0):
        self._port = port
        self._places: dict[str, int] = {}  # of servers, by URL

    @abstractmethod
    def group_backend(self, endpoint: WeightEndpoint, on_gpu: bool) -> str:
        """Either "gloo" or "nccl"."""

    @abstractmethod
    async def invite(self, endpoint: WeightEndpoint, where: Rendezvous, seconds: float) -> None:
        """Ask the server to join; it answers when the group has formed."""

    @abstractmethod
    def form_group(self, where: Rendezvous, store: Any, seconds: float) -> Channel:
        """The trainer's end of the group, whose members meet at `store`."""

    @abstractmethod
    async def announce(
        self, endpoint: WeightEndpoint, bucket: Bucket, version: int, doing: str, seconds: float
    ) -> None:
        """Ask the server to take a bucket from the group."""

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

    async def push(
        self, endpoint: WeightEndpoint, channel: Channel | None, bucket: Bucket, version: int, until: Deadline
    ) -> None:
        assert channel is not None, "`join_group` made it"
        doing, seconds = f"{until.doing} ({bucket})", until.left(endpoint.server)
        request = self.announce(endpoint, bucket, version, doing, seconds)
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
    """Result of a request, run with the transfer it announces; both must succeed, or a `ServerError` is raised."""
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
    """Form a group of a server, which `request` asks to connect to `where`, and this process, which calls `join`.

    Both get their seconds, `JOIN_SECONDS` at most. Returns the result of `join`; raises `GroupNotJoined` after those.
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
