"""Requests that send weights to vLLM servers.

An adapter is loaded from a folder: one that the trainer wrote, or, on another machine, one that the server's worker
wrote from bytes that it received over the group.
"""

import json
import logging
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from covey.engines.servers.errors import RETRIED, BadAnswer, DeadlineExceeded, ServerError, ServerUnreachable, advised
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.vllm.api import get_path, read_world_size
from covey.engines.servers.vllm.launch import ADAPTERS, BACKEND
from covey.engines.servers.weights import api
from covey.engines.servers.weights.buckets import Bucket
from covey.engines.servers.weights.channels import Channel, Group, boot_id

log = logging.getLogger(__name__)


class VllmWeightApi(api.GroupApi):
    """Requests that send weights to vLLM servers.

    Buckets are sent over the group into vLLM's own weight transfer; a server without Covey's worker extension can only
    read files.
    """

    name = "vllm"
    port_hint = "Choose a free port with vllm_group_port; runs on one machine need one each."
    already_open = "already active"
    folder_setting = "vllm_weight_folder"
    method_hint = "Start it with `covey vllm-serve`, or with the options that docs/engines.md lists for `vllm serve`."
    takes_differences = True
    adapters_from_disk = True
    adapters_kept = ADAPTERS
    adapter_hint = "Start it with `covey vllm-serve --enable-lora --max-lora-rank R`, or set vllm_lora_sync='merged'."

    async def probe(self, server: ServerClient, until: api.Deadline) -> api.WeightEndpoint:
        doing = "find out how it takes weights"
        with advised(self.method_hint, message="its routes for weights are closed ({})", doing="take weights"):
            processes = await read_world_size(server, until.left(server), doing)
        try:
            facts = (await call_workers(server, "covey_facts", doing, until.left(server)))[0]
        except (DeadlineExceeded, ServerUnreachable):
            raise
        except ServerError as error:
            log.debug("%s runs without Covey's worker extension: %s", server.url, error)
            facts = {}
        return endpoint_of(server, processes, facts)

    async def load_folder(self, endpoint: api.WeightEndpoint, folder: Path, stamp: str, until: api.Deadline) -> None:
        """Make the server read its weights from `folder`, with checksums where it has Covey's worker extension."""
        server, doing = endpoint.server, f"{until.doing} from {folder}"
        if endpoint.details:
            await call_workers(server, "covey_load_folder", doing, until.left(server), folder=str(folder))
        else:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            await server.call("POST", "/collective_rpc", doing, until.left(server), body)
        await self.write_stamp(server, stamp, until.left(server))

    async def read_stamp(self, server: ServerClient, deadline: float) -> str:
        answer = await server.call("GET", "/weight_info", "read the version of its weights", deadline)
        return str(get_path(answer, "weight_version"))

    async def write_stamp(self, server: ServerClient, stamp: str, deadline: float) -> None:
        body, doing = {"new_version": stamp}, "record the version of its weights"
        await server.call("POST", "/update_weight_version", doing, deadline, body)

    def group_backend(self, endpoint: api.WeightEndpoint, on_gpu: bool) -> str:
        facts = endpoint.details
        if not on_gpu or facts["device"] != "cuda":
            return "gloo"
        mine = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        return "gloo" if facts["gpu"] == mine else "nccl"  # which refuses two processes on one GPU

    async def invite(self, endpoint: api.WeightEndpoint, where: api.Rendezvous, seconds: float) -> None:
        meeting = {"channel": where.backend, **asdict(where), "seconds": seconds}
        del meeting["backend"]
        server, doing = endpoint.server, f"join a {where.backend} group for weights"
        await server.call("POST", "/init_weight_transfer_engine", doing, seconds, {"init_info": meeting})

    def form_group(self, where: api.Rendezvous, store: Any, seconds: float) -> Channel:
        return Group(where.backend, store, where.name, 0, where.world_size, where.address, seconds)

    async def open_update(self, endpoint: api.WeightEndpoint, until: api.Deadline) -> None:
        server = endpoint.server
        await server.call("POST", "/start_weight_update", until.doing, until.left(server))

    async def announce(
        self, endpoint: api.WeightEndpoint, bucket: Bucket, stamp: str, doing: str, seconds: float
    ) -> None:
        piece = {"version": stamp, "number": bucket.number, "count": bucket.count, "seconds": seconds}
        body = {"update_info": {**piece, "manifest": bucket.manifest()}}
        await endpoint.server.call("POST", "/update_weights", doing, seconds, body)

    async def close_update(self, endpoint: api.WeightEndpoint, stamp: str | None, until: api.Deadline) -> None:
        server, body = endpoint.server, {} if stamp is None else {"weight_version": stamp}
        await server.call("POST", "/finish_weight_update", until.doing, until.left(server), body)

    async def models(self, endpoint: api.WeightEndpoint, until: api.Deadline) -> list[str]:
        answer = await endpoint.server.call("GET", "/v1/models", until.doing, until.left(endpoint.server))
        return [str(one[key]) for one in get_path(answer, "data") or [] for key in ("root", "id") if one.get(key)]

    async def load_adapter(
        self, endpoint: api.WeightEndpoint, name: str, config: Any, source: Any, channel: Any, until: api.Deadline
    ) -> None:
        server = endpoint.server
        if isinstance(source, Bucket):
            assert isinstance(channel, Group), "the sender connects before it sends bytes"
            seconds = until.left(server)
            kwargs = {"name": _folder(endpoint, name), "config": json.dumps(config), "seconds": seconds}
            kwargs |= {"manifest": source.manifest()}
            request = call_workers(server, "covey_take_adapter", until.doing, seconds, **kwargs)
            answers = await api.together(server, until.doing, request, partial(channel.send, source.data, seconds))
            source = answers[0]["folder"]
        doing, body = f"load the adapter {name}", {"lora_name": name, "lora_path": str(source)}
        try:
            await server.call("POST", "/v1/load_lora_adapter", doing, until.left(server), body)
        except RETRIED:
            raise
        except ServerError as error:
            if "already been loaded" not in error.message:  # by an earlier attempt; a name has one content
                raise type(error)(server.url, doing, error.message, self.adapter_hint) from error

    async def unload_adapter(self, endpoint: api.WeightEndpoint, name: str, until: api.Deadline) -> None:
        """Unload an adapter, and remove the folder that the server wrote for it."""
        server, doing, body = endpoint.server, f"unload {name}", {"lora_name": name}
        await server.call("POST", "/v1/unload_lora_adapter", doing, until.left(server), body)
        if endpoint.details:
            await call_workers(server, "covey_forget_adapter", doing, until.left(server), name=_folder(endpoint, name))


def _folder(endpoint: api.WeightEndpoint, name: str) -> str:
    """Name of an adapter's folder, different for each start of a server and impossible to guess."""
    return f"{name}-{endpoint.start_id}"


async def call_workers(server: ServerClient, method: str, doing: str, deadline: float, **kwargs: Any) -> list[Any]:
    answer = await server.ask("/collective_rpc", doing, deadline, {"method": method, "kwargs": kwargs})
    results = answer.get("results")
    if not isinstance(results, list) or not results:
        raise BadAnswer(server.url, doing, f"/collective_rpc answered {answer!r:.200}")
    return results


def endpoint_of(server: ServerClient, processes: int, facts: dict[str, Any]) -> api.WeightEndpoint:
    """Endpoint from the facts of a worker (`CoveyWorker.covey_facts`); empty without Covey's worker extension."""
    obstacles = {}
    if facts.get("backend") != BACKEND:
        found = f"it was started without Covey's backend for weight transfer (its backend is {facts.get('backend')!r})"
        obstacles = {"group": found}
    if facts and facts["max_lora_rank"] is None:
        obstacles["adapter"] = "it was started without adapters"
    if not facts.get("differences"):
        obstacles["differences"] = "it was not started by `covey vllm-serve` of this version"
    near = facts["boot"] is not None and facts["boot"] == boot_id() if facts else api.is_local(server)
    return api.WeightEndpoint(server, processes, facts.get("born", ""), near, obstacles, facts)
