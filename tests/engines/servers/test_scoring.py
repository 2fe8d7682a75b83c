"""Log-probs of given tokens from vLLM's and SGLang's servers: requests, answers, and which servers are refused."""

import asyncio
import math
import threading

import pytest
import torch
from aiohttp import web

from covey.core.findings import CheckError
from covey.engines.servers import server_pool
from covey.engines.servers.errors import BadAnswer, DeadlineExceeded, NoServerLeft
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.protocols import ScoreRequest, as_logprob
from covey.engines.servers.scoring import ServerScorer, distance
from covey.engines.servers.sglang.scoring import SglangScoring
from covey.engines.servers.vllm.scoring import VllmScoring
from covey.trainer.served_teachers import probe_tokens
from tests.support import tiny
from tests.support.servers.fake_vllm import FakeVllm, dies, edited, hang, status
from tests.support.servers.sglang_servers import InThread

ROWS = tiny.config().vocab_size
IDS = [5, 6, 7, 30, 8, 40]
PATH = "/v1/completions"


@pytest.fixture
def servers():
    """Makes fake vLLM servers that need no routes for training."""
    made = []

    def make(model=None, **options):
        options = {"dev_mode": False, "tokenizer": tiny.tokenizer(), **options}
        made.append(FakeVllm(model or tiny.model(), **options).start())
        return made[-1]

    yield make
    for one in made:
        one.kill()


@pytest.fixture(scope="module")
def sglang(tiny_folder):
    server = InThread(tiny_folder)
    yield server
    server.stop()


@pytest.fixture
def scorers(monkeypatch):
    """Makes scorers, and closes them; servers that failed are checked again soon."""
    monkeypatch.setattr(server_pool, "FIRST_PAUSE", 0.05)
    made = []

    def make(*given, key=None, tokenizer=None, rows=ROWS, **options):
        clients = [ServerClient(one if isinstance(one, str) else one.url, key) for one in given]
        probe = probe_tokens(tokenizer or tiny.tokenizer(), rows)
        made.append(ServerScorer(clients, probe, name="http://t", **{"timeout": 5.0, **options}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def scored(scorer, *requests):
    return scorer.wait(scorer.begin(requests))


def expected(ids=IDS, first=1, temperature=1.0, model=None):
    """[n, V] log-probs at each position from `first` on."""
    with torch.no_grad():
        logits = (model or tiny.model())(torch.tensor([ids])).logits[0, first - 1 : -1] / temperature
    return logits.log_softmax(-1)


def check(answer, ids, first, top, temperature=1.0):
    rows = expected(ids, first, temperature)
    assert [one.logprob for one in answer] == pytest.approx(
        rows.gather(1, torch.tensor(ids[first:])[:, None])[:, 0].tolist(), abs=1e-4
    )
    for one, row in zip(answer, rows, strict=True):
        best = row.topk(top)
        assert [token for token, _ in one.top] == best.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
@pytest.mark.parametrize("top", [0, 3])
def test_scores_are_the_models_own(servers, sglang, scorers, backend, top):
    server = servers() if backend == "vllm" else sglang
    requests = [ScoreRequest(IDS, first, top) for first in (1, 3, 5)]
    answers = scored(scorers(server, top=top), *requests)
    for request, answer in zip(requests, answers, strict=True):
        check(answer, IDS, request.first, top)


def test_the_last_id_of_the_vocabulary_is_scored(sglang, scorers):
    """SGLang reports it as 0."""
    ids = [5, ROWS - 1, 6]
    check(scored(scorers(sglang), ScoreRequest(ids, 1))[0], ids, 1, 0)


def test_a_server_that_applies_the_temperature_is_taken(servers, scorers):
    scorer = scorers(servers(warm=True), temperature=0.7, top=2)
    check(scored(scorer, ScoreRequest(IDS, 2, 2, 0.7))[0], IDS, 2, 2, 0.7)


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_a_server_that_ignores_the_temperature_is_refused(servers, sglang, scorers, backend):
    with pytest.raises(CheckError, match=r"temperature 1 where temperature=0\.7") as error:
        scorers(servers() if backend == "vllm" else sglang, temperature=0.7)
    assert error.value.codes == ["teacher-server"]


def test_more_tokens_than_a_server_names_are_refused(servers, scorers):
    with pytest.raises(CheckError, match=r"teacher_top_k=21.*max allowed: 20.*--max-logprobs 21") as error:
        scorers(servers(), top=21)
    assert error.value.codes == ["teacher-server"]


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_a_vocabulary_that_ends_earlier_is_refused(servers, scorers, tmp_path, backend):
    if backend == "vllm":
        with pytest.raises(CheckError) as error:
            scorers(servers(tiny.model(vocab_size=ROWS - 1)))
    else:
        tiny.model(vocab_size=ROWS - 1).save_pretrained(tmp_path)
        server = InThread(str(tmp_path))
        try:
            with pytest.raises(CheckError) as error:
                scorers(server)
        finally:
            server.stop()
    assert error.value.codes == ["teacher-vocabulary"]


def test_a_vocabulary_with_fewer_rows_is_known(servers, scorers):
    """Rows beyond the tokenizer's last id, which the policy may have and the teacher not."""
    server = servers()
    assert scorers(server).whole and not scorers(server, rows=ROWS + 24).whole


@pytest.mark.parametrize("special", [True, False])
def test_another_tokenizer_is_refused(servers, scorers, special):
    """One special token that differs, or the order of all others."""
    other = tiny.tokenizer()
    if special:
        other.add_special_tokens({"additional_special_tokens": ["<call>"]})
        server = servers(tiny.model(vocab_size=ROWS + 1))
    else:
        server = servers(tokenizer=Shifted())
    with pytest.raises(CheckError, match="another tokenizer") as error:
        scorers(server, tokenizer=other)
    assert error.value.codes == ["teacher-tokenizer"]


class Shifted:
    """A tokenizer in which every token has the id of the one after it."""

    def decode(self, ids):
        return tiny.tokenizer().decode([(ids[0] + 1) % ROWS])


def test_a_server_without_texts_is_refused(servers, scorers):
    with pytest.raises(CheckError, match="names no texts") as error:
        scorers(servers(tokenizer=None))
    assert error.value.codes == ["teacher-tokenizer"]


def test_a_server_of_another_kind_is_refused(scorers):
    """It answers as OpenAI's API does."""
    app = web.Application()
    app.add_routes([web.get("/v1/models", lambda request: web.json_response({"data": [{"id": "x"}]}))])
    with serving(app) as url, pytest.raises(CheckError, match="neither SGLang's nor vLLM's") as error:
        scorers(url)
    assert error.value.codes == ["teacher-server"]


class serving:
    """An aiohttp application in a thread; its URL."""

    def __init__(self, app):
        self.app = app

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        return asyncio.run_coroutine_threadsafe(self.start(), self.loop).result(30)

    async def start(self):
        self.runner = web.AppRunner(self.app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    def __exit__(self, *error):
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(30)
        self.loop.call_soon_threadsafe(self.loop.stop)


def test_a_key_is_needed_where_the_server_has_one(servers, scorers):
    server = servers(api_key="secret")
    with pytest.raises(CheckError, match="API key") as error:
        scorers(server)
    assert error.value.codes == ["teacher-server"] and "secret" not in str(error.value)
    assert scored(scorers(server, key="secret"), ScoreRequest(IDS, 1))


def test_a_server_that_is_not_up_is_waited_for_until_the_deadline(servers, scorers):
    server = servers()
    server.kill()
    with pytest.raises(NoServerLeft, match="teacher_server_timeout"):
        scorers(server, timeout=0.3)


def test_servers_of_one_teacher_hold_one_model(servers, scorers):
    with pytest.raises(CheckError, match="hold one model") as error:
        scorers(servers(), servers(tiny.model(seed=1)))
    assert error.value.codes == ["teacher-server"]
    assert scorers(servers(), servers())


def test_requests_run_at_once_up_to_the_limit(servers, scorers):
    server = servers(token_delay=0.02)
    scorer = scorers(server, concurrency=3)
    answers = scored(scorer, *(ScoreRequest([*IDS[:2], number], 2) for number in range(4, 24)))
    assert server.most == 3
    assert [one.logprob for (one,) in answers] == pytest.approx(
        [expected([*IDS[:2], number], 2)[0, number].item() for number in range(4, 24)], abs=1e-4
    )


def test_two_servers_share_the_requests(servers, scorers):
    first, second = servers(token_delay=0.02), servers(token_delay=0.02)
    scorer = scorers(first, second)
    before = first.served, second.served
    scored(scorer, *[ScoreRequest(IDS, 1)] * 8)
    assert first.served - before[0] == second.served - before[1] == 4


# ---- failures --------------------------------------------------------------------------------------------------------


def test_a_failed_request_is_asked_again(servers, scorers):
    server = servers()
    scorer = scorers(server)
    server.misbehave(PATH, status(503, "overloaded"))
    server.misbehave(PATH, edited(lambda answer: answer["choices"][0]["prompt_logprobs"].__setitem__(3, None)))
    check(scored(scorer, ScoreRequest(IDS, 1))[0], IDS, 1, 0)
    assert not server.misbehaves()


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: answer["choices"][0].pop("prompt_logprobs"),
        lambda answer: answer["choices"][0]["prompt_logprobs"].pop(),
        lambda answer: answer["choices"][0]["prompt_logprobs"].__setitem__(2, None),
        lambda answer: answer["choices"][0]["prompt_logprobs"].__setitem__(2, {"99": {"logprob": -1.0}}),
        lambda answer: answer.__setitem__("choices", []),
    ],
)
def test_answers_without_a_log_prob_for_a_token_are_none(servers, scorers, change):
    """After three of them the request fails: nothing counts as 0."""
    server = servers()
    scorer = scorers(server)
    server.misbehave(PATH, edited(change), times=3)
    with pytest.raises(BadAnswer):
        scored(scorer, ScoreRequest(IDS, 1))


def test_a_server_that_dies_and_comes_back_is_waited_for(servers, scorers):
    server = servers()
    scorer = scorers(server, timeout=20.0)
    server.misbehave(PATH, dies(server))
    begun = scorer.begin([ScoreRequest(IDS, 1)] * 3)
    while server.misbehaves():
        pass
    server.kill()
    server.start()
    for answer in scorer.wait(begun):
        check(answer, IDS, 1, 0)


def test_a_server_that_stays_away_ends_the_wait(servers, scorers):
    server = servers()
    scorer = scorers(server, timeout=0.5)
    server.kill()
    with pytest.raises(NoServerLeft, match="score tokens"):
        scored(scorer, ScoreRequest(IDS, 1))


@pytest.mark.slow
def test_a_server_that_comes_back_with_another_model_is_not_asked(servers, scorers):
    server = servers()
    scorer = scorers(server, timeout=1.5)
    server.kill()
    server._original = tiny.model(seed=1)
    server.start()
    server.misbehave("/health", status(503, "starting"), times=0)
    scorer._thread.run(leave_out(scorer))
    with pytest.raises(NoServerLeft, match="another model than before"):
        scored(scorer, ScoreRequest(IDS, 1))


async def leave_out(scorer):
    scorer._pool.leave_out(scorer._pool.members[0], "it died")


@pytest.mark.slow
def test_an_answer_that_hangs_is_late(servers, scorers):
    async def hangs(request, handler):
        """At this sequence, and not while it is examined."""
        return await (hang() if (await request.json())["prompt"] == IDS else passes)(request, handler)

    async def passes(request, handler):
        return await handler(request)

    server = servers()
    scorer = scorers(server, request_timeout=0.5, timeout=60.0)
    server.misbehave(PATH, hangs, times=99)
    with pytest.raises(DeadlineExceeded, match="teacher_server_request_timeout"):
        scored(scorer, ScoreRequest(IDS, 1))


@pytest.mark.slow
def test_a_wait_that_is_given_up_ends_the_requests(servers, scorers):
    server = servers(token_delay=5.0)
    with pytest.raises(NoServerLeft):  # each probe takes longer than the deadline
        scorers(server, timeout=0.2)


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "number"), [(-1.5, -1.5), (-9999.0, -math.inf), (0, 0.0)])
def test_what_servers_write_for_minus_infinity(value, number):
    assert as_logprob(value) == number


@pytest.mark.parametrize("value", [None, "x", True])
def test_what_is_no_number_is_nan(value):
    assert math.isnan(as_logprob(value))


def test_the_distance_of_fingerprints():
    assert distance([-1.0, -2.0], [-1.5, -2.0]) == 0.25
    assert distance([-1.0], []) == distance([math.nan], [-1.0]) == math.inf


def test_the_sequence_may_be_one_shorter_than_the_servers_context(servers, sglang):
    """vLLM must be asked for a token after it; SGLang takes shorter sequences only."""
    for api, url in ((VllmScoring(), servers(max_model_len=64).url), (SglangScoring(), sglang.url)):
        facts = asyncio.run(api.facts(ServerClient(url), 5.0))
        assert facts.max_context == (63 if api.name == "vLLM" else 255)
        ids = [5] * facts.max_context
        answer = asyncio.run(api.score(ServerClient(url), ScoreRequest(ids, 1), model=facts.model, deadline=10.0))
        assert len(answer) == len(ids) - 1
