"""Weights of which this process holds a part: FSDP2's and ZeRO-3's, told apart from whole ones and put together.

Not here: which of them make up a policy, and what they are called (`covey.policy.weights`).
"""

from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(model: Any) -> bool:
    """Whether a pass over the weights takes all processes."""
    return any(is_shard(parameter) for parameter in model.parameters())


def is_shard(tensor: Tensor) -> bool:
    """Whether this process holds a part of it: a DTensor, as FSDP2 makes them, or a parameter of ZeRO-3."""
    return hasattr(tensor, "full_tensor") or hasattr(tensor, "ds_id")


def original_class(model: nn.Module) -> type:
    """The class a module had before FSDP2 gave it one of its own."""
    from torch.distributed.fsdp import FSDPModule

    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def reshard(model: nn.Module) -> None:
    """Let go of weights that FSDP2 has put together and keeps, as it does with the last ones after a forward pass."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_shape(tensor: Tensor) -> torch.Size:
    """The shape of all shards together."""
    return getattr(tensor, "ds_shape", tensor.shape)


def travels_in(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The number format in which a tensor goes to whoever computes in `dtype`: matrices that are wider go in that."""
    narrows = dtype is not None and tensor.dim() > 1 and tensor.is_floating_point()
    return dtype if dtype is not None and narrows and dtype.itemsize < tensor.dtype.itemsize else tensor.dtype


def whole(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor from all its shards, on the device that they are gathered on; every process must ask for it.

    Args:
        tensor: a shard, or a tensor that is whole.
        dtype: of whoever takes it: shards are made as narrow as it `travels_in` before they are gathered.
    """
    if hasattr(tensor, "ds_id"):
        return _whole_of_zero(tensor, dtype)
    if not hasattr(tensor, "full_tensor"):
        return tensor.detach()
    shard: Any = tensor.detach()
    shard = shard.to(travels_in(shard, dtype))
    return shard.to(shard.device_mesh.device_type).full_tensor()  # shards may be kept on the CPU, which has no NCCL


def _whole_of_zero(parameter: Any, dtype: torch.dtype | None) -> Tensor:
    """The same of a parameter of ZeRO-3: DeepSpeed gathers it as wide as it is, this function where it narrows."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus

    shape, shard, group = parameter.ds_shape, parameter.ds_tensor, parameter.ds_process_group
    narrow = travels_in(torch.empty(shape, dtype=parameter.dtype, device="meta"), dtype)
    others = torch.distributed.get_world_size(group) - 1
    is_apart = parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE  # else it is whole already
    is_here = shard.status.name == "AVAILABLE"  # else it is on a disk
    if narrow == parameter.dtype or not (is_apart and is_here and others * shard.numel() < shape.numel()):
        with GatheredParameters([parameter]):  # the last: several groups of processes have all of it (MiCS)
            return parameter.detach().to(narrow, copy=True)
    shard = shard.detach().to(narrow).to(parameter.device)
    parts = shard.new_empty(others + 1, shard.numel())
    torch.distributed.all_gather(list(parts.unbind()), shard, group=group)
    return parts.view(-1)[: shape.numel()].view(shape)


def under_own_classes(module: nn.Module, made: dict[int, nn.Module]) -> Any:
    """The module and all within it, tensors shared, in the classes they had before FSDP2.

    transformers looks up by a module's class what checkpoints call its weights, if they were not loaded from one.
    """
    if id(module) not in made:
        twin: nn.Module = object.__new__(original_class(module))
        made[id(module)] = twin
        children = {k: None if m is None else under_own_classes(m, made) for k, m in module._modules.items()}
        twin.__dict__.update(vars(module) | {"_modules": children})
    return made[id(module)]
