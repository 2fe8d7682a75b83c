"""Layers recompute for want of memory alone, and the result is bit for bit the same."""

import pytest
import torch
from transformers import PhiConfig, PhiForCausalLM

from covey.core.model import decoder_of
from covey.core.packing import ActivationRoom
from tests.support import mixtures, runs, tiny

LAYERS = 4


def lora():
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.3, task_type="CAUSAL_LM")


def with_dropout():
    torch.manual_seed(0)
    usual = tiny.config(num_hidden_layers=LAYERS)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    ids = {name: getattr(usual, name) for name in (*names, "pad_token_id", "eos_token_id", "bos_token_id")}
    return PhiForCausalLM(PhiConfig(**ids, resid_pdrop=0.3, embd_pdrop=0.1, partial_rotary_factor=0.5))


MODELS = {
    "dense": lambda: {"model": tiny.model(num_hidden_layers=LAYERS)},
    "dropout": lambda: {"model": with_dropout()},
    "LoRA": lambda: {"model": tiny.model(num_hidden_layers=LAYERS), "peft_config": lora()},
    "mixture": lambda: {"model": mixtures.model("Qwen3Moe")},
}


def squares(completions, **kwargs):
    """Rewards of which none is the mean of its group, so that every rollout has a gradient: 0, 1, 4, 9."""
    return [float((number % 4) ** 2) for number in range(len(completions))]


def trained(tmp_path, name, room, **changes):
    """A trainer after two steps, and the layers that each of its passes recomputed."""
    changes = {"gradient_checkpointing": True, "attn_layout": "shared_prefix", **changes}
    trainer = runs.trainer(tmp_path, parts={"reward_funcs": squares, **MODELS[name]()}, **changes)
    runner = trainer.updates.runner
    runner.activations = room
    recomputed, compute = [], trainer.compute_loss

    def count(layer):
        def counted(module, args):
            if torch._C._current_graph_task_id() != -1:  # in a backward pass
                recomputed[-1].append(layer)

        return counted

    def counted_pass(model, inputs):
        recomputed.append([])
        return compute(model, inputs)

    trainer.compute_loss = counted_pass
    for number, layer in enumerate(decoder_of(trainer.model).layers):
        layer.mlp.register_forward_pre_hook(count(number))
    trainer.train()
    return trainer, [sorted(set(layers)) for layers in recomputed]


def room_for(layers):
    """Room for so many of any number of tokens."""
    return ActivationRoom(size=layers, recomputed=0, layer=0, layers=layers)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", ["shared_prefix", pytest.param("packed", marks=pytest.mark.slow)])
def test_weights_are_bit_for_bit_those_of_layers_that_recompute(tmp_path, name, layout):
    plain, recomputed = trained(tmp_path / "plain", name, None, attn_layout=layout)
    layers = len(decoder_of(plain.model).layers)
    assert recomputed and all(one == list(range(layers)) for one in recomputed)
    for kept in (1, layers):
        trainer, recomputed = trained(tmp_path / str(kept), name, room_for(kept), attn_layout=layout)
        assert recomputed and all(one == list(range(layers - kept)) for one in recomputed)
        for ours, theirs in zip(runs.weights(trainer), runs.weights(plain), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_the_tokens_of_a_micro_batch_decide(tmp_path):
    """Groups of 4 completions of 6 tokens each, with prompts of 4: passes of 28 tokens, or of 16 with two of them."""
    room = ActivationRoom(size=28 * 3, recomputed=1, layer=2, layers=LAYERS)
    _, whole = trained(tmp_path / "whole", "dense", room, max_tokens_per_micro_batch=28)
    _, parts = trained(tmp_path / "parts", "dense", room, max_tokens_per_micro_batch=16)
    assert whole == [[0, 1]] * 4  # 1 + (84 - 28) // 56 keep
    assert parts == [[0]] * 8  # 1 + (84 - 16) // 32


def test_the_default_keeps_all_where_there_is_room(tmp_path):
    assert runs.trainer(tmp_path, gradient_checkpointing=True).updates.runner.activations.kept(80) == 2
    asked = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    assert runs.trainer(tmp_path, **asked).updates.runner.activations is None


@pytest.mark.slow
def test_padded_rows_recompute_all_layers(tmp_path):
    _, recomputed = trained(tmp_path, "dense", room_for(LAYERS), attn_layout="padded")
    assert recomputed and all(one == list(range(LAYERS)) for one in recomputed)


@pytest.mark.slow
@pytest.mark.parametrize("failures", [1, 4])
def test_out_of_memory_keeps_fewer_before_it_halves_the_micro_batch(tmp_path, failures):
    plain, _ = trained(tmp_path / "plain", "LoRA", None)
    parts = {"reward_funcs": squares, **MODELS["LoRA"]()}
    trainer = runs.trainer(tmp_path, parts=parts, gradient_checkpointing=True, attn_layout="shared_prefix")
    runner, compute, kept = trainer.updates.runner, trainer.compute_loss, []
    runner.activations = room_for(LAYERS)

    def short_of_memory(model, inputs, *args, **kwargs):
        kept.append(sum(not layer.gradient_checkpointing for layer in decoder_of(trainer.model).layers))
        loss = compute(model, inputs, *args, **kwargs)
        if len(kept) <= failures:
            raise torch.OutOfMemoryError("injected")
        return loss

    trainer.compute_loss = short_of_memory
    with pytest.warns(UserWarning, match="memory ran out in a micro-batch") as caught:
        trainer.train()
    assert kept[: failures + 1] == [4, 2, 1, 0, 0][: failures + 1] and kept[-1] == kept[failures]
    assert (runner.limit is None) == (failures < 4)
    texts = [str(one.message) for one in caught if "memory ran out" in str(one.message)]
    assert "in which 4 layers kept their activations; it is repeated with 2" in texts[0]
    assert len(texts) == 1 + (failures == 4)
    if failures < 4:
        for ours, theirs in zip(runs.weights(trainer), runs.weights(plain), strict=True):
            assert torch.equal(ours, theirs)
