"""Findings about the start of a run: its data, rewards and tools, as far as they can be checked offline.

Local data is loaded and counted; ids of the hub are listed as not checked. Models are not loaded.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.cli.config_file import RunConfig
from covey.config.algebra import BatchAlgebra
from covey.trainer.integrations.trackers import check_trackers


@dataclass
class Start:
    """Findings.

    Attributes:
        rows: number of training prompts, if known.
        problems: reasons that the run would not start.
        missing: required keys that are not given.
        unchecked: parts that only a start can check.
    """

    rows: int | None = None
    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The findings as lines."""
        missing = [f"still to be named: {', '.join(self.missing)}."] if self.missing else []
        if self.rows is not None and not self.problems:
            return [f"The dataset was read: {self.rows:,} prompt(s).", *missing, *self._not_checked()]
        return [*(f"will fail: {problem}" for problem in self.problems), *missing, *self._not_checked()]

    def _not_checked(self) -> list[str]:
        return [f"not checked: {thing}." for thing in self.unchecked]


def check_start(run: RunConfig, algebra: BatchAlgebra) -> Start:
    """Check every part of a run."""
    start = Start(missing=[name for name in run.needed if not getattr(run, name)])
    if run.dataset:
        start.rows = _rows(run.dataset, run.dataset_split, start)
    if run.eval_dataset:
        _check_evaluations(run.eval_dataset, start)
    if start.rows is not None:
        _check_enough(start, algebra)
    for name in run.reward_funcs:
        _check_reward(name, start)
    references = [*(("tool", tool) for tool in run.tools), ("rollout_func", run.rollout_func)]
    for kind, reference in [*references, ("environment_factory", run.environment_factory)]:
        if reference:
            _check_named(reference, kind, start)
    try:
        check_trackers(run.args.report_to)
    except (ValueError, ImportError) as error:
        start.problems.append(str(error))
    if run.quantization:
        _check_quantisation(run, start)
    if run.model and not Path(run.model).is_dir():
        start.unchecked.append(f"model {run.model!r}, which is no folder here and so comes from the hub")
    return start


def _rows(spec: str, split: str | None, start: Start) -> int | None:
    from covey.cli.data import is_local, load_rows

    if not is_local(spec):
        start.unchecked.append(f"dataset {spec!r}, which is no file or folder here and so comes from the hub")
        return None
    try:
        return len(load_rows(spec, split))
    except (ValueError, OSError) as error:
        start.problems.append(str(error))
        return None


def _check_evaluations(given: Any, start: Start) -> None:
    from covey.cli.data import is_local
    from covey.cli.evaluations import evaluation_files, load_evaluations

    far = [spec for spec in evaluation_files(given) if not is_local(spec)]
    start.unchecked += [f"dataset {spec!r}, which is no file or folder here and so comes from the hub" for spec in far]
    if not far:
        try:
            load_evaluations(given)
        except (ValueError, OSError) as error:
            start.problems.append(str(error))


def _check_quantisation(run: RunConfig, start: Start) -> None:
    from covey.cli.train import quantisation

    try:
        quantisation(run.quantization)
    except ValueError as error:
        start.problems.append(str(error))
    if run.peft is None:
        start.problems.append("`quantization` without `peft`: quantised weights cannot be trained.")


def _check_enough(start: Start, algebra: BatchAlgebra) -> None:
    from covey.data.sampler import check_enough

    assert start.rows is not None, "counted before"
    try:
        check_enough(start.rows, algebra)
    except ValueError as error:
        start.problems.append(str(error))


def _check_reward(name: object, start: Start) -> None:
    from covey.cli.train import rewards

    try:
        (found,) = rewards([name])
    except Exception as error:  # a user's module may raise anything when it is imported
        start.problems.append(str(error) if isinstance(error, ValueError) else f"reward {name!r}: {error!r}")
        return
    if isinstance(found, str) and not Path(found).is_dir():
        start.unchecked.append(f"reward {found!r}, which names no function and so is a reward model from the hub")


def _check_named(reference: object, kind: str, start: Start) -> None:
    from covey.cli.train import named
    from covey.rollout.tools.tool import Tool

    try:
        found = named(reference, kind)
        if kind == "tool":
            Tool.of(found)
    except Exception as error:  # a user's module may raise anything when it is imported
        start.problems.append(str(error) if isinstance(error, ValueError) else f"{kind} {reference!r}: {error!r}")
