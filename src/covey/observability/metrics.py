"""Metrics of a run: collected as statistics, merged over micro-batches and processes, and divided when logged.

Letters: N rollouts of all processes, F reward functions, P prompts, G rollouts per prompt.
"""

import math
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from covey.core.advantages import centred, nanstd, weighted_total
from covey.core.likeness import Keys, common_reference, common_share, distinct_across_prompts, distinct_in_groups
from covey.core.stats import Max, Mean, Min, Stat, Sum, merge_all, on_device, read

ZERO_WHEN_EMPTY = tuple(f"completions/{which}_terminated_length" for which in ("mean", "min", "max"))
"""Metrics that are logged as 0 if there is no value, so that their columns exist from the first log on."""

MOST_UNREAD = 1000  # most sets of statistics whose numbers stay on a device

Span = tuple[float, float]  # begin and end, seconds on one clock

TRAINER, ROLLOUTS = "trainer", "rollouts"
"""Lanes of a timeline: the main thread's phases, and rollouts in flight. Every other lane is a reward function."""

EVALUATE = "evaluate"  # phase of an evaluation, which includes the time of phases inside it

_KINDS: dict[str, type] = {kind.reduction: kind for kind in (Mean, Min, Max, Sum)}


class MetricLog:
    """Statistics by mode ("train", "eval"); a window, between two logs, is reduced over processes at its end."""

    def __init__(self, gather: Callable[[Any], list[Any]] | None = None):  # one object to those of all ranks
        self._gather = gather or (lambda mine: [mine])
        self._stats: dict[str, dict[str, Stat]] = {}  # of windows, without those of `_step`
        self._step: dict[str, Stat] = {}  # of training, since the last `end_step`
        self._unread: dict[str, list[dict[str, Stat]]] = {}  # by mode, in order; the first has numbers on a device

    def add(self, stats: dict[str, Stat], mode: str = "train") -> None:
        """Merge statistics of this process into the current window; numbers on a device are not read yet."""
        if (unread := self._unread.setdefault(mode, [])) or on_device(stats):
            unread.append(dict(stats))
            if len(unread) >= MOST_UNREAD:
                self._read()
        else:
            self._merge(stats, mode)

    def _merge(self, stats: dict[str, Stat], mode: str) -> None:
        merge_all(self._step if mode == "train" else self._stats.setdefault(mode, {}), stats)

    def _merged(self) -> dict[str, dict[str, Stat]]:
        """The windows, including unread statistics."""
        self._read()
        return {**self._stats, "train": merge_all(dict(self._stats.get("train", {})), self._step)}

    def _read(self) -> None:
        """Merge the unread statistics in order, so that sums are rounded as if each had been read at once."""
        modes, self._unread = self._unread, {}
        for mode, unread in modes.items():
            for stats in read(unread):
                self._merge(stats, mode)

    def end_step(self) -> dict[str, float]:
        """This process's values of the ending optimizer step, by name, without NaN."""
        self._read()
        ended, self._step = self._step, {}
        merge_all(self._stats.setdefault("train", {}), ended)
        return {name: value for name, stat in ended.items() if not math.isnan(value := stat.value())}

    def drain(self, mode: str, prefix: str = "") -> dict[str, float]:
        """End a window on all processes together (collective); returns values by name, without NaN."""
        merged, window = dict[str, Stat](), self._merged().get(mode, {})
        self._stats.pop(mode, None)
        if mode == "train":
            self._step = {}
        for stats in self._gather(window):
            merge_all(merged, stats)
        result = {}
        for name, stat in merged.items():
            value = stat.value()
            if not math.isnan(value):
                result[prefix + name] = value
            elif name in ZERO_WHEN_EMPTY:
                result[prefix + name] = 0.0
        return result

    def so_far(self, mode: str) -> dict[str, float]:
        """Values of this process's open window by name."""
        return {name: stat.value() for name, stat in self._merged().get(mode, {}).items()}

    def state_dict(self) -> dict[str, Any]:
        """This process's open windows, as plain lists and numbers."""
        windows = {
            mode: {name: [stat.reduction, *astuple(stat)] for name, stat in stats.items()}
            for mode, stats in self._merged().items()
        }
        return {"windows": windows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._unread, self._step = {}, {}
        self._stats = {
            mode: {name: _KINDS[kind](*fields) for name, (kind, *fields) in stats.items()}
            for mode, stats in state["windows"].items()
        }


def rollout_batch_stats(
    *,
    lengths: Sequence[int],
    truncated: Sequence[bool],
    played: Sequence[bool] | None = None,
    rewards_NF: Tensor,
    weights: Tensor,
    names: Sequence[str],
    num_generations: int,
    likeness: Sequence[Keys] = (),
    members_PG: Tensor | None = None,
) -> dict[str, Stat]:
    """Metrics of a rollout batch, from the rollouts of all processes; those of a group are consecutive.

    `members_PG` are the rollouts that are compared with each other (-1 for none); by default those of each group.
    Rewards are [N, F] and unweighted, NaN where a function abstained; their weights are [F] or [N, F]. Rollouts that
    were not `played` have no length; None: all were. If every process adds the result to its own log, merging them
    gives the values of a single process.
    """
    rewards_NF = rewards_NF.double()
    total_N = weighted_total(rewards_NF, weights.double())
    facts = zip(lengths, truncated, [True] * len(lengths) if played is None else played, strict=True)
    known = [(length, cut) for length, cut, there in facts if there]
    stats: dict[str, Stat] = {"completions/clipped_ratio": Mean.of([float(cut) for _, cut in known])}
    terminated = [length for length, cut in known if not cut]
    for suffix, values in (("length", [length for length, _ in known]), ("terminated_length", terminated)):
        stats[f"completions/mean_{suffix}"] = Mean(float(sum(values)), len(values))
        stats[f"completions/min_{suffix}"] = Min(float(min(values, default=math.nan)))
        stats[f"completions/max_{suffix}"] = Max(float(max(values, default=math.nan)))
    for index, name in enumerate(names):
        column = rewards_NF[:, index]
        for spelling in ("rewards", "reward"):  # existing scripts read the first, the documentation has the second
            stats[f"{spelling}/{name}/mean"] = Mean.of(column.tolist())
            stats[f"{spelling}/{name}/std"] = Mean.of([_deviation(column)])
    stats["reward"] = Mean.of(total_N.tolist())
    stats["reward_std"] = Mean.of([_deviation(total_N)])
    compared_PG = total_N.view(-1, num_generations) if members_PG is None else _gathered(total_N, members_PG)
    spread_P = nanstd(compared_PG, dim=1).flatten()
    stats["frac_reward_zero_std"] = Mean.of((spread_P == 0).double().tolist())
    correlation = correlation_within(total_N.view(-1, num_generations), lengths)
    stats["reward_length_correlation"] = Mean.of([] if correlation is None else [correlation])
    prompts, answers, references = (
        [getattr(one, name) for one in likeness] for name in ("prompt", "answer", "reference")
    )
    if num_generations > 1:
        stats["completions/distinct"] = Mean.of(distinct_in_groups(answers, num_generations))
    present = [one for one in likeness if not one.absent]
    several = len({one.prompt for one in present}) > 1
    common = common_share([one.answer for one in present], [one.prompt for one in present])
    across = {
        "completions/distinct_across_prompts": distinct_across_prompts(answers, prompts),
        "completions/most_common": common if several else None,
        "completions/most_common_reference": common_reference(references) if several else None,
    }
    return stats | {name: Mean.of([value]) for name, value in across.items() if value is not None}


def _gathered(values_N: Tensor, members_PG: Tensor) -> Tensor:
    return torch.cat([values_N, values_N.new_full((1,), math.nan)])[members_PG]


def stats_by_label(
    kind: str, labels: Sequence[str], means: Mapping[str, Sequence[float]], deviations: Mapping[str, Sequence[float]]
) -> dict[str, Stat]:
    """Metrics `{kind}/{label}/{name}` over the rollouts with each label, such as a role; "" is no label.

    Args:
        kind: kind of label, `roles` or `sources`.
        labels: [N] label of each rollout.
        means: by name, [N] values whose mean is the metric; NaN is none.
        deviations: by name, [N] values whose standard deviation over a rollout batch is the metric.
    """
    stats: dict[str, Stat] = {}
    for label in dict.fromkeys(one for one in labels if one):
        own = [index for index, one in enumerate(labels) if one == label]
        for name, values in means.items():
            stats[f"{kind}/{label}/{name}"] = Mean.of([float(values[index]) for index in own])
        for name, values in deviations.items():
            column = torch.tensor([float(values[index]) for index in own], dtype=torch.float64)
            stats[f"{kind}/{label}/{name}"] = Mean.of([_deviation(column)])
    return stats


def correlation_within(totals_PG: Tensor, lengths_N: Sequence[float]) -> float | None:
    """Correlation of rewards and lengths within groups; None if one of them is constant in every group."""
    lengths_PG = torch.tensor(lengths_N, dtype=torch.float64).view_as(totals_PG)
    known = ~totals_PG.isnan()
    pair = (centred(torch.where(known, values.double(), torch.nan)).nan_to_num() for values in (totals_PG, lengths_PG))
    rewards, lengths = (values.flatten() for values in pair)
    norm = float(rewards.norm() * lengths.norm())
    return float(rewards @ lengths) / norm if norm > 0 else None


def _deviation(values_N: Tensor) -> float:
    return math.nan if bool(torch.isnan(values_N).all()) else nanstd(values_N, dim=0).item()


@dataclass(eq=False)
class PhaseTimer:
    """Sums of wall-clock seconds in named phases of one thread; a phase inside another pauses the outer one.

    Work on a GPU is counted in the phase in which the host waits for it. `notice` is called with each phase that begins
    or continues, `span` with name, begin and end of every interval that is counted for a phase.
    """

    clock: Callable[[], float] = time.perf_counter
    notice: Callable[[str], None] = lambda name: None
    span: Callable[[str, float, float], None] = lambda name, begin, end: None
    open: list[str] = field(default_factory=list, init=False)  # phases, the innermost last
    _seconds: dict[str, float] = field(default_factory=dict, init=False)
    _since: float = field(default=0.0, init=False)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Context whose time, without that of inner phases, is counted for `name`."""
        self._settle()
        self.open.append(name)
        try:
            self.notice(name)
            yield
        finally:
            self._settle()
            self.open.pop()
        if self.open:  # not after an exception, when the last notice must name the phase that failed
            self.notice(self.open[-1])

    def drain(self) -> dict[str, float]:
        """Seconds by phase since the last call; an open phase is counted up to now."""
        self._settle()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _settle(self) -> None:
        """Count the time since the last change for the innermost open phase."""
        now = self.clock()
        if self.open:
            name = EVALUATE if self.open[0] == EVALUATE else self.open[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
            self.span(name, self._since, now)
        self._since = now


class Timeline:
    """Spans by lane and name, and the times at which rollout batches began."""

    def __init__(self) -> None:
        self._lanes: dict[str, deque[tuple[str, Span]]] = {}
        self._began: deque[float] = deque(maxlen=3)
        self._overlaps: dict[str, float] = {}

    def begin(self, now: float) -> None:
        self._began.append(now)
        for spans in self._lanes.values():  # of earlier rollout batches, which are not needed any more
            while spans and spans[0][1][1] < self._began[0]:
                spans.popleft()

    def add(self, lane: str, name: str, spans: Iterable[Span]) -> None:
        """Add spans; one that begins where the last span of its name ended extends that one."""
        lane_spans = self._lanes.setdefault(lane, deque(maxlen=20_000))
        for begin, end in spans:
            if lane_spans and lane_spans[-1][0] == name and lane_spans[-1][1][1] == begin:
                begin = lane_spans.pop()[1][0]
            if end > begin:
                lane_spans.append((name, (begin, end)))

    def phase(self, name: str, begin: float, end: float) -> None:
        self.add(TRAINER, name, [(begin, end)])

    def overlap(self, name: str, seconds: float) -> None:
        """Count seconds in which work of a phase was done while another phase ran."""
        self._overlaps[name] = self._overlaps.get(name, 0.0) + seconds

    def drain(self) -> dict[str, float]:
        """Overlapping seconds by phase since the last call."""
        overlaps, self._overlaps = self._overlaps, {}
        return overlaps

    def lanes(self) -> list[str]:
        return list(self._lanes)

    def window(self) -> Span | None:
        """Begin and end of the latest complete rollout batch, or of everything if none is complete."""
        if len(self._began) > 1:
            return self._began[-2], self._began[-1]
        ends = [end for lane in self._lanes.values() for _, (_, end) in lane]
        return (self._began[0], max(ends)) if self._began and ends else None

    def spans(self, lane: str) -> list[tuple[str, Span]]:
        window = self.window()
        if window is None:
            return []
        cut = [(name, (max(begin, window[0]), min(end, window[1]))) for name, (begin, end) in self._lanes.get(lane, ())]
        return [(name, (begin, end)) for name, (begin, end) in cut if begin < end]


BINS = 480  # parts of a drawn timeline


def drawn(timeline: Timeline) -> dict[str, Any] | None:
    """The latest rollout batch in `BINS` parts of equal length; None if there is none yet.

    `seconds` is its length, `phases` are the trainer's as (name, begin, end), `rollouts` the number in flight in the
    middle of each part, and `rewards` the spans (begin, end) of each reward function.
    """
    window = timeline.window()
    if window is None or not timeline.spans(TRAINER):
        return None
    begin, seconds = window[0], window[1] - window[0]
    middles = [begin + (number + 0.5) * seconds / BINS for number in range(BINS)]

    def places(lane: str) -> list[tuple[str, int, int]]:
        """Name, first and last part of each span."""
        parts = [(name, [int((at - begin) / seconds * BINS) for at in span]) for name, span in timeline.spans(lane)]
        return [(name, min(first, BINS - 1), min(last, BINS - 1)) for name, (first, last) in parts]

    phases: list[str | None] = [None] * BINS
    for name, (start, end) in timeline.spans(TRAINER):
        first, last = bisect_left(middles, start), bisect_left(middles, end)
        phases[first:last] = [name] * (last - first)
    in_flight = [span for _, span in timeline.spans(ROLLOUTS)]
    starts, ends = (sorted(span[end] for span in in_flight) for end in (0, 1))
    rewards = {}
    for lane in timeline.lanes():
        if lane not in (TRAINER, ROLLOUTS) and (found := places(lane)):
            busy = {part for _, first, last in found for part in range(first, last + 1)}
            rewards[lane] = [(first, last) for _, first, last in _runs([part in busy or None for part in range(BINS)])]
    return {
        "seconds": seconds,
        "parts": BINS,
        "phases": _runs(phases),
        "rollouts": [bisect_right(starts, at) - bisect_right(ends, at) for at in middles] if starts else [],
        "rewards": rewards,
    }


def _runs(values: Sequence[Any]) -> list[tuple[Any, int, int]]:
    """Value, begin and end of each run of equal values that are not None."""
    found, at = [], 0
    for value, run in groupby(values):
        length = len([*run])
        found += [] if value is None else [(value, at, at + length)]
        at += length
    return found


def covered(spans: Iterable[Span], until: float = float("inf")) -> float:
    """Seconds before `until` that lie in at least one span."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        begin, end = max(begin, reached), min(end, until)
        if end > begin:
            total, reached = total + end - begin, end
    return total
