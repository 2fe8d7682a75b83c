"""Policies whose weights are spread over two processes, sampled from a vLLM server that is sent them part by part.

Slow, or with DeepSpeed: what one process sends is in test_training_with_servers.py.
"""

import os

import pytest
import torch

from tests.support import sharded_runs, tiny
from tests.support.servers.fake_vllm import FakeVllm
from tests.trainer.distributed.test_same_weights import largest_difference
from tests.trainer.distributed.test_sharded_runs import launch

pytest.importorskip("peft")


@pytest.fixture
def server(monkeypatch):
    running = FakeVllm(tiny.model(), buckets=True).start()
    monkeypatch.setenv("COVEY_TEST_SERVER", running.url)
    yield running
    running.kill()


@pytest.mark.filterwarnings("ignore:.*was started with")
@pytest.mark.parametrize("case", sharded_runs.SERVED)
@pytest.mark.parametrize(
    "way", [pytest.param("fsdp2", marks=pytest.mark.slow), pytest.param("zero3", marks=pytest.mark.deepspeed)]
)
def test_a_server_has_the_weights_of_all_processes_together(server, tmp_path, way, case):
    torch.set_num_threads(1)
    alone = sharded_runs.outcome(sharded_runs.train(case, tmp_path / case))
    assert holds(server, alone)
    server.requests.clear()
    found = launch(way, tmp_path, [case])[case]
    assert found["sharded"] and os.environ["COVEY_TEST_SERVER"] == server.url
    assert holds(server, found)
    assert bases(server) == ([False, True] if "vllm_weight_differences" in sharded_runs.SERVED[case] else [False])
    assert largest_difference(alone, found) < 1e-5


def holds(server, found):
    """Whether the server's weights are those of the trained policy, its adapter merged."""
    held = dict(server.model.named_parameters())
    start = dict(tiny.model().named_parameters())
    assert any(not torch.equal(held[name], start[name]) for name in held)
    return all(torch.allclose(held[name], found["weights"][name], rtol=0, atol=1e-6) for name in held)


def bases(server):
    """Whether updates name one before that they differ from: the first does not, and the later ones all do or none."""
    labels = [body["update_info"]["manifest"].get("labels") or {} for body in server.asked("/update_weights")]
    return list(dict.fromkeys(one.get("base") is not None for one in labels))
