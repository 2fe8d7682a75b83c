"""Sampling ahead from servers over HTTP: real requests are under way while real weights arrive."""

import pytest

from tests.support import runs, tiny
from tests.support.servers.fake_vllm import FakeVllm

pytestmark = pytest.mark.filterwarnings("ignore:.*was started with")


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_servers_sample_while_the_policy_trains(tmp_path, staleness):
    server = FakeVllm(tiny.model(), token_delay=0.05).start()
    given = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": [server.url], "vllm_server_timeout": 10.0}
    settings = {"max_steps": 5, "max_staleness": staleness, "max_completion_length": 12}
    trainer = runs.trainer(tmp_path, **settings, **given)
    share, ages = trainer.credit.gather, []

    def noting(rollouts, behaviour, mode):
        step = trainer.state.global_step
        ages.extend([step - version for version in rollout.versions] for rollout in rollouts.rollouts)
        return share(rollouts, behaviour, mode)

    trainer.credit.gather = noting
    try:
        trainer.train()
    finally:
        trainer.collector.engine.close()
        server.kill()
    assert len(runs.history(trainer, "loss")) == 5
    assert 1 <= max(max(age) for age in ages) <= staleness and min(min(age) for age in ages) >= 0
    assert all(age == sorted(age, reverse=True) for age in ages)  # tokens of a completion only get fresher
    assert trainer.behaviour.engine_check._left == 0  # log-probs agreed before and after an update
