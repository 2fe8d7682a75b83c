"""Runs of models whose checkpoints call their weights otherwise than they do themselves, saved in every way.

Usage under a launcher: named_runs.py OUTPUT CASE [CASE ...]
"""

import copy
import os
import sys
import warnings
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from covey.policy.adapters import has_adapter
from covey.policy.weights import weight_update
from tests.support import launching, mixtures, runs, tiny, tiny_vision, vision_runs
from tests.support.traffic import Traffic

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
READERS = {"experts": AutoModelForCausalLM, "images": AutoModelForImageTextToText}
MAKERS = {
    "experts": lambda: (mixtures.model("Mixtral"), tiny.tokenizer()),
    "images": lambda: tiny_vision.make("gemma3"),
}
CASES = [f"{kind}, {made}{lora}" for kind in READERS for made in ("made", "read") for lora in ("", ", lora")]
"""What the model knows, whether it was made from a config or read from a folder, and what is trained."""


@cache
def models():
    """One of each kind and its processing class, made before a config tells transformers of ZeRO-3."""
    return {kind: make() for kind, make in MAKERS.items()}


def write_models(folder):
    """Write the models that are read."""
    for kind, (model, _) in models().items():
        model.save_pretrained(folder / kind)


def train(case, output):
    """One step in this process or with others, saved; what is sent then, and the bytes received for it, by route."""
    kind, made, *lora = case.split(", ")
    model, processor = models()[kind]
    model = str(output.parent / kind) if made == "read" else copy.deepcopy(model)
    parts = {"model": model, "processing_class": processor, "train_dataset": vision_runs.ROWS}
    if kind == "experts":
        parts["train_dataset"] = tiny.rows(4)
    if lora:
        from peft import LoraConfig

        parts["peft_config"] = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    settings = {"per_device_train_batch_size": 8 // PROCESSES, "gradient_accumulation_steps": 1, "max_steps": 1}
    settings |= {"optim": "sgd", "learning_rate": 0.01, "save_strategy": "steps", "save_steps": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained = runs.trainer(output, parts=parts, **settings)
        if lora:
            start_alike(trained.model)
        trained.train()
    trained.save_model(str(output / "final"))
    policy = trained.policy
    updates = {"sent": weight_update(policy, 0), "rounded": weight_update(policy, 0, dtype=torch.bfloat16)}
    if has_adapter(policy):
        updates["adapter"] = weight_update(policy, 0, adapter_only=True)
        updates["base"] = updates["adapter"].base
    for _ in updates["sent"].tensors():
        pass  # lets go of what the step has left whole, which would travel in some routes and not in others
    taken, received = {}, {}
    for route, update in updates.items():
        with Traffic() as traffic:
            taken[route] = {name: tensor.cpu().clone() for name, tensor in update.tensors()}
        received[route] = traffic.gathered
    return taken, received


def start_alike(model):
    """Give an adapter the same numbers however much of the random stream reading its base took."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)


if __name__ == "__main__":
    launching.in_a_child()
    folder = Path(sys.argv[1])
    models()
    found = {case: train(case, folder / case) for case in sys.argv[2:]}
    if os.environ.get("RANK", "0") == "0":
        torch.save(found, folder / "sent.pt")
    torch.distributed.destroy_process_group()
