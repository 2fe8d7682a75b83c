"""Sharding of weights, gradients and optimizer state by accelerate (FSDP2, DeepSpeed's ZeRO); else mean gradients."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from transformers.integrations import is_deepspeed_zero3_enabled

from covey.config.base import OnlineConfig
from covey.config.hardware import by_fsdp
from covey.policy.sharded_tensors import reshard

if TYPE_CHECKING:
    from covey.trainer.trainer import OnlineTrainer

BUCKET_BYTES = 64 * 2**20  # size of the gradients in one collective


@dataclass(frozen=True)
class Sharding:
    """Parts of training that are sharded, and the library that shards them."""

    name: str = ""  # of the library, for messages; "" without sharding
    weights: bool = False  # each process holds a shard of each weight, so a forward pass needs all processes
    gradients: bool = False  # the wrapper averages them in each backward pass, which therefore needs all processes
    deepspeed: bool = False  # the last backward pass ends with the optimizer step

    @contextmanager
    def around_micro_batch(self, accelerator: Any, model: Any, last: bool) -> Iterator[None]:
        if self.gradients and not self.deepspeed:
            model.set_requires_gradient_sync(True)  # else whole gradients would wait for the step's end
        state, ends = accelerator.gradient_state, accelerator.sync_gradients
        try:
            state._set_sync_gradients(ends and last)
            yield
        finally:
            state._set_sync_gradients(ends)


def sharding_of(accelerator: Any) -> Sharding:
    """The sharding that an accelerator is set up with; ValueError for a kind that Covey does not train with."""
    kind = str(accelerator.distributed_type).rsplit(".", 1)[-1]
    if kind == "DEEPSPEED":
        stage = int(accelerator.state.deepspeed_plugin.zero_stage)
        if stage == 0:
            raise ValueError(
                "DeepSpeed is on with ZeRO stage 0, which shards nothing. Choose a stage from 1 to 3 (zero_stage), or"
                " launch without DeepSpeed to train with DDP."
            )
        return Sharding(f"ZeRO-{stage}", weights=stage == 3, gradients=True, deepspeed=True)
    if kind == "FSDP":
        if not accelerator.is_fsdp2:
            raise ValueError(
                "FSDP is on in its first version, which Covey does not train with. Set fsdp_version: 2 in accelerate's"
                " configuration (--fsdp_version 2), or take the one that comes with Covey: --accelerate_config fsdp2."
            )
        return Sharding("FSDP2", weights=True, gradients=True)
    if kind in ("MEGATRON_LM", "XLA") or getattr(accelerator, "parallelism_config", None) is not None:
        what = "a parallelism_config" if kind not in ("MEGATRON_LM", "XLA") else kind
        raise ValueError(
            f"accelerate is set up with {what}, which Covey does not train with. Use DDP, FSDP2 or DeepSpeed's ZeRO."
        )
    if is_deepspeed_zero3_enabled():
        raise ValueError(
            "ZeRO-3 was asked for, and models are read in shares, but accelerate leaves DeepSpeed out of a run of one"
            " CPU process. Launch two or more (--num_processes 2), or launch without DeepSpeed."
        )
    return Sharding()


def weights_sharded_by(args: OnlineConfig) -> str:
    """Library that will shard weights, as far as is known before there is an accelerator; "" for none."""
    return "ZeRO-3" if is_deepspeed_zero3_enabled() else "FSDP2" if by_fsdp() or args.fsdp else ""


def shard_on_cpu(trainer: "OnlineTrainer") -> None:
    """Enable FSDP2 on CPU processes, where accelerate accepts its settings but does not shard."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy

    state = trainer.accelerator.state
    if not by_fsdp() or state.distributed_type != DistributedType.MULTI_CPU:
        return
    plugin = FullyShardedDataParallelPlugin(**(trainer.args.fsdp_plugin_args or {}))
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # there is no GPU to pin memory for
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    trainer.is_fsdp_enabled = True


def prepare_frozen(accelerator: Any, model: Any) -> Any:
    """Place a model that is not trained on the accelerator's device, sharded if weights are."""
    sharding = sharding_of(accelerator)
    if not sharding.weights:
        return model.to(accelerator.device) if sharding.deepspeed else model
    if not sharding.deepspeed:
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        return fsdp2_prepare_model(accelerator, model)
    import deepspeed

    settings = copy.deepcopy(accelerator.state.deepspeed_plugin.deepspeed_config)
    zero = {name: value for name, value in settings["zero_optimization"].items() if value != "auto"}
    zero.pop("offload_optimizer", None)
    precision = {name: settings[name] for name in ("bf16", "fp16") if name in settings}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **precision}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine.module.eval()


def ready_to_evaluate(trainer: "OnlineTrainer") -> None:
    """Shard and place the policy for an evaluation before any training."""
    if trainer.sharding.gradients and not trainer.accelerator._models and not trainer.evaluates_alone:
        trainer.evaluates_alone = True
        prepare_frozen(trainer.accelerator, trainer.model)  # in place


def ready_to_train(trainer: "OnlineTrainer") -> None:
    """Check and prepare a policy that was evaluated before; ValueError under ZeRO-3, which cannot train it then."""
    if trainer.sharding.weights:
        reshard(trainer.policy)  # an optimizer must hold shards
    if trainer.evaluates_alone and trainer.sharding.deepspeed and trainer.sharding.weights:
        raise ValueError(
            "evaluate() was called before train(), and under ZeRO-3 a trainer that has evaluated alone cannot train."
            " Set eval_on_start=True to evaluate first, or make another trainer to train with."
        )


def average_gradients(parameters: list[nn.Parameter]) -> None:
    """Replace each gradient by its mean over all processes; a missing one counts as zero. Collective."""
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(present, op=dist.ReduceOp.MAX)
    grads = []
    for parameter, used in zip(parameters, present.tolist(), strict=True):
        if used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grads.append(parameter.grad)
    for bucket in _take_tensors(grads, BUCKET_BYTES):
        flat = _flatten_dense_tensors(bucket)
        flat /= dist.get_world_size()  # before they are added: the sum may be more than float16 holds
        dist.all_reduce(flat)
        for grad, mean in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            grad.copy_(mean)
