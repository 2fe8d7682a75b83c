"""Contexts in which a model samples: attention implementation, packed CPU weights, lockstep; engines' common base."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from covey.core.engine import EngineTraits, WeightUpdate
from covey.core.model import inference_mode_of, sdpa_suits

PACKED_ROWS = 64  # row count that weights are packed for; products with other counts are as exact
MOST_ROWS = 256  # most rows for which packed weights are faster; larger products are bound by arithmetic
FEWEST_ROWS = 4  # of oneDNN's products: of one to three rows they take longer than of four
WORTH_MEASURING = 1 << 25  # numbers in a model's linear layers from which the libraries are compared
CLEARLY = 0.85  # ratio of oneDNN's time to MKL's, below which it is used: noise must not change a run's rounding


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
    """Multiply the model's plain float32 CPU `nn.Linear`s with copies of their weights packed by MKL or oneDNN.

    The same product, 1.1 to 2 times as fast for 4 to 64 rows. The copies take as much memory as the weights, which
    must not change within the context. Quantised weights, adapters and patched modules are left alone.
    """
    patched: list[Any] = []
    try:
        if torch.backends.mkl.is_available() and not torch.is_autocast_enabled("cpu"):
            numbers = 0
            for module in model.modules():
                plain = type(module) is nn.Linear and "forward" not in vars(module)
                weight: Any = module.weight if plain else None
                whole = type(weight) is nn.Parameter and weight.dim() == 2  # ZeRO-3 leaves other shapes
                if whole and weight.device.type == "cpu" and weight.dtype == torch.float32:
                    patched.append(module)
                    numbers += weight.numel()
            onednn = numbers >= WORTH_MEASURING and onednn_is_faster()
            for module in patched:
                module.forward = _packed_forward(module, onednn)
        yield
    finally:
        for module in patched:
            vars(module).pop("forward", None)


def _packed_forward(module: Any, onednn: bool) -> Callable[[Tensor], Tensor]:
    """`module.forward` that packs on the first call with few rows."""
    weight = module.weight.detach()
    bias = None if module.bias is None else module.bias.detach()
    packed: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if x.dtype != torch.float32 or not 0 < rows <= MOST_ROWS:
            return nn.functional.linear(x, weight, bias)
        if not packed:
            library = torch.ops.mkldnn if onednn else torch.ops.mkl
            pack = library._reorder_linear_weight if onednn else library._mkl_reorder_linear_weight
            packed.append(pack(weight, PACKED_ROWS))
        if not onednn:
            # The operator ignores the packed copy unless its last argument equals the rows of x.
            return torch.ops.mkl._mkl_linear(x, packed[0], weight, bias, rows)
        multiply = torch.ops.mkldnn._linear_pointwise
        if rows >= FEWEST_ROWS:
            return multiply(x, packed[0], bias, "none", [], "")
        filled = nn.functional.pad(x.reshape(rows, -1), (0, 0, 0, FEWEST_ROWS - rows))
        return multiply(filled, packed[0], bias, "none", [], "")[:rows].view(*x.shape[:-1], -1)

    return forward


@cache
def onednn_is_faster() -> bool:
    """True where products of few rows take clearly less time with oneDNN, as on AMD's processors; takes 0.2 s once.

    By processor time of one thread, which other programs hardly change, and with weights that no cache holds.
    """
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight") or not torch.backends.mkldnn.is_available():
        return False
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        layers = [SimpleNamespace(weight=torch.ones(1024, 1024), bias=None) for _ in range(12)]
        mkl, onednn = (_seconds([_packed_forward(layer, library) for layer in layers]) for library in (False, True))
    finally:
        torch.set_num_threads(threads)
    return onednn < CLEARLY * mkl


def _seconds(products: list[Callable[[Tensor], Tensor]]) -> float:
    inputs, taken = [torch.ones(rows, 1024) for rows in (4, 16, 64)], []
    for _ in range(4):  # the first one packs
        began = time.thread_time()
        for x in inputs:
            for product in products:
                product(x)
        taken.append(time.thread_time() - began)
    return min(taken)


@contextmanager
def fused_operations(model: nn.Module, dtype: torch.dtype, backend: Any = "inductor") -> Iterator[None]:
    """Compile the model's norms and rotary embeddings, with results in the `dtype` of matrix products.

    Both are a dozen small operations in float32, whose launches cost more than their work when each sequence has one
    token. The linear layers and the cache that read the results would round them to `dtype` themselves.
    """
    norms = [x for x in model.modules() if type(x).__name__.endswith("RMSNorm") and "forward" not in vars(x)]
    homes: set[Any] = {sys.modules[type(x).__module__] for x in model.modules()}
    rotaries = [(home, home.apply_rotary_pos_emb) for home in homes if hasattr(home, "apply_rotary_pos_emb")]
    norm = _compiled(_normed, backend)
    try:
        for module in norms:
            module.forward = partial(norm, type(module).forward, dtype, module)
        for home, rotary in rotaries:
            home.apply_rotary_pos_emb = partial(_compiled(_rotated, backend), rotary, dtype)
        yield
    finally:
        for module in norms:
            del module.forward
        for home, rotary in rotaries:
            home.apply_rotary_pos_emb = rotary


@cache
def _compiled(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=backend, dynamic=True)


def _normed(norm: Callable[..., Tensor], dtype: torch.dtype, *inputs: Any) -> Tensor:
    return norm(*inputs).to(dtype)


def _rotated(rotary: Callable[..., Any], dtype: torch.dtype, *inputs: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return tuple(x.to(dtype) for x in rotary(*inputs, **kwargs))


@dataclass(eq=False)
class PolicyEngine:
    """Base of the engines that sample from the policy itself, in the trainer's process: they share its memory."""

    model: InitVar[Callable[[], Any]]  # the unwrapped model to sample from
    _: KW_ONLY
    eos_token_ids: set[int]  # tokens that end a completion
    max_sequences: int = 64  # most completions decoded at once
    max_context: int | None = None  # most tokens of prompt and completion together
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext  # mixed precision, gathered weights
    device: torch.device | None = None  # of the model's inputs; None: that of its weights
    tokenizer: Any = None  # reads texts among the settings of requests, such as `stop`

    traits: ClassVar[EngineTraits] = EngineTraits(shares_policy=True, returns_masks=True)

    def __post_init__(self, model: Callable[[], Any]) -> None:
        self._model = model

    @property
    def input_device(self) -> torch.device:
        return self.device or next(self._model().parameters()).device

    def load_weights(self, update: WeightUpdate) -> None:
        """Do nothing: the engine samples from the policy's own parameters."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Put the model into inference mode within the context, and restore its mode afterwards."""
        model = self._model()
        with (
            inference_mode_of(model),
            torch.no_grad(),
            self.forward_context(),
            packed_linears(model),
            attention_implementation(model, sampling_attention(model)),  # a packed layout's has no masks
        ):
            yield


@contextmanager
def lockstep(policy: Callable[[], Any], any_busy: Callable[[bool], bool], device: torch.device) -> Iterator[None]:
    """Context with equal numbers of forward passes in all processes that share one sharded model.

    A forward pass over sharded weights is collective, but processes sample completions of different lengths: before
    each pass a process announces it (`any_busy`, collective: from "this process has a pass to run" to "any has"), and a
    process that is done runs idle passes while any other is not. `FullCopy` is faster where a full copy fits.
    """
    model = policy()

    def announce(*inputs: Any) -> None:
        any_busy(True)

    handle = model.register_forward_pre_hook(announce, prepend=True)
    try:
        yield
    finally:
        handle.remove()
    one_token = torch.zeros(1, 1, dtype=torch.long, device=device)
    while any_busy(False):
        model(input_ids=one_token, use_cache=False)
