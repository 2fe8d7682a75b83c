"""What a model is under its wrappers: its name, what turns tokens into hidden states, which attention suits it.

Not here: running it.
"""

from typing import Any

from torch import nn


def decoder_of(model: Any) -> nn.Module:
    """The part of a model that its head reads.

    transformers looks for it by name, and for some (Llama 4, ModernBERT's decoder) finds the whole model or the head;
    there it is the child that holds the input embeddings.

    Args:
        model: a transformers or PEFT model with a language-modelling head.
    """
    base = _without_adapter(model)
    found: nn.Module = model.get_decoder()
    embeddings = model.get_input_embeddings()
    if found is not base and _holds(found, embeddings):
        return found
    return next((child for child in base.children() if _holds(child, embeddings)), found)


def name_of(model: Any) -> str:
    """The class of a model as people know it; an adapter's wrapper has a name that says nothing of the model."""
    return type(_without_adapter(model)).__name__


def sdpa_suits(model: Any) -> bool:
    """Whether transformers' SDPA computes all of the model's attention; it knows neither soft-capping nor sinks."""
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)  # some releases offer SDPA anyway
    return bool(getattr(model, "_supports_sdpa", True)) and not capped


def _without_adapter(model: Any) -> nn.Module:
    base: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base


def _holds(module: nn.Module, part: nn.Module) -> bool:
    return any(one is part for one in module.modules())
