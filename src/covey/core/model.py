"""A transformers or PEFT model under its wrappers: its class, decoder, attention, and inference mode."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def decoder_of(model: Any) -> nn.Module:
    """The part of a model that its head reads.

    transformers finds it by name, and for some models (Llama 4, ModernBERT's decoder) returns the whole model or the
    head; for these it is the child that holds the input embeddings.

    Args:
        model: a transformers or PEFT model with a language-modelling head.
    """
    base = _without_adapter(model)
    decoder: nn.Module = model.get_decoder()
    embeddings = model.get_input_embeddings()
    for module in (decoder, *base.children()) if decoder is not base else base.children():
        if embeddings in module.modules():
            return module
    return decoder


def name_of(model: Any) -> str:
    """Class name of a model, without an adapter's wrapper."""
    return type(_without_adapter(model)).__name__


def sdpa_suits(model: Any) -> bool:
    """True if transformers' SDPA computes all of the model's attention; it has neither soft-capping nor sinks."""
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)  # some releases offer SDPA anyway
    return bool(getattr(model, "_supports_sdpa", True)) and not capped


@contextmanager
def inference_mode_of(model: nn.Module) -> Iterator[None]:
    """Dropout off and gradient checkpointing idle; every module's own mode is restored afterwards."""
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in training:
            module.training = mode


def _without_adapter(model: Any) -> nn.Module:
    base: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base
