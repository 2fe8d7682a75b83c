"""How weights reach vLLM servers: over a process group, through CUDA's shared memory, or as files.

`VllmWeights` is the one transport that an engine holds. For every update it asks the servers what they are and takes
the best way that all of them have:

- `group`: buckets over gloo or NCCL, into vLLM's own weight transfer; the next bucket is gathered while one is sent;
- `ipc`: the same with CUDA memory that a server on the same GPU opens where it lies; on request only;
- `disk`: safetensors in a folder that trainer and server both see; the last resort, and all that a `vllm serve`
  without our worker (`vllm_flags`) can do.

An adapter is a folder that the server loads under a name of its own for every version, so that no cache mixes two; a
server on another machine gets its bytes over the group and writes the folder itself. Adding a way: a `Channel`, if
buckets are what it sends.
"""

import asyncio
import contextlib
import json
import logging
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch

from covey.core.weights import WeightUpdate
from covey.rollout.engines.remote.adapters import AdapterBook
from covey.rollout.engines.remote.buckets import BUCKET_BYTES, Bucket, Packer
from covey.rollout.engines.remote.channels import Channel, Group, Ipc, boot_id, own_address, shared_store
from covey.rollout.engines.remote.errors import (
    BadAnswer,
    DeadlineExceeded,
    ServerError,
    ServerRefused,
    ServerUnreachable,
)
from covey.rollout.engines.remote.folders import Shelf
from covey.rollout.engines.remote.sending import Until, all_of, in_thread, meet, together
from covey.rollout.engines.remote.server import Server
from covey.rollout.engines.remote.vllm_flags import ADAPTERS, AS_STARTED, BACKEND

WAYS = ("auto", "group", "ipc", "disk")

START_WITH = "Start it with `covey vllm-serve`, or with the options that docs/engines.md lists for `vllm serve`."

R = TypeVar("R")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Peer:
    """A server as far as weights are concerned.

    Attributes:
        server: where.
        world_size: processes that hold weights.
        facts: what its workers say (`CoveyWorker.covey_facts`), one of them for all; None without our worker.
    """

    server: Server
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


class VllmWeights(AdapterBook):
    """Brings vLLM servers to a version of the policy; a `WeightTransport`.

    Args:
        way: one of `WAYS`; "auto" takes the group where every server can, else files.
        port: of this machine, where servers meet the trainer; 0 takes any free one.
        folder: for weights that travel as files; servers on other machines must see it under the same name. None: a
            temporary folder, for servers on this machine.
        bucket_bytes: most bytes sent at once.
    """

    name = "vllm"

    def __init__(self, way: str = "auto", port: int = 0, folder: str | None = None, bucket_bytes: int = BUCKET_BYTES):
        if way not in WAYS:
            raise ValueError(f"weights cannot travel by {way!r}; choose one of: {', '.join(WAYS)}.")
        super().__init__("covey-")
        self._way, self._port, self._folder, self._bucket_bytes = way, port, folder, bucket_bytes
        self._shelf = Shelf(folder, self._run)
        self._stores: dict[str, Any] = {}
        self._groups = 0
        self._channels: dict[str, tuple[str, str, Channel]] = {}  # by URL: the process and kind it belongs to

    # ---- what engines call -----------------------------------------------------------------------------------------

    async def send(self, servers: Sequence[Server], update: WeightUpdate, deadline: float) -> None:
        """Bring all servers to `update`; see `WeightTransport`."""
        until = Until(f"take weights of version {update.version}", deadline)
        peers = [await look(server, until.left(server)) for server in servers]
        if update.adapter is None:
            await self._send_model(peers, update, until)
            self._adapters.pop(update.version, None)
        else:
            await self._send_adapter(peers, update, until)

    async def close(self) -> None:
        """Leave groups, remove files."""
        for _, _, channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self._stores.clear()
        self._shelf.clear()

    # ---- a whole model ---------------------------------------------------------------------------------------------

    async def _send_model(self, peers: list[Peer], update: WeightUpdate, until: Until) -> None:
        way = choose_way(self._way, peers, shared_folder=self._folder is not None)
        if way == "disk":
            await self._by_disk(peers, update, until)
        else:
            await self._by_buckets(peers, update, until, ipc=way == "ipc")
        stamp = str(update.version)
        await all_of(_confirm(peer, stamp, until) for peer in peers)

    async def _by_disk(self, peers: list[Peer], update: WeightUpdate, until: Until) -> None:
        folder = self._shelf.path / f"v{update.version}-{uuid.uuid4().hex[:6]}"
        try:
            await in_thread(lambda: self._shelf.write(update, folder.name, self._bucket_bytes))
            await all_of(_load_folder(peer, folder, until) for peer in peers)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        stamp = str(update.version)
        for peer in peers:
            await peer.server.call(
                "POST",
                "/update_weight_version",
                doing=until.doing,
                deadline=until.left(peer.server),
                body={"new_version": stamp},
            )

    async def _by_buckets(self, peers: list[Peer], update: WeightUpdate, until: Until, *, ipc: bool) -> None:
        packer = Packer(update, self._bucket_bytes)
        gathering = asyncio.ensure_future(in_thread(packer.next))
        try:
            first = await asyncio.shield(gathering)  # its device tells how it can be sent
            on_gpu = first is not None and first.data.is_cuda
            await all_of(self._start(peer, update.version, until, ipc, on_gpu) for peer in peers)
            left, failures, number, bucket = list(peers), [], 0, first
            while bucket is not None and left:
                gathering = asyncio.ensure_future(in_thread(packer.next))
                sent = await asyncio.gather(
                    *(self._push(peer, update, bucket, number, len(packer.plan), until) for peer in left),
                    return_exceptions=True,
                )
                failures += [error for error in sent if isinstance(error, BaseException)]
                left = [peer for peer, error in zip(left, sent, strict=True) if error is None]
                bucket, number = await asyncio.shield(gathering), number + 1
            await all_of(self._finish(peer, update.version, until) for peer in left)
            if failures:
                raise failures[0]
        finally:
            await asyncio.wait([gathering])
            packer.close()

    async def _start(self, peer: Peer, version: int, until: Until, ipc: bool, on_gpu: bool) -> None:
        """Connect where that is missing, and get the server ready."""
        server = peer.server
        await self._connect(peer, until, ipc, on_gpu)
        for attempt in range(3):
            try:
                await server.call("POST", "/start_weight_update", doing=until.doing, deadline=until.left(server))
                return
            except ServerError as error:
                if attempt == 2 or "already active" not in error.said:
                    raise
            # An update that broke off is still open, ours or another trainer's. Ending it says what is missing, and
            # vLLM takes note of the end only the second time, when nothing is.
            with contextlib.suppress(ServerError):
                path, seconds = "/finish_weight_update", until.left(server)
                await server.call("POST", path, doing=until.doing, deadline=seconds, body={})

    async def _push(
        self, peer: Peer, update: WeightUpdate, bucket: Bucket, number: int, count: int, until: Until
    ) -> None:
        """Send one bucket: tell the server what comes, and send it at the same time."""
        server = peer.server
        channel = self._channels[server.url][2]
        doing = f"take weights of version {update.version} (bucket {number + 1} of {count}: {bucket})"
        seconds = until.left(server)
        piece = {
            "version": update.version,
            "number": number,
            "count": count,
            "manifest": bucket.manifest(),
            "note": channel.note(bucket.data),
            "seconds": seconds,
        }
        request = server.call("POST", "/update_weights", doing=doing, deadline=seconds, body={"update_info": piece})
        try:
            await together(server, doing, request, lambda: channel.send(bucket.data, seconds))
        except BaseException:
            self._disconnect(peer)
            raise

    async def _finish(self, peer: Peer, version: int, until: Until) -> None:
        body = {"weight_version": str(version)}
        server = peer.server
        await server.call("POST", "/finish_weight_update", doing=until.doing, deadline=until.left(server), body=body)

    # ---- connections -----------------------------------------------------------------------------------------------

    async def _connect(self, peer: Peer, until: Until, ipc: bool, on_gpu: bool) -> None:
        assert peer.facts is not None, "`choose_way` looked"
        kind = "ipc" if ipc else _group_backend(peer, on_gpu)
        known = self._channels.get(peer.server.url)
        if known is not None and known[:2] == (peer.facts["born"], kind):
            return
        self._disconnect(peer)
        server, doing = peer.server, f"join a {kind} group for weights"
        address, store = ("", None) if ipc else self._meeting_place(server)
        self._groups += 1
        name, world_size = f"{self._run}/{self._groups}", 1 + peer.world_size
        port = 0 if store is None else store.port
        meeting = {
            "channel": kind,
            "address": address,
            "port": port,
            "name": name,
            "world_size": world_size,
        }

        async def ask(seconds: float) -> None:
            body = {"init_info": {**meeting, "seconds": seconds}}
            await server.call("POST", "/init_weight_transfer_engine", doing=doing, deadline=seconds, body=body)

        def join(seconds: float) -> Channel:
            return Ipc() if ipc else Group(kind, store, name, 0, world_size, address, seconds)

        channel = await meet(server, doing, until, f"{address}, port {port}", ask, join)
        self._channels[server.url] = (peer.facts["born"], kind, channel)

    def _disconnect(self, peer: Peer) -> None:
        known = self._channels.pop(peer.server.url, None)
        if known is not None:
            known[2].close()

    def _meeting_place(self, server: Server) -> tuple[str, Any]:
        """This machine's address as the server sees it, and a store that listens there."""
        target = urlsplit(server.url)
        assert target.hostname is not None, "checked by `Server`"
        try:
            address = own_address(target.hostname, target.port or 80)
            if address not in self._stores:
                self._stores[address] = shared_store(address, self._port, seconds=60.0)
        except OSError as error:
            raise ServerRefused(
                server.url,
                "join a group for weights",
                f"this machine cannot listen on port {self._port} for it ({error})",
                "Choose a free port with vllm_group_port; runs on one machine need one each.",
            ) from error
        return address, self._stores[address]

    # ---- an adapter ------------------------------------------------------------------------------------------------

    async def _send_adapter(self, peers: list[Peer], update: WeightUpdate, until: Until) -> None:
        for peer in peers:
            if peer.facts is not None and peer.facts["max_lora_rank"] is None:
                raise ServerRefused(
                    peer.server.url,
                    until.doing,
                    "it was started without adapters",
                    "Start it with `covey vllm-serve --enable-lora`, or set vllm_lora_sync='merged'.",
                )
        await self._send_bases(peers, update, until)
        name = self._name_for(update)
        near = [peer for peer in peers if self._way != "group" and (peer.same_machine or self._folder is not None)]
        folder = self._shelf.path / name
        if near and not folder.exists():
            await in_thread(lambda: self._shelf.write(update, name, self._bucket_bytes))
        places = {peer.server.url: str(folder) for peer in near}
        far = [peer for peer in peers if peer not in near]
        if far:
            places |= await self._carry_adapter(far, update, name, until)
        await all_of(self._load_adapter(peer, name, places[peer.server.url], until) for peer in peers)
        self._adapters[update.version] = name
        stamp = str(update.version)
        await all_of(_stamp(peer, stamp, until) for peer in peers)
        self._forget_files(peers)

    async def _send_bases(self, peers: list[Peer], update: WeightUpdate, until: Until) -> None:
        """Servers that were started with another model than the adapter lies on get that model first, once."""
        assert update.adapter is not None, "the caller looked"
        if update.base is None:
            return
        fresh = {(peer.server.url, "" if peer.facts is None else peer.facts["born"]): peer for peer in peers}
        fresh = {key: peer for key, peer in fresh.items() if key not in self._bases}
        lacking = [peer for peer in fresh.values() if not await _has_base(peer, update, until)]
        if lacking:
            await self._send_model(lacking, update.base, until)
        self._bases |= fresh.keys()  # not before: an attempt that failed sends them again

    async def _carry_adapter(self, peers: list[Peer], update: WeightUpdate, name: str, until: Until) -> dict[str, str]:
        """Send an adapter's bytes to servers on other machines; returns the folder each of them wrote."""
        choose_way("group", peers, shared_folder=False)
        packer = Packer(update, max(2 * update.nbytes, 1))
        bucket = await in_thread(packer.next)
        await in_thread(packer.next)  # the pass ends
        assert bucket is not None, "an adapter has tensors"
        places = {}
        for peer in peers:
            server = peer.server
            await self._connect(peer, until, ipc=False, on_gpu=bucket.data.is_cuda)
            channel, seconds = self._channels[server.url][2], until.left(server)
            kwargs = {
                "name": name,
                "config": json.dumps(update.adapter),
                "manifest": bucket.manifest(),
                "note": channel.note(bucket.data),
                "seconds": seconds,
            }
            try:
                request = rpc(server, "covey_take_adapter", until.doing, seconds, **kwargs)
                answers, _ = await together(server, until.doing, request, partial(channel.send, bucket.data, seconds))
            except BaseException:
                self._disconnect(peer)
                raise
            places[server.url] = answers[0]["folder"]
        return places

    async def _load_adapter(self, peer: Peer, name: str, folder: str, until: Until) -> None:
        server = peer.server
        loaded = self._loaded.setdefault((server.url, "" if peer.facts is None else peer.facts["born"]), [])
        if name in loaded:
            return
        doing = f"load the adapter {name}"
        hint = "Start it with `covey vllm-serve --enable-lora --max-lora-rank R`, or set vllm_lora_sync='merged'."
        try:
            body = {"lora_name": name, "lora_path": folder}
            await server.call("POST", "/v1/load_lora_adapter", doing=doing, deadline=until.left(server), body=body)
        except (ServerUnreachable, DeadlineExceeded):
            raise
        except ServerError as error:
            if "already been loaded" not in error.said:  # names are of one content: an earlier try got through
                raise type(error)(server.url, doing, error.said, hint) from error
        loaded.append(name)
        while len(loaded) > ADAPTERS:
            old = loaded.pop(0)
            body = {"lora_name": old}
            await server.call(
                "POST", "/v1/unload_lora_adapter", doing=f"unload {old}", deadline=until.left(server), body=body
            )
            if peer.facts is not None:
                await rpc(server, "covey_forget_adapter", f"forget {old}", until.left(server), name=old)

    def _forget_files(self, peers: list[Peer]) -> None:
        """Remove folders of adapters that no server may still load; a server reloads what it dropped from its slots."""
        kept = {name for names in self._loaded.values() for name in names}
        for version, name in list(self._adapters.items()):
            if name not in kept:
                del self._adapters[version]
                shutil.rmtree(self._shelf.path / name, ignore_errors=True)


# ---- requests --------------------------------------------------------------------------------------------------------


async def look(server: Server, deadline: float) -> Peer:
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
        return Peer(server, world_size, None)
    return Peer(server, world_size, workers[0])


def choose_way(wanted: str, peers: Sequence[Peer], *, shared_folder: bool) -> str:
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


def _why_not(way: str, peer: Peer, shared_folder: bool) -> str | None:
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


def _group_backend(peer: Peer, on_gpu: bool) -> str:
    """NCCL between GPUs, unless both sides are on the same one, which NCCL refuses; else gloo."""
    assert peer.facts is not None, "`choose_way` looked"
    if not on_gpu or peer.facts["device"] != "cuda":
        return "gloo"
    mine = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return "gloo" if peer.facts["gpu"] == mine else "nccl"


async def rpc(server: Server, method: str, doing: str, deadline: float, **kwargs: Any) -> list[Any]:
    """Call a method of all workers; their answers."""
    body = {"method": method, "kwargs": kwargs}
    answer = await server.ask("/collective_rpc", doing=doing, deadline=deadline, body=body)
    results = answer.get("results")
    if not isinstance(results, list) or not results:
        raise BadAnswer(server.url, doing, f"/collective_rpc answered {answer!r:.200}")
    return results


async def _load_folder(peer: Peer, folder: Path, until: Until) -> None:
    server, doing = peer.server, f"{until.doing} from {folder}"
    if peer.facts is not None:
        await rpc(server, "covey_load_folder", doing, until.left(server), folder=str(folder))
    else:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await server.call("POST", "/collective_rpc", doing=doing, deadline=until.left(server), body=body)


async def _stamp(peer: Peer, stamp: str, until: Until) -> None:
    server = peer.server
    await server.call(
        "POST",
        "/update_weight_version",
        doing=until.doing,
        deadline=until.left(server),
        body={"new_version": stamp},
    )
    await _confirm(peer, stamp, until)


async def _confirm(peer: Peer, stamp: str, until: Until) -> None:
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


async def _has_base(peer: Peer, update: WeightUpdate, until: Until) -> bool:
    """Whether the server was started with the model that the adapter lies on, and has been sent no weights since."""
    assert update.adapter is not None, "the caller looked"
    note = await peer.server.call("GET", "/weight_info", doing=until.doing, deadline=until.left(peer.server))
    if not isinstance(note, dict) or note.get("weight_version") != AS_STARTED:
        return False  # an earlier run used this server: nobody knows what it left
    wanted = update.adapter.get("base_model_name_or_path")
    answer = await peer.server.call("GET", "/v1/models", doing=until.doing, deadline=until.left(peer.server))
    models = answer.get("data", []) if isinstance(answer, dict) else []
    return bool(wanted) and wanted in {name for model in models for name in (model.get("root"), model.get("id"))}
