"""Samples to score and a context that remembers what was logged."""

import pytest

from covey.core.records import FinishReason, Rollout
from covey.rewards import RewardContext


def make_rollout(completion, ids=(1, 2), **extras):
    ids = list(ids)
    return Rollout([7], ids, [True] * len(ids), None, completion, FinishReason.STOP, extras=extras)


class RecordingContext(RewardContext):
    """What the trainer would be told."""

    def __init__(self, trainer_state=None):
        object.__setattr__(self, "extras", {})
        object.__setattr__(self, "metrics", [])
        super().__init__(trainer_state, self.extras.__setitem__, lambda name, value: self.metrics.append((name, value)))


@pytest.fixture
def rollout():
    return make_rollout


@pytest.fixture
def context():
    return RecordingContext()


@pytest.fixture
def score(context):
    """`score(suite, completions, column=[...])` -> the reward matrix as nested lists, NaN as None, plus the stats."""

    def run(suite, completions, prompts=None, ids=None, **columns):
        size = len(completions)
        prompts = prompts or ["question"] * size
        ids = ids or [[1, 2]] * size
        rows = [{"prompt": prompts[i], **{name: values[i] for name, values in columns.items()}} for i in range(size)]
        rollouts = [make_rollout(text, token_ids) for text, token_ids in zip(completions, ids, strict=True)]
        result = suite(rows, rollouts, context)
        assert result.rewards.shape == (size, len(suite.names))
        matrix = [[None if value != value else value for value in row] for row in result.rewards.tolist()]
        return matrix, {name: stat.value() for name, stat in result.stats.items()}

    return run
