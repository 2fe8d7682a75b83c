"""Scores that are worked out inside the model's own call of its head.

What shards a model over processes (FSDP2, DeepSpeed) works by hooks: a module is whole while it is called, and in the
backward pass from when the gradient reaches what came out of it until it has left what went in. So the head is asked
for its logits as usual and answers with scores: it sees all hidden states and looks at those that are wanted, its
weight is there, and every hook of the model, its head and its wrapper fires as in any other forward and backward pass.
Not here: how scores are computed (lm_head.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from covey.policy.lm_head.scores import TokenScores

Answer = Callable[[Tensor, Callable[[Tensor], Tensor]], TokenScores]
"""(hidden states [rows, width, H], the head's own forward) -> scores."""


def scores_inside(model: Any, head: Any, answer: Answer, **inputs: Any) -> TokenScores:
    """Run a model forward, with its head giving scores.

    Args:
        model: called with `inputs`; a wrapper of a causal language model, or one itself.
        head: its output embedding.
        answer: makes scores of what the head is called with.

    Raises:
        ValueError: the model does not call its head once.
    """
    found: list[TokenScores] = []

    def score(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found.append(answer(hidden, forward))
        return found[-1].logprobs.sum().to(hidden.dtype).expand(1, 1, 1).clone()  # hooks wait for a gradient of it

    with _forward_of(head, score) as forward:
        output = model(**inputs, use_cache=False)
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__} calls its head {len(found)} times in a forward pass; only models that call it once"
            " can be trained with FSDP or DeepSpeed. Train it with DDP, and please report the model."
        )
    logprobs, entropies = _Behind.apply(output.logits, *found[0])
    return TokenScores(logprobs, entropies)


@contextmanager
def _forward_of(module: Any, replacement: Callable[..., Tensor]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Another forward for a module, hooks and all, for the duration; gives its own."""
    own, had_one = module.forward, "forward" in vars(module)
    module.forward = replacement
    try:
        yield own
    finally:
        if had_one:
            module.forward = own
        else:
            del module.forward


class _Behind(torch.autograd.Function):
    """Scores as they are, whose gradients set out from the model's output, as hooks expect, with zeros for it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, logprobs: Tensor, entropies: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The same logprobs and entropies."""
        ctx.like = torch.empty(output.shape, dtype=output.dtype, device="meta"), output.device
        return logprobs.view_as(logprobs), None if entropies is None else entropies.view_as(entropies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Zeros for the output; the others' own."""
        like, device = ctx.like
        return torch.zeros_like(like, device=device), *grads
