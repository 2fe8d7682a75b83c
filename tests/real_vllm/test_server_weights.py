"""Weights reach a real vLLM server: afterwards it decodes what transformers decodes from the trainer's weights."""

import asyncio
import os
import signal
import threading
import time

import pytest
import torch

from covey.core.engine import WeightUpdate
from covey.engines.servers.errors import ServerError
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.protocols import ServerFacts
from covey.engines.servers.weights.channels import Group
from covey.policy.loading import load_policy
from covey.policy.weights import weight_update
from tests.real_vllm.serving import SHAPE
from tests.support import tiny
from tests.support.servers.senders import vllm_sender

pytestmark = pytest.mark.vllm

PROMPT = [2, 20, 30, 40]
SMALL = 50_000
"""Bytes of a bucket, so that the tiny model takes many."""


def policy(seed, **changes):
    return tiny.model(seed=seed, **SHAPE, **changes)


def adapted(seed, **changes):
    import peft

    settings = {"r": 8, "target_modules": ["q_proj", "v_proj", "up_proj"], "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(policy(0), peft.LoraConfig(**{**settings, **changes}))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def expected(model):
    with torch.no_grad():
        ids = model.generate(
            input_ids=torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return ids[0, len(PROMPT) :].tolist()


def run(running, weights, *updates, deadline=60.0):
    """Send updates one after the other; greedy tokens after each."""

    async def all_of_them():
        server = ServerClient(running.url)
        decoded = []
        for update in updates:
            await weights.send([server], update, deadline)
            await server.call("POST", "/reset_prefix_cache", doing="test", deadline=60.0)
            body = {
                "model": weights.model_name(ServerFacts(model=running.model), update.version),
                "prompt": PROMPT, "max_tokens": 16, "temperature": 0.0, "return_token_ids": True,
                "ignore_eos": True,
            }  # fmt: skip
            answer = await server.ask("/v1/completions", doing="test", deadline=60.0, body=body)
            decoded.append(answer["choices"][0]["token_ids"])
        return decoded

    return asyncio.run(all_of_them())


@pytest.fixture
def weights():
    """Makes transports, and closes them."""
    made = []

    def make(way="auto", **options):
        made.append(vllm_sender(way, **{"bucket_bytes": SMALL, **options}))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("way", ["group", "disk"])
def test_after_each_update_it_decodes_what_the_trainer_would(server, weights, way):
    models = [policy(seed) for seed in (1, 2, 3)]
    updates = [weight_update(model, version) for version, model in enumerate(models)]
    wanted = [expected(model) for model in models]
    assert len({tuple(tokens) for tokens in wanted}) == 3
    assert run(server, weights(way), *updates) == wanted


def test_ways_may_change_from_update_to_update(server, weights):
    models = [policy(seed) for seed in (4, 5, 6)]
    decoded = [
        run(server, weights(way), weight_update(model, 10 + n))[0]
        for n, (way, model) in enumerate(zip(("disk", "group", "disk"), models, strict=True))
    ]
    assert decoded == [expected(model) for model in models]


@pytest.mark.parametrize("way", ["auto", "group"])
def test_an_adapter_alone_does_as_well_as_the_model_it_makes(server, weights, way):
    """By "group" its bytes go to the server, as to one on another machine; by "auto" it reads our folder."""
    models = [adapted(seed) for seed in range(5)]  # more than are kept: old ones are unloaded
    updates = [weight_update(model, version, adapter_only=True) for version, model in enumerate(models)]
    base = policy(0)
    one = weights(way)
    assert run(server, one, weight_update(base, 100)) == [expected(base)]
    decoded = run(server, one, *updates)
    assert decoded == [expected(model) for model in models]
    assert len({tuple(tokens) for tokens in decoded}) == 5


def test_a_server_with_another_base_is_sent_the_base_first(server, weights):
    run(server, weights(), weight_update(policy(9), 1))
    model = adapted(1)
    assert run(server, weights(), weight_update(model, 2, adapter_only=True)) == [expected(model)]


def test_an_adapter_that_is_merged_goes_as_a_whole_model(server, weights):
    model = adapted(3, use_dora=True)
    assert run(server, weights(), weight_update(model, 7)) == [expected(model)]


@pytest.mark.parametrize("dora", [False, True])
def test_a_policy_in_four_bits_goes_as_the_numbers_it_stands_for(server, weights, tmp_path, dora):
    """A DoRA merged in full precision; a LoRA by itself, on the base that it was learnt on."""
    pytest.importorskip("bitsandbytes")
    import peft
    from transformers import BitsAndBytesConfig

    policy(0).save_pretrained(tmp_path)
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    lora = peft.LoraConfig(r=8, target_modules=["q_proj", "up_proj"], init_lora_weights=False, use_dora=dora)
    torch.manual_seed(1)
    model = load_policy(str(tmp_path), quantization_config=bits, peft_config=lora).eval()
    other = expected(policy(0))
    assert run(server, weights(), weight_update(policy(0), 1)) == [other] != [expected(model)]
    assert run(server, weights(), weight_update(model, 2, adapter_only=not dora)) == [expected(model)]


def test_after_a_changed_tensor_the_next_update_is_whole(server, weights, monkeypatch):
    one, model = weights("group"), policy(1)
    run(server, one, weight_update(policy(2), 0))
    send = Group.send
    sent = []

    def spoil(self, data, seconds):
        sent.append(data)
        if len(sent) == 3:
            data = data.clone()
            data[1] ^= 4
        send(self, data, seconds)

    monkeypatch.setattr(Group, "send", spoil)
    with pytest.raises(ServerError, match=r"version 1 \(bucket 3 of \d+: model.*changed on its way"):
        run(server, one, weight_update(model, 1))
    assert run(server, one, weight_update(model, 1)) == [expected(model)]


def test_after_an_aborted_update_the_next_one_is_whole(server, weights):
    one, model = weights("group"), policy(1)
    update = weight_update(model, 1)

    def breaks_off():
        for number, pair in enumerate(update.tensors()):
            if number == 7:
                raise RuntimeError("out of memory")
            yield pair

    with pytest.raises(RuntimeError, match="out of memory"):
        run(server, one, WeightUpdate(1, update.specs, breaks_off))
    assert run(server, one, update) == [expected(model)]


def test_an_unknown_tensor_name_is_the_servers_error(server, weights):
    update = weight_update(policy(1, num_hidden_layers=3), 1)
    with pytest.raises(ServerError, match=r"layers\.2"):
        run(server, weights("group"), update)
    model = policy(2)
    assert run(server, weights("group"), weight_update(model, 2)) == [expected(model)]


def test_an_adapter_of_too_high_a_rank_is_refused_with_advice(server, weights):
    with pytest.raises(ServerError, match=r"rank.*vllm_lora_sync='merged'"):
        run(server, weights(), weight_update(adapted(0, r=16), 1, adapter_only=True))


def test_a_server_killed_during_the_transfer_is_an_error_at_once(start_server, weights, monkeypatch):
    running = start_server()
    one = weights("group")
    run(running, one, weight_update(policy(1), 1))
    sent = []
    send = Group.send

    def kill_at_third(self, data, seconds):
        sent.append(data)
        if len(sent) == 3:
            threading.Thread(target=running.process.stop).start()
            time.sleep(1.0)
        send(self, data, seconds)

    monkeypatch.setattr(Group, "send", kill_at_third)
    begun = time.monotonic()
    with pytest.raises(ServerError, match=r"version 2 \(bucket 3 of"):
        run(running, one, weight_update(policy(2), 2), deadline=300.0)
    assert time.monotonic() - begun < 60.0


def test_a_server_that_stands_still_is_an_error_at_the_deadline(start_server, weights):
    running = start_server()
    one = weights("group")
    run(running, one, weight_update(policy(1), 1))
    stopped = workers(running)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(ServerError, match=r"version 2|how it takes weights"):
        run(running, one, weight_update(policy(2), 2), deadline=8.0)
    assert time.monotonic() - begun < 40.0
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)


def workers(running):
    """Processes of a server that hold weights."""
    from tests.real_vllm.test_real_vllm_serve import descendants

    below = descendants(running.process.pid)
    return [pid for pid in below if b"Worker" in open(f"/proc/{pid}/cmdline", "rb").read()]
