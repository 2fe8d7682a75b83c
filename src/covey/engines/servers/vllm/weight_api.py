"""vLLM servers as far as weights are concerned: what each can take, and the requests about it.

Not here: the order in which things are asked (`vllm_transports`), or sampling (`vllm`).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from covey.core.weights import WeightUpdate
from covey.engines.servers.errors import (
    BadAnswer,
    DeadlineExceeded,
    ServerError,
    ServerRefused,
    ServerUnreachable,
)
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.vllm.flags import AS_STARTED, BACKEND
from covey.engines.servers.weights.channels import boot_id
from covey.engines.servers.weights.deadline import Deadline

START_WITH = "Start it with `covey vllm-serve`, or with the options that docs/engines.md lists for `vllm serve`."

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class VllmEndpoint:
    """A server as far as weights are concerned.

    Attributes:
        server: where.
        world_size: processes that hold weights.
        facts: what its workers say (`CoveyWorker.covey_facts`), one of them for all; None without our worker.
    """

    server: ServerClient
    world_size: int
    facts: dict[str, Any] | None

    @property
    def same_machine(self) -> bool:
        """Whether it surely runs on this machine."""
        if self.facts is not None:
            return self.facts["boot"] is not None and self.facts["boot"] == boot_id()
        return urlsplit(self.server.url).hostname in ("127.0.0.1", "localhost", "::1")

    @property
    def takes_buckets(self) -> bool:
        """Whether it was started with our way into its weight transfer."""
        return self.facts is not None and self.facts["backend"] == BACKEND


async def look(server: ServerClient, deadline: float) -> VllmEndpoint:
    """What a vLLM server can do about weights.

    Raises:
        ServerRefused: its routes for weights are closed.
    """
    doing = "say how it takes weights"
    try:
        answer = await server.call("GET", "/get_world_size", doing=doing, deadline=deadline)
    except ServerRefused as error:
        said = f"its routes for weights are closed ({error.said})"
        raise ServerRefused(server.url, "take weights", said, START_WITH) from error
    world_size = answer.get("world_size") if isinstance(answer, dict) else None
    if not isinstance(world_size, int) or world_size < 1:
        raise BadAnswer(server.url, doing, f"/get_world_size answered {answer!r:.200}")
    try:
        workers = await rpc(server, "covey_facts", doing, deadline)
    except (DeadlineExceeded, ServerUnreachable):
        raise
    except ServerError as error:
        log.debug("%s has no worker of ours: %s", server.url, error)
        return VllmEndpoint(server, world_size, None)
    return VllmEndpoint(server, world_size, workers[0])


def choose_way(wanted: str, peers: Sequence[VllmEndpoint], *, shared_folder: bool) -> str:
    """The way that all servers have.

    Raises:
        ServerRefused: there is none, or one of them does not have the wanted one.
    """
    for way in ("group", "disk") if wanted == "auto" else (wanted,):
        obstacles = [(peer, why) for peer in peers if (why := _why_not(way, peer, shared_folder)) is not None]
        if not obstacles:
            return way
    peer, why = obstacles[0]
    raise ServerRefused(peer.server.url, f"take weights by {way}", why, START_WITH)


def _why_not(way: str, peer: VllmEndpoint, shared_folder: bool) -> str | None:
    if way == "disk":
        if peer.same_machine or shared_folder:
            return None
        return (
            "it is on another machine, and no folder is known that both see (vllm_weight_folder), nor was it started"
            " so that weights can be sent to it"
        )
    if not peer.takes_buckets:
        backend = None if peer.facts is None else peer.facts["backend"]
        return f"it was started without our way into its weight transfer (its backend is {backend!r})"
    assert peer.facts is not None, "`takes_buckets` looked"
    if way == "ipc" and peer.facts["device"] != "cuda":
        return f"it runs on {peer.facts['device']}, and only memory of a GPU can be shared"
    return None


def group_backend(peer: VllmEndpoint, on_gpu: bool) -> str:
    """NCCL between GPUs, unless both sides are on the same one, which NCCL refuses; else gloo."""
    assert peer.facts is not None, "`choose_way` looked"
    if not on_gpu or peer.facts["device"] != "cuda":
        return "gloo"
    mine = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return "gloo" if peer.facts["gpu"] == mine else "nccl"


async def rpc(server: ServerClient, method: str, doing: str, deadline: float, **kwargs: Any) -> list[Any]:
    """Call a method of all workers; their answers."""
    body = {"method": method, "kwargs": kwargs}
    answer = await server.ask("/collective_rpc", doing=doing, deadline=deadline, body=body)
    results = answer.get("results")
    if not isinstance(results, list) or not results:
        raise BadAnswer(server.url, doing, f"/collective_rpc answered {answer!r:.200}")
    return results


async def load_folder(peer: VllmEndpoint, folder: Path, until: Deadline) -> None:
    """Have it read weights from a folder that it sees."""
    server, doing = peer.server, f"{until.doing} from {folder}"
    if peer.facts is not None:
        await rpc(server, "covey_load_folder", doing, until.left(server), folder=str(folder))
    else:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await server.call("POST", "/collective_rpc", doing=doing, deadline=until.left(server), body=body)


async def write_version(peer: VllmEndpoint, stamp: str, until: Deadline) -> None:
    """Tell it which version its weights are of."""
    server, body = peer.server, {"new_version": stamp}
    seconds = until.left(server)
    await server.call("POST", "/update_weight_version", doing=until.doing, deadline=seconds, body=body)


async def confirm(peer: VllmEndpoint, stamp: str, until: Deadline) -> None:
    """The server must say that it has what was sent."""
    server = peer.server
    answer = await server.call("GET", "/weight_info", doing=until.doing, deadline=until.left(server))
    found = answer.get("weight_version") if isinstance(answer, dict) else answer
    if found != stamp:
        raise BadAnswer(
            server.url,
            until.doing,
            f"afterwards it says that its weights are of version {found!r}, not {stamp!r}",
            "Does another trainer send weights to it?",
        )


async def has_base(peer: VllmEndpoint, update: WeightUpdate, until: Deadline) -> bool:
    """Whether the server was started with the model that the adapter lies on, and has been sent no weights since."""
    assert update.adapter is not None, "the caller looked"
    note = await peer.server.call("GET", "/weight_info", doing=until.doing, deadline=until.left(peer.server))
    if not isinstance(note, dict) or note.get("weight_version") != AS_STARTED:
        return False  # an earlier run used this server: nobody knows what it left
    wanted = update.adapter.get("base_model_name_or_path")
    answer = await peer.server.call("GET", "/v1/models", doing=until.doing, deadline=until.left(peer.server))
    models = answer.get("data", []) if isinstance(answer, dict) else []
    return bool(wanted) and wanted in {name for model in models for name in (model.get("root"), model.get("id"))}
