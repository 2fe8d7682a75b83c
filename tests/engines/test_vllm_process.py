"""Starting vLLM: what is needed, and what a process keeps. Without vLLM; with it, see tests/real_vllm."""

import importlib.metadata
import multiprocessing
import os
import random
import signal

import numpy as np
import pytest
import torch

from covey.engines.vllm_colocate import process
from covey.engines.vllm_colocate.process import preserved_process_state, require_vllm, start_vllm


def absent(name):
    raise importlib.metadata.PackageNotFoundError(name)


def test_missing_vllm_names_the_install_command(monkeypatch):
    monkeypatch.setattr(process.importlib.metadata, "version", absent)
    with pytest.raises(ImportError, match=r"use_vllm=True needs vLLM.*pip install vllm"):
        start_vllm({"model": "any"})


@pytest.mark.parametrize("old", ["0.8.5", "0.27.1"])
def test_an_old_vllm_is_refused(monkeypatch, old):
    monkeypatch.setattr(process.importlib.metadata, "version", lambda name: old)
    with pytest.raises(ImportError, match=f"vLLM {old} is too old: 0.28 or newer"):
        require_vllm()


@pytest.mark.parametrize("new", ["0.28.0", "0.32.0+cpu", "1.0.0rc1", "a-build-of-mine"])
def test_newer_versions_and_own_builds_are_accepted(monkeypatch, new):
    monkeypatch.setattr(process.importlib.metadata, "version", lambda name: new)
    assert require_vllm() == new


def meddle():
    """What vLLM does to a process, and a little more."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    torch.set_num_threads = lambda count: None
    torch.set_default_dtype(torch.bfloat16)
    torch.set_float32_matmul_precision("medium")
    torch.set_grad_enabled(False)
    multiprocessing.set_start_method("spawn", force=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ.update(LOCAL_WORLD_SIZE="1", VLLM_OF_ITS_OWN="1", COVEY_TEST="changed")


def test_process_state_is_restored_after_starting_vllm(monkeypatch):
    monkeypatch.setenv("COVEY_TEST", "mine")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("VLLM_OF_ITS_OWN", "0")
    before = (torch.set_num_threads, torch.get_float32_matmul_precision(), multiprocessing.get_start_method(True))
    handler = signal.getsignal(signal.SIGTERM)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    expected = (torch.rand(3), random.random(), np.random.rand())
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    with pytest.raises(RuntimeError, match="did not start"), preserved_process_state():
        meddle()
        raise RuntimeError("did not start")
    drawn = (torch.rand(3), random.random(), np.random.rand())
    assert torch.equal(drawn[0], expected[0])
    assert drawn[1:] == expected[1:]
    after = (torch.set_num_threads, torch.get_float32_matmul_precision(), multiprocessing.get_start_method(True))
    assert after == before
    assert signal.getsignal(signal.SIGTERM) is handler
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert "LOCAL_WORLD_SIZE" not in os.environ
    assert os.environ["COVEY_TEST"] == "mine"
    assert os.environ["VLLM_OF_ITS_OWN"] == "1", "vLLM reads its own later"
