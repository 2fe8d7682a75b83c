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
import shutil
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from covey.core.weights import WeightUpdate
from covey.engines.servers.adapter_registry import AdapterBook
from covey.engines.servers.errors import (
    DeadlineExceeded,
    ServerError,
    ServerRefused,
    ServerUnreachable,
)
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.vllm.flags import ADAPTERS
from covey.engines.servers.vllm.weight_api import (
    VllmEndpoint,
    choose_way,
    confirm,
    group_backend,
    has_base,
    load_folder,
    look,
    rpc,
    write_version,
)
from covey.engines.servers.weights.buckets import BUCKET_BYTES, Bucket, Packer
from covey.engines.servers.weights.channels import Channel, Group, Ipc, own_address, shared_store
from covey.engines.servers.weights.deadline import Deadline, all_of, in_thread, meet, together
from covey.engines.servers.weights.files import CheckpointDir

WAYS = ("auto", "group", "ipc", "disk")


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
        self._shelf = CheckpointDir(folder, self._run)
        self._stores: dict[str, Any] = {}
        self._groups = 0
        self._channels: dict[str, tuple[str, str, Channel]] = {}  # by URL: the process and kind it belongs to

    # ---- what engines call -----------------------------------------------------------------------------------------

    async def send(self, servers: Sequence[ServerClient], update: WeightUpdate, deadline: float) -> None:
        """Bring all servers to `update`; see `WeightTransport`."""
        until = Deadline(f"take weights of version {update.version}", deadline)
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

    async def _send_model(self, peers: list[VllmEndpoint], update: WeightUpdate, until: Deadline) -> None:
        way = choose_way(self._way, peers, shared_folder=self._folder is not None)
        if way == "disk":
            await self._by_disk(peers, update, until)
        else:
            await self._by_buckets(peers, update, until, ipc=way == "ipc")
        stamp = str(update.version)
        await all_of(confirm(peer, stamp, until) for peer in peers)

    async def _by_disk(self, peers: list[VllmEndpoint], update: WeightUpdate, until: Deadline) -> None:
        folder = self._shelf.path / f"v{update.version}-{uuid.uuid4().hex[:6]}"
        try:
            await in_thread(lambda: self._shelf.write(update, folder.name, self._bucket_bytes))
            await all_of(load_folder(peer, folder, until) for peer in peers)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        for peer in peers:
            await write_version(peer, str(update.version), until)

    async def _by_buckets(self, peers: list[VllmEndpoint], update: WeightUpdate, until: Deadline, *, ipc: bool) -> None:
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

    async def _start(self, peer: VllmEndpoint, version: int, until: Deadline, ipc: bool, on_gpu: bool) -> None:
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
        self, peer: VllmEndpoint, update: WeightUpdate, bucket: Bucket, number: int, count: int, until: Deadline
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

    async def _finish(self, peer: VllmEndpoint, version: int, until: Deadline) -> None:
        body = {"weight_version": str(version)}
        server = peer.server
        await server.call("POST", "/finish_weight_update", doing=until.doing, deadline=until.left(server), body=body)

    # ---- connections -----------------------------------------------------------------------------------------------

    async def _connect(self, peer: VllmEndpoint, until: Deadline, ipc: bool, on_gpu: bool) -> None:
        assert peer.facts is not None, "`choose_way` looked"
        kind = "ipc" if ipc else group_backend(peer, on_gpu)
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

    def _disconnect(self, peer: VllmEndpoint) -> None:
        known = self._channels.pop(peer.server.url, None)
        if known is not None:
            known[2].close()

    def _meeting_place(self, server: ServerClient) -> tuple[str, Any]:
        """This machine's address as the server sees it, and a store that listens there."""
        target = urlsplit(server.url)
        assert target.hostname is not None, "checked by `ServerClient`"
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

    async def _send_adapter(self, peers: list[VllmEndpoint], update: WeightUpdate, until: Deadline) -> None:
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
        await all_of(write_version(peer, stamp, until) for peer in peers)
        await all_of(confirm(peer, stamp, until) for peer in peers)
        self._forget_files(peers)

    async def _send_bases(self, peers: list[VllmEndpoint], update: WeightUpdate, until: Deadline) -> None:
        """Servers that were started with another model than the adapter lies on get that model first, once."""
        assert update.adapter is not None, "the caller looked"
        if update.base is None:
            return
        fresh = {(peer.server.url, "" if peer.facts is None else peer.facts["born"]): peer for peer in peers}
        fresh = {key: peer for key, peer in fresh.items() if key not in self._bases}
        lacking = [peer for peer in fresh.values() if not await has_base(peer, update, until)]
        if lacking:
            await self._send_model(lacking, update.base, until)
        self._bases |= fresh.keys()  # not before: an attempt that failed sends them again

    async def _carry_adapter(
        self, peers: list[VllmEndpoint], update: WeightUpdate, name: str, until: Deadline
    ) -> dict[str, str]:
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

    async def _load_adapter(self, peer: VllmEndpoint, name: str, folder: str, until: Deadline) -> None:
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

    def _forget_files(self, peers: list[VllmEndpoint]) -> None:
        """Remove folders of adapters that no server may still load; a server reloads what it dropped from its slots."""
        kept = {name for names in self._loaded.values() for name in names}
        for version, name in list(self._adapters.items()):
            if name not in kept:
                del self._adapters[version]
                shutil.rmtree(self._shelf.path / name, ignore_errors=True)
