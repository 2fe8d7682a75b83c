"""Seats of rows in their groups."""

import torch

from covey.engines.native.slots import SlotMap

CPU = torch.device("cpu")


def test_the_example_of_the_docstring():
    seating = SlotMap.of([0, 1, 0], [4, 4], [0, 0, 0], width=4, rows=3, least_seats=1, device=CPU)
    assert seating.seats == 2
    assert seating.table.tolist() == [0, 2, 1, 0]
    assert seating.order.tolist() == [0, 2, 1]
    assert not seating.aligned and seating.uniform


def test_rows_in_order_of_full_groups_are_aligned():
    assert SlotMap.of([0, 0, 1, 1], [3, 3], [0] * 4, 3, 4, 1, CPU).aligned


def test_a_mask_is_needed_for_shorter_prompts_and_later_rows():
    assert not SlotMap.of([0, 1], [3, 2], [0, 0], 3, 2, 1, CPU).uniform
    assert not SlotMap.of([0, 0], [3], [0, 5], 3, 2, 1, CPU).uniform
    assert not SlotMap.of([0, 0], [3], [0, 0], 4, 2, 1, CPU).uniform  # stored wider than it is


def test_places_not_in_use_have_no_prompt():
    seating = SlotMap.of([0, 0], [3], [1, 1], 3, rows=4, least_seats=4, device=CPU)
    assert seating.lengths.tolist() == [3, 3, 0, 0]
    assert seating.table.tolist() == [0, 1, 0, 0] and seating.order.tolist() == [0, 1, 0, 0]
