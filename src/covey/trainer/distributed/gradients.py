"""Mean of gradients over data-parallel processes, once per optimizer step: micro-batches need not be equally many."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 64 * 2**20  # size of the gradients in one collective


def average_gradients(parameters: list[nn.Parameter]) -> None:
    """Replace each gradient by its mean over all processes; a missing one counts as zero. Collective."""
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(present, op=dist.ReduceOp.MAX)
    used = [p for p, there in zip(parameters, present.tolist(), strict=True) if there]
    for parameter in used:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets([p.grad for p in used if p.grad is not None]):
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        flat /= dist.get_world_size()  # before they are added: the sum may be more than float16 holds
        dist.all_reduce(flat)
        for grad, mean in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(mean.view_as(grad))


def _buckets(grads: list[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive gradients of one dtype, at most `BUCKET_BYTES` together unless a single one is larger."""
    bucket: list[Tensor] = []
    size = 0
    for grad in grads:
        if bucket and (grad.dtype != bucket[0].dtype or size + grad.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += grad.nbytes
    if bucket:
        yield bucket
