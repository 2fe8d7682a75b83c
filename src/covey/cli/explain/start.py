"""Findings about the start of a run: its data, rewards and tools, as far as they can be checked offline."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.cli.config_file import RunConfig
from covey.cli.data import evaluation_files, is_local, load_evaluations, load_rows
from covey.cli.train import named, quantisation, rewards
from covey.config.algebra import BatchAlgebra
from covey.data.sampler import check_enough
from covey.rollout.tools.tool import Tool
from covey.trainer.integrations.trackers import check_trackers


@dataclass
class Start:
    """Findings."""

    rows: int | None = None  # training prompts, if known
    problems: list[str] = field(default_factory=list)  # reasons that the run would not start
    missing: list[str] = field(default_factory=list)  # required keys that are not given
    unchecked: list[str] = field(default_factory=list)  # parts that only a start can check

    def lines(self) -> list[str]:
        lines = [f"will fail: {problem}" for problem in self.problems]
        if self.rows is not None and not self.problems:
            lines = [f"The dataset was read: {self.rows:,} prompt(s)."]
        if self.missing:
            lines.append(f"still to be named: {', '.join(self.missing)}.")
        return [*lines, *(f"not checked: {thing}." for thing in self.unchecked)]

    @contextmanager
    def reporting(self, users_code: str | None = None) -> Iterator[None]:
        """Collect what is raised as a problem: our errors, and any of the user's code, which is named."""
        try:
            yield
        except Exception as error:
            if isinstance(error, ValueError) or (users_code is None and isinstance(error, (OSError, ImportError))):
                self.problems.append(str(error))
            elif users_code is not None:
                self.problems.append(f"{users_code}: {error!r}")
            else:
                raise


def check_start(run: RunConfig, algebra: BatchAlgebra) -> Start:
    start = Start(missing=[name for name in run.needed if not getattr(run, name)])
    _check_data(run, algebra, start)
    for name in run.reward_funcs:
        with start.reporting(f"reward {name!r}"):
            (one,) = rewards([name])
            if isinstance(one, str) and not Path(one).is_dir():
                start.unchecked.append(f"reward {one!r}, which names no function and so is a reward model from the hub")
    references: list[tuple[str, Any]] = [("tool", tool) for tool in run.tools]
    factories = run.environment_factory if isinstance(run.environment_factory, dict) else {"": run.environment_factory}
    references += [("rollout_func", run.rollout_func)]
    references += [("environment_factory", factory) for factory in factories.values()]
    for kind, reference in references:
        if reference:
            with start.reporting(f"{kind} {reference!r}"):
                found = named(reference, kind)
                if kind == "tool":
                    Tool.of(found)
    with start.reporting():
        check_trackers(run.args.report_to)
    if run.quantization:
        with start.reporting():
            quantisation(run.quantization)
        if run.peft is None:
            start.problems.append("`quantization` without `peft`: quantised weights cannot be trained.")
    if run.model and not Path(run.model).is_dir():
        start.unchecked.append(f"model {run.model!r}, which is no folder here and so comes from the hub")
    return start


def _check_data(run: RunConfig, algebra: BatchAlgebra, start: Start) -> None:
    evaluations = [*evaluation_files(run.eval_dataset)] if run.eval_dataset else []
    far = [spec for spec in [run.dataset, *evaluations] if spec and not is_local(spec)]
    start.unchecked += [f"dataset {spec!r}, which is no file or folder here and so comes from the hub" for spec in far]
    if run.dataset and run.dataset not in far:
        with start.reporting():
            start.rows = len(load_rows(run.dataset, run.dataset_split))
    if evaluations and not set(evaluations) & set(far):
        with start.reporting():
            load_evaluations(run.eval_dataset)
    if start.rows is not None:
        with start.reporting():
            check_enough(start.rows, algebra)
