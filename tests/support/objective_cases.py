"""Random optimizer steps, and `covey.core`'s answer to them: what the comparison with `brute_force` is fed with.

`RowsByRank` holds rows by rank in the order they were drawn. `covey_gradients` flattens all of it, computes weights
once from global counts, cuts out one optimizer step and differentiates `policy_loss`.
"""

import random
import struct
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from covey.algorithms import LOSS_TYPES
from covey.algorithms.grpo import objective
from covey.core.batch import TrainBatch
from covey.core.losses import BatchCounts, mean_per_micro_batch, token_weights
from covey.core.mismatch import MismatchCorrection, mismatch_weights
from covey.core.objective import Objective, policy_loss
from tests.support.brute_force import Options, Row, key

EMPTY, TRUNCATED, TOOLS, CONSTANT = "empty", "truncated", "tools", "constant"


@dataclass
class RowsByRank:
    """A rollout batch: `rows[r]` are the completions of rank r; `accumulation` micro-batches make an update."""

    rows: list[list[Row]]
    per_device: int
    accumulation: int

    @property
    def flat(self) -> list[Row]:
        return [row for rank in self.rows for row in rank]

    @property
    def steps_per_generation(self) -> int:
        return len(self.rows[0]) // self.per_device

    @property
    def tokens(self) -> int:
        return sum(row.size for row in self.flat)

    def ranks(self, update: int) -> list[list[list[Row]]]:
        """The rows of one optimizer update as ranks of micro-batches."""
        size = self.per_device
        first = update * self.accumulation
        return [
            [rank[m * size : (m + 1) * size] for m in range(first, first + self.accumulation)] for rank in self.rows
        ]

    def indices(self, update: int) -> list[int]:
        """Positions in `flat` of the rows of one optimizer update."""
        span, width = self.accumulation * self.per_device, len(self.rows[0])
        return [r * width + update * span + i for r in range(len(self.rows)) for i in range(span)]


def random_row(draw: random.Random, kind: str = "", on_policy: bool = False, engine: bool = True) -> Row:
    """A completion with numbers that float32 represents, ratios on both sides of every bound."""
    length = 0 if kind == EMPTY else draw.randint(2, 6)
    lp = [_f32(draw.uniform(-3.0, -0.1)) for _ in range(length)]
    mask = [kind != TRUNCATED] * length
    if kind == TOOLS:
        mask[draw.randrange(1, length) if length > 1 else 0] = False
    advantage = 0.0 if kind == CONSTANT else _f32(draw.gauss(0.0, 1.0))
    return Row(
        lp=torch.tensor(lp, dtype=torch.float64, requires_grad=True),
        entropy=torch.tensor([_f32(draw.uniform(0.0, 3.0)) for _ in lp], dtype=torch.float64, requires_grad=True),
        mask=mask,
        advantages=[advantage] * length,
        old=None if on_policy else [_f32(x + draw.gauss(0.0, 0.45)) for x in lp],
        ref=[_f32(x + draw.gauss(0.0, 0.5)) for x in lp],
        engine=[_f32(x + draw.gauss(0.0, 0.35)) for x in lp] if engine else None,
    )


def random_rows(
    seed: int, *, world: int = 2, per_device: int = 3, accumulation: int = 2, updates: int = 2, **row: bool
) -> RowsByRank:
    """Rows of every kind: tool-masked, truncated and hence untrained, empty, zero advantage, ordinary."""
    draw = random.Random(seed)
    kinds = [TOOLS, "", TRUNCATED, "", EMPTY, "", CONSTANT, TOOLS]
    per_rank = per_device * accumulation * updates
    kinds = (kinds * (1 + world * per_rank // len(kinds)))[: world * per_rank]
    draw.shuffle(kinds)
    rows = [[random_row(draw, kinds[r * per_rank + i], **row) for i in range(per_rank)] for r in range(world)]
    return RowsByRank(rows, per_device, accumulation)


def config(o: Options) -> SimpleNamespace:
    """The options under their config names."""
    return SimpleNamespace(
        loss_type=o.loss_type,
        epsilon=o.epsilon / (10 if "dppo" in o.loss_type else 1),  # their limits are on differences of probabilities
        resolved_epsilon_high=o.cispo_cap
        if o.loss_type == "cispo"
        else o.epsilon_high / (10 if "dppo" in o.loss_type else 1),
        delta=o.delta,
        importance_sampling_level=o.level,
        beta=o.beta,
        kl_estimator=o.kl_estimator,
        use_bias_correction_kl=o.bias_correction,
        off_policy_mask_threshold=o.off_policy_threshold,
        sapo_temperature_pos=o.tau_pos,
        sapo_temperature_neg=o.tau_neg,
        vespo_k_pos=o.k_pos,
        vespo_lambda_pos=o.lambda_pos,
        vespo_k_neg=o.k_neg,
        vespo_lambda_neg=o.lambda_neg,
        dro_beta=o.dro_beta,
        cov_share=o.cov_share,
        kl_cov_coef=o.kl_cov_coef,
        clip_cov_low=o.clip_cov_low,
        clip_cov_high=o.clip_cov_high,
    )


def flat_batch(rollout_batch: RowsByRank, o: Options, dtype: torch.dtype = torch.float64) -> TrainBatch:
    """The whole rollout batch as one weighted `TrainBatch` (ids and prompts are made up: the loss reads none)."""
    rows = rollout_batch.flat
    lengths = torch.tensor([len(row.mask) for row in rows])
    old = _flat_numbers([row.old for row in rows], dtype)
    engine = _flat_numbers([row.engine for row in rows], dtype)
    batch = TrainBatch(
        token_ids=torch.arange(int(lengths.sum())),
        lengths=lengths,
        sampled=torch.tensor([m for row in rows for m in row.mask], dtype=torch.bool),
        prompt_ids=torch.tensor([7]),
        prompt_lengths=torch.tensor([1]),
        groups=torch.zeros(len(rows), dtype=torch.long),
        advantages=torch.tensor([a for row in rows for a in row.advantages], dtype=dtype),
        old_logprobs=old,
        ref_logprobs=_flat_numbers([row.ref for row in rows], dtype),
        engine_logprobs=engine,
    )
    counts = batch_counts(rollout_batch, o, dtype)
    batch.weights = token_weights(LOSS_TYPES[o.loss_type].weighting, counts, batch.sampled, lengths)
    if o.entropy_coef:
        batch.entropy_weights = token_weights(mean_per_micro_batch, counts, batch.sampled, lengths)
    if o.mismatch_mode is not None and old is not None:
        assert engine is not None
        batch.mismatch_weights, _ = correction(o)(old, engine, batch.sampled, lengths)
    return batch


def correction(o: Options) -> MismatchCorrection:
    assert o.mismatch_mode is not None
    return partial(mismatch_weights, mode=o.mismatch_mode, clip_min=o.clip_min, clip_max=o.clip_max)


def corrected_objective(o: Options) -> Objective:
    """The objective, with its correction where on-policy the batch brings no weights along."""
    return replace(objective(config(o)), correction=None if o.mismatch_mode is None else correction(o))


def batch_counts(rollout_batch: RowsByRank, o: Options, dtype: torch.dtype) -> BatchCounts:
    size = rollout_batch.per_device
    micro = []
    for rank in rollout_batch.rows:
        for start in range(0, len(rank), size):
            part = rank[start : start + size]
            micro += [sum(row.size for row in part)] * len(part)
    updates = rollout_batch.steps_per_generation / rollout_batch.accumulation
    return BatchCounts(
        tokens=torch.tensor([row.size for row in rollout_batch.flat], dtype=dtype),
        micro_tokens=torch.tensor(micro, dtype=dtype),
        rows_per_update=len(rollout_batch.flat) / updates,
        tokens_per_update=rollout_batch.tokens / updates,
        micro_batches_per_update=len(rollout_batch.rows) * rollout_batch.accumulation,
        max_completion_length=o.max_completion_length,
    )


@dataclass
class Gradients:
    """A loss and its gradients, flat in the order of the rows asked for."""

    loss: float
    logprobs: Tensor
    entropies: Tensor


def reference_gradients(rows: list[Row], loss: Tensor) -> Gradients:
    """Differentiate a brute-force loss with respect to every row's leaves."""
    leaves = [row.lp for row in rows] + [row.entropy for row in rows]
    if not loss.requires_grad:
        return Gradients(float(loss), *(torch.zeros(sum(len(row.mask) for row in rows)).double() for _ in range(2)))
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    full = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, leaves, strict=True)]
    return Gradients(float(loss.detach()), torch.cat(full[: len(rows)]), torch.cat(full[len(rows) :]))


def covey_gradients(
    rollout_batch: RowsByRank,
    o: Options,
    update: int = 0,
    *,
    dtype: torch.dtype = torch.float64,
    parts: list[list[int]] | None = None,
) -> Gradients:
    """`policy_loss` of one update, cut into `parts` (lists of positions within the update) if given."""
    rows = torch.tensor(rollout_batch.indices(update))
    step = flat_batch(rollout_batch, o, dtype).select(rows)
    chosen = [rollout_batch.flat[i] for i in rows]
    logprobs = _leaf([row.lp for row in chosen], dtype)
    entropies = _leaf([row.entropy for row in chosen], dtype)
    if o.top_entropy_quantile < 1.0:
        step.entropy_threshold = entropies[step.sampled].quantile(1 - o.top_entropy_quantile).item()
    choice = corrected_objective(o).choice
    if choice is not None:
        trained = step.sampled
        keys = torch.tensor([key(number) for number in range(int(trained.sum()))])
        step.chosen = trained.clone()
        step.chosen[trained] = choice(logprobs.detach()[trained], step.advantages[trained], keys)
    total = 0.0
    starts = (step.lengths.cumsum(0) - step.lengths).tolist()
    for part in parts or [list(range(len(chosen)))]:
        spans = [range(starts[i], starts[i] + int(step.lengths[i])) for i in part]
        tokens = torch.tensor([t for span in spans for t in span], dtype=torch.long)
        cut = step.select(torch.tensor(part, dtype=torch.long))
        result = policy_loss(cut, logprobs[tokens], entropies[tokens], corrected_objective(o), o.entropy_coef)
        if result.loss.requires_grad:
            result.loss.backward()
        total += result.loss.item()
    zero = torch.zeros_like(logprobs)
    return Gradients(
        total,
        zero if logprobs.grad is None else logprobs.grad,
        zero if entropies.grad is None else entropies.grad,
    )


def bare_batch(sampled: Tensor, lengths: Tensor, **fields: Any) -> TrainBatch:
    """A batch with what the loss reads; it reads neither token ids nor prompts."""
    none = lengths.new_zeros(0)
    ids, groups = sampled.long(), torch.zeros_like(lengths)
    return TrainBatch(ids, lengths, sampled, prompt_ids=none, prompt_lengths=none, groups=groups, **fields)


def assert_same(actual: Gradients, expected: Gradients, tolerance: float) -> None:
    """Each entry of each gradient within `tolerance` of the other's, relatively, and the losses too."""
    for name in ("logprobs", "entropies"):
        got, want = getattr(actual, name).double(), getattr(expected, name).double()
        assert got.shape == want.shape
        if len(want):
            excess = (got - want).abs() - tolerance * want.abs()
            assert excess.max() <= 1e-12, f"gradient of {name}: {got[excess.argmax()]} is not {want[excess.argmax()]}"
    assert abs(actual.loss - expected.loss) <= tolerance * max(abs(expected.loss), 1.0)


def _f32(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]


def _flat_numbers(lists: list[list[float] | None], dtype: torch.dtype) -> Tensor | None:
    if any(one is None for one in lists):
        return None
    return torch.tensor([x for one in lists if one is not None for x in one], dtype=dtype)


def _leaf(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([t.detach() for t in tensors]).to(dtype).requires_grad_()
