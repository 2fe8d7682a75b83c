"""Mistakes about how weights reach inference servers."""

import asyncio
import socket
import warnings

import torch

from covey.core.engine import EngineTraits, TensorSpec, WeightUpdate
from covey.engines.servers.errors import ServerRefused
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.vllm.weights import VllmWeightApi, endpoint_of
from covey.engines.servers.weights.api import Deadline
from covey.engines.servers.weights.buckets import pack, unpack
from covey.engines.servers.weights.sender import choose_method
from covey.policy.weights import weight_update
from covey.trainer.distributed.collectives import Collectives
from covey.trainer.engines.weight_sync import WeightSync
from tests.support import tiny
from tests.support.mistakes.cases import CONFIG, Bench, Mistake, checked

FACTS = {"backend": "covey", "max_lora_rank": None, "boot": None}


def plain_server(url="http://127.0.0.1:8000"):
    return endpoint_of(ServerClient(url), 1, {})


def taken_port(bench: Bench):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        api = VllmWeightApi(port=other.getsockname()[1])
        endpoint = endpoint_of(ServerClient("http://127.0.0.1:8000"), 1, {"device": "cpu", **FACTS})
        asyncio.run(api.join_group(endpoint, False, Deadline("join", 5.0)))


def adapted(**changes):
    import peft

    return peft.get_peft_model(tiny.model(), peft.LoraConfig(r=2, target_modules=["q_proj"], **changes))


class Served:
    """An engine with weights of its own."""

    def __init__(self, **traits):
        self.traits = EngineTraits(**traits)


def adapter_alone(model, **traits):
    alone = Collectives(rank=0, size=1, seconds=60.0, step=lambda: 0)
    WeightSync(Served(**traits), lambda: model, alone, lora_sync="adapter").ensure_current(0)


def quantised(bench: Bench):
    model = adapted()
    model.get_base_model().is_quantized = True
    weight_update(model, 0)


def untied(bench: Bench):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, about the same
        weight_update(adapted(modules_to_save=["embed_tokens"]), 0)


def spoiled(bench: Bench):
    named = [("lm_head.weight", torch.randn(4))]
    specs = (TensorSpec("lm_head.weight", (4,), torch.float32),)
    bucket = next(pack(WeightUpdate(0, specs, lambda: iter(named)), 100))
    bucket.data[0] ^= 1
    unpack(bucket.manifest(), bucket.data)


WEIGHTS = [
    Mistake(
        "Sent weights over a group to a server that was not started for it",
        lambda bench: choose_method(VllmWeightApi(), "group", [plain_server()], shared_folder=False),
        (r"127\.0\.0\.1", "8000"),
        when=CONFIG,
        kind=ServerRefused,
    ),
    Mistake(
        "Sent weights as files to a server on another machine",
        lambda bench: choose_method(
            VllmWeightApi(), "auto", [plain_server("http://10.1.2.3:8000")], shared_folder=False
        ),
        (r"10\.1\.2\.3", "vllm_weight_folder"),
        when=CONFIG,
        kind=ServerRefused,
    ),
    Mistake(
        "Ran two trainers on one machine with the same vllm_group_port",
        taken_port,
        ("vllm_group_port",),
        when=CONFIG,
        kind=ServerRefused,
    ),
    checked(
        "Sent an adapter alone that servers cannot load",
        lambda bench: adapter_alone(adapted(use_dora=True), takes_adapters=True),
        "adapter-alone",
        "DoRA",
        "'merged' or 'auto'",
        when=CONFIG,
    ),
    checked(
        "Sent an adapter alone to a server that takes none",
        lambda bench: adapter_alone(adapted()),
        "adapter-alone",
        "adapters enabled",
        "'merged' or 'auto'",
        when=CONFIG,
    ),
    checked(
        "Sent the weights of a quantised model", quantised, "weights-whole", "vllm_lora_sync='adapter'", when=CONFIG
    ),
    checked(
        "Adapted the embeddings of a model that ties its head to them, and sampled from a server",
        untied,
        "weights-whole",
        "lm_head",
        "ensure_weight_tying=True",
        when=CONFIG,
    ),
    Mistake("Sent weights through something that changes them", spoiled, ("lm_head",), when=CONFIG),
]
