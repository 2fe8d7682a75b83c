"""Sources of weights: what a policy looks like to an engine that has a copy of its own.

Whatever the policy is wrapped in (DDP, torch.compile, PEFT) or sharded by (FSDP2, ZeRO-3), its tensors come out under
the names of a Hugging Face checkpoint, so that whoever can load the model can take them. Adapters are merged one module
at a time into copies; the policy's own parameters are never written to. Not here: where the tensors go
(`covey.engines`), or when (`covey.trainer.weight_sync`).
"""

import copy
import dataclasses
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from covey.core.weights import TensorSpec, WeightUpdate
from covey.policy.quantization import (
    is_quantised_layer,
    plain_layer,
    plain_like,
    plain_state,
    plain_tuner,
    quantisation_of,
)
from covey.policy.sharded_tensors import original_class, reshard, travels_in, under_own_classes, whole, whole_shape
from covey.policy.vlm_parts import adapted_parts, image_encoder

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing put into the names of the modules they wrap."""


def weight_update(
    model: Any, version: int, *, adapter_only: bool = False, dtype: torch.dtype | None = None
) -> WeightUpdate:
    """The policy's weights as one version; nothing is gathered or copied before a pass over it begins.

    Args:
        model: a transformers or PEFT model, or a wrapper of one.
        version: optimizer steps they have taken.
        adapter_only: the active adapter's tensors alone, under the names of its `adapter_model.safetensors`, with the
            model under it as `base`. Otherwise active adapters are added to the weights they change.
        dtype: of whoever takes them: matrices that are wider travel in it. Vectors (norms, biases) stay as they are:
            they weigh little, and some are kept in float32.

    Raises:
        ValueError: the base is quantised in a way that Covey cannot undo, and was to be sent; or an adapter makes two
            weights of one that the model ties; or there is no adapter, or several are active, and one was to be sent.
    """
    model = unwrapped(model)
    reshard(model)
    base = base_model(model)
    if not adapter_only:
        _check_can_be_whole(base, is_adapted=base is not model)
        _check_still_tied(base)
        return _update(version, _as_in_checkpoint(base, _model_parts(base, merge=True)), dtype)
    name = active_adapter(model)
    alone = _update(version, _adapter_parts(model, name), dtype)
    alone = dataclasses.replace(alone, adapter=adapter_config(model, name))
    if quantisation_of(base) not in (None, "bitsandbytes"):
        return alone
    return dataclasses.replace(alone, base=_update(version, _as_in_checkpoint(base, _model_parts(base, False)), dtype))


def unwrapped(model: Any) -> Any:
    """The model inside DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def base_model(model: Any) -> Any:
    """The transformers model inside a PEFT model; any other model itself."""
    return unwrapped(model.get_base_model()) if _is_peft(model) else model


def has_adapter(model: Any) -> bool:
    """Whether the policy is a PEFT model."""
    return _is_peft(unwrapped(model))


def active_adapter(model: Any) -> str:
    """The name of the one adapter that is in use.

    Raises:
        ValueError: there is none, or more than one.
    """
    if not _is_peft(model):
        raise ValueError(
            f"only an adapter can be sent by itself, and {type(model).__name__} has none. Send the whole model, or"
            " train an adapter with `peft_config`."
        )
    active = list(model.active_adapters)
    if len(active) != 1:
        raise ValueError(
            f"the adapters {active} are in use at once, but a server samples from one at a time. Merge them"
            " (vllm_lora_sync='merged'), or activate one with model.set_adapter(name)."
        )
    return active[0]


def adapter_config(model: Any, name: str) -> dict[str, Any]:
    """The adapter's configuration as its `adapter_config.json` has it."""
    config = {key: _plain(value) for key, value in model.peft_config[name].to_dict().items() if key != "runtime_config"}
    config["inference_mode"] = True
    if config.get("base_model_name_or_path") is None:
        config["base_model_name_or_path"] = getattr(base_model(model).config, "_name_or_path", None) or None
    return config


def why_not_alone(model: Any) -> str | None:
    """Why servers could not load the active adapter as it is, or None if they can.

    They know low-rank matrices beside linear layers, of one rank and scale for a layer, and nothing else that an
    adapter may hold.
    """
    model = unwrapped(model)
    config = model.peft_config[active_adapter(model)]
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        return f"it is of type {kind}"
    for name, why in (
        ("use_dora", "it is a DoRA"),
        ("modules_to_save", "it holds whole modules (modules_to_save)"),
        ("trainable_token_indices", "it holds token embeddings (trainable_token_indices)"),
        ("target_parameters", "it changes parameters outside of linear layers (target_parameters)"),
        ("rank_pattern", "its rank differs between layers (rank_pattern)"),
        ("alpha_pattern", "its scale differs between layers (alpha_pattern)"),
        ("layer_replication", "it repeats layers (layer_replication)"),
        ("lora_bias", "it has biases (lora_bias)"),
    ):
        if getattr(config, name, None):
            return why
    if image_encoder(model) is not None and adapted_parts(model) != {"llm"}:
        return "it changes what encodes images, where servers take none"
    return "it trains biases" if getattr(config, "bias", "none") != "none" else None


@dataclass(frozen=True)
class _Part:
    """Tensors that come into being together.

    Attributes:
        like: every tensor as an empty one on the meta device, by name.
        make: (dtype of whoever takes them) the same with data, each whole. Where rounding before tensors are put
            together is rounding after it, they are in that dtype already, and shards have travelled in it.
    """

    like: dict[str, Tensor]
    make: Callable[[torch.dtype | None], dict[str, Tensor]]


def _update(version: int, parts: list[_Part], dtype: torch.dtype | None) -> WeightUpdate:
    def tensors() -> Iterator[tuple[str, Tensor]]:
        for part in parts:
            with torch.no_grad():  # never around a yield: another thread may ask for the next tensor
                made = part.make(dtype)
            for name, tensor in made.items():
                yield name, tensor.detach().to(travels_in(tensor, dtype))

    specs = tuple(
        TensorSpec(name, tuple(tensor.shape), travels_in(tensor, dtype))
        for part in parts
        for name, tensor in part.like.items()
    )
    return WeightUpdate(version, specs, tensors)


# ---- the whole model ------------------------------------------------------------------------------------------------


def _model_parts(base: nn.Module, merge: bool) -> list[_Part]:
    """One part per module that holds tensors, tied ones once."""
    tied: dict[str, str] = getattr(base, "all_tied_weights_keys", None) or {}
    seen: dict[int, Tensor] = {}
    parts = []
    for prefix, source in _sources(base, merge):
        names = []
        for key, tensor in source.looks().items():
            name = checkpoint_name(f"{prefix}.{key}" if prefix else key)
            if not (name in tied and id(tensor) in seen):
                names.append((key, name))
            seen[id(tensor)] = tensor
        if names:
            parts.append(_module_part(source, names))
    return parts


@dataclass(frozen=True)
class _Source:
    """Where a module's tensors are.

    Attributes:
        now: by name, as they lie there: perhaps shards, and without what an adapter adds.
        merged: the same with active adapters added, as copies; None where there is nothing to add.
        like: tensors of their names and shapes, where it takes work to have `now`.
    """

    now: Callable[[], dict[str, Tensor]]
    merged: Callable[[], dict[str, Tensor]] | None = None
    like: Callable[[], dict[str, Tensor]] | None = None

    def looks(self) -> dict[str, Tensor]:
        """Names, shapes and types."""
        return (self.like or self.now)()


def _module_part(source: _Source, names: list[tuple[str, str]]) -> _Part:
    def make(dtype: torch.dtype | None) -> dict[str, Tensor]:
        state = (source.merged or source.now)()  # what was merged is whole, and was merged unrounded
        return {name: whole(state[key], dtype) for key, name in names}

    state = source.looks()
    return _Part({name: _meta(state[key]) for key, name in names}, make)


def _sources(module: nn.Module, merge: bool, prefix: str = "") -> Iterator[tuple[str, _Source]]:
    """Modules that hold tensors of their own, one that PEFT adapted as a whole; depth first, with their names."""
    if any(hasattr(module, mark) for mark in ("base_layer", "modules_to_save", "token_adapter")):
        yield prefix, _adapted(module, merge)
        return
    if is_quantised_layer(module):
        yield prefix, _Source(partial(plain_state, module), like=partial(plain_like, module))
        return
    if _own_state(module):
        yield prefix, _Source(partial(_own_state, module))
    for name, child in module.named_children():
        yield from _sources(child, merge, f"{prefix}.{name}" if prefix else name)


def _own_state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers of the module, without those of its children."""
    transient = module._non_persistent_buffers_set
    own: dict[str, Tensor] = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
    own |= {name: t for name, t in module._buffers.items() if t is not None and name not in transient}
    return own


def _adapted(module: Any, merge: bool) -> _Source:
    if hasattr(module, "modules_to_save"):
        saved = [name for name in module.active_adapters if name in module.modules_to_save]
        used = module.modules_to_save[saved[0]] if merge and saved else module.original_module
        return _Source(partial(used.state_dict, keep_vars=True))
    tuner = getattr(module, "token_adapter", module)
    merged = (lambda: _merged(tuner).state_dict()) if merge and tuner.active_adapters else None
    layer = tuner.get_base_layer()
    if is_quantised_layer(layer):
        return _Source(partial(plain_state, layer), merged, partial(plain_like, layer))
    return _Source(partial(layer.state_dict, keep_vars=True), merged)


def _merged(tuner: Any) -> nn.Module:
    """The base layer with its active adapters added, as a copy."""
    level = twin = _twin(tuner)
    if is_quantised_layer(tuner.get_base_layer()):
        twin.__class__ = plain_tuner(type(tuner))  # PEFT's own would round the sum to 4 or 8 bits again
    while hasattr(level, "base_layer"):  # adapters of single parameters wrap one another
        level.merge(safe_merge=False)
        level = level.base_layer
    return twin.get_base_layer()


def _twin(module: nn.Module) -> Any:
    """A copy with whole parameters of its own, on the same device; hooks and sharding stay behind."""
    if is_quantised_layer(module):
        return plain_layer(module)
    twin: nn.Module = object.__new__(original_class(module))  # FSDP2's own cannot be copied
    vars(twin).update(vars(module))
    for name, value in list(vars(twin).items()):
        if isinstance(value, (list, dict)):
            _set(twin, name, copy.copy(value))
    # A tensor that two modules share is copied twice here: each copy is merged at most once.
    parameters = {k: p if p is None else nn.Parameter(whole(p).clone(), False) for k, p in module._parameters.items()}
    _set(twin, "_parameters", parameters)
    _set(twin, "_modules", {k: m if m is None else _twin(m) for k, m in module._modules.items()})
    return twin


def _set(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute as it is, past what `nn.Module.__setattr__` and its heirs make of it."""
    object.__setattr__(module, name, value)


def _as_in_checkpoint(base: Any, parts: list[_Part]) -> list[_Part]:
    """Parts under the names and in the shapes that `save_pretrained` writes.

    transformers fuses some weights when it loads them (experts of a mixture, say) and takes them apart when it saves.
    That needs all tensors of one weight at hand: those of one module, else of one layer, else of the model.
    """
    from transformers.core_model_loading import revert_weight_conversion

    named = under_own_classes(base, {})
    if (known := getattr(named, "_weight_conversions", None)) is not None:
        named._weight_conversions = [one for one in known if one.was_used()]  # ZeRO-3 keeps all that there might be
    rearranges = _rearranges(named)
    whole = {name: tensor for part in parts for name, tensor in part.like.items()}
    saved = revert_weight_conversion(named, dict(whole))
    if _same(saved, whole):
        return parts
    for joined in (parts, _by_layer(parts), [_joined(parts)]):
        converted = [_converted(named, part, revert_weight_conversion, rearranges) for part in joined]
        if _same({name: tensor for part in converted for name, tensor in part.like.items()}, saved):
            return converted
    raise AssertionError("all parts together are what was compared with")


def _converted(base: Any, part: _Part, revert: Callable[..., dict[str, Tensor]], rearranges: bool) -> _Part:
    try:
        like = revert(base, dict(part.like))
    except (RuntimeError, ValueError, KeyError, IndexError):  # it needs more than this part
        like = {}

    def make(dtype: torch.dtype | None) -> dict[str, Tensor]:
        return revert(base, part.make(dtype if rearranges and rounds_alike(dtype) else None))

    def rounds_alike(dtype: torch.dtype | None) -> bool:
        """Whether the same tensors are rounded before as after: those that are matrices here stay matrices."""
        rounded = revert(base, {name: tensor.to(travels_in(tensor, dtype)) for name, tensor in part.like.items()})
        return all(rounded[name].dtype == travels_in(tensor, dtype) for name, tensor in like.items())

    return _Part(like, make)


def _rearranges(base: Any) -> bool:
    """Whether numbers only change places between a model and its checkpoints, as when experts are taken apart."""
    from transformers import core_model_loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    known = getattr(base, "_weight_conversions", None) or get_model_conversion_mapping(base, add_legacy=False)
    steps = [step for one in known for step in getattr(one, "operations", None) or ()]
    return all(type(step).__module__ == core_model_loading.__name__ for step in steps)


def _by_layer(parts: list[_Part]) -> list[_Part]:
    layers: dict[str, list[_Part]] = {}
    for part in parts:
        name = next(iter(part.like)).split(".")
        number = next((i for i, piece in enumerate(name) if piece.isdigit()), None)
        layers.setdefault(".".join(name if number is None else name[: number + 1]), []).append(part)
    return [_joined(layer) for layer in layers.values()]


def _joined(parts: list[_Part]) -> _Part:
    like = {name: tensor for part in parts for name, tensor in part.like.items()}
    return _Part(like, lambda dtype: {name: one for part in parts for name, one in part.make(dtype).items()})


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].shape == b[k].shape and a[k].dtype == b[k].dtype for k in a)


# ---- an adapter -----------------------------------------------------------------------------------------------------


def _adapter_parts(model: Any, name: str) -> list[_Part]:
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(
        model, state_dict=model.state_dict(keep_vars=True), adapter_name=name, save_embedding_layers=False
    )
    return [_one(checkpoint_name(key), tensor) for key, tensor in state.items()]


def _one(name: str, tensor: Tensor) -> _Part:
    return _Part({name: _meta(tensor)}, lambda dtype: {name: whole(tensor, dtype)})


def _plain(value: Any) -> Any:
    """A setting as JSON can hold it."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


# ---- small things ---------------------------------------------------------------------------------------------------


def _is_peft(model: Any) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def _check_can_be_whole(base: Any, is_adapted: bool) -> None:
    method = quantisation_of(base)
    if method in (None, "bitsandbytes"):
        return
    advice = (
        "Send the adapter alone (vllm_lora_sync='adapter') to a server that was started with the same quantised model"
        if is_adapted
        else "Load it without `quantization_config`"
    )
    raise ValueError(
        f"the weights of {type(base).__name__} are quantised with {method} and cannot be sent as a checkpoint; those of"
        f" bitsandbytes can. {advice}."
    )


def _check_still_tied(base: Any) -> None:
    """A checkpoint holds one tensor for weights that the model ties; an adapter can make them differ."""
    tied: dict[str, str] = getattr(base, "all_tied_weights_keys", None) or {}
    modules = {checkpoint_name(name): module for name, module in base.named_modules()}
    for names in tied.items():
        first, second = (name.rpartition(".")[0] for name in names)
        if first in modules and second in modules and _added_to(modules[first]) != _added_to(modules[second]):
            raise ValueError(
                f"{type(base).__name__} ties {first} and {second}: a checkpoint, and a server that reads one, holds a"
                " single weight for both. The adapter makes two of it. Let it change both alike"
                " (ensure_weight_tying=True in the LoraConfig), leave both out of target_modules and modules_to_save,"
                " or load the model with tie_word_embeddings=False, here and in the server."
            )


def _added_to(module: Any) -> set[int]:
    """Where the numbers lie that active adapters add to a module or put in its place."""
    if hasattr(module, "modules_to_save"):
        used = [module.modules_to_save[name] for name in module.active_adapters if name in module.modules_to_save]
        added = [parameter for one in used for parameter in one.parameters()]
    elif tuner := getattr(module, "token_adapter", module if hasattr(module, "base_layer") else None):
        theirs: list[Any] = [getattr(tuner, name) for name in tuner.adapter_layer_names]
        parts = [part[name] for part in theirs for name in tuner.active_adapters if name in part]
        added = [p for part in parts for p in ([part] if isinstance(part, Tensor) else part.parameters())]
    else:
        added = []
    lie = (getattr(one, "ds_tensor", getattr(one, "_local_tensor", one)) for one in added)
    return {one.untyped_storage().data_ptr() for one in lie}


def checkpoint_name(name: str) -> str:
    """A parameter's name without those of modules that wrap others."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty(whole_shape(tensor), dtype=tensor.dtype, device="meta")
