"""Two processes that share the weights of the policy end with those of one process that has them all."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from covey.policy.weights import weight_update
from covey.sizing.memory import ShardCounts, estimate
from covey.sizing.model_spec import unit_parameters
from covey.sizing.step_cost import received_by
from covey.trainer.resuming import check_same_frozen
from tests.support import runs, sharded_runs, tiny
from tests.support.launching import HERE, accelerate, once, torchrun

peft = pytest.importorskip("peft")

SHARED = ("eval_reward", "eval_loss", "learning_rate", "reward", "num_tokens", "kl", "grad_norm", "loss", "aux_loss")
SAVED = [case for case in sharded_runs.CASES if case in sharded_runs.RESUMED]
BEST = [case for case in sharded_runs.CASES if case.startswith("the best weights")]
FEWER = ("rloo", "grpo, lora", "a rank with no signal", "evaluated before it is trained")
"""Cases for ways of sharding that have most in common with another."""
FIRST = ("rloo", "grpo, lora", "a rank with no signal", "grpo", "uneven last batches", "sampled in step")
"""Cases of one launch with FSDP2, which several tests look at; the rest is another."""
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
    sharded_runs.write_models(folder)
    torch.set_num_threads(1)
    return Alone(folder)


def launch(config, folder, cases):
    """Cases in one launch of two processes, with a config that comes with Covey."""
    sharded_runs.write_models(folder)
    accelerate(config, str(HERE / "sharded_runs.py"), str(folder), *cases, seconds=600)
    return torch.load(folder / "result.pt", weights_only=True)


def assert_alike(one, two):
    check_same_frozen("checkpoint-1", one["frozen"], two["frozen"], adapter=True)
    assert one["frozen"].keys() == two["frozen"].keys()
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


@pytest.mark.slow
def test_the_cases_train(alone):
    start = dict(weight_update(tiny.model(), 0).tensors())
    for case in ("grpo", "rloo"):
        moved = max((alone[case]["weights"][name] - tensor).abs().max().item() for name, tensor in start.items())
        assert moved > 1e-2


# ---- FSDP2 ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fsdp2_folder(tmp_path_factory):
    return once(tmp_path_factory, "fsdp2", lambda folder: launch("fsdp2", folder, FIRST))


@pytest.fixture(scope="module")
def fsdp2(fsdp2_folder):
    return torch.load(fsdp2_folder / "result.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", FIRST)
def test_fsdp2_ends_where_one_process_does(alone, fsdp2, case):
    assert_sharded_alike(alone[case], fsdp2[case])


@pytest.mark.slow
def test_fsdp2_ends_where_one_process_does_in_other_cases_too(alone, tmp_path):
    found = launch("fsdp2", tmp_path, REST)
    for case in REST:
        assert_sharded_alike(alone[case], found[case])
    for case in BEST:
        assert_best(tmp_path / case, found[case])


@pytest.mark.slow
def test_fsdp2_trains_over_4_bits_as_one_process_does(alone, tmp_path):
    """Stored as numbers they are shared out; stored as integers they stay whole, and the rest is shared out."""
    pytest.importorskip("bitsandbytes", reason="needs `pip install bitsandbytes`")
    found = launch("fsdp2", tmp_path, list(sharded_runs.QUANTISED))
    for case, ours in found.items():
        assert_alike(alone[case], ours)
        assert (ours["sharding"], ours["sharded"], ours["resumed"]) == ("FSDP2", True, 0.0)
        assert (ours["share"] < 0.65) == (case == "4 bits as float32")


@pytest.mark.slow
def test_fsdp2_has_the_optimizers_of_covey(alone, tmp_path):
    found = launch("fsdp2", tmp_path, list(sharded_runs.OPTIMIZERS))
    for case, ours in found.items():
        assert (ours["sharding"], ours["sharded"], ours["resumed"]) == ("FSDP2", True, 0.0), case
    start = dict(weight_update(tiny.model(), 0).tensors())
    for name, tensor in alone["muon"]["weights"].items():  # to the rounding of its products in bfloat16
        moved, apart = (tensor - start[name]).norm(), (found["muon"]["weights"][name] - tensor).norm()
        assert apart <= 0.05 * moved, name


def assert_best(folder, found):
    """Those of the second step are left and saved; those of the fourth were the last."""
    name = "model.safetensors" if "lora" not in str(folder) else "adapter_model.safetensors"
    best, last, final = (load_file(folder / one / name) for one in ("checkpoint-2", "checkpoint-4", "final"))
    assert all(torch.equal(final[key], tensor) for key, tensor in best.items())
    assert any(not torch.equal(final[key], tensor) for key, tensor in last.items())
    if name == "model.safetensors":
        assert all(torch.equal(found["weights"][key], tensor) for key, tensor in best.items())


def assert_sharded_alike(one, two):
    assert_alike(one, two)
    assert (two["sharding"], two["sharded"]) == ("FSDP2", True)
    assert two["share"] < 0.65  # half the weights, and what is too small to be shared


@pytest.mark.slow
@pytest.mark.parametrize("case", ["uneven last batches", "a rank with no signal"])
def test_processes_with_less_to_do_keep_step(fsdp2, case):
    assert sum(fsdp2[case]["idle"]) > 0


@pytest.mark.slow
def test_weights_that_wait_in_the_memory_of_the_cpu_are_such(fsdp2):
    assert [fsdp2[case]["offload"] for case in ("grpo", "sampled in step")] == ["OffloadPolicy", "CPUOffloadPolicy"]


@pytest.mark.slow
def test_processes_receive_what_the_formulas_say(fsdp2):
    found = fsdp2[sharded_runs.COUNTED]["traffic"]
    received = formulas("fsdp2")
    assert found["passes"] >= 5
    assert found["reduced"] == received.reduced(found["passes"])
    # The outermost unit stays gathered after a forward pass, until a backward pass has made use of it.
    more = received.gathered(found["passes"], found["forwards"]) - found["gathered"]
    still_there, rest = divmod(more, received.stays // 2)
    assert 0 <= still_there <= found["forwards"] and rest == 0
    assert_on_the_page("FSDP2", found, received)


def formulas(way, **changes):
    args, spread = runs.config("unused", per_device_train_batch_size=4), ShardCounts.of(way, 2)
    memory = estimate(tiny.config(**changes), args, prompt_tokens=4, spread=spread)
    return received_by(spread, memory, unit_parameters(tiny.config(**changes)))


def assert_on_the_page(way, found, received):
    """What was counted, and what the formulas say, is what benchmarks/measured.md has."""
    passes, forwards = found["passes"], found["forwards"]
    cells = way, passes, forwards, found["gathered"], received.gathered(passes, forwards), found["reduced"]
    row = "| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else cell for cell in cells) + " |"
    assert row in (HERE.parents[1] / "benchmarks" / "measured.md").read_text(), row


@pytest.mark.slow
@pytest.mark.parametrize("case", SAVED)
def test_a_run_under_fsdp2_is_resumed_exactly_and_loads_anywhere(fsdp2, fsdp2_folder, case):
    assert fsdp2[case]["resumed"] == 0.0
    assert_loads(fsdp2_folder, case, fsdp2)


@pytest.mark.slow
def test_an_adapter_is_not_resumed_on_another_base(fsdp2):
    assert "was trained on another base model" in fsdp2["grpo, lora"]["refused"]


@pytest.mark.slow
def test_a_run_of_torchrun_is_sharded_as_its_arguments_say(alone, tmp_path):
    torchrun(str(HERE / "sharded_runs.py"), str(tmp_path), "FSDP2")
    found = torch.load(tmp_path / "result.pt", weights_only=True)["FSDP2"]
    assert_alike(alone["GRPO: as usual"], found)
    assert (found["sharding"], found["sharded"], found["resumed"]) == ("FSDP2", True, 0.0)
    assert "is of a run with another reference model" in found["refused"]


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
def test_processes_receive_what_the_formulas_say_under_zero3(zero3):
    found, received = zero3[sharded_runs.COUNTED]["traffic"], formulas("zero3")
    assert found["reduced"] == received.reduced(found["passes"])
    # DeepSpeed gathers all weights once more in a run, and embeddings that are the head as well more often.
    more = found["gathered"] - received.gathered(found["passes"], found["forwards"]) - received.whole // 2
    embeddings = tiny.model().lm_head.weight.nbytes // 2
    assert more % embeddings == 0 and 0 <= more // embeddings <= found["passes"] + found["forwards"]
    assert_on_the_page("ZeRO-3", found, received)


@pytest.mark.deepspeed
@pytest.mark.parametrize("case", BEST)
def test_the_best_weights_are_left_under_zero3(zero3, zero3_folder, case):
    assert_best(zero3_folder / case, zero3[case])


@pytest.mark.deepspeed
@pytest.mark.parametrize("case", SAVED)
def test_a_run_under_zero3_is_resumed_exactly_and_loads_anywhere(zero3, zero3_folder, case):
    assert zero3[case]["resumed"] == 0.0
    assert_loads(zero3_folder, case, zero3)


@pytest.mark.deepspeed
def test_other_frozen_weights_are_refused_under_zero3(zero3):
    assert "was trained on another base model" in zero3["grpo, lora"]["refused"]
    assert "is of a run with another reference model" in zero3["the best weights"]["refused"]


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_with_whole_weights_ends_where_one_process_does(alone, tmp_path, stage):
    found = launch(f"zero{stage}", tmp_path, FEWER)
    for case in FEWER:
        assert_alike(alone[case], found[case])
        assert (found[case]["sharding"], found[case]["sharded"]) == (f"ZeRO-{stage}", False)
    assert found["grpo, lora"]["resumed"] == 0.0
    assert_loads(tmp_path, "grpo, lora", found)
