"""Rollout buffer, and micro-batches of bounded size.

Layers keep their activations while the memory plan has room. When a micro-batch does not fit, half as many layers keep
them, and if none does the limit is halved and smaller parts follow. What the failed attempt left in the gradients is
undone: the gradient is the same.
"""

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from covey.core.batch import TrainBatch, token_index
from covey.core.model import decoder_of, name_of
from covey.core.packing import ActivationRoom, RolloutSizes, computed_tokens, derived_budget, pack_micro_batches
from covey.core.strands import even_shares
from covey.core.terms import TermCounts
from covey.policy.fused import FusedLayer, find_fused_layers, fused_layers
from covey.policy.scoring import TokenScorer
from covey.runtime.process_memory import is_out_of_memory
from covey.sizing.memory import MemoryEstimate, estimate_of, may_keep
from covey.trainer.distributed.exchange import OwnRollouts, RolloutIndex
from covey.trainer.run import Run


class MicroBatchRunner:
    """Cuts batches into micro-batches that fit into memory, and runs them."""

    def __init__(self, run: Run, scorer: TokenScorer):
        self._run, self._scorer = run, scorer  # the scorer's `layout` decides how tokens are counted
        self._sharded, args = run.sharding.gradients, run.args
        plan = None if self._sharded else _memory_plan(run)
        self._room = plan.room if plan else 0  # tokens for which the device's memory suffices; 0: unknown
        # Of layers that recompute for want of memory alone.
        self.activations: ActivationRoom | None = plan.activation_room if plan else None
        plain = run.device.type == "cpu" and not self._sharded and not args.torch_compile
        find: Callable[[nn.Module], Iterable[FusedLayer]] = find_fused_layers if plain else lambda model: ()
        self.fused = cache(find)  # a model's layers to compute fused
        # Learned from running out of memory: most tokens of a micro-batch (in checkpoints), and most layers that keep
        # activations.
        self.limit: int | None = None
        self._most_kept: int | None = None

    def budget(self, batch: RolloutSizes, rows: int) -> int:
        """Most tokens of a micro-batch, where the user's batch size is `rows` completions."""
        run, wanted = self._run, self._run.args.max_tokens_per_micro_batch
        if wanted is None:  # a nominal micro-batch padded to the longest: what the user's batch size stands for
            sequences = batch.prompt_lengths[batch.groups] + batch.lengths
            shared = self._padded_until_proven() == "shared_prefix"
            whole = batch.prompt_lengths.index_add(0, batch.groups, batch.lengths) if shared else sequences
            longest, largest = (int(sequences.max()), int(whole.max())) if len(sequences) else (1, 1)
            wanted = derived_budget(rows, longest, largest, run.device.type, self._room)
        return wanted if self.limit is None else min(wanted, self.limit)

    def plan(self, batch: TrainBatch, rows: int, at_least: int = 1) -> list[TrainBatch]:
        """Cut a batch into micro-batches, the largest first; skipped rollouts are counted with the first."""
        if (unit := self._run.args.normalize_over) != "rollout":
            assert batch.weights is not None, "weights come before micro-batches"
            shares = even_shares(batch, turns=unit == "turn")
            of_terms = {
                name: tokens * even_shares(batch, turns=unit == "turn", tokens=tokens != 0)
                for name, tokens in batch.term_tokens.items()
            }
            batch = replace(batch, weights=batch.weights * shares, term_tokens=of_terms)
        return _with_skipped(batch, [batch.select(part) for part in self.planned(batch, rows, at_least)])

    def run(self, part: TrainBatch, backward: Callable[[TrainBatch], Tensor]) -> Tensor:
        """Run one planned micro-batch, in smaller ones where memory runs out; the sum of the losses."""
        cut = self._cut(part)  # the limit may have been lowered since it was planned
        if len(cut) == 1:
            return self._attempt(part, backward)
        pieces = _with_skipped(part, [part.select(rows) for rows in cut])
        return torch.stack([self.run(piece, backward) for piece in pieces]).sum()

    def score(
        self, batch: TrainBatch, score: Callable[[TrainBatch], tuple[Tensor, ...]], rows: int
    ) -> tuple[Tensor, ...]:
        """Values of every token, computed without gradient in micro-batches that fit.

        `score` gives tensors [n, ...] of a micro-batch's n tokens; the result are tensors [N, ...] of the whole batch,
        numbers in float32 or less.
        """
        values: tuple[Tensor, ...] = ()
        todo = self.planned(batch, rows)[::-1]
        of_idle = [score(idle) for idle in self.idle(batch, len(todo))]
        if not todo:  # nothing to score: idle micro-batches give the shapes
            return tuple(_values_like(part, batch) for part in (of_idle or [score(batch.idle())])[0])
        while todo:
            chosen = todo.pop()
            part = batch.select(chosen)
            pieces = self._cut(part)
            if len(pieces) > 1:
                todo += [chosen[piece] for piece in reversed(pieces)]
                continue
            try:
                found = score(part)
                values = values or tuple(_values_like(one, batch) for one in found)
                tokens = token_index(chosen, batch.lengths)
                for whole, one in zip(values, found, strict=True):
                    whole[tokens] = one.to(whole.dtype)
                continue
            except (RuntimeError, MemoryError) as error:
                self._check_survivable(error, part)
            self._shrink(part)
            todo.append(chosen)
        return values

    def idle(self, batch: TrainBatch, count: int) -> list[TrainBatch]:
        """Idle micro-batches after `count` real ones, as many as other processes run more. Collective."""
        if not self._run.sharding.weights:
            return []
        most = max(self._run.collectives.gather(count, "count forward passes"))
        return [batch.idle() for _ in range(most - count)]

    def _attempt(self, part: TrainBatch, backward: Callable[[TrainBatch], Tensor]) -> Tensor:
        random_state = torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        policy = self._run.policy
        before = [(parameter, _grad_state(parameter)) for parameter in policy.parameters() if parameter.requires_grad]
        keeping = self._keeping(part)
        for layer in keeping:
            layer.gradient_checkpointing = False
        try:
            with fused_layers(self.fused(policy)):
                return backward(part)
        except (RuntimeError, MemoryError) as error:
            if not (keeping and is_out_of_memory(error)):
                self._check_survivable(error, part)
        finally:
            for layer in keeping:
                layer.gradient_checkpointing = True
        # Here and not in the handler: the error holds the failed attempt's tensors.
        self._shrink(part, len(keeping))
        torch.set_rng_state(random_state[0])
        if random_state[1] is not None:
            torch.cuda.set_rng_state(random_state[1])
        # A backward pass adds to each gradient once, all of its share: parameters that changed have theirs.
        with _set_aside([parameter for parameter, state in before if _grad_state(parameter) != state]):
            return self.run(part, backward)

    def _keeping(self, part: TrainBatch) -> list[Any]:
        """Layers that keep their activations in a micro-batch, though they may recompute them: the last ones."""
        if self.activations is None or self._padded_until_proven() == "padded" or not torch.is_grad_enabled():
            return []
        kept = self.activations.kept(computed_tokens(part, range(len(part)), self._scorer.layout))
        every = getattr(decoder_of(self._run.policy), "layers", ())
        layers = [layer for layer in every if getattr(layer, "gradient_checkpointing", False)]
        most = len(layers) if self._most_kept is None else self._most_kept
        return layers[max(0, len(layers) - min(kept, most)) :]

    def _cut(self, part: TrainBatch) -> list[Tensor]:
        """The rollouts of pieces that keep to the limit, the largest first; all in one if the part does."""
        layout, everything = self._padded_until_proven(), range(len(part))
        if self.limit is None or len(part) <= 1 or computed_tokens(part, everything, layout) <= self.limit:
            return [torch.arange(len(part), device=part.lengths.device)]
        return pack_micro_batches(part, self.limit, layout)

    def _check_survivable(self, error: Exception, part: TrainBatch) -> None:
        """Raise the error again unless memory ran out and the micro-batch can be cut into smaller ones."""
        if not is_out_of_memory(error):
            raise error
        tokens = int(part.prompt_lengths.sum() + part.lengths.sum())
        if self._sharded:
            raise torch.OutOfMemoryError(
                f"memory does not suffice for a micro-batch of {len(part)} rollouts, {tokens} tokens, and under FSDP or"
                " DeepSpeed it cannot be repeated in parts, as all processes take part in it. Set"
                f" max_tokens_per_micro_batch={max(1, tokens // 2)} or gradient_checkpointing=True."
            ) from error
        if len(part) <= 1:
            raise torch.OutOfMemoryError(
                f"memory does not suffice for a single rollout of {tokens} tokens, prompt included. Set"
                " gradient_checkpointing=True, a smaller max_completion_length, or train an adapter or a smaller model."
            ) from error

    def _shrink(self, part: TrainBatch, kept: int = 0) -> None:
        """Let half of the `kept` layers keep their activations, or else halve the limit; warn the first time."""
        tokens = computed_tokens(part, range(len(part)), self._padded_until_proven())
        if kept:
            first, self._most_kept = self._most_kept is None, kept // 2
            tried, now = f", in which {kept} layers kept their activations; it is repeated with", kept // 2
            advice = "let all layers recompute with gradient_checkpointing_kwargs={'use_reentrant': False}"
        else:
            first, known = self.limit is None, self.limit or tokens
            now = self.limit = max(1, min(tokens // 2, known))  # never more than was learned before
            tried, advice = "; it is repeated in parts of at most", f"start with max_tokens_per_micro_batch={now}"
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if first:
            warnings.warn(
                f"memory ran out in a micro-batch of {tokens} tokens{tried} {now}, and so are later ones. Results are"
                f" unchanged; to save the time, {advice}.",
                stacklevel=3,
            )

    def planned(self, batch: RolloutSizes, rows: int, at_least: int = 1) -> list[Tensor]:
        """The rollouts of each micro-batch, by number."""
        return pack_micro_batches(batch, self.budget(batch, rows), self._padded_until_proven(), at_least)

    def _padded_until_proven(self) -> str:
        layout = self._scorer.layout
        return "padded" if layout == "auto" else layout


def _values_like(part: Tensor, batch: TrainBatch) -> Tensor:
    """Zeros for all tokens of a batch, shaped as some tokens' values [n, ...]."""
    dtype = torch.float32 if part.dtype == torch.float64 else part.dtype  # log-probs are never less than float32
    return part.new_zeros((batch.num_tokens, *part.shape[1:]), dtype=dtype)


def _with_skipped(whole: TrainBatch, parts: list[TrainBatch]) -> list[TrainBatch]:
    if not parts:
        return parts
    first = replace(parts[0], skipped_tokens=whole.skipped_tokens, skipped_rows=whole.skipped_rows)
    return [first, *parts[1:]]


def _memory_plan(run: Run) -> MemoryEstimate | None:
    """The memory plan where it decides something; None for decoders that it has no formula for."""
    if run.device.type != "cuda" and not may_keep(run.args):
        return None
    try:
        return estimate_of(run.args, run.policy, run.opponents, run.teacher_bytes)
    except (AttributeError, TypeError, ValueError) as error:
        if run.device.type == "cuda":
            warnings.warn(
                f"no memory plan for {name_of(run.policy)} ({error}): micro-batches stay as small as"
                " per_device_train_batch_size asks for. Set max_tokens_per_micro_batch to make them larger.",
                stacklevel=3,
            )
        return None


def _grad_state(parameter: nn.Parameter) -> tuple[int, int]:
    """A value that changes whenever something is added to the gradient."""
    grad = parameter.grad
    return (0, 0) if grad is None else (id(grad), grad._version)


@contextmanager
def _set_aside(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Discard gradients that are added to these parameters in this context, as they have their share already."""

    def discard(parameter: Tensor) -> None:  # as soon as it is written, so that at most one takes memory in addition
        parameter.grad = None

    kept = [(parameter, parameter.grad) for parameter in parameters]
    hooks = [parameter.register_post_accumulate_grad_hook(discard) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, grad in kept:
            parameter.grad = grad


@dataclass(frozen=True)
class PartOfStep:
    """A rollout batch's contribution to an optimizer step."""

    own: OwnRollouts  # this process's rollouts of the rollout batch
    index: RolloutIndex  # the rollouts of all processes that the step trains on
    micro_batches: int  # nominal micro-batches
    tokens: float  # the rollout batch's trained tokens, times the share of its micro-batches in the step
    terms: dict[str, TermCounts] = field(default_factory=dict)  # the same of each term of the loss
    source_tokens: list[float] = field(default_factory=list)  # the same by the index of a source


@dataclass
class BufferedRollouts:
    """A rollout batch, and how many of its nominal micro-batches were taken."""

    own: OwnRollouts  # this process's rollouts
    index: RolloutIndex  # the rollouts of all processes
    parts: list[Tensor]  # rollouts of each nominal micro-batch
    iterations: int  # times that the micro-batches are trained on
    taken: int = 0

    @property
    def left(self) -> int:
        """Nominal micro-batches that no optimizer step has taken yet."""
        return len(self.parts) * self.iterations - self.taken

    def take(self, micro_steps: int) -> PartOfStep:
        """The rollouts of the next `micro_steps` nominal micro-batches, fewer where the rollout batch ends."""
        count = min(micro_steps, self.left)
        rows = [self.parts[i % len(self.parts)] for i in range(self.taken, self.taken + count)]
        self.taken += count
        tokens, share = int(self.index.sampled_lengths.sum()) * count / len(self.parts), count / len(self.parts)
        terms = {name: counts.times(share) for name, counts in self.terms().items()}
        by_source = [] if self.index.sources is None else self._tokens_of(self.index.sources, share)
        return PartOfStep(self.own, self.index.select(torch.cat(rows)), count, tokens, terms, by_source)

    def _tokens_of(self, sources: Tensor, share: float) -> list[float]:
        totals = torch.bincount(sources, weights=self.index.sampled_lengths.double())
        return [total * share for total in totals.tolist()]

    def terms(self) -> dict[str, TermCounts]:
        """Sizes of each term of the loss in the rollout batch."""
        found = {}
        for name, sizes in self.index.term_tokens.items():
            micro_batches = sum(len(self.index.owners[part][sizes[part] > 0].unique()) for part in self.parts)
            found[name] = TermCounts(float(sizes.sum()), float((sizes > 0).sum()), float(micro_batches))
        return found


@dataclass
class RolloutBuffer:
    """Rollout batches that optimizer steps train on next; checkpoints hold the one that is not used up after a step."""

    batches: list[BufferedRollouts] = field(default_factory=list)  # with nominal micro-batches left, the oldest first

    def append(self, own: OwnRollouts, index: RolloutIndex, parts: list[Tensor], iterations: int) -> None:
        self.batches.append(BufferedRollouts(own, index, parts, iterations))

    def clear(self) -> None:
        self.batches.clear()

    @property
    def left(self) -> int:
        """Nominal micro-batches that no optimizer step has taken yet."""
        return sum(batch.left for batch in self.batches)

    def take(self, micro_steps: int) -> list[PartOfStep]:
        """The rollouts of an optimizer step of so many nominal micro-batches."""
        if self.left < micro_steps:
            raise ValueError(
                "the run continues in the middle of a rollout batch, but its rollouts are not there: the checkpoint was"
                " saved with save_only_model=True or by another trainer. Resume from a full checkpoint, or start a new"
                " run from the checkpoint's weights."
            )
        parts: list[PartOfStep] = []
        while micro_steps:
            parts.append(self.batches[0].take(micro_steps))
            micro_steps -= parts[-1].micro_batches
            self.batches = [batch for batch in self.batches if batch.left]
        return parts

    def state_dict(self) -> dict[str, Any]:
        """The rollout batch that is not used up, and how many of its micro-batches were taken."""
        if not self.batches:
            return {"batch": None, "rank": None, "index": None, "parts": [], "passes": 0, "taken": 0}
        assert len(self.batches) == 1, "an optimizer step begins no rollout batch before it has trained on the last one"
        (batch,) = self.batches
        return {
            "batch": batch.own.batch.state(),
            "rank": batch.own.rank,
            "index": vars(batch.index),
            "parts": batch.parts,
            "passes": batch.iterations,
            "taken": batch.taken,
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device, rank: int = 0) -> None:
        """Continue on the process that saved `state`; others have no rollouts of it."""
        self.clear()
        left = state["taken"] < len(state["parts"]) * state["passes"]  # version 0.1 wrote used-up batches, too
        if state["batch"] is not None and state["rank"] == rank and left:
            own = OwnRollouts(TrainBatch.of_state(state["batch"]).to(device), rank)
            index = RolloutIndex(**state["index"])
            self.batches.append(BufferedRollouts(own, index, state["parts"], state["passes"], state["taken"]))


def nominal_parts(rollouts: int, rows: int, ranks: int) -> list[Tensor]:
    """Rollouts of each nominal micro-batch, `rows` of every rank; 8, 2 and 2 give [[0, 1, 4, 5], [2, 3, 6, 7]]."""
    by_rank = torch.arange(rollouts).view(ranks, -1)
    return [part.flatten() for part in by_rank.split(rows, dim=1)]


def micro_batches_of(present: Sequence[bool], rows: int) -> int:
    """Number of nominal micro-batches of `rows` rollouts, without those that hold absent ones alone."""
    return sum(any(present[start : start + rows]) for start in range(0, len(present), rows))


def spread(micro_batches: list[TrainBatch], micro_steps: int) -> list[list[TrainBatch]]:
    """Distribute micro-batches over micro-steps, evenly; the last micro-step always gets one."""
    cuts = [len(micro_batches) * i // micro_steps for i in range(micro_steps + 1)]
    return [micro_batches[a:b] for a, b in pairwise(cuts)]


def micro_batch_tokens(tokens: Tensor, rows: int) -> Tensor:
    """Trained tokens [B] of the nominal micro-batch (`rows` rollouts) that each rollout is in; `tokens` [B]: its
    own."""
    return torch.cat([part.sum().expand(len(part)) for part in tokens.split(rows)])
