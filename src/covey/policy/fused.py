"""RMS norms and gated MLPs with backward passes of their own, for training in full precision on a CPU.

They save less for the backward pass: a norm saves only its input, and an MLP recomputes the activation and the product
that its last layer reads (27 instead of 44 KB per token and layer of SmolLM2-135M). Values and gradients are those of
the modules, up to rounding.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from covey.core.model import rms_norm_epsilon
from covey.policy.products import product


class RMSNorm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * weight, with x [..., H] and weight [H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # With n = x * scale: d weight = sum(g n), d x = scale (g weight - n mean(g weight n)).
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        d_weight = torch.linalg.vecdot(grads[0].flatten(0, -2), normed.flatten(0, -2), dim=0)
        weighed = grads[0] * weight
        mean = torch.linalg.vecdot(weighed, normed)[..., None].div_(x.shape[-1])
        return weighed.sub_(normed.mul_(mean)).mul_(scale), d_weight, None


class GatedMLP(torch.autograd.Function):
    """(silu(x @ gate.T) * (x @ up.T)) @ down.T, with x [..., H], gate and up [I, H], down [H, I]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        gated, raised = product(rows, gate), product(rows, up)
        read = x if any(ctx.needs_input_grad[1:3]) else None
        ctx.save_for_backward(read, gated, raised, gate, up, down)
        # Not `view`: a model may add to the result in place, which autograd refuses for a view that is made here.
        return product(nn.functional.silu(gated).mul_(raised), down).resize_(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gated, raised, gate, up, down = ctx.saved_tensors
        by_x, by_gate, by_up, by_down = ctx.needs_input_grad
        rows: Any = None if x is None else x.flatten(0, -2)
        grad = grads[0].flatten(0, -2)
        active = nn.functional.silu(gated)
        d_down = grad.T @ (active * raised) if by_down else None
        d_product = product(grad, down.T)
        d_raised = active.mul_(d_product)
        d_gated = torch.ops.aten.silu_backward(d_product.mul_(raised), gated)
        d_gate = d_gated.T @ rows if by_gate else None
        d_up = d_raised.T @ rows if by_up else None
        d_x = product(d_raised, up.T, onto=product(d_gated, gate.T)).view_as(grads[0]) if by_x else None
        return d_x, d_gate, d_up, d_down


@contextmanager
def fused_layers(found: Iterable["FusedLayer"]) -> Iterator[None]:
    """Context in which the modules of `found` use these functions; forward and backward must both be within it."""
    patched: list[Any] = []
    try:
        for layer in found:
            if "forward" not in vars(layer.module):
                patched.append(layer.module)
                patched[-1].forward = layer
        yield
    finally:
        for module in patched:
            del module.forward


class FusedLayer(NamedTuple):
    """A replacement for a module's forward by one of the functions above; under autocast it calls the module itself."""

    module: Any
    function: type[torch.autograd.Function]
    weighted: tuple[nn.Module, ...]  # modules of the weights that the function takes after its input
    settings: tuple[float, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            return type(self.module).forward(self.module, x)
        result: Tensor = self.function.apply(x, *map(attrgetter("weight"), self.weighted), *self.settings)
        return result


def find_fused_layers(model: nn.Module) -> list[FusedLayer]:
    """Norms and MLPs of a model on a CPU whose results on random numbers agree with the functions above.

    Modules that are patched, hooked, adapted or quantised are left out.
    """
    proven: dict[tuple[Any, ...], bool] = {}
    found = []
    for module in model.modules():
        layer = _candidate(module)
        if layer is None or not all(map(_is_plain, {module, *layer.weighted})):
            continue
        kind = (type(module), type(getattr(module, "act_fn", None)), layer.function)
        if kind not in proven:
            proven[kind] = _agrees(layer)
        if proven[kind]:
            found.append(layer)
    return found


def _candidate(module: Any) -> FusedLayer | None:
    if (epsilon := rms_norm_epsilon(module)) is not None:
        return FusedLayer(module, RMSNorm, (module,), (epsilon,))
    if not type(module).__name__.endswith("MLP"):
        return None
    linear: Any = tuple(getattr(module, f"{part}_proj", None) for part in ("gate", "up", "down"))
    plain = all(type(part) is nn.Linear and part.bias is None for part in linear)
    return FusedLayer(module, GatedMLP, linear) if plain else None


def _is_plain(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    wide = weight is None or (weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64))
    return wide and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


@torch.no_grad()
def _agrees(layer: FusedLayer) -> bool:
    weight = layer.weighted[0].weight
    assert isinstance(weight, Tensor), "norms and linear layers have one"
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3, weight.shape[-1], generator=generator, dtype=weight.dtype)
    try:
        expected, ours = layer.module(x), layer(x)
    except (TypeError, RuntimeError, AttributeError):  # another signature
        return False
    return isinstance(expected, Tensor) and torch.allclose(ours, expected, rtol=1e-4, atol=1e-6)
