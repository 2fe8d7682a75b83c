"""Decoding: Covey's native engine against transformers' `generate` and continuous batching, and vLLM on this CPU.

Every contender samples the same numbers of tokens from the same prompts at temperature 1, in float32 and on as many
threads, in a process of its own that is stopped while another computes. They take turns in every round, so that all
meet the same machine; a ratio is the median of the rounds' ratios. The lengths that came out are checked.
`python -m benchmarks.decode` prints tables, `run` is for other programs. A new contender is a class in
`decode_workers.py`; the workloads are those of the training steps, and no reward or training is in them.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from glob import glob
from pathlib import Path
from typing import Any

from benchmarks.machine import model_path
from benchmarks.records import Records
from benchmarks.workloads import TRIED_IN_CONTINUOUS_BATCHES, WORKLOADS, Workload

WORKERS = Path(__file__).with_name("decode_workers.py")
USUAL = ("native", "generate", "continuous_batching", "vllm")
VLLM = ("vllm", "vllm_processes", "vllm_server")
"""Contenders that run under vLLM's interpreter; a server also needs Covey there."""
CONTENDERS = (*USUAL, "vllm_processes", "vllm_server")

VOCABULARY = range(3, 49152)
"""Prompts are drawn from SmolLM2's tokens without its control tokens; what they say does not change the work."""


def work_of(workload: Workload, step: int) -> dict[str, Any]:
    """Work for a worker: new prompts and lengths for every step, so that no prefix cache has seen them."""
    dice = random.Random(f"prompts {workload.name} {step}")
    prompts = [[dice.choice(VOCABULARY) for _ in range(workload.prompt_tokens)] for _ in range(workload.groups)]
    return {"prompts": prompts, "group": workload.group_size, "lengths": workload.lengths(step), "seed": step}


class Worker:
    """A contender in its own process group, stopped (SIGSTOP) while it is not its turn.

    Should this process die, the system ends a stopped group that it leaves behind (SIGHUP, SIGCONT).
    """

    def __init__(self, name: str, python: str, folder: str, environment: dict[str, str]):
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the worker
        self._process = subprocess.Popen(
            [python, "-P", str(WORKERS), name, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
            process_group=0,
        )
        self.versions: dict[str, str] = self._answer()["versions"]
        self._signal(signal.SIGSTOP)

    def run(self, work: dict[str, Any]) -> dict[str, Any]:
        """Do `work` and check the lengths that come out.

        Returns:
            `seconds` as the worker measured them, and `cpu_seconds` of its processes and their threads.

        Raises:
            RuntimeError: the worker ended, or sampled other lengths than requested.
        """
        assert self._process.stdin is not None
        before = _cpu_seconds(self._process.pid)
        self._signal(signal.SIGCONT)
        print(json.dumps(work), file=self._process.stdin, flush=True)
        result = self._answer()
        self._signal(signal.SIGSTOP)
        if result["lengths"] != work["lengths"]:
            raise RuntimeError(f"{self.name} sampled {result['lengths']} tokens; it was told {work['lengths']}.")
        return result | {"cpu_seconds": _cpu_seconds(self._process.pid) - before}

    def close(self) -> None:
        """End the process and whatever it started."""
        assert self._process.stdin is not None
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGCONT)
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=30)
            self._signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return dict(json.loads(line))
        self._log.seek(0)
        raise RuntimeError(f"the worker of {self.name} ended; its last words:\n{self._log.read()[-3000:]}")


def _cpu_seconds(group: int) -> float:
    """CPU seconds of a process group so far: unlike the clock, these hardly depend on the load of the machine."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # a process that has ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _environment(threads: int) -> dict[str, str]:
    """The usual waiting of threads: only one worker computes at a time, and threads that sleep wake too slowly."""
    kept = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return kept | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


def _vllm_environment(threads: int, python: str, one_process: bool) -> dict[str, str]:
    """vLLM's allocator and OpenMP, where they are installed, and perhaps all of it in one process.

    As several processes its scheduler spins on one of two cores while its worker computes on both.
    """
    libraries = [
        *sorted(glob("/usr/lib/*/libtcmalloc_minimal.so.4"))[:1],
        *glob(str(Path(python).parent.parent / "lib" / "libiomp5.so")),
    ]
    return _environment(threads) | {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # these two as `covey vllm-serve` has them on few cores
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if one_process else "1",
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": ":".join(libraries),
    }


@contextlib.contextmanager
def _workers(names: Sequence[str], folder: str, threads: int, vllm_python: str | None) -> Iterator[list[Worker]]:
    with contextlib.ExitStack() as stack:
        workers = []
        for name in names:
            if name in VLLM:
                assert vllm_python is not None
                environment = _vllm_environment(threads, vllm_python, one_process=name == "vllm")
                worker = Worker(name, vllm_python, folder, environment)
            else:
                worker = Worker(name, sys.executable, folder, _environment(threads))
            stack.callback(worker.close)
            workers.append(worker)
        yield workers


def run(
    rounds: int = 5,
    vllm_python: str | None = None,
    workloads: Sequence[Workload] = tuple(WORKLOADS.values()),
    contenders: Sequence[str] = USUAL,
    folder: str | None = None,
    threads: int = 2,
) -> dict[str, Any]:
    """Measure; the result is what JSON can hold.

    Args:
        rounds: timed rounds of each workload; an untimed one of each comes first.
        vllm_python: the interpreter of an environment with vLLM; `$COVEY_BENCH_VLLM_PYTHON` when None. Without either
            vLLM is left out.
        workloads: what to sample; their rewards play no part.
        contenders: names out of `CONTENDERS`; the first is what the others are compared with, which is `native` unless
            only vLLM's are given.
        folder: the model; SmolLM2-135M-Instruct when None.
        threads: of each contender.
    """
    folder = folder or model_path(None)
    vllm_python = vllm_python or os.environ.get("COVEY_BENCH_VLLM_PYTHON")
    left_out = {}
    for name in () if vllm_python else VLLM:
        if name in contenders:
            left_out[name] = "no interpreter with vLLM was given (--vllm-python or COVEY_BENCH_VLLM_PYTHON)"
    names = [name for name in contenders if name not in left_out]
    if not set(names) <= set(VLLM):
        names = ["native", *(name for name in names if name != "native")]
    with _workers(names, folder, threads, vllm_python) as workers:
        return {
            "threads": threads,
            "dtype": "float32",
            "rounds": rounds,
            "versions": {worker.name: worker.versions for worker in workers},
            "left_out": left_out,
            "workloads": {workload.name: _measure(workload, workers, rounds) for workload in workloads},
        }


def _measure(workload: Workload, workers: list[Worker], rounds: int) -> dict[str, Any]:
    """Rounds of one workload after one that is not timed; another contender begins each."""
    if workload.name not in TRIED_IN_CONTINUOUS_BATCHES:
        workers = [worker for worker in workers if worker.name != "continuous_batching"]
    seconds: dict[str, list[float]] = {worker.name: [] for worker in workers}
    cpu_seconds: dict[str, list[float]] = {worker.name: [] for worker in workers}
    for turn in range(rounds + 1):
        work = work_of(workload, turn)
        first = turn % len(workers)
        for worker in workers[first:] + workers[:first]:
            result = worker.run(work)
            label = f"round {turn} of {rounds}" if turn else "warming up"
            spent = f"{result['seconds']:.2f} s, {result['cpu_seconds']:.2f} core-seconds"
            print(f"{workload.name} {label}: {worker.name} {spent}", file=sys.stderr, flush=True)
            if turn > 0:
                seconds[worker.name].append(result["seconds"])
                cpu_seconds[worker.name].append(result["cpu_seconds"])
    return _figures(workload, rounds, seconds, cpu_seconds)


def _figures(
    workload: Workload, rounds: int, seconds: dict[str, list[float]], cpu_seconds: dict[str, list[float]]
) -> dict[str, Any]:
    """Figures of a workload over its rounds; both times are lists by contender."""
    lengths = [workload.lengths(turn) for turn in range(1, rounds + 1)]
    tokens = [sum(row) for row in lengths]
    slots = [len(row) * max(row) for row in lengths]
    return {
        "prompt_tokens": workload.prompt_tokens,
        "rows": workload.completions,
        "tokens": tokens,
        "longest": [max(row) for row in lengths],
        "lock_step_over_needed": sum(slots) / sum(tokens),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "median_seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "tokens_per_second": {
            name: statistics.median(count / taken for count, taken in zip(tokens, times, strict=True))
            for name, times in seconds.items()
        },
        "over_first": {
            name: statistics.median(
                theirs / first for theirs, first in zip(times, next(iter(seconds.values())), strict=True)
            )
            for name, times in seconds.items()
        },
    }


def summary(records: Records) -> dict[str, Any]:
    """Results of all recorded workloads."""
    found = [record["found"] for record in records.find(part="decode")]
    return found[-1] | {"workloads": {k: v for one in found for k, v in one["workloads"].items()}} if found else {}


def markdown(results: dict[str, Any]) -> str:
    """The results as tables."""
    parts = [_table(name, workload) for name, workload in results["workloads"].items()]
    parts += [f"Left out: {name}: {reason}." for name, reason in results["left_out"].items()]
    return "\n\n".join(parts)


def _table(name: str, workload: dict[str, Any]) -> str:
    mean = statistics.mean(workload["tokens"]) / workload["rows"]
    lines = [
        f"**{name}**: {workload['rows']} rows, prompts of {workload['prompt_tokens']} tokens, completions of {mean:.0f}"
        f" on average and {max(workload['longest'])} at most; decoding in lock-step computes"
        f" {workload['lock_step_over_needed']:.1f} times the tokens that are needed.",
        "",
        f"| engine | seconds | core-seconds | tokens/s | its time / {next(iter(workload['seconds']))}'s |",
        "|---|---:|---:|---:|---:|",
    ]
    for engine, seconds in workload["median_seconds"].items():
        cores = statistics.median(workload["cpu_seconds"][engine])
        rate, ratio = workload["tokens_per_second"][engine], workload["over_first"][engine]
        lines.append(f"| {engine} | {seconds:.2f} | {cores:.2f} | {rate:.0f} | {ratio:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each workload")
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(USUAL))
    parser.add_argument("--model", help="model folder; SmolLM2-135M-Instruct unless given")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    results = run(
        options.rounds,
        options.vllm_python,
        [WORKLOADS[name] for name in options.workloads],
        options.contenders,
        options.model,
        options.threads,
    )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
