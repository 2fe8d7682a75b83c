"""Weights, losses and gradients that are NaN or infinite end a run before they spread.

One NaN in a gradient makes every weight NaN in the next optimizer step. The loss and the norm of the gradient are known
anyway, so that looking at them costs nothing; the weights are read through when a model is given, before they are saved
and when training ends.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from covey.trainer.checkpoint import numbered_checkpoints
from covey.trainer.context import RunContext

MOST_NAMED = 3
"""Parameters that a message names."""

MOST_SKIPPED = 30
"""Optimizer steps that the loss scaling of float16 may skip in a row; each halves the scale, which starts at 2^16."""


class NotFiniteError(FloatingPointError):
    """A loss, a gradient or a weight became NaN or infinite."""


class FiniteCheck:
    """Stops a run at a loss, a gradient norm or weights that are not finite.

    With float16 a gradient that is not finite is ordinary: the scaler skips the step and halves the loss scale.
    """

    def __init__(self, context: RunContext):
        self._context = context
        self._skipped_in_a_row = 0

    def check_loss(self, loss: float) -> None:
        """Stop before the backward pass of a loss that is not finite.

        Raises:
            NotFiniteError: naming the step and what else is not finite.
        """
        if not math.isfinite(loss) and not self.scales_loss:
            raise self._stopped(f"the loss is {loss}", [])

    def check_norm(self, norm: Any) -> None:
        """Stop at a gradient norm that is not finite; every process has the same norm, so all stop together.

        Raises:
            NotFiniteError: naming the gradients; with float16, after `MOST_SKIPPED` steps in a row.
        """
        value = 0.0 if norm is None else float(norm.item() if isinstance(norm, Tensor) else norm)
        if math.isfinite(value):
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        if not self.scales_loss:
            gradients = ((name, weight.grad) for name, weight in self._context.loop.policy.named_parameters())
            raise self._stopped(f"the norm of the gradient is {value}", not_finite(gradients))
        if self._skipped_in_a_row > MOST_SKIPPED:
            raise self._stopped(
                f"the gradient was not finite in {self._skipped_in_a_row} steps in a row, at any loss scale of float16",
                [],
            )

    def check_weights(self) -> None:
        """Stop if a trained weight is not finite, so that it is not saved over good ones. Collective.

        Raises:
            NotFiniteError: naming the weights.
        """
        named = self._context.loop.policy.named_parameters()
        found = not_finite((name, weight) for name, weight in named if weight.requires_grad)
        everyone = self._context.collectives.gather(found, "check that the weights are finite")
        if names := sorted({name for share in everyone for name in share}):
            raise NotFiniteError(
                f"step {self._context.step}: weights are NaN or infinite, so they are not saved: {listed(names)}."
                f" {CAUSES} {self._where_to_resume()}"
            )

    @property
    def scales_loss(self) -> bool:
        """float16's loss scaling skips steps whose gradient is not finite."""
        scaler = getattr(self._context.accelerator, "scaler", None)
        by_deepspeed = self._context.sharding.deepspeed and self._context.accelerator.mixed_precision == "fp16"
        return by_deepspeed or (scaler is not None and scaler.is_enabled())

    def _stopped(self, what: str, gradients: list[str]) -> NotFiniteError:
        weights = not_finite(self._context.loop.policy.named_parameters())
        details = f" Gradients that are not finite: {listed(gradients)}." if gradients else ""
        details += f" Weights that are not finite: {listed(weights)}." if weights else " All weights are still finite."
        return NotFiniteError(
            f"step {self._context.step + 1}: {what}, so the run ends before its weights are spoilt or saved."
            f"{details} {CAUSES} {self._where_to_resume()}"
        )

    def _where_to_resume(self) -> str:
        found = numbered_checkpoints(self._context.args.output_dir or ".")
        if not found:
            return "No checkpoint was saved before; start again with other settings."
        return f"The last checkpoint, {found[-1]}, is kept: resume from it with other settings."


CAUSES = (
    "Common causes: a learning rate that is too high, a loss or an optimizer of one's own, activations that overflow"
    " (use bf16=True or float32 instead of float16), a damaged weight file."
)


def is_finite(values: Tensor) -> bool:
    """True if a tensor holds neither NaN nor infinity; of a sharded one, this process's shard is checked.

    Its sum tells, without a copy; only where that is not finite are the values looked at one by one.
    """
    values = getattr(values, "ds_tensor", values)  # ZeRO-3
    values = getattr(values, "_local_tensor", values).detach()  # FSDP2
    if values.is_meta or not values.is_floating_point() or values.dtype.itemsize < 2:
        return True
    total = values.sum(dtype=torch.promote_types(values.dtype, torch.float32))
    return math.isfinite(total.item()) or all(bool(part.isfinite().all()) for part in values.flatten().split(2**24))


def not_finite(named: Iterable[tuple[str, Tensor | None]]) -> list[str]:
    """The names of tensors that are not finite."""
    return [name for name, values in named if values is not None and not is_finite(values)]


def listed(names: list[str]) -> str:
    """Names in a sentence, a few of many.

    Example:
        >>> listed(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def check_model(model: Any) -> None:
    """Refuse a model whose weights are not finite.

    Raises:
        ValueError: with the names of the weights.
    """
    if names := not_finite(model.named_parameters()):
        raise ValueError(
            f"the model holds weights that are NaN or infinite: {listed(names)}. Nothing but NaN can be trained from"
            " them. Either the run that saved them had diverged, or the files are damaged: load an earlier checkpoint,"
            " or download the model again."
        )
