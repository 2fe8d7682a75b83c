"""What Covey sends SGLang, read by SGLang's own classes; and the fake server's idea of them is theirs."""

import asyncio
import base64
import io
import json
import warnings
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image

from covey.core.media import Media, unexpanded
from covey.engines.servers.completions import sent_images
from covey.engines.servers.engine import RemoteEngine
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.sglang.api import SglangApi
from covey.engines.servers.sglang.weights import inline
from covey.engines.servers.weights.buckets import pack
from covey.policy.weights import weight_update
from tests.support import tiny, tiny_vision
from tests.support.servers.senders import sglang_sender
from tests.support.servers.sglang_package import BODIES, RECORD, describe, load
from tests.support.servers.sglang_servers import InThread, request, update

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def real():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load()


@pytest.fixture(scope="module")
def asked(tiny_folder):
    """[path, body] of everything that a run asks of a server: samples, weights by every way here, adapters, sleep."""
    server = InThread(tiny_folder, "--enable-lora", "--enable-memory-saver")
    try:
        policy = get_peft_model(tiny.model(), LoraConfig(r=2, target_modules=["q_proj"]))
        engine = RemoteEngine([ServerClient(server.url)], SglangApi(), sglang_sender("disk"), ends=frozenset({1}))
        for version in (1, 2, 3):
            engine.load_weights(weight_update(policy, version, adapter_only=True))
        asyncio.run(engine.generate(request()))
        engine.close()
        for last in (False, True):  # afterwards it sleeps
            dialect = SglangApi(temperature=0.7, vocab_size=tiny.config().vocab_size)
            transport = sglang_sender("disk", bucket_bytes=20_000)
            engine = RemoteEngine([ServerClient(server.url)], dialect, transport, ends=frozenset({1}), sleeps=last)
            with engine.awake():
                engine.load_weights(update(tiny.model(), 1))
                sampled = request(n=3, temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1)
                sampled.params.extra["regex"] = "[0-9]+"
                asyncio.run(engine.generate(sampled))
            engine.close()
        yield server.log()
    finally:
        server.stop()


def test_the_record_is_what_the_package_says():
    assert json.loads(RECORD.read_text()) == json.loads(json.dumps(describe()))


def test_every_body_is_one_of_the_route_it_is_sent_to(real, asked):
    from pydantic import TypeAdapter

    seen = set()
    for path, body in asked:
        if path in BODIES:
            kind = getattr(real.io, BODIES[path])
            made = TypeAdapter(kind).validate_python(body)
            assert all(hasattr(made, name) for name in body), (path, set(body))
            seen.add(path)
    assert {"/update_weights_from_disk", "/load_lora_adapter_from_tensors"} < seen
    assert {"/pause_generation", "/continue_generation", "/release_memory_occupation", "/unload_lora_adapter"} < seen


def test_requests_for_completions_keep_sglangs_contract(real, asked):
    from pydantic import TypeAdapter
    from sglang.srt.sampling.sampling_params import SamplingParams

    bodies = [body for path, body in asked if path == "/generate"]
    assert any("lora_path" in body for body in bodies) and any(len(body["input_ids"]) == 3 for body in bodies)
    for body in bodies:
        real.api.GenerateRequest.from_json_value(body)
        made = TypeAdapter(real.io.GenerateReqInput).validate_python(body)
        made.normalize_batch_and_arguments()
        assert made.batch_size == len(body["input_ids"]) and made.parallel_sample_num == 1
        for i, params in enumerate(body["sampling_params"]):
            SamplingParams(**params).verify(tiny.config().vocab_size)
            assert made[i].sampling_params == params and made[i].input_ids == body["input_ids"][i]


def test_images_are_read_as_one_list_for_each_completion(real):
    """Two completions of a prompt with two images: SGLang's own class and its own reader of images see them."""
    from pydantic import TypeAdapter

    pictures = tuple(tiny_vision.picture(number) for number in (0, 1))
    media = Media(pictures, {}, {}, start=1, length=6, short_ids=(7, 7))
    shown = replace(request(n=2), prompt_ids=[5, 9, 9, 9, 9, 9, 9, 6], media=(media,))
    body = {
        "input_ids": [unexpanded(shown.prompt_ids, shown.media)] * 2,
        "image_data": [sent_images(shown)] * 2,
        "sampling_params": [{}, {}],
    }
    made = TypeAdapter(real.io.GenerateReqInput).validate_python(body)
    made.normalize_batch_and_arguments()
    assert made.batch_size == 2 and made.modalities == ["multi-images", "multi-images"]
    for one in (made[0], made[1]):
        assert one.input_ids == [5, 7, 7, 6]
        for url, picture in zip(one.image_data, pictures, strict=True):
            read = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
            assert read.tobytes() == picture.tobytes()


def test_a_group_is_announced_with_the_fields_of_its_class(real):
    """The fake in a thread cannot join a group; the body is the one that `sglang_sender` makes."""
    body = {
        "master_address": "127.0.0.1",
        "master_port": 1,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": "g",
        "backend": "gloo",
    }
    assert real.io.InitWeightsUpdateGroupReqInput(**body).backend == "gloo"
    assert set(body) == set(json.loads(RECORD.read_text())["bodies"]["/init_weights_update_group"])


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.bfloat16, torch.float32, torch.bfloat16]])
def test_sglang_finds_the_tensors_of_a_bucket_where_they_are(real, dtypes):
    """Odd sizes, and formats in turn: its buckets have no gaps."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    from covey.core.engine import TensorSpec, WeightUpdate

    named = {f"t{i}": torch.randn(3 + i, 5).to(dtypes[i % len(dtypes)]) for i in range(7)}
    specs = tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named.items())
    found = {}
    for bucket in pack(WeightUpdate(1, specs, lambda: iter(named.items())), 1000, dense=True):
        inside = [entry.spec for entry in bucket.entries]
        empty = FlattenedTensorBucket.empty(
            [spec.name for spec in inside],
            [str(spec.dtype).removeprefix("torch.") for spec in inside],
            [list(spec.shape) for spec in inside],
            "cpu",
        )
        assert len(empty.flattened_tensor) == sum(spec.nbytes for spec in inside)
        empty.flattened_tensor.copy_(bucket.data[: len(empty.flattened_tensor)])
        found |= dict(empty.reconstruct_tensors())
    assert all(torch.equal(found[name], tensor) for name, tensor in named.items()) and len(found) == len(named)


def test_sglangs_unpickler_rebuilds_an_adapter(real):
    sent = {"a": torch.arange(8.0).view(2, 4), "b": torch.ones(3, dtype=torch.bfloat16)}
    rebuilt = real.serializer.deserialize(base64.b64decode(inline(sent)))
    assert rebuilt.keys() == sent.keys() and all(torch.equal(rebuilt[name], sent[name]) for name in sent)


def test_the_servers_own_flags_that_training_needs_exist():
    """`covey sglang-serve` adds them."""
    from tests.support.servers.sglang_package import absent_kernels

    with absent_kernels():
        from sglang.srt.server_args import ServerArgs
    names = set(getattr(ServerArgs, "__struct_fields__", ())) | set(getattr(ServerArgs, "__dataclass_fields__", ()))
    assert {"enable_memory_saver", "enable_lora", "max_lora_rank", "lora_target_modules", "api_key"} <= names
