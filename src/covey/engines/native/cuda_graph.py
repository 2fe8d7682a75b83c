"""Decoding steps captured once as a CUDA graph and replayed: one launch instead of a thousand.

A graph needs tensors of fixed shapes and addresses, so the number of sequences is rounded up to a power of two, and
attention reads the cache's whole capacity. A capture costs as much as tens of steps. It is kept until fewer than a
quarter of its sequences are left, and repeated then, or when sequences are added, the capacity changes, or prompts are
added or dropped. Every capture is checked against an ordinary run of the same step, the first one against a run with
torch's attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from covey.engines.native.shared_prefix_cache import SharedPrefixCache
from covey.runtime.process_memory import is_out_of_memory
from covey.runtime.user_code import warn

LEAST_SEQUENCES = 8  # fewer sequences are computed as this many
FEWEST_LEFT = 4  # a capture is kept until fewer than 1 in 4 of its sequences are left

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], Any], Tensor]]
"""Captures a function; returns a function that replays it, and the tensor that holds the result after a replay."""


class CaptureError(RuntimeError):
    """A step could not be captured or replayed; the cache is unchanged. If `out_of_memory`, a later try may succeed."""

    def __init__(self, reason: Exception):
        super().__init__(str(reason))
        self.out_of_memory = False
        error: BaseException | None = reason
        while error is not None:  # a capture that ends early raises an error that hides the first one
            self.out_of_memory |= is_out_of_memory(error)
            error = error.__cause__ or error.__context__


@dataclass(eq=False)
class GraphStep:
    """Decoding step of every sequence of a cache, by replaying a captured one.

    It lives as long as the engine, so that kernels that failed once are not tried again; captures belong to a cache.
    """

    forward: Callable[[SharedPrefixCache, Tensor, Tensor, Any], Tensor]
    config: Any
    capture: Capture
    cache: SharedPrefixCache | None = None
    _fuses: bool = True  # with fused kernels; until a capture with them was wrong
    _proven: bool = False  # a capture was right

    def begin(self, cache: SharedPrefixCache | None) -> None:
        """Decode the sequences of this cache from now on; None ends that and frees the memory of the last capture."""
        self.cache = cache
        self._captured_for: tuple[Any, ...] | None = None
        self._replay: Callable[[], Any] | None = None
        self._logits: Tensor | None = None

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Tokens and positions [S] -> logits [S, V], valid until the next call; `CaptureError` if a replay differs."""
        assert self.cache is not None, "begun"
        size = len(tokens)
        computed = max(LEAST_SEQUENCES, 1 << (size - 1).bit_length())
        captured = self._captured_for[0] if self._captured_for else 0
        if computed <= captured <= FEWEST_LEFT * computed:  # else too many captured sequences would be idle
            computed = captured
        key = self.cache.begin_fixed_step(computed, tokens.device)
        try:
            if key != self._captured_for:
                self._tokens = torch.zeros(key[0], dtype=torch.int64, device=tokens.device)
                self._positions = torch.zeros_like(self._tokens)
            self._tokens[:size] = tokens
            self._positions[:size] = positions
            if key != self._captured_for:
                self._capture_step(self.cache, size)
                self._captured_for = key
            return self._replayed(size)
        except RuntimeError as error:
            self.cache.end_fixed_steps()
            raise CaptureError(error) from error

    def _capture_step(self, cache: SharedPrefixCache, size: int) -> None:
        expected = None
        if not self._proven:  # what has been right keeps its kernels
            cache.fused = False
            expected = self._run(cache)[:size].clone()
        for fused in (True, False) if self._fuses else (False,):
            cache.fused = fused
            try:
                ordinary = self._run(cache)[:size].clone()  # compiles kernels and sets libraries up before a capture
                expected = ordinary if expected is None else expected
                self._replay, self._logits = self.capture(partial(self._run, cache))
                difference = (self._replayed(size) - expected).abs().max().item()
            except RuntimeError as error:
                if not fused or CaptureError(error).out_of_memory:
                    raise
                self._do_without_fusing(f"{type(error).__name__}: {error}")
                continue
            # Fused kernels round less often than torch's operations, and half precision alone moves logits by a tenth.
            if difference <= (0.2 if fused else 0.02) * expected.abs().max().item():
                self._proven = True
                return
            if fused:
                self._do_without_fusing(f"logits differ by {difference:.3g}")
        raise RuntimeError(f"the replayed step's logits differ from an ordinary run's by {difference:.3g}")

    def _replayed(self, size: int) -> Tensor:
        assert self._replay is not None and self._logits is not None, "captured"
        self._replay()
        return self._logits[:size]

    def _do_without_fusing(self, reason: str) -> None:
        self._fuses = False
        warn(f"decoding runs without fused kernels ({reason}). Samples are the same; decoding is slower.")

    def _run(self, cache: SharedPrefixCache) -> Tensor:
        masks = cache.masks(self._positions, self.config)
        return self.forward(cache, self._tokens[:, None], self._positions[:, None], masks)


def capture_cuda_graph(step: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
    """Capture `step`, which has been run before, on a side stream.

    `torch.cuda.graph` is not used, because it collects garbage and returns all cached memory to the device each time.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = step()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay, result
