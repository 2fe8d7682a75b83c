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

from covey.trainer.checkpoint import AtomicCheckpoints, numbered_checkpoints

MOST_NAMED = 3
"""Parameters that a message names."""

MOST_SKIPPED = 30
"""Optimizer steps that the loss scaling of float16 may skip in a row; each halves the scale, which starts at 2^16."""


class NotFiniteError(FloatingPointError):
    """A loss, a gradient or a weight became NaN or infinite."""


class FiniteTraining(AtomicCheckpoints):
    """The part of a trainer that stops at numbers that are not finite.

    With float16 a gradient that is not finite is ordinary: the scaler skips the step and halves the loss scale.
    """

    _skipped_in_a_row = 0

    @property
    def policy(self) -> Any:
        """The transformers (or PEFT) model inside whatever wraps it."""
        raise NotImplementedError

    def check_loss(self, loss: float) -> None:
        """Stop before the backward pass of a loss that is not finite.

        Raises:
            NotFiniteError: naming the step and what else is not finite.
        """
        if not math.isfinite(loss) and not self._scales_loss:
            raise self._stopped(f"the loss is {loss}", [])

    def _clip_grad_norm(self, model: Any) -> Any:
        """Clip, as `Trainer` does; whole gradients are looked at before a NaN norm spoils them all."""
        if not self._gradients_are_whole(model):
            return super()._clip_grad_norm(model)
        norm = self._get_grad_norm(model)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), self.args.max_grad_norm, norm)
        return norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """The norm of the gradient, called before each optimizer step whether or not gradients are clipped.

        Every process has the same norm, so all stop together.
        """
        if grad_norm is None and self._gradients_are_whole(model):
            grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            grad_norm = torch.nn.utils.get_total_norm(grads)
        else:
            grad_norm = super()._get_grad_norm(model, grad_norm)
        self._check_norm(grad_norm)
        return grad_norm

    def _gradients_are_whole(self, model: Any) -> bool:
        return not (self.sharding.gradients or self._scales_loss or self._has_mixed_mesh_grads(model))

    def _check_norm(self, norm: Any) -> None:
        value = 0.0 if norm is None else float(norm.item() if isinstance(norm, Tensor) else norm)
        if math.isfinite(value):
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        if not self._scales_loss:
            gradients = ((name, parameter.grad) for name, parameter in self.policy.named_parameters())
            raise self._stopped(f"the norm of the gradient is {value}", not_finite(gradients))
        if self._skipped_in_a_row > MOST_SKIPPED:
            raise self._stopped(
                f"the gradient was not finite in {self._skipped_in_a_row} steps in a row, at any loss scale of float16",
                [],
            )

    @property
    def _scales_loss(self) -> bool:
        """Whether float16's loss scaling skips steps whose gradient is not finite."""
        scaler = getattr(self.accelerator, "scaler", None)
        by_deepspeed = self.sharding.deepspeed and self.accelerator.mixed_precision == "fp16"
        return by_deepspeed or (scaler is not None and scaler.is_enabled())

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.check_weights()
        super()._save_checkpoint(model, trial)

    def check_weights(self) -> None:
        """Stop if a trained weight is not finite, so that it is not saved over good ones. Collective.

        Raises:
            NotFiniteError: naming the weights.
        """
        trained = ((name, weight) for name, weight in self.policy.named_parameters() if weight.requires_grad)
        found = self.collectives.gather(not_finite(trained), "check that the weights are finite")
        if names := sorted({name for share in found for name in share}):
            raise NotFiniteError(
                f"step {self.state.global_step}: weights are NaN or infinite, so they are not saved: {listed(names)}."
                f" {CAUSES} {self._where_to_resume()}"
            )

    def _stopped(self, what: str, gradients: list[str]) -> NotFiniteError:
        weights = not_finite(self.policy.named_parameters())
        details = f" Gradients that are not finite: {listed(gradients)}." if gradients else ""
        details += f" Weights that are not finite: {listed(weights)}." if weights else " All weights are still finite."
        return NotFiniteError(
            f"step {self.state.global_step + 1}: {what}, so the run ends before its weights are spoilt or saved."
            f"{details} {CAUSES} {self._where_to_resume()}"
        )

    def _where_to_resume(self) -> str:
        found = numbered_checkpoints(self.args.output_dir or ".")
        if not found:
            return "No checkpoint was saved before; start again with other settings."
        return f"The last checkpoint, {found[-1]}, is kept: resume from it with other settings."


CAUSES = (
    "Common causes: a learning rate that is too high, a loss or an optimizer of one's own, activations that overflow"
    " (use bf16=True or float32 instead of float16), a damaged weight file."
)


def is_finite(values: Tensor) -> bool:
    """Whether a tensor holds no NaN and no infinity; of a sharded one, this process's part is looked at.

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
