"""Gradients are averaged over processes."""

import torch
import torch.distributed as dist
from torch import nn

from covey.trainer.distributed.sharding import average_gradients


def test_a_sum_that_float16_cannot_hold_is_never_made(monkeypatch):
    # Two processes with the same gradient: 40,000 + 40,000 is more than float16's 65,504, the mean is not.
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda x, op=None: x if op == dist.ReduceOp.MAX else x.mul_(2))
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    parameter.grad = torch.tensor([40_000.0, -1.0, 0.5], dtype=torch.float16)
    average_gradients([parameter])
    assert parameter.grad.tolist() == [40_000.0, -1.0, 0.5]
