"""Weights of a policy that two processes share: every process sees them whole, under their checkpoint's names."""

import json
import sys

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from covey.policy.sharded_tensors import is_sharded
from covey.policy.weights import weight_update
from tests.support import forking, tiny, tiny_vision
from tests.support.launching import environment, free_port
from tests.support.traffic import Traffic

peft = pytest.importorskip("peft")

PLAIN, LORA = "plain", "lora"


def policy(kind):
    model = tiny.model()
    if kind == PLAIN:
        return model
    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def one_process(rank, port, kind, output):
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2)
    model = policy(kind)
    whole = {name: tensor.clone() for name, tensor in weight_update(model, 0).tensors()}
    for layer in tiny_layers(model):
        fully_shard(layer)
    fully_shard(model)
    update = weight_update(model, 0)
    local = sum(p.to_local().numel() for p in model.parameters())
    gathered = {spec.name: tensor.clone() for spec, tensor in update.checked()}
    again = [name for name, _ in update.tensors()]
    same = gathered.keys() == whole.keys() and all(torch.allclose(gathered[n], whole[n], atol=1e-6) for n in whole)
    rounds_alike, halved = narrow(model, gathered)
    still = sum(p.to_local().numel() for p in model.parameters())
    found = is_sharded(model), local == still, same, again == list(gathered), rounds_alike, halved, local
    with open(output, "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()


def narrow(model, gathered):
    """Whether bfloat16 comes as it would be made of float32, and whether what is no adapter's takes half the bytes."""
    with Traffic() as wide:
        list(weight_update(model, 0).tensors())
    with Traffic() as halves:
        rounded = {name: tensor.clone() for name, tensor in weight_update(model, 0, dtype=torch.bfloat16).tensors()}
    alike = all(torch.equal(one, gathered[n].to(one.dtype)) for n, one in rounded.items())
    vectors = sum(one.numel() for one in rounded.values() if one.dtype == torch.float32) * 4
    adapted = [m for m in model.modules() if hasattr(m, "base_layer")]  # merged in float32 and rounded after it
    kept = vectors + sum(p.numel() * 4 for m in adapted for p in m.parameters())
    return alike and vectors > 0, wide.gathered - halves.gathered == (wide.gathered - kept // 2) // 2


def tiny_layers(model):
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).model.layers


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PLAIN, LORA])
def test_every_process_gets_whole_tensors_and_keeps_shards(kind, tmp_path):
    port, paths = str(free_port()), [tmp_path / "0", tmp_path / "1"]
    commands = [[sys.executable, __file__, str(rank), port, kind, str(path)] for rank, path in enumerate(paths)]
    processes = [forking.Forked(command, env=environment()) for command in commands]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    found = [json.loads(path.read_text()) for path in paths]
    assert [one[:6] for one in found] == [[True] * 6] * 2
    total = sum(p.numel() for p in policy(kind).parameters())
    assert sum(one[6] for one in found) == pytest.approx(total, rel=0.01)  # each held its half


@pytest.mark.parametrize("family", ["gemma3", "llava_next"])
def test_model_from_a_config_uses_checkpoint_names(tmp_path, family):
    """transformers looks for them under the class of the model, which FSDP2 changes."""
    from torch.distributed.fsdp import fully_shard

    model, _ = tiny_vision.make(family)
    model.save_pretrained(tmp_path)
    saved = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        update = weight_update(fully_shard(model), 0)
    finally:
        dist.destroy_process_group()
    assert {spec.name: spec.shape for spec in update.specs} == saved


def test_adapter_on_separately_sharded_embeddings_is_merged():
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], init_lora_weights=False)
    model = peft.get_peft_model(tiny.model(tie_word_embeddings=False), config)
    whole = {name: tensor.clone() for name, tensor in weight_update(model, 0).tensors()}
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        fully_shard(model.get_input_embeddings())
        shared = dict(weight_update(fully_shard(model), 0).tensors())
    finally:
        dist.destroy_process_group()
    assert shared.keys() == whole.keys()
    assert all(torch.equal(shared[name], tensor) for name, tensor in whole.items())


if __name__ == "__main__":
    one_process(*sys.argv[1:])
