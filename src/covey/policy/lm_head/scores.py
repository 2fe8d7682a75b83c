"""Log-probabilities and entropies of given tokens, computed from hidden states.

The logits of all positions are never in memory together, not even in backward. A plain linear head is computed by tiles
(linear.py). Any other head (with LoRA, quantised weights or hooks) is called for a chunk of positions at a time, and
again in the backward pass. If the head is sharded and whole only while it is called (FSDP2, ZeRO-3), scoring takes
place inside that call.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from covey.core.findings import CheckError
from covey.core.model import patched_forward
from covey.core.routing import RouteReading
from covey.policy.lm_head.linear import LinearHead, outputs_of, plan_of
from covey.policy.lm_head.support import SampledSupport, TileSupport
from covey.policy.lm_head.teacher import TeacherHead, TeacherRows
from covey.policy.lm_head.torch_tiles import (
    Curve,
    DivergenceGradients,
    RowGradients,
    RowSums,
    TargetColumns,
    TorchTiles,
)
from covey.policy.sharded_tensors import full_tensor, is_shard

CHUNK_BYTES = 256 * 2**20  # most bytes of a chunk's float32 logits if the head is called as a module


class TokenScores(NamedTuple):
    """Scores of N tokens, in nats; all but the log-probs are None unless asked for.

    `named` and `top_logprobs` are -inf where there is no token: the id is -1, no logit of the head belongs to it, or it
    could not be sampled (sampling mask). Mask them before multiplying: 0 * -inf is NaN. A gradient that arrives at such
    an entry of `named` is discarded, even if it is NaN, so that one `torch.where` over the result is enough.

    Example:
        The mass of K named tokens and of all others: `mass = scores.named.exp().sum(1)`, `tail = 1 - mass`.
    """

    logprobs: Tensor  # [N] log-probabilities of the tokens
    entropies: Tensor | None = None  # [N] of their distributions
    named: Tensor | None = None  # [N, K] log-probabilities of the named tokens, with gradients
    divergence: Tensor | None = None  # [N] from each token's teacher over the whole vocabulary, with gradients
    top_ids: Tensor | None = None  # [N, T] int64, the likeliest tokens, in descending order; -1 where there are fewer
    top_logprobs: Tensor | None = None  # [N, T] their log-probabilities, without gradients
    hidden: Tensor | None = None  # [N, H] hidden states that the head has read, in the model's dtype, without gradients
    routes: RouteReading | None = None  # routes of the forward pass, where they were replayed or read

    def scattered(self, indices: Tensor, count: int) -> "TokenScores":
        """Scores of `count` tokens: these at `indices` [N], and `UNSCORED` everywhere else."""

        def spread(name: str, values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            return values.new_full((count, *values.shape[1:]), UNSCORED[name]).index_copy(0, indices, values)

        every = {name: spread(name, getattr(self, name)) for name in UNSCORED}
        return TokenScores(**every, routes=self.routes)  # type: ignore[arg-type]  # there are log-probs


UNSCORED = {
    "logprobs": 0.0,
    "entropies": 0.0,
    "named": -math.inf,
    "divergence": 0.0,
    "top_ids": -1,
    "top_logprobs": -math.inf,
    "hidden": 0.0,
}
"""Values of `TokenScores` at tokens that are not scored."""


@dataclass(frozen=True)
class Head:
    """Map from hidden states [n, H] to logits [n, V]."""

    module: Callable[[Tensor], Tensor]  # the model's output embedding
    scale: float = 1.0  # multiplies the module's output
    soft_cap: float | None = None  # then z -> cap * tanh(z / cap), if any
    float32: bool = False  # scores are computed with products in float32 whatever the weights' dtype
    # the module's forward without its hooks, for code that runs inside its call
    forward: Callable[[Tensor], Tensor] | None = None

    @property
    def width(self) -> int:
        """Logits of a token, by the weights: PEFT's tied heads have `in_features` and `out_features` swapped.

        By the module where weights are sharded, or packed in 4 bits as [V * H / 2, 1].
        """
        weight: Any = getattr(self.module, "weight", None)
        inputs, outputs = getattr(self.module, "in_features", None), getattr(self.module, "out_features", 1)
        matrix = isinstance(weight, Tensor) and weight.dim() == 2
        return len(weight) if matrix and (inputs is None or weight.numel() == inputs * outputs) else outputs

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = (self.forward or self.module)(hidden)
        if self.scale != 1.0:
            logits = logits * self.scale
        return torch.tanh(logits / self.soft_cap) * self.soft_cap if self.soft_cap else logits


def head_of(model: Any, *, float32: bool = False) -> Head:
    """Head of an unwrapped causal language model, with its scaling and soft-capping."""
    config = model.config.get_text_config()
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
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
    support: SampledSupport | None = None,
    named: Tensor | None = None,
    top: int = 0,
    teacher: TeacherRows | None = None,
) -> TokenScores:
    """Score targets [N] given the hidden states [N, H] that predict them, `chunk_size` positions at once at most.

    Args:
        hidden: [N, H], hidden states that predict the targets.
        targets: [N] int64, tokens to score.
        head: the model's head.
        temperature: divides the logits.
        entropy: also compute the entropy of each position.
        chunk_size: most positions whose logits are in memory at once.
        support: tokens that each target was drawn from, if not from the whole softmax.
        named: [N, K] int64, further tokens to score at each position; -1 for none.
        top: number of likeliest tokens to return, at most the vocabulary; which of tied tokens is last is arbitrary.
        teacher: also compute the divergence of each position over the whole vocabulary.

    Sums are in float32 or wider. Half-precision products are rounded once, as in the model itself, so a log-prob is
    accurate to 2^-8 (bfloat16) or 2^-11 (float16) of the largest logit; heads with `float32` have no such error.

    Raises:
        ValueError: a `float32` head that is not a plain linear layer, or a head of which this process has only a shard.
    """
    if hasattr(getattr(head.module, "weight", None), "full_tensor"):
        raise ValueError(
            "The LM head's weight is sharded when tokens are scored: FSDP2 released it after the model's forward pass."
            " Score within that pass: TokenScorer(..., inside_head_call=True)."
        )
    targets = targets[:, None] if named is None else torch.cat([targets[:, None], named], dim=1)
    linear = plain_linear(head.module, called=head.forward is not None or head.float32)
    if linear is None and head.float32:
        raise CheckError.of(
            "model-head",
            f"cast_lm_head_to_fp32 needs a plain linear head, and this model's is a {type(head.module).__name__} (an"
            " adapter or quantised weights).",
            "Set cast_lm_head_to_fp32=False, or keep the head out of the adapter.",
        )
    if linear is None:
        return _score_by_calls(hidden, targets, head, temperature, entropy, chunk_size, support, top, teacher)
    device = hidden.device.type
    if head.float32:
        compute = torch.promote_types(linear.weight.dtype, torch.float32)
    else:
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else linear.weight.dtype
    if teacher is not None:
        cast = head.float32 or torch.is_autocast_enabled(device)
        teacher = replace(teacher, compute=compute if cast else None)
    curve = Curve.of(head.scale, head.soft_cap, temperature)
    given = hidden, linear.weight, linear.bias
    options: dict[str, Any] = {"chunk_size": chunk_size, "support": support, "top": top, "teacher": teacher}
    plan = plan_of(*given, curve, entropy=entropy, compute=compute, **options)
    return TokenScores(*LinearHead.apply(*given, targets, plan))


def teacher_head(head: Head) -> TeacherHead:
    """A copy of a teacher's head apart from its model, gathered if it is sharded (collective).

    CheckError as of `check_plain_head`.
    """
    linear = check_plain_head(head)
    bias = None if linear.bias is None else full_tensor(linear.bias)
    return TeacherHead(full_tensor(linear.weight), bias, head.scale, head.soft_cap)


def check_plain_head(head: Head) -> nn.Linear:
    """The head's linear layer, sharded or not; CheckError if it is quantised or has an adapter."""
    linear = plain_linear(head.module, called=True)
    if linear is None and isinstance(head.module, nn.Linear) and is_shard(head.module.weight):
        linear = head.module
    if linear is None:
        raise CheckError.of(
            "teacher-head",
            f"teacher_top_k=-1 compares the whole vocabulary and needs a teacher with a plain linear head; this one's"
            f" is a {type(head.module).__name__} (an adapter or quantised weights).",
            "Set teacher_top_k=64, which works with any head, or keep the head out of the adapter.",
        )
    return linear


def plain_linear(module: Any, *, called: bool = False) -> nn.Linear | None:
    """The module, if calling it (or, if `called`, its forward) is hidden @ weight.T + bias alone; else None."""
    is_linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward  # or FSDP2's class of it
    if not is_linear or type(module.weight.data) is not Tensor:  # quantised tensors multiply differently
        return None
    if called:
        return module
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return None if hooked or "forward" in vars(module) else module


def _score_by_calls(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    temperature: float,
    entropy: bool,
    chunk_size: int,
    support: SampledSupport | None,
    top: int,
    teacher: TeacherRows | None,
) -> TokenScores:
    models = 1 if teacher is None else 2
    size = max(1, min(chunk_size, CHUNK_BYTES // (4 * models * head.width)))
    if head.forward is not None:
        size = max(1, len(targets))  # its modules may be sharded too, and all processes must call them equally often
    recompute = torch.is_grad_enabled() and len(targets) > size

    def score(states: Tensor, part: slice, cached: list[Any]) -> tuple[Tensor | None, ...]:
        logits = head(states)
        tile = None if support is None else support.tile(part, 0, logits.shape[1])
        of_teacher, beta = None, 1.0
        if teacher is not None:
            wide, beta = torch.promote_types(logits.dtype, torch.float32), teacher.beta
            with torch.no_grad():
                of_teacher = teacher.tile(part, 0, logits.shape[1], wide, tile)
        return LogprobAndEntropy.apply(logits, targets[part], entropy, temperature, cached, tile, top, of_teacher, beta)

    run = partial(checkpoint, score, use_reentrant=False) if recompute else score
    chunks = enumerate(hidden.split(size))
    scores = [run(states, slice(number * size, (number + 1) * size), []) for number, states in chunks]
    joined = (None if parts[0] is None else torch.cat(parts) for parts in zip(*scores, strict=True))
    return TokenScores(*joined)  # type: ignore[arg-type]  # there are log-probs


class LogprobAndEntropy(torch.autograd.Function):
    """The results of `LinearHead`, of p = softmax(logits / temperature), with few reads of the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        entropy: bool,
        temperature: float,
        cached: list[Any],
        support: TileSupport | None = None,
        top: int = 0,
        teacher: Tensor | None = None,
        beta: float = 1.0,
    ) -> tuple[Tensor | None, ...]:
        """logits [n, V], targets [n, C] int64 -> the outputs of `LinearHead`, float32 or wider.

        `cached` receives the sums of the rows and of the divergence from the `teacher`'s logits [n, V], so that a
        recomputation in the backward pass need not sum again.
        """
        ctx.curve = Curve.of(1.0, None, temperature)
        ctx.columns = TargetColumns.of(targets, 0, logits.shape[1], support)
        if not cached:
            x = _scaled(logits, ctx.curve)
            cached.append(RowSums.empty(len(x), x, entropy, targets.shape[1], min(top, x.shape[1])))
            cached.append(None if teacher is None else _tiles_for(x).divergence(x, teacher, support, beta))
            _tiles_for(x).add(x, ctx.columns, cached[0])
        sums, of_teacher = cached
        log_z, logprobs, entropies = sums.results()
        ctx.set_materialize_grads(False)
        ctx.beta, ctx.of_teacher = beta, of_teacher
        ctx.save_for_backward(logits, targets, log_z, logprobs, entropies, teacher)
        return outputs_of(ctx, logprobs, entropies, sums, of_teacher)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, targets, log_z, logprobs, entropies, teacher = ctx.saved_tensors
        by_logprob, by_entropy, by_named, by_divergence, *_ = grads
        of_teacher = None if by_divergence is None else DivergenceGradients(by_divergence.contiguous(), ctx.of_teacher)
        rows = RowGradients.of(log_z, logprobs, entropies, by_logprob, by_entropy, by_named, targets, of_teacher)
        x = _scaled(logits, ctx.curve)
        grad = _tiles_for(x).gradient(x, ctx.columns, rows, teacher, ctx.beta)
        grad.mul_((rows.factor() * ctx.curve.gain)[:, None])
        return grad.to(logits.dtype), *[None] * 8


def _scaled(logits: Tensor, curve: Curve) -> Tensor:
    """Copy in float32 or wider, times the gain."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.mul(logits, curve.gain, out=torch.empty_like(logits, dtype=wide))


def _tiles_for(x: Tensor) -> TorchTiles:
    return TorchTiles(Curve(), minus_inf=True, size=x.numel(), wide=x.dtype, device=x.device)


ScoreFunction = Callable[[Tensor, Callable[[Tensor], Tensor]], TokenScores]
"""(hidden states [rows, width, H], the head's own forward) -> scores."""


def score_in_head_call(model: Any, head: Any, score: ScoreFunction, **inputs: Any) -> TokenScores:
    """Run a sharded model's forward and return `score` of the hidden states that its head gets.

    FSDP2 and DeepSpeed gather a module while it is called and while its gradient is computed. Therefore the head's
    forward is replaced by one that returns scores, and every hook runs. ValueError if the model calls its head not
    exactly once.
    """
    found: list[TokenScores] = []

    def forward_with_scores(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found.append(score(hidden, forward))
        return found[-1].logprobs.sum().to(hidden.dtype).expand(1, 1, 1).clone()  # hooks need a gradient of it

    with patched_forward(head, forward_with_scores) as forward:
        output = model(**inputs, use_cache=False)
    if len(found) != 1:
        raise CheckError.of(
            "model-head",
            f"{type(model).__name__} calls its head {len(found)} times in a forward pass; only models that call it once"
            " can be trained with FSDP or DeepSpeed.",
            "Train it with DDP, and please report the model.",
        )
    return TokenScores(*_WithOutput.apply(output.logits, *found[0]))


class _WithOutput(torch.autograd.Function):
    """Identity on scores that makes them depend on the model's output (gradient 0), so that its backward hooks run."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *scores: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.like = torch.empty(output.shape, dtype=output.dtype, device="meta"), output.device
        same = [None if one is None else one.view_as(one) for one in scores]
        ctx.mark_non_differentiable(
            *(one for one in same[4:] if one is not None)
        )  # the likeliest tokens, hidden states
        return tuple(same)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        like, device = ctx.like
        return torch.zeros_like(like, device=device), *grads
