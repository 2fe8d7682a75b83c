"""An engine with weights of its own, exact or rounded: it samples from a policy that is slightly another one."""

import copy
from typing import Any

import torch

from covey.core.engine import EngineTraits, SampleRequest, WeightUpdate
from covey.core.records import Completion
from covey.engines.native.engine import NativeEngine
from covey.policy.loading import end_token_ids


class RoundedEngine(NativeEngine):
    """The built-in engine on a copy of the model, exact or with matrices rounded to `bits` bits a row.

    An update is copied from the model itself: names in it are those of checkpoints, in which experts are apart.
    """

    def __init__(self, model: Any, tokenizer: Any, bits: float | None = None):
        self.source, self.model, self.bits, self.version = model, copy.deepcopy(model).eval(), bits, 0
        ends = end_token_ids(model, tokenizer)
        super().__init__(lambda: self.model, eos_token_ids=ends, pad_token_id=tokenizer.pad_token_id)
        self.traits = EngineTraits(batch_invariant=True)

    def load_weights(self, update: WeightUpdate) -> None:
        with torch.no_grad():
            for own, tensor in zip(self.model.parameters(), self.source.parameters(), strict=True):
                own.copy_(tensor if self.bits is None or tensor.dim() < 2 else rounded(tensor, self.bits))
        self.version = update.version

    async def generate(self, request: SampleRequest) -> list[Completion]:
        version = self.version
        completions = await super().generate(request)
        for completion in completions:
            completion.versions = [version] * len(completion.token_ids)
        return completions


def rounded(matrix: torch.Tensor, bits: float) -> torch.Tensor:
    """Each row on a symmetric grid up to its largest number, of 2^bits - 1 values if `bits` is whole.

    Example:
        >>> rounded(torch.tensor([[0.0, 0.3, -1.0]]), 2).tolist()
        [[0.0, 0.0, -1.0]]
    """
    step = matrix.abs().amax(-1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
    return (matrix / step).round() * step
