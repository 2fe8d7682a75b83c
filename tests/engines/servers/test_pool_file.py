"""Servers that a file lists join and leave a pool during a run."""

import asyncio
import contextlib
import threading
import time
import warnings

import pytest
import torch

from covey.core.engine import SampleRequest, SamplingParams, TensorSpec, WeightUpdate
from covey.engines.servers.engine import RemoteEngine
from covey.engines.servers.errors import NoServerLeft, ServerRefused
from covey.engines.servers.pool_file import PoolFile
from covey.engines.servers.vllm.api import VllmApi
from tests.support import tiny
from tests.support.servers.fake_vllm import FakeVllm
from tests.support.servers.senders import vllm_sender

VOCABULARY = tiny.config().vocab_size


@pytest.fixture
def servers():
    with contextlib.ExitStack() as stack:
        yield lambda model=None, **options: stack.enter_context(
            FakeVllm(model or tiny.model(), **{"buckets": True, **options})
        )


@pytest.fixture
def pool(tmp_path):
    """Makes an engine over the servers that `write` lists."""
    path = tmp_path / "pool.txt"
    made = []

    class Pool:
        def write(self, *servers):
            path.write_text("".join(f"{server.url}\n" for server in servers))

        def engine(self, **options):
            file, sender = PoolFile(path), vllm_sender("group", differences=True)
            settings = {"ends": frozenset({1}), "vocab_size": VOCABULARY, "timeout": 5.0, "sync_timeout": 20.0}
            made.append(
                RemoteEngine(
                    file.servers(), VllmApi(vocab_size=VOCABULARY), sender, pool_file=file, **settings | options
                )
            )
            return made[-1]

    yield Pool()
    for engine in made:
        engine.close()


def update(seed, version):
    named = [(name, parameter.detach()) for name, parameter in tiny.model(seed=seed).named_parameters()]
    specs = tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named)
    return WeightUpdate(version, specs, lambda: iter(named))


def sample(engine, n=4):
    request = SampleRequest([5, 6, 7], n, SamplingParams(max_tokens=4), list(range(n)))
    return asyncio.run(engine.generate(request))


def urls(engine):
    return [member.url for member in engine._pool.members]


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def assert_holds(server, sent):
    for name, tensor in sent.tensors():
        assert torch.equal(dict(server.model.named_parameters())[name], tensor), name


def test_lines_are_urls_and_comments_are_ignored(tmp_path):
    path = tmp_path / "pool"
    path.write_text("# servers\nhttp://a:1/\n\n  http://b:2  # the large one\nhttp://a:1\n")
    assert [server.url for server in PoolFile(path).servers()] == ["http://a:1", "http://b:2"]


@pytest.mark.parametrize("text", ["", "# none\n\n", "localhost:8000\n", "http://a:1/v1\n", None])
def test_a_file_that_lists_no_server_is_refused(tmp_path, text):
    path = tmp_path / "pool"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"pool|is not the URL"):
        PoolFile(path).servers()


def test_a_password_in_a_url_is_refused_and_not_shown(tmp_path):
    path = tmp_path / "pool.txt"
    path.write_text("http://127.0.0.1:8000\nhttp://user:hunter2@host:8000\n")
    with pytest.raises(ValueError) as refused:
        PoolFile(path).servers()
    assert "hunter2" not in str(refused.value)


def test_a_server_that_is_added_joins_with_the_next_update(servers, pool):
    first, second = servers(), servers()
    pool.write(first)
    engine = pool.engine()
    engine.load_weights(update(1, 1))
    pool.write(first, second)
    with engine.awake():
        until(lambda: urls(engine) == [first.url, second.url])
        probed = second.served
        assert {version for one in sample(engine) for version in one.versions} == {1}, "it waits for the weights"
        assert second.served == probed
    until(lambda: not any(member.last_error for member in engine._pool.members))
    sent = engine.load_weights(update(2, 2))
    assert (sent.servers, sent.whole) == (2, 1)
    for server in (first, second):
        assert_holds(server, update(2, 2))
    with engine.awake():
        assert [member.up for member in engine._pool.members] == [True, True]


@pytest.mark.slow
def test_with_one_process_it_is_sent_the_current_weights_at_once(servers, pool):
    first, second = servers(), servers()
    pool.write(first)
    engine = pool.engine(resend=True)
    current = update(1, 1)
    engine.load_weights(current)
    pool.write(first, second)
    with engine.awake():
        until(lambda: [member.up for member in engine._pool.members] == [True, True])
        assert_holds(second, current)
    assert engine.load_weights(update(2, 2)).whole == 0, "both hold the update before"


@pytest.mark.slow
def test_a_server_that_is_removed_gets_no_requests_and_finishes_its_own(servers, pool):
    first, second = servers(), servers(token_delay=0.1)
    pool.write(second)
    engine = pool.engine()
    engine.load_weights(update(1, 1))
    done = []
    with engine.awake():
        sampling = threading.Thread(target=lambda: done.extend(sample(engine)))
        sampling.start()
        until(lambda: second.flying)
        pool.write(first, second)
        with engine.awake():
            until(lambda: first.url in urls(engine))
        engine.load_weights(update(2, 2))
        pool.write(first)
        with engine.awake():
            assert urls(engine) == [first.url]
            sampling.join()
            before = second.served
            assert len(done) == 4
            sample(engine)
    assert second.served == before and first.served >= 4
    assert (engine.load_weights(update(3, 3))).servers == 1


@pytest.mark.slow
def test_a_server_that_starts_later_joins_when_it_is_up(servers, pool):
    first, second = servers(), servers()
    second.kill()
    pool.write(first, second)
    pool.write(first)
    engine = pool.engine(resend=True)
    engine.load_weights(update(1, 1))
    pool.write(first, second)
    with engine.awake():
        assert len(sample(engine)) == 4 and urls(engine) == [first.url]
        second.start()
        until(lambda: [member.up for member in engine._pool.members] == [True, True])
    assert_holds(second, update(1, 1))


def test_a_server_that_does_not_suit_the_run_is_left_out_with_a_warning(servers, pool):
    first, second = servers(), servers(max_model_len=16)
    pool.write(first)
    engine = pool.engine(max_context=64)
    engine.load_weights(update(1, 1))
    pool.write(first, second)
    with pytest.warns(UserWarning, match=rf"{second.url}: cannot join .* 16 tokens") as caught, engine.awake():
        until(lambda: caught.list)
    with engine.awake():
        assert urls(engine) == [first.url]


def test_a_server_whose_model_has_another_vocabulary_is_left_out_with_a_warning(servers, pool):
    first, second = servers(), servers(tiny.model(vocab_size=VOCABULARY - 1))
    pool.write(first)
    engine = pool.engine(resend=True)
    engine.load_weights(update(1, 1))
    pool.write(first, second)
    lacks = rf"{second.url}: cannot .* lacks token {VOCABULARY - 1} .* continues without it"
    with pytest.warns(UserWarning, match=lacks) as caught, engine.awake():
        until(lambda: caught.list)
    with engine.awake():
        assert len(sample(engine)) == 4 and urls(engine) == [first.url]
    assert engine.load_weights(update(2, 2)).servers == 1


@pytest.mark.slow
@pytest.mark.parametrize("resend", [False, True])
@pytest.mark.parametrize("status", [400, 500])
@pytest.mark.parametrize("changes", [{"vocab_size": VOCABULARY + 8}, {"num_hidden_layers": 1}])
def test_a_server_whose_model_has_other_tensors_is_left_out_with_a_warning(servers, pool, changes, status, resend):
    """It is up and has the tokens; what it is sent does not fit, and the run continues with the others."""
    first, second = servers(), servers(tiny.model(**changes), name="other", refuses=status)
    pool.write(first)
    engine = pool.engine(resend=resend, model_name="tiny")
    engine.load_weights(update(1, 1))
    pool.write(first, second)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with engine.awake():
            until(lambda: len(urls(engine)) == 2)
            if resend:
                until(lambda: len(caught) == 2)
            assert {version for one in sample(engine) for version in one.versions} == {1}
        if not resend:
            until(lambda: not any(member.last_error for member in engine._pool.members))
        sent = engine.load_weights(update(2, 2))
        with engine.awake():
            assert {version for one in sample(engine) for version in one.versions} == {2}
    assert sent.servers == 1
    assert not [body for body in second.asked("/v1/completions") if body.get("n") == 4], "probes alone reach it"
    assert_holds(first, update(2, 2))
    said = [str(one.message) for one in caught]
    assert len(said) == 2
    assert f"{second.url} was started with '/models/other'" in said[0]
    assert second.url in said[1] and "cannot load weights; the run continues without it" in said[1]


def test_a_refusal_by_a_server_of_the_start_ends_the_run(servers, pool):
    """It is not left out with a warning, as one that joins is."""
    first, second = servers(), servers(tiny.model(vocab_size=VOCABULARY + 8), refuses=400)
    pool.write(first, second)
    with pytest.raises(ServerRefused, match=f"{second.url}: cannot take weights .* has shape"):
        pool.engine().load_weights(update(1, 1))


@pytest.mark.parametrize("text", ["", "no url\n"])
def test_a_file_that_became_unusable_changes_nothing(servers, pool, tmp_path, text):
    first = servers()
    pool.write(first)
    engine = pool.engine()
    (tmp_path / "pool.txt").write_text(text)
    with pytest.warns(UserWarning, match="continues with its current servers") as caught:
        for _ in range(3):
            with engine.awake():
                assert len(sample(engine)) == 4
    assert len(caught.list) == 1


@pytest.mark.slow
def test_without_any_server_the_error_names_those_that_are_to_join(servers, pool):
    first, second = servers(), servers()
    pool.write(first)
    engine = pool.engine(timeout=1.0)
    second.kill()
    pool.write(second)
    with engine.awake(), pytest.raises(NoServerLeft, match=second.url):
        sample(engine)
