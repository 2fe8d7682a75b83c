"""Checkpoints that appear whole or not at all, and hold everything a resumed run needs to go on bit by bit.

Hugging Face's Trainer writes weights, optimizer, scheduler and random states; this adds the state of the method
(buffered experience, counters, controllers) per process, and moves the finished folder into place in one step.
"""

import os
import shutil
from typing import Any

import torch
from transformers import Trainer

STATE_FILE = "covey_state_{rank}.pt"
STAGING = ".saving"


class AtomicCheckpoints(Trainer):
    """The saving half of a trainer. Subclasses provide `method_state` and `load_method_state`."""

    _staging = False
    _pushes: list[str]

    def method_state(self) -> dict[str, Any]:
        """What to save beyond Hugging Face's state: tensors, numbers, strings and containers of them."""
        raise NotImplementedError

    def load_method_state(self, state: dict[str, Any]) -> None:
        """Continue from what `method_state` returned."""
        raise NotImplementedError

    def _get_output_dir(self, trial: Any) -> str:
        run_dir = super()._get_output_dir(trial)
        return os.path.join(run_dir, STAGING) if self._staging else run_dir

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run_dir = self._get_output_dir(trial)
        name = f"checkpoint-{self.state.global_step}"
        staged = os.path.join(run_dir, STAGING, name)
        final = os.path.join(run_dir, name)
        self._staging, self._pushes = True, []
        try:
            super()._save_checkpoint(model, trial)
            if not self.args.save_only_model:
                torch.save(self.method_state(), os.path.join(staged, STATE_FILE.format(rank=self.args.process_index)))
        finally:
            self._staging = False
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self._publish(staged, final)
        self.accelerator.wait_for_everyone()
        if self._pushes:
            super()._push_from_checkpoint(final)

    def _publish(self, staged: str, final: str) -> None:
        """Put a finished checkpoint in its place and let old ones go."""
        from transformers.trainer_utils import rotate_checkpoints

        best = self.state.best_global_step
        if best:
            folder = os.path.join(os.path.dirname(final), f"checkpoint-{best}")
            self.state.best_model_checkpoint = folder if folder == final or os.path.isdir(folder) else None
            self.state.save_to_json(os.path.join(staged, "trainer_state.json"))
        shutil.rmtree(final, ignore_errors=True)
        os.rename(staged, final)
        shutil.rmtree(os.path.dirname(staged), ignore_errors=True)
        rotate_checkpoints(
            output_dir=os.path.dirname(final),
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=True,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staging:
            self._pushes.append(checkpoint_folder)  # uploaded from its final place
        else:
            super()._push_from_checkpoint(checkpoint_folder)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = os.path.join(checkpoint, STATE_FILE.format(rank=self.args.process_index))
        if os.path.isfile(path):
            self.load_method_state(torch.load(path, map_location="cpu", weights_only=True))
