"""The reference policy: what the KL penalty measures distance from.

It is the policy as training finds it. Of a whole model that is a frozen copy, which may follow the policy slowly
(`sync_ref_model`). Of a model with a new adapter it is the model with the adapter off; of one whose adapter was trained
before, the adapter as it was given, put in its place while it is scored. A copy may be sharded, in the way that the
policy is. Not here: sharding it.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from covey.policy.sharded_tensors import reshard, whole


class Reference:
    """Gives the model that the policy is held to.

    Args:
        model: the unwrapped policy. Any model is copied as it is before training, except a PEFT model.
        prepare: puts a copy where it is to be, sharded or whole; collective.
        adapter_is_new: a PEFT model's adapter changes nothing yet (`starts_as_nothing`).

    Attributes:
        has_adapter: it is a PEFT model's, and shares the policy's base.
        keeps_adapter: it holds an adapter of its own.
    """

    def __init__(
        self, model: Any, prepare: Callable[[Any], Any] = lambda model: model, *, adapter_is_new: bool = False
    ):
        self.has_adapter = hasattr(model, "disable_adapter")
        self.keeps_adapter = self.has_adapter and not adapter_is_new
        self._copy = None if self.has_adapter else prepare(_frozen_copy(model))
        self._adapter: dict[str, Tensor] | None = None  # of each this process's part, as it is once training begins

    @contextmanager
    def model(self, policy: Any) -> Iterator[Any]:
        """The reference, for the duration. `policy` is the unwrapped policy."""
        if self.keeps_adapter:
            with self._adapter_of_the_start(policy):
                yield policy
        elif self.has_adapter:
            with policy.disable_adapter():
                yield policy
        else:
            yield self._copy

    @contextmanager
    def _adapter_of_the_start(self, policy: Any) -> Iterator[None]:
        """The policy with what is trained as it was the first time that this was called."""
        now = _trained_parts(policy)
        if self._adapter is None:
            self._adapter = now
        _put_parts(policy, self._adapter)
        try:
            yield
        finally:
            _put_parts(policy, now)

    @torch.no_grad()
    def follow(self, policy: Any, alpha: float) -> None:
        """reference = (1 - alpha) reference + alpha policy: TR-DPO's soft update (arXiv 2404.09656, eq. 2)."""
        assert self._copy is not None, "checked with the config: an adapter's reference cannot follow it"
        reshard(self._copy)
        reshard(policy)
        for kept, current in zip(self._copy.parameters(), policy.parameters(), strict=True):
            mine = _own_part(kept)
            mine.lerp_(_own_part(current).to(mine), alpha)

    def state_dict(self) -> dict[str, Any] | None:
        """The copy's weights, or the adapter's, of each this process's part; None where the adapter is off."""
        if self._copy is None:
            return self._adapter
        reshard(self._copy)
        buffers = dict(self._copy.named_buffers())
        parts = {name: _own_part(parameter) for name, parameter in self._copy.named_parameters()}
        return {name: tensor.detach().clone() for name, tensor in {**parts, **buffers}.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take weights back from a checkpoint."""
        if self.keeps_adapter:
            self._adapter = state
            return
        assert self._copy is not None, "only a copy has weights of its own"
        reshard(self._copy)
        for name, parameter in self._copy.named_parameters():
            _own_part(parameter).copy_(state[name])
        for name, buffer in self._copy.named_buffers():
            buffer.copy_(state[name])


def starts_as_nothing(peft_config: Any) -> bool:
    """Whether a new adapter changes nothing, and switched off leaves the model as it was before training.

    So it is with a LoRA whose second matrix begins with zeros. Where biases of the base are trained, or an adapter
    begins with a part of the base (PiSSA, OLoRA, ...), switching it off gives another model.
    """
    kind = str(getattr(peft_config.peft_type, "value", peft_config.peft_type))
    begins = getattr(peft_config, "init_lora_weights", None)
    return kind == "LORA" and begins in (True, "gaussian") and peft_config.bias == "none"


@torch.no_grad()
def _trained_parts(policy: Any) -> dict[str, Tensor]:
    reshard(policy)
    return {name: _own_part(p).detach().clone() for name, p in policy.named_parameters() if p.requires_grad}


@torch.no_grad()
def _put_parts(policy: Any, parts: dict[str, Tensor]) -> None:
    reshard(policy)
    for name, parameter in policy.named_parameters():
        if name in parts:
            _own_part(parameter).copy_(parts[name])


def _own_part(parameter: Any) -> Tensor:
    """The numbers that this process holds: those that all others are made of."""
    if hasattr(parameter, "ds_tensor"):
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        if parameter.ds_status == ZeroParamStatus.AVAILABLE:
            parameter.partition()  # a small one is kept whole beside; it is put together again when it is used
        return parameter.ds_tensor
    return getattr(parameter, "_local_tensor", parameter)


def _frozen_copy(model: Any) -> Any:
    """The model again, with its weights; where ZeRO-3 has split them as they were loaded, one by one."""
    twins: dict[int, nn.Parameter] = {}
    for parameter in model.parameters():
        if hasattr(parameter, "ds_id"):
            twins[id(parameter)] = nn.Parameter(whole(parameter), requires_grad=False)
            parameter.convert_to_zero_parameters(param_list=[twins[id(parameter)]])
    duplicate: Any = copy.deepcopy(model, dict(twins))
    return duplicate.requires_grad_(False).eval()
