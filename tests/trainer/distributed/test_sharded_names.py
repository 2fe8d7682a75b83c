"""However many processes hold a model: what is saved and sent of it has the names of its checkpoints."""

import pytest
import torch
from safetensors.torch import load_file

from tests.support import named_runs
from tests.support.launching import HERE, accelerate

peft = pytest.importorskip("peft")

WAYS = [
    pytest.param("cpu_2proc", marks=pytest.mark.slow),
    pytest.param("fsdp2", marks=pytest.mark.slow),
    pytest.param("zero3", marks=pytest.mark.deepspeed),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    named_runs.write_models(folder)
    return folder, {case: named_runs.train(case, folder / case) for case in named_runs.CASES}


@pytest.fixture(scope="module", params=WAYS)
def together(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    named_runs.write_models(folder)
    accelerate(request.param, str(HERE / "named_runs.py"), str(folder), *named_runs.CASES, seconds=300)
    return folder, torch.load(folder / "sent.pt", weights_only=True)


@pytest.mark.parametrize("case", named_runs.CASES)
def test_what_two_processes_save_and_send_is_what_one_does(alone, together, case):
    (one, by_one), (two, by_two) = alone, together
    (expected, _), (found, received) = by_one[case], by_two[case]
    assert found.keys() == expected.keys()
    for route, tensors in expected.items():
        assert_same(found[route], tensors, atol=0.05 if route == "rounded" else 1e-5)
    sent, rounded = found["sent"], found["rounded"]
    assert all(torch.equal(rounded[name], tensor.to(rounded[name].dtype)) for name, tensor in sent.items())
    assert received["rounded"] <= (0.9 if "lora" in case else 0.55) * received["sent"]  # merged in float32
    kind, _, *lora = case.split(", ")
    file = "adapter_model.safetensors" if lora else "model.safetensors"
    saved = load_file(one / case / "final" / file)
    for folder in ("final", "checkpoint-1"):
        assert_same(load_file(two / case / folder / file), saved)
    if lora:
        assert_same(found["adapter"], saved)
        return
    assert_same(sent, saved)
    _, report = named_runs.READERS[kind].from_pretrained(two / case / "final", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]


def assert_same(found, expected, atol=1e-5):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
