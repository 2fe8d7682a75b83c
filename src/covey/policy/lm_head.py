"""Log-probabilities and entropies of chosen tokens, straight from hidden states.

The head is applied to the wanted positions alone, a chunk at a time, in float32 at least; logits of more than one chunk
never live at once, backward included. Whatever module is the model's output embedding is called as it is (a plain
linear, with LoRA, quantised).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class TokenScores(NamedTuple):
    """What a model says of each token, in nats: log-probabilities [N] and entropies [N] (None when not asked for)."""

    logprobs: Tensor
    entropies: Tensor | None


def score_hidden(
    hidden: Tensor,
    targets: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    *,
    temperature: float,
    entropy: bool,
    chunk_size: int,
) -> TokenScores:
    """Score targets [N] given the hidden states [N, H] that predict them.

    Args:
        logits_of: hidden [n, H] -> logits [n, V].
        temperature: divides the logits.
        entropy: also return the entropy of each position's distribution.
        chunk_size: positions whose logits live at once.
    """

    def score(states: Tensor, chunk: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits_of(states)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return LogprobAndEntropy.apply(wide / temperature, chunk, entropy)

    keep = not torch.is_grad_enabled() or len(targets) <= chunk_size
    parts = []
    for states, chunk in zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True):
        parts.append(score(states, chunk) if keep else checkpoint(score, states, chunk, use_reentrant=False))
    logprobs, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
    return TokenScores(logprobs, entropies if entropy else None)


class LogprobAndEntropy(torch.autograd.Function):
    """log p(target) and H(p) of p = softmax(logits), with few passes over the logits.

    d log p_y / dz = 1[y] - p;   dH / dz = -p (log p + H).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        """logits [n, V] float32 or wider, targets [n] int64 -> ([n], [n]); zeros for entropies when not asked for."""
        log_z = logits.logsumexp(-1)
        logprobs = logits.gather(-1, targets[:, None])[:, 0] - log_z
        if entropy:
            probs = (logits - log_z[:, None]).exp_()
            entropies = log_z - torch.linalg.vecdot(probs, logits.nan_to_num(neginf=0.0))
        else:
            entropies = torch.zeros_like(log_z)
        ctx.save_for_backward(logits, targets, log_z, entropies)
        ctx.entropy = entropy
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Gradient of the logits, [n, V]."""
        grad_logprobs, grad_entropies = grads
        logits, targets, log_z, entropies = ctx.saved_tensors
        log_p = logits - log_z[:, None]
        probs = log_p.exp()
        if ctx.entropy:
            scale = log_p.nan_to_num_(neginf=0.0).add_(entropies[:, None]).mul_(-grad_entropies[:, None])
            grad = probs.mul_(scale.sub_(grad_logprobs[:, None]))
        else:
            grad = probs.mul_(-grad_logprobs[:, None])
        grad.scatter_add_(-1, targets[:, None], grad_logprobs[:, None])
        return grad, None, None


def head_of(model: Any, *, float32: bool = False) -> Callable[[Tensor], Tensor]:
    """hidden [n, H] -> logits [n, V] as the model itself computes them: scaling and soft-capping included.

    Args:
        model: an unwrapped causal language model.
        float32: multiply in float32 whatever the weights' type (`cast_lm_head_to_fp32`).
    """
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    scale = scale / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)

    def logits_of(hidden: Tensor) -> Tensor:
        logits = _float32_linear(head, hidden) if float32 else head(hidden)
        if scale != 1.0:
            logits = logits * scale
        return torch.tanh(logits / cap) * cap if cap else logits

    return logits_of


def _float32_linear(head: Any, hidden: Tensor) -> Tensor:
    if type(head) is not nn.Linear:
        raise ValueError(
            f"cast_lm_head_to_fp32 needs a plain linear head, and this model's is a {type(head).__name__} (an adapter"
            " or quantised weights). Set cast_lm_head_to_fp32=False, or keep the head out of the adapter."
        )
    with torch.autocast(hidden.device.type, enabled=False):
        bias = None if head.bias is None else head.bias.float()
        return nn.functional.linear(hidden.float(), head.weight.float(), bias)
