"""Under which of transformers' attention implementations a model samples. Not here: the implementations."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from covey.core.model_architecture import sdpa_suits


def own_attention(model: Any) -> str:
    """The attention that masks per row and knows all that the model's layers ask of it.

    It is the model's present one if that is "sdpa" or "eager". Under any other (a packed layout's, flash attention),
    transformers' default: SDPA, unless the model is one that SDPA does not suit, for soft-capping or sinks (Gemma 2,
    gpt-oss).
    """
    usual = model.config._attn_implementation
    if usual in ("sdpa", "eager"):
        return usual
    return "sdpa" if sdpa_suits(model) else "eager"


@contextmanager
def attention_of(model: Any, name: str) -> Iterator[None]:
    """The model under another attention implementation. The config alone says which: its setter is enough."""
    usual = model.config._attn_implementation
    if name == usual:
        yield
        return
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = usual
