"""Tensors that FSDP2 or ZeRO-3 have sharded: recognition and gathering."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def is_sharded(model: Any) -> bool:
    return any(is_shard(parameter) for parameter in model.parameters())


def is_shard(tensor: Tensor) -> bool:
    """True for a DTensor of FSDP2 and for a parameter of ZeRO-3."""
    return hasattr(tensor, "full_tensor") or hasattr(tensor, "ds_id")


def own_shard(parameter: Any) -> Tensor:
    """Data of a parameter in this process: its shard, if it is sharded."""
    if hasattr(parameter, "ds_tensor"):
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        if parameter.ds_status == ZeroParamStatus.AVAILABLE:
            parameter.partition()  # small parameters stay gathered; they are gathered again when used
        return parameter.ds_tensor
    return getattr(parameter, "_local_tensor", parameter)


def original_class(model: nn.Module) -> type:
    """Class of a module before FSDP2 replaced it."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def reshard(model: nn.Module) -> None:
    """Release gathered weights that FSDP2 keeps, as it does with the last ones after a forward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full_shape(tensor: Tensor) -> torch.Size:
    return getattr(tensor, "ds_shape", tensor.shape)


def sent_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Dtype in which a tensor is sent to a receiver that computes in `dtype`: a wider matrix is cast to `dtype`."""
    narrows = dtype is not None and tensor.dim() > 1 and tensor.is_floating_point()
    return dtype if dtype is not None and narrows and dtype.itemsize < tensor.dtype.itemsize else tensor.dtype


def full_tensor(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Gather a tensor from all its shards, which are cast to its `sent_dtype` first. Collective."""
    if hasattr(tensor, "ds_id"):
        return _gathered_from_zero(tensor, dtype)
    if not hasattr(tensor, "full_tensor"):
        return tensor.detach()
    shard: Any = tensor.detach()
    shard = shard.to(sent_dtype(shard, dtype))
    return shard.to(shard.device_mesh.device_type).full_tensor()  # shards may be on the CPU, which has no NCCL


def _gathered_from_zero(parameter: Any, dtype: torch.dtype | None) -> Tensor:
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus

    shape, shard, group = parameter.ds_shape, parameter.ds_tensor, parameter.ds_process_group
    narrow = sent_dtype(torch.empty(shape, dtype=parameter.dtype, device="meta"), dtype)
    others = torch.distributed.get_world_size(group) - 1
    is_sharded_now = parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE  # else it is gathered already
    is_here = shard.status.name == "AVAILABLE"  # else on a disk
    if narrow == parameter.dtype or not (is_sharded_now and is_here and others * shard.numel() < shape.numel()):
        with GatheredParameters([parameter]):  # MiCS: several groups have all shards
            return parameter.detach().to(narrow, copy=True)
    shard = shard.detach().to(narrow).to(parameter.device)
    parts = shard.new_empty(others + 1, shard.numel())
    torch.distributed.all_gather(list(parts.unbind()), shard, group=group)
    return parts.view(-1)[: shape.numel()].view(shape)


def with_original_classes(module: nn.Module, copies: dict[int, nn.Module]) -> Any:
    """Copy of a module that shares its tensors and has the classes from before FSDP2, which transformers looks up."""
    if id(module) not in copies:
        twin: nn.Module = object.__new__(original_class(module))
        copies[id(module)] = twin
        children = {k: None if m is None else with_original_classes(m, copies) for k, m in module._modules.items()}
        twin.__dict__.update(vars(module) | {"_modules": children})
    return copies[id(module)]
