"""Waiting of torch's threads between operations: in a short busy loop, then asleep.

Between two parallel operations the threads of an OpenMP runtime wait for the next one in a loop. libgomp, which torch's
wheels for Linux bring, stays in this loop for 300,000 rounds, several milliseconds, before a thread sleeps. This
is fast on an idle machine. If another program needs the cores, a thread in this loop may wait for a thread that the
system has suspended, and keep the core from threads that have work: two runs on two cores then take many times as long
as one after the other. With a short loop nothing is lost on an idle machine, since the next operation usually follows
within microseconds.

The runtimes read environment variables when they are loaded, with torch, and children inherit these. So `import covey`
sets them, unless they or `OMP_WAIT_POLICY` are set: `GOMP_SPINCOUNT` for libgomp and, for the runtime of LLVM and
Intel in other builds of torch, `KMP_BLOCKTIME` in milliseconds. If torch was imported before, the second runtime can
still be set, but libgomp cannot.
"""

import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

POLICY = "OMP_WAIT_POLICY"  # of OpenMP's standard, which both runtimes read
BRIEFLY = {"GOMP_SPINCOUNT": "4000", "KMP_BLOCKTIME": "1"}
"""Rounds of libgomp's loop (0.1 to 0.2 ms, by the processor), and the smallest milliseconds of the other runtime."""
RUNTIMES = {"GOMP_SPINCOUNT": "libgomp", "KMP_BLOCKTIME": "libiomp5?|libomp"}
"""Names of libraries that read each variable."""


class Waiting(NamedTuple):
    """The waiting of this process's threads, as `import covey` found or set it."""

    given: dict[str, str]  # variables that were set before, by the user or by a parent process
    late: tuple[str, ...]  # variables that had no effect, because the runtime was loaded before they were set

    def __str__(self) -> str:
        if POLICY in self.given:
            return f"as set: {POLICY}={self.given[POLICY]}"
        if other := [f"{name}={value}" for name, value in self.given.items() if value != BRIEFLY[name]]:
            return f"as set: {', '.join(other)}"
        if self.late:
            return f"in a loop for milliseconds: torch was imported before covey. {self.advice}"
        return f"briefly in a loop, then asleep ({', '.join(f'{name}={value}' for name, value in BRIEFLY.items())})"

    @property
    def advice(self) -> str:
        """Advice for threads that do not sleep because their runtime was loaded too early."""
        return f"Import covey first, or set {' and '.join(f'{name}={BRIEFLY[name]}' for name in self.late)}."


def choose() -> Waiting:
    """Make threads sleep after a short loop, in this process if its runtime is not loaded yet, and in child processes.

    Variables that are already set are not changed, and none is set if `OMP_WAIT_POLICY` is.
    """
    given = {name: os.environ[name] for name in (POLICY, *BRIEFLY) if name in os.environ}
    if POLICY in given:
        return Waiting(given, ())
    missing = [name for name in BRIEFLY if name not in given]
    late = [name for name in missing for path in loaded_runtimes(name) if not _told(path)]
    os.environ |= {name: BRIEFLY[name] for name in missing}  # Python's `os.environ` sets those of the C library, too
    return Waiting(given, tuple(dict.fromkeys(late)))


def loaded_runtimes(variable: str) -> list[str]:
    """Files of the OpenMP runtimes in this process that read a variable and that torch uses, or would use."""
    with suppress(OSError):
        return runtimes_in(Path("/proc/self/maps").read_text(), variable)
    torch = sys.modules.get("torch")  # a system without /proc
    folder = Path(getattr(torch, "__file__", None) or os.devnull).parent / "lib"
    return runtimes_in("\n".join(map(str, folder.glob("lib*omp*"))), variable)


def runtimes_in(files: str, variable: str) -> list[str]:
    """The runtimes that read a variable among files of libraries: lines that end with a path, as in /proc/PID/maps.

    A copy with a name of its own, such as `libgomp-a34b3233.so.1`, counts where it is torch's and not of another
    package: torch would not use that one.
    """
    named = re.findall(rf"(/\S*/(?:{RUNTIMES[variable]})(-\w+)?\.(?:so|dylib)\S*)$", files, re.MULTILINE)
    return list(dict.fromkeys(path for path, copy in named if not copy or "/torch" in path))


def _told(path: str) -> bool:
    """Set the waiting time of a loaded runtime; False if it has no function for that, such as libgomp."""
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(path).kmp_set_blocktime(int(BRIEFLY["KMP_BLOCKTIME"]))
        return True
    return False


class CoreUse(NamedTuple):
    """Seconds since the machine started, and seconds of computing on the cores that this process may use."""

    clock: float  # of the machine
    busy: float  # of all programs, over these cores
    own: float  # of this process and its children

    @classmethod
    def now(cls) -> "CoreUse":
        import psutil

        usable = cores()
        times = [one for core, one in enumerate(psutil.cpu_times(percpu=True)) if core in usable]
        busy = sum(sum(one[:3]) for one in times)  # user, nice and system; idle and waiting come after
        process = psutil.Process()
        own = 0.0
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):
                spent = one.cpu_times()
                own += spent.user + spent.system
        return cls(time.monotonic(), busy, own)


def cores() -> Sequence[int]:
    """Ids of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)


def used_by_others(before: CoreUse, after: CoreUse) -> float:
    """Average number of cores that other programs used between two readings; 0 if no time has passed."""
    seconds = after.clock - before.clock
    return max(0.0, (after.busy - before.busy) - (after.own - before.own)) / seconds if seconds > 0 else 0.0


CHOSEN = choose()
"""Made by the first import of `covey`."""
