"""Fixtures shared by all tests."""

import gc
import os
import signal

import hypothesis
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a script runs the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else processes that tests interrupt would ignore it, too

import torch

from covey.trainer.integrations.report import RunReport
from tests.support import known_attributes, runs, tiny

gc.disable()  # until all tests are collected: what is imported stays
# The same examples on every machine, however slow; ten times as many with COVEY_TEST_EXAMPLES=nightly.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True, max_examples=20)
hypothesis.settings.register_profile("nightly", hypothesis.settings.get_profile("steady"), max_examples=200)
hypothesis.settings.load_profile(os.environ.get("COVEY_TEST_EXAMPLES", "steady"))


def pytest_collection_finish():
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _quick():
    """Before each module, because what earlier ones leave would be gone through by every trainer that starts."""
    tiny.quick()


@pytest.fixture(autouse=True)
def _known_attributes():
    known_attributes.guard()


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny models run fastest on one thread, and the machine may be shared."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _pages(request, monkeypatch):
    if request.node.get_closest_marker("pages"):
        monkeypatch.setattr(RunReport, "write", runs.write_page)


@pytest.fixture
def tiny_tokenizer():
    return tiny.tokenizer()


@pytest.fixture
def tiny_model():
    return tiny.model()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return tiny.folder(tmp_path_factory.mktemp("tiny") / "tiny-llama")
