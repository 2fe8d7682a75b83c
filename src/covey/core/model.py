"""Models of transformers or PEFT under their wrappers: class, decoder, attention, mode, image inputs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from covey.core.media import Media


def unwrapped(model: Any) -> Any:
    """The model inside DistributedDataParallel, DeepSpeed's engine and torch.compile."""
    wrapper = nn.parallel.DistributedDataParallel
    while hasattr(model, "_orig_mod") or isinstance(model, wrapper) or type(model).__name__ == "DeepSpeedEngine":
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model


def without_adapter(model: Any) -> Any:
    """The transformers model inside a PEFT model; any other model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder_of(model: Any) -> nn.Module:
    """The part of a model that its head reads.

    transformers finds it by name, and for some models (Llama 4, ModernBERT's decoder) returns the whole model or the
    head; for these it is the child that holds the input embeddings.
    """
    base = without_adapter(model)
    decoder: nn.Module = model.get_decoder()
    embeddings = model.get_input_embeddings()
    for module in (decoder, *base.children()) if decoder is not base else base.children():
        if embeddings in module.modules():
            return module
    return decoder


def name_of(model: Any) -> str:
    return type(without_adapter(model)).__name__


def cache_argument(model: Any) -> str:
    """Name under which a model takes a cache and returns it: transformers 5.24 renamed `past_key_values` to `cache`."""
    names = signature(without_adapter(model).forward).parameters
    return "cache" if "cache" in names else "cache_params" if "cache_params" in names else "past_key_values"


def compute_dtype(model: Any) -> torch.dtype:
    """Dtype in which the model multiplies matrices: that of autocast where it is on, else that of the weights."""
    device = next(model.parameters()).device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype


def sdpa_suits(model: Any) -> bool:
    """True if transformers' SDPA computes all of the model's attention; it has neither soft-capping nor sinks."""
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)  # some releases offer SDPA anyway
    return bool(getattr(model, "_supports_sdpa", True)) and not capped


def rms_norm_epsilon(module: Any) -> float | None:
    """Epsilon of a module with a weight whose class is named as an RMS norm; None for any other module.

    Gemma 3n and 4 have some without a weight.
    """
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(getattr(module, "weight", None), Tensor):
        return None
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


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


@contextmanager
def patched_forward(module: Any, replacement: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Replace a module's forward within the context, which gives the original; hooks of the module still run."""
    original, patched = module.forward, "forward" in vars(module)
    module.forward = replacement
    try:
        yield original
    finally:
        if patched:
            module.forward = original
        else:
            del module.forward


def placeholder_ids(config: Any) -> list[int]:
    """Placeholder tokens of images and videos in a model's configuration; empty for a text model."""
    names = [f"{kind}_token_{suffix}" for kind in ("image", "video") for suffix in ("id", "index")]
    found = {getattr(config, name, None) for name in names}
    return sorted(token for token in found if isinstance(token, int) and token >= 0)


def media_inputs(rows: Sequence[Sequence[Media]], width: int, device: torch.device) -> dict[str, Tensor]:
    """Image inputs of a forward pass over padded sequences that begin at column 0; empty where none has images.

    `rows` are the images of each sequence. Their tensors are concatenated in this order, smaller ones padded with
    zeros, as processors do. Marks (`Media.marks`) are [sequences, width].
    """
    items = [item for media in rows for item in media]
    names = dict.fromkeys(name for item in items for name in item.tensors)
    tensors = {name: [item.tensors[name] for item in items if name in item.tensors] for name in names}
    inputs = {name: _stacked(parts).to(device) for name, parts in tensors.items()}
    for name in dict.fromkeys(name for item in items for name in item.marks):
        marks = torch.zeros(len(rows), width, dtype=torch.long)
        for row, media in enumerate(rows):
            for item in media:
                if name in item.marks:
                    marks[row, item.start : item.start + item.length] = item.marks[name]
        inputs[name] = marks.to(device)
    return inputs


@contextmanager
def image_inputs(model: Any, ids: Tensor, rows: Sequence[Sequence[Media]], filler: int) -> Iterator[dict[str, Tensor]]:
    """Inputs, with images, for padded `ids` from column 0; `filler` replaces placeholders that the policy sampled."""
    strays = torch.isin(ids, torch.tensor(placeholder_ids(model.config), device=ids.device))
    for row, media in enumerate(rows):
        for item in media:
            strays[row, item.start : item.start + item.length] = False
    shown = media_inputs(rows, ids.shape[1], ids.device)
    if not strays.any():
        yield {"input_ids": ids, **shown}
        return

    def real(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return (ids, *args[1:]) if args and args[0].shape == ids.shape else None

    with model.get_input_embeddings().register_forward_pre_hook(real):
        yield {"input_ids": ids.masked_fill(strays, filler), **shown}


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate along the first dimension, the others padded with zeros to the largest."""
    largest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]

    def filled(part: Tensor) -> Tensor:
        missing = [most - size for most, size in zip(largest, part.shape[1:], strict=True)]
        return nn.functional.pad(part, [end for most in reversed(missing) for end in (0, most)])

    return torch.cat([filled(part) for part in parts])


def head_size(model: Any) -> int | None:
    """Dimension of an attention head, by the model's config; None where the config does not say."""
    config = getattr(model, "config", None)
    if config is None:
        return None
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    size = getattr(text, "head_dim", None) or (heads and getattr(text, "hidden_size", 0) // heads)
    return int(size) if isinstance(size, int) else None
