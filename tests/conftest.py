"""Fixtures shared by all tests."""

import os

import hypothesis
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

import tiny

# The same examples on every machine, however slow.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True)
hypothesis.settings.load_profile("steady")


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny models run fastest on one thread, and the machine may be shared."""
    torch.set_num_threads(1)


@pytest.fixture
def tiny_tokenizer():
    return tiny.tokenizer()


@pytest.fixture
def tiny_model():
    return tiny.model()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return tiny.folder(tmp_path_factory.mktemp("tiny") / "tiny-llama")
