"""Plans: every rollout in exactly one pass, budgets kept, siblings together, shares even."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from covey.core.batch import TrainBatch, join
from covey.core.packing import balance_ranks, computed_tokens, pack_micro_batches

LAYOUTS = ("shared_prefix", "packed", "padded")


def batch_of(*groups: tuple[int, list[int]]) -> TrainBatch:
    """Groups of (prompt length, completion lengths)."""
    lengths = [length for _, members in groups for length in members]
    prompts = [prompt for prompt, _ in groups]
    tokens = sum(lengths)
    return TrainBatch(
        token_ids=torch.arange(tokens),
        lengths=torch.tensor(lengths, dtype=torch.long),
        sampled=torch.ones(tokens, dtype=torch.bool),
        prompt_ids=torch.arange(sum(prompts)),
        prompt_lengths=torch.tensor(prompts, dtype=torch.long),
        groups=torch.tensor([g for g, (_, members) in enumerate(groups) for _ in members], dtype=torch.long),
    )


def rows(plan: list[torch.Tensor]) -> list[list[int]]:
    return [sorted(part.tolist()) for part in plan]


def test_a_micro_batch_costs_what_its_layout_computes():
    batch = batch_of((4, [2, 3]), (1, [5]))
    # shared: 4 + 2 + 3 and 1 + 5; packed: 6 + 7 + 6; padded: three rows of 7
    assert [computed_tokens(batch, range(3), layout) for layout in LAYOUTS] == [15, 19, 21]
    assert [computed_tokens(batch, [], layout) for layout in LAYOUTS] == [0, 0, 0]


def test_siblings_share_a_micro_batch_and_micro_batches_are_even():
    batch = batch_of((10, [10, 10]), (5, [5, 5]), (5, [5, 5]), (10, [10, 10]))
    # groups of 30, 15, 15, 30 tokens: 45 and 45
    assert rows(pack_micro_batches(batch, 45, "shared_prefix")) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_parts_of_a_cut_group_repeat_the_prompt():
    batch = batch_of((10, [5, 5, 5, 5]))
    plan = pack_micro_batches(batch, 20, "shared_prefix")  # 10 + 2 * 5 fit
    assert [len(part) for part in plan] == [2, 2]
    assert [computed_tokens(batch, part.tolist(), "shared_prefix") for part in plan] == [20, 20]


def test_a_completion_is_never_cut():
    assert rows(pack_micro_batches(batch_of((10, [500]), (10, [1])), 20, "packed")) == [[0], [1]]


def test_padded_micro_batches_hold_rows_of_similar_length():
    batch = batch_of((0, [1, 9, 2, 10]))
    assert rows(pack_micro_batches(batch, 20, "padded")) == [[1, 3], [0, 2]]  # 2 * 10, then 2 * 2


def test_as_many_micro_batches_as_asked_for_if_rollouts_allow():
    batch = batch_of((2, [3, 3]), (2, [3, 3]))
    assert [len(pack_micro_batches(batch, 1000, layout, at_least=3)) for layout in LAYOUTS] == [3, 3, 3]
    assert [len(pack_micro_batches(batch, 1000, layout, at_least=9)) for layout in LAYOUTS] == [4, 4, 4]


def test_nothing_to_run_is_no_micro_batch():
    assert pack_micro_batches(batch_of(), 10, "packed") == []


def test_ranks_get_whole_groups_of_even_size():
    batch = batch_of((1, [9, 9]), (1, [1, 1]), (1, [4, 4]), (1, [4, 4]))
    assert rows(balance_ranks(batch, 2, "shared_prefix")) == [[0, 1], [2, 3, 4, 5, 6, 7]]  # 19 against 3 + 9 + 9


def test_a_single_group_is_shared_by_the_ranks():
    assert [len(share) for share in balance_ranks(batch_of((1, [5, 5, 5, 5])), 2, "shared_prefix")] == [2, 2]


def test_a_rank_may_be_left_without():
    assert rows(balance_ranks(batch_of((1, [5])), 2, "packed")) == [[0], []]


groups = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 12), min_size=1, max_size=6)), max_size=6)


@given(groups, st.integers(1, 40), st.sampled_from(LAYOUTS), st.integers(1, 4))
def test_every_rollout_is_in_exactly_one_micro_batch_within_the_budget(groups, budget, layout, at_least):
    batch = batch_of(*groups)
    plan = pack_micro_batches(batch, budget, layout, at_least)
    assert sorted(row for part in plan for row in part.tolist()) == list(range(len(batch)))
    assert all(len(part) == 1 or computed_tokens(batch, part.tolist(), layout) <= budget for part in plan)
    costs = [computed_tokens(batch, part.tolist(), layout) for part in plan]
    assert costs == sorted(costs, reverse=True)
    assert len(plan) >= min(at_least, len(batch))


@given(groups, st.integers(1, 5), st.sampled_from(LAYOUTS))
def test_every_rollout_is_on_exactly_one_rank(groups, ranks, layout):
    batch = batch_of(*groups)
    shares = balance_ranks(batch, ranks, layout)
    assert len(shares) == ranks
    assert sorted(row for share in shares for row in share.tolist()) == list(range(len(batch)))


def test_joined_batches_share_the_prompt_of_a_common_group():
    left, right = batch_of((2, [1]), (3, [2])), batch_of((3, [4]))
    right.prompt_ids = left.prompt_ids[2:]  # its group is the left's second
    joined = join([left, right])
    assert joined.prompt_lengths.tolist() == [2, 3]
    assert joined.prompt_ids.tolist() == left.prompt_ids.tolist()
    assert joined.lengths.tolist() == [1, 2, 4]
    assert joined.token_ids.tolist() == [0, 1, 2, 0, 1, 2, 3]
