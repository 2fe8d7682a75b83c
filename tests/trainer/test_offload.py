"""Parameters and optimizer states that make room come back as they were, to whoever holds them."""

import copy
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from covey import GRPOConfig
from covey.trainer.engines import colocated
from covey.trainer.engines.colocated import make_room, optimizer_tensors, parked
from tests.support import tiny


def trained(steps, around=None):
    """A model and its optimizer after some steps; `around` is entered between them."""
    model = tiny.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(4, 100, (2, 8), generator=generator)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if around is not None:
            with around(model, optimizer):
                pass
    return model, optimizer


def states(model, optimizer):
    return [*(p.detach() for p in model.parameters()), *optimizer_tensors(optimizer)]


def test_training_is_the_same_after_offloading_and_loading():
    expected = states(*trained(4))
    device = torch.device("cpu")
    moved = states(
        *trained(4, lambda model, optimizer: make_room(device, model=lambda: model, optimizers=lambda: [optimizer])())
    )
    assert len(moved) == len(expected) > 20
    for one, other in zip(moved, expected, strict=True):
        assert torch.equal(one, other)


def test_parked_tensors_are_on_the_host_and_return_unchanged():
    model, optimizer = trained(1)
    tensors = [*model.parameters(), *optimizer_tensors(optimizer)]
    before, values = [t.data_ptr() for t in tensors], [t.detach().clone() for t in tensors]
    with parked(tensors):
        assert all(tensor.data_ptr() != place for tensor, place in zip(tensors, before, strict=True))
        assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, values, strict=True))
    assert all(a is b for a, b in zip(tensors, [*model.parameters(), *optimizer_tensors(optimizer)], strict=True))


def test_tied_weights_stay_tied():
    model = tiny.model()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    with parked([*model.parameters(), model.lm_head.weight]):
        assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


def test_what_is_not_asked_for_does_not_move():
    model, optimizer = trained(1)
    device = torch.device("cpu")
    places = {id(t): t.data_ptr() for t in [*model.parameters(), *optimizer_tensors(optimizer)]}

    def moved(tensors):
        return [t.data_ptr() != places[id(t)] for t in tensors]

    with make_room(device, model=None, optimizers=lambda: [optimizer])():
        assert all(moved(optimizer_tensors(optimizer)))
        assert not any(moved(model.parameters()))


def test_everything_is_back_after_an_error_too():
    model, _ = trained(1)
    expected = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyError), parked(model.parameters()):
        raise KeyError("sampling failed")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())


def test_single_numbers_stay():
    _, optimizer = trained(1)
    assert all(t.numel() > 1 for t in optimizer_tensors(optimizer))
    assert any(state["step"].numel() == 1 for state in optimizer.state.values())


def test_vllm_starts_with_the_policy_offloaded_until_it_sleeps(tmp_path, monkeypatch):
    events = []

    class Engine:
        def __init__(self, vllm, *, sleep_level, make_room, **settings):
            events.append(f"{vllm} asleep at level {sleep_level}")
            self.make_room = make_room

    @contextmanager
    def room():
        events.append("the policy leaves")
        yield
        events.append("the policy is back")

    def make_room(device, *, model, optimizers):
        assert model() == "policy" and optimizers is None
        return room

    def start_vllm(arguments):
        events.append(f"vLLM starts with {arguments['gpu_memory_utilization']}")
        return "vLLM"

    monkeypatch.setattr(colocated, "make_room", make_room)
    monkeypatch.setattr(colocated, "start_vllm", start_vllm)
    monkeypatch.setattr(colocated, "VllmColocateEngine", Engine)
    args = GRPOConfig(
        output_dir=str(tmp_path),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=True,
        offload_model=True,
        vllm_gpu_memory_utilization=0.9,
        use_cpu=True,
        bf16=False,
    )
    accelerator = SimpleNamespace(device=torch.device("cuda"), num_processes=1, mixed_precision="no")
    engine = colocated.build_colocated(args, tiny.model(), tiny.tokenizer(), accelerator, lambda: "policy", None)
    assert events == ["the policy leaves", "vLLM starts with 0.9", "vLLM asleep at level 1", "the policy is back"]
    assert engine.make_room is room
