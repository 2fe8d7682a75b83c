"""Whole runs that sample from servers over HTTP, with the real transport of weights."""

import threading
import time

import pytest
import torch
from transformers import TrainerCallback

from covey.core.findings import CheckError
from covey.engines.servers.errors import NoServerLeft, ServerRefused
from tests.support import mixtures, runs, tiny
from tests.support.servers.fake_vllm import FakeVllm

pytestmark = pytest.mark.filterwarnings("ignore:.*was started with")


@pytest.fixture
def servers():
    made: list[FakeVllm] = []

    def start(**options):
        made.append(FakeVllm(options.pop("model", None) or tiny.model(), **options).start())
        return made[-1]

    yield start
    for server in made:
        server.kill()


def trainer(tmp_path, *servers, method="grpo", **settings):
    """A trainer that samples from `servers`; close its engine."""
    urls = [server.url for server in servers]
    given = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": urls, "vllm_server_timeout": 10.0}
    return runs.trainer(tmp_path, method, **{**given, "max_steps": 3, **settings})


def train(*args, **settings):
    made = trainer(*args, **settings)
    try:
        made.train()
    finally:
        made.collector.engine.close()
    return made


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_training_samples_from_the_weights_of_the_moment(tmp_path, servers, method):
    server = servers()
    trained = train(tmp_path, server, method=method)  # the parity check compares log-probs before and after an update
    assert len(runs.history(trained, "loss")) == 3
    held = dict(server.model.named_parameters())
    first = dict(tiny.model().named_parameters())
    assert any(not torch.equal(held[name], first[name]) for name in held)
    assert server.stamp.endswith("-2")  # the last rollout batch was sampled after 2 steps
    assert max(runs.history(trained, "sampling/sampling_logp_difference/max")) < 1e-3
    assert runs.history(trained, "sync/bytes")[0] == sum(4 * parameter.numel() for parameter in held.values())


@pytest.mark.slow
def test_after_training_the_server_holds_the_last_weights(tmp_path, servers):
    server = servers()
    made = trainer(tmp_path, server)
    try:
        made.train()
        made.weight_sync.ensure_current(made.state.global_step)
        for name, parameter in server.model.named_parameters():
            assert torch.equal(parameter, dict(made.policy.named_parameters())[name]), name
    finally:
        made.collector.engine.close()


@pytest.mark.slow
def test_a_run_sends_what_changed_and_logs_how_much(tmp_path, servers):
    """At learning rate 0 nothing changes, and the one bucket of an update is its least 16 bytes."""
    server = servers(buckets=True)
    settings = {"vllm_weight_differences": True, "vllm_group_port": 0, "learning_rate": 0.0}
    trained = train(tmp_path, server, **settings)
    whole = sum(4 * parameter.numel() for parameter in server.model.parameters())
    assert runs.history(trained, "sync/bytes") == [whole, 16, 16]
    assert runs.history(trained, "sync/changed") == [0, 0]
    assert runs.history(trained, "sync/whole_servers") == [1, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_with_differences_the_server_holds_the_last_weights(tmp_path, servers, staleness):
    server = servers(buckets=True)
    settings = {"vllm_weight_differences": True, "vllm_group_port": 0, "max_staleness": staleness}
    made = trainer(tmp_path, server, max_steps=5, **settings)
    try:
        made.train()
        made.weight_sync.ensure_current(made.state.global_step)
        for name, parameter in server.model.named_parameters():
            assert torch.equal(parameter, dict(made.policy.named_parameters())[name]), name
    finally:
        made.collector.engine.close()
    assert runs.history(made, "sync/whole_servers")[1:] == [0] * (len(runs.history(made, "sync/whole_servers")) - 1)


@pytest.mark.slow
def test_servers_of_a_file_join_and_leave_a_run(tmp_path, servers):
    """The second joins after step 2, and the first leaves after step 5."""
    one, other = servers(buckets=True, token_delay=0.01), servers(buckets=True, token_delay=0.01)
    path = tmp_path / "servers.txt"
    path.write_text(one.url)
    settings = {"server_pool_file": str(path), "vllm_server_base_url": None, "vllm_group_port": 0, "max_steps": 10}
    made = trainer(tmp_path, vllm_weight_differences=True, **settings)

    class Change(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                path.write_text(f"{one.url}\n{other.url}\n")
            if state.global_step == 5:
                members = made.collector.engine._pool.members
                until = time.monotonic() + 30
                while not (len(members) == 2 and members[1].up) and time.monotonic() < until:
                    time.sleep(0.02)
                path.write_text(other.url)
                self.served = one.served

    change = Change()
    made.add_callback(change)
    try:
        made.train()
        made.weight_sync.ensure_current(made.state.global_step)
    finally:
        made.collector.engine.close()
    assert made.state.global_step == 10 and one.served == change.served and other.served > 0
    for name, parameter in other.model.named_parameters():
        assert torch.equal(parameter, dict(made.policy.named_parameters())[name]), name


@pytest.mark.slow
def test_a_server_with_another_vocabulary_does_not_join_a_run(tmp_path, servers):
    """It is listed after step 1; the run warns of it and continues with its own server."""
    one, other = servers(buckets=True), servers(buckets=True, model=tiny.model(vocab_size=80))
    path = tmp_path / "servers.txt"
    path.write_text(one.url)
    settings = {"server_pool_file": str(path), "vllm_server_base_url": None, "vllm_group_port": 0, "max_steps": 4}
    made = trainer(tmp_path, **settings)

    class Join(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                path.write_text(f"{one.url}\n{other.url}\n")
            elif state.global_step == 2:
                until = time.monotonic() + 30
                while other.url not in made.collector.engine._pool._join_errors and time.monotonic() < until:
                    time.sleep(0.02)

    made.add_callback(Join())
    lacks = rf"{other.url}: cannot .*lacks token {tiny.config().vocab_size - 1} .*The run continues without it"
    try:
        with pytest.warns(UserWarning, match=lacks):
            made.train()
        assert [member.url for member in made.collector.engine._pool.members] == [one.url]
    finally:
        made.collector.engine.close()
    assert made.state.global_step == 4 and other.served == 0


@pytest.mark.slow
def test_two_servers_share_the_work_and_one_may_die(tmp_path, servers):
    one, other = servers(token_delay=0.01), servers(token_delay=0.01)
    made = trainer(tmp_path, one, other, max_steps=6, engine_parity="raise")
    threading.Timer(0.3, one.kill).start()
    try:
        made.train()
    finally:
        made.collector.engine.close()
    assert made.state.global_step == 6
    assert other.served > 6


@pytest.mark.slow
def test_a_server_restarted_mid_run_is_sent_the_weights(tmp_path, servers):
    server = servers(token_delay=0.01)
    made = trainer(tmp_path, server, max_steps=6, engine_parity="raise")

    def restart():
        server.kill()
        server.start()

    timer = threading.Timer(0.4, restart)
    timer.start()
    try:
        made.train()
    finally:
        timer.join()
        made.collector.engine.close()
    assert made.state.global_step == 6


@pytest.mark.slow
def test_evaluation_samples_from_the_servers_too(tmp_path, servers):
    server = servers()
    made = trainer(tmp_path, server)
    try:
        made.eval_dataset = tiny.rows(4)
        assert made.evaluate()["eval_reward"] > 0
    finally:
        made.collector.engine.close()


def test_generation_kwargs_reach_the_server(tmp_path, servers):
    server = servers()
    train(tmp_path, server, max_steps=1, generation_kwargs={"min_tokens": 2})
    assert all(body["min_tokens"] == 2 for body in server.asked("/v1/completions")[1:])


@pytest.mark.parametrize(
    ("options", "settings", "error", "said"),
    [
        ({"dev_mode": False}, {}, ServerRefused, "VLLM_SERVER_DEV_MODE=1"),
        ({"api_key": "k"}, {}, ServerRefused, "HTTP 401"),
        ({}, {"temperature": 0.7}, ServerRefused, "--logprobs-mode processed_logprobs"),
        ({}, {"generation_kwargs": {"min_token": 1}}, ServerRefused, "but 'min_tokens'"),
        ({}, {"generation_kwargs": {"stream": True}}, ValueError, "leave out stream"),
    ],
)
def test_a_server_that_will_not_do_ends_the_run_before_it_begins(tmp_path, servers, options, settings, error, said):
    with pytest.raises(error, match=said):
        trainer(tmp_path, servers(**options), **settings)


def test_a_server_with_a_smaller_vocabulary_is_refused(tmp_path, servers):
    with pytest.raises(ServerRefused, match="its vocabulary lacks token"):
        trainer(tmp_path, servers(model=tiny.model(vocab_size=80)))


def test_a_server_that_is_not_there_is_named(tmp_path, servers):
    server, gone = servers(), servers()
    gone.kill()
    with pytest.raises(NoServerLeft, match=rf"1 of 2 vLLM servers did not come up within 1 seconds[\s\S]*{gone.url}"):
        trainer(tmp_path, server, gone, vllm_server_timeout=1.0)


def test_a_key_may_come_from_the_environment(tmp_path, servers, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "k")
    trainer(tmp_path, servers(api_key="k")).collector.engine.close()


@pytest.mark.filterwarnings("ignore")
def test_a_server_that_returns_no_experts_is_refused(tmp_path, servers):
    parts = {"model": mixtures.model("Mixtral")}
    with pytest.raises(CheckError) as caught:
        trainer(tmp_path, servers(model=mixtures.model("Mixtral")), routing_replay="R3", parts=parts)
    assert caught.value.codes == ["routing-replay"]
