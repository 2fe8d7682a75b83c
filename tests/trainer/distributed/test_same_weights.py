"""Five steps on two processes end with the weights of five steps on one: every way, method, adapter and mishap.

`-s` prints the table of benchmarks/measured.md, a column for each way. Slow: what is fast is in
test_sharded_runs.py and test_two_processes.py.
"""

import pytest
import torch

from tests.support import sharded_runs, tiny
from tests.trainer.distributed.test_sharded_runs import launch

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Each case by this process alone."""
    folder = tmp_path_factory.mktemp("alone")
    torch.set_num_threads(1)
    return {case: sharded_runs.outcome(sharded_runs.train(case, folder / case)) for case in sharded_runs.MATRIX}


def largest_difference(one, two):
    assert one["weights"].keys() == two["weights"].keys()
    return max((two["weights"][name] - tensor).abs().max().item() for name, tensor in one["weights"].items())


def moved(found):
    """How far five steps have taken the weights."""
    start = dict(tiny.model().named_parameters())
    return max((found["weights"][name] - tensor).abs().max().item() for name, tensor in start.items())


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("cpu_2proc", marks=pytest.mark.slow),
        pytest.param("fsdp2", marks=pytest.mark.slow),
        pytest.param("zero3", marks=pytest.mark.deepspeed),
    ],
)
def test_two_processes_end_with_the_weights_of_one(alone, tmp_path, way):
    found = launch(way, tmp_path, sharded_runs.MATRIX)
    differences = {case: largest_difference(alone[case], found[case]) for case in sharded_runs.MATRIX}
    for case, difference in differences.items():
        print(f"| {case} | {difference:.1e} | (moved by {moved(alone[case]):.1e}, idle passes {found[case]['idle']})")
    assert {case: difference for case, difference in differences.items() if difference > 1e-5} == {}
    assert {found[case]["sharding"] for case in found} == {{"cpu_2proc": "", "fsdp2": "FSDP2", "zero3": "ZeRO-3"}[way]}
    assert all(moved(alone[case]) > 1e-2 for case in alone if "LoRA" not in case)  # an adapter begins anywhere
    if way != "cpu_2proc":
        mishaps = [case for case in found if case.endswith(("no signal", "all truncated"))]
        assert all(sum(found[case]["idle"]) > 0 for case in mishaps)


@pytest.mark.slow
def test_the_config_for_gpus_trains_on_cpu_processes_too(alone, tmp_path):
    case = "GRPO: as usual"
    found = launch("multi_gpu", tmp_path, [case])
    assert largest_difference(alone[case], found[case]) < 1e-5
