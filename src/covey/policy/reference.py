"""The reference policy: what the KL penalty measures distance from.

Three kinds: a frozen copy of the policy, the policy with its adapter switched off, and a copy that follows the policy
slowly (`sync_ref_model`).
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Reference:
    """Gives the model that the policy is held to.

    Args:
        model: the unwrapped policy. Any model is copied as it is before training, except a PEFT model: its reference is
            its base, the adapter switched off, also where the adapter had been trained before.
    """

    def __init__(self, model: Any):
        self.adapter_off = hasattr(model, "disable_adapter")
        self._copy = None if self.adapter_off else _frozen_copy(model)

    @contextmanager
    def model(self, policy: Any) -> Iterator[Any]:
        """The reference, for the duration. `policy` is the unwrapped policy."""
        if self.adapter_off:
            with policy.disable_adapter():
                yield policy
        else:
            yield self._copy

    @torch.no_grad()
    def follow(self, policy: Any, alpha: float) -> None:
        """reference = (1 - alpha) reference + alpha policy: TR-DPO's soft update (arXiv 2404.09656, eq. 2)."""
        assert self._copy is not None, "checked with the config: an adapter's reference cannot follow it"
        for kept, current in zip(self._copy.parameters(), policy.parameters(), strict=True):
            kept.lerp_(current.to(kept), alpha)

    def state_dict(self) -> dict[str, Any] | None:
        """The copy's weights, or None for an adapter."""
        return self._copy.state_dict() if self._copy is not None else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take weights back from a checkpoint."""
        assert self._copy is not None, "only a copy has weights of its own"
        self._copy.load_state_dict(state)


def _frozen_copy(model: Any) -> Any:
    duplicate = copy.deepcopy(model)
    return duplicate.requires_grad_(False).eval()
