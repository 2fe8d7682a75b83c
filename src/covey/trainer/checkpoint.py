"""Checkpoints that appear whole or not at all, and hold everything a resumed run needs to go on bit by bit.

Hugging Face's Trainer writes weights, optimizer, scheduler and random states; this adds the state of the method
(buffered experience, counters, controllers) per process, and moves the finished folder into place in one step.
"""

import glob
import os
import shutil
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from covey.policy.saving import load_renamed, save_sharded, saves_other_names
from covey.policy.weights import has_adapter
from covey.trainer.distributed.collectives import Collectives
from covey.trainer.distributed.sharding import Sharding

STATE_FILE = "covey_state_{rank}.pt"
STAGING = ".saving"

NOT_BINDING = frozenset({"per_device_eval_batch_size", "num_generations_eval"})
"""Batch sizes that a resumed run may change: nothing that is saved depends on them."""


class AtomicCheckpoints(Trainer):
    """The saving half of a trainer. Subclasses provide `method_state` and `load_method_state`."""

    args: Any
    collectives: Collectives
    sharding: Sharding
    processing_class: Any
    _staging = False
    _pushes: list[str]

    def method_state(self) -> dict[str, Any]:
        """What to save beyond Hugging Face's state: tensors, numbers, strings and containers of them."""
        raise NotImplementedError

    def load_method_state(self, state: dict[str, Any]) -> None:
        """Continue from what `method_state` returned."""
        raise NotImplementedError

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train, from the start or from a checkpoint.

        Args:
            resume_from_checkpoint: a checkpoint's folder, or True for the last one in `output_dir`; None: what the
                config says.
            trial: of a hyperparameter search.
            ignore_keys_for_eval: has no meaning here, as evaluation returns no model outputs.

        Raises:
            ValueError: there is no such checkpoint, or it is of a run with another model or other batch sizes.
        """
        if resume_from_checkpoint is None and trial is None:
            resume_from_checkpoint = resume_from(self.args.resume_from_checkpoint)
        if resume_from_checkpoint:
            resume_from_checkpoint = find_checkpoint(resume_from_checkpoint, self.args.output_dir or ".")
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _init_training_state(self, max_steps: int, updates_per_epoch: int, epochs: int, *rest: Any) -> tuple[int, int]:
        """A run that is resumed at its end has ended: `Trainer` would take one more step."""
        begun, micro_steps = super()._init_training_state(max_steps, updates_per_epoch, epochs, *rest)
        if self.state.global_step < max_steps:
            return begun, micro_steps
        warnings.warn(
            f"nothing is left to train: the checkpoint is of step {self.state.global_step}, and this run has"
            f" {max_steps}. Raise max_steps or num_train_epochs to go on.",
            stacklevel=2,
        )
        return epochs, 0

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
                state = {"batches": self._binding_sizes(), "method": self.method_state()}
                torch.save(state, os.path.join(staged, STATE_FILE.format(rank=self.args.process_index)))
        finally:
            self._staging = False
        self.collectives.meet(f"publish {name}")
        if self.args.should_save:
            self._publish(staged, final)
        self.collectives.meet(f"go on after {name}")
        self._place_best(final)
        if self._pushes:
            self._push_from_checkpoint(final)

    def _place_best(self, final: str) -> None:
        """Every process knows the best checkpoint by its final place, wherever the others were staged."""
        if best := self.state.best_global_step:
            folder = os.path.join(os.path.dirname(final), f"checkpoint-{best}")
            there = folder == final or os.path.isdir(folder) or not self.args.should_save
            self.state.best_model_checkpoint = folder if there else None

    def _publish(self, staged: str, final: str) -> None:
        """Put a finished checkpoint in its place and delete those beyond `save_total_limit`."""
        if self.state.best_global_step:
            self._place_best(final)
            self.state.save_to_json(os.path.join(staged, "trainer_state.json"))
        shutil.rmtree(final, ignore_errors=True)
        os.rename(staged, final)
        shutil.rmtree(os.path.dirname(staged), ignore_errors=True)
        keep = [final, self.state.best_model_checkpoint]
        for old in superfluous_checkpoints(os.path.dirname(final), self.args.save_total_limit, keep):
            shutil.rmtree(old, ignore_errors=True)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staging:
            self._pushes.append(checkpoint_folder)  # uploaded from its final place
        else:
            with self.args.without_keys():  # it writes the config
                super()._push_from_checkpoint(checkpoint_folder)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model so that `from_pretrained` reads it, however its weights are spread. Collective."""
        if not self.sharding.weights:
            super().save_model(output_dir, _internal_call)
            return
        folder = output_dir or self.args.output_dir
        with self.collectives.together("write the model"):
            save_sharded(self.accelerator.unwrap_model(self.model_wrapped), folder, writes=self.args.should_save)
        if self.args.should_save:
            self.processing_class.save_pretrained(folder)
            with self.args.without_keys():
                torch.save(self.args, os.path.join(folder, "training_args.bin"))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        with self.args.without_keys():  # it writes the config
            super()._save(output_dir, state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        _check_kind(resume_from_checkpoint, adapter=has_adapter(self.model))
        try:
            if self._is_renamed(model or self.model, resume_from_checkpoint):
                load_renamed(model or self.model, resume_from_checkpoint)
            else:
                super()._load_from_checkpoint(resume_from_checkpoint, model)
        except RuntimeError as error:
            said = " ".join(str(error).split("\n")[:2])  # the rest lists every other weight
            raise ValueError(
                f"the weights in {resume_from_checkpoint!r} do not fit this model: they are of another one. Resume with"
                f" the model that the run began with. torch says: {said}"
            ) from error

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is not None and self._is_renamed(self.model, best):
            load_renamed(self.model, best)
        else:
            super()._load_best_model()

    def _is_renamed(self, model: Any, folder: str) -> bool:
        """Whether a checkpoint holds a whole model under other names than its modules have, which `Trainer` ignores."""
        files = glob.glob(os.path.join(folder, "model*.safetensors"))
        return bool(files) and not self.sharding.weights and not has_adapter(model) and saves_other_names(model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        own = os.path.join(checkpoint, STATE_FILE.format(rank=self.args.process_index))
        any_rank = os.path.join(checkpoint, STATE_FILE.format(rank=0))
        if not os.path.isfile(any_rank):
            warnings.warn(
                f"{checkpoint!r} holds weights but not Covey's state (it was saved with save_only_model=True, or by"
                " another program): the run goes on from the weights, with a fresh generation and fresh counters.",
                stacklevel=2,
            )
            return
        state = torch.load(own if os.path.isfile(own) else any_rank, map_location="cpu", weights_only=True)
        check_same_sizes(checkpoint, state["batches"], self._binding_sizes())
        self.load_method_state(state["method"])

    def _binding_sizes(self) -> dict[str, int]:
        """The batch sizes that the saved state depends on."""
        algebra = self.args.algebra(self.args.world_size)
        return {name: value for name, value in asdict(algebra).items() if name not in NOT_BINDING}


def superfluous_checkpoints(run_dir: str, limit: int | None, keep: list[str | None]) -> list[Path]:
    """The checkpoints to delete so that `limit` are left: those of the earliest steps, by number and not by clock.

    Args:
        run_dir: the folder of the checkpoints.
        limit: `save_total_limit`; None or less than 1 keeps all.
        keep: checkpoints that stay in any case: the one just written, the best one.
    """
    if limit is None or limit < 1:
        return []
    kept = {Path(path).name for path in keep if path is not None}
    there = numbered_checkpoints(run_dir)
    old = [path for path in there if path.name not in kept]
    return old[: max(len(there) - limit, 0)]


def numbered_checkpoints(run_dir: str) -> list[Path]:
    """The folders checkpoint-N, by their number."""
    found = [path for path in Path(run_dir).glob("checkpoint-*") if path.name[11:].isdigit() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name[11:]))


def resume_from(said: str | bool | None) -> str | bool | None:
    """What a config says to resume from: a checkpoint's folder, the latest one (True, "true", "last"), or nothing.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    text = str(said or "")
    if text.lower() in ("", "false", "no"):
        return None
    if text.lower() in ("true", "yes", "last", "latest"):
        return True
    if not Path(text).is_dir():
        raise FileNotFoundError(
            f"there is no checkpoint {text!r} to resume from; name its folder, or write `true` for the latest one."
        )
    return text


def find_checkpoint(wanted: str | bool, output_dir: str) -> str:
    """The folder of a checkpoint.

    Args:
        wanted: the folder, or True for the last checkpoint in `output_dir`.
        output_dir: where the run's own checkpoints are.

    Raises:
        ValueError: there is none; the message names those that there are.
    """
    own = [path for path in numbered_checkpoints(output_dir) if _is_checkpoint(path)]
    if wanted is True:
        if own:
            return str(own[-1])
        raise ValueError(
            f"resume_from_checkpoint=True, but output_dir={output_dir!r} holds no checkpoint. Give the folder of one,"
            " or leave it out to start from the beginning."
        )
    folder = str(wanted)
    if not _is_checkpoint(Path(folder)):
        known = f"output_dir holds {', '.join(map(str, own))}" if own else "output_dir holds none either"
        raise ValueError(
            f"resume_from_checkpoint={folder!r} is not a checkpoint: there is no trainer_state.json in it; {known}."
            " Give the folder of a checkpoint, or True for the last one."
        )
    return folder


def _is_checkpoint(folder: Path) -> bool:
    return (folder / "trainer_state.json").is_file()


def _check_kind(checkpoint: str, adapter: bool) -> None:
    """An adapter goes on from an adapter, a whole model from a whole one.

    Raises:
        ValueError: the checkpoint holds the other alone.
    """
    wanted, other = ("adapter_model*", "model*.safetensors*") if adapter else ("model*.safetensors*", "adapter_model*")
    held = sorted(path.name for path in Path(checkpoint).rglob(other))
    if held and not any(Path(checkpoint).rglob(wanted)):
        raise ValueError(
            f"the weights in {checkpoint!r} do not fit this model: they are {held[0]}, and this run trains"
            f" {'an adapter' if adapter else 'a whole model'}. Resume with the model that the run began with,"
            f" {'without' if adapter else 'with'} `peft_config`."
        )


def check_same_sizes(checkpoint: str, saved: dict[str, int], current: dict[str, int]) -> None:
    """Refuse to resume with other batch sizes: the buffered completions and the place in the data would not fit.

    Raises:
        ValueError: naming every size that differs.
    """
    changed = [f"{name}={saved.get(name)} (now {value})" for name, value in current.items() if saved.get(name) != value]
    if changed:
        raise ValueError(
            f"{checkpoint!r} was made with {', '.join(changed)}: its buffered completions and its place in the data do"
            f" not fit this run. Resume with the same numbers, or begin a new run from its weights with"
            f" model={checkpoint!r}."
        )
