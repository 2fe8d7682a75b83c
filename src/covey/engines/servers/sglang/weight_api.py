"""SGLang servers as far as weights are concerned: what each can take, and the requests about it.

Not here: the order in which things are asked (`sglang_transports`), or sampling (`sglang`).
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from covey.core.weights import WeightUpdate
from covey.engines.servers.errors import BadAnswer, ServerError, ServerRefused
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.sglang.api import model_info, server_info, ways_of
from covey.engines.servers.weights.deadline import Deadline

WAYS = ("auto", "group", "tensor", "disk")

CLEANUP_SECONDS = 5.0
"""For a server to close what a failed update left open."""


@dataclass(frozen=True)
class SglangEndpoint:
    """A server as far as weights are concerned.

    Attributes:
        server: where.
        ways: names of the ways it takes weights.
        copies: processes that each want a payload of their own.
        born: tells one start of the server from another.
        model: the path of the model it holds.
        version: that it says its weights are of.
    """

    server: ServerClient
    ways: tuple[str, ...]
    copies: int
    born: str
    model: str
    version: str

    @property
    def same_machine(self) -> bool:
        """Whether it surely runs on this machine."""
        return urlsplit(self.server.url).hostname in ("127.0.0.1", "localhost", "::1")


async def look(server: ServerClient, until: Deadline) -> SglangEndpoint:
    """What an SGLang server can do about weights."""
    model = await model_info(server, until.left(server))
    info = await server_info(server, until.left(server))
    return SglangEndpoint(
        server,
        ways_of(info),
        int(info.get("tp_size") or 1),
        str(info.get("startup_time") or ""),
        str(model["model_path"]),
        str(model.get("weight_version")),
    )


def choose_way(wanted: str, peers: Sequence[SglangEndpoint], *, shared_folder: bool) -> str:
    """The fastest way that all servers have.

    Raises:
        ServerRefused: there is none, or one of them does not have the wanted one.
    """
    for way in WAYS[1:] if wanted == "auto" else (wanted,):
        obstacles = [(peer, why) for peer in peers if (why := _why_not(way, peer, shared_folder)) is not None]
        if not obstacles:
            return way
    peer, why = obstacles[0]
    raise ServerRefused(peer.server.url, f"take weights by {way}", why, "Set checkpoint_path to a folder that it sees.")


def _why_not(way: str, peer: SglangEndpoint, shared_folder: bool) -> str | None:
    if way not in peer.ways:
        return "replicas (--dp-size) take weights from files, and pipelines (--pp-size) in no group"
    if way == "disk" and not shared_folder and not peer.same_machine:
        return "it is on another machine, and no folder is known that both see"
    return None


async def begin_update(peer: SglangEndpoint, until: Deadline) -> None:
    """Open a server for weights; one that a killed run left open is closed first."""
    server = peer.server
    try:
        await server.ask("/begin_weight_update", doing=until.doing, deadline=until.left(server), body={})
    except ServerRefused as error:
        if "already open" not in error.said:
            raise
        await end_update(peer, until)
        await server.ask("/begin_weight_update", doing=until.doing, deadline=until.left(server), body={})


async def end_update(peer: SglangEndpoint, until: Deadline) -> None:
    """Close it for weights."""
    await peer.server.ask("/end_weight_update", doing=until.doing, deadline=until.left(peer.server), body={})


async def confirm(peer: SglangEndpoint, update: WeightUpdate, until: Deadline) -> None:
    """The server must say that it has what was sent."""
    found = (await model_info(peer.server, until.left(peer.server))).get("weight_version")
    if found != str(update.version):
        raise BadAnswer(
            peer.server.url,
            until.doing,
            f"afterwards it says that its weights are of version {found!r}, not '{update.version}'",
            "Does another trainer send weights to it?",
        )


async def quietly(peer: SglangEndpoint, path: str, body: dict[str, Any]) -> None:
    """Ask, and do not mind a no."""
    with suppress(ServerError):
        await peer.server.ask(path, doing="clean up", deadline=CLEANUP_SECONDS, body=body)
