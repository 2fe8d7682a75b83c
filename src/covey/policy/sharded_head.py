"""Scores computed inside the model's call of its head, for sharded models.

FSDP2 and DeepSpeed work by hooks: a module is whole while it is called, and in the backward pass from the arrival of
its output's gradient until that of its input is computed. So the head's forward is replaced by one that returns scores:
it gets all hidden states, its weight is whole, and every hook of the model, its head and its wrapper runs as in any
other forward and backward pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from covey.policy.lm_head.scores import TokenScores

ScoreFunction = Callable[[Tensor, Callable[[Tensor], Tensor]], TokenScores]
"""(hidden states [rows, width, H], the head's own forward) -> scores."""


def score_in_head_call(model: Any, head: Any, score: ScoreFunction, **inputs: Any) -> TokenScores:
    """Run a model forward with scores in place of its head's logits.

    Args:
        model: called with `inputs`; a wrapper of a causal language model, or one itself.
        head: its output embedding.
        score: computes scores from the head's input.

    Raises:
        ValueError: the model does not call its head once.
    """
    found: list[TokenScores] = []

    def forward_with_scores(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found.append(score(hidden, forward))
        return found[-1].logprobs.sum().to(hidden.dtype).expand(1, 1, 1).clone()  # hooks need a gradient of it

    with _patched_forward(head, forward_with_scores) as forward:
        output = model(**inputs, use_cache=False)
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__} calls its head {len(found)} times in a forward pass; only models that call it once"
            " can be trained with FSDP or DeepSpeed. Train it with DDP, and please report the model."
        )
    logprobs, entropies = _WithOutput.apply(output.logits, *found[0])
    return TokenScores(logprobs, entropies)


@contextmanager
def _patched_forward(module: Any, replacement: Callable[..., Tensor]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Replace a module's forward within the context, with its hooks; gives the original."""
    original, patched = module.forward, "forward" in vars(module)
    module.forward = replacement
    try:
        yield original
    finally:
        if patched:
            module.forward = original
        else:
            del module.forward


class _WithOutput(torch.autograd.Function):
    """Identity on scores that ties them to the model's output, so that its backward hooks run; its gradient is zero."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, logprobs: Tensor, entropies: Tensor | None) -> tuple[Tensor, Tensor | None]:
        ctx.like = torch.empty(output.shape, dtype=output.dtype, device="meta"), output.device
        return logprobs.view_as(logprobs), None if entropies is None else entropies.view_as(entropies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        like, device = ctx.like
        return torch.zeros_like(like, device=device), *grads
