"""Processes that must end with their parent, tried with real ones: each test kills something and counts who is left."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from covey.runtime.child_process import ChildProcess, Quota

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="who is left is read from Linux's /proc")

SOURCES = str(Path(__file__).parents[2] / "src")

# Three rollout batches, the last one in a session of its own and deaf to SIGTERM; each writes its id down.
FAMILY = """
import os, signal, subprocess, sys, time
folder, depth = sys.argv[1], int(sys.argv[2])
if depth == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"{folder}/{depth}", "w").write(str(os.getpid()))
if depth:
    subprocess.Popen([sys.executable, __file__, folder, str(depth - 1)], start_new_session=depth == 1)
time.sleep(600)
"""

TRAINER = """
import os, sys, time
from covey.runtime.child_process import ChildProcess
child = ChildProcess([sys.executable, sys.argv[1], sys.argv[2], "2"], grace=0.2)
if "fork" in sys.argv and os.fork() == 0:  # holds a copy of everything, like a worker of a data loader
    open(f"{sys.argv[2]}/forked", "w").write(str(os.getpid()))
    time.sleep(600)
open(f"{sys.argv[2]}/guard", "w").write(str(child.pid))
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds: float = 20.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)


def read_ids(folder: Path, names) -> list[int]:
    wait_until(lambda: all((folder / name).exists() and (folder / name).read_text() for name in names))
    return [int((folder / name).read_text()) for name in names]


@pytest.fixture
def family(tmp_path: Path) -> Path:
    script = tmp_path / "family.py"
    script.write_text(FAMILY)
    return script


@pytest.fixture
def trainer(tmp_path: Path, family: Path):
    """Starts a process with a family under guard; returns it and the ids of guard, child, grandchild and last one."""
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    started: list[int] = []

    def start(*options: str) -> tuple["subprocess.Popen[bytes]", list[int]]:
        command = [sys.executable, str(script), str(family), str(tmp_path), *options]
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": SOURCES}, start_new_session=True)
        ids = read_ids(tmp_path, ("guard", "2", "1", "0"))
        started.extend([process.pid, *ids])
        return process, ids

    yield start
    for one in started:
        if alive(one):
            os.kill(one, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda one: one.name)
def test_children_end_with_the_trainer_whatever_ends_it(trainer, number):
    process, ids = trainer()
    assert all(map(alive, ids))
    process.send_signal(number)
    process.wait(60)
    wait_until(lambda: not any(map(alive, ids)))


@pytest.mark.slow
def test_a_forked_process_does_not_keep_children_alive(trainer, tmp_path: Path):
    process, ids = trainer("fork")
    (forked,) = read_ids(tmp_path, ("forked",))
    try:
        process.kill()
        process.wait()
        wait_until(lambda: not any(map(alive, ids)))
        assert alive(forked)
    finally:
        os.kill(forked, signal.SIGKILL)


def test_a_child_that_dies_takes_its_descendants_along(tmp_path: Path, family: Path):
    child = ChildProcess([sys.executable, str(family), str(tmp_path), "2"], grace=60.0)
    first, *others = read_ids(tmp_path, ("2", "1", "0"))
    os.kill(first, signal.SIGKILL)
    assert child.process.wait(20) == 128 + signal.SIGKILL
    assert not any(map(alive, others))


def test_the_child_dies_with_its_guard(tmp_path: Path, family: Path):
    child = ChildProcess([sys.executable, str(family), str(tmp_path), "0"])
    (only,) = read_ids(tmp_path, ("0",))
    os.kill(child.pid, signal.SIGKILL)
    child.end()
    wait_until(lambda: not alive(only))


def test_a_child_has_time_to_end_by_itself(tmp_path: Path):
    saved = tmp_path / "saved"
    code = f"""
import signal, sys, time
def save(number, frame):
    time.sleep(0.3)
    open({str(saved)!r}, "w").close()
    sys.exit(7)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""
    child = ChildProcess([sys.executable, "-c", code], grace=30.0, stdout=subprocess.PIPE)
    assert child.process.stdout.readline() == b"ready\n"
    child.end()
    assert saved.exists()
    assert child.poll() == 7


def test_descendants_that_ignore_sigterm_are_killed(tmp_path: Path, family: Path):
    child = ChildProcess([sys.executable, str(family), str(tmp_path), "2"], grace=0.1)
    ids = read_ids(tmp_path, ("2", "1", "0"))
    child.end()
    assert not any(map(alive, ids))
    child.end()  # again: nothing to do


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(3)", 3), ("pass", 0), ("import os; os.abort()", 134)])
def test_a_child_keeps_its_exit_status_streams_and_signals(code: str, status: int):
    command = [sys.executable, "-c", f"print(input(), flush=True)\n{code}"]
    child = ChildProcess(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.process.communicate(b"hello\n", timeout=20)[0] == b"hello\n"
    assert child.poll() == status


def test_a_child_runs_beside_1100_open_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]  # its pipe gets a number that `select` refuses
    try:
        child = ChildProcess([sys.executable, "-c", "print('ran')"], stdout=subprocess.PIPE)
        assert child.process.communicate(timeout=20)[0] == b"ran\n"
    finally:
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_missing_program_is_named(tmp_path: Path):
    child = ChildProcess(["no-such-program"], stderr=subprocess.PIPE)
    assert child.process.communicate(timeout=20)[1] == b"no-such-program: No such file or directory\n"
    assert child.poll() == 127


def test_a_forked_process_ends_nothing(tmp_path: Path):
    child = ChildProcess([sys.executable, "-c", "import time; time.sleep(600)"])
    if (forked := os.fork()) == 0:
        child.end()
        os._exit(0 if child.poll() is None else 1)
    assert os.waitpid(forked, 0)[1] == 0
    time.sleep(0.2)
    assert child.poll() is None
    child.end()
    assert child.poll() is not None


BOMB = """
import os, time
for _ in range(40):  # a bounded bomb
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
print("all of them", flush=True)
time.sleep(600)
"""
LEAK = "held = [b'x' * (1 << 20) for _ in range(4000)]; import time; time.sleep(600)"


@pytest.mark.parametrize(("code", "status"), [(BOMB, 202), (LEAK, 201), ("pass", 0)])
def test_a_limit_ends_all_processes_with_its_status(code: str, status: int):
    child = ChildProcess([sys.executable, "-c", code], limits=Quota(memory=0.25, processes=8), stdout=subprocess.PIPE)
    assert child.process.wait(20) == status
    assert not alive(child.pid)
    assert child.process.stdout.read() in (b"", b"all of them\n")  # closed: nothing is left that could write
