"""A gathered policy is the policy, while somebody needs it; shards of two processes are in test_sharded_weights."""

import pytest
import torch

from covey.policy.full_copy import GatheredPolicy
from tests.support import tiny

IDS = torch.tensor([[5, 6, 7, 8]])


def test_the_twin_computes_what_the_policy_does_now_and_then_holds_nothing():
    policy = tiny.model()
    gathered = GatheredPolicy(policy, lambda: policy)
    with torch.no_grad():
        policy.model.layers[0].mlp.up_proj.weight.mul_(2)
    with gathered.whole(), torch.no_grad():
        torch.testing.assert_close(gathered.model(IDS).logits, policy(IDS).logits)
        assert gathered.model.lm_head.weight is gathered.model.model.embed_tokens.weight  # tied in the twin as well
    assert all(parameter.is_meta for parameter in gathered.model.parameters())


def test_it_lets_go_also_after_an_error():
    policy = tiny.model()
    gathered = GatheredPolicy(policy, lambda: policy)
    with pytest.raises(RuntimeError, match="halfway"), gathered.whole():
        raise RuntimeError("halfway")
    assert all(parameter.is_meta for parameter in gathered.model.parameters())


def test_matrices_are_kept_in_what_the_run_computes_in_and_vectors_as_they_are():
    policy = tiny.model()
    gathered = GatheredPolicy(policy, lambda: policy, torch.bfloat16)
    with gathered.whole():
        for parameter in gathered.model.parameters():
            assert parameter.dtype == (torch.bfloat16 if parameter.dim() > 1 else torch.float32)
