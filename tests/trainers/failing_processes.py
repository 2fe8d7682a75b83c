"""Run under torchrun: a training run in which the last process goes wrong in a chosen way, at its second generation.

Usage: failing_processes.py OUTPUT WAY SECONDS
"""

import os
import signal
import sys
import time

import runs
import torch

CALLS = []
WAYS = {
    "Trained on several processes, of which one failed": "returns nonsense",
    "Trained on several processes, of which one was killed": "is killed",
    "Trained on several processes, of which one took too long": "hangs",
    "Let processes go different ways, with callbacks of one process only for instance": "strays",
    "Trained on several processes, of which one failed while others were at work": "fails while the other is at work",
}
"""The rows of docs/troubleshooting.md, and the way to each."""


def goes_wrong(completions, **kwargs):
    """Scores the first generation; then, on the last process, goes wrong. Nonsense ends a run at the third time."""
    CALLS.append(len(completions))
    if len(CALLS) > 1 and way == "fails while the other is at work" and os.environ["RANK"] == "0":
        time.sleep(600)
    if len(CALLS) > 1 and os.environ["RANK"] == "1":
        if way == "returns nonsense":
            return ["nonsense"] * len(completions)
        if way == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "hangs":
            time.sleep(600)
        if way == "fails while the other is at work":
            raise KeyboardInterrupt
        if way == "strays":
            trainer.collectives.meet("do something of its own")
    return runs.digits(completions)


if __name__ == "__main__":
    output, way, seconds = sys.argv[1:]
    torch.set_num_threads(1)
    trainer = runs.trainer(
        output,
        parts={"reward_funcs": goes_wrong},
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        max_steps=4,
        ddp_timeout=int(seconds),
    )
    try:
        trainer.train()
    except BaseException as error:
        with open(f"{output}/error_{trainer.args.process_index}.txt", "w") as file:
            file.write("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]))
        raise
