"""A gathered policy is the policy, while somebody needs it; shards of two processes are in test_sharded_weights."""

import pytest
import torch

from covey.policy.replicas import FullCopy
from tests.support import tiny

IDS = torch.tensor([[5, 6, 7, 8]])


def test_full_copy_equals_the_policy_and_is_released():
    policy = tiny.model()
    gathered = FullCopy(policy, lambda: policy)
    with torch.no_grad():
        policy.model.layers[0].mlp.up_proj.weight.mul_(2)
    with gathered.weights(), torch.no_grad():
        torch.testing.assert_close(gathered.model(IDS).logits, policy(IDS).logits)
        assert gathered.model.lm_head.weight is gathered.model.model.embed_tokens.weight  # tied in the twin as well
    assert all(parameter.is_meta for parameter in gathered.model.parameters())


def test_full_copy_is_released_after_an_error():
    policy = tiny.model()
    gathered = FullCopy(policy, lambda: policy)
    with pytest.raises(RuntimeError, match="halfway"), gathered.weights():
        raise RuntimeError("halfway")
    assert all(parameter.is_meta for parameter in gathered.model.parameters())


def test_full_copy_casts_matrices_and_no_vectors():
    policy = tiny.model()
    gathered = FullCopy(policy, lambda: policy, torch.bfloat16)
    with gathered.weights():
        for parameter in gathered.model.parameters():
            assert parameter.dtype == (torch.bfloat16 if parameter.dim() > 1 else torch.float32)
