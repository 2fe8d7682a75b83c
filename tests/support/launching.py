"""Launches scripts of this folder on several CPU processes, as a user would."""

import contextlib
import faulthandler
import importlib
import itertools
import os
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock

from tests.support import forking, tiny

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "examples" / "accelerate_configs"


TAKEN = itertools.count()


def free_port() -> int:
    """A free port below those of connections, from a range of this process: no other takes it before it is used."""
    while True:
        port = 10_000 + os.getpid() % 40 * 500 + next(TAKEN) % 500
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def environment(**more: str) -> dict[str, str]:
    """Of a child that finds the tests' own modules, one thread and no GPU."""
    folders = [str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    return {**found, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", **more}


def run(command: list[str], seconds: float = 300, **more: str) -> str:
    """Run a Python program to its end; what it printed."""
    return succeeded(forking.run(command, env=environment(**more), timeout=seconds))


def succeeded(done: "subprocess.CompletedProcess[str]") -> str:
    """Check that a program ended well; what it printed."""
    errors = done.stderr if len(done.stderr) <= 20_000 else f"{done.stderr[:10_000]}\n[...]\n{done.stderr[-10_000:]}"
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{errors}"
    return done.stdout


def accelerate(config: str, *words: str, seconds: float = 300, **more: str) -> str:
    """`accelerate launch` with a config that comes with Covey, on two processes."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{config}.yaml")]
    options = ["--num_processes", "2", "--main_process_port", str(free_port())]
    return run([*launcher, *options, *words], seconds, **more)


def torchrun(*words: str, seconds: float = 300) -> str:
    """torch's own launcher, on two processes that Python is started for, as a user would."""
    address = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", *address, *words]
    return succeeded(subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=seconds))


def in_a_child() -> None:
    """For the scripts that are launched, before they begin."""
    faulthandler.enable()  # a process that aborts at its end says where its threads are
    tiny.quick()
    if find_spec("deepspeed") is not None:
        of_processes = importlib.import_module("deepspeed.comm.torch")
        of_processes.build_shm_op = lambda: None  # takes minutes to compile; gloo does the same


def once(factory, name, make) -> Path:
    """The folder that `make` was called with, by one of the processes among which pytest spreads the tests.

    Args:
        factory: pytest's `tmp_path_factory`.
        name: of the folder.
        make: what takes long, given the empty folder.
    """
    mine = factory.getbasetemp()
    folder = (mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine) / name
    done = folder.with_suffix(".done")
    with FileLock(folder.with_suffix(".lock")):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder
