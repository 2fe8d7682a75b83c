"""A run that `benchmarks.kills` kills: a tiny random model in a chosen mode, which says where it is.

    python benchmarks/kills_run.py FOLDER MODE [PLACE NUMBER SIGNAL]

Started again in the same folder, it goes on. With PLACE it sends itself the signal on entering that place for the
NUMBER-th time ("PLACE, half a file" leaves the file that was written last cut in half, as a kill within a write does).
Written into FOLDER, by each process of the run:

    place.RANK        the innermost place that the process is in
    places.RANK.json  how often each place was entered, once training has ended
    trained.RANK      a line of JSON for each start (the step it resumed from) and for each micro-batch (its step, and a
                      digest of prompt and completion for each of its rollouts)
    result.RANK.json  digests of weights and optimizer, and the logs, once training has ended
"""

import functools
import json
import mmap
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / part) for part in ("", "tools")]

from golden import configurations as golden  # noqa: E402
from golden import parts  # noqa: E402
from golden.child import digest, rank, weights_digest, without_times  # noqa: E402

SETTINGS: dict[str, Any] = {
    "max_steps": 8,
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 2,
    "resume_from_checkpoint": "auto",
}
SENT_AGAIN = "sync/bytes"
"""A logged name that differs after a resume: an engine of its own is sent the weights when it starts."""
CYCLE = golden.OFF_POLICY
TALK = golden.conversation(*golden.TOOL_TURNS, tools=[parts.add, parts.halve])
COUNTER = golden.conversation([parts.call("add", by=2), parts.call("add", by=5), "no"], ["done "])
COUNTER["parts"]["environment_factory"] = parts.Counter
SCRIPTED = golden.Lazy(lambda: parts.Scripted(parts.letters))


def stream() -> Any:
    from datasets import Dataset

    return Dataset.from_list(parts.rows(6)).to_iterable_dataset()


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "off-policy": {**CYCLE, "epsilon_high": 0.28, "delta": 4.0},
    "RLOO with KL": {"method": "rloo", **golden.REFERENCE},
    "LoRA with dropout": {"parts": {"peft_config": golden.lora(lora_dropout=0.1)}, **CYCLE},
    "dynamic sampling": golden.DIFFICULT,
    "difficulty sampler": golden.REFILLED,
    "speculative reuse": {"parts": {"reward_funcs": parts.even}, "speculative_reuse": "exact"},
    "stream": {"parts": {"train_dataset": golden.Lazy(stream)}},
    "async rollouts": {"parts": {"engine": SCRIPTED}, "max_staleness": 2, "engine_parity": "off", **CYCLE},
    "tools": {**TALK, "max_tool_calling_iterations": 3},
    "environments": COUNTER,
    "evaluation suites": {"parts": {"eval_dataset": golden.Lazy(golden.suites)}, **golden.EVALUATED},
    "two processes": {"per_device_train_batch_size": 2, **golden.CHOSEN},
    "command line": {},
}
"""Trainer arguments (`parts`) and settings of each mode."""


class Places:
    """Where the process is, in a file that outlives it, and the kill that is due."""

    def __init__(self, folder: Path, due: tuple[str, int, int] | None):
        self.folder, self.due = folder, due
        self.entered: Counter[str] = Counter()
        path = folder / f"place.{rank()}"
        path.write_bytes(bytes(64))
        with path.open("r+b") as file:
            self.now = mmap.mmap(file.fileno(), 64)

    def at(self, place: str) -> None:
        self.now[:] = place.encode().ljust(64, b"\0")

    def mark(self, place: str, owner: Any, name: str, when: Callable[..., bool] = lambda *a, **k: True) -> None:
        """Name the time that `owner.name` takes, if `when` says so of its arguments."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if not when(*args, **kwargs):
                return function(*args, **kwargs)
            before = bytes(self.now[:])
            self.enter(place)
            try:
                result = function(*args, **kwargs)
                self.enter(f"{place}, half a file")
                return result
            finally:
                self.now[:] = before

        setattr(owner, name, marked)

    def enter(self, place: str) -> None:
        half = place.endswith("half a file")
        written = [path for path in (self.folder / "run" / ".saving").rglob("*") if path.is_file()] if half else []
        if half and not written:
            return
        self.at(place)
        self.entered[place] += 1
        if self.due is None or self.due[:2] != (place, self.entered[place]):
            return
        if half and self.due[2] == signal.SIGKILL:  # other signals let the file be written
            last = max(written, key=lambda path: path.stat().st_mtime_ns)
            os.truncate(last, last.stat().st_size // 2)
        os.kill(os.getpid(), self.due[2])


def watch(trainer: Any, places: Places) -> None:
    """Name the stages of a step, of an evaluation and of writing and reading a checkpoint."""
    import torch
    from transformers import TrainerState

    from covey.trainer import checkpoint

    places.mark("sampling", trainer.collector, "collect")
    places.mark("scoring", trainer.behaviour, "score")
    places.mark("credit", trainer.credit, "assign")
    places.mark("forward", trainer.updates, "loss")
    places.mark("backward", trainer.accelerator, "backward")
    places.mark("optimizer", torch.optim.AdamW, "step")
    places.mark("logging", trainer, "log")
    places.mark("completions on record", trainer.completions, "write")
    places.mark("evaluation", trainer.evaluation, "run")
    places.mark("checkpoint: weights", trainer, "save_model")
    places.mark("checkpoint: optimizer", trainer, "_save_optimizer_and_scheduler")
    places.mark("checkpoint: random states", trainer, "_save_rng_state")
    places.mark("checkpoint: method state", trainer.checkpoints, "method_state")
    places.mark("checkpoint: trainer state", TrainerState, "save_to_json")
    places.mark("checkpoint: manifest", checkpoint, "seal")
    places.mark("checkpoint: flushed after its rename", checkpoint, "flush")
    places.mark("rotation", checkpoint, "superfluous_checkpoints")
    places.mark("deletion", shutil, "rmtree", when=lambda path, **how: ".saving" in str(path))
    places.mark("resuming: search", trainer.checkpoints, "find")
    places.mark("resuming: weights", trainer, "_load_from_checkpoint")
    places.mark("resuming: method state", trainer.checkpoints, "load")


def record(trainer: Any, path: Path) -> None:
    """Write down which rollouts are trained on, and where a start resumes."""
    loss, begin = trainer.updates.loss, trainer.callback_handler.on_train_begin

    def write(**line: Any) -> None:
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def noting(model: Any, batch: Any) -> Any:
        if trainer.context.training:
            prompts, completions = batch.prompts(), batch.completions()
            rows = [prompts[group].tolist() for group in batch.groups.tolist()]
            pairs = [digest([prompt, ids.tolist()])[:16] for prompt, ids in zip(rows, completions, strict=True)]
            write(step=trainer.state.global_step, pairs=pairs)
        return loss(model, batch)

    def beginning(args: Any, state: Any, control: Any) -> Any:
        write(resumed=state.global_step)
        return begin(args, state, control)

    trainer.updates.loss, trainer.callback_handler.on_train_begin = noting, beginning


def optimizer_digest(trainer: Any) -> str:
    state = trainer.optimizer.state_dict()
    moments = {
        str(number): {k: digest(v.tolist() if hasattr(v, "tolist") else v) for k, v in one.items()}
        for number, one in state["state"].items()
    }
    return digest([moments, [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]]])


def main(folder: Path, mode: str, due: tuple[str, int, int] | None) -> None:
    import torch

    from covey.trainer.trainer import OnlineTrainer

    torch.set_num_threads(1)
    places = Places(folder, due)
    places.at("start")
    train = OnlineTrainer.train

    def trained(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch(self, places)
        record(self, folder / f"trained.{rank()}")
        places.at("between")
        (folder / f"begun.{rank()}").touch()
        result = train(self, *args, **kwargs)
        places.at("end")
        logs = [without_times(entry) for entry in self.state.log_history if "train_runtime" not in entry]
        logs = [{name: value for name, value in entry.items() if name != SENT_AGAIN} for entry in logs]
        found = {"weights": weights_digest(self.model), "optimizer": optimizer_digest(self), "logs": logs}
        (folder / f"result.{rank()}.json").write_text(json.dumps(found))
        (folder / f"places.{rank()}.json").write_text(json.dumps(places.entered))
        return result

    OnlineTrainer.train = trained  # type: ignore[method-assign]
    if mode == "command line":
        from covey.cli.main import main as covey

        status = covey(["grpo", "--config", str(folder / "run.yaml"), "--resume", "auto"])
    else:
        settings = {**SETTINGS, **MODES[mode]}
        golden.trainer(folder / "run", **settings).train()
        status = 0
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(status)  # threads of engines end with the process


def prepare(folder: Path) -> None:
    """Model, data and run file of the mode "command line"."""
    parts.language_model().save_pretrained(folder / "model")
    parts.tokenizer().save_pretrained(folder / "model")
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in parts.rows()))
    reward = "def longer(completion_ids, **kwargs):\n    return [len(ids) for ids in completion_ids]\n"
    (folder / "reward.py").write_text(reward)
    settings = {**golden.SETTINGS, **SETTINGS, "output_dir": str(folder / "run")}
    del settings["resume_from_checkpoint"]
    names = {"model": "model", "dataset": "data.jsonl", "reward_funcs": "reward.py:longer"}
    run = {key: f"{folder}/{name}" for key, name in names.items()}
    (folder / "run.yaml").write_text(json.dumps({**run, **settings}))  # JSON is YAML


if __name__ == "__main__":
    _, where, mode_name, *kill = sys.argv
    chosen = (kill[0], int(kill[1]), int(signal.Signals[kill[2]])) if kill else None
    main(Path(where), mode_name, chosen)
