"""One optimizer step of 64 completions, on Covey and on TRL, each at its defaults and at its best settings.

    python -m benchmarks.step --workload W1 --rounds 3 --only covey_default --only trl_best

Every contender is a process that stays alive for a workload and computes only when it is its turn; in a round each does
one step, and another begins the next round. Between the steps a large matrix product measures what the machine can do.
Defaults are the library's own for everything but what the workload fixes; they are measured once more while OpenMP's
threads sleep when they have nothing to do (`OMP_WAIT_POLICY=passive`), as in containers that count CPU time. Best
settings of TRL: no gradient checkpointing, and the micro-batch and the sampler (`generate` or continuous batching) that
a probe finds fastest, once a workload. Best settings of Covey: `COVEY_BEST`.

To add a contender, add a row to `CONTENDERS`.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.flops import ModelSize, least_seconds, minimum_flops, needed_positions, size_of
from benchmarks.libraries import PROBE, continuous_batching
from benchmarks.machine import available_memory
from benchmarks.pool import Worker, WorkerFailed
from benchmarks.records import Records
from benchmarks.workloads import TRIED_IN_CONTINUOUS_BATCHES, WORKLOADS, Workload

COVEY_BEST: dict[str, Any] = {"gradient_checkpointing": False}
MICRO_BATCHES = (8, 16)
PROBE_COMPLETIONS = 16
CONTENDERS = ("covey_default", "trl_default", "covey_best", "trl_best", "covey_passive", "trl_passive")
PHASES = ("generate", "score", "train", "optimizer", "other")

Say = Callable[[str], None]


def run(
    records: Records,
    model: str,
    *,
    workloads: Sequence[Workload] = tuple(WORKLOADS.values()),
    rounds: int = 3,
    only: Sequence[str] = CONTENDERS,
    threads: int = 2,
    say: Say = print,
) -> None:
    """Measure what `records` lacks; one workload that fails does not stop the others.

    Args:
        records: where measurements are and go.
        model: folder.
        workloads: what is measured.
        rounds: steps of each contender.
        only: names out of `CONTENDERS`.
        threads: of every process.
        say: receives a line per measurement.

    Raises:
        WorkerFailed: after all workloads, if a contender failed in one.
    """
    failures = []
    for workload in workloads:
        try:
            Bench(records, model, workload, threads, say).rounds(rounds, only)
        except WorkerFailed as error:
            say(f"{workload.name}: {error}")
            failures.append(f"{workload.name}: {error}")
    if failures:
        raise WorkerFailed("\n".join(failures))


class Bench:
    """One workload.

    Args:
        records: where measurements are and go.
        model: folder.
        workload: what is measured.
        threads: of every process.
        say: receives a line per measurement.
    """

    def __init__(self, records: Records, model: str, workload: Workload, threads: int, say: Say):
        self.records = records
        self.model = model
        self.workload = workload
        self.threads = threads
        self.say = say

    def rounds(self, rounds: int, only: Sequence[str]) -> None:
        """Every contender's turn in every round, but for those that are on record."""
        for passive in (False, True):  # one after the other: six processes would not fit into memory
            if chosen := [name for name in only if name.endswith("_passive") == passive]:
                self._rounds(rounds, chosen)

    def _rounds(self, rounds: int, only: Sequence[str]) -> None:
        missing = [
            (number, contender)
            for number in range(rounds)
            for contender in _turns(list(only), number)
            if not self.records.find(part="step", workload=self.workload.name, round=number, contender=contender)
        ]
        if not missing:
            return
        options = {contender: self.options(contender) for contender in dict.fromkeys(name for _, name in missing)}
        with ExitStack() as stack:
            peak = stack.enter_context(self.multiplying())
            workers = {name: stack.enter_context(self.training(name, options[name])) for name in options}
            for number, contender in missing:
                self.measure(number, contender, workers[contender], options[contender], peak)

    def measure(self, number: int, contender: str, worker: Worker, options: dict[str, Any], peak: Worker) -> None:
        """One step, and what the machine can do just before it."""
        machine = peak.ask()
        measured = worker.ask(lengths=self.workload.lengths(number))
        self.records.add(
            part="step",
            workload=self.workload.name,
            round=number,
            contender=contender,
            options={name: value for name, value in options.items() if not isinstance(value, dict)},
            settings=worker.settings,
            peak_flops=machine["flops"],
            bandwidth=machine["bandwidth"],
            **measured,
        )
        phases = ", ".join(f"{name} {measured['phases'].get(name, 0.0):.1f}" for name in PHASES)
        self.say(
            f"{self.workload.name} round {number} {contender}: {measured['seconds']:.1f} s ({phases}),"
            f" {measured['peak_bytes'] / 2**30:.2f} GiB, machine {machine['flops'] / 1e9:.0f} GFLOP/s,"
            f" {machine['bandwidth'] / 1e9:.1f} GB/s"
        )

    def options(self, contender: str) -> dict[str, Any]:
        """Config fields that a contender does not leave at their defaults."""
        if not contender.endswith("_best"):
            return {}
        return COVEY_BEST if contender == "covey_best" else self.best_of_trl()

    @contextmanager
    def training(self, name: str, options: dict[str, Any], workload: Workload | None = None) -> Iterator[Worker]:
        """A contender's process."""
        work = workload or self.workload
        log = self.records.path.parent / "logs" / f"{work.name}-{name}.log"
        waiting = "passive" if name.endswith("_passive") else None
        worker = Worker.training(name.split("_")[0], work, self.model, options, log, self.threads, waiting)
        try:
            yield worker
        finally:
            worker.close()

    @contextmanager
    def multiplying(self) -> Iterator[Worker]:
        """The process that measures the machine's peak."""
        worker = Worker.multiplying(self.records.path.parent / "logs" / "multiply.log", self.threads)
        try:
            yield worker
        finally:
            worker.close()

    # ---- TRL's best settings ---------------------------------------------------------------------------------------

    def best_of_trl(self) -> dict[str, Any]:
        """TRL's fastest settings here, without gradient checkpointing; found once, then read from the records."""
        if not (found := self.records.find(part="probe", workload=self.workload.name)):
            micro_batches = self.probe_micro_batches()
            samplers = self.probe_samplers()
            best = min(micro_batches, key=lambda size: micro_batches[size])
            found = [
                self.records.add(
                    part="probe",
                    workload=self.workload.name,
                    seconds_a_completion=micro_batches,
                    sampling_seconds=samplers,
                    micro_batch=best,
                    continuous_batching=samplers.get("continuous_batching", float("inf")) < samplers["generate"],
                )
            ]
            self.say(f"{self.workload.name}: TRL's best settings: {json.dumps(found[-1])}")
        return self._trl(found[-1]["micro_batch"], found[-1]["continuous_batching"])

    def probe_micro_batches(self) -> dict[int, float]:
        """Seconds of forward and backward a completion, by micro-batch, scaled to one speed of the machine.

        Sizes that would not fit into memory are left out.
        """
        seconds: dict[int, float] = {}
        peaks: list[int] = []
        with self.multiplying() as peak:
            for size in (size for size in MICRO_BATCHES if size <= self.workload.completions):
                if len(peaks) > 1 and peaks[-1] + 2 * (peaks[-1] - peaks[-2]) > 0.8 * available_memory():
                    self.say(f"{self.workload.name}: a micro-batch of {size} would not fit into memory")
                    break
                completions = min(max(PROBE_COMPLETIONS, size, self.workload.group_size), self.workload.completions)
                work = replace(self.workload, groups=completions // self.workload.group_size, with_signal=1)
                options = self._trl(size, False) | {PROBE: "train"}
                try:
                    with self.training(f"trl_micro_batch_{size}", options, work) as worker:
                        flops = peak.ask()["flops"]
                        measured = worker.ask(lengths=work.lengths(0))
                except WorkerFailed as error:
                    self.say(f"{self.workload.name}: a micro-batch of {size} failed: {error}")
                    break
                peaks.append(measured["peak_bytes"])
                seconds[size] = measured["phases"]["train"] / work.completions * flops / 1e11
                self.say(f"{self.workload.name}: micro-batch {size}: {seconds[size]:.2f} s a completion at 100 GFLOP/s")
        if not seconds:
            raise WorkerFailed(f"{self.workload.name}: TRL ran with no micro-batch out of {MICRO_BATCHES}")
        return seconds

    def probe_samplers(self) -> dict[str, float]:
        """Seconds of sampling a whole step, by sampler; scaled to one speed of the machine."""
        seconds = {}
        with self.multiplying() as peak:
            samplers = (("generate", False), ("continuous_batching", True))
            for name, continuous in samplers if self.workload.name in TRIED_IN_CONTINUOUS_BATCHES else samplers[:1]:
                options = self._trl(min(8, self.workload.completions), continuous) | {PROBE: "generate"}
                try:
                    with self.training(f"trl_{name}", options) as worker:
                        flops = peak.ask()["flops"]
                        measured = worker.ask(lengths=self.workload.lengths(0))
                except WorkerFailed as error:
                    if not continuous:
                        raise
                    self.say(f"{self.workload.name}: continuous batching does not run here: {error}")
                    continue
                seconds[name] = measured["phases"]["generate"] * flops / 1e11
                self.say(f"{self.workload.name}: sampling with {name}: {seconds[name]:.1f} s at 100 GFLOP/s")
        return seconds

    def _trl(self, micro_batch: int, continuous: bool) -> dict[str, Any]:
        options: dict[str, Any] = {"gradient_checkpointing": False, "per_device_train_batch_size": micro_batch}
        if continuous:
            options["use_transformers_continuous_batching"] = True
            options["transformers_continuous_batching_config"] = continuous_batching(self.workload)
        return options


def _turns(contenders: list[str], number: int) -> list[str]:
    """The order of round `number`: another contender begins each."""
    first = number % len(contenders)
    return contenders[first:] + contenders[:first]


# ---- summary -----------------------------------------------------------------------------------------------------


def summary(records: Records, model_config: dict[str, Any], workloads: Sequence[Workload]) -> dict[str, Any]:
    """Entries of `results.json` for the measured workloads.

    Args:
        records: measurements.
        model_config: the model's `config.json`.
        workloads: those to look for.
    """
    size = size_of(model_config)
    done = {w.name: _workload(records.find(part="step", workload=w.name), w, size) for w in workloads}
    return {name: entry for name, entry in done.items() if entry}


def _workload(measured: list[dict[str, Any]], workload: Workload, size: ModelSize) -> dict[str, Any]:
    if not measured:
        return {}
    peak = statistics.median(record["peak_flops"] for record in measured)
    by_name = {name: [r for r in measured if r["contender"] == name] for name in CONTENDERS}
    contenders = {name: _contender(taken, workload, size, peak) for name, taken in by_name.items() if taken}
    lengths = [workload.grouped(workload.lengths(number)) for number in sorted({r["round"] for r in measured})]
    needed = [needed_positions(workload.prompt_tokens, groups, workload.signals()) for groups in lengths]
    return {
        "description": workload.describe(),
        "trl_over_covey_default": ratio(by_name, "trl_default", "covey_default", "seconds"),
        "trl_over_covey_passive": ratio(by_name, "trl_passive", "covey_passive", "seconds"),
        "trl_over_covey_best": ratio(by_name, "trl_best", "covey_best", "seconds"),
        "trl_default_over_covey_best": ratio(by_name, "trl_default", "covey_best", "seconds"),
        "memory_covey_over_trl": {
            "default": ratio(by_name, "covey_default", "trl_default", "peak_bytes"),
            "best": ratio(by_name, "covey_best", "trl_best", "peak_bytes"),
        },
        "efficiency": {name: contenders.get(name, {}).get("efficiency") for name in ("covey_default", "covey_best")},
        "machine_flops": peak,
        "machine_bandwidth": statistics.median(record["bandwidth"] for record in measured),
        "positions_needed": {name: statistics.median(each[name] for each in needed) for name in ("generate", "train")},
        "contenders": contenders,
    }


def _contender(taken: list[dict[str, Any]], workload: Workload, size: ModelSize, peak: float) -> dict[str, Any]:
    def efficiency(record: dict[str, Any]) -> float:
        groups = workload.grouped(workload.lengths(record["round"]))
        flops = minimum_flops(size, workload.prompt_tokens, groups, workload.signals())
        return sum(flops.values()) / (peak * record["seconds"])

    def of_roofline(record: dict[str, Any], phase: str) -> float:
        groups, speed = workload.grouped(workload.lengths(record["round"])), record["bandwidth"]
        least = least_seconds(size, workload.prompt_tokens, groups, workload.signals(), peak=peak, bandwidth=speed)
        return least[phase] / record["phases"][phase]

    def median_of(column: str, names: Sequence[str]) -> dict[str, float]:
        return {name: statistics.median(r[column].get(name, 0) for r in taken) for name in names}

    return {
        "settings": taken[-1]["settings"],
        "rounds": len(taken),
        "seconds": statistics.median(r["seconds"] for r in taken),
        "all_seconds": [r["seconds"] for r in taken],
        "phases": median_of("phases", PHASES),
        "peak_bytes": max(r["peak_bytes"] for r in taken),
        "positions_computed": median_of("positions", ("generate", "score", "train")),
        "efficiency": statistics.median(map(efficiency, taken)),
        "of_roofline": {
            phase: statistics.median(of_roofline(record, phase) for record in taken) for phase in ("generate", "train")
        },
    }


def ratio(by_name: dict[str, list[dict[str, Any]]], above: str, below: str, column: str) -> float | None:
    """Median of the rounds' ratios `above / below`; None where they have no round in common."""
    pairs = {r["round"]: [r[column]] for r in by_name[below]}
    for record in by_name[above]:
        pairs.get(record["round"], []).append(record[column])
    ratios = [pair[1] / pair[0] for pair in pairs.values() if len(pair) == 2]
    return statistics.median(ratios) if ratios else None


def main() -> None:
    """Command line."""
    from benchmarks.machine import model_path
    from benchmarks.report import step_tables

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="may be repeated; all if absent")
    parser.add_argument("--only", action="append", choices=CONTENDERS, help="may be repeated; all if absent")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", help="model folder; SmolLM2-135M-Instruct if absent")
    parser.add_argument("--records", type=Path, default=Path("runs/bench/records.jsonl"))
    given = parser.parse_args()
    chosen = [WORKLOADS[name] for name in given.workload or WORKLOADS]
    records, model = Records(given.records), model_path(given.model)
    run(records, model, workloads=chosen, rounds=given.rounds, only=given.only or CONTENDERS, threads=given.threads)
    config = json.loads((Path(model) / "config.json").read_text())
    print(step_tables(summary(records, config, chosen)))


if __name__ == "__main__":
    main()
