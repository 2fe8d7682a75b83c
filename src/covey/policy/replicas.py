"""Replicas of the policy: its reference for the KL penalty, and a full copy of a sharded policy for sampling.

The reference is one of three: a frozen copy of the whole model; the model with a new adapter switched off; or the model
with the first state of its trained adapter, put in place while it is scored. The first and the third may follow the
policy (`follow`).
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from covey.core.model import unwrapped
from covey.policy.quantization import dequantized_state, is_quantized_layer
from covey.policy.sharded_tensors import full_shape, full_tensor, is_shard, own_shard, reshard, sent_dtype
from covey.policy.weights import checkpoint_name

QUANTISED = "quantised"

Sample = dict[str, tuple[str, Tensor]]
"""By the name of a weight: its dtype, or `QUANTISED`, and a few of its numbers in float32."""


class Reference:
    """The reference model. A model without adapters is copied, and `prepare` (collective) wraps and places the copy."""

    def __init__(
        self, model: Any, prepare: Callable[[Any], Any] = lambda model: model, *, adapter_is_new: bool = False
    ):
        self.has_adapter = hasattr(model, "disable_adapter")  # the reference shares its base
        self.stores_adapter = self.has_adapter and not adapter_is_new
        self.copy = None if self.has_adapter else prepare(_frozen_copy(model))
        self.has_moved = False  # the copy is not the model that the run began with
        self._adapter: dict[str, Tensor] | None = None  # this process's shards at the start of training

    @contextmanager
    def model(self, policy: Any) -> Iterator[Any]:
        """Context that gives the reference model; `policy` is the unwrapped policy."""
        if not self.has_adapter:
            yield self.copy
        elif not self.stores_adapter:
            with policy.disable_adapter():
                yield policy
        else:  # the trained parameters of the first call, within the context
            current = _trained_shards(policy)
            self._adapter = current if self._adapter is None else self._adapter
            _set_shards(policy, self._adapter)
            try:
                yield policy
            finally:
                _set_shards(policy, current)

    @torch.no_grad()
    def follow(self, policy: Any, alpha: float) -> None:
        """reference = (1 - alpha) reference + alpha policy: TR-DPO's soft update (arXiv 2404.09656, eq. 2)."""
        if self.copy is None:
            assert self.stores_adapter, "an adapter that is switched off cannot follow the policy"
            current = _trained_shards(policy)
            before = current if self._adapter is None else self._adapter
            self._adapter = {name: shard.lerp(current[name], alpha) for name, shard in before.items()}
            return
        self.has_moved = True
        reshard(self.copy)
        reshard(policy)
        for copied, current in zip(self.copy.parameters(), policy.parameters(), strict=True):
            shard = own_shard(copied)
            shard.lerp_(own_shard(current).to(shard), alpha)

    def state_dict(self) -> dict[str, Any] | None:
        """This process's shards of the reference: of the adapter, or of a copy that has followed the policy.

        None for a copy that still is the first model; {} for an adapter that is switched off.
        """
        if self.copy is None:
            return self._adapter if self.stores_adapter else {}
        if not self.has_moved:
            return None
        reshard(self.copy)
        buffers = dict(self.copy.named_buffers())
        shards = {name: own_shard(parameter) for name, parameter in self.copy.named_parameters()}
        return {name: tensor.detach() for name, tensor in {**shards, **buffers}.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.copy is None:  # a resumed run may load the adapter that the first run created, or the other way round
            self.stores_adapter, self._adapter = bool(state), state or None
            return
        self.has_moved = True
        _set_shards(self.copy, state)
        for name, buffer in self.copy.named_buffers():
            buffer.copy_(state[name])


def starts_as_identity(peft_config: Any) -> bool:
    """True if disabling a new adapter gives the model before training: LoRA with zeros, not PiSSA or trained biases."""
    kind = str(getattr(peft_config.peft_type, "value", peft_config.peft_type))
    begins = getattr(peft_config, "init_lora_weights", None)
    return kind == "LORA" and begins in (True, "gaussian") and peft_config.bias == "none"


def frozen_sample(model: Any) -> Sample:
    """About eight numbers of each frozen weight, the same for any sharding; collective for sharded models.

    They identify a reference, or the base of an adapter. Left out are adapters, which may be added or removed, and
    weights quantised by libraries other than bitsandbytes.
    """
    model = unwrapped(model)
    reshard(model)
    tuners = [module for module in model.modules() if hasattr(module, "adapter_layer_names")]
    parts = [getattr(tuner, name, None) for tuner in tuners for name in tuner.adapter_layer_names]
    others = {id(weight) for part in parts if part is not None for weight in part.parameters()}
    layers = {id(layer.weight): layer for layer in model.modules() if is_quantized_layer(layer)}
    sample: Sample = {}
    for name, weight in model.named_parameters():
        name = checkpoint_name(name).replace(".base_layer.", ".")
        is_plain = type(weight) is nn.Parameter or is_shard(weight)
        if layer := layers.get(id(weight)):
            sample[name] = (QUANTISED, _few(dequantized_state(layer)["weight"]))
        elif is_plain and not weight.requires_grad and id(weight) not in others:
            sample[name] = (str(weight.dtype), _few(full_tensor(weight)))
    return sample


def _few(weight: Tensor) -> Tensor:
    few = weight.flatten()[:: max(1, weight.numel() // 8)].to("cpu", torch.float32)
    return few.clone()  # torch would save the whole tensor of a view


def _trained_shards(policy: Any) -> dict[str, Tensor]:
    """Copies of this process's shards of the trained parameters, by name."""
    reshard(policy)
    trained = ((name, weight) for name, weight in policy.named_parameters() if weight.requires_grad)
    return {name: own_shard(weight).detach().clone() for name, weight in trained}


@torch.no_grad()
def _set_shards(policy: Any, shards: dict[str, Tensor]) -> None:
    reshard(policy)
    for name, parameter in policy.named_parameters():
        if name in shards:
            own_shard(parameter).copy_(shards[name])


def _frozen_copy(model: Any) -> Any:
    """Frozen copy of the model; parameters that ZeRO-3 sharded on loading are gathered one by one."""
    copies: dict[int, nn.Parameter] = {}
    for parameter in model.parameters():
        if hasattr(parameter, "ds_id"):
            copies[id(parameter)] = nn.Parameter(full_tensor(parameter), requires_grad=False)
            parameter.convert_to_zero_parameters(param_list=[copies[id(parameter)]])
    duplicate: Any = copy.deepcopy(model, dict(copies))
    return duplicate.requires_grad_(False).eval()


class FullCopy:
    """Full copy of a sharded policy: a model without hooks, so that each process can run it any number of times.

    Args:
        model: the policy before sharding; its modules are copied.
        policy: returns the sharded policy, whose weights are read.
        dtype: to which wider matrices are cast; None: no casts.
    """

    def __init__(self, model: Any, policy: Callable[[], Any], dtype: torch.dtype | None = None):
        self._policy = policy
        self._dtype = dtype
        empty = {
            id(p): nn.Parameter(torch.empty(full_shape(p), dtype=p.dtype, device="meta"), requires_grad=False)
            for p in model.parameters()
        }
        quantized = {name: module for name, module in model.named_modules() if is_quantized_layer(module)}
        shared = {id(layer.quant_state): layer.quant_state for layer in quantized.values()}
        self.model: Any = copy.deepcopy(model, {**empty, **shared}).eval()
        """The copy; it has weights within `weights()` only."""
        self._packed = {f"{name}.weight" for name in quantized}

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Context in which the copy has the policy's current weights. Collective."""
        policy = self._policy()
        reshard(policy)
        present: dict[str, Tensor] = {checkpoint_name(name): buffer for name, buffer in policy.named_buffers()}
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                name = checkpoint_name(name)
                dtype = None if name in self._packed else self._dtype  # 4-bit weights are bytes, whatever their dtype
                tensor = full_tensor(parameter, dtype).as_subclass(Tensor)
                present[name] = nn.Parameter(tensor.to(sent_dtype(tensor, dtype)), requires_grad=False)
        with _reparametrize_module(self.model, present, tie_weights=True, strict=True):
            yield
