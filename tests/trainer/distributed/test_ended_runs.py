"""Ctrl-C, and kill -9, while a server owes completions or takes weights: the run ends, and its server with it."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.support import forking
from tests.support.launching import environment

SCRIPT = Path(__file__).parents[2] / "support" / "served_run.py"
PLACES = {"generation": ("/v1/completions", 2), "weights": ("/update_weights", 1)}
"""What the server never answers; its first completions are the look at what its log-probs mean."""

SECONDS = 20.0
"""For everything to be gone: a second or two, and slack for a machine that is shared."""


def wait_for(condition, seconds, what):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.05)


def processes(word):
    """Ids of processes whose command line holds `word`."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if word in command and int(path.parent.name) != os.getpid():
            found.add(int(path.parent.name))
    return found


@pytest.fixture
def run(tmp_path):
    """Starts a run and returns it once its server owes an answer."""
    started = []

    def start(place):
        path, number = PLACES[place]
        with (tmp_path / "errors.log").open("wb") as errors:
            command = [sys.executable, str(SCRIPT), str(tmp_path), path, str(number)]
            one = forking.Forked(command, env=environment(), stdout=errors, stderr=errors, start_new_session=True)
        started.append(one)
        log = tmp_path / "server.log"

        def asked():
            assert one.poll() is None, (tmp_path / "errors.log").read_text()
            return log.exists() and log.read_text().split().count(path) >= number

        wait_for(asked, 240, "the server was never asked")
        time.sleep(0.3)  # in the middle of it
        return one

    yield start
    for one in started:
        one.kill()
        one.wait()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("place", ["generation", pytest.param("weights", marks=pytest.mark.slow)])
def test_an_interrupt_ends_run_and_server_within_seconds(run, tmp_path, place):
    one = run(place)
    one.send_signal(signal.SIGINT)
    began = time.monotonic()
    one.wait(SECONDS)
    print(f"{time.monotonic() - began:.1f} s")
    said = (tmp_path / "errors.log").read_text()
    assert said.splitlines()[-1].startswith("covey: stopped") and "Traceback" not in said, said
    assert one.returncode != 0
    wait_for(lambda: not servers(), SECONDS, "its server is still there")


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")
@pytest.mark.slow
def test_when_the_trainer_is_killed_its_server_ends_too(run):
    one = run("generation")
    assert servers()
    one.send_signal(signal.SIGKILL)
    one.wait(SECONDS)
    wait_for(lambda: not servers(), SECONDS, "its server is still there")


def servers():
    return processes("fake_vllm.py")
