"""Requests of vLLM servers about weights.

An adapter is a folder that the server loads, or that one on another machine writes itself, from bytes of the group.
"""

import contextlib
import json
import logging
import uuid
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
from covey.engines.servers.weights.channels import Channel, Group, Ipc, boot_id

log = logging.getLogger(__name__)


class VllmWeightApi(api.WeightApi):
    """Requests of vLLM servers about weights; servers join the trainer's group at `port` here, 0: any free one."""

    name = "vllm"
    # Buckets over gloo or NCCL into vLLM's own weight transfer; the same with CUDA memory that a server on the same GPU
    # opens in place; files, the only method of a `vllm serve` without Covey's worker extension.
    methods = ("group", "ipc", "disk")
    automatic = ("group", "disk")
    folder_setting = "vllm_weight_folder"
    method_hint = "Start it with `covey vllm-serve`, or with the options that docs/engines.md lists for `vllm serve`."
    adapters_from_disk = True
    adapters_kept = ADAPTERS
    adapter_hint = "Start it with `covey vllm-serve --enable-lora --max-lora-rank R`, or set vllm_lora_sync='merged'."

    def __init__(self, port: int = 0):
        self._port = port

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

    async def load_folder(self, endpoint: api.WeightEndpoint, folder: Path, version: int, until: api.Deadline) -> None:
        """Make the server read its weights from `folder`, with checksums where it has Covey's worker extension."""
        server, doing = endpoint.server, f"{until.doing} from {folder}"
        if endpoint.details:
            await call_workers(server, "covey_load_folder", doing, until.left(server), folder=str(folder))
        else:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            await server.call("POST", "/collective_rpc", doing, until.left(server), body)
        await self.write_version(server, str(version), until.left(server))

    async def read_version(self, server: ServerClient, deadline: float) -> str:
        answer = await server.call("GET", "/weight_info", "read the version of its weights", deadline)
        return str(get_path(answer, "weight_version"))

    async def write_version(self, server: ServerClient, version: str, deadline: float) -> None:
        body, doing = {"new_version": version}, "record the version of its weights"
        await server.call("POST", "/update_weight_version", doing, deadline, body)

    async def join_group(self, endpoint: api.WeightEndpoint, method: str, on_gpu: bool, until: api.Deadline) -> Channel:
        server, facts, address, store, kind = endpoint.server, endpoint.details, "", None, method
        if method == "group":
            kind = "gloo"
            if on_gpu and facts["device"] == "cuda":
                mine = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
                kind = "gloo" if facts["gpu"] == mine else "nccl"
            hint = "Choose a free port with vllm_group_port; runs on one machine need one each."
            address, store = api.listen_for(server, self._port, hint)
        name, world_size = uuid.uuid4().hex, 1 + endpoint.processes
        doing, port = f"join a {kind} group for weights", 0 if store is None else store.port
        meeting = {"channel": kind, "address": address, "port": port, "name": name, "world_size": world_size}

        async def ask(seconds: float) -> None:
            body = {"init_info": {**meeting, "seconds": seconds}}
            await server.call("POST", "/init_weight_transfer_engine", doing, seconds, body)

        def join(seconds: float) -> Channel:
            return Ipc() if store is None else Group(kind, store, name, 0, world_size, address, seconds)

        return await api.meet(server, doing, until, f"{address}, port {port}", ask, join)

    async def begin(self, endpoint: api.WeightEndpoint, until: api.Deadline) -> None:
        server = endpoint.server
        for attempt in range(3):
            try:
                await server.call("POST", "/start_weight_update", until.doing, until.left(server))
                return
            except ServerError as error:
                if attempt == 2 or "already active" not in error.message:
                    raise
            # An update that broke off is still open, this run's or another trainer's. Ending it reports what is
            # missing; vLLM records the end only the second time, when nothing is.
            with contextlib.suppress(ServerError):
                await self._finish(server, {}, until)

    async def push(
        self, endpoint: api.WeightEndpoint, channel: Channel | None, bucket: Bucket, version: int, until: api.Deadline
    ) -> None:
        assert isinstance(channel, Group | Ipc), "`join_group` made it"
        server, data, seconds = endpoint.server, bucket.data, until.left(endpoint.server)
        doing = f"{until.doing} ({bucket})"
        piece = {"version": version, "number": bucket.number, "count": bucket.count, "seconds": seconds}
        body = {"update_info": {**piece, "manifest": bucket.manifest(), "note": channel.note(data)}}
        request = server.call("POST", "/update_weights", doing, seconds, body)
        await api.together(server, doing, request, partial(channel.send, data, seconds))

    async def end(self, endpoint: api.WeightEndpoint, version: int, until: api.Deadline) -> None:
        await self._finish(endpoint.server, {"weight_version": str(version)}, until)

    async def _finish(self, server: ServerClient, body: dict[str, str], until: api.Deadline) -> None:
        await server.call("POST", "/finish_weight_update", until.doing, until.left(server), body)

    async def has_base(self, endpoint: api.WeightEndpoint, model: str | None, until: api.Deadline) -> bool:
        """Tell whether the server was started with `model` and has been sent no weights since."""
        server = endpoint.server
        if await self.read_version(server, until.left(server)) != api.AS_STARTED:
            return False  # an earlier run used this server, and may have left any weights
        answer = await server.call("GET", "/v1/models", until.doing, until.left(server))
        return any(model in (listed.get("root"), listed.get("id")) for listed in get_path(answer, "data") or [])

    async def load_adapter(
        self, endpoint: api.WeightEndpoint, name: str, config: Any, source: Any, channel: Any, until: api.Deadline
    ) -> None:
        server = endpoint.server
        if isinstance(source, Bucket):
            assert isinstance(channel, Group), "the sender connects before it sends bytes"
            seconds = until.left(server)
            kwargs = {"name": _folder(endpoint, name), "config": json.dumps(config), "seconds": seconds}
            kwargs |= {"manifest": source.manifest(), "note": channel.note(source.data)}
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
        """Drop an adapter, and the folder that the server wrote for it."""
        server, doing, body = endpoint.server, f"unload {name}", {"lora_name": name}
        await server.call("POST", "/v1/unload_lora_adapter", doing, until.left(server), body)
        if endpoint.details:
            await call_workers(server, "covey_forget_adapter", doing, until.left(server), name=_folder(endpoint, name))


def _folder(endpoint: api.WeightEndpoint, name: str) -> str:
    """Name of an adapter's folder: another for each start of a server, and one that nobody can guess."""
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
        obstacles = {"group": found, "ipc": found}
    elif facts["device"] != "cuda":
        obstacles["ipc"] = f"it runs on {facts['device']}, and only memory of a GPU can be shared"
    if facts and facts["max_lora_rank"] is None:
        obstacles["adapter"] = "it was started without adapters"
    near = facts["boot"] is not None and facts["boot"] == boot_id() if facts else api.is_local(server)
    return api.WeightEndpoint(server, processes, facts.get("born", ""), near, obstacles, facts)
