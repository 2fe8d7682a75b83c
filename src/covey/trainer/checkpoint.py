"""Checkpoints that appear whole or not at all: what Hugging Face's Trainer writes, and the state of the method."""

import functools
import hashlib
import inspect
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import Trainer

from covey.policy.adapters import base_model, base_sample, has_adapter
from covey.policy.quantization import quantization_method
from covey.policy.saving import load_renamed, save_sharded, saves_other_names
from covey.policy.weights import checkpoint_name
from covey.rewards import RewardSuite
from covey.runtime.data_files import loading_data_alone
from covey.runtime.files import MANIFEST, added_whole, damage, flush, naming_disk_errors, seal
from covey.trainer.context import RunContext

STATE_FILE = "covey_state_{rank}.pt"
STAGING = ".saving"
AUTO = "auto"
# Settings that a checkpoint's optimizer holds: loading it puts the old ones back.
OF_THE_OPTIMIZER = frozenset(
    {"adam_beta1", "adam_beta2", "adam_epsilon", "learning_rate", "optim_args", "weight_decay"}
)
# Settings of a run's place and output, which may change unmentioned.
NOT_OF_TRAINING = re.compile(
    "(eval|hub|log|logging|push|report|resume|save|trackio|vllm_server|sglang_server)_.*|.*_(dir|folder|name|rank|key|token|url|urls)"
    "|disable_tqdm|do_.*|log_.*|project|accelerator_config"
)
SAMPLED_ROWS = 16  # rows of a dataset that are compared
NOT_BINDING = frozenset({"per_device_eval_batch_size", "num_generations_eval"})  # a resumed run may change these


class Stateful(Protocol):
    """A part of a trainer whose state checkpoints hold."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(eq=False)
class Checkpointer:
    """Writes and reads the checkpoints of a run."""

    context: RunContext
    parts: Mapping[str, Stateful]
    before_saving: Callable[[], None]  # collective
    described: Callable[[], "Described"] = lambda: {}

    def __post_init__(self) -> None:
        self.staging = False  # a checkpoint is being written, into a folder that is moved when it is complete
        self.delayed_pushes: list[str] = []  # folders that were to be uploaded meanwhile

    def save(self, run_dir: str, write: Callable[[], None]) -> str:
        """Write a checkpoint and move it into place. Collective.

        Raises:
            OSError: the disk takes no more; earlier checkpoints are as they were.
        """
        args, collectives = self.context.args, self.context.collectives
        name, staging = f"checkpoint-{self.context.step}", os.path.join(run_dir, STAGING)
        staged, final = os.path.join(staging, name), os.path.join(run_dir, name)
        if args.should_save:
            if os.path.islink(staging) or not os.path.isdir(staging):  # a link may lead to another disk
                Path(staging).unlink(missing_ok=True)
            shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed while it saved
        self.before_saving()  # collective: nobody writes before that
        self.staging, self.delayed_pushes = True, []
        try:
            with naming_disk_errors(name, run_dir, "Earlier checkpoints are whole: make room and resume."):
                write()
                if not args.save_only_model:
                    state = {"batches": self._binding_sizes(), "method": self.method_state(), "run": self.described()}
                    state["base"] = base_sample(self.context.loop.policy)
                    state["trained"] = _trained(self.context.loop.policy)
                    torch.save(state, os.path.join(staged, STATE_FILE.format(rank=args.process_index)))
                collectives.meet(f"publish {name}")
                if args.should_save:
                    self._publish(staged, final)
        except OSError:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        finally:
            self.staging = False
        collectives.meet(f"go on after {name}")
        self._place_best(final)
        return final

    def find(self, wanted: str | bool, output_dir: str) -> str | None:
        """The checkpoint to resume from, compared with its manifest; None if "auto" finds none. Collective.

        Raises:
            ValueError: there is no such checkpoint, or it is damaged.
        """
        named = [str(path) for path in numbered_checkpoints(output_dir) if is_checkpoint(path)]
        own = self.context.collectives.gather(named, "list the checkpoints")[0]
        if wanted == AUTO and not own:
            return None
        first = own[-1] if wanted == AUTO else find_checkpoint(wanted, output_dir)
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
        warnings.warn(f"{damaged}, so the run goes on from {good!r}, the last one that is whole.", stacklevel=3)
        return good

    def _damage(self, folder: str) -> str | None:
        mine = damage(Path(folder)) or _missing(Path(folder)) if self.context.args.should_save else None
        everyone = self.context.collectives.gather(mine, f"verify {folder}")
        return next((problem for problem in everyone if problem is not None), None)

    def method_state(self) -> dict[str, dict[str, Any]]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_method_state(self, state: dict[str, Any]) -> None:
        state = from_version_0_1(state) if "experience" in state else state
        for name, part in self.parts.items():
            part.load_state_dict(state[name])

    def load(self, checkpoint: str) -> None:
        """Continue from a checkpoint's method state; warns if it holds weights alone."""
        own = os.path.join(checkpoint, STATE_FILE.format(rank=self.context.args.process_index))
        any_rank = os.path.join(checkpoint, STATE_FILE.format(rank=0))
        if not os.path.isfile(any_rank):
            warnings.warn(
                f"{checkpoint!r} holds weights but not Covey's state (it was saved with save_only_model=True, or by"
                " another program): the run goes on from the weights, with a fresh generation and fresh counters.",
                stacklevel=3,
            )
            return
        state = torch.load(own if os.path.isfile(own) else any_rank, map_location="cpu", weights_only=True)
        saved, current = state.get("run", {}), self.described()
        _check_same_sizes(checkpoint, state["batches"], self._binding_sizes())
        _check_same_optimizer(checkpoint, saved.get("settings", {}), current.get("settings", {}))
        _check_same_weights(checkpoint, state.get("trained"), _trained(self.context.loop.policy))
        _check_same_base(checkpoint, state.get("base"), base_sample(self.context.loop.policy))
        _warn_of_uncompared(checkpoint, self.context.loop.policy)
        self.load_method_state(state["method"])
        changes = changes_since(saved, current)
        if changes and self.context.args.should_log:
            warnings.warn(f"since {checkpoint!r} was saved, this run has changed. {' '.join(changes)}", stacklevel=3)

    def load_model(self, model: Any, folder: str, load: Callable[[], None]) -> None:
        _check_kind(folder, adapter=has_adapter(model))
        ignored = getattr(model, "_keys_to_ignore_on_save", None)
        try:
            if tied := getattr(model, "all_tied_weights_keys", None):
                model._keys_to_ignore_on_save = [*tied]  # saved under one of their names, so transformers misses none
            self.load_best(model, folder, load)
        except RuntimeError as error:
            reason = " ".join(str(error).split("\n")[:2])  # the rest lists every other weight
            raise ValueError(
                f"the weights in {folder!r} do not fit this model: they are of another one. Resume with"
                f" the model that the run began with. torch says: {reason}"
            ) from error
        finally:
            model._keys_to_ignore_on_save = ignored

    def load_best(self, model: Any, folder: str | None, load: Callable[[], None]) -> None:
        """The same without looking for mistakes; whole models under other names than their modules' are read here."""
        whole = not self.context.sharding.weights and not has_adapter(model)
        if folder is not None and whole and any(Path(folder).glob("model*.safetensors")) and saves_other_names(model):
            load_renamed(model, folder)
        else:
            with loading_data_alone(folder):
                load()

    def save_sharded_model(self, folder: str, processing_class: Any) -> None:
        """Write a sharded model so that `from_pretrained` reads it. Collective."""
        args, loop = self.context.args, self.context.loop
        with self.context.collectives.together("write the model"):
            save_sharded(self.context.accelerator.unwrap_model(loop.model_wrapped), folder, writes=args.should_save)
        if args.should_save:
            processing_class.save_pretrained(folder)
            with args.without_keys():
                torch.save(args, os.path.join(folder, "training_args.bin"))

    @contextmanager
    def writing(self, output_dir: str | None) -> Iterator[Path]:
        """Give the folder to write a model into: checkpoints are moved as a whole, and other models file by file."""
        folder = Path(output_dir or self.context.args.output_dir or ".")
        if self.staging:
            yield folder
            return
        advice = "What is there is as it was: make room."
        with naming_disk_errors("the model", str(folder), advice), added_whole(folder) as new:
            yield new

    def _place_best(self, final: str) -> None:
        """Every process knows the best checkpoint by its final place, wherever the others were staged."""
        state = self.context.loop.state
        if best := state.best_global_step:
            folder = os.path.join(os.path.dirname(final), f"checkpoint-{best}")
            there = folder == final or os.path.isdir(folder) or not self.context.args.should_save
            state.best_model_checkpoint = folder if there else None

    def _publish(self, staged: str, final: str) -> None:
        """Put a finished checkpoint in its place and delete those beyond `save_total_limit`."""
        state = self.context.loop.state
        if state.best_global_step:
            self._place_best(final)
            state.save_to_json(os.path.join(staged, "trainer_state.json"))
        run_dir, staging = Path(final).parent, Path(staged).parent
        seal(Path(staged))
        if os.path.lexists(final):  # a link, too, that leads nowhere
            os.rename(final, staging / "replaced")
        os.rename(staged, final)
        flush(run_dir)
        keep = [final, state.best_model_checkpoint]
        for old in superfluous_checkpoints(str(run_dir), self.context.args.save_total_limit, keep):
            os.rename(old, staging / old.name)  # one that is half deleted must not look like a checkpoint
        shutil.rmtree(staging, ignore_errors=True)

    def _binding_sizes(self) -> dict[str, int]:
        return {name: value for name, value in asdict(self.context.algebra).items() if name not in NOT_BINDING}


def prepare_for_training(trainer: Any, max_steps: int, loader: Any, checkpoint: str | None) -> Any:
    """A method of the trainer: wrap model and optimizer, and read the checkpoint."""
    if trainer.accelerator.scaler is None:  # a run in fp16 may go on in another precision
        trainer._load_scaler = lambda checkpoint: None
    with loading_data_alone(checkpoint):
        return Trainer._prepare_for_training(trainer, max_steps, loader, checkpoint)


Described = dict[str, dict[str, str]]  # settings, dataset and reward functions of a run, as texts by kind and name


def describe_run(args: Any, dataset: Any, rewards: RewardSuite) -> Described:
    """Texts that a resumed run is compared with; datasets without a length are left out."""
    with args.without_keys():
        settings = {name: repr(value) for name, value in args.to_dict().items() if not NOT_OF_TRAINING.fullmatch(name)}
    rows: dict[str, str] = {}
    if hasattr(dataset, "__len__") and len(dataset):
        places = sorted({number * (len(dataset) - 1) // (SAMPLED_ROWS - 1) for number in range(SAMPLED_ROWS)})
        rows = {"rows": str(len(dataset)), "content": _digest(_plain([dict(dataset[place]) for place in places]))}
    functions = (getattr(one, "function", one) for one in rewards.functions)
    codes = {name: _digest(_code(function)) for name, function in zip(rewards.names, functions, strict=True)}
    return {"settings": settings, "dataset": rows, "rewards": codes}


def changes_since(saved: Described, current: Described) -> list[str]:
    """Sentences on what has changed and which of it takes effect; nothing of what either did not describe."""
    was, now = saved.get("settings", {}), current.get("settings", {})
    held = OF_THE_OPTIMIZER | ({"entropy_coef"} if now.get("use_adaptive_entropy") == "True" else set())
    changed = [name for name in sorted(was.keys() & now) if was[name] != now[name]]
    taken, idle = (
        [f"{name}={now[name]} (was {was[name]})" for name in changed if (name in held) == is_held]
        for is_held in (False, True)
    )
    sentences = [f"Takes effect: {', '.join(taken)}."] if taken else []
    if idle:
        sentences.append(
            f"Has no effect: {', '.join(idle)}, as the checkpoint holds it. For another value begin a new run from the"
            " weights, with the checkpoint as `model`."
        )
    was, now = saved.get("dataset", {}), current.get("dataset", {})
    if was and now and was != now:
        size = f"{was['rows']} rows, now {now['rows']}" if was["rows"] != now["rows"] else "as many rows, others"
        sentences.append(f"Takes effect: another dataset ({size}); the run goes on at its place, counted in rows.")
    was = saved.get("rewards", now := current.get("rewards", {}))
    if names := sorted(name for name in was | now if was.get(name) != now.get(name)):
        sentences.append(f"Takes effect: other reward functions ({', '.join(names)}).")
    return sentences


def _code(function: Any) -> str:
    """The source of a function, of the class of a callable object, or the name of a model."""
    while isinstance(function, functools.partial):
        function = function.func
    try:
        return inspect.getsource(function if inspect.isroutine(function) else type(function))
    except (OSError, TypeError):
        return str(getattr(function, "__qualname__", type(function).__qualname__))


def _plain(value: Any) -> Any:
    """The value with names of types for what has no text of its own, such as images."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in sorted(value.items(), key=str)}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | float | None) else type(value).__name__


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode("utf-8", "replace")).hexdigest()


def from_version_0_1(state: dict[str, Any]) -> dict[str, Any]:
    """The method state of a checkpoint of version 0.1, in today's layout."""
    return {
        "updates": {"buffer": state["experience"], "entropy": state["entropy"], "token_limit": state["pass_limit"]},
        "rollouts": {
            "generations": state["generations"],
            "async_rollouts": state.get("ahead"),
            **{name: state.get(name) for name in ("prompts", "speculation")},
        },
        "behaviour": {"reference": state["reference"]},
        "credit": {"num_tokens": state["num_tokens"]},
        "metrics": state["metrics"],
    }


def superfluous_checkpoints(run_dir: str, limit: int | None, keep: list[str | None]) -> list[Path]:
    """The checkpoints to delete so that `limit` are left: those of the earliest steps, by number and not by clock."""
    if limit is None or limit < 1:
        return []
    kept = {Path(path).name for path in keep if path is not None}
    there = numbered_checkpoints(run_dir)
    return [path for path in there if path.name not in kept][: max(len(there) - limit, 0)]


def numbered_checkpoints(run_dir: str) -> list[Path]:
    found = [path for path in Path(run_dir).glob("checkpoint-*") if path.name[11:].isdecimal() and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name[11:]))


def resume_from(setting: str | bool | None) -> str | bool | None:
    """The checkpoint to resume from: a folder, True for the latest one ("true", "last"), "auto", or None."""
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


def find_checkpoint(wanted: str | bool, output_dir: str) -> str:
    own = [path for path in numbered_checkpoints(output_dir) if is_checkpoint(path)]
    if wanted is True:
        if own:
            return str(own[-1])
        raise ValueError(
            f"resume_from_checkpoint=True, but output_dir={output_dir!r} holds no checkpoint. Give the folder of one,"
            " or leave it out to start from the beginning; 'auto' does either."
        )
    folder = str(wanted)
    if not is_checkpoint(Path(folder)):
        known = f"output_dir holds {', '.join(map(str, own))}" if own else "output_dir holds none either"
        raise ValueError(
            f"resume_from_checkpoint={folder!r} is not a checkpoint: there is no trainer_state.json in it; {known}."
            " Give the folder of a checkpoint, or True for the last one."
        )
    return folder


def is_checkpoint(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("trainer_state.json", MANIFEST))


def _missing(checkpoint: Path) -> str | None:
    """Sentence on a file that a checkpoint with the method's state lacks, where no manifest tells; None if none."""
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


def _check_kind(checkpoint: str, adapter: bool) -> None:
    """An adapter goes on from an adapter, a whole model from a whole one."""
    wanted, other = ("adapter_model*", "model*.safetensors*") if adapter else ("model*.safetensors*", "adapter_model*")
    held = sorted(path.name for path in Path(checkpoint).rglob(other))
    if held and not any(Path(checkpoint).rglob(wanted)):
        raise ValueError(
            f"the weights in {checkpoint!r} do not fit this model: they are {held[0]}, and this run trains"
            f" {'an adapter' if adapter else 'a whole model'}. Resume with the model that the run began with,"
            f" {'without' if adapter else 'with'} `peft_config`."
        )


def _check_same_sizes(checkpoint: str, saved: dict[str, int], current: dict[str, int]) -> None:
    changed = [f"{name}={saved.get(name)} (now {value})" for name, value in current.items() if saved.get(name) != value]
    if changed:
        raise ValueError(
            f"{checkpoint!r} was made with {', '.join(changed)}: its buffered completions and its place in the data do"
            f" not fit this run. Resume with the same numbers, or begin a new run from its weights with"
            f" model={checkpoint!r}."
        )


def _check_same_optimizer(checkpoint: str, saved: dict[str, str], current: dict[str, str]) -> None:
    was, now = saved.get("optim", current.get("optim", "")), current.get("optim", "")
    names = [path.name for path in Path(checkpoint).iterdir()]
    if not any(name.startswith(("optimizer", "global_step")) for name in names):  # a clone with a fresh one
        return
    if was.replace("_fused", "") != now.replace("_fused", ""):  # a fused optimizer has the same state
        raise ValueError(
            f"{checkpoint!r} holds the state of optim={was}, which optim={now} cannot go on from. Resume with"
            f" optim={was}, or begin a new run from its weights with model={checkpoint!r}."
        )


def _trained(policy: Any) -> list[str]:
    return sorted(checkpoint_name(name) for name, weight in policy.named_parameters() if weight.requires_grad)


def _check_same_weights(checkpoint: str, saved: Sequence[str] | None, current: Sequence[str]) -> None:
    """Loading takes no notice of a layer or an adapter's matrix that only one of two models has."""
    if saved is None or saved == current:  # none in earlier checkpoints
        return
    others = sorted({*saved} ^ {*current})
    raise ValueError(
        f"the weights in {checkpoint!r} do not fit this model: they are of another one. {len(others)} that are trained"
        f" are in one of the two alone, such as {others[0]}. Resume with the model that the run began with."
    )


def _check_same_base(checkpoint: str, saved: Sequence[Any] | None, current: Sequence[Any] | None) -> None:
    """The weights under an adapter are those that it was trained on: exactly, or rounded where dtypes differ.

    Weights in 4 or 8 bits need not be exact, as machines may differ in how they restore them.
    """
    if not saved or not current:
        return
    (dtypes, plain, *quantized), (now_dtypes, now_plain, now_quantized) = saved, current
    exact = dtypes == now_dtypes
    pairs = [(plain, now_plain, exact)] if plain.shape == now_plain.shape else []
    pairs += [(was, now_quantized, False) for was in quantized]  # none in earlier checkpoints
    if not all(
        was.shape == now.shape and torch.allclose(was, now, rtol=0.0 if same else 5e-3, atol=0.0 if same else 1e-6)
        for was, now, same in pairs
    ):
        raise ValueError(
            f"{checkpoint!r} holds an adapter that was trained on another base model: this one has other weights, or"
            " is quantised in another way."
            " Resume with the base model that the run began with, or begin a new run that trains the adapter on this"
            f" one, with model=PeftModel.from_pretrained(base, {checkpoint!r}, is_trainable=True)."
        )


def _warn_of_uncompared(checkpoint: str, policy: Any) -> None:
    method = quantization_method(base_model(policy))
    if has_adapter(policy) and method not in (None, "bitsandbytes"):
        warnings.warn(
            f"the weights of the base model, which {method} has quantised, cannot be compared with those that the"
            f" adapter in {checkpoint!r} was trained on: make sure that it is the same model.",
            stacklevel=4,
        )
