"""The parent's side of `benchmarks.worker`: processes that stay alive and compute one at a time, when asked."""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.workloads import WARM_UPS, Workload
from covey.runtime.waiting import BRIEFLY, CHOSEN, POLICY

WAITING = {
    "passive": {POLICY: "passive"},
    "briefly": BRIEFLY,
    "spinning": {"GOMP_SPINCOUNT": "300000", "KMP_BLOCKTIME": "200"},
}
"""Variables that let threads sleep at once, after a moment in a loop as Covey has it, and after milliseconds, as by the
defaults of the runtimes."""

ROOT = Path(__file__).resolve().parent.parent


class WorkerFailed(RuntimeError):
    """A worker ended or failed; the message holds the end of its output."""


def waiting_variables(library: str, waiting: str | None) -> dict[str, str]:
    """Variables that decide how threads of a process wait; this one has what importing Covey sets."""
    if waiting is not None:
        return {"GOMP_SPINCOUNT": waiting} if waiting.isdigit() else dict(WAITING[waiting])
    return CHOSEN.given or (BRIEFLY if library == "covey" else {})


class Worker:
    """One process. Nothing runs in it unless `step` or `ask` is waiting for an answer.

    Args:
        spec: the first line it is sent.
        log: file for what it prints.
        threads: that it computes with.
        module: what to run with `python -m`.
        waiting: of OpenMP's threads that have nothing to do: a name of `WAITING`, or a number of rounds of libgomp's
            loop; None is the library's own way.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        log: Path,
        threads: int,
        module: str = "benchmarks.worker",
        waiting: str | None = None,
    ):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        environment = {name: value for name, value in environment.items() if name not in (POLICY, *BRIEFLY)}
        environment |= waiting_variables(spec["library"], waiting)
        if spec["library"] != "covey":  # importing Covey sets it, as the benchmark does in every process
            environment["THP_MEM_ALLOC_ENABLE"] = "0"
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env=environment,
                text=True,
                cwd=ROOT,
            )
        self._folder = spec.get("folder")
        self._send(spec | {"threads": threads})

    @classmethod
    def training(
        cls,
        library: str,
        workload: Workload,
        model: str,
        options: dict[str, Any],
        log: Path,
        threads: int,
        waiting: str | None = None,
    ) -> "Worker":
        """A process with a trainer in it that has done its warm-up steps.

        Args:
            library: `covey` or `trl`.
            workload: what its steps are.
            model: folder.
            options: config fields that are not left at their defaults.
            log: file for what it prints.
            threads: that it computes with.
            waiting: as of `Worker`.
        """
        spec = {
            "library": library,
            "workload": dataclasses.asdict(workload),
            "model": model,
            "options": options,
            "folder": tempfile.mkdtemp(prefix="bench-"),
        }
        return cls(spec, log, threads, waiting=waiting)._warm(WARM_UPS * [workload.warm_up()])

    @classmethod
    def running(
        cls, library: str, script: Path, model: str, arguments: Sequence[str], log: Path, threads: int
    ) -> "Worker":
        """A process that runs a script and has done its first step.

        Args:
            library: `covey` or `trl`, whose name takes the place of `trl` in the script's import.
            script: written for TRL; its arguments are the model and a folder for output.
            model: folder.
            arguments: further ones.
            log: file for what it prints.
            threads: that it computes with.
        """
        folder = tempfile.mkdtemp(prefix="bench-")
        spec = {"library": library, "script": str(script), "model": model, "arguments": arguments, "folder": folder}
        return cls(spec, log, threads)._warm([[]])

    @classmethod
    def multiplying(cls, log: Path, threads: int, size: int = 2048, warm_seconds: float = 2.0) -> "Worker":
        """A process that measures the machine's peak."""
        worker = cls({"library": "multiply", "size": size, "warm_seconds": warm_seconds}, log, threads)
        worker.answer()
        return worker

    def _warm(self, steps: list[list[int]]) -> "Worker":
        self.settings = self.answer()["settings"]
        for lengths in steps:
            self.ask(lengths=lengths)
        return self

    settings: dict[str, Any] = {}  # noqa: RUF012 - replaced, never changed

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._send(command)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Wait for the next answer.

        Raises:
            WorkerFailed: the process ended instead.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            words = self.log.read_text(errors="replace")[-2000:]
            raise WorkerFailed(f"{self.log.stem} ended with exit code {code}. Its last words:\n{words}")
        return dict(json.loads(line))

    def close(self) -> None:
        """End the process and remove its output folder."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            print(json.dumps(command), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise WorkerFailed(f"{self.log.stem} is gone; see {self.log}") from None
