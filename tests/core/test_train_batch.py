"""Rollouts become flat vectors and come back out of any selection unchanged."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from covey.core.batch import TOKEN_FIELDS, TrainBatch, collate, join
from covey.core.media import Media
from covey.core.records import FinishReason, Rollout


def rollout(prompt, ids, *, sampled=None, group=0, finish=FinishReason.STOP, logprobs=True):
    return Rollout(
        prompt_ids=list(prompt),
        completion_ids=list(ids),
        sampled=[True] * len(ids) if sampled is None else sampled,
        logprobs=[-i / 64 for i in ids] if logprobs else None,
        completion="",
        finish=finish,
        group=group,
    )


@st.composite
def rollouts(draw):
    prompts = draw(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=3))
    groups = draw(st.lists(st.integers(0, len(prompts) - 1), min_size=1, max_size=7))
    lists = [draw(st.lists(st.integers(10, 60), max_size=4)) for _ in groups]
    return [rollout(prompts[g], ids, group=g) for g, ids in zip(groups, lists, strict=True)]


def marked(batch):
    """Fill every per-token field with values that tell where a token came from."""
    for offset, name in enumerate(TOKEN_FIELDS[2:]):
        setattr(batch, name, torch.arange(batch.num_tokens) + 1000.0 * offset)
    batch.routes = torch.arange(batch.num_tokens, dtype=torch.int16)[:, None, None]
    batch.prompt_routes = torch.zeros(len(batch.prompt_ids), 1, 1, dtype=torch.int16)
    return batch


def as_lists(batch):
    """Each rollout as (prompt, completion, per-token values), independent of how it is stored."""
    prompts, pieces = batch.prompts(), batch.completions()
    fields = [getattr(batch, name).split(batch.lengths.tolist()) for name in TOKEN_FIELDS[1:]]
    return [
        (prompts[g].tolist(), pieces[i].tolist(), [one[i].tolist() for one in fields])
        for i, g in enumerate(batch.groups.tolist())
    ]


def test_collate_stores_tokens_in_a_row_and_each_prompt_once():
    batch = collate(
        [
            rollout([1, 2], [10, 11], group=5),
            rollout([1, 2], [], group=5),
            rollout([3], [12], group=8, sampled=[False]),
        ]
    )
    assert batch.token_ids.tolist() == [10, 11, 12]
    assert batch.lengths.tolist() == [2, 0, 1]
    assert batch.sampled.tolist() == [True, True, False]
    assert batch.sampled_lengths.tolist() == [2, 0, 0]
    assert batch.prompt_ids.tolist() == [1, 2, 3]
    assert batch.prompt_lengths.tolist() == [2, 1]
    assert batch.groups.tolist() == [0, 0, 1]
    assert batch.engine_logprobs.tolist() == [-10 / 64, -11 / 64, -12 / 64]
    assert (len(batch), batch.num_tokens) == (3, 3)


def test_a_rollout_without_log_probs_has_nan_beside_others():
    silent = rollout([1], [11], logprobs=False)
    engine = collate([rollout([1], [10]), silent]).engine_logprobs
    assert engine[0] == -10 / 64 and engine[1].isnan()
    assert collate([silent, silent]).engine_logprobs is None


def test_a_rollout_without_tokens_implies_no_engine_fields():
    """One that failed before its first token has an empty list, whether the engine reports log-probs or not."""
    silent = rollout([1], [11], logprobs=False)
    assert collate([rollout([1], []), silent]).engine_logprobs is None
    assert collate([rollout([1], []), rollout([1], [11])]).engine_logprobs.tolist() == [-11 / 64]


def test_joining_fills_up_what_one_engine_alone_reported():
    told, untold = collate([rollout([1], [10])]), collate([rollout([2], [11], logprobs=False)])
    told.mismatch_weights = torch.tensor([0.5])
    both = join([told, untold])
    assert both.engine_logprobs[0] == -10 / 64 and both.engine_logprobs[1].isnan()
    assert both.mismatch_weights.tolist() == [0.5, 1.0]
    assert join([untold, untold]).engine_logprobs is None


def test_named_tokens_go_with_their_tokens_and_get_the_width_of_the_widest():
    batch = collate([rollout([1], [10, 11]), rollout([2], [12])])
    batch.named_ids = torch.tensor([[1, 2], [3, 4], [5, 6]])
    assert batch.select(torch.tensor([1, 0])).named_ids.tolist() == [[5, 6], [1, 2], [3, 4]]
    assert batch.idle().named_ids.tolist() == [[0, 0]]
    narrow, none = batch.select(torch.tensor([1])), collate([rollout([3], [13])])
    narrow.named_ids = torch.tensor([[7]])
    assert join([batch, narrow, none]).named_ids.tolist() == [[1, 2], [3, 4], [5, 6], [7, -1], [-1, -1]]
    assert TrainBatch.of_state(batch.state()).named_ids.tolist() == batch.named_ids.tolist()


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.TOOL_BUDGET])
def test_nothing_is_learned_from_masked_truncated_completions(finish):
    cut, whole = rollout([1], [10, 11], finish=finish), rollout([1], [12])
    assert collate([cut, whole], mask_truncated=True).sampled.tolist() == [False, False, True]
    assert collate([cut, whole]).sampled.tolist() == [True, True, True]


def test_siblings_may_begin_differently_and_strangers_alike():
    """What a forward pass may share is a matter of tokens, not of who is compared with whom."""
    batch = collate([rollout([1], [10]), rollout([2], [11]), rollout([1], [12], group=1)])
    assert batch.prompt_ids.tolist() == [1, 2]
    assert batch.groups.tolist() == [0, 1, 0]


@given(sampled=rollouts(), data=st.data())
def test_shares_of_processes_join_to_the_batch_of_one(sampled, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sampled)), max_size=2)))
    edges = [0, *cuts, len(sampled)]
    whole = collate(sampled)
    joined = join(
        [
            collate(
                sampled[a:b],
            )
            for a, b in pairwise(edges)
        ]
    )
    for name in ("token_ids", "lengths", "sampled", "prompt_ids", "prompt_lengths", "groups"):
        assert torch.equal(getattr(joined, name), getattr(whole, name)), name
    assert as_lists(marked(joined)) == as_lists(marked(whole))


def test_an_empty_batch_collates_selects_and_splits():
    batch = collate([])
    assert (len(batch), batch.num_tokens) == (0, 0)
    assert batch.split(2) == []
    assert len(batch.select(torch.zeros(0, dtype=torch.long))) == 0


@given(sampled=rollouts())
def test_collate_keeps_every_rollout(sampled):
    batch = collate(sampled)
    prompts = batch.prompts()
    for i, one in enumerate(sampled):
        assert prompts[batch.groups[i]].tolist() == one.prompt_ids
        assert batch.completions()[i].tolist() == one.completion_ids
    assert len(prompts) == len({tuple(one.prompt_ids) for one in sampled})


@given(sampled=rollouts(), data=st.data())
def test_select_returns_the_chosen_rollouts_whole_and_in_order(sampled, data):
    batch = marked(collate(sampled))
    rows = data.draw(st.lists(st.integers(0, len(sampled) - 1), max_size=8))
    chosen = batch.select(torch.tensor(rows, dtype=torch.long))
    everything = as_lists(batch)
    assert as_lists(chosen) == [everything[row] for row in rows]
    assert len(chosen.prompt_lengths) == len({tuple(sampled[row].prompt_ids) for row in rows})


@given(sampled=rollouts(), size=st.integers(1, 8))
def test_split_cuts_into_consecutive_parts_that_add_up(sampled, size):
    batch = marked(collate(sampled))
    parts = batch.split(size)
    assert [item for part in parts for item in as_lists(part)] == as_lists(batch)
    assert all(len(part) == size for part in parts[:-1])


def test_selection_keeps_absent_fields_and_the_threshold():
    batch = collate([rollout([1], [10], logprobs=False)])
    batch.entropy_threshold = 0.25
    part = batch.select(torch.tensor([0]))
    assert part.old_logprobs is None and part.weights is None and part.engine_logprobs is None
    assert part.entropy_threshold == 0.25


def test_a_batch_moves_and_saves_with_all_its_fields():
    batch = marked(collate([rollout([1, 2], [10, 11]), rollout([3], [12], group=1)]))
    batch.entropy_threshold = 0.25
    image = Media(("a picture",), {"pixels": torch.ones(2, 3)}, {"kinds": torch.tensor([0, 1])}, 0, 2, (1,))
    batch.media = [(image,), (image,)]
    for copy in (batch.to("cpu"), TrainBatch.of_state(batch.state())):
        assert as_lists(copy) == as_lists(batch)
        assert copy.entropy_threshold == 0.25
        assert copy.media is not None and copy.media[0][0] is copy.media[1][0]  # siblings share it
        assert torch.equal(copy.media[0][0].tensors["pixels"], torch.ones(2, 3))


def test_sampling_masks_move_with_their_tokens():
    def sampled(prompt, ids, masks):
        return replace(rollout(prompt, ids), sampling_mask=masks)

    batch = collate([sampled([1], [10, 11], [[10, 20], []]), sampled([1], [12], [[12]]), rollout([2], [13])])
    assert batch.kept_counts.tolist() == [2, 0, 1, 0]
    assert batch.kept_ids.tolist() == [10, 20, 12]
    chosen = TrainBatch.of_state(batch.select(torch.tensor([1, 0])).state())
    assert (chosen.kept_counts.tolist(), chosen.kept_ids.tolist()) == ([1, 2, 0], [12, 10, 20])
    joined = join([chosen, collate([rollout([1], [14])]), batch.idle()])
    assert (joined.kept_counts.tolist(), joined.kept_ids.tolist()) == ([1, 2, 0, 0, 0], [12, 10, 20])
    assert torch.equal(joined.silenced().kept_counts, joined.kept_counts)
    assert joined.select(torch.tensor([2])).kept_ids.tolist() == []
    assert collate([sampled([1], [10, 11], [[], []]), sampled([1], [], [])]).kept_counts is None  # all were kept
    assert collate([sampled([1], [10], [np.array([10, 20])])]).kept_ids.tolist() == [10, 20]
