"""The kernel of decoding's attention against a softmax in float32: on a GPU, or in Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="runs the other")
def test_decode_kernel_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_triton
@pytest.mark.skipif(not INTERPRETED, reason="run by test_decode_kernel_in_the_interpreter, in a process of its own")
@pytest.mark.parametrize(("kv_heads", "queries", "dim"), [(1, 1, 16), (2, 3, 16), (2, 6, 32)])
def test_decode_kernel_is_a_softmax_over_prompt_and_own_tokens(kv_heads, queries, dim):
    from covey.engines.native.decode_kernel import disagreement

    assert disagreement(kv_heads, queries, dim, torch.float16, torch.device("cpu")) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_heads", "queries", "dim"), [(1, 1, 64), (2, 6, 128), (8, 4, 128)])
def test_decode_kernel_on_a_gpu(kv_heads, queries, dim):
    from covey.engines.native.decode_kernel import decode_kernel_works

    assert decode_kernel_works(kv_heads, queries, dim, torch.bfloat16, torch.device("cuda"))
