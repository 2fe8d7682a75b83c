"""Contexts in which a model samples (attention implementation, compiled operations, lockstep), and `PolicyEngine`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from covey.core.engine import EngineTraits, SampleRequest, WeightUpdate
from covey.core.model import inference_mode_of, sdpa_suits
from covey.core.records import Completion
from covey.engines.native.packed_weights import Packed, packed_linears


def sampling_attention(model: Any) -> str:
    """Attention implementation that supports masks per sequence and all that the model's layers need.

    "sdpa" and "eager" are kept. Any other (a packed layout's, flash attention) is replaced by transformers' default:
    SDPA, or eager attention for models with soft-capping or sinks (Gemma 2, gpt-oss).
    """
    current = model.config._attn_implementation
    if current in ("sdpa", "eager"):
        return current
    return "sdpa" if sdpa_suits(model) else "eager"


@contextmanager
def attention_implementation(model: Any, name: str) -> Iterator[None]:
    """Context in which the model uses another attention implementation; layers read its name from the config."""
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
def fused_operations(model: nn.Module, dtype: torch.dtype, backend: Any = "inductor") -> Iterator[None]:
    """Context in which the model's norms and rotary embeddings are compiled, with results in `dtype`.

    Each is a dozen small operations in float32, whose launches cost more than their work when each sequence has one
    token. `dtype` is that of matrix products: the linear layers and the cache round the results to it in any case.
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
    """Base of engines that sample from the policy itself, in the trainer's process, and share its memory."""

    model: InitVar[Callable[[], Any]]  # the unwrapped model to sample from
    _: KW_ONLY
    eos_token_ids: set[int]  # tokens that end a completion
    max_sequences: int = 64  # most completions decoded at once
    max_context: int | None = None  # most tokens of prompt and completion together
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext  # mixed precision, gathered weights
    device: torch.device | None = None  # of the model's inputs; None: the device of its weights
    tokenizer: Any = None  # reads texts among the settings of requests, such as `stop`
    dtype: str | None = (
        None  # weights and inputs of linear layers are rounded to it (`number_formats`); None: they are not
    )

    TRAITS: ClassVar[EngineTraits] = EngineTraits(
        shares_policy=True, returns_masks=True, returns_routes=True, batch_invariant=True
    )

    def __post_init__(self, model: Callable[[], Any]) -> None:
        self._model, self._packed = model, Packed()
        self.sample_in(self.dtype)

    def sample_in(self, dtype: str | None) -> None:
        """Round weights to this format from the next time that the engine wakes; None: do not."""
        self.dtype = dtype
        self.traits = replace(self.TRAITS, rounded_to=dtype)

    @property
    def input_device(self) -> torch.device:
        return self.device or next(self._model().parameters()).device

    async def generate(self, request: SampleRequest) -> list[Completion]:
        """Sample `request.n` completions of one prompt."""
        raise NotImplementedError

    def score(self, tokens: Tensor, temperature: float = 1.0) -> Tensor:
        """Log-probs [S, T - 1] of tokens [S, T] after those before them, by one plain forward pass while awake."""
        logits = self._model()(input_ids=tokens.to(self.input_device), use_cache=False).logits[:, :-1].float()
        logprobs: Tensor = (logits / temperature).log_softmax(-1)
        return logprobs.gather(-1, tokens[:, 1:, None].to(logprobs.device))[..., 0]

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
            packed_linears(model, self.dtype) as self._packed,
            attention_implementation(model, sampling_attention(model)),  # a packed layout's has no masks
        ):
            yield


@contextmanager
def lockstep(policy: Callable[[], Any], any_busy: Callable[[bool], bool], device: torch.device) -> Iterator[None]:
    """Context in which all processes that share one sharded model run equally many forward passes.

    A forward pass over sharded weights is collective, but processes sample completions of different lengths. Before
    each pass, all processes exchange whether any still has one to run (`any_busy`, collective: True in any -> True in
    all), and a process that is done runs idle passes until none has. `FullCopy` is faster where a full copy fits.
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
