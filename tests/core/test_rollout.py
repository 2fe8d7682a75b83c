"""Rollouts that are put together by hand: what belongs to tokens has a value for each."""

import pytest

from covey.core.records import FinishReason, Rollout


def rollout(**changes):
    """Of two tokens, the second one sampled."""
    fields = {"prompt_ids": [1], "completion_ids": [2, 3], "sampled": [False, True], "logprobs": [0.0, -0.5]}
    return Rollout(**{**fields, "completion": "x", "finish": FinishReason.STOP, **changes})


@pytest.mark.parametrize("name", ["sampled", "logprobs", "entropies", "versions"])
def test_a_list_of_another_length_is_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"of 2 completion_ids was given 3 {name}: give one for each token"):
        rollout(**{name: [0, 0, 0]})


@pytest.mark.parametrize("ends", [[2], [-1], [0, 5]])
def test_turns_end_at_tokens_of_the_completion(ends):
    with pytest.raises(ValueError, match=r"turn_ends=\[.*\]: give the index of the last token of each turn"):
        rollout(turn_ends=ends)


def test_lists_that_fit_are_taken():
    assert rollout(turn_ends=[1], entropies=[0.0, 1.0], versions=[0, 0]).num_sampled == 1
