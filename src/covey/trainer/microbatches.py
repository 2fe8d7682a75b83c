"""Forward and backward passes of bounded size, and what happens when memory runs out all the same.

`MicroBatchRunner` cuts a batch by tokens (`covey.core.packing`), runs the parts, and when one does not fit, halves the
limit, undoes what the failed attempt left in the gradients and goes on with smaller parts: the gradient is the same.
"""

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from covey.core.batch import TrainBatch, token_index
from covey.core.packing import RolloutSizes, derived_budget, pack_micro_batches, pass_tokens
from covey.runtime.process_memory import is_out_of_memory


class HasLayout(Protocol):
    """A scorer: "auto" until it has tried, then "shared_prefix", "packed" or "padded"."""

    layout: str


class MicroBatchRunner:
    """Runs batches in passes that fit into memory.

    Args:
        scorer: its `layout` decides how tokens are counted.
        parameters: looks up the parameters that are trained.
        device_type: "cpu", "cuda", ...
        max_tokens: most tokens of a pass, as the user set it (`max_tokens_per_micro_batch`); None derives it from the
            padded size of a nominal micro-batch.
        most: collective: how many passes this process has to how many any has, where a forward pass takes all
            processes; those that have fewer run idle ones. None: processes need not run equally many.
        repeats: a pass that ran out of memory may be run again, in parts; not where others take part in it.
    """

    def __init__(
        self,
        scorer: HasLayout,
        parameters: Callable[[], Iterable[nn.Parameter]],
        device_type: str,
        max_tokens: int | None = None,
        most: Callable[[int], int] | None = None,
        repeats: bool = True,
    ):
        self._most = most
        self._repeats = repeats
        self._parameters = parameters
        self._scorer = scorer
        self._device_type = device_type
        self._max_tokens = max_tokens
        self.limit: int | None = None
        """Most tokens of a pass, learned from running out of memory; kept in checkpoints."""

    def budget(self, batch: RolloutSizes, rows: int) -> int:
        """Most tokens of a pass over this batch.

        Derived, it is what `rows` rollouts take when padded to the longest: the memory that the user's batch size
        stands for. Where the hardware is busy with fewer tokens, those suffice, or the largest group whole.

        Args:
            batch: rollouts of one optimizer step, or of one process's share of it.
            rows: rollouts of a nominal micro-batch.
        """
        wanted = self._max_tokens
        if wanted is None:
            sequences = batch.prompt_lengths[batch.groups] + batch.lengths
            whole = sequences
            if self._padded_until_proven() == "shared_prefix":
                whole = batch.prompt_lengths.index_add(0, batch.groups, batch.lengths)
            longest, largest = (int(sizes.max()) if len(sizes) else 1 for sizes in (sequences, whole))
            wanted = derived_budget(rows, longest, largest, self._device_type)
        return wanted if self.limit is None else min(wanted, self.limit)

    def plan(self, batch: TrainBatch, rows: int, at_least: int = 1) -> list[TrainBatch]:
        """Cut a batch into passes, the largest first; what was skipped is counted with the first."""
        parts = [batch.select(part) for part in self._planned(batch, rows, at_least)]
        if parts:
            parts[0].skipped_tokens, parts[0].skipped_rows = batch.skipped_tokens, batch.skipped_rows
        return parts

    def count(self, batch: RolloutSizes, rows: int) -> int:
        """Number of micro-batches that `plan` would return."""
        return len(self._planned(batch, rows))

    def run(self, part: TrainBatch, backward: Callable[[TrainBatch], Tensor]) -> Tensor:
        """Run one planned pass, in smaller ones where memory runs out.

        Args:
            part: rollouts of the pass.
            backward: computes the loss, a scalar, and where gradients are wanted adds them to the parameters'.

        Returns:
            The sum of the losses.

        Raises:
            torch.OutOfMemoryError: a single rollout does not fit.
        """
        losses, todo = [], [part]
        while todo:
            pieces = self._within_limit(todo.pop())  # the limit may have sunk since it was cut
            if len(pieces) > 1:
                todo += reversed(pieces)
            else:
                losses.append(self._attempt(pieces[0], backward))
        return torch.stack(losses).sum()

    def score(self, batch: TrainBatch, rows: int, score: Callable[[TrainBatch], Tensor]) -> Tensor:
        """A value for every token, computed without gradient in passes that fit.

        Args:
            batch: rollouts.
            rows: rollouts of a nominal micro-batch.
            score: a batch's tokens [n] -> values [n].

        Returns:
            [N], in the batch's order; float32.
        """
        values = torch.zeros(batch.num_tokens, device=batch.token_ids.device)
        todo = self._planned(batch, rows)[::-1]
        for idle in self.idle(batch, len(todo)):
            score(idle)
        while todo:
            chosen = todo.pop()
            part = batch.select(chosen)
            pieces = self._cut(part)
            if len(pieces) > 1:
                todo += [chosen[piece] for piece in reversed(pieces)]
                continue
            try:
                values[token_index(chosen, batch.lengths)] = score(part).float()
                continue
            except (RuntimeError, MemoryError) as error:
                self._check_survivable(error, part)
            self._shrink(part)
            todo.append(chosen)
        return values

    def idle(self, batch: TrainBatch, passes: int) -> list[TrainBatch]:
        """Idle micro-batches, with which a process takes part in the forward passes of others. Collective."""
        missing = 0 if self._most is None else self._most(passes) - passes
        return [batch.idle() for _ in range(missing)]

    # ---- running out of memory -------------------------------------------------------------------------------------

    def _attempt(self, part: TrainBatch, backward: Callable[[TrainBatch], Tensor]) -> Tensor:
        random_state = _random_state()
        before = [(parameter, _grad_state(parameter)) for parameter in self._parameters() if parameter.requires_grad]
        try:
            return backward(part)
        except (RuntimeError, MemoryError) as error:
            self._check_survivable(error, part)
        # Here and not in the handler: the error holds the failed attempt's tensors.
        self._shrink(part)
        _restore_random_state(random_state)
        # A backward pass adds once to each gradient, when what it adds is whole: such parameters have their share.
        with _set_aside([parameter for parameter, state in before if _grad_state(parameter) != state]):
            return self.run(part, backward)

    def _within_limit(self, part: TrainBatch) -> list[TrainBatch]:
        cut = self._cut(part)
        if len(cut) == 1:
            return [part]
        pieces = [part.select(rows) for rows in cut]
        pieces[0].skipped_tokens, pieces[0].skipped_rows = part.skipped_tokens, part.skipped_rows
        return pieces

    def _cut(self, part: TrainBatch) -> list[Tensor]:
        """The rollouts of pieces that keep to the limit, the largest first; all in one if the part does."""
        layout, everything = self._padded_until_proven(), range(len(part))
        if self.limit is None or len(part) <= 1 or pass_tokens(part, everything, layout) <= self.limit:
            return [torch.arange(len(part), device=part.lengths.device)]
        return pack_micro_batches(part, self.limit, layout)

    def _check_survivable(self, error: Exception, part: TrainBatch) -> None:
        """Let the error go on if it is another one, or if there is nothing left to cut."""
        if not is_out_of_memory(error):
            raise error
        tokens = int(part.prompt_lengths.sum() + part.lengths.sum())
        if not self._repeats:
            raise torch.OutOfMemoryError(
                f"memory does not suffice for a pass over {len(part)} rollouts of {tokens} tokens, and under FSDP or"
                " DeepSpeed a pass cannot be repeated in parts, as all processes take part in it. Set"
                f" max_tokens_per_micro_batch={max(1, tokens // 2)} or gradient_checkpointing=True."
            ) from error
        if len(part) <= 1:
            raise torch.OutOfMemoryError(
                f"memory does not suffice for a single rollout of {tokens} tokens, prompt included. Set"
                " gradient_checkpointing=True, a smaller max_completion_length, or use_peft/a smaller model."
            ) from error

    def _shrink(self, part: TrainBatch) -> None:
        """Halve the limit, with a warning the first time."""
        tokens = pass_tokens(part, range(len(part)), self._padded_until_proven())
        first, known = self.limit is None, self.limit or tokens
        self.limit = max(1, min(tokens // 2, known))  # never more than was learned before
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if first:
            warnings.warn(
                f"memory ran out in a pass over {tokens} tokens; it is repeated in parts of at most {self.limit}, and"
                " so are later ones. Nothing is lost but time: to save it, start with"
                f" max_tokens_per_micro_batch={self.limit}.",
                stacklevel=3,
            )

    def _planned(self, batch: RolloutSizes, rows: int, at_least: int = 1) -> list[Tensor]:
        return pack_micro_batches(batch, self.budget(batch, rows), self._padded_until_proven(), at_least)

    def _padded_until_proven(self) -> str:
        layout = self._scorer.layout
        return "padded" if layout == "auto" else layout


def _grad_state(parameter: nn.Parameter) -> tuple[int, int]:
    """Changes whenever something is added to the gradient."""
    grad = parameter.grad
    return (0, 0) if grad is None else (id(grad), grad._version)


@contextmanager
def _set_aside(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Discard gradients that are added to these parameters within: they have their share already.

    Each is discarded as soon as it is written, so that at most one of them takes memory in addition.
    """
    kept = [(parameter, parameter.grad) for parameter in parameters]
    hooks = [parameter.register_post_accumulate_grad_hook(_forget_grad) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, grad in kept:
            parameter.grad = grad


def _forget_grad(parameter: Tensor) -> None:
    parameter.grad = None


def _random_state() -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def _restore_random_state(state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
