"""What SGLang's server is asked, and what its answers mean."""

import asyncio
import threading

import pytest
import torch

from covey.core.records import FinishReason
from covey.engines.servers.errors import BadAnswer, DeadlineExceeded, ServerBusy, ServerRefused
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.protocols import SampledChunk
from covey.engines.servers.sglang.api import SglangApi, chunk_of, facts_of
from covey.engines.servers.sglang.weights import SglangWeightApi, obstacles_of
from tests.support import tiny
from tests.support.servers.fake_sglang import check_fields
from tests.support.servers.sglang_servers import InThread, call, greedy, logprobs_of, request

ENDS = frozenset({1})
VOCABULARY = tiny.config().vocab_size


@pytest.fixture(scope="module")
def running(tiny_folder):
    """A server that all tests of this file may use, if they leave it as it was."""
    server = InThread(tiny_folder)
    yield server
    server.stop()


@pytest.fixture
def other(tiny_folder):
    """Makes servers with options of their own."""
    made = []

    def make(*options):
        made.append(InThread(tiny_folder, *options))
        return made[-1]

    yield make
    for server in made:
        server.stop()


def ask(server, method, *args, dialect=None, api_key=None, **kwargs):
    call_it = getattr(dialect or SglangApi(vocab_size=VOCABULARY), method)
    return call(server.url, lambda connection: call_it(connection, *args, **{"deadline": 10.0, **kwargs}), api_key)


def generate(server, asked, ends=ENDS, **kwargs):
    return ask(server, "generate", asked, model="model", ends=ends, **kwargs)


# ---- what it is ------------------------------------------------------------------------------------------------------


def test_a_server_says_what_it_is(running, tiny_folder):
    facts = ask(running, "probe")
    assert (facts.model, facts.path) == (tiny_folder, tiny_folder)
    assert (facts.max_context, facts.dtype) == (256, torch.float32)


def test_replicas_take_weights_from_files_alone():
    assert set(obstacles_of({"tp_size": 2, "pp_size": 1, "dp_size": 4})) == {"group"}
    assert set(obstacles_of({"pp_size": 2})) == {"group"} and not obstacles_of({})


def test_what_is_unknown_stays_unknown():
    facts = facts_of({"model_path": "m"}, {"dtype": "auto"})
    assert (facts.dtype, facts.max_context) == (None, None)


def test_a_key_is_needed_where_the_server_has_one(other):
    server = other("--api-key", "secret")
    with pytest.raises(ServerRefused, match="Give the server's API key"):
        ask(server, "probe")
    assert ask(server, "probe", api_key="secret").model


def test_another_vocabulary_is_refused(running):
    with pytest.raises(ServerRefused, match=r"lacks token 4999.*Start the server with the model that is trained"):
        ask(running, "probe", dialect=SglangApi(vocab_size=5000))


def test_logprobs_before_temperature_are_refused_unless_it_is_1(other):
    server = other("--original-logprobs")
    assert ask(server, "probe").model
    with pytest.raises(ServerRefused, match=r"temperature 0\.7.*SGLANG_RETURN_ORIGINAL_LOGPROB"):
        ask(server, "probe", dialect=SglangApi(temperature=0.7, vocab_size=VOCABULARY))


def test_logprobs_with_the_temperature_are_not(running):
    assert ask(running, "probe", dialect=SglangApi(temperature=0.7, vocab_size=VOCABULARY)).model


def test_a_server_of_another_make_is_pointed_out():
    async def answers_nothing():
        async def handle(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
            writer.close()

        listening = await asyncio.start_server(handle, "127.0.0.1", 0)
        server = ServerClient(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        try:
            await SglangApi().probe(server, 5.0)
        finally:
            listening.close()

    with pytest.raises(ServerRefused, match=r"Is it SGLang's own server \(`covey sglang-serve`\)"):
        asyncio.run(answers_nothing())


def test_a_server_that_was_left_paused_goes_on(running):
    ask(running, "pause")
    assert ask(running, "probe").model


# ---- sampling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_models_at_the_temperature(running, temperature):
    for sampled in generate(running, request(n=3, max_tokens=8, temperature=temperature)):
        completion = sampled.completion
        expected = logprobs_of(tiny.model(), [5, 6, 7], completion.token_ids, temperature)
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)
        stopped = completion.token_ids[-1] in ENDS
        assert completion.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH) and not sampled.aborted


def test_logprobs_are_those_before_top_k(running):
    [sampled] = generate(running, request(n=1, top_k=2))
    tokens = sampled.completion.token_ids
    assert sampled.completion.logprobs == pytest.approx(logprobs_of(tiny.model(), [5, 6, 7], tokens), abs=1e-4)


def test_greedy_output_is_transformers_own(running):
    [sampled] = generate(running, request(n=1, max_tokens=10, temperature=0.0))
    assert sampled.completion.token_ids == greedy(tiny.model(), [5, 6, 7], 10)


def test_each_completion_has_its_seed(running):
    first = generate(running, request(n=4, max_tokens=8, seed=11))
    assert [one.completion.token_ids for one in first] == [
        generate(running, request(n=1, max_tokens=8, seed=11 + i))[0].completion.token_ids for i in range(4)
    ]
    assert len({tuple(one.completion.token_ids) for one in first}) > 1


def test_seeds_of_64_bits_fit(running):
    assert generate(running, request(n=1, seed=(1 << 64) - 1))


@pytest.mark.slow
def test_the_servers_own_end_tokens_leave_completions_unfinished(running):
    """The server's model ends at token 1."""
    asked = request(n=8, max_tokens=30, seed=5)
    assert not any(one.unfinished for one in generate(running, asked))
    answer = generate(running, asked, ends=frozenset({9999}))
    stopped = [one.completion.finish is FinishReason.STOP for one in answer]
    assert [one.unfinished for one in answer] == stopped and any(stopped)


def test_further_settings_are_passed_on(running):
    asked = request(n=1, temperature=1.0)
    asked.params.extra["min_new_tokens"] = 2
    generate(running, asked)
    assert running.log()[-1][1]["sampling_params"][0]["min_new_tokens"] == 2


def test_settings_that_are_ours_are_refused():
    with pytest.raises(ValueError, match="leave out n, sampling_seed"):
        SglangApi(extra={"n": 2, "sampling_seed": 3, "regex": "a"})


@pytest.mark.slow
def test_what_is_paused_comes_back_aborted_with_what_there_is(other):
    server = other("--seconds-per-token", "0.05")
    timer = threading.Timer(0.4, lambda: ask(server, "pause"))
    timer.start()
    answer = generate(server, request(n=2, max_tokens=200), ends=frozenset({1}))
    timer.join()
    for sampled in answer:
        tokens = sampled.completion.token_ids
        assert sampled.aborted or tokens[-1] == 1
        assert len(tokens) < 200 and len(sampled.completion.logprobs) == len(tokens)
    assert any(sampled.aborted and sampled.completion.token_ids for sampled in answer)
    with pytest.raises(DeadlineExceeded):
        generate(server, request(), deadline=0.5)
    ask(server, "resume")
    assert generate(server, request())


# ---- answers ---------------------------------------------------------------------------------------------------------


def answer(tokens=(4, 5), logprobs=(-1.0, -2.0), kind="length", **changes):
    meta = {
        "finish_reason": {"type": kind},
        "output_token_logprobs": [[p, t, None] for p, t in zip(logprobs, tokens, strict=False)],
    }
    return {"output_ids": list(tokens), "meta_info": {**meta, **changes}}


def test_a_plain_answer():
    sampled = chunk_of(answer())
    assert isinstance(sampled, SampledChunk) and not sampled.aborted
    assert (sampled.completion.token_ids, sampled.completion.logprobs) == ([4, 5], [-1.0, -2.0])


def test_an_aborted_answer_ends_where_tokens_and_logprobs_do():
    sampled = chunk_of(answer(tokens=(4, 5, 6), kind="abort"))
    assert sampled.aborted and sampled.completion.token_ids == [4, 5]
    waiting = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "in queue"}}}
    assert chunk_of(waiting).aborted


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("text", "a completion with `meta_info`"),
        ({"output_ids": [1]}, "a completion with `meta_info`"),
        (answer(kind="nonsense"), "stop, length and abort are known"),
        (answer(finish_reason=None), "stop, length and abort are known"),
        (answer(tokens=(4, 5, 6)), "2 log-probs for 3 tokens"),
        (answer(output_token_logprobs=[[-1.0, 4, None], [-1.0, 6, None]]), "log-probs of other tokens"),
        (answer(output_token_logprobs=[-1.0]), "`output_ids` and log-probs"),
        ({**answer(), "output_ids": None}, "`output_ids` and log-probs"),
    ],
)
def test_what_is_no_completion_is_refused(broken, says):
    with pytest.raises(ValueError, match=says):
        chunk_of(broken)


def test_missing_completions_are_noticed(running):
    running.fail("/generate", status=200, text="[]")
    with pytest.raises(BadAnswer, match=r"\[\] instead of 2"):
        generate(running, request())


def test_a_refusal_repeats_the_servers_words(running):
    running.fail("/generate", text='{"error": {"message": "The input is longer than the context."}}')
    with pytest.raises(ServerRefused, match="HTTP 400: The input is longer than the context"):
        generate(running, request())


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_prefix_cache_is_emptied_as_soon_as_nothing_runs(other):
    server = other("--seconds-per-token", "0.05")
    busy = threading.Thread(target=lambda: generate(server, request(n=1, max_tokens=20), ends=frozenset({9999})))
    busy.start()
    while "/generate" not in server.paths():
        pass
    ask(server, "clear_prefix_cache")
    busy.join()
    assert "/flush_cache" in server.paths()


def test_a_cache_that_stays_in_use_is_an_error(running):
    running.fail("/flush_cache", text="Flush cache failed.", times=1000)
    with pytest.raises(ServerRefused, match=r"empty the prefix cache.*Flush cache failed"):
        ask(running, "clear_prefix_cache", deadline=0.5)
    running.fail("/flush_cache", times=0)


def test_the_last_refusal_is_told_if_the_time_ends_in_between():
    answers = [ServerRefused("url", "empty", "HTTP 400: in use"), DeadlineExceeded("url", "empty", "no answer")]

    class Busy:
        async def call(self, *args, **kwargs):
            raise answers.pop(0)

    with pytest.raises(ServerRefused, match="in use"):
        asyncio.run(SglangApi(vocab_size=VOCABULARY).clear_prefix_cache(Busy(), deadline=10.0))


def test_a_cache_in_use_is_tried_again(running):
    running.fail("/flush_cache", text="Flush cache failed.", times=2)
    ask(running, "clear_prefix_cache")


def test_notes_last(running):
    dialect = SglangWeightApi()
    ask(running, "write_stamp", "covey-1-2", dialect=dialect)
    assert ask(running, "read_stamp", dialect=dialect) == "covey-1-2"


@pytest.mark.slow
def test_memory_is_released_and_taken_back(other):
    server = other("--enable-memory-saver")
    dialect = SglangApi()
    for _ in range(2):  # twice the same is once
        ask(server, "sleep", 1, dialect=dialect)
    with pytest.raises((DeadlineExceeded, ServerRefused)):
        generate(server, request(), deadline=0.5)
    for _ in range(2):
        ask(server, "wake", dialect=dialect)
    [sampled] = generate(server, request(n=1, max_tokens=10, temperature=0.0))
    assert sampled.completion.token_ids == greedy(tiny.model(), [5, 6, 7], 10)
    released = [body for path, body in server.log() if path == "/release_memory_occupation"]
    assert released == [{"tags": ["kv_cache", "cuda_graph"]}]  # without a copy in host memory, weights stay


def test_the_second_level_drops_the_weights(other):
    server = other("--enable-memory-saver")
    ask(server, "sleep", 2)
    assert server.log()[-1][1]["tags"] == ["kv_cache", "cuda_graph", "weights"]


def test_sleep_names_the_option_for_releasing_memory(running):
    with pytest.raises(ServerRefused, match="--enable-memory-saver"):
        ask(running, "sleep", 1)


def test_a_server_that_starts_is_busy(running):
    running.fail("/health", status=503, text="")
    with pytest.raises(ServerBusy):
        ask(running, "probe")


def test_the_fake_refuses_fields_that_do_not_exist():
    with pytest.raises(Exception, match="unknown fields"):
        check_fields({"mode": "abort", "other": 1}, {"mode": {"type": "str", "required": False}}, "/x")
