"""Checkpoints that appear whole or not at all: what Hugging Face's Trainer writes, and the state of the method."""

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from covey.core.model import unwrapped
from covey.observability.record_files import FOLDER as RECORD
from covey.policy.adapters import has_adapter, load_adapters
from covey.policy.replicas import Reference, Sample, frozen_sample
from covey.policy.weights import checkpoint_name, load_renamed, save_sharded, saves_other_names
from covey.runtime.data_files import loading_data_alone
from covey.runtime.files import MANIFEST, added_whole, damage, flush, naming_disk_errors, seal
from covey.runtime.user_code import warn
from covey.trainer import resuming
from covey.trainer.run import Run

STATE_FILE = "covey_state_{rank}.pt"
STAGING = ".saving"
AUTO = "auto"
NOT_BINDING = frozenset({"per_device_eval_batch_size", "num_generations_eval"})  # a resumed run may change these


@dataclass(eq=False)
class Checkpointer:
    """Writes, finds and compares the checkpoints of a run, and restores the state of the method from them."""

    run: Run
    parts: Mapping[str, Stateful]
    before_saving: Callable[[], None]  # collective
    described: Callable[[], resuming.Described]
    reference: Reference | None = None  # of the KL penalty
    staging: bool = field(default=False, init=False)  # one is being written, into a folder that is moved when complete
    earlier: set[str] = field(default_factory=set, init=False)  # names of another run's checkpoints in output_dir
    delayed_pushes: list[str] = field(default_factory=list, init=False)  # folders that were to be uploaded meanwhile
    _earlier_state: dict[str, dict[str, Any]] | None = field(default=None, init=False)  # saved instead of the present

    def begin(self, checkpoint: str | None) -> None:
        """Note what another run has left in the output folder: this one neither counts nor deletes it."""
        args, _ = self.run.args, self.trained  # names of weights, before anything is wrapped
        folder = Path(args.output_dir or ".")
        found = numbered_checkpoints(str(folder))
        places = [path.resolve() for path in found]
        own = Path(checkpoint).resolve() if checkpoint else None
        # All, or those after the one that this run continues from.
        others = found[places.index(own) + 1 :] if own in places else found
        self.earlier = {path.name for path in others}
        if self.run.accelerator.is_main_process:
            _warn_of_earlier_run(folder, args, sorted(self.earlier), begins=checkpoint is None)

    def save(self, run_dir: str, write: Callable[[], None]) -> str:
        """Write a checkpoint and move it into place. Collective.

        Raises:
            OSError: the disk takes no more; earlier checkpoints are as they were.
        """
        args, collectives = self.run.args, self.run.collectives
        name, staging = f"checkpoint-{self.run.step}", os.path.join(run_dir, STAGING)
        staged, final = os.path.join(staging, name), os.path.join(run_dir, name)
        naming = partial(naming_disk_errors, name, run_dir, "Earlier checkpoints are whole: {remedy} and resume.")
        if args.should_save:
            with naming():
                if os.path.islink(staging) or not os.path.isdir(staging):  # a link may lead to another disk
                    Path(staging).unlink(missing_ok=True)
                shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed while it saved
        self.before_saving()  # collective: nobody writes before that
        self.staging, self.delayed_pushes = True, []
        try:
            with naming():
                write()
                if not args.save_only_model:
                    state: dict[str, Any] = {"batches": self._binding_sizes(), "run": self.described()}
                    state["method"] = _on_cpu(self.method_state())
                    state["frozen"] = None if self.reference and self.reference.has_moved else self.frozen
                    state["sharding"] = self.run.sharding.name
                    state["trained"] = self.trained
                    torch.save(state, os.path.join(staged, STATE_FILE.format(rank=args.process_index)))
                collectives.meet(f"publish {name}")
                if args.should_save:
                    self._publish(staged, final)
        except OSError:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        finally:
            self.staging = False
        collectives.meet(f"continue after {name}")
        self._place_best(final)
        return final

    def find(self, wanted: str | bool, output_dir: str) -> str | None:
        """A checkpoint to resume from, compared with its manifest and this run; None if "auto" finds none. Collective.

        Raises:
            ValueError: there is no such checkpoint, it is damaged, or of a run that this one cannot continue.
        """
        if (found := self._find_whole(wanted, output_dir)) is not None:
            self._compare(found)
        return found

    def _find_whole(self, wanted: str | bool, output_dir: str) -> str | None:
        named = [str(path) for path in numbered_checkpoints(output_dir) if is_checkpoint(path)]
        own = self.run.collectives.gather(named, "list the checkpoints")[0]
        if wanted == AUTO and not own:
            return None
        first = own[-1] if wanted == AUTO else find_checkpoint(wanted, own, output_dir)
        if (problem := self._damage(first)) is None:
            return first
        good = next((folder for folder in reversed(own) if folder != first and self._damage(folder) is None), None)
        damaged = f"the checkpoint {first!r} is damaged: {problem}"
        if good is None:
            raise ValueError(f"{damaged}. {output_dir!r} holds no other that is whole: start from the beginning.")
        if wanted != AUTO:
            raise ValueError(
                f"{damaged}. Resume from {good!r}, the last one that is whole; resume_from_checkpoint={AUTO!r} takes it"
                " by itself."
            )
        warn(f"{damaged}, so the run continues from {good!r}, the last one that is whole.")
        return good

    def _damage(self, folder: str) -> str | None:
        mine = damage(Path(folder)) or _missing(Path(folder)) if self.run.args.should_save else None
        everyone = self.run.collectives.gather(mine, f"verify {folder}")
        return next((problem for problem in everyone if problem is not None), None)

    def method_state(self) -> dict[str, dict[str, Any]]:
        """State of each part, in new containers that share the parts' tensors.

        Nothing is copied, and nothing changes these tensors before the weights change.
        """
        if self._earlier_state is not None:
            return self._earlier_state
        return {name: _copied(part.state_dict()) for name, part in self.parts.items()}

    @contextmanager
    def as_of(self, state: dict[str, dict[str, Any]]) -> Iterator[None]:
        """Within it, checkpoints hold an earlier `method_state`."""
        self._earlier_state = state
        try:
            yield
        finally:
            self._earlier_state = None

    def load_method_state(self, state: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            if name in state:  # version 0.1 wrote no state of `rounding`
                part.load_state_dict(state[name])

    def _state(self, checkpoint: str) -> dict[str, Any] | None:
        """This process's state in a checkpoint; None if it holds weights alone."""
        for rank in (self.run.args.process_index, 0):
            if (path := Path(checkpoint, STATE_FILE.format(rank=rank))).is_file():
                return dict(torch.load(path, map_location="cpu", weights_only=True))
        return None

    def _compare(self, checkpoint: str) -> None:
        """Raise ValueError if the checkpoint is of another run, before it is loaded; frozen weights come later."""
        policy = self.run.policy
        resuming.check_kind(checkpoint, adapter=has_adapter(policy))
        changed = resuming.adapter_changes(checkpoint, policy)
        resuming.check_adapter(checkpoint, changed)
        if (state := self._state(checkpoint)) is not None:
            settings = (run["settings"] for run in (state["run"], self.described()))
            resuming.check_same_sizes(checkpoint, state["batches"], self._binding_sizes())
            resuming.check_same_sharding(checkpoint, state["sharding"], self.run.sharding.name)
            resuming.check_same_optimizer(checkpoint, *settings)
            resuming.check_same_trained(checkpoint, state["trained"], self.trained, changed)

    @cached_property
    def trained(self) -> list[str]:
        """Names of trained weights before a training begins, as subclasses and callbacks may freeze some then."""
        named = self.run.policy.named_parameters()
        return sorted(checkpoint_name(name) for name, weight in named if weight.requires_grad)

    @cached_property
    def frozen(self) -> Sample:
        """Sample of the weights under an adapter, or of the reference before it moves. Collective, once."""
        policy = self.run.policy
        model = policy if has_adapter(policy) else self.reference and self.reference.copy
        return {} if model is None else frozen_sample(model)

    def load(self, checkpoint: str) -> None:
        """Continue from a checkpoint's method state; warns if it holds weights alone."""
        state, policy = self._state(checkpoint), self.run.policy
        if state is None:
            warn(
                f"{checkpoint!r} holds weights but not Covey's state (it was saved with save_only_model=True, or by"
                " another program): the run continues from the weights, with a fresh rollout batch and fresh counters.",
            )
            return
        resuming.check_same_frozen(checkpoint, state["frozen"], self.frozen, has_adapter(policy))
        resuming.warn_of_uncompared(checkpoint, policy)
        self.load_method_state(state["method"])
        changed, described = resuming.adapter_changes(checkpoint, policy), self.described()
        if self.run.args.replay_from is not None:  # data and rewards are the recorded ones
            settings = {name: text for name, text in described["settings"].items() if name != "replay_from"}
            described = {**state["run"], "settings": settings}
        changes = resuming.changes_since(state["run"], described, changed)
        if changes and self.run.args.should_log:
            warn(f"since {checkpoint!r} was saved, this run has changed. {' '.join(changes)}")

    def load_model(self, model: Any, folder: str, load: Callable[[], None]) -> None:
        """Load a checkpoint's weights; ValueError if they belong to another model."""
        ignored = getattr(model, "_keys_to_ignore_on_save", None)
        try:
            if tied := getattr(model, "all_tied_weights_keys", None):
                model._keys_to_ignore_on_save = [*tied]  # saved under one of their names, so transformers misses none
            self.load_best(model, folder, load, is_best=False)
        except RuntimeError as error:
            reason = " ".join(str(error).split("\n")[:2])  # the rest lists every other weight
            raise ValueError(
                f"the weights in {folder!r} belong to a different model. Resume with"
                f" the model that the run began with. torch says: {reason}"
            ) from error
        finally:
            model._keys_to_ignore_on_save = ignored

    def load_best(self, model: Any, folder: str | None, load: Callable[[], None], is_best: bool = True) -> None:
        """Load the best model without validation, also a whole one whose names differ from those of its modules."""
        whole = not self.run.sharding.weights and not has_adapter(model)
        if folder is not None and whole and any(Path(folder).glob("model*.safetensors")) and saves_other_names(model):
            load_renamed(model, folder)
        elif folder is not None and not self.run.sharding.weights and is_best and has_adapter(model):
            with loading_data_alone(folder):
                load_adapters(unwrapped(model), folder)
        else:
            with loading_data_alone(folder):
                load()

    def save_sharded_model(self, model: Any, folder: str, processing_class: Any) -> None:
        args = self.run.args
        with self.run.collectives.together("write the model"):
            save_sharded(model, folder, writes=args.should_save)
        if args.should_save:
            processing_class.save_pretrained(folder)
            torch.save(args, os.path.join(folder, "training_args.bin"))

    @contextmanager
    def writing(self, output_dir: str | None) -> Iterator[Path]:
        """Give the folder to write a model into: checkpoints are moved as a whole, and other models file by file."""
        folder = Path(output_dir or self.run.args.output_dir or ".")
        if self.staging:
            yield folder
            return
        advice = "What is there is as it was: {remedy}."
        with naming_disk_errors("the model", str(folder), advice), added_whole(folder) as new:
            yield new

    def _place_best(self, final: str) -> None:
        """Name the best checkpoint by its final folder in the state, on every process."""
        state = self.run.state()
        if best := state.best_global_step:
            folder = os.path.join(os.path.dirname(final), f"checkpoint-{best}")
            there = folder == final or os.path.isdir(folder) or not self.run.args.should_save
            state.best_model_checkpoint = folder if there else None

    def _publish(self, staged: str, final: str) -> None:
        """Put a finished checkpoint in its place and delete those beyond `save_total_limit`."""
        state = self.run.state()
        if state.best_global_step:
            self._place_best(final)
            state.save_to_json(os.path.join(staged, "trainer_state.json"))
        run_dir, staging = Path(final).parent, Path(staged).parent
        seal(Path(staged))
        if os.path.lexists(final):  # a link, too, that leads nowhere
            os.rename(final, staging / "replaced")
        os.rename(staged, final)
        flush(run_dir)
        keep, others = [final, state.best_model_checkpoint], self.earlier
        others.discard(Path(final).name)
        for old in superfluous_checkpoints(str(run_dir), self.run.args.save_total_limit, keep, others):
            os.rename(old, staging / old.name)  # one that is half deleted must not look like a checkpoint
        shutil.rmtree(staging, ignore_errors=True)

    def _binding_sizes(self) -> dict[str, int]:
        return {name: value for name, value in asdict(self.run.algebra).items() if name not in NOT_BINDING}


def _on_cpu(value: Any) -> Any:
    """A state whose tensors are copied into memory of their own on the CPU."""
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_on_cpu, value))
    return value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _copied(value: Any) -> Any:
    """Dictionaries and lists with the same content; tensors and other values are the same objects."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _warn_of_earlier_run(folder: Path, args: Any, checkpoints: list[str], begins: bool) -> None:
    """Say once what an earlier run has left in this one's folder; a run that is resumed finds its own files there."""
    found = checkpoints if args.save_strategy != "no" else []
    if begins and args.exports_completions and any(folder.glob("completions/completions_*.parquet")):
        found = [*found, "completions"]
    if begins and args.record != "off" and any(folder.glob(f"{RECORD}/generation_*.parquet")):
        found = [*found, "its record, which is kept next to the new one"]
    if found:
        warn(
            f"output_dir={str(folder)!r} holds files of an earlier run: {', '.join(found)}. This run replaces"
            " files of its own steps and keeps the others, which save_total_limit does not count. Resuming from the"
            " latest checkpoint may take one of the earlier run. Choose another output_dir to keep runs apart.",
        )


def superfluous_checkpoints(
    run_dir: str, limit: int | None, keep: list[str | None], others: Collection[str] = ()
) -> list[Path]:
    """Checkpoints to delete, earliest steps first, so that `limit` are left; `others` neither count nor are deleted."""
    if limit is None or limit < 1:
        return []
    kept = {Path(path).name for path in keep if path is not None}
    there = numbered_checkpoints(run_dir, others)
    return [path for path in there if path.name not in kept][: max(len(there) - limit, 0)]


def numbered_checkpoints(run_dir: str, others: Collection[str] = ()) -> list[Path]:
    """Folders of checkpoints in the order of their steps, without the names in `others`."""
    found = [path for path in Path(run_dir).glob("checkpoint-*") if path.name[11:].isdecimal() and path.is_dir()]
    return sorted((path for path in found if path.name not in others), key=lambda path: int(path.name[11:]))


def resume_from(setting: str | bool | None) -> str | bool | None:
    """The checkpoint to resume from: a folder, True for the latest one ("true", "last"), "auto", or None.

    Raises FileNotFoundError for a folder that does not exist.
    """
    text = str(setting or "")
    if text.lower() in ("", "false", "no"):
        return None
    if text.lower() in ("true", "yes", "last", "latest"):
        return True
    if text.lower() == AUTO:
        return AUTO
    if not Path(text).is_dir():
        raise FileNotFoundError(
            f"there is no checkpoint {text!r} to resume from; name its folder, or write `true` for the latest one, or"
            " `auto` for the latest one that is whole, if there is any."
        )
    return text


def find_checkpoint(wanted: str | bool, own: list[str], output_dir: str) -> str:
    if wanted is True:
        if own:
            return own[-1]
        raise ValueError(
            f"resume_from_checkpoint=True, but output_dir={output_dir!r} holds no checkpoint. Give the folder of one,"
            " or leave it out to start from the beginning; 'auto' does either."
        )
    folder = os.path.expanduser(str(wanted))
    if not is_checkpoint(Path(folder)):
        known = f"output_dir holds {', '.join(own)}" if own else "output_dir holds none either"
        raise ValueError(
            f"resume_from_checkpoint={folder!r} is not a checkpoint: there is no trainer_state.json in it; {known}."
            " Give the folder of a checkpoint, or True for the last one."
        )
    return folder


def is_checkpoint(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("trainer_state.json", MANIFEST))


def _missing(checkpoint: Path) -> str | None:
    """A sentence on a file that is missing from a checkpoint without a manifest; None if all are there."""
    names = {path.name for path in checkpoint.iterdir()}
    there = {name.partition(".")[0].rstrip("_0123456789") for name in names}
    if MANIFEST in names or "covey_state" not in there:
        return None
    if not there & {"optimizer", "global_step"}:  # DeepSpeed's is in the latter
        return "optimizer.pt is missing"
    if "optimizer" in there and "scheduler" not in there:
        return "scheduler.pt is missing"
    if "rng_state.pth" in names:  # of one process; several have a file each
        return None
    if "rng_state" not in there:
        return "rng_state.pth is missing, without which other random numbers are drawn"
    pairs = [(f"covey_state_{rank}.pt", f"rng_state_{rank}.pth") for rank in range(len(names))]
    return next((f"{(set(pair) - names).pop()} is missing" for pair in pairs if len(names & {*pair}) == 1), None)
