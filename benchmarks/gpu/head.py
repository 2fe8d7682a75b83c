"""Log-probs from hidden states, forward and backward: Covey's head against whole logits and `log_softmax`."""

from collections.abc import Callable
from typing import Any

from benchmarks.gpu.jobs import Job, free_memory
from benchmarks.gpu.timing import milliseconds, peak_bytes

SIZES = {"0.5B": (896, 151936), "1.5B": (1536, 151936), "7B": (3584, 152064), "tiny": (32, 512)}
"""Hidden size and vocabulary."""

TURNS = 7
COMPARED = 128
"""Positions that are computed again in float64."""

CHUNK = 1024
"""Default of `logprob_chunk_size`."""


def jobs(quick: bool) -> dict[str, list[str]]:
    """One process; cases are sizes and tokens."""
    return {"head": ["tiny 64"] if quick else [f"{s} {n}" for s in SIZES if s != "tiny" for n in (4096, 16384)]}


def measure(job: Job, case: str) -> dict[str, Any]:
    """Both ways: `ms` of forward and backward, `peak` bytes beyond the inputs, `difference` of log-probs and
    `gradient_difference` of hidden states to float64 (relative to the largest), `mfu` of the three products that are
    needed. None where memory ran out."""
    import torch

    size, count = case.split()
    (hidden_size, vocabulary), tokens = SIZES[size], int(count)
    torch.manual_seed(0)
    make: dict[str, Any] = {"device": job.device, "dtype": torch.bfloat16}
    hidden = torch.randn(tokens, hidden_size, **make).requires_grad_()
    head = torch.nn.Linear(hidden_size, vocabulary, bias=False, **make)
    torch.nn.init.normal_(head.weight, std=2 * hidden_size**-0.5)
    targets = torch.randint(vocabulary, (tokens,), device=job.device)
    weights = torch.randn(tokens, device=job.device)
    reference = _reference(hidden, head.weight, targets, weights)
    needed = 6 * tokens * hidden_size * vocabulary
    found: dict[str, Any] = {}
    for name, score in (("covey", _covey(head)), ("torch", _plain(head))):
        try:
            found[name] = _both_ways(job, score, hidden, head.weight, targets, weights, reference)
            found[name]["mfu"] = needed / (job.flops * found[name]["ms"] / 1e3)
        except torch.OutOfMemoryError:
            found[name] = None
        free_memory(job.device)
    if found["covey"] and found["torch"]:
        found["ratio"] = found["torch"]["ms"] / found["covey"]["ms"]
    return found


def _both_ways(
    job: Job, score: Callable[..., Any], hidden: Any, weight: Any, targets: Any, weights: Any, reference: Any
) -> dict[str, Any]:
    import torch

    def both() -> tuple[Any, Any]:
        logprobs = score(hidden, targets)
        return logprobs, torch.autograd.grad((logprobs * weights).sum(), (hidden, weight))[0]

    both()  # compiles, and tries what it compiled
    peak = peak_bytes(both, job.device)
    ms = milliseconds(both, job.device, 1 if job.quick else TURNS)
    found = [values[:COMPARED].double() for values in both()]
    differences = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, reference, strict=True)]
    return {"ms": ms, "peak": peak, "difference": differences[0], "gradient_difference": differences[1]}


def _covey(head: Any) -> Callable[..., Any]:
    from covey.policy.lm_head.scores import Head, score_hidden

    def score(hidden: Any, targets: Any) -> Any:
        return score_hidden(hidden, targets, Head(head), temperature=1.0, entropy=False, chunk_size=CHUNK).logprobs

    return score


def _plain(head: Any) -> Callable[..., Any]:
    def score(hidden: Any, targets: Any) -> Any:
        return head(hidden).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]

    return score


def _reference(hidden: Any, weight: Any, targets: Any, weights: Any) -> list[Any]:
    """Log-probs and the gradient of hidden states of the first positions, in float64."""
    import torch

    first = hidden[:COMPARED].detach().double().requires_grad_()
    logits = first @ weight.detach().double().T
    logprobs = logits.log_softmax(-1).gather(1, targets[:COMPARED, None])[:, 0]
    gradient = torch.autograd.grad((logprobs * weights[:COMPARED]).sum(), first)[0]
    return [logprobs.detach(), gradient]
