"""The main thread is interrupted for what another thread sees, and only then."""

import signal
import sys
import time

import pytest

from covey.trainer.distributed import collectives
from covey.trainer.distributed.collectives import PeerFailure, interrupted_when
from tests.support import forking, launching


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(collectives, "WATCH_EVERY", 0.01)
    monkeypatch.setattr(collectives, "PATIENCE", 0.01)


def test_waiting_and_computing_are_interrupted_with_the_reason():
    with pytest.raises(PeerFailure, match="rank 1 failed"), interrupted_when(lambda: "rank 1 failed"):
        time.sleep(60)
    with pytest.raises(PeerFailure), interrupted_when(lambda: "rank 1 failed"):
        while True:
            pass


def test_it_is_not_swallowed_by_what_catches_exceptions():
    with pytest.raises(PeerFailure), interrupted_when(lambda: "rank 1 failed"):
        try:
            time.sleep(60)
        except Exception:
            time.sleep(60)


def test_without_a_reason_only_the_handler_is_restored():
    before = signal.getsignal(signal.SIGURG)
    asked = []
    with interrupted_when(lambda: asked.append(1)):
        while len(asked) < 3:
            time.sleep(0.01)
    assert signal.getsignal(signal.SIGURG) == before


def test_a_process_that_ignores_interruption_is_ended():
    stuck = """
import signal, threading, time
from covey.trainer.distributed import collectives
collectives.WATCH_EVERY = collectives.PATIENCE = collectives.LAST_RESORT = 0.05
with collectives.interrupted_when(lambda: "rank 1 failed"):
    signal.signal(signal.SIGURG, signal.SIG_IGN)
    time.sleep(60)
"""
    ended = forking.run([sys.executable, "-c", stuck], env=launching.environment(), timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.strip() == "rank 1 failed"
