"""Fixtures of all tests, with what they import."""

import logging

import pytest
import torch

from covey.trainer.integrations.report import RunReport
from tests.support import known_attributes, runs, tiny


@pytest.fixture(scope="module", autouse=True)
def _quick():
    """Before each module, because what earlier ones leave would be gone through by every trainer that starts."""
    tiny.quick()
    for name, logger in logging.Logger.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True  # else pytest adds handlers to each of 80 and removes them, six times in every test


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
