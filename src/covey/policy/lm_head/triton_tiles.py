"""Arithmetic of a tile of logits in Triton kernels; `fastest_tiles` compares them with torch's operations."""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from covey.core.distillation import FAR, LEAST_LOGPROB
from covey.policy.lm_head.support import TileSupport
from covey.policy.lm_head.teacher import DivergenceSums
from covey.policy.lm_head.torch_tiles import (
    IMPOSSIBLE,
    Curve,
    DivergenceGradients,
    RowGradients,
    RowSums,
    TargetColumns,
    TorchTiles,
)
from covey.runtime.user_code import warn

BLOCK = 4096  # entries of a row that a program loads at once
MOST_TIME = 1.1
"""Largest ratio of the kernels' time to the time of torch's operations for which they are used. It is well above 1, so
that noise between runs or processes does not change the choice."""
TOLERANCE = 1e-3  # largest difference of results and gradients, relative to the larger of 1 and their size


@triton.jit
def _logits(x, cap, HAS_CAP: tl.constexpr):
    """z of torch_tiles.Curve; tanh of |x| from exp(-2 |x|), which cannot overflow."""
    z = x
    if HAS_CAP:
        fall = tl.exp(-2.0 * tl.abs(x))
        size = (1.0 - fall) / (1.0 + fall) * cap
        z = tl.where(x < 0, -size, size)
    return z


@triton.jit
def _add_kernel(
    x_ptr, offset_ptr, peak_ptr, total_ptr, moment_ptr, chosen_ptr, shrink_ptr, words, targets, cap, floor,
    HAS_CAP: tl.constexpr, ENTROPY: tl.constexpr, OTHERS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Add a tile to the sums of one row; with OTHERS x becomes exp(z - peak), 0 at the targets."""
    row = tl.program_id(0).to(tl.int64)
    before = tl.load(peak_ptr + row)
    peak = before
    total = tl.load(total_ptr + row)
    moment = total * 0.0
    if ENTROPY:
        moment = tl.load(moment_ptr + row)
    for first in range(0, words, SIZE):
        column = first + tl.arange(0, SIZE)
        inside = column < words
        x = tl.load(x_ptr + row * words + column, mask=inside, other=0.0).to(tl.float32)
        z = tl.where(inside, _logits(x, cap, HAS_CAP), -float("inf"))
        new = tl.maximum(peak, tl.max(z, 0))
        weights = tl.exp(z - new)
        fall = tl.exp(peak - new)
        if ENTROPY:
            moment = (moment + (peak - new) * total) * fall + tl.sum(weights * tl.maximum(z - new, floor), 0)
        total = total * fall + tl.sum(weights, 0)
        peak = new
    tl.store(peak_ptr + row, peak)
    tl.store(total_ptr + row, total)
    if ENTROPY:
        tl.store(moment_ptr + row, moment)
    for target in range(0, targets):
        offset = tl.load(offset_ptr + row * targets + target)
        if (offset >= 0) & (offset < words):
            chosen = tl.load(x_ptr + row * words + offset).to(tl.float32)
            tl.store(chosen_ptr + row * targets + target, _logits(chosen, cap, HAS_CAP))
    if OTHERS:
        tl.debug_barrier()  # the targets' logits are read before any thread overwrites them
        tl.store(shrink_ptr + row, tl.exp(before - peak))
        for first in range(0, words, SIZE):
            column = first + tl.arange(0, SIZE)
            inside = column < words
            x = tl.load(x_ptr + row * words + column, mask=inside, other=0.0).to(tl.float32)
            weights = tl.exp(_logits(x, cap, HAS_CAP) - peak)
            for target in range(0, targets):
                weights = tl.where(column == tl.load(offset_ptr + row * targets + target), 0.0, weights)
            tl.store(x_ptr + row * words + column, weights.to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _finite(log_p, least, floor):
    """Log-probs with a finite number for tokens that cannot be sampled, as `torch_tiles._finite`."""
    return tl.maximum(tl.where(log_p == -float("inf"), least, log_p), floor)


@triton.jit
def _log_mixture(log_p, log_t, beta, far):
    """log(M / P) of `covey.core.distillation.log_mixture`, with an absolute error of rounding 1."""
    gap = tl.minimum(tl.maximum(log_t - log_p, -far), far)
    return tl.log(1.0 - beta + beta * tl.exp(gap)), gap


@triton.jit
def _divergence_kernel(
    x_ptr, teacher_ptr, value_ptr, centre_ptr, log_z_ptr, words, cap, beta, least, floor, far,
    HAS_CAP: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Divergence of a whole row from the teacher's logits; KIND: 0 the forward KL, 1 the reverse, 2 between."""
    row = tl.program_id(0).to(tl.int64)
    peak = tl.load(log_z_ptr + row) * 0.0 - 3e38
    total, teacher_peak, teacher_total = peak * 0.0, peak, peak * 0.0
    for first in range(0, words, SIZE):
        column = first + tl.arange(0, SIZE)
        inside = column < words
        x = tl.load(x_ptr + row * words + column, mask=inside, other=0.0).to(tl.float32)
        z = tl.where(inside, _logits(x, cap, HAS_CAP), -float("inf"))
        u = tl.load(teacher_ptr + row * words + column, mask=inside, other=-float("inf"))
        new, teacher_new = tl.maximum(peak, tl.max(z, 0)), tl.maximum(teacher_peak, tl.max(u, 0))
        total = total * tl.exp(peak - new) + tl.sum(tl.exp(z - new), 0)
        teacher_total = teacher_total * tl.exp(teacher_peak - teacher_new) + tl.sum(tl.exp(u - teacher_new), 0)
        peak, teacher_peak = new, teacher_new
    log_z, log_z_teacher = peak + tl.log(total), teacher_peak + tl.log(teacher_total)
    own, other = peak * 0.0, peak * 0.0
    for first in range(0, words, SIZE):
        column = first + tl.arange(0, SIZE)
        inside = column < words
        x = tl.load(x_ptr + row * words + column, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(teacher_ptr + row * words + column, mask=inside, other=0.0)
        log_p = _finite(_logits(x, cap, HAS_CAP) - log_z, least, floor)
        log_t = _finite(u - log_z_teacher, least, floor)
        p, t = tl.exp(log_p), tl.exp(log_t)
        if KIND == 0:
            own += tl.sum(tl.where(inside, t * (log_t - log_p), 0.0), 0)
        if KIND == 1:
            own += tl.sum(tl.where(inside, p * (log_p - log_t), 0.0), 0)
        if KIND == 2:
            of_p, gap = _log_mixture(log_p, log_t, beta, far)
            own += tl.sum(tl.where(inside, p * of_p, 0.0), 0)
            other += tl.sum(tl.where(inside, t * (of_p - gap), 0.0), 0)
    value, centre = own, own
    if KIND == 0:
        centre = own * 0.0
    if KIND == 2:
        centre = (beta - 1.0) * own
        value = centre - beta * other
    tl.store(value_ptr + row, value)
    tl.store(centre_ptr + row, centre)
    tl.store(log_z_ptr + row, log_z_teacher)


@triton.jit
def _gradient_kernel(
    x_ptr, offset_ptr, log_z_ptr, target_ptr, by_logprob_ptr, by_entropy_ptr, entropy_ptr, teacher_ptr, by_value_ptr,
    centre_ptr, teacher_log_z_ptr, words, targets, cap, floor, beta, least, far, HAS_CAP: tl.constexpr,
    ENTROPY: tl.constexpr, SCALED: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Replace SIZE entries x of a row by their gradient, as in TorchTiles.gradient."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < words
    x = tl.load(x_ptr + row * words + column, mask=inside, other=0.0).to(tl.float32)
    z = _logits(x, cap, HAS_CAP)
    log_p = z - tl.load(log_z_ptr + row)
    grad = tl.exp(log_p)
    if ENTROPY:
        spread = tl.maximum(log_p, floor) + tl.load(entropy_ptr + row)
        grad = grad * (spread * tl.load(by_entropy_ptr + row) + tl.load(by_logprob_ptr + row))
    elif SCALED:
        grad = grad * tl.load(by_logprob_ptr + row)
    for target in range(0, targets):
        place = row * targets + target
        grad = tl.where(column == tl.load(offset_ptr + place), tl.load(target_ptr + place), grad)
    if KIND >= 0:  # of a divergence, in addition
        log_p = _finite(log_p, least, floor)
        u = tl.load(teacher_ptr + row * words + column, mask=inside, other=0.0)
        log_t = _finite(u - tl.load(teacher_log_z_ptr + row), least, floor)
        slope = tl.exp(log_p) - tl.exp(log_t)
        if KIND == 1:
            slope = tl.exp(log_p) * (log_p - log_t - tl.load(centre_ptr + row))
        if KIND == 2:
            of_p, _ = _log_mixture(log_p, log_t, beta, far)
            slope = tl.exp(log_p) * ((beta - 1.0) * of_p - tl.load(centre_ptr + row))
        grad -= slope * tl.load(by_value_ptr + row)
    if HAS_CAP:
        share = z / cap
        grad = grad * (1.0 - share * share) * cap
    tl.store(x_ptr + row * words + column, grad.to(x_ptr.dtype.element_ty), mask=inside)


class TritonTiles(TorchTiles):
    """Tile arithmetic in Triton kernels, for tiles of at most float32 and sums in float32."""

    def add(
        self, x: Tensor, targets: TargetColumns, sums: RowSums, *, others: bool = False
    ) -> tuple[Tensor, Tensor] | None:
        tokens, words = x.shape
        if sums.top_logits is not None:  # the largest x are those of the largest logits
            largest, column = x.topk(min(sums.top_logits.shape[1], words), dim=1)
            sums.add_top(self._logits(largest.to(self.wide)), column + targets.start)
        shrink = torch.empty_like(sums.peak) if others else sums.peak
        moment = sums.peak if sums.moment is None else sums.moment
        with torch.cuda.device_of(x):
            _add_kernel[(tokens,)](
                x, targets.offset, sums.peak, sums.total, moment, sums.chosen, shrink,
                words, targets.offset.shape[1], self.curve.cap or 1.0, IMPOSSIBLE, HAS_CAP=self.curve.cap is not None,
                ENTROPY=sums.moment is not None, OTHERS=others, SIZE=_size(words),
            )  # fmt: skip
        return (x, shrink) if others else None

    def divergence(self, x: Tensor, teacher: Tensor, support: TileSupport | None, beta: float) -> DivergenceSums:
        assert support is None, "torch's operations compute masked rows"
        tokens, words = x.shape
        sums = DivergenceSums.empty(tokens, teacher[:0])
        with torch.cuda.device_of(x):
            _divergence_kernel[(tokens,)](
                x, teacher, *sums, words, self.curve.cap or 1.0, beta, LEAST_LOGPROB, IMPOSSIBLE, FAR,
                HAS_CAP=self.curve.cap is not None, KIND=_kind(beta), SIZE=_size(words),
            )  # fmt: skip
        return sums

    def gradient(
        self,
        x: Tensor,
        targets: TargetColumns,
        rows: RowGradients,
        teacher: Tensor | None = None,
        beta: float = 1.0,
    ) -> Tensor:
        tokens, words = x.shape
        size, unused = _size(words), rows.log_z
        has_entropy_gradient = rows.by_entropy is not None
        by_entropy, entropy = (unused if part is None else part for part in (rows.by_entropy, rows.entropy))
        by_value, centre, log_z, kind = unused, unused, unused, -1
        if rows.divergence is not None and teacher is not None:
            by_value, (_, centre, log_z) = rows.divergence
            kind = _kind(beta)
        with torch.cuda.device_of(x):
            _gradient_kernel[(tokens, triton.cdiv(words, size))](
                x, targets.offset, rows.log_z, rows.at_target, rows.by_logprob, by_entropy, entropy,
                unused if teacher is None else teacher, by_value, centre, log_z,
                words, targets.offset.shape[1], self.curve.cap or 1.0, IMPOSSIBLE, beta, LEAST_LOGPROB, FAR,
                HAS_CAP=self.curve.cap is not None, ENTROPY=has_entropy_gradient, SCALED=rows.scaled, KIND=kind,
                SIZE=size,
            )  # fmt: skip
        return x


def _kind(beta: float) -> int:
    return {0.0: 0, 1.0: 1}.get(beta, 2)


def _size(words: int) -> int:
    return min(BLOCK, triton.next_power_of_2(words))


class Case(NamedTuple):
    """A kind of call: tokens and vocabulary entries of a full tile, the dtype of its entries, and the wanted results.

    Likeliest tokens are left out: both implementations find them by torch's `topk`.
    """

    shape: tuple[int, int]
    compute: torch.dtype
    curve: Curve
    entropy: bool
    targets: int  # C of each token
    device: torch.device
    beta: float | None = None  # of a divergence from a teacher; None without one

    def tiles(self, kind: type[TorchTiles]) -> TorchTiles:
        size = self.shape[0] * self.shape[1]
        return kind(self.curve, minus_inf=False, size=size, wide=torch.float32, device=self.device)


@functools.cache
def fastest_tiles(case: Case) -> type[TorchTiles]:
    """TritonTiles if it agrees with torch on this device and is not slower, else TorchTiles."""
    try:
        gap = disagreement(case)
        if gap <= TOLERANCE:
            ours, torchs = _seconds(TritonTiles, case), _seconds(TorchTiles, case)
            return TritonTiles if ours <= MOST_TIME * torchs else TorchTiles
        reason = f"they differ from torch's operations by {gap:.2g}"
    except torch.OutOfMemoryError:
        raise  # not the kernels' fault; micro-batches are split
    except Exception as error:  # compilers, drivers and GPUs fail in many ways
        reason = f"{type(error).__name__}: {error}"
    warn(f"The LM head's Triton kernels are not used ({reason}); torch's operations are used instead.")
    return TorchTiles


def disagreement(case: Case) -> float:
    """Largest difference between the two, over max(1, size), on two random tiles of a row's vocabulary."""
    outcomes = [_trial(kind, case) for kind in (TorchTiles, TritonTiles)]
    gaps = [((a - b).abs() / a.abs().clamp_min(1.0)).max() for a, b in zip(*outcomes, strict=True)]
    # Gradients in half precision may be rounded to either side.
    return (torch.stack(gaps).max() - (0 if case.compute == torch.float32 else torch.finfo(case.compute).eps)).item()


def _trial(kind: type[TorchTiles], case: Case) -> list[Tensor]:
    (tokens, words), device = case.shape, case.device
    random = functools.partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device)
    spread = 4.0 if case.curve.cap is None else 1.0
    first, second = (random(case.shape).mul_(spread).to(case.compute) for _ in range(2))
    targets = torch.randint(2 * words, (tokens, case.targets), generator=random.keywords["generator"], device=device)
    by_logprob, by_entropy = random(2, tokens)
    by_named = random((tokens, case.targets - 1)) if case.targets > 1 else None
    tiles = case.tiles(kind)
    sums = RowSums.empty(tokens, by_logprob[:0], case.entropy, case.targets)
    tiles.add(first.clone(), TargetColumns.of(targets, 0, words), sums)
    tiles.add(second.clone(), TargetColumns.of(targets, words, words), sums)
    log_z, logprobs, entropies = sums.results()
    by_entropy = by_entropy if case.entropy else None
    by_teacher, teacher = None, None
    if case.beta is not None:  # of whole rows that are one tile
        teacher = random(case.shape).mul_(4.0)
        by_teacher = DivergenceGradients(
            by_logprob.flip(0).contiguous(), tiles.divergence(first, teacher, None, case.beta)
        )
    rows = RowGradients.of(log_z, logprobs, entropies, by_logprob, by_entropy, by_named, targets, by_teacher)
    columns = TargetColumns.of(targets, words, words)
    grad = tiles.gradient(second, columns, rows, teacher, case.beta or 0.0).float()
    outcomes = [log_z, logprobs, grad] + ([] if entropies is None else [entropies])
    outcomes += [] if by_teacher is None else [*by_teacher.sums]
    if not case.entropy and case.curve.cap is None:
        added = tiles.add(first, TargetColumns.of(targets, 0, words), sums, others=True)
        assert added is not None
        outcomes += [part.float() for part in added]
    return outcomes


def _seconds(kind: type[TorchTiles], case: Case, rounds: int = 10) -> float:
    """Seconds of a tile's forward and backward arithmetic on a CUDA device."""
    (tokens, words), device = case.shape, case.device
    x = torch.zeros(case.shape, dtype=case.compute, device=device)
    targets = torch.zeros(tokens, case.targets, dtype=torch.int64, device=device)
    columns = TargetColumns.of(targets, 0, words)
    tiles, ones = case.tiles(kind), torch.ones(tokens, device=device)
    teacher = None if case.beta is None else torch.zeros(case.shape, device=device)
    by_teacher = None if teacher is None else DivergenceGradients(ones, DivergenceSums(ones, ones, ones))
    logprobs = torch.full_like(targets, -1.0, dtype=ones.dtype)
    rows = RowGradients.of(ones, logprobs, ones, ones, None, None, targets, by_teacher)
    sums = RowSums.empty(tokens, ones[:0], case.entropy, case.targets)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for round_ in range(rounds + 3):
        if round_ == 3:  # after warm-up
            start.record()
        if teacher is not None:
            tiles.divergence(x, teacher, None, case.beta or 0.0)
        tiles.add(x, columns, sums)
        tiles.gradient(x, columns, rows, teacher, case.beta or 0.0)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / rounds
