"""Two processes that share the weights of the policy end with those of one process that has them all."""

import pytest
import runs
import sharded_runs
import torch
from launching import HERE, accelerate
from transformers import AutoModelForCausalLM

import tiny
from covey.policy.weights import weight_update
from covey.trainers.costs import received_by
from covey.trainers.memory import estimate, unit_parameters
from covey.trainers.spread import Spread

peft = pytest.importorskip("peft")

SHARED = ("eval_reward", "eval_loss", "learning_rate", "reward", "num_tokens", "kl", "grad_norm", "loss", "aux_loss")
SAVED = [case for case, settings in sharded_runs.CASES.items() if "save_steps" in settings]
FEWER = ("rloo", "grpo, lora", "a rank with no signal", "evaluated before it is trained")
"""Cases for ways of sharding that have most in common with another."""
FIRST = (*FEWER, "grpo", "uneven last batches", "sampled in step")
"""What every run of the tests tries with FSDP2; the rest is slow."""
REST = [case for case in sharded_runs.CASES if case not in FIRST]
UNDER_ZERO3 = [case for case, settings in sharded_runs.CASES.items() if "evaluate_first" not in settings]


class Alone(dict):
    """Each case by this process alone, once, when it is asked for."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def __missing__(self, case):
        self[case] = sharded_runs.outcome(sharded_runs.train(case, self.folder / case))
        return self[case]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    tiny.folder(folder / "model")
    torch.set_num_threads(1)
    return Alone(folder)


def launch(config, folder, cases):
    """Cases in one launch of two processes, with a config that comes with Covey."""
    tiny.folder(folder / "model")
    accelerate(config, str(HERE / "sharded_runs.py"), str(folder), *cases, seconds=600)
    return torch.load(folder / "result.pt", weights_only=True)


def assert_alike(one, two):
    assert one["weights"].keys() == two["weights"].keys()
    for name, tensor in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], tensor, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for name in SHARED:
        assert two["history"][name] == pytest.approx(one["history"][name], rel=1e-3, abs=1e-5), name


def assert_loads(folder, case, found):
    """What was saved is what was trained, for whoever knows nothing of sharding."""
    if case == "grpo, lora":
        loaded = peft.PeftModel.from_pretrained(tiny.model(), folder / case / "final")
    else:
        loaded = AutoModelForCausalLM.from_pretrained(folder / case / "final")
        assert loaded.config.architectures == ["LlamaForCausalLM"]
    for name, tensor in weight_update(loaded, 0).tensors():
        torch.testing.assert_close(tensor, found[case]["weights"][name], rtol=0, atol=1e-6)


def test_the_cases_train(alone):
    start = dict(weight_update(tiny.model(), 0).tensors())
    for case in ("grpo", "rloo"):
        moved = max((alone[case]["weights"][name] - tensor).abs().max().item() for name, tensor in start.items())
        assert moved > 1e-2


# ---- FSDP2 ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fsdp2_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fsdp2")


@pytest.fixture(scope="module")
def fsdp2(fsdp2_folder):
    return launch("fsdp2", fsdp2_folder, FIRST)


@pytest.mark.parametrize("case", FIRST)
def test_fsdp2_ends_where_one_process_does(alone, fsdp2, case):
    assert_sharded_alike(alone[case], fsdp2[case])


@pytest.mark.slow
def test_fsdp2_ends_where_one_process_does_in_other_cases_too(alone, tmp_path):
    found = launch("fsdp2", tmp_path, REST)
    for case in REST:
        assert_sharded_alike(alone[case], found[case])


def assert_sharded_alike(one, two):
    assert_alike(one, two)
    assert (two["sharding"], two["sharded"]) == ("FSDP2", True)
    assert two["share"] < 0.65  # half the weights, and what is too small to be shared


@pytest.mark.parametrize("case", ["uneven last batches", "a rank with no signal"])
def test_processes_with_less_to_do_keep_step(fsdp2, case):
    assert sum(fsdp2[case]["idle"]) > 0


def test_weights_that_wait_in_the_memory_of_the_cpu_are_such(fsdp2):
    assert [fsdp2[case]["offload"] for case in ("grpo", "sampled in step")] == ["OffloadPolicy", "CPUOffloadPolicy"]


def test_processes_receive_what_the_formulas_say(fsdp2):
    found = fsdp2["uneven last batches"]["traffic"]
    args, spread = runs.config("unused", per_device_train_batch_size=4), Spread.of("fsdp2", 2)
    memory = estimate(tiny.config(), args, prompt_tokens=4, spread=spread)
    received = received_by(spread, memory, unit_parameters(tiny.config()))
    assert found["passes"] >= 5
    assert found["reduced"] == received.reduced(found["passes"])
    # The outermost unit stays gathered after a forward pass, until a backward pass has made use of it.
    more = received.gathered(found["passes"], found["forwards"]) - found["gathered"]
    still_there, rest = divmod(more, received.outer // 2)
    assert 0 <= still_there <= found["forwards"] and rest == 0


@pytest.mark.parametrize("case", SAVED)
def test_a_run_under_fsdp2_is_resumed_exactly_and_loads_anywhere(fsdp2, fsdp2_folder, case):
    assert fsdp2[case]["resumed"] == 0.0
    assert_loads(fsdp2_folder, case, fsdp2)


# ---- DeepSpeed ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def zero3_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("zero3")


@pytest.fixture(scope="module")
def zero3(zero3_folder):
    return launch("zero3", zero3_folder, UNDER_ZERO3)


@pytest.mark.deepspeed
@pytest.mark.parametrize("case", UNDER_ZERO3)
def test_zero3_ends_where_one_process_does(alone, zero3, case):
    assert_alike(alone[case], zero3[case])
    assert (zero3[case]["sharding"], zero3[case]["sharded"]) == ("ZeRO-3", True)
    assert zero3[case]["share"] < 0.65


@pytest.mark.deepspeed
@pytest.mark.parametrize("case", SAVED)
def test_a_run_under_zero3_is_resumed_exactly_and_loads_anywhere(zero3, zero3_folder, case):
    assert zero3[case]["resumed"] == 0.0
    assert_loads(zero3_folder, case, zero3)


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_with_whole_weights_ends_where_one_process_does(alone, tmp_path, stage):
    found = launch(f"zero{stage}", tmp_path, FEWER)
    for case in FEWER:
        assert_alike(alone[case], found[case])
        assert (found[case]["sharding"], found[case]["sharded"]) == (f"ZeRO-{stage}", False)
    assert found["grpo, lora"]["resumed"] == 0.0
    assert_loads(tmp_path, "grpo, lora", found)
