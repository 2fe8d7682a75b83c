"""Flat vectors with lengths beside them agree with Python lists of lists."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from covey.core.batch import expand, masked_segment_mean, segment_ids, segment_starts, segment_sum, token_index

ragged_lists = st.lists(st.lists(st.integers(-9, 9), max_size=5), max_size=6)


def flat(lists, dtype=torch.float64):
    return torch.tensor([x for one in lists for x in one], dtype=dtype)


def sizes(lists):
    return torch.tensor([len(one) for one in lists], dtype=torch.long)


def test_ids_and_starts_skip_an_empty_sequence():
    lengths = torch.tensor([2, 0, 3])
    assert segment_ids(lengths).tolist() == [0, 0, 2, 2, 2]
    assert segment_starts(lengths).tolist() == [0, 2, 2]
    assert expand(torch.tensor([7, 8, 9]), lengths).tolist() == [7, 7, 9, 9, 9]


@given(lists=ragged_lists)
def test_segment_sums_are_sums_of_the_lists(lists):
    assert segment_sum(flat(lists), sizes(lists)).tolist() == [sum(one) for one in lists]


@given(lists=ragged_lists, data=st.data())
def test_masked_means_are_means_of_the_kept_items(lists, data):
    masks = [data.draw(st.lists(st.booleans(), min_size=len(one), max_size=len(one))) for one in lists]
    kept = [[x for x, m in zip(one, mask, strict=True) if m] for one, mask in zip(lists, masks, strict=True)]
    expected = torch.tensor([sum(one) / max(len(one), 1) for one in kept], dtype=torch.float64)
    got = masked_segment_mean(flat(lists), flat(masks, torch.bool), sizes(lists))
    torch.testing.assert_close(got, expected)


def test_a_masked_mean_ignores_even_infinite_masked_values():
    values = torch.tensor([1.0, float("inf"), float("nan"), 3.0], requires_grad=True)
    mask = torch.tensor([True, False, False, True])
    mean = masked_segment_mean(values, mask, torch.tensor([4]))
    mean.sum().backward()
    assert mean.tolist() == [2.0]
    assert values.grad.tolist() == [0.5, 0, 0, 0.5]


@given(lists=ragged_lists, data=st.data())
def test_token_index_gathers_rows_in_any_order_and_with_repeats(lists, data):
    rows = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=6)) if lists else []
    index = token_index(torch.tensor(rows, dtype=torch.long), sizes(lists))
    assert flat(lists)[index].tolist() == [x for row in rows for x in lists[row]]


def test_gradients_flow_back_to_the_tokens_of_their_sequence():
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (segment_sum(values, torch.tensor([2, 0, 1])) * torch.tensor([10.0, 20.0, 30.0])).sum().backward()
    assert values.grad.tolist() == [10, 10, 30]
