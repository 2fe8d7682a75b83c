"""What the layouts put into a row: which tokens, at which positions, predicted by which states."""

import random

import pytest
import torch

from covey.core.batch import collate
from covey.core.records import FinishReason, Rollout
from covey.policy.layouts import LAYOUTS, WORTH_SHARING
from covey.policy.scoring import TokenScorer
from tests.support import tiny


def batch_of(*groups):
    """Groups as (prompt ids, completions' ids)."""
    return collate(
        [
            Rollout(prompt, completion, [True] * len(completion), None, "", FinishReason.STOP, group=group)
            for group, (prompt, completions) in enumerate(groups)
            for completion in completions
        ]
    )


def row(layout, batch):
    inputs = LAYOUTS[layout](batch, 0)
    kwargs = inputs.kwargs
    return kwargs["input_ids"][0].tolist(), kwargs["position_ids"][0].tolist(), inputs.predictors.tolist()


TWO_GROUPS = batch_of(([11, 12], [[1, 2, 3], [], [4]]), ([13], [[5, 6]]))


def test_packed_rows_repeat_the_prompt():
    ids, positions, predictors = row("packed", TWO_GROUPS)
    assert ids == [11, 12, 1, 2, 3, 11, 12, 11, 12, 4, 13, 5, 6]
    assert positions == [0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 0, 1, 2]
    assert predictors == [1, 2, 3, 8, 10, 11]


def test_shared_rows_hold_a_prompt_once():
    ids, positions, predictors = row("shared_prefix", TWO_GROUPS)
    assert ids == [11, 12, 1, 2, 3, 4, 13, 5, 6]
    assert positions == [0, 1, 2, 3, 4, 2, 0, 1, 2]
    # Of the first group, [1, 2, 3] and [4]: both begin after the prompt's last token, at place 1.
    assert predictors == [1, 2, 3, 1, 6, 7]


COMMON = list(range(20, 20 + WORTH_SHARING))


def test_common_beginning_is_stored_once():
    batch = batch_of(([11], [[*COMMON, 1], [2], [*COMMON, 3, 4], COMMON]))
    ids, positions, predictors = row("shared_prefix", batch)
    k = WORTH_SHARING
    assert sorted(ids) == sorted([11, 2, *COMMON, 1, 3, 4])
    shared = ids.index(COMMON[0])
    assert positions[shared : shared + k] == list(range(1, 1 + k))
    along = [0, *range(shared, shared + k)]
    assert predictors[: k + 1] == along
    assert predictors[k + 1] == 0
    assert predictors[k + 2 :] == [*along, ids.index(3), *along[:k]]


def test_a_few_tokens_in_common_are_not_worth_a_branch():
    few = COMMON[:-1]
    ids, _, _ = row("shared_prefix", batch_of(([11], [[*few, 1], [*few, 3]])))
    assert ids == [11, *few, 1, *few, 3]


@pytest.mark.parametrize("seed", range(4))
def test_branching_changes_neither_scores_nor_gradients(seed):
    chance = random.Random(seed)

    def ids(count):
        return [chance.randrange(4, 100) for _ in range(count)]

    def continued(stem, depth):
        """A stem's completions: itself, and others that part from it after different numbers of tokens."""
        out = [stem]
        for _ in range(chance.randint(1, 2) if depth else 0):
            out += continued(stem[: chance.randint(0, len(stem))] + ids(chance.randint(0, 12)), depth - 1)
        return out

    completions = continued(ids(30), 3)
    batch = batch_of((ids(3), [*completions, completions[0], []]), (ids(2), [ids(4)]))
    model = tiny.model().double()
    results = {}
    for layout in ("shared_prefix", "packed"):
        model.zero_grad()
        logprobs = TokenScorer(lambda m: m, temperature=1.0, layout=layout)(model, batch).logprobs
        (logprobs * torch.linspace(-1, 1, len(logprobs), dtype=logprobs.dtype)).sum().backward()
        results[layout] = [logprobs, *(p.grad for p in model.parameters())]
    assert LAYOUTS["shared_prefix"](batch, 0).kwargs["input_ids"].numel() < batch.num_tokens
    for mine, theirs in zip(results["shared_prefix"], results["packed"], strict=True):
        # Norms round to float32 in their backward pass, before shared tokens' gradients are summed or after.
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=3e-5)
    torch.testing.assert_close(results["shared_prefix"][0], results["packed"][0], rtol=0, atol=1e-10)
