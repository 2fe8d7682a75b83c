"""Two processes with teachers or demonstrations make the update of one, with whole weights, FSDP2's or ZeRO-3's."""

import sys

import pytest
import torch

from tests.support import forking, taught_runs
from tests.support.launching import CONFIGS, HERE, environment, free_port, once, succeeded
from tests.support.taught_runs import CASES

NAMES = {"gloo": "", "fsdp2": "FSDP2", "zero3": "ZeRO-3"}
WAYS = [pytest.param(way, marks=pytest.mark.deepspeed if way == "zero3" else pytest.mark.slow) for way in NAMES]


def launch(way, folder, cases):
    """Run cases on two processes; the finished program."""
    port, script = str(free_port()), [str(HERE / "taught_runs.py"), str(folder), *cases]
    if way == "gloo":
        command = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_addr", "127.0.0.1"]
        command += ["--master_port", port]
    else:
        command = ["-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{way}.yaml")]
        command += ["--num_processes", "2", "--main_process_port", port]
    return forking.run([sys.executable, *command, *script], env=environment(), timeout=600)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("alone"), {}
    taught_runs.write(folder)
    torch.set_num_threads(1)

    def run(case):
        if case not in found:
            found[case] = taught_runs.train(case, folder)
        return found[case]

    return run


@pytest.fixture(scope="module", params=WAYS)
def two(request, tmp_path_factory):
    """A way, and the results of all cases by two processes in one launch."""

    def make(folder):
        taught_runs.write(folder)
        succeeded(launch(request.param, folder, CASES))

    folder = once(tmp_path_factory, f"taught-{request.param}", make)
    return request.param, torch.load(folder / "result.pt", weights_only=True)


@pytest.mark.parametrize("case", CASES)
def test_two_processes_make_the_update_of_one(alone, two, case):
    way, found = two
    one, both = alone(case), found[case]
    assert both["sharding"] == NAMES[way] and both["sharded"] == (way != "gloo")
    for name, tensor in one["weights"].items():
        torch.testing.assert_close(both["weights"][name], tensor, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    for name, values in one["history"].items():
        assert both["history"][name] == pytest.approx(values, rel=1e-4, abs=1e-5), name


def test_a_process_has_no_rollout_with_a_teacher(two):
    _, found = two
    for case in CASES:
        if "teacher" in CASES[case]:
            assert any(0 in counts and sum(counts) > 0 for counts in found[case]["taught"]), case
