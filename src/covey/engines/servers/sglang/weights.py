"""Requests that send weights to SGLang servers; adapters are sent in the body of HTTP requests."""

import base64
import hashlib
import pickle
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from covey.engines.servers.errors import ServerError, advised
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.sglang.api import model_info, server_info
from covey.engines.servers.weights import api
from covey.engines.servers.weights.buckets import Bucket
from covey.engines.servers.weights.channels import Channel, Group, nccl_that_raises

CLEANUP_SECONDS = 5.0  # deadline for a server to clean up after a failed update
SPARE_SECONDS = 3600.0  # added to the deadline for NCCL's own timeout, so that it never comes first


class SglangWeightApi(api.GroupApi):
    """Requests that send weights to SGLang servers; servers with replicas or pipelines only read files."""

    name = "sglang"
    port_hint = "Choose a free port with sglang_group_port; runs on one machine need one for each server."
    shares_port = False
    already_open = "already open"
    dense = True
    bucket_device: torch.device
    folder_setting = "checkpoint_path"
    method_hint = "Set checkpoint_path to a folder that it sees."
    reopens_folder = True
    adapters_kept = 2
    adapter_hint = (
        "Start it with --enable-lora --max-lora-rank R --lora-target-modules all, or set vllm_lora_sync='merged'."
    )

    def __init__(self, device: torch.device | None = None, port: int = 0):
        super().__init__(port)
        self.bucket_device = device or torch.device("cpu")
        self._group_names: dict[str, str] = {}  # by URL

    async def probe(self, server: ServerClient, until: api.Deadline) -> api.WeightEndpoint:
        model = await model_info(server, until.left(server))
        info = await server_info(server, until.left(server))
        processes, start_id = int(info.get("tp_size") or 1), str(info.get("startup_time") or "")
        return api.WeightEndpoint(server, processes, start_id, api.is_local(server), obstacles_of(info), model)

    async def load_folder(self, endpoint: api.WeightEndpoint, folder: Path, stamp: str, until: api.Deadline) -> None:
        server, doing = endpoint.server, f"{until.doing} from {folder}"
        body: dict[str, Any] = {"model_path": str(folder), "load_format": "safetensors", "flush_cache": False}
        body["weight_version"] = stamp
        with advised("It must see this folder under the same name: set checkpoint_path to one that it shares."):
            await server.ask("/update_weights_from_disk", doing, until.left(server), body)

    async def read_stamp(self, server: ServerClient, deadline: float) -> str:
        return str((await model_info(server, deadline)).get("weight_version"))

    async def write_stamp(self, server: ServerClient, stamp: str, deadline: float) -> None:
        body, doing = {"new_version": stamp, "abort_all_requests": False}, "record the version of its weights"
        await server.call("POST", "/update_weight_version", doing, deadline, body)

    def group_backend(self, endpoint: api.WeightEndpoint, on_gpu: bool) -> str:
        return "nccl" if self.bucket_device.type == "cuda" else "gloo"

    async def invite(self, endpoint: api.WeightEndpoint, where: api.Rendezvous, seconds: float) -> None:
        server, doing = endpoint.server, f"join a {where.backend} group for weights"
        self._group_names[server.url] = where.name
        body = {
            "master_address": where.address,
            "master_port": where.port,
            "rank_offset": 1,
            "world_size": where.world_size,
            "group_name": where.name,
            "backend": where.backend,
        }
        await server.ask("/init_weights_update_group", doing, seconds, body)

    def form_group(self, where: api.Rendezvous, store: Any, seconds: float) -> Channel:
        return SglangGroup(where.backend, store, where.name, where.world_size, seconds)

    async def open_update(self, endpoint: api.WeightEndpoint, until: api.Deadline) -> None:
        await endpoint.server.ask("/begin_weight_update", until.doing, until.left(endpoint.server), {})

    async def close_update(self, endpoint: api.WeightEndpoint, stamp: str | None, until: api.Deadline) -> None:
        """The stamp came with the last bucket."""
        await endpoint.server.ask("/end_weight_update", until.doing, until.left(endpoint.server), {})

    async def announce(
        self, endpoint: api.WeightEndpoint, bucket: Bucket, stamp: str, doing: str, seconds: float
    ) -> None:
        server, specs = endpoint.server, [entry.spec for entry in bucket.entries]
        body: dict[str, Any] = {
            "names": [spec.name for spec in specs],
            "dtypes": [str(spec.dtype).removeprefix("torch.") for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": self._group_names[server.url],
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        if bucket.number + 1 == bucket.count:
            body["weight_version"] = stamp
        await server.ask("/update_weights_from_distributed", doing, seconds, body)

    async def abandon(self, endpoint: api.WeightEndpoint) -> None:
        if (name := self._group_names.pop(endpoint.server.url, None)) is not None:
            await self._try("/destroy_weights_update_group", endpoint, {"group_name": name})
        await self._try("/end_weight_update", endpoint, {})

    async def _try(self, path: str, endpoint: api.WeightEndpoint, body: dict[str, Any]) -> None:
        with suppress(ServerError):
            await endpoint.server.ask(path, "clean up", CLEANUP_SECONDS, body)

    async def models(self, endpoint: api.WeightEndpoint, until: api.Deadline) -> list[str]:
        return [endpoint.details["model_path"]]

    def encode_adapter(self, bucket: Bucket) -> tuple[str, dict[str, str]]:
        # Copies, because pickling a view of the bucket would write the whole bucket for each tensor.
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in bucket.tensors().items()}
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
        return {"group": "replicas (--dp-size) take weights from files alone"}
    if int(info.get("pp_size") or 1) > 1:
        return {"group": "pipelines (--pp-size) take weights in no group"}
    return {}


class SglangGroup(Group):
    """Rank 0 of a group whose other members are the processes of one SGLang server."""

    def __init__(self, backend: str, store: Any, name: str, world_size: int, seconds: float):
        # Both ends must use the same keys of the store; the server gets them from this private helper of SGLang.
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


def inline(tensors: dict[str, Tensor]) -> str:
    """Tensors as a pickle in base64; it must name only functions of torch, or the server refuses it."""
    return base64.b64encode(pickle.dumps(tensors)).decode()
