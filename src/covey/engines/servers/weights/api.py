"""Interface of a backend's weight transfer: the requests that `WeightSender` needs.

A backend with folders alone overrides four methods; `CheckpointApi` in tests/support/servers/senders.py is one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from torch import Tensor

from covey.core.engine import WeightUpdate
from covey.engines.servers.errors import ServerRefused
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.weights.buckets import Bucket, Packer
from covey.engines.servers.weights.channels import own_address
from covey.engines.servers.weights.deadline import Deadline

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class WeightEndpoint:
    """A server as `WeightApi.probe` found it.

    Attributes:
        server: client of the server.
        processes: number of its processes that hold weights.
        start_id: differs between two starts of the server; "" where the server does not report it.
        same_machine: the server certainly runs on this machine.
        obstacles: reason by transfer method that this server does not support; "adapter" counts as one.
        details: further facts for the backend itself.
    """

    server: ServerClient
    processes: int = 1
    start_id: str = ""
    same_machine: bool = False
    obstacles: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BucketTransfer:
    """One bucket of an update: the `number`th, from 0, of `count`; `doing` describes it in errors."""

    bucket: Bucket
    number: int
    count: int
    version: int
    doing: str


class WeightChannel(Protocol):
    """Trainer's end of a connection over which buckets reach one server."""

    def send(self, data: Tensor, seconds: float) -> None:
        """Send the bytes; RuntimeError after `seconds`."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class WeightApi(ABC):
    """Requests of one backend about weights; each ends within the time that is left until its deadline.

    A backend with buckets overrides `push` and what it needs of `begin`, `end`, `abandon`, `join_group` and `packer`;
    one with adapters overrides `has_base`, `load_adapter` and `unload_adapter`. Methods that its `methods` and
    `adapters_kept` do not promise are never called.

    Attributes:
        name: for messages.
        methods: transfer methods that may be asked for: "disk", or names of the backend's own for buckets.
        automatic: methods that "auto" chooses from, in order of preference.
        folder_setting: name of the setting for the folder that servers on other machines see, for messages.
        method_hint: advice for when a server does not support the method.
        reopens_folder: the server may read its last folder again, so that is deleted after the next update only.
        adapters_from_disk: servers that share a disk load adapters from a folder; otherwise the bytes are sent.
        adapters_kept: adapter versions that a server keeps: the current one, and those of requests still in flight.
        adapter_hint: advice for when a server does not take adapters.
    """

    name: str
    methods: tuple[str, ...] = ("disk",)
    automatic: tuple[str, ...] = ("disk",)
    folder_setting = "the shared folder"
    method_hint = "Set a folder that the server sees under the same name."
    reopens_folder = False
    adapters_from_disk = False
    adapters_kept = 1
    adapter_hint = "Start it with adapters enabled."

    @abstractmethod
    async def probe(self, server: ServerClient, until: Deadline) -> WeightEndpoint:
        """Find out which transfer methods the server supports.

        Raises:
            ServerRefused: its routes for weights are closed.
        """

    @abstractmethod
    async def load_folder(self, endpoint: WeightEndpoint, folder: Path, version: int, until: Deadline) -> None:
        """Make the server read its weights from `folder`, and record their version."""

    @abstractmethod
    async def read_version(self, server: ServerClient, deadline: float) -> str | None:
        """Version of its weights that the server reports; None if it keeps none."""

    @abstractmethod
    async def write_version(self, server: ServerClient, version: str, deadline: float) -> None:
        """Record the version of the server's weights."""

    # ---- buckets ---------------------------------------------------------------------------------------------------

    def packer(
        self, update: WeightUpdate, method: str, bucket_bytes: int, endpoints: Sequence[WeightEndpoint]
    ) -> Packer:
        """Buckets of `update` in the layout that `method` needs."""
        return Packer(update, bucket_bytes)

    async def join_group(
        self, endpoint: WeightEndpoint, method: str, on_gpu: bool, until: Deadline
    ) -> WeightChannel | None:
        """Connect to the server for `method`, with buckets on a GPU or not; None where requests carry the bytes."""
        return None

    async def begin(self, endpoint: WeightEndpoint, until: Deadline) -> None:
        """Open the server for an update; one that another trainer left open is closed first."""
        return None

    async def push(
        self, endpoint: WeightEndpoint, channel: WeightChannel | None, transfer: BucketTransfer, until: Deadline
    ) -> None:
        """Send one bucket."""
        raise NotImplementedError(f"{self.name} promises a transfer method for buckets and has no `push`")

    async def end(self, endpoint: WeightEndpoint, version: int, until: Deadline) -> None:
        """Put the new weights in use."""
        return None

    async def abandon(self, endpoint: WeightEndpoint) -> None:
        """Close what a failed update left open; raises nothing."""
        return None

    # ---- adapters --------------------------------------------------------------------------------------------------

    async def has_base(self, endpoint: WeightEndpoint, model: str | None, until: Deadline) -> bool:
        """Tell whether the server holds `model` as it was started, with no weights sent since."""
        return False

    def encode_adapter(self, bucket: Bucket) -> Any:
        """Form of an adapter's bytes that `load_adapter` takes; computed once for all servers, in a thread."""
        return bucket

    async def load_adapter(
        self,
        endpoint: WeightEndpoint,
        name: str,
        config: dict[str, Any],
        source: Any,
        channel: WeightChannel | None,
        until: Deadline,
    ) -> None:
        """Load an adapter under `name` from `source`, a folder or the result of `encode_adapter`."""
        raise NotImplementedError(f"{self.name} takes no adapters, and one was sent")

    async def unload_adapter(self, endpoint: WeightEndpoint, name: str, until: Deadline) -> None:
        """Drop an adapter that no request samples from."""
        return None

    def close(self) -> None:
        """Release ports."""
        return None


def is_local(server: ServerClient) -> bool:
    """Tell whether the URL is certainly one of this machine."""
    return urlsplit(server.url).hostname in ("127.0.0.1", "localhost", "::1")


def listen_for(server: ServerClient, port: int, hint: str, listen: Callable[[str], T]) -> T:
    """Result of `listen`, given this machine's address as the server sees it.

    Raises:
        ServerRefused: the port is taken, or there is no route to the server.
    """
    target = urlsplit(server.url)
    assert target.hostname is not None, "checked by `ServerClient`"
    try:
        return listen(own_address(target.hostname, target.port or 80))
    except OSError as error:
        raise ServerRefused(
            server.url,
            "join a group for weights",
            f"this machine cannot listen on port {port} for it ({error})",
            hint,
        ) from error
