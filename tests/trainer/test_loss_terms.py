"""Terms of the loss that look at all of a step's tokens at once."""

from types import SimpleNamespace

import torch

from covey.core.batch import TrainBatch, collate
from covey.core.records import FinishReason, Rollout
from covey.observability.metrics import MetricLog
from covey.trainer.distributed.collectives import Collectives
from covey.trainer.loss_terms import choose_tokens


def test_tokens_are_chosen_in_time_that_grows_with_the_rollouts(monkeypatch):
    """The prompts of a batch are split once, and not for each completion."""
    batch = collate([Rollout([1, 2], [3, 4], [True, False], None, "", FinishReason.STOP) for _ in range(16)])
    batch.advantages = torch.zeros(32)
    split, calls = TrainBatch.prompts, []
    monkeypatch.setattr(TrainBatch, "prompts", lambda self: calls.append(1) or split(self))
    context = SimpleNamespace(
        args=SimpleNamespace(seed=0),
        step=0,
        mode="train",
        loop=SimpleNamespace(policy=None),
        metrics=MetricLog(),
        collectives=Collectives(rank=0, size=1, seconds=1.0, step=lambda: 0),
    )
    behaviour = SimpleNamespace(context=context, logprobs=lambda policy, batch: torch.zeros(batch.num_tokens))
    chosen = choose_tokens(behaviour, batch, lambda logprobs, advantages, keys: torch.arange(len(keys)) < 4)
    assert chosen.tolist() == [True, False] * 4 + [False, False] * 12
    assert len(calls) == 1
