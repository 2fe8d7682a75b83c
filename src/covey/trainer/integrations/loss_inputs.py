"""Inputs of an overridden `compute_loss`, under the names that TRL's trainers give them."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from covey.core.batch import TrainBatch, segment_starts
from covey.core.records import Plan
from covey.core.stats import Stat


class LossInputs(dict[str, Any]):
    """A micro-batch as padded tensors by TRL's names, to be read; its attributes are those of the `TrainBatch`.

    Prompts are padded on the left, completions on the right, by 0. Log-probs and weights of tokens that no token
    stands for are 0. `advantages` [B] is that of a completion's first token; `token_advantages` [B, C] has all.
    """

    def __init__(self, batch: TrainBatch, plan: Plan, number: int):
        self.batch, self.plan, self.number = (
            batch,
            plan,
            number,
        )  # of which step, and its number among the micro-batches
        self.stats: dict[str, Stat] = {}  # metrics of the loss, which `compute_loss` fills in
        of_groups = batch.prompts()
        prompts = [of_groups[group] for group in batch.groups.tolist()]
        backwards = [prompt.flip(0) for prompt in prompts]
        super().__init__(
            prompt_ids=padded(backwards).flip(1),
            prompt_mask=padded([torch.ones_like(prompt) for prompt in backwards]).flip(1),
            completion_ids=self._of_tokens(batch.token_ids),
            completion_mask=self._of_tokens(torch.ones_like(batch.token_ids)),
            tool_mask=self._of_tokens(batch.sampled.long()),
            num_items_in_batch=int(batch.sampled.sum()),
        )
        if batch.advantages is not None:
            longest = torch.nn.functional.pad(batch.advantages, (0, 1))  # an empty completion has none
            first = torch.where(batch.lengths > 0, segment_starts(batch.lengths), len(batch.advantages))
            super().update(advantages=longest[first], token_advantages=self._of_tokens(batch.advantages))
        for name, values in (
            ("old_per_token_logps", batch.old_logprobs),
            ("ref_per_token_logps", batch.ref_logprobs),
            ("sampling_per_token_logps", batch.engine_logprobs),
            ("importance_sampling_ratio", batch.mismatch_weights),
        ):
            if values is not None:
                super().update({name: self._of_tokens(values)})

    def _of_tokens(self, values: Tensor) -> Tensor:
        return padded(values.split(self.batch.lengths.tolist()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batch, name)

    def __missing__(self, name: str) -> NoReturn:
        raise KeyError(f"{name!r}: `compute_loss` is given {', '.join(self)}, and the attributes of a TrainBatch.")

    def _refuse(self, *given: Any, **named: Any) -> NoReturn:
        raise TypeError(
            "the inputs of `compute_loss` cannot be changed, as the loss does not read them from here: change rewards,"
            " advantages by `covey.algorithms.register_advantages`, or the loss by `register_loss`."
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = setdefault = pop = popitem = clear = _refuse


def padded(parts: Sequence[Tensor]) -> Tensor:
    """[B, length of the longest], padded on the right by 0."""
    return pad_sequence(list(parts), batch_first=True)
