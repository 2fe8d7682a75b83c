"""Prompts with images on servers: sent unexpanded, sampled from, and scored alike."""

import asyncio

import pytest

from covey.core.engine import SampleRequest, SamplingParams
from covey.core.media import unexpanded
from covey.engines.servers.errors import ServerRefused
from tests.support import runs, tiny_vision
from tests.support.servers.fake_vllm import FakeVllm, status
from tests.support.servers.sglang_servers import InThread
from tests.trainer.vision.test_vision_training import ROWS, length_reward

FAMILY = "gemma3"
"""Its processor needs nothing but Pillow."""

pytestmark = pytest.mark.filterwarnings("ignore:.*was started with")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("vision") / FAMILY
    model, processor = tiny_vision.make(FAMILY)
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return str(path)


@pytest.fixture
def train(tmp_path, folder):
    made = []

    def make(**settings):
        parts = {"model": folder, "processing_class": None, "train_dataset": ROWS, "reward_funcs": length_reward}
        settings = {"steps_per_generation": 1, "gradient_accumulation_steps": 1, "max_steps": 3, **settings}
        made.append(runs.trainer(tmp_path, parts=parts, per_device_train_batch_size=8, **settings))
        return made[-1]

    yield make
    for one in made:
        one.collector.engine.close()


@pytest.fixture
def vllm():
    made = []

    def start(processor=True):
        model, own = tiny_vision.make(FAMILY)
        made.append(FakeVllm(model, name=FAMILY, max_model_len=1024, processor=own if processor else None).start())
        return made[-1]

    yield start
    for one in made:
        one.kill()


@pytest.fixture
def sglang(folder):
    made = []

    def start():
        made.append(InThread(folder, "--context-length", "1024"))
        return made[-1]

    yield start
    for one in made:
        one.stop()


def vllm_settings(server):
    return {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": [server.url]}


def check_run(trainer):
    """What the servers sampled is as probable to them as to the trainer, at every step."""
    ratios = runs.history(trainer, "sampling/importance_sampling_ratio/mean")
    assert len(ratios) == 3 and all(abs(ratio - 1) < 1e-3 for ratio in ratios)
    assert max(runs.history(trainer, "sampling/sampling_logp_difference/max")) < 1e-3


@pytest.mark.slow
def test_vllm_servers_are_shown_the_images(vllm, train):
    server = vllm()
    trainer = train(**vllm_settings(server))
    trainer.train()
    check_run(trainer)
    pictured = [body for path, body in server.requests if path == "/inference/v1/generate"]
    plain = [body for path, body in server.requests if path == "/v1/completions"]
    boi = trainer.collector.codec.tokenizer.convert_tokens_to_ids("<boi>")
    assert pictured and plain
    assert all(body["token_ids"].count(boi) == len(body["content_parts"]) in (1, 2) for body in pictured)


@pytest.mark.slow
def test_sglang_servers_are_shown_the_images(sglang, train):
    server = sglang()
    trainer = train(use_sglang=True, sglang_base_url=server.url, sglang_weight_transfer="disk")
    trainer.train()
    check_run(trainer)
    asked = [body for path, body in server.log() if path == "/generate"]
    pictured = [body for body in asked if body.get("image_data")]
    assert {len(body["image_data"][0]) for body in pictured} == {1, 2} and len(pictured) < len(asked)


def asked_for(trainer, **changes):
    encoded = trainer.collector.codec.read_row(ROWS[0])
    return SampleRequest(encoded.ids, 1, SamplingParams(4), [7], media=encoded.media, **changes)


def test_a_server_that_makes_other_tokens_of_an_image_is_refused(vllm, train):
    server = vllm()
    trainer = train(**vllm_settings(server))
    server.processor.full_image_sequence += "one more"
    with pytest.raises(ServerRefused, match=r"of a prompt with 1 images.*same settings of its processor"):
        asyncio.run(trainer.collector.engine.generate(asked_for(trainer)))


def test_a_vllm_without_the_route_for_images_says_so(vllm, train):
    """A release that does not have it, and one that was not told to serve it."""
    server = vllm(processor=False)
    trainer = train(**vllm_settings(server))
    with pytest.raises(ServerRefused, match=r"generate: start vLLM with --enable-scale-out, 0\.32 or"):
        asyncio.run(trainer.collector.engine.generate(asked_for(trainer)))
    said = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
    server.misbehave("/inference/v1/generate", status(403, said), times=9)
    with pytest.raises(ServerRefused, match=r"generate: start vLLM with --enable-scale-out, 0\.32 or"):
        asyncio.run(trainer.collector.engine.generate(asked_for(trainer)))


def test_prompts_travel_unexpanded(train, vllm):
    """Gemma's template writes <boi> for an image; the processor adds four <image>, <eoi>, and line breaks around it."""
    codec = train(**vllm_settings(vllm())).collector.codec
    encoded = codec.read_row(ROWS[0])
    short = codec.tokenizer.decode(unexpanded(encoded.ids, encoded.media))
    assert short == "<bos>user: <boi>What?<eos><bos>assistant: "
    assert len(encoded.ids) - len(codec.tokenizer(short, add_special_tokens=False)["input_ids"]) == 4 + 1 + 2
