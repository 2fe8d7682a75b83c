"""Bytes that each of two processes receives in a run with long texts, with and without an export of completions.

Usage under a launcher: message_sizes.py OUTPUT.
"""

import json
import sys
from pathlib import Path

import torch

from covey import EvalSuite
from covey.trainer.distributed import collectives
from tests.support import launching, runs, tiny

LONG = "x" * 50_000  # in a column that the completions table shows

if __name__ == "__main__":
    launching.in_a_child()
    output, received, unpack = Path(sys.argv[1]), [0], collectives.unpack

    def counting(message):
        received[0] += len(message)
        return unpack(message)

    collectives.unpack = counting
    found = {}
    for kind in ("recorded", "exported"):
        rows = [{**row, "solution": LONG} for row in tiny.rows()]
        suites = {"own": EvalSuite(rows[:2], num_generations=2)}
        trained = runs.trainer(
            output / kind,
            parts={"train_dataset": rows, "eval_dataset": suites},
            max_steps=1,
            export_completions=kind == "exported",
            per_device_train_batch_size=4,
            gradient_accumulation_steps=1,
        )
        received[0] = 0
        trained.train()
        found[kind] = received[0]
        received[0] = 0
        trained.evaluate()
        found[f"evaluation {kind}"] = received[0]
    rank = torch.distributed.get_rank()
    (output / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
