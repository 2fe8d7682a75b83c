"""Growth of a step's time with the number of completions per prompt and with their length.

    python -m benchmarks.growth --rounds 2

A step of `GROUPS` prompts is measured for G = 2 ... 32 completions each, with prompts of 512 tokens and with very short
ones. The difference of the two is what the prompts cost; a line through the times, `a + b G`, tells fixed from
per-completion seconds. With the prompt computed once a group the difference hardly grows with G (each completion still
attends to it); computed once a completion it would grow in proportion. With `--trl` TRL is measured at some points too.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pool import Worker, WorkerFailed
from benchmarks.records import Records
from benchmarks.workloads import WARM_UP_TOKENS, Workload

GROUPS = 2
SIZES = (2, 4, 8, 16, 32)
LENGTHS = (32, 64, 128, 256, 512)
PROMPT = 512
TRL_SIZES = (2, 8, 32)
COMPLETION = 64
OPTIONS: dict[str, dict[str, Any]] = {
    # a pass holds the largest group whole: one that is cut computes its prompt once a piece
    "covey": {"gradient_checkpointing": False, "max_tokens_per_micro_batch": PROMPT + max(SIZES) * COMPLETION},
    "trl": {"gradient_checkpointing": False, "per_device_train_batch_size": 4},
}


def points(trl: bool) -> list[tuple[str, str, int, Workload]]:
    """Measured points: library, curve, position on it, work."""
    made = []
    for size in SIZES:
        for prompt, curve in ((PROMPT, "G"), (WARM_UP_TOKENS, "G, no prompt")):
            made.append(("covey", curve, size, Workload(f"G{size}-P{prompt}", prompt, GROUPS, size, COMPLETION)))
    for length in LENGTHS:
        made.append(("covey", "length", length, Workload(f"L{length}", 64, GROUPS, 8, length)))
    if trl:
        made += [("trl", "G", n, Workload(f"G{n}-P{PROMPT}", PROMPT, GROUPS, n, COMPLETION)) for n in TRL_SIZES]
    return made


def run(
    records: Records,
    model: str,
    *,
    rounds: int = 2,
    trl: bool = False,
    threads: int = 2,
    chosen: Sequence[tuple[str, str, int, Workload]] | None = None,
) -> None:
    """Measure what `records` lacks.

    Args:
        records: where measurements are and go.
        model: folder.
        rounds: steps a point.
        trl: measure TRL too.
        threads: of every process.
        chosen: points; all if None.

    Raises:
        WorkerFailed: after all points, if one failed.
    """
    failures = []
    for library, curve, at, workload in points(trl) if chosen is None else chosen:
        have = len(records.find(part="growth", library=library, curve=curve, at=at))
        if have >= rounds:
            continue
        log = records.path.parent / "logs" / f"growth-{library}-{workload.name}.log"
        try:
            worker = Worker.training(library, workload, model, OPTIONS[library], log, threads)
            try:
                for number in range(have, rounds):
                    measured = worker.ask(lengths=workload.lengths(number))
                    records.add(part="growth", library=library, curve=curve, at=at, round=number, **measured)
                    print(f"growth {library} {curve} {at}: {measured['seconds']:.1f} s", flush=True)
            finally:
                worker.close()
        except WorkerFailed as error:
            failures.append(f"{library} {curve} {at}: {error}")
    if failures:
        raise WorkerFailed("\n".join(failures))


def summary(records: Records) -> dict[str, Any]:
    """Medians by curve, and what the lines through them say."""
    curves: dict[str, dict[str, Any]] = {}
    for record in records.find(part="growth"):
        points = curves.setdefault(f"{record['library']}: {record['curve']}", {}).setdefault("points", {})
        points.setdefault(record["at"], []).append(record["seconds"])
    for curve in curves.values():
        curve["points"] = {at: statistics.median(seconds) for at, seconds in sorted(curve["points"].items())}
        if len(curve["points"]) > 1:
            curve["fixed_seconds"], curve["seconds_each"] = fit_line(curve["points"])
    with_prompt = curves.get("covey: G", {}).get("points", {})
    without = curves.get("covey: G, no prompt", {}).get("points", {})
    cost = {size: with_prompt[size] - without[size] for size in with_prompt if size in without}
    found: dict[str, Any] = {"curves": curves, "prompt_seconds": cost} if curves else {}
    if len(cost) > 1:
        found["prompt_fixed_seconds"], found["prompt_seconds_each"] = fit_line(cost)
    return found


def fit_line(points: dict[int, float]) -> tuple[float, float]:
    """Least squares: (a, b) of y = a + b x."""
    x_mean, y_mean = statistics.mean(points), statistics.mean(points.values())
    slope = sum((x - x_mean) * (y - y_mean) for x, y in points.items()) / sum((x - x_mean) ** 2 for x in points)
    return y_mean - slope * x_mean, slope


def plot(found: dict[str, Any], path: Path) -> None:
    """Two panels: step time against G, and against completion length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves = found["curves"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, label, colour in (
        ("trl: G", f"TRL, prompts of {PROMPT} tokens", "tab:orange"),
        ("covey: G", f"Covey, prompts of {PROMPT} tokens", "tab:blue"),
        ("covey: G, no prompt", f"Covey, prompts of {WARM_UP_TOKENS} tokens", "tab:cyan"),
    ):
        if name in curves:
            left.plot(*zip(*curves[name]["points"].items(), strict=True), "o-", label=label, color=colour)
    if found["prompt_seconds"]:
        label = "difference of the two: what the prompts cost"
        left.plot(*zip(*found["prompt_seconds"].items(), strict=True), "s--", label=label, color="tab:green")
    left.set(
        xlabel="completions per prompt, G",
        ylabel="seconds a step",
        title=f"{GROUPS} prompts, {COMPLETION} tokens each completion",
    )
    left.legend()
    if "covey: length" in curves:
        right.plot(*zip(*curves["covey: length"]["points"].items(), strict=True), "o-", color="tab:blue", label="Covey")
        right.legend()
    right.set(
        xlabel="tokens per completion", ylabel="seconds a step", title=f"{GROUPS} x 8 completions, prompts of 64 tokens"
    )
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    """Command line."""
    from benchmarks.machine import model_path
    from benchmarks.report import growth_tables

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl", action="store_true", help="measure TRL at some points too")
    parser.add_argument("--model", help="model folder; SmolLM2-135M-Instruct if absent")
    parser.add_argument("--records", type=Path, default=Path("runs/bench/records.jsonl"))
    parser.add_argument("--plot", type=Path, default=Path("benchmarks/growth.png"))
    given = parser.parse_args()
    records = Records(given.records)
    run(records, model_path(given.model), rounds=given.rounds, trl=given.trl, threads=given.threads)
    found = summary(records)
    plot(found, given.plot)
    print(growth_tables(found))


if __name__ == "__main__":
    main()
