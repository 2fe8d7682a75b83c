"""Layers that keep their activations by the memory plan, by numbers small enough to check."""

import pytest
from transformers import LlamaConfig

from covey.config.grpo import GRPOConfig
from covey.core.packing import ActivationRoom
from covey.sizing.memory import estimate, may_keep
from tests.sizing.test_memory import TINY


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        (1, 4),  # all of them
        (2, 4),  # 1 + (100 - 40) // 20
        (3, 2),  # 1 + (100 - 60) // 30
        (5, 1),  # 100 - 100: the last layer's are needed at once, kept or not
        (6, 0),  # 120 do not fit even where all recompute
    ],
)
def test_as_many_layers_keep_as_there_is_room_for(tokens, kept):
    assert ActivationRoom(size=100, recomputed=20, layer=10, layers=4).kept(tokens) == kept


def planned(device, device_bytes, layers=4, **changes):
    args = GRPOConfig(bf16=False, use_cpu=True, max_completion_length=8, num_generations=4, **changes)
    config = LlamaConfig(**{**TINY, "num_hidden_layers": layers})
    return estimate(config, args, prompt_tokens=4, device=device, device_bytes=device_bytes)


def test_the_plan_counts_layers_that_keep():
    # 72 tokens in a pass; a layer saves 272 numbers of each (`test_every_part_by_hand`), a border is 16
    little, much = planned("cuda", 1), planned("cuda", 2**33)
    assert (little.kept_layers, much.kept_layers) == (0, 4)
    assert little.activations == 72 * (4 * 16 + 272 + 176) * 4
    assert much.activations == 72 * (4 * 272 + 176) * 4
    room = much.activation_room
    assert (room.recomputed, room.layer) == ((4 * 16 + 272 + 176) * 4, (272 - 16) * 4)
    # of 80% of 2**33, what else there is: four numbers a parameter, and two tiles of logits of 128 MiB
    assert room.size == int(0.8 * 2**33) - 4 * 4 * much.parameters - 2 * 2**27


def test_some_layers_keep_where_memory_suffices_for_some():
    fixed = planned("cuda", 2**33)
    needed = int(0.8 * 2**33) - fixed.activation_room.size + 72 * (fixed.activation_room.recomputed + 2 * 256 * 4)
    some = planned("cuda", int(needed / 0.8) + 2)
    assert some.kept_layers == 3
    assert some.activations == 72 * (3 * 272 + 16 + 176) * 4
    assert some.training <= needed


def test_on_a_cpu_layers_that_keep_at_most_double_the_memory():
    many = {"layers": 40, "per_device_train_batch_size": 64}
    least, much = planned("cpu", 0, **many), planned("cpu", 2**40, **many)
    assert least.kept_layers == 0 and 0 < much.kept_layers < 40
    assert least.peak < much.peak <= 2 * least.peak
    # half of what is free, less four numbers a parameter and two tiles of logits of 16 MiB
    some = planned("cpu", 100 * 2**20, **many).activation_room
    assert some.size == 50 * 2**20 - 4 * 4 * least.parameters - 2 * 2**24


def test_layers_recompute_for_another_reason():
    assert may_keep(GRPOConfig(bf16=False, use_cpu=True))
    for change in (
        {"gradient_checkpointing": False},
        {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"attn_layout": "padded"},
        {"torch_compile": True},
    ):
        assert not may_keep(GRPOConfig(bf16=False, use_cpu=True, **change))
        assert planned("cuda", 2**33, **change).activation_room is None


def test_casts_end_before_layers_are_recomputed():
    # 7888 weights in 2 bytes: half of them, of one of two layers, are there again when a layer is recomputed, which
    # takes more than the other half. That half and what is recomputed are not there at once.
    def planned(**changes):
        args = GRPOConfig(bf16=True, use_cpu=True, max_completion_length=8, num_generations=4, **changes)
        return estimate(LlamaConfig(**TINY), args, prompt_tokens=4, device="cuda", device_bytes=2**33)

    recomputed = planned(gradient_checkpointing_kwargs={"use_reentrant": False})
    kept = planned()
    assert (recomputed.casts, recomputed.apart) == (2 * 7888, 7888)
    assert (kept.casts, kept.apart) == (2 * 7888, 0)
    rest = recomputed.resident + recomputed.head_gradient + recomputed.logits
    assert recomputed.micro_batches == 1 and recomputed.training == rest + recomputed.activations + 7888
