"""Slots of sequences in their groups."""

import torch

from covey.engines.native.shared_prefix_cache import SlotMap

CPU = torch.device("cpu")


def test_slot_map_example_of_the_docstring():
    slot_map = SlotMap.of([0, 1, 0], [4, 4], width=4, size=3, slots=2, device=CPU)
    assert slot_map.table.tolist() == [0, 2, 1, 0]
    assert slot_map.order.tolist() == [0, 2, 1]
    assert not slot_map.aligned and slot_map.filled


def test_full_groups_in_order_are_aligned():
    assert SlotMap.of([0, 0, 1, 1], [3, 3], 3, 4, 2, CPU).aligned


def test_a_mask_is_needed_for_shorter_prompts():
    assert not SlotMap.of([0, 1], [3, 2], 3, 2, 1, CPU).filled
    assert not SlotMap.of([0, 0], [3], 4, 2, 2, CPU).filled  # more columns are read than it is long


def test_unused_slots_have_no_prompt():
    slot_map = SlotMap.of([0, 0], [3], 3, size=4, slots=4, device=CPU)
    assert slot_map.lengths.tolist() == [3, 3, 0, 0]
    assert slot_map.table.tolist() == [0, 1, 0, 0] and slot_map.order.tolist() == [0, 1, 0, 0]
