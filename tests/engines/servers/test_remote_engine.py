"""Sampling from servers that live, fail, freeze, die and come back, over real HTTP."""

import asyncio
import contextlib
import gc
import json
import math
import threading
import time
import weakref

import pytest
import torch
from aiohttp import web

from covey.core.engine import SampleRequest, SamplingParams, TensorSpec, WeightUpdate
from covey.core.records import FinishReason
from covey.engines.servers import engine as engine_module
from covey.engines.servers import server_pool as fleet_module
from covey.engines.servers.engine import RemoteEngine
from covey.engines.servers.errors import (
    BadAnswer,
    DeadlineExceeded,
    NoServerLeft,
    ServerBusy,
    ServerError,
    ServerRefused,
)
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.vllm.api import VllmApi
from covey.engines.servers.weights import api as weight_api
from covey.engines.servers.weights.api import together
from tests.support import tiny
from tests.support.servers import fake_vllm
from tests.support.servers.fake_vllm import FakeVllm
from tests.support.servers.senders import RecordingSender, vllm_sender

ENDS = frozenset({1})
VOCABULARY = tiny.config().vocab_size


@pytest.fixture
def servers():
    """Makes fake servers that end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(FakeVllm(options.pop("model", None) or tiny.model(), **options))


@pytest.fixture
def engines():
    """Makes engines that end with the test."""
    with contextlib.ExitStack() as stack:

        def make(*servers, dialect=None, transport=None, **options):
            given = {"ends": ENDS, "vocab_size": VOCABULARY, "timeout": 10.0, "sync_timeout": 20.0, **options}
            made = RemoteEngine(
                [ServerClient(server.url, getattr(server, "api_key", None)) for server in servers],
                dialect or VllmApi(vocab_size=VOCABULARY),
                transport or RecordingSender(),
                **given,
            )
            stack.callback(made.close)
            return made

        yield make


def request(n=2, max_tokens=6, prompt=(5, 6, 7), seed=3, **params):
    return SampleRequest(list(prompt), n, SamplingParams(max_tokens=max_tokens, **params), [seed + i for i in range(n)])


def generate(engine, *requests):
    async def all_of_them():
        return await asyncio.gather(*(engine.generate(each) for each in requests or (request(),)))

    answers = asyncio.run(all_of_them())
    return answers if requests else answers[0]


def behind(engine):
    """True if a server answers and waits for the current weights."""
    return any(not (member.up or member.last_error) for member in engine._pool.members)


def wait_until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def update(model, version):
    named = dict(model.named_parameters())
    specs = tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named.items())
    return WeightUpdate(version, specs, lambda: iter((name, tensor.detach()) for name, tensor in named.items()))


def logprobs_of(model, prompt, tokens):
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()


# ---- sampling --------------------------------------------------------------------------------------------------------


def test_completions_carry_the_models_own_logprobs(servers, engines):
    server = servers()
    completions = generate(engines(server), request(n=4, max_tokens=8))[0]
    assert len(completions) == 4
    for completion in completions:
        expected = logprobs_of(tiny.model(), [5, 6, 7], completion.token_ids)
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)
        stopped = completion.token_ids[-1] in ENDS
        assert completion.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert stopped or len(completion.token_ids) == 8


def test_seeds_decide_completions(servers, engines):
    engine = engines(servers())
    first, again, other = generate(engine, request(), request(), request(seed=99))
    assert first == again != other
    assert first[0].token_ids != first[1].token_ids


def test_every_sampling_setting_is_sent(servers, engines):
    server = servers()
    generate(engines(server))
    body = server.asked("/v1/completions")[-1]
    sent = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert body | sent | {"presence_penalty": 0.0, "frequency_penalty": 0.0, "stop_token_ids": [1]} == body
    assert body["ignore_eos"] is True  # so that only stop_token_ids end a completion


def test_the_context_of_the_smallest_server_limits_completions(servers, engines):
    with pytest.warns(UserWarning, match=r"attend to 16 tokens and the model to 256.*--max-model-len"):
        engine = engines(servers(max_model_len=16), max_context=256)
    [completions] = generate(engine, request(max_tokens=1000, prompt=range(10, 20)))
    assert max(len(completion.token_ids) for completion in completions) <= 6


def test_requests_go_to_the_least_loaded_server(servers, engines):
    one, other = servers(token_delay=0.01), servers(token_delay=0.01)
    generate(engines(one, other), *(request(seed=10 * i) for i in range(10)))
    # 10 requests of 2 at once: each server gets every other one.
    assert (one.served, other.served) == (10 + 1, 10 + 1)  # and 1 token was sampled to look at each


def test_a_server_is_given_no_more_than_its_share_at_once(servers, engines):
    server = servers(token_delay=0.005)
    answers = generate(engines(server, concurrency=4), *(request(seed=10 * i) for i in range(6)))
    assert len(answers) == 6
    assert server.most == 4


def test_a_group_larger_than_a_servers_share_has_it_to_itself(servers, engines):
    server = servers()
    assert len(generate(engines(server, concurrency=2), request(n=5))[0]) == 5


def test_a_cancelled_request_is_given_up(servers, engines):
    server = servers()
    engine = engines(server)
    server.token_delay = 60.0

    async def impatient():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate(request()), 0.2)

    asyncio.run(impatient())
    until = time.monotonic() + 5
    while server.flying and time.monotonic() < until:  # the server sees the connection go
        time.sleep(0.01)
    assert not server.flying


# ---- failures of one server ------------------------------------------------------------------------------------------

PASSING = {
    "503": fake_vllm.status(503, "overloaded"),
    "429": fake_vllm.status(429, "too many requests"),
    "500": fake_vllm.status(500, "EngineDeadError"),
    "dropped": fake_vllm.drop(),
    "no JSON": fake_vllm.text("<html>"),
    "no text": fake_vllm.text(b"\xff\xfe\x00"),
    "too deep": fake_vllm.text("[" * 100_000),
    "too long a number": fake_vllm.text("9" * 5_000),
    "a log-prob beyond all numbers": fake_vllm.edited(
        lambda a: a["choices"][0]["logprobs"]["token_logprobs"].__setitem__(0, -(10**400))
    ),
    "truncated": fake_vllm.cut_short(),
    "NaN": fake_vllm.edited(lambda a: a["choices"][0]["logprobs"]["token_logprobs"].__setitem__(0, math.nan)),
    "null": fake_vllm.edited(lambda a: a["choices"][0]["logprobs"]["token_logprobs"].__setitem__(0, None)),
    "missing": fake_vllm.edited(lambda a: a["choices"].pop()),
    "short": fake_vllm.edited(lambda a: a["choices"][0].update(token_ids=[], finish_reason="length")),
    "more log-probs": fake_vllm.edited(lambda a: a["choices"][0]["logprobs"]["token_logprobs"].append(-1.0)),
}


@pytest.mark.parametrize("name", PASSING)
def test_a_failure_costs_a_retry_and_the_answer_is_the_same(servers, engines, name):
    server = servers()
    engine = engines(server)
    expected = generate(engine)
    server.misbehave("/v1/completions", PASSING[name])
    assert generate(engine) == expected


def test_answers_that_stay_unusable_are_an_error(servers, engines):
    server = servers()
    engine = engines(server)
    server.misbehave("/v1/completions", PASSING["NaN"], times=3)
    with pytest.raises(BadAnswer, match=r"1 of \d log-probs.*\(nan\).*float16"):
        generate(engine)


@pytest.mark.slow
def test_two_missed_deadlines_are_an_error(servers, engines):
    server = servers()
    engine = engines(server, request_timeout=0.3)
    server.misbehave("/v1/completions", fake_vllm.hang(), times=9)
    with pytest.raises(DeadlineExceeded, match=r"no answer within 0.3 seconds. Raise vllm_server_request_timeout if"):
        generate(engine)
    assert len(server.asked("/v1/completions")) == 1 + 2  # the first was the look at what its log-probs mean


@pytest.mark.slow
def test_a_late_request_is_sent_to_another_server(servers, engines):
    one, other = servers(), servers()
    engine = engines(one, other, request_timeout=1.0)
    one.misbehave("/v1/completions", fake_vllm.hang(), times=9)
    assert len(generate(engine)) == 2
    assert len(one.asked("/v1/completions")) == 1 + 1


@pytest.mark.slow
def test_a_server_that_stays_busy_ends_the_wait(servers, engines):
    server = servers()
    engine = engines(server, timeout=1.0)
    server.misbehave("/v1/completions", fake_vllm.status(429, "too many requests"), times=99)
    with pytest.raises(ServerBusy, match="HTTP 429: too many requests"):
        generate(engine)
    assert len(server.asked("/v1/completions")) >= 1 + 3


def test_a_redirecting_server_is_refused_with_its_target(servers, engines):
    server = servers()

    async def elsewhere(request, handler):
        return web.Response(status=307, headers={"Location": "http://node7:8000/health"})

    server.misbehave("/health", elsewhere)
    with pytest.raises(ServerRefused, match=r"HTTP 307: it sends requests on to 'http://node7:8000/health'"):
        engines(server)


def test_tls_to_a_server_without_it_says_so_at_once(servers):
    server = servers()
    with pytest.raises(ServerRefused, match=r"ssl.*Write http:// if it speaks no TLS"):
        RemoteEngine([ServerClient(server.url.replace("http", "https"))], VllmApi(), RecordingSender(), ends=ENDS)


def test_what_the_server_refuses_is_not_asked_again(servers, engines):
    server = servers()
    engine = engines(server)
    asked = len(server.asked("/v1/completions"))
    with pytest.raises(ServerRefused, match="HTTP 400: nonsense is not known"):
        generate(engine, request(extra={"nonsense": 1}))
    assert len(server.asked("/v1/completions")) == asked + 1


def test_a_token_the_trained_model_lacks_is_a_clear_error(servers, engines):
    server = servers()
    engine = engines(server)
    server.misbehave("/v1/completions", fake_vllm.edited(lambda a: a["choices"][0]["token_ids"].__setitem__(0, 5000)))
    with pytest.raises(ServerRefused, match=r"token 5000.*vocabulary of the model that is trained ends at 104"):
        generate(engine)


@pytest.mark.slow
def test_a_server_that_dies_while_it_samples_loses_nothing(servers, engines):
    one, other = servers(token_delay=0.05), servers(token_delay=0.05)
    engine = engines(one, other)
    threading.Timer(0.2, one.kill).start()
    answers = generate(engine, *(request(max_tokens=12, seed=10 * i) for i in range(6)))
    assert [len(completions) for completions in answers] == [2] * 6
    assert [member.up for member in engine._pool.members] == [False, True]


@pytest.mark.slow
def test_requests_of_a_frozen_server_go_elsewhere(servers, engines, monkeypatch):
    monkeypatch.setattr(fleet_module, "WATCH_EVERY", 0.1)
    monkeypatch.setattr(fleet_module, "QUICK_SECONDS", 3.0)  # a busy machine keeps a healthy server waiting, too
    one, other = servers(token_delay=0.05), servers(token_delay=0.05)
    engine = engines(one, other)
    threading.Timer(0.2, one.freeze).start()
    answers = generate(engine, *(request(max_tokens=12, seed=10 * i) for i in range(6)))
    assert [len(completions) for completions in answers] == [2] * 6


@pytest.mark.slow
def test_requests_at_a_silent_server_already_left_out_move(servers, engines, monkeypatch):
    monkeypatch.setattr(fleet_module, "WATCH_EVERY", 0.05)
    monkeypatch.setattr(fleet_module, "QUICK_SECONDS", 0.5)
    one, other = servers(), servers()
    engine = engines(one, other)  # a request may take 800 s
    one.misbehave("/v1/completions", fake_vllm.hang(), times=9)
    one.misbehave("/health", fake_vllm.hang(), times=99)
    member = engine._pool.members[0]

    async def left_out_first():
        task = asyncio.get_running_loop().create_task(engine._generate(request()))
        while not member.calls:
            await asyncio.sleep(0.01)
        engine._pool.leave_out(member, "it missed another request's deadline")
        return await task

    assert len(engine._thread.run(left_out_first(), 30.0)) == 2
    assert not member.calls and member.last_error and len(other.asked("/v1/completions")) == 1 + 1


@pytest.mark.slow
def test_when_all_are_gone_the_error_names_each_last_error(servers, engines):
    one, other = servers(), servers()
    engine = engines(one, other, timeout=2.0)
    one.kill()
    other.misbehave("/v1/completions", fake_vllm.status(503, "out of memory"), times=9)
    other.misbehave("/health", fake_vllm.status(503, "the engine is dead"), times=99)
    with pytest.raises(NoServerLeft) as caught:
        generate(engine)
    assert f"{one.url}: cannot" in str(caught.value) and "Connect" in caught.value.errors[one.url]
    assert "HTTP 503: the engine is dead" in caught.value.errors[other.url]


@pytest.mark.slow
def test_a_server_that_comes_back_is_used_again(servers, engines):
    server = servers()
    engine = engines(server)
    expected = generate(engine)
    server.kill()
    threading.Timer(1.0, server.start).start()
    assert generate(engine) == expected


# ---- weights ---------------------------------------------------------------------------------------------------------


def greedy(engine, **changes):
    return generate(engine, request(n=1, temperature=0.0, max_tokens=10, **changes))[0][0]


def test_after_an_update_every_server_samples_new_weights(servers, engines):
    one, other = servers(), servers()
    engine = engines(one, other)
    new = tiny.model(seed=7)
    before = greedy(engine)
    engine.load_weights(update(new, 1))
    after = greedy(engine)
    assert after.token_ids != before.token_ids
    assert after.logprobs == pytest.approx(logprobs_of(new, [5, 6, 7], after.token_ids), abs=1e-4)
    assert (before.versions, set(after.versions)) == (None, {1})
    assert engine.export_state()["urls"] == [one.url, other.url]
    for server in (one, other):
        assert not server.paused and server.stamp.endswith("-1")
        assert server.asked("/reset_prefix_cache")


@pytest.mark.slow
def test_completions_in_flight_continue_with_both_versions(servers, engines):
    server = servers(token_delay=0.05)
    engine = engines(server)
    old, new = tiny.model(), tiny.model(seed=7)
    engine.load_weights(update(old, 1))
    timer = threading.Timer(0.4, engine.load_weights, [update(new, 2)])
    timer.start()
    [completions] = generate(engine, request(n=3, max_tokens=20, seed=11))
    timer.join()
    assert any(set(completion.versions) == {1, 2} for completion in completions)
    for completion in completions:
        tokens, versions = completion.token_ids, completion.versions
        assert versions == sorted(versions) and len(versions) == len(tokens)
        expected = [
            (new_lp if version == 2 else old_lp)
            for version, old_lp, new_lp in zip(
                versions, logprobs_of(old, [5, 6, 7], tokens), logprobs_of(new, [5, 6, 7], tokens), strict=True
            )
        ]
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)
        assert len(tokens) == 20 or tokens[-1] in ENDS


def test_a_completion_aborted_repeatedly_is_joined(servers, engines):
    server = servers()
    engine = engines(server)
    server.misbehave("/v1/completions", fake_vllm.broken_off(2), times=3)
    server.misbehave("/v1/completions", fake_vllm.broken_off(0), times=1)
    [[completion]] = generate(engine, request(n=1, max_tokens=12))
    assert completion.logprobs == pytest.approx(logprobs_of(tiny.model(), [5, 6, 7], completion.token_ids), abs=1e-4)
    assert len(completion.token_ids) == 12 or completion.token_ids[-1] in ENDS
    prompts = [len(body["prompt"]) for body in server.asked("/v1/completions")[1:]]
    assert prompts[:4] == [3, 5, 7, 9]
    seeds = [body["seed"] for body in server.asked("/v1/completions")[1:5]]
    assert len(set(seeds)) == 4  # or the same noise would come again


def test_a_server_that_only_breaks_off_is_an_error(servers, engines):
    server = servers()
    engine = engines(server)
    server.misbehave("/v1/completions", fake_vllm.broken_off(0), times=99)
    with pytest.raises(BadAnswer, match="11 times in a row"):
        generate(engine, request(n=1))


def test_a_server_that_dies_during_an_update_is_left_out(servers, engines):
    one, other = servers(), servers()
    engine = engines(one, other)
    one.misbehave("/collective_rpc", fake_vllm.drop())
    one.misbehave("/health", fake_vllm.drop(), times=999)
    engine.load_weights(update(tiny.model(seed=7), 1))
    assert engine.export_state()["urls"] == [other.url]
    assert not other.paused
    assert set(greedy(engine).versions) == {1}


def test_a_server_that_takes_no_weights_is_left_out(servers, engines):
    one, other = servers(), servers()
    transport = RecordingSender()
    engine = engines(one, other, transport=transport)
    one.misbehave("/collective_rpc", fake_vllm.status(500, "out of memory"), times=99)
    with pytest.warns(UserWarning, match=f"{one.url}.*out of memory.*continues without it"):
        engine.load_weights(update(tiny.model(seed=7), 1))
    assert engine.export_state()["urls"] == [other.url]
    assert set(greedy(engine).versions) == {1}
    # Tried together, then the one that is well, then the other one by itself until its third failure.
    assert [urls for _, urls in transport.sent] == [[one.url, other.url], [other.url], [one.url], [one.url]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*cannot load weights")
def test_an_excluded_server_gets_weights_after_a_restart(servers, engines):
    one, other = servers(), servers()
    transport = RecordingSender()
    engine = engines(one, other, transport=transport)
    one.misbehave("/collective_rpc", fake_vllm.status(500, "out of memory"), times=99)
    engine.load_weights(update(tiny.model(seed=7), 1))
    transport.sent.clear()
    time.sleep(1.0)  # it has been looked at again
    engine.load_weights(update(tiny.model(seed=8), 2))
    assert transport.sent == [(2, [other.url])]
    one.kill()
    until = time.monotonic() + 10
    while engine._weights._excluded and time.monotonic() < until:
        time.sleep(0.05)
    one.mend()
    one.start()
    while not behind(engine) and time.monotonic() < until + 20:
        time.sleep(0.05)
    engine.load_weights(update(tiny.model(seed=9), 3))
    assert set(engine.export_state()["urls"]) == {one.url, other.url}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*cannot load weights")
def test_failures_before_a_restart_do_not_count_after_it(servers, engines):
    """The server fails three times and is excluded; after a restart it fails once, and gets the weights at last."""
    one, other = servers(), servers()
    engine = engines(one, other, resend=True)
    engine.load_weights(update(tiny.model(seed=7), 1))
    member = next(member for member in engine._pool.members if member.url == one.url)
    one.misbehave("/collective_rpc", fake_vllm.status(500, "out of memory"), times=99)
    one.kill()
    one.start()
    with engine.awake():
        wait_until(lambda: member in engine._weights._excluded)
    one.kill()
    wait_until(lambda: member not in engine._weights._excluded)
    one.mend()
    one.misbehave("/collective_rpc", fake_vllm.status(500, "not ready"), times=1)
    one.start()
    wait_until(lambda: member.up)


@pytest.mark.slow
def test_a_returning_server_without_weights_does_not_end_the_run(servers, engines):
    one, other = servers(), servers()
    engine = engines(one, other)
    engine.load_weights(update(tiny.model(), 1))
    one.kill()
    one.start()
    greedy(engine)
    with engine.awake():
        pass
    assert engine.export_state()["urls"] == [other.url]
    until = time.monotonic() + 10
    while not behind(engine) and time.monotonic() < until:
        time.sleep(0.05)
    one.misbehave("/collective_rpc", fake_vllm.drop(), times=99)
    engine.load_weights(update(tiny.model(seed=7), 2))
    assert engine.export_state()["urls"] == [other.url]


@pytest.mark.slow
def test_a_failed_group_join_leaves_time_for_the_others(servers, engines, monkeypatch):
    monkeypatch.setattr(weight_api, "JOIN_SECONDS", 1.0)
    one, other = servers(buckets=True), servers(buckets=True)
    engine = engines(one, other, transport=vllm_sender("group"), sync_timeout=600.0)
    one.misbehave("/init_weight_transfer_engine", fake_vllm.hang(), times=99)  # as where a firewall drops its packets
    began = time.monotonic()
    with pytest.warns(UserWarning, match="cannot join a gloo group.*must be able to connect to this machine"):
        engine.load_weights(update(tiny.model(seed=7), 1))
    assert engine.export_state()["urls"] == [other.url]
    assert len(one.asked("/init_weight_transfer_engine")) == 1
    assert time.monotonic() - began < 300  # not the 600 s that all of it may take


@pytest.mark.slow
def test_an_update_waits_for_a_server_that_comes_back(servers, engines):
    server = servers()
    engine = engines(server)
    server.kill()
    threading.Timer(1.0, server.start).start()
    new = tiny.model(seed=7)
    engine.load_weights(update(new, 1))
    after = greedy(engine)
    assert after.logprobs == pytest.approx(logprobs_of(new, [5, 6, 7], after.token_ids), abs=1e-4)


@pytest.mark.slow
def test_an_update_that_no_server_takes_shows_the_servers_error(servers, engines):
    server = servers()
    engine = engines(server, timeout=1.0)
    server.misbehave("/collective_rpc", fake_vllm.status(500, "size mismatch for lm_head.weight"), times=9)
    with pytest.raises(ServerError, match=r"weights of version 4: HTTP 500: size mismatch for lm_head.weight"):
        engine.load_weights(update(tiny.model(seed=7), 4))
    assert not server.paused
    with pytest.raises(NoServerLeft, match=r"size mismatch|out of date"):  # nobody knows what it holds now
        generate(engine)


@pytest.mark.slow
def test_a_transfer_that_hangs_ends_at_its_deadline(servers, engines):
    server = servers()
    engine = engines(server, sync_timeout=2.0)
    server.misbehave("/collective_rpc", fake_vllm.hang(), times=9)
    with pytest.raises(DeadlineExceeded, match=r"version 4.*Raise vllm_server_sync_timeout if"):
        engine.load_weights(update(tiny.model(seed=7), 4))
    assert not server.paused


def test_a_restarted_server_samples_after_it_has_the_weights(servers, engines):
    one, other = servers(), servers()
    engine = engines(one, other)
    engine.load_weights(update(tiny.model(seed=7), 1))
    one.kill()
    one.start()  # the address answers again, with the first weights
    with engine.awake():
        assert engine.export_state()["urls"] == [other.url]
        assert {version for completion in generate(engine) for version in completion.versions} == {1}
    engine.load_weights(update(tiny.model(seed=8), 2))
    assert other.url in engine.export_state()["urls"]


@pytest.mark.slow
def test_resend_brings_a_returning_server_up_to_date(servers, engines):
    server = servers()
    transport = RecordingSender()
    engine = engines(server, resend=True, transport=transport)
    new = tiny.model(seed=7)
    engine.load_weights(update(new, 1))
    expected = greedy(engine)
    server.kill()
    server.start()
    with engine.awake():
        assert greedy(engine) == expected
    assert [version for version, _ in transport.sent] == [1, 1]


@pytest.mark.slow
def test_the_sender_is_invalidated_for_a_server_left_out(servers, engines):
    one, other = servers(), servers()
    transport, forgotten = RecordingSender(), []
    transport.invalidate = lambda server: forgotten.append(server.url)
    engine = engines(one, other, transport=transport)
    engine.load_weights(update(tiny.model(seed=7), 1))
    assert not forgotten
    one.kill()
    one.start()
    with engine.awake():
        pass
    until = time.monotonic() + 10
    while not behind(engine) and time.monotonic() < until:
        time.sleep(0.05)
    engine.load_weights(update(tiny.model(seed=8), 2))
    assert forgotten == [one.url]


def test_two_runs_at_one_server_notice(servers, engines):
    server = servers()
    first, second = engines(server), engines(server)
    first.load_weights(update(tiny.model(seed=7), 1))
    second.load_weights(update(tiny.model(seed=8), 1))
    with pytest.raises(ServerRefused, match=r"another run has sent it weights.*servers of its own"), first.awake():
        pass


def test_processes_that_do_not_send_adopt_the_version(servers, engines):
    server = servers()
    sender, other = engines(server), engines(server)
    sender.load_weights(update(tiny.model(seed=7), 3))
    other.import_state(3, sender.export_state())
    with other.awake():
        assert set(greedy(other).versions) == {3}


def test_other_processes_sample_from_the_sent_adapter(servers, engines):
    server = servers()
    sender, other = engines(server), engines(server)
    sender.sender.export_state = lambda: {"3": "covey-v3"}
    told = []
    other.sender.import_state = told.append
    sender.load_weights(update(tiny.model(seed=7), 3))
    other.import_state(3, json.loads(json.dumps(sender.export_state())))
    assert told == [{"3": "covey-v3"}]
    assert other._weights.version == 3 and other.export_state()["urls"] == [server.url]


@pytest.mark.slow
def test_requests_aborted_by_another_process_await_its_version(servers, engines):
    server = servers(token_delay=0.05)
    sender, other = engines(server), engines(server)
    sender.load_weights(update(tiny.model(), 1))
    other.import_state(1, sender.export_state())

    def change():
        sender.load_weights(update(tiny.model(seed=7), 2))
        other.import_state(2, sender.export_state())

    timer = threading.Timer(0.4, change)
    timer.start()
    [completions] = generate(other, request(n=3, max_tokens=20, seed=11))
    timer.join()
    new = tiny.model(seed=7)
    mixed = [completion for completion in completions if set(completion.versions) == {1, 2}]
    assert mixed
    for completion in mixed:
        first = completion.versions.index(2)
        expected = logprobs_of(new, [5, 6, 7], completion.token_ids)[first:]
        assert completion.logprobs[first:] == pytest.approx(expected, abs=1e-4)


def test_a_request_begun_after_anothers_update_has_its_version(servers, engines):
    server = servers()
    sender, other = engines(server), engines(server)
    sender.load_weights(update(tiny.model(), 1))
    other.import_state(1, sender.export_state())
    arrived = len(server.asked("/v1/completions")) + 1
    sender._thread.run(sender.api.pause(sender._pool.members[0].server, 5.0))

    def change():
        until = time.monotonic() + 10
        while len(server.asked("/v1/completions")) < arrived and time.monotonic() < until:
            time.sleep(0.01)
        server.model = tiny.model(seed=7)
        other.import_state(2, sender.export_state())
        sender._thread.run(sender.api.resume(sender._pool.members[0].server, 5.0))

    changing = threading.Thread(target=change)
    changing.start()
    [completion] = generate(other, request(n=1))[0]
    changing.join()
    assert set(completion.versions) == {2}
    expected = logprobs_of(tiny.model(seed=7), [5, 6, 7], completion.token_ids)
    assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_requests_wait_while_another_process_changes_the_weights(servers, engines):
    server = servers()
    engine = engines(server)
    before = len(server.asked("/v1/completions"))
    with engine.held():
        asking = threading.Thread(target=generate, args=[engine])
        asking.start()
        asking.join(0.3)
        assert asking.is_alive() and len(server.asked("/v1/completions")) == before
    asking.join(10)
    assert not asking.is_alive() and len(server.asked("/v1/completions")) == before + 1


def test_a_server_left_out_asleep_is_woken_before_sampling(servers, engines):
    server = servers()
    engine = engines(server, sleeps=True)
    engine.load_weights(update(tiny.model(seed=7), 1))
    with engine.awake():
        pass
    assert server.sleeping
    server.misbehave("/is_sleeping", fake_vllm.status(503, "busy"))  # it is not woken, and left out
    with engine.awake():
        assert set(greedy(engine).versions) == {1}
        assert not server.sleeping


@pytest.mark.slow
def test_any_error_of_a_returning_server_is_retried(servers, engines):
    server = servers()
    transport = RecordingSender()
    engine = engines(server, transport=transport, resend=True)
    engine.load_weights(update(tiny.model(seed=7), 1))
    send, fails = transport.send, [OSError("no space left on device")]

    async def full_at_first(*args):
        if fails:
            raise fails.pop()
        await send(*args)

    transport.send = full_at_first
    server.kill()
    server.start()
    with engine.awake():
        assert set(greedy(engine).versions) == {1}
    assert not fails


def test_servers_sleep_outside_awake_and_wake_for_weights(servers, engines):
    server = servers()
    engine = engines(server, sleeps=True)
    with engine.awake():
        assert not server.sleeping
    assert server.sleeping
    engine.load_weights(update(tiny.model(seed=7), 1))
    assert not server.sleeping
    with engine.awake():
        assert greedy(engine).versions


# ---- ending ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_dropped_engine_ends_while_a_server_is_down(servers):
    server = servers()
    engine = RemoteEngine([ServerClient(server.url)], VllmApi(), RecordingSender(), ends=ENDS, timeout=0.5)
    thread = engine._thread._current.thread
    server.kill()
    with pytest.raises(NoServerLeft):
        generate(engine)
    assert engine._pool._revivals
    gone = weakref.ref(engine)
    del engine
    until = time.monotonic() + 10
    while gone() is not None and time.monotonic() < until:  # it may just be looking at the server
        gc.collect()
        time.sleep(0.05)
    assert gone() is None
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.slow
def test_closing_does_not_wait_for_a_sender_that_hangs(servers, engines, monkeypatch):
    monkeypatch.setattr(engine_module, "QUICK_SECONDS", 0.5)
    engine, released, closed = engines(servers()), threading.Event(), []

    def close():
        closed.append(True)
        released.wait(600)

    monkeypatch.setattr(engine.sender, "close", close)
    thread = engine._thread._current.thread
    engine.close()
    engine.close()
    assert closed == [True]
    released.set()
    thread.join(10)
    assert not thread.is_alive()


def test_an_engine_that_does_not_start_leaves_no_thread(servers, monkeypatch):
    server, sender = servers(), RecordingSender()
    server.kill()
    closed = []
    monkeypatch.setattr(sender, "close", lambda: closed.append(threading.current_thread()))
    with pytest.raises(NoServerLeft):
        RemoteEngine([ServerClient(server.url)], VllmApi(), sender, ends=ENDS, timeout=0.5)
    [thread] = closed
    assert thread.name == "covey-servers" and not thread.is_alive()


def test_a_cancelled_transfer_leaves_no_unread_exception(caplog):
    async def give_up():
        let_go = threading.Event()

        async def asked():
            await asyncio.Event().wait()

        both = asyncio.ensure_future(
            together(ServerClient("http://a:1"), "send", asked(), lambda: let_go.wait() and 1 / 0)
        )
        await asyncio.sleep(0.05)
        both.cancel()
        with pytest.raises(asyncio.CancelledError):
            await both
        let_go.set()
        await asyncio.sleep(0.05)

    asyncio.run(give_up())
    gc.collect()
    assert "never retrieved" not in caplog.text
