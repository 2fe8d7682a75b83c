"""Runs with teachers and demonstrations, which are the same however many processes there are, and in which way.

Usage under a launcher: taught_runs.py OUTPUT CASE [CASE ...]; OUTPUT holds what `write` writes.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch

from covey import GRPOTrainer
from covey.policy.sharded_tensors import is_sharded
from covey.policy.weights import weight_update
from tests.support import launching, runs, tiny

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
BASE = {
    "max_steps": 3,
    "gradient_accumulation_steps": 2,
    "optim": "sgd",
    "learning_rate": 0.05,
    "max_grad_norm": 0.5,
    "shuffle_dataset": False,
    "max_tokens_per_micro_batch": 60,
    "teacher_loss": "divergence",
}
TWO = {"teacher": {"other": "other", "first": "start"}}
CASES = {
    "the whole vocabulary of two teachers": {**TWO, "teacher_top_k": -1, "teacher_beta": 0.5, "loss_type": "grpo"},
    "demonstrations": {
        "demonstrations": "demonstrations.jsonl",
        "demonstrations_per_step": 3,
        "demonstrations_schedule": {"warmup": 0, "peak": 0.9, "decay": 4, "valley": 0.1},
    },
}


def rows():
    """Of four prompts, which are a rollout batch, one has a teacher, each time another one: one process has none."""
    who = {0: "other", 5: "first", 10: "other"}
    return [{**row, "answer": "9", "teacher": who.get(number % 16)} for number, row in enumerate(tiny.rows(16))]


def write(folder):
    """Write the teacher and the demonstrations that are read."""
    tiny.folder(folder / "other", seed=1)
    shown = [{"prompt": f"{n}+1=", "completion": str(n + 1) * (1 + n % 3)} for n in range(7)]
    (folder / "demonstrations.jsonl").write_text("\n".join(map(json.dumps, shown)))


def train(case, folder):
    """Train one case in this process or, under a launcher, together with the others; its results."""
    settings = {**BASE, "per_device_train_batch_size": 8 // PROCESSES, **CASES[case]}
    teachers = settings.get("teacher", {})
    if teachers:
        settings["teacher"] = {name: str(folder / one) if one == "other" else one for name, one in teachers.items()}
    else:
        del settings["teacher_loss"]
    if "demonstrations" in settings:
        settings["demonstrations"] = str(folder / settings["demonstrations"])
    parts = {"train_dataset": rows(), "reward_funcs": runs.longer}
    args = runs.config(folder / case, **settings)
    if args.deepspeed_plugin is not None:  # else weights as small as these stay whole
        args.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained = GRPOTrainer(model=tiny.model(), args=args, processing_class=tiny.tokenizer(), **parts)
        taught = counts_of(trained)
        trained.train()
    names = ("loss", "reward", "grad_norm", "num_tokens", "teacher/loss", "teacher/kl", "teacher/tokens")
    names += ("teacher/fraction", "teacher/other/kl", "demonstrations/loss", "demonstrations/tokens")
    return {
        "weights": {name: tensor.clone() for name, tensor in weight_update(trained.policy, 0).tensors()},
        "history": {name: runs.history(trained, name) for name in names},
        "taught": taught,
        "sharding": trained.sharding.name,
        "sharded": is_sharded(trained.policy),
    }


def counts_of(trained):
    """Tokens that have a teacher, of each process, in each rollout batch from now on."""
    score, counts = trained.behaviour.score, []

    def scoring(rollouts, mode):
        behaviour = score(rollouts, mode)
        values = behaviour.batch.teacher_logprobs
        count = 0 if values is None else int((~values.isnan()).sum())
        counts.append(trained.collectives.gather(count, "count tokens with a teacher"))
        return behaviour

    trained.behaviour.score = scoring
    return counts


if __name__ == "__main__":
    home = Path(sys.argv[1])
    launching.in_a_child()
    found = {case: train(case, home) for case in sys.argv[2:]}
    if torch.distributed.get_rank() == 0:
        torch.save(found, home / "result.pt")
    torch.distributed.destroy_process_group()  # gloo's threads must not outlive the interpreter
