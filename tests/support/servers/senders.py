"""Weight senders for tests: over vLLM's and SGLang's APIs, and over the smallest backend there can be."""

import torch

from covey.engines.servers.sglang.weights import SglangWeightApi
from covey.engines.servers.vllm.weights import VllmWeightApi
from covey.engines.servers.weights.api import WeightApi, WeightEndpoint
from covey.engines.servers.weights.sender import WeightSender


def vllm_sender(method="auto", port=0, **options):
    return WeightSender(VllmWeightApi(port), method, **options)


def sglang_sender(method="auto", device: torch.device | None = None, port=0, **options):
    return WeightSender(SglangWeightApi(device, port), method, **options)


class CheckpointApi(WeightApi):
    """Reads a folder of safetensors with vLLM's `reload_weights`; the smallest `WeightApi`."""

    name = "checkpoints"

    async def probe(self, server, until):
        return WeightEndpoint(server, same_machine=True)

    async def load_folder(self, endpoint, folder, stamp, until):
        server, body = endpoint.server, {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await server.ask("/collective_rpc", doing=until.doing, deadline=until.left(server), body=body)
        await self.write_stamp(server, stamp, until.left(server))

    read_stamp, write_stamp = VllmWeightApi.read_stamp, VllmWeightApi.write_stamp


class RecordingSender(WeightSender):
    """Sends checkpoints.

    Attributes:
        sent: (version, urls) of every call, also of those that failed.
    """

    def __init__(self):
        super().__init__(CheckpointApi())
        self.sent = []

    async def send(self, servers, update, seconds):
        self.sent.append((update.version, [server.url for server in servers]))
        await super().send(servers, update, seconds)
