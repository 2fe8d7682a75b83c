"""Contexts in which a model samples: its attention implementation, packed CPU weights, processes in lockstep."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from covey.core.model import sdpa_suits

PACKED_ROWS = 64  # row count that MKL packs weights for; products with other counts are as exact
MOST_ROWS = 256  # most rows for which packed weights are faster; larger products are bound by arithmetic


def sampling_attention(model: Any) -> str:
    """Attention implementation that supports masks per sequence and all that the model's layers need.

    "sdpa" or "eager" stay. Under any other (a packed layout's, flash attention), the default of transformers: SDPA,
    unless the model has soft-capping or sinks (Gemma 2, gpt-oss).
    """
    current = model.config._attn_implementation
    if current in ("sdpa", "eager"):
        return current
    return "sdpa" if sdpa_suits(model) else "eager"


@contextmanager
def attention_implementation(model: Any, name: str) -> Iterator[None]:
    """Run the model under another attention implementation; layers read its name from the config."""
    current = model.config._attn_implementation
    if name == current:
        yield
        return
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = current


@contextmanager
def packed_linears(model: nn.Module) -> Iterator[None]:
    """Multiply the model's plain float32 CPU `nn.Linear`s with copies of their weights packed by MKL.

    The same product, 1.1 to 1.5 times as fast for 4 to 64 rows. The copies take as much memory as the weights, which
    must not change within the context. Quantised weights, adapters and patched modules are left alone.
    """
    patched: list[Any] = []
    try:
        if torch.backends.mkl.is_available() and not torch.is_autocast_enabled("cpu"):
            for module in model.modules():
                if type(module) is not nn.Linear or "forward" in vars(module):
                    continue
                weight = module.weight
                if weight.dim() != 2 or type(weight) is not nn.Parameter:  # ZeRO-3 leaves other shapes
                    continue
                if weight.device.type == "cpu" and weight.dtype == torch.float32:
                    patched.append(module)
                    patched[-1].forward = _packed_forward(module)
        yield
    finally:
        for module in patched:
            del module.forward


def _packed_forward(module: Any) -> Callable[[Tensor], Tensor]:
    """`module.forward` that packs on the first call with few rows."""
    weight = module.weight.detach()
    bias = None if module.bias is None else module.bias.detach()
    packed: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if x.dtype != torch.float32 or not 0 < rows <= MOST_ROWS:
            return nn.functional.linear(x, weight, bias)
        if not packed:
            packed.append(torch.ops.mkl._mkl_reorder_linear_weight(weight, PACKED_ROWS))
        # The operator ignores the packed copy unless its last argument equals the rows of x.
        return torch.ops.mkl._mkl_linear(x, packed[0], weight, bias, rows)

    return forward


@contextmanager
def fused_norms(model: nn.Module) -> Iterator[None]:
    """Compute the model's plain RMS norms on a GPU by torch's own operation: one kernel instead of six."""
    patched: list[Any] = []
    try:
        known: dict[tuple[type, torch.Size], bool] = {}
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or not weight.is_cuda:
                continue
            if "forward" in vars(module) or type(weight) is not nn.Parameter:
                continue
            kind = (type(module), weight.shape)
            if kind not in known:
                known[kind] = _is_plain_norm(module)
            if known[kind]:
                patched.append(module)
                module.forward = _norm_forward(module)
        yield
    finally:
        for module in patched:
            del module.forward


def _norm_forward(module: Any) -> Callable[[Tensor], Tensor]:
    weight, eps = module.weight.detach(), getattr(module, "variance_epsilon", getattr(module, "eps", None))

    def forward(x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, weight.shape, weight, eps)

    return forward


def _is_plain_norm(module: Any) -> bool:
    """True if the module is a function of one tensor, x / rms(x) * weight; Gemma's, say, adds 1 to the weight."""
    if len(inspect.signature(module.forward).parameters) != 1:
        return False
    x = torch.linspace(-1, 2, 4 * len(module.weight), device=module.weight.device).view(4, -1)
    with torch.no_grad(), torch.autocast("cuda", enabled=False):
        try:
            theirs, ours = module(x), _norm_forward(module)(x.to(module.weight.dtype))
        except (TypeError, RuntimeError):
            return False
    return isinstance(theirs, Tensor) and torch.allclose(theirs.float(), ours.float(), rtol=1e-2, atol=1e-3)


class Lockstep:
    """Equal numbers of forward passes in all processes that share one sharded model.

    A forward pass over sharded weights is collective, but processes sample completions of different lengths: before
    each pass a process announces it (`any_busy`, collective: from "this process has a pass to run" to "any has"), and a
    process that is done runs idle passes while any other is not. `FullCopy` is faster where a full copy fits.
    """

    def __init__(self, model: Callable[[], Any], any_busy: Callable[[bool], bool], device: torch.device):
        self._model = model
        self._any_busy = any_busy
        self._device = device

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the model any number of times; the context exits when all processes are done with theirs."""
        model = self._model()

        def announce(*inputs: Any) -> None:
            self._any_busy(True)

        handle = model.register_forward_pre_hook(announce, prepend=True)
        try:
            yield
        finally:
            handle.remove()
        one_token = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        while self._any_busy(False):
            model(input_ids=one_token, use_cache=False)
