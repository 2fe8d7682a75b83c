"""A decoding step recorded once as a CUDA graph and replayed: one launch instead of a thousand.

Launching a small model's kernels one by one takes longer than running them. A recording needs tensors of fixed shapes
in fixed places, so rows are computed in powers of two and over the cache's whole capacity; when either changes, or a
prompt comes or goes, the step is recorded anew. Every recording is checked against an ordinary run of the same step.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from covey.engines.native.shared_prefix_cache import ForkedCache
from covey.runtime.out_of_memory import is_out_of_memory

LEAST_ROWS = 8
"""Fewer rows than this are computed as this many."""

Recorder = Callable[[Callable[[], Tensor]], tuple[Callable[[], Any], Tensor]]
"""Records a function; returns what replays it, and the tensor its result is in after a replay."""


class NotRecorded(RuntimeError):
    """A step could not be recorded or replayed; the cache stands where it stood before the step.

    Attributes:
        for_want_of_memory: so that with more of it the step may be recorded after all.
    """

    def __init__(self, reason: Exception):
        super().__init__(str(reason))
        self.for_want_of_memory = any(is_out_of_memory(error) for error in _with_what_led_to(reason))


class RecordedStep:
    """Feeds every row of a cache its newest token, by replaying a recording.

    Args:
        cache: what the rows have so far.
        forward: (tokens [R, 1], positions [R, 1], masks) -> logits [R, V].
        config: the model's text config.
        record: how a function becomes a recording.
    """

    def __init__(
        self,
        cache: ForkedCache,
        forward: Callable[[Tensor, Tensor, Any], Tensor],
        config: Any,
        record: Recorder,
    ):
        self.cache = cache
        self._forward = forward
        self._config = config
        self._record = record
        self._recorded_for: tuple[Any, ...] | None = None

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Tokens and positions [rows] -> logits [rows, V], valid until the next call.

        Raises:
            NotRecorded: the step cannot be recorded, or its replay differs from an ordinary run.
        """
        rows = len(tokens)
        needs = self.cache.begin_fixed_step(max(LEAST_ROWS, 1 << (rows - 1).bit_length()), tokens.device)
        try:
            return self._step(tokens, positions, needs)
        except RuntimeError as error:
            self.cache.end_fixed_steps()
            raise NotRecorded(error) from error

    def _step(self, tokens: Tensor, positions: Tensor, needs: tuple[Any, ...]) -> Tensor:
        rows = len(tokens)
        if needs != self._recorded_for:
            self._tokens = torch.zeros(needs[0], dtype=torch.int64, device=tokens.device)
            self._positions = torch.zeros_like(self._tokens)
        self._tokens[:rows] = tokens
        self._positions[:rows] = positions
        if needs != self._recorded_for:
            self._record_step(rows)
            self._recorded_for = needs
        self._replay()
        return self._logits[:rows]

    def _record_step(self, rows: int) -> None:
        expected = self._run()[:rows].clone()
        self._replay, self._logits = self._record(self._run)
        self._replay()
        difference = (self._logits[:rows] - expected).abs().max()
        if not difference <= 0.02 * expected.abs().max():
            raise RuntimeError(f"the replayed step's logits differ from the step's own by {difference.item():.3g}")

    def _run(self) -> Tensor:
        masks = self.cache.masks(self._positions, self._config)
        return self._forward(self._tokens[:, None], self._positions[:, None], masks)


def record_cuda_graph(step: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
    """Run `step` once on a stream of its own, as capturing requires, then capture it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = step()
    return graph.replay, result


def _with_what_led_to(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those it came of: a capture that ends early has an error of its own."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
