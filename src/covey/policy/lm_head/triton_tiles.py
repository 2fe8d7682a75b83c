"""Arithmetic of a tile of logits in Triton kernels; `fastest_tiles` returns torch's where these do worse."""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from covey.policy.lm_head.torch_tiles import IMPOSSIBLE, Curve, RowGradients, RowSums, TargetColumns, TorchTiles
from covey.runtime.user_code import warn

BLOCK = 4096  # entries of a row that a program loads at once
MOST_TIME = 1.1
"""Largest ratio of the kernels' time to that of torch's operations for which they are used: well off 1, so that noise
between runs or processes does not change the choice."""
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
def _gradient_kernel(
    x_ptr, offset_ptr, log_z_ptr, target_ptr, by_logprob_ptr, by_entropy_ptr, entropy_ptr, words, targets, cap,
    floor, HAS_CAP: tl.constexpr, ENTROPY: tl.constexpr, SCALED: tl.constexpr, SIZE: tl.constexpr,
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

    def gradient(self, x: Tensor, targets: TargetColumns, rows: RowGradients) -> Tensor:
        tokens, words = x.shape
        size = _size(words)
        has_entropy_gradient = rows.by_entropy is not None
        by_entropy, entropy = (rows.log_z if part is None else part for part in (rows.by_entropy, rows.entropy))
        with torch.cuda.device_of(x):
            _gradient_kernel[(tokens, triton.cdiv(words, size))](
                x, targets.offset, rows.log_z, rows.at_target, rows.by_logprob, by_entropy, entropy,
                words, targets.offset.shape[1], self.curve.cap or 1.0, IMPOSSIBLE, HAS_CAP=self.curve.cap is not None,
                ENTROPY=has_entropy_gradient, SCALED=rows.scaled, SIZE=size,
            )  # fmt: skip
        return x


def _size(words: int) -> int:
    return min(BLOCK, triton.next_power_of_2(words))


class Case(NamedTuple):
    """A kind of call: tokens and vocabulary entries of a full tile, the dtype of its entries, and what is wanted.

    Likeliest tokens are left out: both implementations find them by torch's `topk`.
    """

    shape: tuple[int, int]
    compute: torch.dtype
    curve: Curve
    entropy: bool
    targets: int  # C of each token
    device: torch.device

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
    rows = RowGradients.of(log_z, logprobs, entropies, by_logprob, by_entropy, by_named, targets)
    grad = tiles.gradient(second, TargetColumns.of(targets, words, words), rows).float()
    outcomes = [log_z, logprobs, grad] + ([] if entropies is None else [entropies])
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
    rows = RowGradients.of(ones, torch.full_like(targets, -1.0, dtype=ones.dtype), ones, ones, None, None, targets)
    sums = RowSums.empty(tokens, ones[:0], case.entropy, case.targets)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for round_ in range(rounds + 3):
        if round_ == 3:  # after warm-up
            start.record()
        tiles.add(x, columns, sums)
        tiles.gradient(x, columns, rows)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / rounds
