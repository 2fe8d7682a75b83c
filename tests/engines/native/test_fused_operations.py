"""Norms and rotary embeddings compiled for decoding: the same numbers, compiled once for all layers and batch sizes."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM

from covey.engines.native.inference_contexts import fused_operations
from tests.engines.native.test_native_engine import configs

CONFIGS = {config.model_type: config for config in configs() if config.model_type in ("qwen2", "qwen3", "gemma2")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["qwen3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen2", "gemma2"))]
)
def test_fused_operations_compute_the_same(kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], attn_implementation="eager").eval()
    originals = [type(module).__name__ for module in model.modules() if "forward" in vars(module)]
    compiler = CompileCounter()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for sequences in (8, 64, 16):
            ids = torch.randint(0, CONFIGS[kind].vocab_size, (sequences, 1))
            expected = model(ids).logits
            with fused_operations(model, torch.bfloat16, compiler):
                torch.testing.assert_close(model(ids).logits, expected, atol=0.02, rtol=0.02)
    assert 2 <= compiler.frame_count <= 4  # a norm (or two, with those of queries and keys), a rotary embedding
    assert [type(module).__name__ for module in model.modules() if "forward" in vars(module)] == originals


@pytest.mark.slow
def test_results_are_in_the_type_of_products():
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen2"], attn_implementation="eager").eval()
    norm = model.model.norm
    with fused_operations(model, torch.bfloat16, "eager"):
        assert norm(torch.ones(2, 3, CONFIGS["qwen2"].hidden_size)).dtype == torch.bfloat16
    assert norm(torch.ones(2, 3, CONFIGS["qwen2"].hidden_size)).dtype == torch.float32
