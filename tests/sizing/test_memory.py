"""The memory estimate against models small enough to count by hand."""

import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, Qwen3Config

from covey.config.grpo import GRPOConfig
from covey.core.batch import collate
from covey.core.records import FinishReason, Rollout
from covey.engines.native import number_formats
from covey.policy.fused import find_fused_layers, fused_layers
from covey.policy.scoring import TokenScorer
from covey.sizing.memory import (
    Opponents,
    Precision,
    ShardCounts,
    estimate,
    estimate_of,
    layer_bytes,
    optimizer_states,
    readable,
)
from covey.sizing.model_spec import SavedActivations, count_parameters

peft = pytest.importorskip("peft")

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
    return GRPOConfig(**{"bf16": False, "max_completion_length": 8, "num_generations": 4} | settings)


@pytest.mark.parametrize("config", [LlamaConfig(**TINY), Qwen3Config(**TINY, head_dim=8, tie_word_embeddings=True)])
def test_parameters_are_those_of_the_model(config):
    assert count_parameters(config)[0] == AutoModelForCausalLM.from_config(config).num_parameters()


def test_parameters_by_hand():
    # embeddings and head 2 * 100 * 16 = 3200; per layer: q, o 2 * 16 * 16 = 512, k, v 2 * 16 * 8 = 256,
    # mlp 3 * 16 * 32 = 1536, norms 2 * 16 = 32: 2336, twice 4672; last norm 16. 3200 + 4672 + 16 = 7888
    # packed by MKL, each linear layer of 512 outputs or fewer: (512 + 128) per input; per layer 6 of 16 inputs and one
    # of 32, so 640 * 128 = 81920, twice; the head 640 * 16
    assert count_parameters(LlamaConfig(**TINY))[:3] == (7888, 7888, 2 * 81920 + 10240)


def test_every_part_by_hand():
    # 2 groups of a prompt of 4 and 4 completions of 8: 72 tokens, one pass; float32
    m = estimate(LlamaConfig(**TINY), args(beta=0.1, gradient_checkpointing=False, use_cpu=True), prompt_tokens=4)
    assert m.weights == m.reference == m.gradients == 7888 * 4
    assert m.optimizer == 2 * 7888 * 4
    # per token and layer: 4 * 16 hidden + 2 * 16 query + 2 * 8 key/value + 2 * 32 intermediate = 176; beside the layers
    # 3 * 16; on the way back 3 * 32 + 2 * 16
    assert (m.micro_batch_tokens, m.micro_batches) == (72, 1)
    assert m.activations == 72 * (2 * 176 + 48 + 128) * 4
    assert m.logits == (2 * 72 + 64) * 100 * 4  # two tiles, and what is kept of the learned tokens
    assert m.head_gradient == 100 * 16 * 4
    # (8 rows * 8 tokens + 2 groups * 4) * 2 layers * (8 + 8) channels
    assert m.kv_cache == (8 * 8 + 2 * 4) * 2 * 16 * 4
    # the first backward pass is the only one: gradients are not there yet where activations are highest
    # embeddings and head are two: the other one comes late, where no piece of freed memory is as large
    assert m.late_gradient == 100 * 16 * 4
    # per token and layer, q 16, k 8, and what o and the MLP give, 16 each, leave gaps
    assert m.gaps == 72 * 2 * 56 * 4
    height = m.activations + m.gaps + m.logits
    assert m.training == 7888 * 4 * 4 + m.head_gradient + m.late_gradient + height
    assert m.sampling == 7888 * 4 * 4 + m.kv_cache + m.packed
    assert m.peak == max(m.training, m.sampling)


@pytest.mark.parametrize(
    ("changes", "tokens", "passes"),
    [
        ({}, 72, 1),  # 2 groups of 4 + 4 * 8 = 36
        ({"max_tokens_per_micro_batch": 71}, 36, 2),
        ({"max_tokens_per_micro_batch": 35}, 28, 4),  # 4 + 3 * 8, and what is left of the group
        ({"max_tokens_per_micro_batch": 5}, 12, 8),  # a completion is never cut
        ({"attn_layout": "padded"}, 96, 1),  # 8 rows of 12
        ({"attn_layout": "padded", "max_tokens_per_micro_batch": 40}, 36, 3),
        ({"gradient_accumulation_steps": 3, "per_device_train_batch_size": 4}, 36, 3),
        ({"per_device_train_batch_size": 800}, 900, 8),  # 1024 tokens keep a CPU busy, 28 groups of 36: 200 evenly in 8
    ],
)
def test_tokens_of_a_micro_batch_and_micro_batches_of_a_step(changes, tokens, passes):
    m = estimate(LlamaConfig(**TINY), args(use_cpu=True, **changes), prompt_tokens=4)
    assert (m.micro_batch_tokens, m.micro_batches) == (tokens, passes)


def test_several_micro_batches_hold_gradients_and_activations():
    m = estimate(LlamaConfig(**TINY), args(use_cpu=True, max_tokens_per_micro_batch=40), prompt_tokens=4)
    assert m.late_gradient == 0  # of two, one is added to what is there before the other is made
    assert m.training == m.resident + m.head_gradient + m.activations + m.gaps + m.logits + m.gradients


def test_on_a_gpu_freed_memory_serves_for_whatever_comes():
    m = estimate(LlamaConfig(**TINY), args(use_cpu=True), prompt_tokens=4, device="cuda")
    assert (m.gaps, m.late_gradient) == (0, 0)


@pytest.mark.parametrize(
    ("saved", "head", "late"),
    [([], 0, 0), (["embed_tokens"], 0, 1), (["lm_head"], 1, 0), (["embed_tokens", "lm_head"], 1, 1)],
)
def test_gradients_of_embeddings_trained_with_an_adapter(saved, head, late):
    adapter = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": saved}
    m = estimate(LlamaConfig(**TINY), args(use_cpu=True), prompt_tokens=4, peft=adapter)
    # rank 2 on q of two layers: 2 * 2 * (16 + 16) = 128; each of the two others 1600 numbers
    assert m.trainable == 128 + 1600 * len(saved)
    assert (m.head_gradient, m.late_gradient) == (1600 * 4 * head, 1600 * 4 * late)


@pytest.mark.parametrize(
    ("settings", "size", "unpacked"),
    [
        # of linear layers 2 * 2304 numbers; scales of 4 bytes for blocks of 64: 72
        ({"load_in_4bit": True}, 2304 + 72 * 4, 512),
        # scales of one byte, and 4 for each 256 of them: in every layer 7 weights
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 2304 + 72 + 14 * 4, 512),
        # one scale for each of 16 + 8 + 8 + 16 + 32 + 32 + 16 outputs, twice
        ({"load_in_8bit": True}, 4608 + 2 * 128 * 4, 512),
    ],
)
def test_weights_in_fewer_bits_take_their_scales_with_them(settings, size, unpacked):
    quantised = count_parameters(LlamaConfig(**TINY), {"r": 2}, BitsAndBytesConfig(**settings)).quantised
    assert quantised == (4608, size, unpacked)
    adapter = {"peft": {"r": 2, "target_modules": ["q_proj"]}, "quantization": BitsAndBytesConfig(**settings)}
    m = estimate(LlamaConfig(**TINY), args(use_cpu=True, model_init_kwargs={"dtype": "bfloat16"}), **adapter)
    # all others are made float32: embeddings, head and norms, 3280, and the adapter
    assert m.weights == size + (3280 + 128) * 4
    assert m.unpacked == unpacked * 4


def test_a_layer_that_is_named_is_not_quantised():
    config = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["down_proj", "lm_head"])
    assert count_parameters(LlamaConfig(**TINY), None, config).quantised.numbers == 4608 - 2 * 512


def test_a_layer_keeps_the_inputs_of_what_is_trained_alone():
    config = LlamaConfig(**TINY)
    some = count_parameters(config, {"r": 2, "target_modules": ["q_proj", "v_proj"]}).saved
    assert (some.norms, some.attention, some.mlp, some.down, some.ranks) == (False, 2, 0, False, 4)
    precision = Precision(4, 4, 4, False, some)
    # of 16 hidden units two norms' inputs and one layer's, q and result 2 * 16, k and v 2 * 8, 3 * 32 of the MLP, 4
    assert layer_bytes(config, precision) == (3 * 16 + 32 + 16 + 96 + 4) * 4


def test_a_rollout_is_never_cut():
    m = estimate(
        LlamaConfig(**TINY),
        args(max_tokens_per_micro_batch=5, gradient_checkpointing=False, use_cpu=True),
        prompt_tokens=4,
    )
    assert m.activations == (4 + 8) * (2 * 176 + 176) * 4


def test_micro_batches_grow_with_the_memory_of_a_gpu():
    # 64 rollouts in groups of a prompt of 4 and 4 completions of 8: 16 * 36 = 576 tokens; 8 padded rollouts are 96.
    batch = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8, "gradient_checkpointing": False}

    def planned(device_bytes, **changes):
        return estimate(
            LlamaConfig(**TINY), args(**batch, **changes), prompt_tokens=4, device="cuda", device_bytes=device_bytes
        )

    small, large = planned(2**20), planned(2**34)
    assert (small.room, small.micro_batch_tokens, small.micro_batches) == (0, 72, 8)
    assert (large.micro_batch_tokens, large.micro_batches) == (576, 1)
    some = planned(2**29)
    assert some.training - some.activations + some.room * some.activations // some.micro_batch_tokens <= 2**29
    assert planned(2**34, max_tokens_per_micro_batch=100).micro_batch_tokens == 72


def test_a_cpu_in_float32_samples_from_packed_weights(monkeypatch):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    config, half = LlamaConfig(**TINY), {"model_init_kwargs": {"dtype": "bfloat16"}}
    assert estimate(config, args(use_cpu=True)).packed == 174080 * 4
    assert estimate(config, args(use_cpu=True, **half)).packed == 0
    assert estimate(config, GRPOConfig(bf16=True, use_cpu=True)).packed == 0
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert estimate(config, args(use_cpu=True)).packed == 0


@pytest.mark.filterwarnings("ignore")
def test_rounded_copies_take_the_bytes_of_their_format(monkeypatch):
    config = LlamaConfig(**TINY)
    for able, size in ((True, 1), (False, 4)):  # without products of int8, they are numbers in float32
        monkeypatch.setitem(number_formats.FAST, ("cpu", "int8"), (lambda able=able: able, number_formats.Int8Onednn))
        assert estimate(config, args(use_cpu=True, engine_dtype="int8")).packed == 174080 * size
    assert estimate(config, args(engine_dtype="float8"), device="cuda").packed == 174080
    assert estimate(config, args(engine_dtype="bfloat16"), device="cuda").packed == 2 * 174080


def test_checkpointing_keeps_one_layer_and_the_borders():
    m = estimate(LlamaConfig(**TINY), args(gradient_checkpointing=True, use_cpu=True), prompt_tokens=4)
    assert m.activations == 72 * (2 * 16 + 176 + 176) * 4


def test_weights_for_servers_are_held_where_differences_are_sent():
    config, server = LlamaConfig(**TINY), {"use_vllm": True, "vllm_mode": "server", "use_cpu": True}
    lora = {"peft": {"r": 2, "target_modules": ["q_proj"]}}
    usual = estimate(config, args(**server))
    held = estimate(config, args(**server, vllm_weight_differences=True))
    assert (usual.sent, held.sent, held.peak - usual.peak) == (0, 7888 * 4, 7888 * 4)
    assert estimate(config, args(**server, vllm_weight_differences=True), **lora).sent == 0  # the adapter goes alone
    assert estimate(config, args(**server, vllm_weight_differences=True, vllm_lora_sync="merged"), **lora).sent > 0


def test_no_kl_penalty_means_no_reference():
    assert estimate(LlamaConfig(**TINY), args(beta=0.0)).reference == 0


def test_smaller_chunks_and_fewer_rows_shrink_their_parts():
    m = estimate(LlamaConfig(**TINY), args(logprob_chunk_size=10, max_concurrent_completions=2), prompt_tokens=4)
    assert m.logits == 2 * 10 * 100 * 4
    assert m.kv_cache == (2 * 8 + 4) * 2 * 16 * 4


def test_half_precision_weights_halve_what_is_stored():
    m = estimate(LlamaConfig(**TINY), args(model_init_kwargs={"dtype": "bfloat16"}))
    assert m.weights == 7888 * 2


def test_adapters_train_few_parameters_without_a_reference():
    # rank 4 on q (16 -> 16) of two layers: 2 * 4 * (16 + 16) = 256
    m = estimate(LlamaConfig(**TINY), args(beta=0.1), peft={"r": 4, "target_modules": ["q_proj"]})
    assert m.trainable == 256
    assert m.parameters == 7888 + 256
    assert (m.gradients, m.optimizer, m.reference) == (256 * 4, 2 * 256 * 4, 0)


def test_opponents_are_copies_of_the_policy():
    """Of "frozen" one; of "policy:5" and "policy:9" the four that are kept and the next one each: eleven models."""
    seats = ["frozen", "frozen", "policy:5", "policy:9", len, {"url": "http://x/v1"}]
    opponents = Opponents.of(seats, kept=4)
    assert opponents == (1, 10)
    whole = estimate(LlamaConfig(**TINY), args(), opponents=opponents)
    assert whole.opponents == 11 * 7888 * 4
    assert whole.peak == estimate(LlamaConfig(**TINY), args()).peak + whole.opponents
    adapter = {"r": 4, "target_modules": ["q_proj"]}  # 256 numbers, as above
    lora = estimate(LlamaConfig(**TINY), args(), peft=adapter, opponents=opponents)
    assert lora.opponents == lora.weights + 10 * 256 * 4


@pytest.mark.parametrize(
    ("way", "weights", "gradients", "optimizer"),
    [("multi_gpu", 1, 1, 1), ("zero1", 1, 1, 4), ("zero2", 1, 4, 4), ("zero3", 4, 4, 4), ("fsdp2", 4, 4, 4)],
)
def test_processes_hold_their_shares(way, weights, gradients, optimizer):
    spread = ShardCounts.of(way, 4)
    m = estimate(LlamaConfig(**TINY), args(beta=0.1, use_cpu=True), prompt_tokens=4, spread=spread)
    size = 7888 * 4
    assert (m.weights, m.reference, m.gradients, m.optimizer) == (
        *(size // weights, size // weights, size // gradients),
        2 * size // optimizer,
    )
    # outside of the layers 2 * 1600 + 16 = 3216, a layer 2336: weights of the first and two of the second, gradients of
    # the first and one; and all weights while the built-in engine samples
    assert m.gathered == ((3216 + 2 * 2336 + 3216 + 2336) * 4 if weights > 1 else 0)
    assert m.copy == (size if weights > 1 else 0)


def test_an_unknown_way_of_sharing_is_refused_by_name():
    with pytest.raises(ValueError, match="sharding 'zero4' is not known; it is one of multi_gpu"):
        ShardCounts.of("zero4", 2)


# ---- against what a pass keeps --------------------------------------------------------------------------------------

WIDE = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
)
PROMPT, LENGTH, GROUP = 64, 64, 8


def kept_by_a_pass(layout, dtype, autocast, checkpointing, adapter, fused=False):
    """Bytes of all tensors that autograd keeps of one forward pass, weights and autocast's copies of them aside."""
    model = AutoModelForCausalLM.from_config(WIDE, dtype=dtype).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if adapter:
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    chance = torch.Generator().manual_seed(0)
    ids = [torch.randint(5, 500, (PROMPT,), generator=chance).tolist()]
    ids += [torch.randint(5, 500, (LENGTH,), generator=chance).tolist() for _ in range(GROUP)]
    batch = collate([Rollout(ids[0], one, [True] * LENGTH, None, "", FinishReason.STOP) for one in ids[1:]])
    scorer = TokenScorer(lambda m: m, temperature=1.0, layout=layout, pad_token_id=0)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shapes = {tuple(p.shape) for p in model.parameters()}
    kept = {}

    def pack(tensor):
        is_copy = tuple(tensor.shape) in shapes or tuple(tensor.T.shape) in shapes if tensor.dim() == 2 else False
        if tensor.untyped_storage().data_ptr() not in weights and not is_copy:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no other takes its place
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        fused_layers(find_fused_layers(model) if fused else []),
    ):
        scorer(model, batch, entropy=True)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["shared_prefix", "packed", "padded"])
@pytest.mark.parametrize(
    ("dtype", "autocast", "adapter"),
    [
        (torch.float32, False, False),
        (torch.float32, True, False),
        (torch.bfloat16, True, False),
        (torch.float32, False, True),
        (torch.float32, True, True),
    ],
)
def test_activations_are_those_that_a_micro_batch_keeps(layout, dtype, autocast, adapter):
    kept = kept_by_a_pass(layout, dtype, autocast, False, adapter)
    tokens = PROMPT + GROUP * LENGTH if layout == "shared_prefix" else GROUP * (PROMPT + LENGTH)
    kept_inputs = count_parameters(WIDE, {"r": 2, "target_modules": "all-linear"} if adapter else None).saved
    # nobody keeps q, k, what o and the MLP give: 96 + 48 + 64 + 64; under adapters v, gate and up as well: 48 + 2 * 176
    assert kept_inputs == SavedActivations(norms=not adapter, ranks=14 * adapter, passing=672 if adapter else 272)
    updated = 4 if adapter else dtype.itemsize
    precision = Precision(dtype.itemsize, 2 if autocast else dtype.itemsize, updated, False, kept_inputs)
    assert tokens * (6 * layer_bytes(WIDE, precision) + 3 * 64 * 4) == pytest.approx(kept, rel=0.1)


@pytest.mark.parametrize("adapter", [False, True])
def test_fused_layers_keep_less(adapter):
    kept = kept_by_a_pass("shared_prefix", torch.float32, False, False, adapter, fused=True)
    kept_inputs = count_parameters(WIDE, {"r": 2, "target_modules": "all-linear"} if adapter else None).saved
    per_layer = layer_bytes(WIDE, Precision(4, 4, 4, False, kept_inputs, fused=True))
    assert (PROMPT + GROUP * LENGTH) * (6 * per_layer + 3 * 64 * 4) == pytest.approx(kept, rel=0.1)


def test_checkpointed_layers_keep_their_inputs():
    kept = kept_by_a_pass("shared_prefix", torch.float32, False, True, False)
    # 6 layers and what is beside them: 64 numbers a token each
    assert pytest.approx(kept, rel=0.1) == (PROMPT + GROUP * LENGTH) * (6 + 3) * 64 * 4


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


def test_optimizers_of_covey_keep_so_many_bytes():
    def size(optim, **more):
        return estimate(LlamaConfig(**TINY), args(optim=optim, **more)).optimizer

    # 7,888 numbers, 1,600 each in the embedding and the head, which have AdamW's two moments with muon
    assert size("adamw_torch") == size("adamw_stochastic") == 8 * 7888
    assert size("muon") == 4 * (7888 + 2 * 1600)
    assert size("adamw_stochastic", model_init_kwargs={"dtype": "bfloat16"}) == 8 * 7888  # moments in float32


@pytest.mark.parametrize(("size", "text"), [(12, "12 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB")])
def test_bytes_are_readable(size, text):
    assert readable(size) == text


@pytest.mark.parametrize(
    ("peft", "checkpointing", "numbers"),
    [(None, True, 7888), (None, False, 7888), ({"r": 2, "target_modules": ["q_proj"]}, False, 7888 + 2 * 2 * 32)],
)
def test_weights_that_autocast_copies(peft, checkpointing, numbers):
    # trained ones for a whole micro-batch, frozen ones as long as the backward pass needs them
    given = args(use_cpu=True, bf16=True, gradient_checkpointing=checkpointing)
    m = estimate(LlamaConfig(**TINY), given, prompt_tokens=4, peft=peft)
    assert m.casts == 2 * numbers


def test_checkpointed_layers_copy_frozen_weights_in_turn():
    given = args(use_cpu=True, bf16=True, gradient_checkpointing=True)
    m = estimate(LlamaConfig(**TINY), given, prompt_tokens=4, peft={"r": 2, "target_modules": ["q_proj"]})
    assert m.casts == 2 * (2 * 2 * 32 + 7888 // 2)


def test_a_loaded_model_is_planned_in_its_own_dtype(tmp_path):
    """The arguments name no dtype where a model object is given: 2 bytes a weight in bfloat16, half of float32's 4."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    args, model = (
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False),
        AutoModelForCausalLM.from_config(config),
    )
    whole = estimate_of(args, model).weights
    assert estimate_of(args, model, Opponents(1, 5)).opponents == 6 * whole
    assert estimate_of(args, model.to(torch.bfloat16)).weights * 2 == whole and args.model_init_kwargs is None


@pytest.mark.parametrize("adapter", [None, {"r": 2, "target_modules": ["q_proj", "down_proj"]}])
def test_a_loaded_model_is_planned_as_its_config(tmp_path, adapter):
    given = args(use_cpu=True, output_dir=str(tmp_path), gradient_checkpointing=False)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
    if adapter is not None:
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **adapter))
    loaded, planned = estimate_of(given, model), estimate(LlamaConfig(**TINY), given, peft=adapter)
    for part in ("weights", "gradients", "activations", "gaps", "packed", "kv_cache", "training", "sampling"):
        assert getattr(loaded, part) == getattr(planned, part), part
    assert loaded.packed > 0 or not torch.backends.mkl.is_available()


def test_models_are_counted_whole_under_zero3(monkeypatch):
    from transformers.integrations import deepspeed

    class Zero3:
        def is_zero3(self):
            return True

    config, zero3 = LlamaConfig(**TINY), Zero3()
    whole = count_parameters(config)
    monkeypatch.setattr(deepspeed, "_hf_deepspeed_config_weak_ref", weakref.ref(zero3))
    assert deepspeed.is_deepspeed_zero3_enabled()
    assert count_parameters(config) == whole
    assert deepspeed.is_deepspeed_zero3_enabled()


@pytest.mark.parametrize(
    "loss, top, states", [("divergence", -1, 16 * 8 * 16 * 4), ("divergence", 20, 0), ("advantage", 0, 0)]
)
def test_hidden_states_of_a_teacher_count_with_the_whole_vocabulary(loss, top, states):
    settings = {"teacher": "start", "teacher_loss": loss, "teacher_top_k": top, "per_device_train_batch_size": 16}
    found = estimate(LlamaConfig(**TINY), args(**settings))
    assert found.teacher_states == states  # rollouts, tokens, hidden size, bytes
    assert found.resident == found.weights + found.optimizer + found.reference + states
