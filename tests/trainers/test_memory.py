"""The memory estimate against models small enough to count by hand."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from covey.trainers.grpo_config import GRPOConfig
from covey.trainers.memory import count_parameters, estimate, optimizer_states, readable

TINY = {
    "vocab_size": 100,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def args(**settings):
    return GRPOConfig(bf16=False, max_completion_length=8, num_generations=4, **settings)


@pytest.mark.parametrize("config", [LlamaConfig(**TINY), Qwen3Config(**TINY, head_dim=8, tie_word_embeddings=True)])
def test_parameters_are_those_of_the_model(config):
    assert count_parameters(config)[0] == AutoModelForCausalLM.from_config(config).num_parameters()


def test_parameters_by_hand():
    # embeddings and head 2 * 100 * 16 = 3200; per layer: q, o 2 * 16 * 16 = 512, k, v 2 * 16 * 8 = 256,
    # mlp 3 * 16 * 32 = 1536, norms 2 * 16 = 32: 2336, twice 4672; last norm 16. 3200 + 4672 + 16 = 7888
    # linear: all but the embedding 1600 and the norms 80
    assert count_parameters(LlamaConfig(**TINY)) == (7888, 7888, 6208)


def test_every_part_by_hand():
    # prompt 4 + completion 8 = 12 tokens; 8 completions = 96 tokens; float32
    m = estimate(LlamaConfig(**TINY), args(beta=0.1, gradient_checkpointing=False, use_cpu=True), prompt_tokens=4)
    assert m.weights == m.reference == m.gradients == 7888 * 4
    assert m.optimizer == 2 * 7888 * 4
    # per token and layer: 4 * 16 hidden + 3 * 16 query + 3 * 8 key/value + 4 * 32 intermediate = 264
    assert m.activations == 96 * 2 * 264 * 4
    assert m.logits == 4 * 96 * 100 * 4
    # (8 rows * 8 tokens + 2 groups * 4) * 2 layers * (8 + 8) channels
    assert m.kv_cache == (8 * 8 + 2 * 4) * 2 * 16 * 4
    assert m.training == 7888 * 4 * 5 + m.activations + m.logits
    assert m.sampling == 7888 * 4 * 4 + m.kv_cache + m.packed
    assert m.peak == max(m.training, m.sampling)


def test_the_memory_knob_bounds_activations_and_large_batches_stop_at_what_keeps_a_cpu_busy():
    config = LlamaConfig(**TINY)
    off = {"gradient_checkpointing": False, "use_cpu": True}
    assert estimate(config, args(max_tokens_per_micro_batch=50, **off), prompt_tokens=4).activations == 50 * 2 * 264 * 4
    many = args(per_device_train_batch_size=800, **off)
    assert estimate(config, many, prompt_tokens=4).activations == 1024 * 2 * 264 * 4


def test_a_rollout_is_never_cut():
    m = estimate(LlamaConfig(**TINY), args(max_tokens_per_micro_batch=5, gradient_checkpointing=False), prompt_tokens=4)
    assert m.activations == (4 + 8) * 2 * 264 * 4


def test_a_cpu_samples_in_float32_from_a_second_copy_of_the_linear_layers(monkeypatch):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    config, half = LlamaConfig(**TINY), {"model_init_kwargs": {"dtype": "bfloat16"}}
    assert estimate(config, args(use_cpu=True)).packed == 6208 * 4
    assert estimate(config, args(use_cpu=True, **half)).packed == 0
    assert estimate(config, GRPOConfig(bf16=True, use_cpu=True)).packed == 0
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert estimate(config, args(use_cpu=True)).packed == 0


def test_checkpointing_keeps_one_layer_and_the_borders():
    m = estimate(LlamaConfig(**TINY), args(gradient_checkpointing=True), prompt_tokens=4)
    assert m.activations == 96 * (2 * 16 + 264) * 4


def test_no_kl_penalty_means_no_reference():
    assert estimate(LlamaConfig(**TINY), args(beta=0.0)).reference == 0


def test_smaller_chunks_and_fewer_rows_shrink_their_parts():
    m = estimate(LlamaConfig(**TINY), args(logprob_chunk_size=10, max_concurrent_completions=2), prompt_tokens=4)
    assert m.logits == 4 * 10 * 100 * 4
    assert m.kv_cache == (2 * 8 + 4) * 2 * 16 * 4


def test_half_precision_weights_halve_what_is_stored():
    m = estimate(LlamaConfig(**TINY), args(model_init_kwargs={"dtype": "bfloat16"}))
    assert m.weights == 7888 * 2


def test_adapters_train_few_parameters_and_need_no_reference_copy():
    pytest.importorskip("peft")
    # rank 4 on q (16 -> 16) of two layers: 2 * 4 * (16 + 16) = 256
    m = estimate(LlamaConfig(**TINY), args(beta=0.1), peft={"r": 4, "target_modules": ["q_proj"]})
    assert m.trainable == 256
    assert m.parameters == 7888 + 256
    assert (m.gradients, m.optimizer, m.reference) == (256 * 4, 2 * 256 * 4, 0)


@pytest.mark.parametrize(
    ("optim", "states"),
    [
        ("adamw_torch", 2),
        ("adamw_torch_fused", 2),
        ("adamw_bnb_8bit", 0.5),
        ("lion_32bit", 1),
        ("adafactor", 0),
        ("sgd", 0),
    ],
)
def test_optimizers_keep_so_many_numbers(optim, states):
    assert optimizer_states(optim) == states


@pytest.mark.parametrize(("size", "text"), [(12, "12 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB")])
def test_bytes_are_readable(size, text):
    assert readable(size) == text
