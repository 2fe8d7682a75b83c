"""Weights arrive at SGLang servers as they are in the trainer, by every way, or an error says what went wrong where."""

import asyncio
import contextlib
import time

import pytest
import torch
from peft import LoraConfig, get_peft_model

from covey.core.engine import TensorSpec, WeightUpdate
from covey.core.records import FinishReason
from covey.engines.servers import server_pool as fleet_module
from covey.engines.servers.engine import RemoteEngine
from covey.engines.servers.errors import DeadlineExceeded, NoServerLeft, ServerError, ServerRefused
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.sglang.api import SglangApi
from covey.engines.servers.weights.api import Deadline, meet
from covey.policy.weights import weight_update
from tests.support import tiny
from tests.support.servers.senders import sglang_sender
from tests.support.servers.sglang_servers import InThread, OwnProcess, call, greedy, logprobs_of, request, update

ENDS = frozenset({1})
VOCABULARY = tiny.config().vocab_size
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def running(tiny_folder, tmp_path_factory):
    """A server in a process of its own: it can join groups."""
    server = OwnProcess(tiny_folder, tmp_path_factory.mktemp("sglang"), "--enable-lora")
    yield server
    server.stop()


@pytest.fixture
def other(tiny_folder):
    """Makes servers in threads, with options of their own."""
    with contextlib.ExitStack() as stack:

        def make(*options):
            server = InThread(tiny_folder, *options)
            stack.callback(server.stop)
            return server

        yield make


@pytest.fixture
def engines():
    with contextlib.ExitStack() as stack:

        def make(transport, *servers, **options):
            settings = {"ends": ENDS, "vocab_size": VOCABULARY, "timeout": 10.0, "sync_timeout": 30.0, **options}
            made = RemoteEngine(
                [ServerClient(server.url) for server in servers],
                SglangApi(vocab_size=VOCABULARY),
                transport,
                **settings,
            )
            stack.callback(made.close)
            return made

        yield make


def continuation(engine, count=10):
    [completion] = asyncio.run(engine.generate(request(n=1, max_tokens=count, temperature=0.0)))
    return completion.token_ids


def send(transport, server, what, deadline=30.0):
    """The transport alone, at a server that is paused for it."""

    async def once(connection):
        dialect = SglangApi()
        await dialect.pause(connection, 5.0)
        try:
            await transport.send([connection], what, deadline)
        finally:
            await dialect.resume(connection, 5.0)
            transport.close()

    call(server.url, once)


@pytest.mark.slow
def test_the_servers_own_end_tokens_do_not_end_completions(other, engines):
    """The server's model ends at token 1; asked for other ends, completions continue beyond it."""
    engine = engines(sglang_sender(), other(), ends=frozenset({9999}))
    completions = asyncio.run(engine.generate(request(n=8, max_tokens=30, seed=5)))
    assert any(1 in one.token_ids[:-1] for one in completions)
    for one in completions:
        assert one.finish is FinishReason.LENGTH and len(one.token_ids) == 30
        assert one.logprobs == pytest.approx(logprobs_of(tiny.model(), [5, 6, 7], one.token_ids), abs=1e-4)


# ---- every way -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("way", ["group", "disk"])
def test_after_each_update_greedy_output_is_the_trainers(running, engines, way):
    """Small buckets, so that there are several; a new model each time, and the group is used again."""
    engine = engines(sglang_sender(way, bucket_bytes=20_000), running)
    for version in (1, 2):
        policy = tiny.model(seed=10 * version + len(way))
        engine.load_weights(update(policy, version))
        expected = greedy(policy, PROMPT, 10)
        assert continuation(engine) == expected != greedy(tiny.model(), PROMPT, 10)
    groups = running.paths().count("/init_weights_update_group")
    assert groups == (1 if way == "group" else groups)


@pytest.mark.parametrize("way", ["group", "disk"])
def test_half_precision_arrives_as_such(running, engines, way):
    engine = engines(sglang_sender(way), running)
    policy = tiny.model(seed=3).bfloat16()
    engine.load_weights(update(policy, 1))
    assert continuation(engine) == greedy(policy.float(), PROMPT, 10)


def test_replicas_get_files(other, engines):
    server = other("--dp-size", "2")
    policy = tiny.model(seed=7)
    engine = engines(sglang_sender(), server)
    engine.load_weights(update(policy, 1))
    assert continuation(engine) == greedy(policy, PROMPT, 10)
    assert "/update_weights_from_disk" in server.paths()


def test_replicas_cannot_join_a_group(other):
    with pytest.raises(ServerRefused, match=r"take weights by group.*replicas \(--dp-size\) take weights from files"):
        send(sglang_sender("group"), other("--dp-size", "2"), update(tiny.model(), 1))


def test_only_the_latest_folder_is_kept_and_none_in_the_end(other, tmp_path):
    server = other()
    transport = sglang_sender("disk", folder=str(tmp_path))

    async def twice(connection):
        await SglangApi().pause(connection, 5.0)
        for version in (1, 2):
            await transport.send([connection], update(tiny.model(seed=version), version), 30.0)
        kept = [path.name for path in next(tmp_path.iterdir()).iterdir()]
        transport.close()
        await SglangApi().resume(connection, 5.0)
        return kept

    kept = call(server.url, twice)
    assert len(kept) == 1 and kept[0].startswith("v2-")
    assert not list(tmp_path.iterdir())


def test_the_prefix_cache_is_emptied_once_per_update(running, engines):
    before = len(running.paths())
    engines(sglang_sender("group", bucket_bytes=20_000), running).load_weights(update(tiny.model(), 1))
    paths = running.paths()[before:]
    assert paths.count("/update_weights_from_distributed") > 2 and paths.count("/flush_cache") == 1


@pytest.mark.slow
def test_two_servers_get_the_same(running, tiny_folder, tmp_path, engines):
    second = OwnProcess(tiny_folder, tmp_path)
    try:
        policy = tiny.model(seed=8)
        engine = engines(sglang_sender("group"), running, second)
        engine.load_weights(update(policy, 1))
        for url in (running.url, second.url):
            asked = request(n=1, max_tokens=10, temperature=0.0)
            [one] = call(
                url,
                lambda server, asked=asked: SglangApi().generate(server, asked, model="m", ends=ENDS, deadline=10.0),
            )
            assert one.completion.token_ids == greedy(policy, PROMPT, 10)
    finally:
        second.stop()


# ---- adapters --------------------------------------------------------------------------------------------------------


def adapted(seed, base=None):
    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(base or tiny.model(), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(5.0)
    return model


@pytest.mark.slow
def test_an_adapter_travels_alone_under_a_name_for_each_version(running, engines, tiny_folder):
    engine = engines(sglang_sender(), running)
    engine.load_weights(update(tiny.model(), 0))
    for version in (1, 2, 3):
        policy = adapted(version)
        sent = weight_update(policy, version, adapter_only=True)
        assert sent.nbytes < 0.2 * update(tiny.model(), 1).nbytes
        engine.load_weights(sent)
        assert continuation(engine) == greedy(policy, PROMPT, 10) != greedy(tiny.model(), PROMPT, 10)
    bodies = [body for path, body in running.log() if path == "/load_lora_adapter_from_tensors"]
    names = [body["lora_name"] for body in bodies[-3:]]
    assert len(set(names)) == 3 and all(name.startswith("covey-") for name in names)
    unloaded = [body["lora_name"] for path, body in running.log() if path == "/unload_lora_adapter"]
    assert names[0] in unloaded and names[2] not in unloaded[-1:]


def test_every_rank_of_a_server_gets_an_adapter(other, engines):
    server = other("--tp-size", "2", "--enable-lora")
    engines(sglang_sender("disk"), server).load_weights(weight_update(adapted(1), 1, adapter_only=True))
    (body,) = [body for path, body in server.server.log if path == "/load_lora_adapter_from_tensors"]
    assert len(body["serialized_named_tensors"]) == 2


def test_a_base_that_the_server_lacks_is_sent_first(running, engines):
    base = tiny.model(seed=12)
    policy = adapted(4, base)
    engine = engines(sglang_sender(), running)
    sent = weight_update(policy, 1, adapter_only=True)
    assert sent.base is not None
    engine.load_weights(sent)
    assert continuation(engine) == greedy(policy, PROMPT, 10)


def test_a_server_without_adapters_says_how_to_start_it(other, tiny_folder):
    sent = weight_update(adapted(1), 1, adapter_only=True)
    alone = WeightUpdate(sent.version, sent.specs, sent.tensors, sent.adapter)
    with pytest.raises(ServerRefused, match=r"LoRA is not enabled.*--max-lora-rank"):
        send(sglang_sender(), other(), alone)


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def wrong(name=None, shape=None):
    """An update with one tensor that the server's model does not have like that."""
    named = {key: tensor.detach() for key, tensor in tiny.model().named_parameters()}
    last = list(named)[-1]
    tensor = named.pop(last)
    named[name or last] = torch.zeros(shape) if shape else tensor
    specs = tuple(TensorSpec(key, tuple(value.shape), value.dtype) for key, value in named.items())
    return WeightUpdate(7, specs, lambda: iter(named.items()))


@pytest.mark.parametrize("way", ["group", "disk"])
@pytest.mark.parametrize(
    ("what", "says"), [({"name": "model.nonsense"}, "model.nonsense"), ({"shape": (3,)}, "shapes .32. and .3. do not")]
)
def test_an_unknown_tensor_is_named_with_version_and_server(running, way, what, says):
    with pytest.raises(ServerRefused, match=rf"{running.url}: cannot take weights of version 7.*{says}"):
        send(sglang_sender(way), running, wrong(**what))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["group", "disk"])
def test_after_a_failed_update_the_next_one_arrives(running, engines, way):
    engine = engines(sglang_sender(way, bucket_bytes=20_000), running)
    with pytest.raises(ServerError):
        engine.load_weights(wrong(name="model.nonsense"))
    policy = tiny.model(seed=9)
    engine.load_weights(update(policy, 8))
    assert continuation(engine) == greedy(policy, PROMPT, 10)


def test_a_session_that_a_killed_run_left_open_is_closed_first(running, engines):
    call(running.url, lambda server: server.ask("/begin_weight_update", doing="x", deadline=5.0, body={}))
    policy = tiny.model(seed=13)
    engine = engines(sglang_sender("group"), running)
    engine.load_weights(update(policy, 1))
    assert continuation(engine) == greedy(policy, PROMPT, 10)


def test_a_refusal_names_the_bucket_and_the_servers_error(running):
    running.fail("/update_weights_from_distributed", text='{"success": false, "message": "out of memory"}')
    with pytest.raises(ServerRefused, match=r"version 1 \(bucket 1 of 1: model.embed_tokens.weight \.\.\..*out of mem"):
        send(sglang_sender("group"), running, update(tiny.model(), 1))


@pytest.mark.slow
def test_a_group_that_nobody_joins_ends_by_the_deadline(running):
    running.fail("/init_weights_update_group", hang=120)
    started = time.monotonic()
    with pytest.raises((DeadlineExceeded, ServerError), match="join a gloo group for weights"):
        send(sglang_sender("group"), running, update(tiny.model(), 1), deadline=3.0)
    assert time.monotonic() - started < 100


@pytest.mark.slow
def test_a_cache_that_cannot_be_emptied_fails_the_update(running, engines, monkeypatch):
    monkeypatch.setattr(fleet_module, "QUICK_SECONDS", 1.0)
    engine = engines(sglang_sender("group"), running)
    running.fail("/flush_cache", text="Flush cache failed.", times=100_000)
    try:
        with pytest.raises(ServerError, match="Flush cache failed"):
            engine.load_weights(update(tiny.model(), 1))
    finally:
        running.fail("/flush_cache", times=0)


@pytest.mark.slow
def test_a_server_that_dies_in_an_update_does_not_stop_the_other(running, tiny_folder, tmp_path, engines):
    second = OwnProcess(tiny_folder, tmp_path)
    try:
        policy = tiny.model(seed=14)
        engine = engines(sglang_sender("group", bucket_bytes=20_000), running, second)
        second.fail("/update_weights_from_distributed", die=True)
        engine.load_weights(update(policy, 1))
        for _ in range(2):
            assert continuation(engine) == greedy(policy, PROMPT, 10)
    finally:
        second.stop()


@pytest.mark.slow
def test_the_only_server_dying_is_an_error_within_the_deadline(tiny_folder, tmp_path, engines):
    server = OwnProcess(tiny_folder, tmp_path)
    try:
        engine = engines(sglang_sender("group", bucket_bytes=20_000), server, sync_timeout=4.0)
        server.fail("/update_weights_from_distributed", die=True)
        with pytest.raises((NoServerLeft, ServerError), match="version 1"):
            engine.load_weights(update(tiny.model(), 1))
    finally:
        server.stop()


@pytest.mark.slow
def test_completions_in_flight_continue_with_new_weights(tiny_folder, engines):
    server = InThread(tiny_folder, "--seconds-per-token", "0.03")
    try:
        policy = tiny.model(seed=15)
        engine = engines(sglang_sender("disk"), server)
        engine.load_weights(update(tiny.model(), 1))

        async def during():
            asked = asyncio.create_task(engine.generate(request(n=2, max_tokens=60, seed=21)))
            await asyncio.sleep(0.5)
            await asyncio.to_thread(engine.load_weights, update(policy, 2))
            return await asked

        completions = asyncio.run(during())
        seen = {version for completion in completions for version in completion.versions}
        assert seen == {1, 2}
    finally:
        server.stop()


def test_a_group_is_left_where_the_server_refuses():
    class Opened:
        closed = False

        def close(self):
            self.closed = True

    server, opened = ServerClient("http://127.0.0.1:8000"), Opened()

    async def refuse(seconds):
        await asyncio.sleep(0.5)
        raise ServerRefused(server.url, "join", "HTTP 400")

    with pytest.raises(ServerRefused):
        asyncio.run(meet(server, "join", Deadline("join", 30.0), "here", refuse, lambda seconds: opened))
    assert opened.closed


def test_unknown_ways_are_refused():
    with pytest.raises(ValueError, match="'pigeon'; choose one of: auto, group, disk"):
        sglang_sender("pigeon")
