"""The Triton kernels compute what torch's operations do: on a GPU, or in Triton's interpreter where there is none."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from covey.policy.lm_head.torch_tiles import Curve

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
anywhere = pytest.mark.skipif(not INTERPRETED, reason="run by test_kernels_in_the_interpreter, in a process of its own")
CURVES = [Curve(), Curve(0.5, 2.0)]


@pytest.mark.skipif(INTERPRETED, reason="runs the others")
def test_kernels_in_the_interpreter():
    # Triton must see the variable when it is first imported, which other tests' libraries may have done.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def disagreement(shape, compute, curve, entropy, device, targets=1, beta=None):
    from covey.policy.lm_head import triton_tiles

    triton_tiles.BLOCK = 64  # several blocks a row
    case = triton_tiles.Case(shape, compute, curve, entropy, targets, torch.device(device), beta)
    return triton_tiles.disagreement(case)


@anywhere
@pytest.mark.parametrize("curve", CURVES, ids=str)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "targets"), [((3, 200), 1), ((2, 64), 1), ((1, 5), 1), ((3, 200), 4)], ids=str)
def test_sums_and_gradients_are_those_of_torch(targets, shape, compute, entropy, curve):
    assert disagreement(shape, compute, curve, entropy, "cpu", targets) < (1e-5 if compute == torch.float32 else 1e-3)


@anywhere
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("curve", CURVES, ids=str)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("targets", [1, 4])
def test_divergences_from_a_teacher_are_those_of_torch(targets, compute, entropy, curve, beta):
    gap = disagreement((3, 200), compute, curve, entropy, "cpu", targets, beta)
    assert gap < (2e-5 if compute == torch.float32 else 1e-3)


@anywhere
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", [{}, {"soft_cap": 2.0}], ids=str)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("named", [0, 3])
def test_triton_head_equals_the_torch_head(named, entropy, frozen, settings, compute, monkeypatch):
    from covey.policy.lm_head import linear
    from covey.policy.lm_head.scores import Head, score_hidden
    from covey.policy.lm_head.torch_tiles import TorchTiles
    from covey.policy.lm_head.triton_tiles import TritonTiles

    monkeypatch.setitem(linear.TILE_BYTES, "cpu", 4 * 3 * 40)
    torch.manual_seed(0)
    hidden, targets = torch.randn(5, 4), torch.randint(90, (5,))
    module = torch.nn.Linear(4, 90).to(compute).requires_grad_(not frozen)
    module.bias.data[:50] = -torch.inf
    targets = targets % 40 + 50
    others = torch.tensor([[60, 60, -1], [89, 50, 7], [3, 70, 71], [52, 51, 50], [88, 87, 86]]) if named else None

    def outcome(kind):
        monkeypatch.setattr(linear, "_arithmetic_for", lambda plan, targets, device: kind)
        module.zero_grad()
        states = hidden.clone().to(compute).requires_grad_()
        head = Head(module, **settings) if settings else Head(module)
        scores = score_hidden(
            states, targets, head, temperature=0.8, entropy=entropy, chunk_size=3, named=others, top=named
        )
        loss = scores.logprobs.sum() + (scores.entropies.square().sum() if entropy else 0)
        if named:
            loss = loss + (scores.named.exp() * torch.tensor([1.0, -2.0, 0.5])).sum()
        loss.backward()
        return [x for x in (*scores, states.grad, module.weight.grad, module.bias.grad) if x is not None]

    tolerance = 1e-5 if compute == torch.float32 else 2e-2
    for ours, theirs in zip(outcome(TritonTiles), outcome(TorchTiles), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@anywhere
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_triton_head_with_a_teacher_equals_the_torch_head(frozen, beta, monkeypatch):
    from covey.policy.lm_head import linear
    from covey.policy.lm_head.scores import Head, score_hidden
    from covey.policy.lm_head.teacher import TeacherHead, TeacherRows
    from covey.policy.lm_head.torch_tiles import TorchTiles
    from covey.policy.lm_head.triton_tiles import TritonTiles

    monkeypatch.setitem(linear.TILE_BYTES, "cpu", 4 * 3 * 40)
    torch.manual_seed(0)
    hidden, targets = torch.randn(5, 4), torch.randint(90, (5,))
    module = torch.nn.Linear(4, 90).requires_grad_(not frozen)
    teacher = TeacherRows((TeacherHead(torch.randn(80, 3)),), torch.randn(5, 3), None, beta, 0.8)

    def outcome(kind):
        monkeypatch.setattr(linear, "_arithmetic_for", lambda plan, targets, device: kind)
        module.zero_grad()
        states = hidden.clone().requires_grad_()
        options = {"temperature": 0.8, "entropy": False, "chunk_size": 3}
        scores = score_hidden(states, targets, Head(module), **options, teacher=teacher)
        (scores.divergence.square().sum() + scores.logprobs.sum()).backward()
        return [x for x in (scores.logprobs, scores.divergence, states.grad, module.weight.grad) if x is not None]

    for ours, theirs in zip(outcome(TritonTiles), outcome(TorchTiles), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def case(shape):
    from covey.policy.lm_head.triton_tiles import Case

    return Case(shape, torch.float32, Curve(), False, 1, torch.device("cpu"))


@anywhere
def test_kernels_that_differ_are_not_used(monkeypatch):
    from covey.policy.lm_head import triton_tiles

    monkeypatch.setattr(triton_tiles, "TOLERANCE", -1.0)
    with pytest.warns(UserWarning, match="differ from torch's operations by"):
        kind = triton_tiles.fastest_tiles(case((2, 8)))
    assert kind is triton_tiles.TorchTiles


@anywhere
def test_kernels_that_fail_are_not_used(monkeypatch):
    from covey.policy.lm_head import triton_tiles

    def fail(*args):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(triton_tiles, "disagreement", fail)
    with pytest.warns(UserWarning, match="RuntimeError: no such instruction"):
        kind = triton_tiles.fastest_tiles(case((2, 9)))
    assert kind is triton_tiles.TorchTiles


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("curve", CURVES, ids=str)
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("targets", [1, 65])
def test_kernels_on_a_gpu(targets, compute, entropy, curve):
    from covey.policy.lm_head import triton_tiles

    large = triton_tiles.Case((1024, 32768), compute, curve, entropy, targets, torch.device("cuda"))
    assert triton_tiles.disagreement(large) < 1e-3
    assert targets > 1 or triton_tiles.fastest_tiles(large) is triton_tiles.TritonTiles
