"""Requests of SGLang servers about weights; an adapter travels inside HTTP requests. Transfer methods:

- `group`: buckets broadcast over NCCL or gloo;
- `tensor`: buckets in shared memory of this machine; to another machine, inside HTTP requests, which is slow;
- `disk`: safetensors in a folder that trainer and server both see, and the only method for data-parallel replicas.
"""

import base64
import hashlib
import io
import pickle
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions
from torch.storage import TypedStorage

from covey.core.engine import WeightUpdate
from covey.engines.servers.errors import ServerError, ServerRefused, advised
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.sglang.api import model_info, server_info
from covey.engines.servers.weights import api
from covey.engines.servers.weights.buckets import Bucket, Buckets, pack
from covey.engines.servers.weights.channels import Channel, Group, in_thread, nccl_that_raises

INLINE_BYTES = 32 * 2**20  # bound of the numbers in one HTTP request; as text they are a third larger
CLEANUP_SECONDS = 5.0  # for a server to close what a failed update left open
SHARING_ATTEMPTS = 5  # torch gives its manager of shared memory a second to answer, which a busy machine may exceed
SHARED_MEMORY = "/dev/shm"  # shared memory on Linux; containers often get 64 MB of it
SPARE_SECONDS = 3600.0  # beyond the deadline here, so that NCCL's own timeout does not come first


class SglangWeightApi(api.WeightApi):
    """Requests of SGLang servers about weights; they join the trainer at `port` and the next ones (0: free ports)."""

    name = "sglang"
    methods = automatic = ("group", "tensor", "disk")
    folder_setting = "checkpoint_path"
    method_hint = "Set checkpoint_path to a folder that it sees."
    reopens_folder = True
    adapters_kept = 2
    adapter_hint = (
        "Start it with --enable-lora --max-lora-rank R --lora-target-modules all, or set vllm_lora_sync='merged'."
    )

    def __init__(self, device: torch.device | None = None, port: int = 0):
        self._device, self._port = device or torch.device("cpu"), port
        self._offsets: dict[str, int] = {}  # of the port, by URL
        self._group_names: dict[str, str] = {}  # by URL

    async def probe(self, server: ServerClient, until: api.Deadline) -> api.WeightEndpoint:
        model = await model_info(server, until.left(server))
        info = await server_info(server, until.left(server))
        processes, start_id = int(info.get("tp_size") or 1), str(info.get("startup_time") or "")
        return api.WeightEndpoint(server, processes, start_id, api.is_local(server), obstacles_of(info), model)

    async def load_folder(self, endpoint: api.WeightEndpoint, folder: Path, version: int, until: api.Deadline) -> None:
        server, doing = endpoint.server, f"{until.doing} from {folder}"
        body: dict[str, Any] = {"model_path": str(folder), "load_format": "safetensors", "flush_cache": False}
        body["weight_version"] = str(version)
        with advised("It must see this folder under the same name: set checkpoint_path to one that it shares."):
            await server.ask("/update_weights_from_disk", doing, until.left(server), body)

    async def read_version(self, server: ServerClient, deadline: float) -> str:
        return str((await model_info(server, deadline)).get("weight_version"))

    async def write_version(self, server: ServerClient, version: str, deadline: float) -> None:
        body, doing = {"new_version": version, "abort_all_requests": False}, "record the version of its weights"
        await server.call("POST", "/update_weight_version", doing, deadline, body)

    def pack(
        self, update: WeightUpdate, method: str, bucket_bytes: int, endpoints: Sequence[api.WeightEndpoint]
    ) -> Buckets:
        """Dense buckets for a group; for "tensor", buckets in shared memory where all servers can open it."""
        if method == "group":
            return pack(update, bucket_bytes, self._device, dense=True)
        cpu = torch.device("cpu")
        if method == "adapter":
            return pack(update, bucket_bytes, cpu)
        largest = max(bucket_bytes, *(spec.nbytes for spec in update.specs))
        room = shared_memory_left() > 3 * min(largest, update.nbytes)  # two buckets, and others need some
        if room and all(endpoint.same_machine for endpoint in endpoints):
            return pack(update, bucket_bytes, cpu, allocate=shared_buffer)
        return pack(update, min(bucket_bytes, INLINE_BYTES), cpu)

    async def join_group(
        self, endpoint: api.WeightEndpoint, method: str, on_gpu: bool, until: api.Deadline
    ) -> Channel | None:
        if method != "group":
            return None
        server, doing = endpoint.server, "join a group for weights"
        port = self._port and self._port + self._offsets.setdefault(server.url, len(self._offsets))
        hint = "Choose a free port with sglang_group_port; runs on one machine need one for each server."
        address, store = api.listen_for(server, port, hint)
        size, kind = 1 + endpoint.processes, "nccl" if self._device.type == "cuda" else "gloo"
        name = self._group_names[server.url] = f"covey-{uuid.uuid4().hex}"
        body = {
            "master_address": address,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": name,
            "backend": kind,
        }
        ask = partial(server.ask, "/init_weights_update_group", doing, body=body)
        join = partial(SglangGroup, kind, store, name, size)
        return await api.meet(server, doing, until, f"{address}, port {store.port}", ask, join)

    async def begin(self, endpoint: api.WeightEndpoint, until: api.Deadline) -> None:
        try:
            await self._post("/begin_weight_update", endpoint, until)
        except ServerRefused as error:
            if "already open" not in error.message:
                raise
            await self._post("/end_weight_update", endpoint, until)
            await self._post("/begin_weight_update", endpoint, until)

    async def push(
        self, endpoint: api.WeightEndpoint, channel: Channel | None, bucket: Bucket, version: int, until: api.Deadline
    ) -> None:
        server, doing = endpoint.server, f"{until.doing} ({bucket})"
        body: dict[str, Any] = {"flush_cache": False}
        if bucket.number + 1 == bucket.count:
            body["weight_version"] = str(version)
        if channel is None:
            tensors = list(bucket.tensors().items())
            body["serialized_named_tensors"] = await in_thread(
                lambda: encode(tensors, endpoint.processes, shared=bucket.data.is_shared())
            )
            await server.ask("/update_weights_from_tensor", doing, until.left(server), body)
            return
        seconds, specs = until.left(server), [entry.spec for entry in bucket.entries]
        body |= {
            "names": [spec.name for spec in specs],
            "dtypes": [str(spec.dtype).removeprefix("torch.") for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": self._group_names[server.url],
            "load_format": "flattened_bucket",
        }
        data = bucket.data[: sum(spec.nbytes for spec in specs)]
        request = server.ask("/update_weights_from_distributed", doing, seconds, body)
        await api.together(server, doing, request, partial(channel.send, data, seconds))

    async def end(self, endpoint: api.WeightEndpoint, version: int, until: api.Deadline) -> None:
        await self._post("/end_weight_update", endpoint, until)

    async def abandon(self, endpoint: api.WeightEndpoint) -> None:
        if (name := self._group_names.pop(endpoint.server.url, None)) is not None:
            await self._try("/destroy_weights_update_group", endpoint, {"group_name": name})
        await self._try("/end_weight_update", endpoint, {})

    async def _post(self, path: str, endpoint: api.WeightEndpoint, until: api.Deadline) -> None:
        await endpoint.server.ask(path, until.doing, until.left(endpoint.server), {})

    async def _try(self, path: str, endpoint: api.WeightEndpoint, body: dict[str, Any]) -> None:
        with suppress(ServerError):
            await endpoint.server.ask(path, "clean up", CLEANUP_SECONDS, body)

    async def has_base(self, endpoint: api.WeightEndpoint, model: str | None, until: api.Deadline) -> bool:
        """Tell whether the server was started with `model`; its version shows whether an earlier run used it."""
        found = endpoint.details
        return found["model_path"] == model and str(found.get("weight_version")) == api.AS_STARTED

    def encode_adapter(self, bucket: Bucket) -> tuple[str, dict[str, str]]:
        tensors = dict(own_copies(bucket.tensors().items()))
        checksums = {
            name: hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, tensor in tensors.items()
        }
        return inline(tensors), checksums

    async def load_adapter(
        self, endpoint: api.WeightEndpoint, name: str, config: Any, source: Any, channel: Any, until: api.Deadline
    ) -> None:
        server, (text, checksums) = endpoint.server, source
        await self._try("/unload_lora_adapter", endpoint, {"lora_name": name})  # an earlier attempt may have loaded it
        body = {
            "lora_name": name,
            "config_dict": config,
            "expected_checksums": checksums,
            "serialized_named_tensors": [text] * endpoint.processes,
        }
        with advised(self.adapter_hint):
            await server.ask("/load_lora_adapter_from_tensors", f"load the adapter {name}", until.left(server), body)

    async def unload_adapter(self, endpoint: api.WeightEndpoint, name: str, until: api.Deadline) -> None:
        server = endpoint.server
        await server.ask("/unload_lora_adapter", f"unload {name}", until.left(server), {"lora_name": name})


def obstacles_of(info: Mapping[str, Any]) -> dict[str, str]:
    if int(info.get("dp_size") or 1) > 1:
        return dict.fromkeys(("group", "tensor"), "replicas (--dp-size) take weights from files alone")
    if int(info.get("pp_size") or 1) > 1:
        return {"group": "pipelines (--pp-size) take weights in no group"}
    return {}


class SglangGroup(Group):
    """Rank 0 of a group whose other members are one SGLang server's."""

    def __init__(self, backend: str, store: Any, name: str, world_size: int, seconds: float):
        # The two ends meet under keys of the store that only this private helper knows; the server uses it too.
        from torch.distributed.distributed_c10d import Backend, _new_process_group_helper

        self.backend, self._store = backend, store
        store.set_timeout(timedelta(seconds=max(seconds, 0.001)))
        with nccl_that_raises() if backend == "nccl" else nullcontext():
            self._group, _ = _new_process_group_helper(
                world_size,
                0,
                [],
                Backend(backend),
                dist.PrefixStore(name, store),
                group_name=name,  # type: ignore[arg-type]
                timeout=timedelta(seconds=seconds if backend == "gloo" else seconds + SPARE_SECONDS),
            )

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with suppress(Exception):
                group.abort()
            with suppress(Exception):
                dist.destroy_process_group(group)


def encode(named: list[tuple[str, Tensor]], copies: int, *, shared: bool) -> list[str]:
    """One text for each of `copies` processes: a pickle as base64, of functions of torch alone, or the server refuses.

    It holds the numbers, or their address in this machine's shared memory; each process opens a text of its own.
    """
    if shared:
        return [by_name(named) for _ in range(copies)]
    return [inline(own_copies(named))] * copies


def inline(tensors: Any) -> str:
    return base64.b64encode(pickle.dumps(tensors)).decode()


def own_copies(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Copies without shared storage, of which `inline` would write the whole for each tensor."""
    return [(name, tensor.detach().cpu().clone()) for name, tensor in named]


def shared_buffer(nbytes: int) -> Tensor:
    """A flat uint8 buffer that another process of this machine can open by name."""
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    for left in reversed(range(SHARING_ATTEMPTS)):
        try:
            buffer.untyped_storage()._share_filename_cpu_()
            break
        except RuntimeError as error:
            if "timed out" not in str(error) or not left:
                raise
    return buffer


def by_name(named: list[tuple[str, Tensor]]) -> str:
    """Addresses of views of shared buffers, which must last until the one process that opens them has answered."""
    text = io.BytesIO()
    _ByName(text).dump(named)
    return base64.b64encode(text.getvalue()).decode()


def shared_memory_left() -> int:
    """Bytes that can still be shared. The system kills a process that writes beyond them."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return 0


class _ByName(pickle.Pickler):
    """Pickler of a storage's address; torch's own passes file descriptors, which only parent and child can do."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._storages: dict[int, torch.UntypedStorage] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.UntypedStorage):
            where = obj._share_filename_cpu_()
            obj._shared_incref()  # the receiver takes one away
            return reductions.rebuild_storage_filename, (type(obj), *where)
        if isinstance(obj, TypedStorage):
            return reductions.rebuild_typed_storage, (self._once(obj._untyped_storage), obj.dtype)
        if isinstance(obj, Tensor):
            layout = (obj.storage_offset(), obj.size(), obj.stride(), False)
            storage = TypedStorage(wrap_storage=self._once(obj.untyped_storage()), dtype=obj.dtype, _internal=True)
            return reductions.rebuild_tensor, (Tensor, storage, layout)
        return NotImplemented

    def _once(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Same object for the same memory, so that it is written, and opened, once."""
        return self._storages.setdefault(storage.data_ptr(), storage)
