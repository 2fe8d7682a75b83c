"""Accuracy against wall time on the demo's task (one-digit sums), Covey and TRL, several seeds.

    python -m benchmarks.learn --steps 16 --seeds 0 1 2

Same model, prompts, seeds and hyperparameters (`learn_worker.HYPERPARAMETERS`), float32 in both; everything else is
each library's default. Held-out accuracy is measured by one and the same evaluator, with the clock stopped. What is
compared is the time until a curve first reaches the accuracy that TRL ends with: the mean of its last two evaluations,
so that a lucky last one does not set the mark. Between evaluations a curve is a straight line.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pool import Worker, WorkerFailed
from benchmarks.records import Records

LIBRARIES = ("covey", "trl")
LAST = 2
"""Evaluations whose mean is the accuracy that a run ends with."""

Curve = list[tuple[float, float]]
"""(seconds, accuracy), in order."""


def run(
    records: Records,
    model: str,
    *,
    steps: int = 16,
    seeds: Sequence[int] = (0, 1, 2),
    every: int = 2,
    samples: int = 4,
    prompts: int = 80,
    threads: int = 2,
) -> None:
    """Train what `records` lacks, the libraries in turn.

    Args:
        records: where measurements are and go.
        model: folder.
        steps: optimizer steps of each run.
        seeds: of data, sampling and training.
        every: steps between two evaluations.
        samples: completions a held-out prompt.
        prompts: held-out prompts, at most 80.
        threads: of every process.

    Raises:
        WorkerFailed: after all runs, if one failed.
    """
    failures = []
    for number, seed in enumerate(seeds):
        for library in LIBRARIES if number % 2 == 0 else LIBRARIES[::-1]:
            known = {"part": "learn", "library": library, "seed": seed, "steps": steps}
            if records.find(**known):
                continue
            spec = known | {"model": model, "every": every, "samples": samples, "prompts": prompts}
            try:
                records.add(**known, **_train(spec, records.path.parent / "logs", threads))
            except WorkerFailed as error:
                failures.append(f"{library}, seed {seed}: {error}")
    if failures:
        raise WorkerFailed("\n".join(failures))


def _train(spec: dict[str, Any], logs: Path, threads: int) -> dict[str, Any]:
    log = logs / f"learn-{spec['library']}-{spec['seed']}.log"
    worker = Worker(
        spec | {"folder": tempfile.mkdtemp(prefix="bench-")}, log, threads, module="benchmarks.learn_worker"
    )
    try:
        while not (answer := worker.answer()).get("done"):
            print(
                f"learn {spec['library']} seed {spec['seed']} step {answer['step']:.0f}:"
                f" {answer['accuracy']:.1%} after {answer['seconds']:.0f} s",
                flush=True,
            )
    finally:
        worker.close()
    return {name: answer[name] for name in ("accuracy", "reward", "seconds")}


def seconds_to_reach(curve: Curve, accuracy: float) -> float | None:
    """When a curve first reaches `accuracy`; None when it never does."""
    before: tuple[float, float] | None = None
    for seconds, value in curve:
        if value >= accuracy:
            if before is None or value == before[1]:
                return seconds
            share = (accuracy - before[1]) / (value - before[1])
            return before[0] + share * (seconds - before[0])
        before = (seconds, value)
    return None


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Point by point, over runs evaluated at the same steps."""
    return [
        (statistics.mean(s for s, _ in points), statistics.mean(a for _, a in points))
        for points in zip(*curves, strict=False)
    ]


def summary(records: Records, steps: int | None = None) -> dict[str, Any]:
    """Curves, and how long each library takes to the accuracy that TRL ends with.

    Args:
        records: measurements.
        steps: only runs of so many optimizer steps are compared; None: as many as the run that was written down last.
    """
    known = records.find(part="learn")
    if not known:
        return {}
    alike = [run for run in known if run["steps"] == (steps or known[-1]["steps"])]
    runs = {library: {run["seed"]: run for run in alike if run["library"] == library} for library in LIBRARIES}
    seeds = sorted(set(runs["covey"]) & set(runs["trl"]))
    found: dict[str, Any] = {"runs": {library: list(by_seed.values()) for library, by_seed in runs.items() if by_seed}}
    if not seeds:
        return found if found["runs"] else {}
    curves = {library: {seed: _curve(runs[library][seed]) for seed in seeds} for library in LIBRARIES}
    each = {seed: _compare(curves["covey"][seed], curves["trl"][seed]) for seed in seeds}
    together = _compare(mean_curve(list(curves["covey"].values())), mean_curve(list(curves["trl"].values())))
    return found | {"seeds": seeds, "by_seed": each, "mean_of_seeds": together, "trl_over_covey": together["ratio"]}


def _curve(run: dict[str, Any]) -> Curve:
    return [(point["seconds"], point["accuracy"]) for point in run["accuracy"]]


def _compare(covey: Curve, trl: Curve) -> dict[str, float | None]:
    target = statistics.mean(accuracy for _, accuracy in trl[-LAST:])
    ours, theirs = seconds_to_reach(covey, target), seconds_to_reach(trl, target)
    return {
        "accuracy": target,
        "covey_seconds": ours,
        "trl_seconds": theirs,
        "ratio": theirs / ours if ours and theirs else None,
        "covey_end": covey[-1][1],
        "trl_end": trl[-1][1],
        "step_time_ratio": trl[-1][0] / covey[-1][0],
    }


def plot(found: dict[str, Any], path: Path) -> None:
    """Held-out accuracy and training reward against wall time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for library, colour, label in (("trl", "tab:orange", "TRL"), ("covey", "tab:blue", "Covey")):
        runs = found["runs"].get(library, [])
        for axes, column, value in ((left, "accuracy", "accuracy"), (right, "reward", "reward")):
            curves = [[(point["seconds"], point[value]) for point in run[column]] for run in runs]
            for curve in curves:
                axes.plot(*zip(*curve, strict=True), color=colour, alpha=0.3, linewidth=1)
            if curves and curves[0]:
                name = f"{label}, mean of {len(curves)} seeds" if len(curves) > 1 else label
                axes.plot(*zip(*mean_curve(curves), strict=True), color=colour, linewidth=2.2, label=name)
    if "mean_of_seeds" in found:
        accuracy = found["mean_of_seeds"]["accuracy"]
        left.axhline(accuracy, color="grey", linestyle=":", label=f"where TRL ends: {accuracy:.1%}")
    left.set(xlabel="seconds of training", ylabel="accuracy on held-out sums", title="Accuracy (evaluation not timed)")
    right.set(xlabel="seconds of training", ylabel="mean reward of the step's samples", title="Training reward")
    for axes in (left, right):
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    """Command line."""
    from benchmarks.machine import model_path
    from benchmarks.report import learn_tables

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--every", type=int, default=2, help="steps between two evaluations")
    parser.add_argument("--samples", type=int, default=4, help="completions a held-out prompt")
    parser.add_argument("--prompts", type=int, default=80, help="held-out prompts, at most 80")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", help="model folder; SmolLM2-135M-Instruct if absent")
    parser.add_argument("--records", type=Path, default=Path("runs/bench/records.jsonl"))
    parser.add_argument("--plot", type=Path, default=Path("benchmarks/learn.png"))
    given = parser.parse_args()
    records = Records(given.records)
    choice = {name: getattr(given, name) for name in ("steps", "seeds", "every", "samples", "prompts", "threads")}
    run(records, model_path(given.model), **choice)
    found = summary(records, given.steps)
    plot(found, given.plot)
    print(learn_tables(found))


if __name__ == "__main__":
    main()
