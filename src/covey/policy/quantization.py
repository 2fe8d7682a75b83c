"""A policy whose frozen base is held in 4 or 8 bits by bitsandbytes, with an adapter on top (QLoRA, arXiv 2305.14314).

What training needs of such layers, and how one becomes a plain layer again: an engine whose weights are not quantised
takes what the numbers stand for, with the adapter added to them in full precision. Not here: quantising (transformers'
job when it loads), adapters (`peft`).
"""

import importlib.util
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from covey.policy.sharded_tensors import whole

KINDS = ("Params4bit", "Int8Params")
"""Names of bitsandbytes' parameter classes; it is imported only where there are some."""


def quantisation_of(model: Any) -> str | None:
    """How a model's weights are quantised, such as "bitsandbytes" or "gptq"; None where they are not."""
    if not getattr(model, "is_quantized", False) and getattr(model, "hf_quantizer", None) is None:
        return None
    config = getattr(model.config, "quantization_config", None)
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    if method is None:
        method = getattr(model, "quantization_method", None) or "an unknown method"
    name = str(getattr(method, "value", method))
    return "bitsandbytes" if name.startswith("bitsandbytes") else name


def one_quantisation(given: Any, init_kwargs: dict[str, Any]) -> Any:
    """How to quantise the model, named as an argument or among those of `from_pretrained`; None: not at all.

    Raises:
        ValueError: it is named in both places.
    """
    inside = init_kwargs.get("quantization_config")
    if given is not None and inside is not None:
        raise ValueError(
            "`quantization_config` was given twice, as an argument of the trainer and in `model_init_kwargs`. Keep one."
        )
    return inside if given is None else given


def check_installed(quantization: Any) -> None:
    """Quantising with bitsandbytes takes bitsandbytes.

    Raises:
        ImportError: it is not installed.
    """
    wanted = any(_setting(quantization, name) for name in ("load_in_4bit", "load_in_8bit"))
    if wanted and importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError("quantising to 4 or 8 bits needs bitsandbytes: pip install 'covey[quantization]'")


def check_shardable(quantization: Any, sharding: str, computes_in: str | None) -> None:
    """Quantised weights that are to be spread over processes can be.

    FSDP2 moves the bytes of 4-bit weights that bitsandbytes stores as floating-point numbers; those that it stores as
    integers stay whole in each process.

    Args:
        quantization: how weights are quantised, as transformers has it; None: not at all.
        sharding: what spreads weights over processes, "FSDP2" or "ZeRO-3"; "" where nothing does.
        computes_in: the type that weights are converted to where they are multiplied, "bfloat16" say; None: none.

    Raises:
        ValueError: they cannot.
    """
    if quantization is None or not sharding:
        return
    if sharding != "FSDP2" or not _setting(quantization, "load_in_4bit"):
        bits = [str(bits) for bits in (4, 8) if _setting(quantization, f"load_in_{bits}bit")]
        method = _setting(quantization, "quant_method")
        how = f"to {bits[0]} bits" if bits else f"with {getattr(method, 'value', method)}"
        raise ValueError(
            f"{sharding} cannot spread weights over processes that are quantised {how}. Train 4 bits of bitsandbytes"
            " (load_in_4bit=True) with FSDP2; or launch with DDP or ZeRO-2, where each process holds all of them; or"
            " load the model without `quantization_config`."
        )
    storage = str(_setting(quantization, "bnb_4bit_quant_storage") or "uint8").removeprefix("torch.")
    if computes_in is not None and "float" in storage and storage != computes_in:
        raise ValueError(
            f"bnb_4bit_quant_storage={storage!r} does not go with computing in {computes_in} under FSDP2, which would"
            f" round the bytes of 4-bit weights as if they were numbers. Set bnb_4bit_quant_storage={computes_in!r}."
        )


def _setting(quantization: Any, name: str) -> Any:
    settings = quantization if isinstance(quantization, dict) else vars(quantization)
    return settings.get(name) or settings.get(f"_{name}")


def is_quantised_layer(module: Any) -> bool:
    """Whether it is one of bitsandbytes' linear layers; also where FSDP2 has put its own parameter for the weight."""
    weight = module._parameters.get("weight")
    return type(weight).__name__ in KINDS or (weight is not None and getattr(module, "quant_state", None) is not None)


def keep_gradients(model: nn.Module) -> None:
    """Let gradients through 4-bit layers on a CPU also after the model has been sampled from.

    On CPUs with AVX512-BF16 bitsandbytes rearranges a layer's weight the first time that it is used for inference, and
    there is no gradient through the product with such a weight: training would go on with those of a part of the model.
    """
    layer: Any
    for layer in model.modules():
        if type(layer._parameters.get("weight")).__name__ == "Params4bit":
            layer.support_avx512bf16_for_cpu = False
            layer.state_dict()  # which bitsandbytes writes in the original order, putting the weight back into it


def tell_what_is_not(model: nn.Module, largest: float = 0.5) -> None:
    """Warn where quantising left most of a model as it was: bitsandbytes knows linear layers, not fused experts."""
    fused = {name: p for name, p in model.named_parameters() if p.dim() == 3 and not p.requires_grad}
    count = sum(parameter.numel() for parameter in fused.values())
    others = sum(plain_like(layer)["weight"].numel() for layer in model.modules() if is_quantised_layer(layer))
    if fused and count > largest * (count + others):
        name, share = next(iter(fused)).rpartition(".")[2], count / (count + others)
        warnings.warn(
            f"the model is quantised by bitsandbytes, which leaves {share:.0%} of the weights as they are:"
            f" those of fused experts ({name}, ...), which are no linear layers. They take their full memory.",
            stacklevel=3,
        )


def plain_like(layer: Any) -> dict[str, Tensor]:
    """The tensors of `plain_state`, without data."""
    weight, state = layer.weight, _state_of(layer)
    shape, dtype = (weight.shape, torch.float32) if state is None else (state.shape, state.dtype)
    like = {"weight": torch.empty(tuple(shape), dtype=dtype, device="meta")}
    return like if layer.bias is None else {**like, "bias": layer.bias}


def _state_of(layer: Any) -> Any:
    """What 4 bits stand for; None where there are 8."""
    return getattr(layer.weight, "quant_state", None) or getattr(layer, "quant_state", None)


def plain_state(layer: Any) -> dict[str, Tensor]:
    """The weight that a quantised layer stands for, [out, in], and its bias."""
    from bitsandbytes import functional

    packed, state = layer.weight, _state_of(layer)
    if state is not None:
        weight = functional.dequantize_4bit(whole(packed), state)
    else:  # the scales move from the parameter to the layer's state when it is first used
        scales = packed.SCB if layer.state.SCB is None else layer.state.SCB
        weight = functional.int8_vectorwise_dequant(packed.data, scales.to(packed.device))
    return {"weight": weight} if layer.bias is None else {"weight": weight, "bias": layer.bias}


def plain_layer(layer: Any) -> nn.Linear:
    """An ordinary linear layer with that weight, frozen."""
    state = plain_state(layer)
    made = nn.Linear(layer.in_features, layer.out_features, bias="bias" in state, device="meta")
    for name, tensor in state.items():
        made.register_parameter(name, nn.Parameter(tensor.detach().clone(), requires_grad=False))
    return made


def plain_tuner(kind: type) -> type:
    """The class that PEFT has for the same adapter beside an ordinary linear layer.

    Raises:
        ValueError: Covey knows none.
    """
    from peft.tuners import lora

    if issubclass(kind, lora.LoraLayer):
        return lora.Linear
    raise ValueError(
        f"an adapter of type {kind.__name__} cannot be merged into quantised weights here; LoRA and DoRA can. Send the"
        " adapter alone (vllm_lora_sync='adapter'), or load the model without `quantization_config`."
    )
