"""Log-probabilities and entropies of chosen tokens, straight from hidden states.

The head is applied to the wanted positions alone, sums are taken in float32 at least, and the logits of all positions
never live at once, backward included. A plain linear head is multiplied out by tiles (lm_head_linear.py). Any other
(LoRA on the head, quantised weights, a module with hooks) is called as it is, a chunk of tokens at a time, and called
again in the backward pass.

The weight is the one that the head holds when it is scored. Under DDP that is the parameter itself, after the model's
own forward pass. Where the head is whole only while it is called (FSDP2, ZeRO-3), scoring takes place inside its call
(inside.py). Gradients go to that parameter by autograd, so a tied embedding gets both of its parts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from covey.policy.lm_head.linear import LinearHead, plan_of
from covey.policy.lm_head.torch_tiles import Curve, Places, RowGradients, RowSums, TorchTiles

CHUNK_BYTES = 256 * 2**20
"""The most that the float32 logits of a chunk take where the head is called as a module."""


class TokenScores(NamedTuple):
    """What a model says of each token, in nats: log-probabilities [N] and entropies [N] (None when not asked for)."""

    logprobs: Tensor
    entropies: Tensor | None

    def among(self, places: Tensor, count: int) -> "TokenScores":
        """Scores of `count` tokens: these at `places` [N], 0 everywhere else."""

        def spread(values: Tensor) -> Tensor:
            return values.new_zeros(count).index_copy(0, places, values)

        return TokenScores(spread(self.logprobs), None if self.entropies is None else spread(self.entropies))


@dataclass(frozen=True)
class Head:
    """How a model turns hidden states [n, H] into logits [n, V]; call it to do so.

    Attributes:
        module: the model's output embedding.
        scale: multiplies what the module gives.
        soft_cap: then z -> cap * tanh(z / cap), if any.
        float32: multiply in float32 whatever the weights' type.
        forward: what the module does when it is called, without its hooks: for whoever is inside its call.
    """

    module: Callable[[Tensor], Tensor]
    scale: float = 1.0
    soft_cap: float | None = None
    float32: bool = False
    forward: Callable[[Tensor], Tensor] | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [n, H] -> logits [n, V]."""
        call = self.forward or self.module
        logits = _float32_linear(self.module, hidden) if self.float32 else call(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        return torch.tanh(logits / self.soft_cap) * self.soft_cap if self.soft_cap else logits


def head_of(model: Any, *, float32: bool = False) -> Head:
    """The head as the model itself applies it: scaling and soft-capping included.

    Args:
        model: an unwrapped causal language model.
        float32: multiply in float32 whatever the weights' type (`cast_lm_head_to_fp32`).
    """
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    scale = scale / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return Head(model.get_output_embeddings(), scale, cap, float32)


def score_hidden(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    *,
    temperature: float,
    entropy: bool,
    chunk_size: int,
) -> TokenScores:
    """Score targets [N] given the hidden states [N, H] that predict them.

    Args:
        head: hidden [n, H] -> logits [n, V].
        temperature: divides the logits.
        entropy: also return the entropy of each position's distribution.
        chunk_size: the most positions whose logits live at once.

    Accuracy: sums are taken in float32, or float64 with float64 weights. With half-precision weights the products are
    accumulated in float32 and rounded once, as in the model itself, so a log-prob is good to 2^-8 (bfloat16) or 2^-11
    (float16) of the largest logit; `float32` heads multiply in float32 and have no such error.

    Raises:
        ValueError: the head holds a shard of its weight alone.
    """
    refuse_sharded(head.module)
    linear = plain_linear(head.module, called=head.forward is not None)
    if linear is None:
        return _score_by_calls(hidden, targets, head, temperature, entropy, chunk_size)
    device = hidden.device.type
    if head.float32:
        compute = torch.promote_types(linear.weight.dtype, torch.float32)
    else:
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else linear.weight.dtype
    curve = Curve.of(head.scale, head.soft_cap, temperature)
    weight, bias = linear.weight, linear.bias
    plan = plan_of(hidden, weight, bias, curve, entropy=entropy, compute=compute, chunk_size=chunk_size)
    return TokenScores(*LinearHead.apply(hidden, weight, bias, targets, plan))


def refuse_sharded(module: Any) -> None:
    """A head whose weight is spread over processes cannot multiply plain hidden states.

    Raises:
        ValueError: the weight is a distributed tensor.
    """
    if hasattr(getattr(module, "weight", None), "full_tensor"):
        raise ValueError(
            "The LM head's weight is sharded when tokens are scored: FSDP2 gave it back after the model's forward pass."
            " Score within that pass: TokenScorer(..., inside=True)."
        )


def plain_linear(module: Any, *, called: bool = False) -> nn.Linear | None:
    """The module, if calling it is hidden @ weight.T + bias and nothing else.

    Args:
        module: a model's head.
        called: asked from inside its call, where hooks have done their work, and `forward` may be the asker's.
    """
    hooked = any(
        getattr(module, hooks, None)
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    )
    if not _is_linear(module) or (not called and (hooked or "forward" in vars(module))):
        return None
    return module if type(module.weight.data) is Tensor else None  # no tensor that multiplies in a way of its own


def _is_linear(module: Any) -> bool:
    """Whether it multiplies as `nn.Linear` does. FSDP2 gives what it shards a class of its own."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _score_by_calls(
    hidden: Tensor, targets: Tensor, head: Head, temperature: float, entropy: bool, chunk_size: int
) -> TokenScores:
    """Through the head's own forward, whatever that is."""
    size = chunk_size
    words = getattr(head.module, "out_features", None)
    if words:
        size = max(1, min(chunk_size, CHUNK_BYTES // (4 * words)))
    if head.forward is not None:
        size = max(1, len(targets))  # its parts may be sharded too, and all processes must call them equally often
    again = torch.is_grad_enabled() and len(targets) > size

    def score(states: Tensor, chunk: Tensor, known: list[RowSums]) -> tuple[Tensor, Tensor | None]:
        return LogprobAndEntropy.apply(head(states), chunk, entropy, temperature, known)

    parts: list[tuple[Tensor, Tensor | None]] = []
    for states, chunk in zip(hidden.split(size), targets.split(size), strict=True):
        known: list[RowSums] = []
        parts.append(
            checkpoint(score, states, chunk, known, use_reentrant=False) if again else score(states, chunk, known)
        )
    logprobs = torch.cat([part[0] for part in parts])
    return TokenScores(logprobs, torch.cat([part[1] for part in parts if part[1] is not None]) if entropy else None)


class LogprobAndEntropy(torch.autograd.Function):
    """log p(target) and H(p) of p = softmax(logits / temperature), with few passes over the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, entropy: bool, temperature: float, known: list[RowSums]
    ) -> tuple[Tensor, Tensor | None]:
        """logits [n, V], targets [n] int64 -> log-probs [n] and entropies [n] or None, float32 or wider.

        Args:
            known: keeps the rows' sums, so that a recomputation in the backward pass needs none of these passes.
        """
        ctx.curve = Curve.of(1.0, None, temperature)
        if not known:
            known.append(_sums_of(logits, targets, ctx.curve, entropy))
        sums = known[0]
        logprobs, entropies = sums.logprobs(), sums.entropies()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, targets, sums.log_z(), logprobs, entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradient of the logits, [n, V]."""
        logits, targets, log_z, logprobs, entropies = ctx.saved_tensors
        rows = RowGradients.of(log_z, logprobs, entropies, *grads)
        x = _scaled(logits, ctx.curve)
        grad = _tiles_for(x).gradient(x, Places.of(targets, 0, x.shape[1]), rows)
        grad.mul_((rows.factor() * ctx.curve.gain)[:, None])
        return grad.to(logits.dtype), None, None, None, None


def _sums_of(logits: Tensor, targets: Tensor, curve: Curve, entropy: bool) -> RowSums:
    x = _scaled(logits, curve)
    sums = RowSums.before_any(len(x), x, entropy)
    _tiles_for(x).add(x, Places.of(targets, 0, x.shape[1]), sums)
    return sums


def _scaled(logits: Tensor, curve: Curve) -> Tensor:
    """A copy in float32 or wider, times the gain."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.mul(logits, curve.gain, out=torch.empty_like(logits, dtype=wide))


def _tiles_for(x: Tensor) -> TorchTiles:
    """Arithmetic on whole rows, whose scaling is already done."""
    return TorchTiles(Curve(), minus_inf=True, room=x.numel(), wide=x.dtype, device=x.device)


def _float32_linear(head: Any, hidden: Tensor) -> Tensor:
    if not _is_linear(head):
        raise ValueError(
            f"cast_lm_head_to_fp32 needs a plain linear head, and this model's is a {type(head).__name__} (an adapter"
            " or quantised weights). Set cast_lm_head_to_fp32=False, or keep the head out of the adapter."
        )
    with torch.autocast(hidden.device.type, enabled=False):
        bias = None if head.bias is None else head.bias.float()
        return nn.functional.linear(hidden.float(), head.weight.float(), bias)
