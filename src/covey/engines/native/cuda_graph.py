"""Decoding steps captured once as a CUDA graph and replayed: one launch instead of a thousand.

A graph needs tensors of fixed shapes and addresses, so sequences are computed in powers of two and over the cache's
whole capacity; when either changes, or a prompt comes or goes, the step is captured again. Every capture is checked
against an ordinary run of the same step.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from covey.engines.native.shared_prefix_cache import SharedPrefixCache
from covey.runtime.process_memory import is_out_of_memory

LEAST_SEQUENCES = 8  # fewer sequences are computed as this many

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], Any], Tensor]]
"""Captures a function; returns a function that replays it, and the tensor that holds the result after a replay."""


class CaptureError(RuntimeError):
    """A step could not be captured or replayed; the cache is as before. If `out_of_memory`, a later one may succeed."""

    def __init__(self, reason: Exception):
        super().__init__(str(reason))
        self.out_of_memory = False
        error: BaseException | None = reason
        while error is not None:  # a capture that ends early raises an error that hides the first one
            self.out_of_memory |= is_out_of_memory(error)
            error = error.__cause__ or error.__context__


class GraphStep:
    """Decoding step of every sequence of a cache, by replaying a captured one."""

    def __init__(
        self, cache: SharedPrefixCache, forward: Callable[[Tensor, Tensor, Any], Tensor], config: Any, capture: Capture
    ):
        self.cache = cache
        self._forward = forward
        self._config = config
        self._capture = capture
        self._captured_for: tuple[Any, ...] | None = None
        self._fuses = True  # attend by one kernel where it can; until a capture with it was wrong

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Tokens and positions [S] -> logits [S, V], valid until the next call; `CaptureError` if a replay differs."""
        size = len(tokens)
        key = self.cache.begin_fixed_step(max(LEAST_SEQUENCES, 1 << (size - 1).bit_length()), tokens.device)
        try:
            if key != self._captured_for:
                self._tokens = torch.zeros(key[0], dtype=torch.int64, device=tokens.device)
                self._positions = torch.zeros_like(self._tokens)
            self._tokens[:size] = tokens
            self._positions[:size] = positions
            if key != self._captured_for:
                self._capture_step(size)
                self._captured_for = key
            self._replay()
            return self._logits[:size]
        except RuntimeError as error:
            self.cache.end_fixed_steps()
            raise CaptureError(error) from error

    def _capture_step(self, size: int) -> None:
        self.cache.fused = False
        expected = self._run()[:size].clone()
        for fused in (True, False) if self._fuses else (False,):
            self.cache.fused = fused
            self._replay, self._logits = self._capture(self._run)
            self._replay()
            difference = (self._logits[:size] - expected).abs().max()
            # One kernel rounds less often than torch's operations, and half precision alone moves logits by a tenth.
            if difference <= (0.2 if self.cache.fused_layers else 0.02) * expected.abs().max():
                return
            self._fuses = False
        raise RuntimeError(f"the replayed step's logits differ from an ordinary run's by {difference.item():.3g}")

    def _run(self) -> Tensor:
        masks = self.cache.masks(self._positions, self._config)
        return self._forward(self._tokens[:, None], self._positions[:, None], masks)


def capture_cuda_graph(step: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
    """Run `step` once on a side stream, as capturing requires, then capture it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = step()
    return graph.replay, result
