"""`make bench`: every measurement, written to RESULTS.md, results.json and plots in this folder.

    python -m benchmarks --rounds 3 --part step --part decode

Measurements are appended to a file in `--records` one by one. An interrupted run continues when it is
started again; `--fresh` starts over, `--summary` only writes the pages. A part that fails is named on the page, and the
others continue. `--quick` runs everything in miniature, into a folder of its own, to check that it works: its figures
mean nothing.
"""

import argparse
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import decode, growth, learn, machine, report, script, step
from benchmarks.records import Records
from benchmarks.workloads import WORKLOADS, Workload

HERE = Path(__file__).resolve().parent
PARTS = ("step", "script", "decode", "learn", "growth")
TINY = [Workload("W1", 16, 2, 4, 6), Workload("W3", 16, 2, 4, 4, cap=8, with_signal=2)]


def main() -> int:
    """Measure, and write down what there is; the exit code is 1 when a part failed."""
    given = _parser().parse_args()
    if given.quick:
        given.records = given.output = Path("runs/bench-quick")
    if given.fresh:
        shutil.rmtree(given.records, ignore_errors=True)
    given.output.mkdir(parents=True, exist_ok=True)
    records = Records(given.records / "records.jsonl")
    model = machine.model_path(given.model)
    workloads = TINY if given.quick else [WORKLOADS[name] for name in given.workload or WORKLOADS]
    failures: dict[str, str] = {}
    for part in [] if given.summary else given.part or PARTS:
        try:
            MEASURES[part](given, records, model, workloads)
        except Exception as error:  # the other parts do not depend on this one; the page names it
            traceback.print_exc()
            failures[part] = f"{type(error).__name__}: {error}"
        write(given.output, records, model, workloads, failures, given.threads)
    if given.summary:
        write(given.output, records, model, workloads, failures, given.threads)
    print((given.output / "RESULTS.md").read_text())
    return 1 if failures else 0


def _steps(given: argparse.Namespace, records: Records, model: str, workloads: Sequence[Workload]) -> None:
    rounds, only = 1 if given.quick else given.rounds, given.only or step.CONTENDERS
    step.run(records, model, workloads=workloads, rounds=rounds, only=only, threads=given.threads)


def _script(given: argparse.Namespace, records: Records, model: str, workloads: Sequence[Workload]) -> None:
    rounds, arguments = (1, ["8"]) if given.quick else (given.rounds, [])
    script.run(records, model, rounds=rounds, arguments=arguments, threads=given.threads)


def _decode(given: argparse.Namespace, records: Records, model: str, workloads: Sequence[Workload]) -> None:
    choice: dict[str, Any] = {"rounds": given.decode_rounds, "vllm_python": given.vllm_python}
    if given.quick:
        choice = {"rounds": 1, "contenders": ["native"]}
    for workload in workloads:
        if not records.find(part="decode", workload=workload.name):
            found = decode.run(folder=model, threads=given.threads, workloads=[workload], **choice)
            records.add(part="decode", workload=workload.name, found=found)


def _learn(given: argparse.Namespace, records: Records, model: str, workloads: Sequence[Workload]) -> None:
    choice = {"steps": given.learn_steps, "seeds": given.seeds}
    if given.quick:
        choice = {"steps": 1, "seeds": [0], "every": 1, "samples": 1, "prompts": 2}
    learn.run(records, model, threads=given.threads, **choice)


def _growth(given: argparse.Namespace, records: Records, model: str, workloads: Sequence[Workload]) -> None:
    choice: dict[str, Any] = {"rounds": given.growth_rounds, "trl": given.growth_trl}
    if given.quick:
        choice = {
            "rounds": 1,
            "chosen": [
                ("covey", curve, size, Workload(f"G{size}", prompt, 2, size, 4))
                for size in (2, 3)
                for curve, prompt in (("G", 16), ("G, no prompt", 8), ("length", 8))
            ],
        }
    growth.run(records, model, threads=given.threads, **choice)


MEASURES: dict[str, Callable[[argparse.Namespace, Records, str, Sequence[Workload]], None]] = {
    "step": _steps,
    "script": _script,
    "decode": _decode,
    "learn": _learn,
    "growth": _growth,
}


def write(
    output: Path, records: Records, model: str, workloads: Sequence[Workload], failures: dict[str, str], threads: int
) -> None:
    """The page, the JSON file and the plots, from everything that is on record.

    Args:
        output: folder.
        records: measurements.
        model: folder of the model.
        workloads: of the steps.
        failures: part to what went wrong.
        threads: that were computed with.
    """
    config = json.loads((Path(model) / "config.json").read_text())
    results: dict[str, Any] = {
        "machine": machine.describe(threads),
        "failures": failures,
        "step": step.summary(records, config, workloads),
        "script": script.summary(records),
        "decode": decode.summary(records),
        "learn": learn.summary(records),
        "growth": growth.summary(records),
    }
    (output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    decode_markdown = decode.markdown(results["decode"]) if results["decode"] else ""
    (output / "RESULTS.md").write_text(
        report.page(results, decode_markdown, os.path.relpath(HERE / "README.md", output))
    )
    if results["learn"]:
        learn.plot(results["learn"], output / "learn.png")
    if results["growth"]:
        growth.plot(results["growth"], output / "growth.png")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="may be repeated; all if absent")
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="of the steps; may be repeated")
    parser.add_argument("--only", action="append", choices=step.CONTENDERS, help="of the steps; may be repeated")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each contender and workload")
    parser.add_argument("--decode-rounds", type=int, default=3)
    parser.add_argument("--growth-rounds", type=int, default=2)
    parser.add_argument("--growth-trl", action="store_true", help="measure TRL's growth at some points too")
    parser.add_argument("--learn-steps", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the learning runs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", help="model folder; SmolLM2-135M-Instruct if absent")
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM, for the sampling comparison")
    parser.add_argument("--records", type=Path, default=Path("runs/bench"), help="folder of raw measurements and logs")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the page, the JSON file and the plots")
    parser.add_argument("--fresh", action="store_true", help="forget earlier measurements")
    parser.add_argument("--summary", action="store_true", help="measure nothing, write what the records say")
    parser.add_argument("--quick", action="store_true", help="miniature of everything, into runs/bench-quick")
    return parser


if __name__ == "__main__":
    sys.exit(main())
