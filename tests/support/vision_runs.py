"""A run with rows of images and of text, under a launcher: vision_runs.py OUTPUT."""

import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText

from covey.policy.weights import weight_update
from tests.support import launching, runs, tiny_vision

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
ASK = [[{"role": "user", "content": text}] for text in ("What?", "Which?", "Say.", "Speak.")]
ROWS = [
    {"prompt": ASK[0], "image": tiny_vision.picture(0)},
    {"prompt": ASK[1], "images": [tiny_vision.picture(1), tiny_vision.picture(2)]},
    {"prompt": ASK[2], "image": None},
    {"prompt": ASK[3], "image": None},
]


def train(output):
    """Train in this process or with others; the weights by name."""
    with tempfile.TemporaryDirectory() as folder:
        model, processor = tiny_vision.make("gemma3")
        model.save_pretrained(folder)
        model = AutoModelForImageTextToText.from_pretrained(folder)  # which knows what checkpoints call its weights
    parts = {"model": model, "processing_class": processor, "train_dataset": ROWS}
    settings = {"per_device_train_batch_size": 8 // PROCESSES, "num_generations": 4, "max_steps": 4, "beta": 0.05}
    settings |= {"gradient_accumulation_steps": 1, "max_tokens_per_micro_batch": 60}
    settings |= {"optim": "sgd", "learning_rate": 0.01}  # Adam counts steps in which a weight's gradient is 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained = runs.trainer(output, parts=parts, **settings)
        trained.train()
    return {name: tensor.detach().float().cpu().clone() for name, tensor in weight_update(trained.policy, 0).tensors()}


if __name__ == "__main__":
    launching.in_a_child()
    folder = Path(sys.argv[1])
    found = train(folder / "run")
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save(found, folder / "weights.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # gloo's threads must not outlive the interpreter
