"""Policies with an adapter over a frozen base that bitsandbytes holds in 4 or 8 bits (QLoRA, arXiv 2305.14314)."""

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from covey.core.findings import CheckError
from covey.policy.sharded_tensors import full_tensor
from covey.runtime.user_code import warn


def quantization_method(model: Any) -> str | None:
    """Quantization method of a model's weights, such as "bitsandbytes" or "gptq", or None."""
    if not getattr(model, "is_quantized", False) and getattr(model, "hf_quantizer", None) is None:
        return None
    config = getattr(model.config, "quantization_config", None) or {}
    method = _setting(config, "quant_method") or getattr(model, "quantization_method", None) or "an unknown method"
    name = str(getattr(method, "value", method))
    return "bitsandbytes" if name.startswith("bitsandbytes") else name


def check_installed(quantization: Any) -> None:
    wanted = any(_setting(quantization, name) for name in ("load_in_4bit", "load_in_8bit"))
    if wanted and importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError("quantising to 4 or 8 bits needs bitsandbytes: pip install bitsandbytes")


def check_shardable(quantization: Any, sharding: str, computes_in: str | None) -> None:
    """Raise CheckError for quantised weights that `sharding` ("FSDP2", "ZeRO-3" or "") cannot shard.

    FSDP2 shards 4-bit weights that bitsandbytes stores as floating-point numbers; weights stored as integers stay whole
    in each process. `computes_in` is the dtype to which weights are cast for products, such as "bfloat16", or None.
    """
    if quantization is None or not sharding:
        return
    if sharding != "FSDP2" or not _setting(quantization, "load_in_4bit"):
        bits = [str(bits) for bits in (4, 8) if _setting(quantization, f"load_in_{bits}bit")]
        method = _setting(quantization, "quant_method")
        how = f"to {bits[0]} bits" if bits else f"with {getattr(method, 'value', method)}"
        raise CheckError.of(
            "quantised-weights",
            f"{sharding} cannot shard weights that are quantised {how}.",
            "Use bitsandbytes with load_in_4bit=True under FSDP2; or launch with DDP or ZeRO-2, where each process"
            " holds all weights; or load the model without `quantization_config`.",
        )
    storage = str(_setting(quantization, "bnb_4bit_quant_storage") or "uint8").removeprefix("torch.")
    if computes_in is not None and "float" in storage and storage != computes_in:
        raise CheckError.of(
            "quantised-weights",
            f"bnb_4bit_quant_storage={storage!r} cannot be used with computing in {computes_in} under FSDP2, which"
            " would cast the stored 4-bit weights as if they were numbers of that type.",
            f"Set bnb_4bit_quant_storage={computes_in!r}.",
        )


def _setting(quantization: Any, name: str) -> Any:
    settings = quantization if isinstance(quantization, dict) else vars(quantization)
    return settings.get(name) or settings.get(f"_{name}")


def is_quantized_layer(module: Any) -> bool:
    """True for bitsandbytes' linear layers, also when FSDP2 has replaced their weight parameter."""
    weight = module._parameters.get("weight")
    is_packed = type(weight).__name__ in ("Params4bit", "Int8Params")  # bitsandbytes is imported only when used
    return is_packed or (weight is not None and getattr(module, "quant_state", None) is not None)


def keep_gradients(model: nn.Module) -> None:
    """Keep bitsandbytes from rearranging 4-bit weights for CPU inference, whose products have no gradient."""
    layer: Any
    for layer in model.modules():
        if type(layer._parameters.get("weight")).__name__ == "Params4bit":
            layer.support_avx512bf16_for_cpu = False
            layer.state_dict()  # restores the original order of the weight as a side effect


def warn_about_unquantized(model: nn.Module, largest: float = 0.5) -> None:
    """Warn if fused experts, which bitsandbytes does not quantise, are more than a share `largest` of the weights."""
    fused = {name: p for name, p in model.named_parameters() if p.dim() == 3 and not p.requires_grad}
    count = sum(parameter.numel() for parameter in fused.values())
    others = sum(dequantized_specs(layer)["weight"].numel() for layer in model.modules() if is_quantized_layer(layer))
    if fused and count > largest * (count + others):
        name, share = next(iter(fused)).rpartition(".")[2], count / (count + others)
        warn(
            f"the model is quantised by bitsandbytes, which leaves {share:.0%} of the weights unquantised:"
            f" the fused experts ({name} and others) are not linear layers. They take their full memory.",
        )


def dequantized_specs(layer: Any) -> dict[str, Tensor]:
    """Names, shapes and dtypes of `dequantized_state`, as tensors without data."""
    weight, state = layer.weight, _state_of(layer)
    shape, dtype = (weight.shape, torch.float32) if state is None else (state.shape, state.dtype)
    like = {"weight": torch.empty(tuple(shape), dtype=dtype, device="meta")}
    return like if layer.bias is None else {**like, "bias": layer.bias}


def _state_of(layer: Any) -> Any:
    return getattr(layer.weight, "quant_state", None) or getattr(layer, "quant_state", None)


def dequantized_state(layer: Any) -> dict[str, Tensor]:
    """Dequantised weight of a layer, [out, in], and its bias."""
    from bitsandbytes import functional

    packed, state = layer.weight, _state_of(layer)
    if state is not None:
        weight = functional.dequantize_4bit(full_tensor(packed), state)
    else:  # the scales move from the parameter to the layer's state when it is first used
        scales = packed.SCB if layer.state.SCB is None else layer.state.SCB
        weight = functional.int8_vectorwise_dequant(packed.data, scales.to(packed.device))
    return {"weight": weight} if layer.bias is None else {"weight": weight, "bias": layer.bias}


def dequantized_layer(layer: Any) -> nn.Linear:
    state = dequantized_state(layer)
    plain = nn.Linear(layer.in_features, layer.out_features, bias="bias" in state, device="meta")
    for name, tensor in state.items():
        plain.register_parameter(name, nn.Parameter(tensor.detach().clone(), requires_grad=False))
    return plain


def unquantized_tuner(kind: type) -> type:
    """PEFT's class of the same adapter for an unquantised linear layer; ValueError if Covey knows none."""
    from peft.tuners import lora

    if issubclass(kind, lora.LoraLayer):
        return lora.Linear
    raise CheckError.of(
        "weights-whole",
        f"an adapter of type {kind.__name__} cannot be merged into quantised weights here; LoRA and DoRA can.",
        "Send the adapter alone (vllm_lora_sync='adapter'), or load the model without `quantization_config`.",
    )
