"""W4: steps of a user's script for TRL and of the same script with its import changed, at natural lengths.

    python -m benchmarks.script --rounds 3

The script (`trl_script.py`) is TRL's usual one: 8 prompts with 8 completions of at most 256 tokens a step, sums of
reasoning-gym, everything else at its default. Completions end where the model ends them. Each library runs in a process
that computes only when it is its turn; the first step of each is not measured.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pool import Worker
from benchmarks.records import Records
from benchmarks.step import ratio

SCRIPT = Path(__file__).with_name("trl_script.py")
LIBRARIES = ("covey", "trl")


def run(
    records: Records,
    model: str,
    *,
    rounds: int = 3,
    arguments: Sequence[str] = (),
    threads: int = 2,
    say: Callable[[str], None] = print,
) -> None:
    """Measure the rounds that `records` lacks.

    Args:
        records: where measurements are and go.
        model: folder.
        rounds: steps of each library.
        arguments: of the script, after the model and the folder for output.
        threads: of every process.
        say: receives a line per measurement.
    """
    missing = [
        (number, library)
        for number in range(rounds)
        for library in LIBRARIES[:: 1 - 2 * (number % 2)]
        if not records.find(part="script", round=number, library=library)
    ]
    logs = records.path.parent / "logs"
    workers: dict[str, Worker] = {}
    try:
        for library in dict.fromkeys(library for _, library in missing):
            log = logs / f"script-{library}.log"
            workers[library] = Worker.running(library, SCRIPT, model, arguments, log, threads)
        for number, library in missing:
            measured = workers[library].ask(lengths=[])
            records.add(part="script", round=number, library=library, **measured)
            say(f"script, round {number}, {library}: {measured['seconds']:.1f} s")
    finally:
        for worker in workers.values():
            worker.close()


def summary(records: Records) -> dict[str, Any]:
    """The entry of `results.json`; empty if nothing is on record."""
    by_name = {library: records.find(part="script", library=library) for library in LIBRARIES}
    if not any(by_name.values()):
        return {}
    return {
        "trl_over_covey": ratio(by_name, "trl", "covey", "seconds"),
        "memory_covey_over_trl": ratio(by_name, "covey", "trl", "peak_bytes"),
        "seconds": {name: [one["seconds"] for one in taken] for name, taken in by_name.items()},
        "peak_bytes": {
            name: max((one["peak_bytes"] for one in taken), default=None) for name, taken in by_name.items()
        },
    }


def main() -> None:
    """Command line."""
    from benchmarks.machine import model_path
    from benchmarks.report import script_table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", help="model folder; SmolLM2-135M-Instruct if absent")
    parser.add_argument("--records", type=Path, default=Path("runs/bench/records.jsonl"))
    given = parser.parse_args()
    records = Records(given.records)
    run(records, model_path(given.model), rounds=given.rounds, threads=given.threads)
    print(script_table(summary(records)))


if __name__ == "__main__":
    main()
