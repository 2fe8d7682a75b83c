"""Attention of token trees, forward and backward: Covey's rows against torch's attention on padded rows.

The padded rows have each completion's prompt again and are attended to causally without a mask, which is the fastest
that torch has. Compiled kernels are not taken from a cache, so that the first call shows what a new machine pays.
"""

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.jobs import Job, free_memory
from benchmarks.gpu.timing import milliseconds, peak_bytes, synchronize
from benchmarks.workloads import WORKLOADS, Workload

HEADS, KEY_HEADS, SIZE = 12, 2, 128
"""Of Qwen2.5-1.5B."""

TURNS = 11
LARGE = {
    "4 groups of 512 + 16 x 64": WORKLOADS["W2"],
    "8 groups of 64 + 8 x 128": WORKLOADS["W1"],
    "1 group of 4096 + 16 x 256": Workload("long", 4096, 1, 16, 256),
    "1 group of 512 + 16 x 64": Workload("W2", 512, 1, 16, 64),
    "8 groups of 128 + 8 x geometric, mean 48": WORKLOADS["W3"],
    "4 groups of 256 + 16 x geometric, mean 200": Workload("uneven", 256, 4, 16, 200, cap=1024),
}
TINY = {"2 groups of 8 + 2 x geometric, mean 4": Workload("tiny", 8, 2, 2, 4, cap=8)}


def jobs(quick: bool) -> dict[str, list[str]]:
    """One process, so that a case meets what the ones before have compiled."""
    return {"attention": list(TINY if quick else LARGE)}


def measure(job: Job, case: str) -> dict[str, Any]:
    """Both ways: `first_seconds` with compilation, `ms` of forward and backward, `peak` bytes beyond the inputs, and
    `difference`: the largest of output and gradients from a float32 computation, relative to the largest number."""
    if not job.quick:
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            os.environ.setdefault(name, tempfile.mkdtemp())
    import torch

    workload = (TINY if job.quick else LARGE)[case]
    groups = workload.grouped(workload.lengths(1))
    torch.manual_seed(0)
    tokens = sum(workload.prompt_tokens + sum(lengths) for lengths in groups)
    row = [_random(job, heads, tokens) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    rows = _rows(workload.prompt_tokens, groups)
    reference = _gradients(lambda q, k, v: _by_rows(q, k, v, rows), [x.float() for x in row], job.device)
    found: dict[str, Any] = {"tokens": tokens, "padded_tokens": len(rows) * _longest(rows)}
    found["covey"] = _covey(job, row, workload.prompt_tokens, groups, reference)
    free_memory(job.device)
    found["torch"] = _padded(job, row, rows, reference)
    found["ratio"] = found["torch"]["ms"] / found["covey"]["ms"]
    return found


def _random(job: Job, heads: int, tokens: int, rows: int = 1) -> Any:
    import torch

    return torch.randn(rows, heads, tokens, SIZE, device=job.device, dtype=torch.bfloat16)


def _covey(job: Job, row: list[Any], prompt: int, groups: list[list[int]], reference: list[Any]) -> dict[str, Any]:
    from torch import nn

    from covey.policy.attention import TokenTree, packed_attention

    lengths: list[int] = []
    parents: list[int] = []
    for group in groups:
        parents += [-1, *[len(parents)] * len(group)]
        lengths += [prompt, *group]

    tree = TokenTree(lengths, parents)  # with what is derived from it, built once for all layers of a pass

    def attend(query: Any, key: Any, value: Any) -> Any:
        return packed_attention(nn.Module(), query, key, value, None, token_tree=tree)[0].transpose(1, 2)

    return _timed(job, attend, row) | {"difference": _difference(_gradients(attend, row, job.device), reference)}


def _padded(job: Job, row: list[Any], rows: list[tuple[list[int], int]], reference: list[Any]) -> dict[str, Any]:
    padded = [_random(job, x.shape[1], _longest(rows), len(rows)) for x in row]
    timed = _timed(job, _causal, padded)
    own = _gradients(lambda q, k, v: _by_rows(q, k, v, rows), row, job.device)
    return timed | {"difference": _difference(own, reference)}


def _timed(job: Job, attend: Callable[..., Any], inputs: list[Any]) -> dict[str, Any]:
    start = time.perf_counter()
    _gradients(attend, inputs, job.device)
    first = time.perf_counter() - start

    def call() -> list[Any]:
        return _gradients(attend, inputs, None)

    peak = peak_bytes(call, job.device)
    return {"first_seconds": first, "ms": milliseconds(call, job.device, 1 if job.quick else TURNS), "peak": peak}


def _gradients(attend: Callable[..., Any], inputs: list[Any], device: str | None) -> list[Any]:
    """Output, and gradients of query, key and value for a given gradient of the output; waits for `device` if any."""
    import torch

    *attended, weights = inputs
    query, key, value = (x.detach().requires_grad_() for x in attended)
    out = attend(query, key, value)
    result = [out.detach(), *torch.autograd.grad(out, (query, key, value), weights.to(out.dtype))]
    if device:
        synchronize(device)
    return result


def _causal(query: Any, key: Any, value: Any) -> Any:
    from torch.nn.functional import scaled_dot_product_attention

    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _rows(prompt: int, groups: list[list[int]]) -> list[tuple[list[int], int]]:
    """Places in the packed row of each sequence's tokens, and how many of them the group's first one has as well."""
    rows, start = [], 0
    for group in groups:
        shared = list(range(start, start + prompt))
        start += prompt
        for number, length in enumerate(group):
            rows.append((shared + list(range(start, start + length)), prompt if number else 0))
            start += length
    return rows


def _longest(rows: list[tuple[list[int], int]]) -> int:
    return max(len(indices) for indices, _ in rows)


def _by_rows(query: Any, key: Any, value: Any, rows: list[tuple[list[int], int]]) -> Any:
    """Attention of each sequence alone; every token's output is where the token is in the packed row."""
    import torch

    places, outputs = [], []
    for indices, repeated in rows:
        at = torch.tensor(indices, device=query.device)
        attended = _causal(query[:, :, at], key[:, :, at], value[:, :, at])
        places.append(at[repeated:])
        outputs.append(attended[:, :, repeated:])
    return torch.zeros_like(query).index_copy(2, torch.cat(places), torch.cat(outputs, 2))


def _difference(found: list[Any], reference: list[Any]) -> float:
    pairs = zip(found, reference, strict=True)
    return max(((a.float() - b).abs().max() / b.abs().max()).item() for a, b in pairs)
