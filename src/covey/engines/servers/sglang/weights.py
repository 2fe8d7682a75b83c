"""How weights reach SGLang servers: over a process group, as tensors over HTTP, or as files.

`SglangWeights` is the one transport that an engine holds. For every update it asks the servers what they are and takes
the best way that all of them have:

- `group`: buckets broadcast over NCCL or gloo; the next bucket is gathered while one is sent;
- `tensor`: buckets in shared memory that a server on this machine opens; to another machine, the numbers inside of
  HTTP requests, which is slow;
- `disk`: safetensors in a folder that trainer and server both see, and the only way to data-parallel replicas.

An adapter goes over HTTP and is loaded under a name of its own for every version, so that no cache mixes two.
"""

import asyncio
import hashlib
import logging
import shutil
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from covey.core.weights import WeightUpdate
from covey.engines.servers.adapter_registry import AdapterBook
from covey.engines.servers.errors import ServerRefused
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.sglang import payload as payload
from covey.engines.servers.sglang.api import ADAPTER
from covey.engines.servers.sglang.group import SglangGroup
from covey.engines.servers.sglang.weight_api import (
    WAYS,
    SglangEndpoint,
    begin_update,
    choose_way,
    confirm,
    end_update,
    look,
    quietly,
)
from covey.engines.servers.weights.buckets import BUCKET_BYTES, Bucket, Packer
from covey.engines.servers.weights.channels import own_address
from covey.engines.servers.weights.deadline import Deadline, all_of, in_thread, meet, together
from covey.engines.servers.weights.files import CheckpointDir

INLINE_BYTES = 32 * 2**20
"""Of numbers in one HTTP request; as text they are a third more."""

KEPT_ADAPTERS = 2
"""Versions of an adapter that a server keeps: the current one, and the one of requests that are asked again."""
AS_STARTED = "default"
"""The version of its weights that a server names until somebody sends some."""

log = logging.getLogger(__name__)


class SglangWeights(AdapterBook):
    """Brings SGLang servers to a version of the policy; a `WeightTransport`.

    Args:
        way: one of `WAYS`; "auto" takes the fastest that every server has.
        device: of the policy: tensors on a GPU are broadcast with NCCL, others with gloo.
        port: of this machine, where servers meet the trainer, the next ones for further servers; 0 takes free ones.
        folder: for weights that travel as files; servers on other machines must see it under the same name. None: a
            temporary folder, for servers on this machine.
        bucket_bytes: most bytes sent at once.
    """

    name = "sglang"

    def __init__(
        self,
        way: str = "auto",
        device: torch.device | None = None,
        port: int = 0,
        folder: str | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        if way not in WAYS:
            raise ValueError(f"weights cannot travel by {way!r}; choose one of: {', '.join(WAYS)}.")
        super().__init__(ADAPTER)
        self._way, self._port, self._folder, self._bucket_bytes = way, port, folder, bucket_bytes
        self._device = device or torch.device("cpu")
        self._shelf = CheckpointDir(folder, self._run)
        self._groups: dict[str, tuple[str, SglangGroup]] = {}  # by URL: the start of the server it belongs to

    # ---- what engines call -----------------------------------------------------------------------------------------

    async def send(self, servers: Sequence[ServerClient], update: WeightUpdate, deadline: float) -> None:
        """Bring all servers to `update`; see `WeightTransport`."""
        until = Deadline(f"take weights of version {update.version}", deadline)
        peers = [await look(server, until) for server in servers]
        if update.adapter is None:
            await self._send_model(peers, update, until)
            self._adapters.pop(update.version, None)
        else:
            await self._send_adapter(peers, update, until)

    async def close(self) -> None:
        """Leave groups, remove files."""
        for _, group in self._groups.values():
            group.close()
        self._groups.clear()
        self._shelf.clear()

    # ---- a whole model ---------------------------------------------------------------------------------------------

    async def _send_model(self, peers: list[SglangEndpoint], update: WeightUpdate, until: Deadline) -> None:
        way = choose_way(self._way, peers, shared_folder=self._folder is not None)
        log.debug("weights of version %d travel by %s", update.version, way)
        if way == "disk":
            await self._by_disk(peers, update, until)
        elif way == "group":
            packer = Packer(update, self._bucket_bytes, self._device, dense=True)
            await self._by_buckets(peers, update, until, packer, self._broadcast, self._connect)
        else:
            await self._by_buckets(peers, update, until, *self._payloads(peers, update))
        await all_of(confirm(peer, update, until) for peer in peers)

    async def _by_disk(self, peers: list[SglangEndpoint], update: WeightUpdate, until: Deadline) -> None:
        folder = self._shelf.path / f"v{update.version}-{uuid.uuid4().hex[:6]}"
        older = [path for path in self._shelf.path.iterdir() if path.is_dir()]
        await in_thread(lambda: self._shelf.write(update, folder.name, self._bucket_bytes))
        body = {
            "model_path": str(folder),
            "load_format": "safetensors",
            "weight_version": str(update.version),
            "flush_cache": False,
        }
        doing = f"{until.doing} from {folder}"
        hint = "It must see this folder under the same name: set checkpoint_path to one that it shares."

        async def load(server: ServerClient) -> None:
            try:
                await server.ask("/update_weights_from_disk", doing=doing, deadline=until.left(server), body=body)
            except ServerRefused as error:
                raise ServerRefused(server.url, doing, error.said, hint) from error

        try:
            await all_of(load(peer.server) for peer in peers)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        for path in older:
            shutil.rmtree(path, ignore_errors=True)

    async def _by_buckets(
        self,
        peers: list[SglangEndpoint],
        update: WeightUpdate,
        until: Deadline,
        packer: Packer,
        push: Callable[[SglangEndpoint, dict[str, Any], Bucket, str, Deadline], Awaitable[None]],
        connect: Callable[[SglangEndpoint, Deadline], Awaitable[None]] | None = None,
    ) -> None:
        """Every bucket to every server. One that fails is left behind, and its error raised in the end."""
        gathering = asyncio.ensure_future(in_thread(packer.next))
        left = list(peers)
        failures: list[BaseException] = []

        async def each(do: Callable[[SglangEndpoint], Awaitable[None]]) -> None:
            results = await asyncio.gather(*(do(peer) for peer in left), return_exceptions=True)
            failures.extend(result for result in results if isinstance(result, BaseException))
            left[:] = [peer for peer, result in zip(left, results, strict=True) if result is None]

        async def begin(peer: SglangEndpoint) -> None:
            if connect is not None:
                await connect(peer, until)
            await begin_update(peer, until)

        try:
            await each(begin)
            bucket, number = await asyncio.shield(gathering), 0
            while bucket is not None and left:
                gathering = asyncio.ensure_future(in_thread(packer.next))
                number += 1
                doing = f"{until.doing} (bucket {number} of {len(packer.plan)}: {bucket})"
                body: dict[str, Any] = {"flush_cache": False}
                if number == len(packer.plan):
                    body["weight_version"] = str(update.version)
                full = bucket
                await each(lambda peer: push(peer, body, full, doing, until))  # noqa: B023 - awaited within the turn
                bucket = await asyncio.shield(gathering)
            await each(lambda peer: end_update(peer, until))
        finally:
            await asyncio.wait([gathering])
            packer.close()
            await asyncio.gather(*(self._abandon(peer) for peer in peers if peer not in left))
        if failures:
            raise failures[0]

    async def _abandon(self, peer: SglangEndpoint) -> None:
        """Close what a failed update left open at a server, if it still answers."""
        known = self._groups.pop(peer.server.url, None)
        if known is not None:
            known[1].close()
            await quietly(peer, "/destroy_weights_update_group", {"group_name": known[1].name})
        await quietly(peer, "/end_weight_update", {})

    # ---- the group -------------------------------------------------------------------------------------------------

    async def _connect(self, peer: SglangEndpoint, until: Deadline) -> None:
        known = self._groups.get(peer.server.url)
        if known is not None and known[0] == peer.born:
            return
        if known is not None:
            known[1].close()
            del self._groups[peer.server.url]
        server, doing = peer.server, "join a group for weights"
        group = self._open_group(peer)
        self._groups[server.url] = (peer.born, group)
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.size,
            "group_name": group.name,
            "backend": group.backend,
        }

        async def ask(seconds: float) -> None:
            await server.ask("/init_weights_update_group", doing=doing, deadline=seconds, body=body)

        await meet(server, doing, until, f"{group.address}, port {group.port}", ask, group.join)

    def _open_group(self, peer: SglangEndpoint) -> SglangGroup:
        target = urlsplit(peer.server.url)
        assert target.hostname is not None, "checked by `ServerClient`"
        port = self._port and self._port + len(self._groups)
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        try:
            address = own_address(target.hostname, target.port or 80)
            return SglangGroup(address, 1 + peer.copies, backend, port)
        except OSError as error:
            raise ServerRefused(
                peer.server.url,
                "join a group for weights",
                f"this machine cannot listen on port {port} for it ({error})",
                "Choose a free port with sglang_group_port; runs on one machine need one for each server.",
            ) from error

    async def _broadcast(
        self, peer: SglangEndpoint, common: dict[str, Any], bucket: Bucket, doing: str, until: Deadline
    ) -> None:
        server = peer.server
        group, seconds = self._groups[server.url][1], until.left(server)
        specs = [entry.spec for entry in bucket.entries]
        data = bucket.data[: sum(spec.nbytes for spec in specs)]
        body = {
            "names": [spec.name for spec in specs],
            "dtypes": [str(spec.dtype).removeprefix("torch.") for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": group.name,
            "load_format": "flattened_bucket",
            **common,
        }
        request = server.ask("/update_weights_from_distributed", doing=doing, deadline=seconds, body=body)
        await together(server, doing, request, lambda: group.broadcast(data, seconds))

    # ---- tensors over HTTP -----------------------------------------------------------------------------------------

    def _payloads(
        self, peers: list[SglangEndpoint], update: WeightUpdate
    ) -> tuple[Packer, Callable[[SglangEndpoint, dict[str, Any], Bucket, str, Deadline], Awaitable[None]]]:
        """Buckets for `/update_weights_from_tensor`, and how one is sent."""
        cpu = torch.device("cpu")
        largest = max(self._bucket_bytes, *(spec.nbytes for spec in update.specs))
        room = payload.shared_memory_left() > 3 * min(largest, update.nbytes)  # two buckets, and others need some
        shared = room and all(peer.same_machine for peer in peers)
        if shared:
            packer = Packer(update, self._bucket_bytes, cpu, allocate=payload.shared_buffer)
        else:
            packer = Packer(update, min(self._bucket_bytes, INLINE_BYTES), cpu)

        def written(bucket: Bucket, copies: int) -> list[str]:
            named = list(bucket.tensors().items())
            if shared:  # every process opens the memory once
                return [payload.by_name(named) for _ in range(copies)]
            return [payload.inline(payload.own_copies(named))] * copies

        async def push(
            peer: SglangEndpoint, common: dict[str, Any], bucket: Bucket, doing: str, until: Deadline
        ) -> None:
            server = peer.server
            body = {"serialized_named_tensors": await in_thread(lambda: written(bucket, peer.copies)), **common}
            await server.ask("/update_weights_from_tensor", doing=doing, deadline=until.left(server), body=body)

        return packer, push

    # ---- an adapter ------------------------------------------------------------------------------------------------

    async def _send_adapter(self, peers: list[SglangEndpoint], update: WeightUpdate, until: Deadline) -> None:
        assert update.adapter is not None, "the caller looked"
        await self._send_bases(peers, update, until)
        packer = Packer(update, max(2 * update.nbytes, 1), torch.device("cpu"))
        bucket = await in_thread(packer.next)
        await in_thread(packer.next)  # the pass ends
        assert bucket is not None, "an adapter has tensors"
        tensors = dict(payload.own_copies(bucket.tensors().items()))
        name = self._name_for(update)
        text = await in_thread(lambda: payload.inline(tensors))
        body = {
            "lora_name": name,
            "config_dict": update.adapter,
            "expected_checksums": {key: _sha256(tensor) for key, tensor in tensors.items()},
        }
        await all_of(self._load_adapter(peer, body, text, until) for peer in peers)
        self._adapters[update.version] = name
        stamp = {"new_version": str(update.version), "abort_all_requests": False}
        for peer in peers:
            left = until.left(peer.server)
            await peer.server.ask("/update_weight_version", doing=until.doing, deadline=left, body=stamp)

    async def _send_bases(self, peers: list[SglangEndpoint], update: WeightUpdate, until: Deadline) -> None:
        """Servers that were started with another model than the adapter lies on get that model first, once."""
        assert update.adapter is not None, "the caller looked"
        if update.base is None:
            return
        wanted = update.adapter.get("base_model_name_or_path")
        fresh = [peer for peer in peers if (peer.server.url, peer.born) not in self._bases]
        # A server that an earlier run used says so by its version; nobody knows what that run left.
        lacking = [peer for peer in fresh if not wanted or peer.model != wanted or peer.version != AS_STARTED]
        if lacking:
            await self._send_model(lacking, update.base, until)
        self._bases |= {(peer.server.url, peer.born) for peer in fresh}

    async def _load_adapter(self, peer: SglangEndpoint, body: dict[str, Any], text: str, until: Deadline) -> None:
        server, name = peer.server, body["lora_name"]
        loaded = self._loaded.setdefault((server.url, peer.born), [])
        if name in loaded:
            return
        await quietly(peer, "/unload_lora_adapter", {"lora_name": name})  # an earlier try may have got through
        doing = f"load the adapter {name}"
        hint = (
            "Start it with --enable-lora --max-lora-rank R --lora-target-modules all, or set vllm_lora_sync='merged'."
        )
        try:
            full = {**body, "serialized_named_tensors": [text] * peer.copies}
            await server.ask("/load_lora_adapter_from_tensors", doing=doing, deadline=until.left(server), body=full)
        except ServerRefused as error:
            raise ServerRefused(server.url, doing, error.said, hint) from error
        loaded.append(name)
        while len(loaded) > KEPT_ADAPTERS:
            old = {"lora_name": loaded.pop(0)}
            await server.ask("/unload_lora_adapter", doing=f"unload {old}", deadline=until.left(server), body=old)


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
