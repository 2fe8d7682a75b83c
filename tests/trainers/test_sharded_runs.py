"""Two processes that share the weights of the policy end with those of one process that has them all."""

import pytest
import sharded_runs
import torch
from launching import HERE, accelerate

import tiny
from covey.policy.weights import weight_update

SCRIPT = str(HERE / "sharded_runs.py")
SHARED = ("eval_reward", "eval_loss", "learning_rate", "reward", "num_tokens", "kl", "grad_norm", "loss")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Each case by this process alone, once."""
    folder = tmp_path_factory.mktemp("alone")
    torch.set_num_threads(1)
    return {case: sharded_runs.outcome(sharded_runs.train(case, folder / case)) for case in sharded_runs.CASES}


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory):
    """Every case in one launch of two processes."""
    folder = tmp_path_factory.mktemp("fsdp2")
    accelerate("fsdp2", SCRIPT, str(folder), *sharded_runs.CASES)
    return torch.load(folder / "result.pt", weights_only=True)


def assert_alike(one, two):
    assert one["weights"].keys() == two["weights"].keys()
    for name, tensor in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], tensor, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for name in SHARED:
        assert two["history"][name] == pytest.approx(one["history"][name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("case", sharded_runs.CASES)
def test_fsdp2_ends_where_one_process_does(alone, fsdp2, case):
    assert_alike(alone[case], fsdp2[case])
    assert (fsdp2[case]["sharding"], fsdp2[case]["sharded"]) == ("FSDP2", True)
    assert fsdp2[case]["share"] < 0.65  # half the weights, and an adapter's or a head's beside


@pytest.mark.parametrize("case", ["uneven last batches", "a rank with no signal"])
def test_processes_with_less_to_do_keep_step(fsdp2, case):
    assert sum(fsdp2[case]["idle"]) > 0


def test_the_cases_train(alone):
    start = dict(weight_update(tiny.model(), 0).tensors())
    for case in ("grpo", "rloo"):
        moved = max((alone[case]["weights"][name] - tensor).abs().max().item() for name, tensor in start.items())
        assert moved > 1e-2
