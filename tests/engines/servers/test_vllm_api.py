"""What a vLLM server must be, how that is found out, and what its answers mean."""

import asyncio
import base64
import contextlib
import io
from dataclasses import replace

import numpy as np
import pytest
import torch

from covey.core.engine import SampleRequest, SamplingParams
from covey.core.records import FinishReason
from covey.core.routing import routing_of
from covey.engines.servers.errors import BadAnswer, ServerBusy, ServerError, ServerRefused
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.vllm.api import VllmApi
from covey.engines.servers.vllm.weights import VllmWeightApi
from tests.support import mixtures, tiny
from tests.support.servers import fake_vllm
from tests.support.servers.fake_vllm import FakeVllm

VOCABULARY = tiny.config().vocab_size


@pytest.fixture
def servers():
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(FakeVllm(options.pop("model", None) or tiny.model(), **options))


def ask(server, method, *args, dialect=None, api_key=None, **kwargs):
    """One call of the dialect, in a loop of its own."""

    async def once():
        connection = ServerClient(server.url, api_key)
        call = getattr(dialect or VllmApi(vocab_size=VOCABULARY), method)
        return await call(connection, *args, deadline=5.0, **kwargs)

    return asyncio.run(once())


def look(server, api_key=None, **options):
    return ask(server, "probe", dialect=VllmApi(**{"vocab_size": VOCABULARY, **options}), api_key=api_key)


def test_a_server_says_what_it_is(servers):
    facts = look(servers(name="served", dtype="torch.bfloat16", max_model_len=128))
    assert (facts.model, facts.path, facts.max_context) == ("served", "/models/served", 128)
    assert facts.dtype == torch.bfloat16


def test_a_server_that_a_killed_run_left_paused_goes_on(servers):
    server = servers()
    ask(server, "pause")
    look(server)
    assert not server.paused
    assert server.asked("/v1/completions")  # a paused server would not have answered


@pytest.mark.parametrize(("mode", "top_p_shows"), [("raw_logprobs", False), ("processed_logprobs", True)])
def test_one_sampled_token_tells_which_logprobs_are_reported(servers, mode, top_p_shows):
    facts = look(servers(logprobs_mode=mode))
    assert facts.reports_after_cut == top_p_shows


def test_raw_logprobs_are_refused_at_other_temperatures_than_1(servers):
    with pytest.raises(ServerRefused, match=r"temperature 0\.7.*--logprobs-mode processed_logprobs"):
        look(servers(), temperature=0.7)
    assert look(servers(logprobs_mode="processed_logprobs"), temperature=0.7).reports_after_cut


def test_logits_are_no_logprobs(servers):
    with pytest.raises(ServerRefused, match=r"it reports logits.*--logprobs-mode raw_logprobs"):
        look(servers(logprobs_mode="raw_logits"))


def test_a_server_without_training_routes_is_refused(servers):
    with pytest.raises(ServerRefused, match=r"VLLM_SERVER_DEV_MODE=1.*covey vllm-serve"):
        look(servers(dev_mode=False))


def test_an_old_server_is_refused_naming_the_oldest(servers):
    with pytest.raises(ServerRefused, match=r"vLLM 0\.8\.5, and 0\.28 is the oldest.*pip install -U vllm"):
        look(servers(release="0.8.5"))


def test_something_else_than_vllm_is_refused(servers):
    server = servers()
    server.misbehave("/version", fake_vllm.status(404, "Not Found"))
    with pytest.raises(ServerRefused, match="vLLM's own server"):
        look(server)


def test_a_missing_key_is_asked_for_and_a_wrong_one_is_not_shown(servers):
    server = servers(api_key="secret")
    with pytest.raises(ServerRefused, match=r"HTTP 401.*API key"):
        look(server)
    with pytest.raises(ServerRefused) as caught:
        look(server, api_key="mistaken")
    assert "mistaken" not in str(caught.value)
    assert look(server, api_key="secret").model == "tiny"


def test_a_smaller_vocabulary_is_found_at_the_first_probe(servers):
    with pytest.raises(ServerRefused, match=r"its vocabulary lacks token 199.*Start the server with the model"):
        look(servers(), vocab_size=200)


def test_unknown_generation_kwargs_are_refused_with_a_proposal(servers):
    with pytest.raises(ServerRefused, match=r"'min_token'.*does not know it, but 'min_tokens'"):
        look(servers(), extra={"min_token": 4})
    look(servers(), extra={"min_tokens": 4})


@pytest.mark.parametrize("name", ["n", "stream", "logprobs", "max_tokens"])
def test_generation_kwargs_that_would_break_requests_are_refused(name):
    with pytest.raises(ValueError, match=f"leave out {name}"):
        VllmApi(extra={name: 1})


def test_settings_of_the_request_and_generation_kwargs_arrive(servers):
    server = servers(logprobs_mode="processed_logprobs")
    params = SamplingParams(4, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, extra={"bad_words": ["x"]})
    request = SampleRequest([5], 2, params, [2**62 + 7, 0])
    ask(server, "generate", request, model="tiny", ends=frozenset({1, 9}))
    body = server.asked("/v1/completions")[-1]
    wanted = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "bad_words": ["x"], "max_tokens": 4, "n": 2}
    wanted |= {"skip_special_tokens": False}  # or `stop` would not find such tokens
    assert body | wanted | {"stop_token_ids": [1, 9], "seed": 7} == body  # a seed leaves room to count upwards from
    for given, sent in (([4], [1, 4, 9]), (None, [1, 9])):
        request = replace(request, params=replace(params, extra={"stop_token_ids": given}))
        ask(server, "generate", request, model="tiny", ends=frozenset({1, 9}))
        assert server.asked("/v1/completions")[-1]["stop_token_ids"] == sent


def test_the_end_token_is_part_of_a_completion_that_stops(servers):
    every_token_ends = frozenset(range(VOCABULARY))
    request = SampleRequest([5], 3, SamplingParams(4), [1, 2, 3])
    for sampled in ask(servers(), "generate", request, model="tiny", ends=every_token_ends):
        assert sampled.completion.finish is FinishReason.STOP and len(sampled.completion.token_ids) == 1


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda a: a.pop("choices"), BadAnswer, "where choices belong"),
        (lambda a: a["choices"][0].pop("token_ids"), BadAnswer, "no token ids although return_token_ids"),
        (lambda a: a["choices"][0].update(logprobs={}), BadAnswer, "incomplete"),
        (lambda a: a["choices"][0].update(finish_reason="error"), ServerError, "finish_reason='error'"),
    ],
)
def test_incomplete_answers_are_refused(servers, change, error, said):
    server = servers()
    server.misbehave("/v1/completions", fake_vllm.edited(change))
    with pytest.raises(error, match=said):
        ask(server, "generate", SampleRequest([5], 1, SamplingParams(4), [1]), model="tiny", ends=frozenset({1}))


def test_choices_are_sorted_by_their_index(servers):
    server = servers()
    request = SampleRequest([5], 4, SamplingParams(4), [1, 2, 3, 4])
    expected = ask(server, "generate", request, model="tiny", ends=frozenset({1}))
    server.misbehave("/v1/completions", fake_vllm.edited(lambda a: a["choices"].reverse()))
    assert ask(server, "generate", request, model="tiny", ends=frozenset({1})) == expected


def test_a_prefix_cache_in_use_is_not_taken_for_empty(servers):
    server = servers()
    server.misbehave("/reset_prefix_cache", fake_vllm.text('{"success": false}'))
    with pytest.raises(ServerBusy, match="still use it"):
        ask(server, "clear_prefix_cache")
    ask(server, "clear_prefix_cache")


def test_versions_are_kept(servers):
    server, dialect = servers(), VllmWeightApi()
    ask(server, "write_stamp", "covey-1234-5", dialect=dialect)
    assert ask(server, "read_stamp", dialect=dialect) == "covey-1234-5"


def test_a_server_that_is_awake_is_not_woken(servers):
    server = servers()
    ask(server, "wake")
    assert not server.asked("/wake_up")
    ask(server, "sleep", 1)
    assert server.sleeping
    ask(server, "wake")
    assert not server.sleeping


# ---- the experts of its tokens ---------------------------------------------------------------------------------------


def routed_request(model, **settings):
    params = SamplingParams(max_tokens=4, keep_routes=True, **settings)
    return SampleRequest([5, 6, 7], 2, params, [1, 2]), routing_of(model).shape


@pytest.mark.parametrize("name", ["Mixtral", "DeepseekV3"])
def test_a_server_returns_the_experts_of_its_tokens(servers, name):
    model = mixtures.model(name)
    request, shape = routed_request(model)
    server = servers(model=model, routes=True)
    dialect = VllmApi(vocab_size=VOCABULARY, routes=shape)
    assert ask(server, "probe", dialect=dialect).returns_routes
    for chunk in ask(server, "generate", request, dialect=dialect, model="tiny", ends=frozenset({1})):
        fed = request.prompt_ids + chunk.completion.token_ids[:-1]
        expected = fake_vllm.routed_by(model, fed)[:, list(shape.layers)]
        assert chunk.completion.routes.tolist() == expected.tolist()
        assert chunk.completion.routes.dtype == torch.uint8


def test_a_server_that_keeps_no_experts_says_so(servers):
    model = mixtures.model("Mixtral")
    request, shape = routed_request(model)
    server, dialect = servers(model=model), VllmApi(vocab_size=VOCABULARY, routes=shape)
    assert not ask(server, "probe", dialect=dialect).returns_routes
    with pytest.raises(BadAnswer, match="--enable-return-routed-experts"):
        ask(server, "generate", request, dialect=dialect, model="tiny", ends=frozenset({1}))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda ids: ids[:-1], "experts of 5 tokens, but 6"),
        (lambda ids: ids[:, :1], "layers with a router"),
        (lambda ids: ids + 4, "expert ."),
        (None, "cannot be read"),
    ],
)
def test_experts_that_cannot_be_are_refused(servers, spoil, says):
    model = mixtures.model("Mixtral")
    request, shape = routed_request(model)

    def change(answer):
        for choice in answer["choices"]:
            data = io.BytesIO(base64.b64decode(choice["routed_experts"]))
            if spoil is None:
                choice["routed_experts"] = "no base64"
                continue
            file = io.BytesIO()
            np.save(file, spoil(np.load(data)))
            choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()

    server = servers(model=model, routes=True)
    server.misbehave("/v1/completions", fake_vllm.edited(change))
    with pytest.raises(BadAnswer, match=says):
        ask(
            server,
            "generate",
            request,
            dialect=VllmApi(vocab_size=VOCABULARY, routes=shape),
            model="tiny",
            ends=frozenset({1}),
        )
