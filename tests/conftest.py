"""Settings of all tests."""

import gc
import os
import shlex
import signal
import sys
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a script runs the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else processes that tests interrupt would ignore it, too

gc.disable()  # until all tests are collected: what is imported stays
# The same examples on every machine, however slow; ten times as many with COVEY_TEST_EXAMPLES=nightly.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True, max_examples=20)
hypothesis.settings.register_profile("nightly", hypothesis.settings.get_profile("steady"), max_examples=200)
hypothesis.settings.load_profile(os.environ.get("COVEY_TEST_EXAMPLES", "steady"))


def pytest_configure(config):
    """Load the fixtures where tests run; workers start when the process that hands out tests has come so far."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.support.fixtures")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs):
    """Fork the workers from one process that has imported what all of them need; CUDA does not outlive a fork."""
    if sys.platform == "linux" and not Path("/dev/nvidiactl").exists():
        for spec in specs:
            spec.python = shlex.join([sys.executable, str(Path(__file__).parent / "support" / "forking.py")])


def pytest_collection_finish():
    gc.enable()
