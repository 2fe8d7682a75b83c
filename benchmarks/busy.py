"""Step time next to another program: one core that something else keeps busy, or a second run of the same kind.

    python -m benchmarks.busy --rounds 5
    python -m benchmarks.busy --rounds 5 --trl                 # TRL at its defaults, too
    python -m benchmarks.busy --rounds 15 --only quiet         # the cost of the short loop where nothing else runs
    python -m benchmarks.busy --spins 2000 --spins 10000       # other lengths of the loop, too

Threads of `briefly` wait as `import covey` has them wait: a moment in a loop, then asleep. Those of `spinning` wait as
OpenMP's runtimes do by default, milliseconds in a loop, which is what a run had that did not choose. Every contender is
a process that computes only when it is its turn; in a round each does one step in every condition, and another begins
the next round. A second run does step after step, and its threads wait as those of the contender. The busy core is a
process that does nothing but count.

Printed are the median times of a step, their ratio to that of the quiet step, and the median of the rounds' ratios
`spinning / briefly`. The machine must have nothing else to do.
"""

import argparse
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.machine import model_path
from benchmarks.pool import Worker
from benchmarks.workloads import Workload

WORK = Workload("busy", 32, 4, 4, 32)
CONDITIONS = ("quiet", "busy core", "second run")
CONTENDERS = {
    "covey, briefly": ("covey", "briefly"),
    "covey, spinning": ("covey", "spinning"),
    "trl": ("trl", None),
}
"""Name: library, and how its threads wait: a name of `benchmarks.pool.WAITING`, or a number of rounds of the loop."""


@contextmanager
def busy_core() -> Iterator[None]:
    """A process that keeps one core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def stepping(worker: Worker, lengths: Sequence[int]) -> Iterator[None]:
    """A run that takes step after step; at the end its last one is waited for."""
    ended = threading.Event()

    def step() -> None:
        while not ended.is_set():
            worker.ask(lengths=lengths)

    thread = threading.Thread(target=step)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def measure(
    model: str,
    contenders: Sequence[str],
    conditions: Sequence[str],
    rounds: int,
    threads: int,
    say: Callable[[str], Any],
) -> dict[tuple[str, str], list[float]]:
    """Seconds of a step in every round, by contender and condition."""
    seconds: dict[tuple[str, str], list[float]] = {(name, one): [] for one in conditions for name in contenders}
    with ExitStack() as stack:

        def worker(name: str, role: str) -> Worker:
            library, waiting = CONTENDERS[name]
            log = Path("runs/bench/logs", f"busy-{library}-{waiting}-{role}.log")
            made = Worker.training(library, WORK, model, {}, log, threads, waiting)
            stack.callback(made.close)
            return made

        runs = {name: worker(name, "run") for name in contenders}
        others = {name: worker(name, "other") for name in contenders} if "second run" in conditions else {}
        lengths = WORK.lengths(0)
        for number in range(rounds):
            first = number % len(contenders)
            for name in (*contenders[first:], *contenders[:first]):
                for condition in conditions:
                    others_work = {
                        "quiet": nullcontext,
                        "busy core": busy_core,
                        "second run": lambda name=name: stepping(others[name], lengths),
                    }[condition]
                    with others_work():
                        taken = runs[name].ask(lengths=lengths)["seconds"]
                    seconds[name, condition].append(taken)
                    say(f"round {number}, {condition}, {name}: {taken:.2f} s")
    return seconds


def table(seconds: dict[tuple[str, str], list[float]]) -> str:
    """Medians of the rounds, their ratio to the quiet ones, and the ratios of pairs."""
    lines = []
    for (name, condition), taken in seconds.items():
        quiet = seconds.get((name, "quiet"))
        slower = f"{statistics.median(taken) / statistics.median(quiet):6.2f} x quiet" if quiet else ""
        lines.append(f"{condition:<12}{name:<18}{statistics.median(taken):8.2f} s  {slower}")
    base = "covey, spinning"
    for name, condition in seconds:
        if name != base and name.startswith("covey"):
            pairs = zip(seconds[base, condition], seconds[name, condition], strict=True)
            ratios = [above / below for above, below in pairs]
            shown = f"{statistics.median(ratios):8.3f}    ({min(ratios):.3f} to {max(ratios):.3f})"
            lines.append(f"{condition:<12}spinning / {name.removeprefix('covey, '):<14}{shown}")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", choices=CONDITIONS, help="may be repeated; all if absent")
    parser.add_argument("--trl", action="store_true", help="TRL at its defaults, too")
    parser.add_argument("--spins", type=int, action="append", default=[], help="rounds of libgomp's loop to try, too")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", help="model folder; SmolLM2-135M-Instruct if absent")
    given = parser.parse_args()
    CONTENDERS.update({f"covey, {spins} rounds": ("covey", str(spins)) for spins in given.spins})
    contenders = [name for name in CONTENDERS if given.trl or name != "trl"]
    conditions = given.only or CONDITIONS
    model = model_path(given.model)
    print(table(measure(model, contenders, conditions, given.rounds, given.threads, print)))


if __name__ == "__main__":
    main()
