"""Weights of a policy that two processes share: every process sees them whole, under their checkpoint's names."""

import multiprocessing
import socket

import pytest
import torch
import torch.distributed as dist

import tiny
from covey.policy.weights import is_sharded, weight_update

peft = pytest.importorskip("peft")

PLAIN, LORA = "plain", "lora"


def policy(kind):
    model = tiny.model()
    if kind == PLAIN:
        return model
    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def one_process(rank, port, kind, results):
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
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
    still = sum(p.to_local().numel() for p in model.parameters())
    results.put((rank, is_sharded(model), local == still, same, again == list(gathered), local))
    dist.destroy_process_group()


def tiny_layers(model):
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).model.layers


@pytest.mark.parametrize("kind", [PLAIN, LORA])
def test_every_process_sees_the_whole_tensors_and_shards_stay_shards(kind):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawning = multiprocessing.get_context("spawn")
    results = spawning.Queue()
    processes = [spawning.Process(target=one_process, args=(rank, port, kind, results)) for rank in (0, 1)]
    for process in processes:
        process.start()
    try:
        found = sorted(results.get(timeout=120) for _ in processes)
    finally:
        for process in processes:
            process.join(20)
            process.kill()
    assert [one[:5] for one in found] == [(0, True, True, True, True), (1, True, True, True, True)]
    total = sum(p.numel() for p in policy(kind).parameters())
    assert sum(one[5] for one in found) == pytest.approx(total, rel=0.01)  # each held its half
