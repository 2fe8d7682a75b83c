"""The first hour (docs/start.md) with several seeds: held-out accuracy before and after, with intervals and minutes.

    python -m benchmarks.first_hour --seeds 0 1 2 3 4

For each seed `covey init` writes the files of the page into an empty folder, and its run file is trained with the
command of the page, in processes of their own. Accuracy is that of the run's own evaluations on the hundred rows that
are held out. Seeds that are on record are not run again; `--fresh` starts over.
"""

import argparse
import csv
import io
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import describe, model_path
from benchmarks.records import Records
from covey.observability.record_files import FOLDER, read_metrics
from covey_tools.init import tickets

ROOT = Path(__file__).parents[1]
HELD_OUT = 100
SHARE = "eval_tickets_pass@1"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_hour", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--model", help="folder of SmolLM2-135M-Instruct; that of `covey demo` if not given")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max_steps", type=int, help="fewer updates than the page's, to see that it runs")
    parser.add_argument(
        "--records", type=Path, default=ROOT / "runs/bench/first_hour.jsonl", help="file of the results"
    )
    parser.add_argument("--fresh", action="store_true", help="discard earlier results")
    options = parser.parse_args(argv)
    records = Records(options.records)
    if options.fresh:
        records.path.unlink(missing_ok=True)
    for seed in options.seeds:
        asked = {"seed": seed, "max_steps": options.max_steps, "threads": options.threads}
        if not records.find(**asked):
            found = trained(seed, model_path(options.model), options.threads, options.max_steps)
            records.add(**asked, **found, machine=describe(options.threads))
    kept = [records.find(seed=seed, max_steps=options.max_steps, threads=options.threads)[-1] for seed in options.seeds]
    print(table(kept))


def trained(seed: int, model: str, threads: int, max_steps: int | None) -> dict[str, Any]:
    """Shares of right answers with their intervals before and after, and the seconds of the training command."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="covey-first-hour-") as place:

        def covey(*words: str) -> None:
            command = [sys.executable, "-m", "covey.cli.main", *words]
            subprocess.run(command, cwd=place, env=environment, check=True)

        covey("init")
        began = time.perf_counter()
        changes = ["--model", model, "--seed", str(seed), "--save_strategy", "no"]
        if max_steps is not None:
            changes += ["--max_steps", str(max_steps), "--eval_steps", str(max_steps)]
        covey("grpo", "--config", "run.yaml", *changes)
        seconds = time.perf_counter() - began
        lines = [line for line in read_metrics(Path(place, "runs/tickets", FOLDER)) if SHARE in line]
    before, after = (
        [line[name] for name in (SHARE, f"{SHARE}_low", f"{SHARE}_high")] for line in (lines[0], lines[-1])
    )
    return {"before": before, "after": after, "seconds": round(seconds)}


def best_constant(rows: int = HELD_OUT) -> float:
    """The share of the held-out rows that the best constant answer gets right."""
    answers = [row["order"] for row in csv.DictReader(io.StringIO(tickets()))][:rows]
    return Counter(answers).most_common(1)[0][1] / len(answers)


def table(records: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown.

    Example:
        >>> print(table([{"seed": 3, "before": [0.4, 0.3, 0.5], "after": [0.9, 0.83, 0.94], "seconds": 306}]))
        | seed | right before | right after | minutes |
        |---|---|---|---|
        | 3 | 40% (30 to 50) | 90% (83 to 94) | 5.1 |
        <BLANKLINE>
        Of 100 held-out rows, with 95% intervals. The best constant answer has 1%.
    """
    lines = ["| seed | right before | right after | minutes |", "|---|---|---|---|"]
    for one in records:
        shares = (f"{100 * share:.0f}% ({100 * low:.0f} to {100 * high:.0f})" for share, low, high in _both(one))
        lines.append(f"| {one['seed']} | {' | '.join(shares)} | {one['seconds'] / 60:.1f} |")
    told = f"Of {HELD_OUT} held-out rows, with 95% intervals. The best constant answer has {best_constant():.0%}."
    return "\n".join([*lines, "", told])


def _both(one: dict[str, Any]) -> tuple[Sequence[float], Sequence[float]]:
    return one["before"], one["after"]


if __name__ == "__main__":
    main()
