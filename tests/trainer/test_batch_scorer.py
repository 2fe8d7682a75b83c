"""Scores of whole batches, in micro-batches, are those of one forward pass."""

import pytest
import torch

from covey.core.batch import collate
from tests.policy.test_scoring import rollouts
from tests.support import runs


@pytest.mark.filterwarnings("ignore:memory ran out")
@pytest.mark.parametrize("memory", ["suffices", "runs out"])
def test_named_and_likeliest_tokens_come_in_micro_batches(tmp_path, memory):
    trainer = runs.trainer(tmp_path, max_tokens_per_micro_batch=20)
    batch = collate(rollouts())
    batch.sampled[::4] = False
    batch.named_ids = torch.randint(-1, 100, (batch.num_tokens, 3), generator=torch.Generator().manual_seed(0))
    scorer, seen = trainer.batch_scorer.scorer, []
    with torch.no_grad():
        expected = scorer(trainer.policy, batch, entropy=True, named=batch.named_ids, top=2)

    def failing(model, part, **asked):
        if memory == "runs out" and len(part) > 2:
            raise MemoryError
        seen.append(len(part))
        return scorer(model, part, **asked)

    failing.unwrap = scorer.unwrap
    trainer.batch_scorer.scorer = failing
    scores = trainer.batch_scorer.scores(trainer.policy, batch, entropy=True, top=2)
    assert len(seen) > 1 and sum(seen) == len(batch)
    assert torch.equal(scores.top_ids, expected.top_ids)
    for ours, theirs in zip(scores, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_batch_without_rollouts_has_scores_of_no_tokens(tmp_path):
    scorer = runs.trainer(tmp_path).batch_scorer
    batch = collate(rollouts())
    batch.named_ids = torch.zeros(batch.num_tokens, 3, dtype=torch.long)
    empty = batch.select(torch.zeros(0, dtype=torch.long))
    scores = scorer.scores(scorer.run.policy, empty, top=2)
    assert {name: tuple(values.shape) for name, values in scores._asdict().items() if values is not None} == {
        "logprobs": (0,),
        "named": (0, 3),
        "top_ids": (0, 2),
        "top_logprobs": (0, 2),
    }
