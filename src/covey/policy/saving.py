"""Saving of a sharded policy, or its adapters, as a folder for `from_pretrained`, one module at a time."""

import copy
import json
from pathlib import Path
from typing import Any

from covey.core.engine import TensorSpec
from covey.policy.adapters import has_adapter, unwrapped
from covey.policy.sharded_tensors import full_tensor, original_class, reshard
from covey.policy.weights import weight_update

FILE_BYTES = 5 * 10**9  # most bytes of a file, unless one tensor has more


def save_sharded(policy: Any, folder: str | Path, *, writes: bool, file_bytes: int = FILE_BYTES) -> None:
    """Write the weights, in files of `file_bytes` at most, and the config; collective, one process `writes`."""
    from safetensors.torch import save_file

    policy, folder = unwrapped(policy), Path(folder)
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
    if has_adapter(policy):
        _save_adapters(policy, folder, writes)
        return
    update = weight_update(policy, 0)
    files, tensors = plan_files(update.specs, file_bytes), update.tensors()
    for file, specs in files.items():
        state = {}
        for _ in specs:
            name, tensor = next(tensors)  # in the order of their specs
            if writes:
                state[name] = tensor.cpu().contiguous()
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
    """Assign tensors to files, in order, each as full as allowed: of 4, 3 and 5 bytes in files of 8, two and one."""
    groups: list[list[TensorSpec]] = [[]]
    for spec in specs:
        if groups[-1] and sum(earlier.nbytes for earlier in groups[-1]) + spec.nbytes > file_bytes:
            groups.append([])
        groups[-1].append(spec)
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _save_config(model: Any, folder: Path) -> None:
    from transformers.dynamic_module_utils import custom_object_save

    config = copy.deepcopy(model.config)
    config.architectures = [original_class(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    if getattr(model, "_auto_class", None) is not None:
        custom_object_save(model, str(folder), config=config)
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def _save_adapters(policy: Any, folder: Path, writes: bool) -> None:
    """Save all that PEFT has added, and the embeddings, which it also saves if they were changed."""
    reshard(policy)
    embeddings = [policy.get_input_embeddings(), policy.get_output_embeddings()]
    of_embeddings = {id(parameter) for module in embeddings if module is not None for parameter in module.parameters()}
    marks = (policy.base_model.prefix, "modules_to_save", "trainable_tokens")
    added = {name for name, _ in policy.named_parameters() if any(part.startswith(marks) for part in name.split("."))}
    base = {id(parameter) for name, parameter in policy.named_parameters() if name not in added}
    state = {}
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        if parameter.requires_grad or id(parameter) not in base or id(parameter) in of_embeddings:
            tensor = full_tensor(parameter)
            if writes:
                state[name] = tensor.cpu()
    if writes:
        policy.save_pretrained(folder, state_dict=state)


def saves_other_names(model: Any) -> bool:
    """True if a model's checkpoints have other names or shapes of tensors than the model."""
    from transformers.core_model_loading import revert_weight_conversion

    named = dict(unwrapped(model).state_dict())
    return revert_weight_conversion(unwrapped(model), dict(named)).keys() != named.keys()


def load_renamed(model: Any, folder: str) -> None:
    """Load the weights of a checkpoint with the renaming of `from_pretrained`; RuntimeError for another model."""
    model = unwrapped(model)
    loaded = type(model).from_pretrained(folder, dtype=model.dtype)
    model.load_state_dict(loaded.state_dict())
