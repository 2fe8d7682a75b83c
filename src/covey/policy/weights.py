"""Weights of a policy under the names of a Hugging Face checkpoint, with wrappers, shards and adapters undone."""

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from covey.core.engine import TensorSpec, WeightUpdate
from covey.core.findings import CheckError
from covey.core.model import unwrapped
from covey.policy.adapters import active_adapter, adapter_config, base_model, has_adapter
from covey.policy.quantization import (
    dequantized_layer,
    dequantized_specs,
    dequantized_state,
    is_quantized_layer,
    quantization_method,
    unquantized_tuner,
)
from covey.policy.sharded_tensors import (
    full_shape,
    full_tensor,
    original_class,
    reshard,
    sent_dtype,
    with_original_classes,
)


def weight_update(
    model: Any, version: int, *, adapter_only: bool = False, dtype: torch.dtype | None = None
) -> WeightUpdate:
    """The policy's weights after `version` optimizer steps; tensors are gathered and copied only when they are read.

    Args:
        model: the policy, or a wrapper of it.
        version: number of optimizer steps behind the weights.
        adapter_only: send the active adapter alone, with the base model as `base`; else adapters are merged.
        dtype: that the receiver computes in. Wider matrices are cast to it; vectors keep theirs, as some need float32.

    Raises:
        ValueError: the base is quantised in a way that Covey cannot undo, an adapter unties weights that the model
            ties, or an adapter is to be sent and none or several are active.
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
    if quantization_method(base) not in (None, "bitsandbytes"):
        return alone
    return dataclasses.replace(alone, base=_update(version, _as_in_checkpoint(base, _model_parts(base, False)), dtype))


class _Part(NamedTuple):
    """Tensors that are computed together: their shapes, and a function that makes them in the receiver's dtype."""

    like: dict[str, Tensor]
    make: Callable[[torch.dtype | None], dict[str, Tensor]]


def _update(version: int, parts: list[_Part], dtype: torch.dtype | None) -> WeightUpdate:
    def tensors() -> Iterator[tuple[str, Tensor]]:
        for part in parts:
            with torch.no_grad():  # never around a yield: another thread may request the next tensor
                made = part.make(dtype)
            for name, tensor in made.items():
                yield name, tensor.detach().to(sent_dtype(tensor, dtype))

    specs = tuple(
        TensorSpec(name, tuple(tensor.shape), sent_dtype(tensor, dtype))
        for part in parts
        for name, tensor in part.like.items()
    )
    return WeightUpdate(version, specs, tensors)


def _model_parts(base: nn.Module, merge: bool) -> list[_Part]:
    """One part per module that has tensors; tied tensors are in one part only."""
    tied: dict[str, str] = getattr(base, "all_tied_weights_keys", None) or {}
    seen: dict[int, Tensor] = {}
    parts = []
    for prefix, stored in _modules(base, merge):
        names = {}
        for key, tensor in stored.like.items():
            name = checkpoint_name(f"{prefix}.{key}" if prefix else key)
            if not (name in tied and id(tensor) in seen):
                names[key] = name
            seen[id(tensor)] = tensor
        if names:
            parts.append(_gathered(stored, names))
    return parts


def _gathered(stored: _Part, names: dict[str, str]) -> _Part:
    """A part that gathers the tensors of `stored` from their shards and renames them."""

    def make(dtype: torch.dtype | None) -> dict[str, Tensor]:
        state = stored.make(dtype)  # merged weights are whole already, and were not cast
        return {name: full_tensor(state[key], dtype) for key, name in names.items()}

    like = ((name, stored.like[key]) for key, name in names.items())
    return _Part({name: torch.empty(full_shape(t), dtype=t.dtype, device="meta") for name, t in like}, make)


def _modules(module: nn.Module, merge: bool, prefix: str = "") -> Iterator[tuple[str, _Part]]:
    """Names of modules and parts with their own tensors, depth first; a module that PEFT adapted is one part."""
    if any(hasattr(module, mark) for mark in ("base_layer", "modules_to_save", "token_adapter")):
        yield prefix, _adapted(module, merge)
        return
    if is_quantized_layer(module):
        yield prefix, _Part(dequantized_specs(module), lambda dtype: dequantized_state(module))
        return
    if own := _own_state(module):
        yield prefix, _Part(own, lambda dtype: _own_state(module))
    for name, child in module.named_children():
        yield from _modules(child, merge, f"{prefix}.{name}" if prefix else name)


def _own_state(module: nn.Module) -> dict[str, Tensor]:
    own: dict[str, Tensor] = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    transient = module._non_persistent_buffers_set
    return own | {name: buffer for name, buffer in module.named_buffers(recurse=False) if name not in transient}


def _adapted(module: Any, merge: bool) -> _Part:
    if hasattr(module, "modules_to_save"):
        saved = [name for name in module.active_adapters if name in module.modules_to_save]
        used = module.modules_to_save[saved[0]] if merge and saved else module.original_module
        return _Part(used.state_dict(keep_vars=True), lambda dtype: used.state_dict(keep_vars=True))
    tuner = getattr(module, "token_adapter", module)
    layer = tuner.get_base_layer()
    quantized = is_quantized_layer(layer)
    like = dequantized_specs(layer) if quantized else layer.state_dict(keep_vars=True)
    if merge and tuner.active_adapters:
        return _Part(like, lambda dtype: _merged(tuner).state_dict())
    return _Part(like, lambda dtype: dequantized_state(layer) if quantized else layer.state_dict(keep_vars=True))


def _merged(tuner: Any) -> nn.Module:
    """Copy of the base layer with its active adapters added."""
    level = twin = _twin(tuner)
    if is_quantized_layer(tuner.get_base_layer()):
        twin.__class__ = unquantized_tuner(type(tuner))  # PEFT's class would quantise the sum again
    while hasattr(level, "base_layer"):  # adapters of single parameters wrap one another
        level.merge(safe_merge=False)
        level = level.base_layer
    return twin.get_base_layer()


def _twin(module: nn.Module) -> Any:
    """Copy of a module with gathered parameters on the same device, without hooks and sharding."""
    if is_quantized_layer(module):
        return dequantized_layer(module)
    twin: nn.Module = object.__new__(original_class(module))  # FSDP2's class cannot be copied
    own = {name: copy.copy(value) if isinstance(value, (list, dict)) else value for name, value in vars(module).items()}
    # A tensor that two modules share is copied twice here: each copy is merged at most once.
    own["_parameters"] = {
        k: p if p is None else nn.Parameter(full_tensor(p).clone(), False) for k, p in module._parameters.items()
    }
    own["_modules"] = {k: m if m is None else _twin(m) for k, m in module._modules.items()}
    vars(twin).update(own)
    return twin


def _as_in_checkpoint(base: Any, parts: list[_Part]) -> list[_Part]:
    """Parts with the names and shapes that `save_pretrained` writes.

    transformers fuses some weights on loading (such as experts) and splits them on saving, for which all tensors of one
    weight must be in one part. The smallest parts that do are used: of a module, of a layer, or of the whole model.
    """
    named = with_original_classes(base, {})
    if (known := getattr(named, "_weight_conversions", None)) is not None:
        named._weight_conversions = [entry for entry in known if entry.was_used()]  # ZeRO-3 lists all possible ones
    rearranges = _rearranges(named)
    whole = _joined(parts)
    saved = revert_weight_conversion(named, dict(whole.like))
    if _same(saved, whole.like):
        return parts
    for joined in (parts, _by_layer(parts), [whole]):
        converted = [_converted(named, part, rearranges) for part in joined]
        if _same(_joined(converted).like, saved):
            return converted
    raise AssertionError("all parts together equal the whole")


def _converted(base: Any, part: _Part, rearranges: bool) -> _Part:
    try:
        like = revert_weight_conversion(base, dict(part.like))
    except (RuntimeError, ValueError, KeyError, IndexError):  # the conversion needs more than this part
        like = {}

    def make(dtype: torch.dtype | None) -> dict[str, Tensor]:
        return revert_weight_conversion(base, part.make(dtype if rearranges and rounds_alike(dtype) else None))

    def rounds_alike(dtype: torch.dtype | None) -> bool:
        """True if a cast before the conversion gives the same as a cast after it: matrices stay matrices."""
        cast = {name: tensor.to(sent_dtype(tensor, dtype)) for name, tensor in part.like.items()}
        rounded = revert_weight_conversion(base, cast)
        return all(rounded[name].dtype == sent_dtype(tensor, dtype) for name, tensor in like.items())

    return _Part(like, make)


def _rearranges(base: Any) -> bool:
    """True if the conversion to checkpoints only rearranges numbers, as when experts are split."""
    known = getattr(base, "_weight_conversions", None) or get_model_conversion_mapping(base, add_legacy=False)
    steps = [step for entry in known for step in getattr(entry, "operations", None) or ()]
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
    return _Part(like, lambda dtype: {name: tensor for part in parts for name, tensor in part.make(dtype).items()})


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].shape == b[k].shape and a[k].dtype == b[k].dtype for k in a)


def _adapter_parts(model: Any, name: str) -> list[_Part]:
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(
        model, state_dict=model.state_dict(keep_vars=True), adapter_name=name, save_embedding_layers=False
    )
    return [_gathered(_Part(state, lambda dtype: state), {key: checkpoint_name(key)}) for key in state]


def _check_can_be_whole(base: Any, is_adapted: bool) -> None:
    method = quantization_method(base)
    if method in (None, "bitsandbytes"):
        return
    advice = (
        "Send the adapter alone (vllm_lora_sync='adapter') to a server that was started with the same quantised model"
        if is_adapted
        else "Load it without `quantization_config`"
    )
    raise CheckError.of(
        "weights-whole",
        f"the weights of {type(base).__name__} are quantised with {method} and cannot be sent as a checkpoint; weights"
        " that bitsandbytes quantised can.",
        f"{advice}.",
    )


def _check_still_tied(base: Any) -> None:
    """Raise CheckError for an adapter that makes tied weights differ, which are one tensor in a checkpoint."""
    tied: dict[str, str] = getattr(base, "all_tied_weights_keys", None) or {}
    modules = {checkpoint_name(name): module for name, module in base.named_modules()}
    for names in tied.items():
        first, second = (name.rpartition(".")[0] for name in names)
        if first in modules and second in modules and _added_to(modules[first]) != _added_to(modules[second]):
            raise CheckError.of(
                "weights-whole",
                f"{type(base).__name__} ties {first} and {second}: checkpoints, and servers that load them, have a"
                " single weight for both, and the adapter makes them differ.",
                "Let it change both equally (ensure_weight_tying=True in the LoraConfig), leave both out of"
                " target_modules and modules_to_save, or load the model with tie_word_embeddings=False, here and in the"
                " server.",
            )


def _added_to(module: Any) -> set[int]:
    """Storage addresses of the parameters that active adapters add to or substitute in a module."""
    added: list[Any] = []
    if hasattr(module, "modules_to_save"):
        used = [module.modules_to_save[name] for name in module.active_adapters if name in module.modules_to_save]
        added = [parameter for module in used for parameter in module.parameters()]
    elif tuner := getattr(module, "token_adapter", module if hasattr(module, "base_layer") else None):
        theirs: list[Any] = [getattr(tuner, name) for name in tuner.adapter_layer_names]
        parts = [part[name] for part in theirs for name in tuner.active_adapters if name in part]
        added = [p for part in parts for p in ([part] if isinstance(part, Tensor) else part.parameters())]
    local = (getattr(p, "ds_tensor", getattr(p, "_local_tensor", p)) for p in added)
    return {tensor.untyped_storage().data_ptr() for tensor in local}


def checkpoint_name(name: str) -> str:
    """Name of a parameter without the parts that torch.compile and activation checkpointing add."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


# ---- a sharded policy, or its adapters, as a folder for `from_pretrained`, one module at a time ----------------------


def save_sharded(policy: Any, folder: str | Path, *, writes: bool, file_bytes: int = 5 * 10**9) -> None:
    """Write weights and config for `from_pretrained`, in files of at most `file_bytes` bytes.

    Collective: all processes call it, and the one with `writes` writes.
    """
    policy, folder = unwrapped(policy), Path(folder)
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
    if has_adapter(policy):
        _save_adapters(policy, folder, writes)
        return
    update = weight_update(policy, 0)
    files, tensors = plan_files(update.specs, file_bytes), update.tensors()
    for file, specs in files.items():
        ours = islice(tensors, len(specs))  # tensors are in the order of the specs
        state = {name: tensor.cpu().contiguous() for name, tensor in ours if writes}
        if writes:
            save_file(state, folder / file, metadata={"format": "pt"})
    if not writes:
        return
    if len(files) > 1:
        index = {spec.name: name for name, specs in files.items() for spec in specs}
        listing = {"metadata": {"total_size": update.nbytes}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(listing, indent=2))
    _save_config(policy, folder)


def plan_files(specs: tuple[TensorSpec, ...], file_bytes: int) -> dict[str, list[TensorSpec]]:
    """Assign tensors to files in order, each up to `file_bytes`: 4, 3 and 5 bytes fill files of 8 as 4 + 3 and 5."""
    groups: list[list[TensorSpec]] = [[]]
    for spec in specs:
        if groups[-1] and sum(earlier.nbytes for earlier in groups[-1]) + spec.nbytes > file_bytes:
            groups.append([])
        groups[-1].append(spec)
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _save_config(model: Any, folder: Path) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [original_class(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    if getattr(model, "_auto_class", None) is not None:
        custom_object_save(model, str(folder), config=config)
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def _save_adapters(policy: Any, folder: Path, writes: bool) -> None:
    """Save everything that PEFT has added and, if they were changed, the embeddings, as PEFT does."""
    reshard(policy)
    embeddings = [policy.get_input_embeddings(), policy.get_output_embeddings()]
    of_embeddings = {id(parameter) for module in embeddings if module is not None for parameter in module.parameters()}
    marks = (policy.base_model.prefix, "modules_to_save", "trainable_tokens")
    state = {}
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        is_added = any(part.startswith(marks) for part in name.split("."))
        if parameter.requires_grad or is_added or id(parameter) in of_embeddings:
            tensor = full_tensor(parameter)
            if writes:
                state[name] = tensor.cpu()
    if writes:
        policy.save_pretrained(folder, state_dict=state)


def saves_other_names(model: Any) -> bool:
    """True if tensors have other names or shapes in a model's checkpoints than in the model."""
    named = dict(unwrapped(model).state_dict())
    return revert_weight_conversion(unwrapped(model), dict(named)).keys() != named.keys()


def load_renamed(model: Any, folder: str) -> None:
    """Load the weights of a checkpoint with the renaming of `from_pretrained`; RuntimeError if they do not fit."""
    model = unwrapped(model)
    loaded = type(model).from_pretrained(folder, dtype=model.dtype)
    model.load_state_dict(loaded.state_dict())
