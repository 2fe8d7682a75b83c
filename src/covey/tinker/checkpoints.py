"""Saved states as sealed folders, each a PEFT adapter, under the names `tinker://RUN/KIND/NAME`."""

import json
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from covey.runtime.files import damage, flush, naming_disk_errors, seal, written_whole
from covey.tinker.adapter import ALPHA, Adapter, AdapterSpec, layers_of
from covey.tinker.errors import Refusal
from covey.tinker.learner import Base, Learner

KINDS = ("weights", "sampler_weights", "external_weights")
PATH = re.compile(r"tinker://([A-Za-z0-9][A-Za-z0-9._:-]{0,199})/(\w+)/([A-Za-z0-9_-][A-Za-z0-9._-]{0,127})")
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
RUN_FILE, CHECKPOINT_FILE = "run.json", "checkpoint.json"
ADAPTER, ADAPTER_CONFIG, OPTIMIZER = "adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors"
NEW, OLD = ".new-", ".old-"  # beginnings of the names of folders that are being written and replaced
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class TrainingRun:
    """A training client as its checkpoints remember it."""

    id: str
    base_model: str
    numbers: int  # parameters of the base model: another model under the same name has others
    spec: AdapterSpec
    user_metadata: dict[str, Any] = field(default_factory=dict)
    created: float = 0.0

    @classmethod
    def of_json(cls, text: str) -> "TrainingRun":
        values = json.loads(text)
        return cls(**{**values, "spec": AdapterSpec(**values["spec"])})


@dataclass(frozen=True)
class Checkpoint:
    """A saved state."""

    path: str  # tinker://RUN/KIND/NAME
    run: str
    kind: str
    name: str
    created: float
    expires: float | None
    steps: int
    user_metadata: dict[str, Any] | None
    size: int = 0  # bytes

    @property
    def id(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass(eq=False)
class CheckpointStore:
    """The folder that states are saved in: DIR/RUN/KIND/NAME."""

    folder: Path

    def recover(self) -> None:
        """Put back what a killed server was replacing, and remove what it was writing."""
        for old in self.folder.glob(f"*/*/{OLD}*"):
            place = old.with_name(old.name.removeprefix(OLD))
            if place.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(place)
        for new in self.folder.glob(f"*/*/{NEW}*"):
            shutil.rmtree(new, ignore_errors=True)

    def note(self, run: TrainingRun) -> None:
        """Remember a run."""
        with written_whole(self._run_folder(run.id) / RUN_FILE) as new:
            new.write_text(json.dumps(asdict(run)))

    def run(self, run_id: str) -> TrainingRun:
        """A run by its id; Refusal for one that is not here."""
        try:
            return TrainingRun.of_json((self._run_folder(run_id) / RUN_FILE).read_text())
        except (OSError, ValueError, TypeError, KeyError):
            raise Refusal(f"there is no training run {run_id!r} in {str(self.folder)!r}.", 404) from None

    def runs(self) -> Iterator[TrainingRun]:
        for file in sorted(self.folder.glob(f"*/{RUN_FILE}"), key=lambda one: one.stat().st_mtime, reverse=True):
            with suppress(OSError, ValueError, TypeError, KeyError):
                yield TrainingRun.of_json(file.read_text())

    def save(
        self,
        run: TrainingRun,
        kind: str,
        name: str,
        learner: Learner,
        *,
        overwrite: bool = False,
        ttl: float | None = None,
        user_metadata: Mapping[str, Any] | None = None,
        operation: str | None = None,
    ) -> str:
        """Save a client's state, with the optimizer's if the kind is `weights`; returns its path.

        The folder appears under its name when it is whole; `recover` completes what a killed server began. Refusal if
        the name is taken, unless the same `operation` took it: a killed server runs an operation again whose result it
        had not stored. OSError if the disk takes no more.
        """
        home = self._run_folder(run.id) / kind
        place = home / name
        if operation is not None and self._operation(place) == operation and damage(place) is None:
            return f"tinker://{run.id}/{kind}/{name}"
        if place.exists() and not overwrite and not self._expired(place):
            raise Refusal(f"tinker://{run.id}/{kind}/{name} exists. Choose another name, or give overwrite=True.")
        now = time.time()
        noted = {
            "created": now,
            "expires": None if ttl is None else now + ttl,
            "steps": learner.steps,
            "user_metadata": None if user_metadata is None else dict(user_metadata),
            "run": asdict(run),
            "operation": operation,
        }
        with naming_disk_errors("a checkpoint", str(self.folder), "Then {remedy} and save again."):
            home.mkdir(parents=True, exist_ok=True)
            new, old = home / f"{NEW}{name}", home / f"{OLD}{name}"
            shutil.rmtree(new, ignore_errors=True)
            try:
                new.mkdir()
                save_file(learner.adapter.saved(), new / ADAPTER)
                (new / ADAPTER_CONFIG).write_text(json.dumps(_peft_config(run, learner.adapter)))
                if kind == "weights":
                    save_file(moments_of(learner), new / OPTIMIZER)
                (new / CHECKPOINT_FILE).write_text(json.dumps(noted))
                seal(new)
                shutil.rmtree(old, ignore_errors=True)
                if place.exists():
                    place.rename(old)
                new.rename(place)
                flush(home)
                shutil.rmtree(old, ignore_errors=True)
            finally:
                shutil.rmtree(new, ignore_errors=True)
        return f"tinker://{run.id}/{kind}/{name}"

    def load(self, path: str, base: Base, *, optimizer: bool) -> tuple[TrainingRun, Learner]:
        """The client in a checkpoint, with its optimizer's state if asked for; Refusal for one that does not fit."""
        run, place = self.find(path)
        adapter = self.adapter(run, place, base.model)
        learner = Learner(base, adapter)
        noted = json.loads((place / CHECKPOINT_FILE).read_text())
        learner.steps = int(noted["steps"])
        if optimizer:
            if not (place / OPTIMIZER).exists():
                raise Refusal(f"{path} holds no state of an optimizer. Load it without, or save one with save_state.")
            load_moments(learner, load_file(place / OPTIMIZER))
        return run, learner

    def adapter(self, run: TrainingRun, place: Path, model: Any) -> Adapter:
        """The adapter in a folder that `find` gave; Refusal for one of another model."""
        numbers = sum(parameter.numel() for parameter in model.parameters())
        if numbers != run.numbers:
            raise Refusal(
                f"this checkpoint belongs to {run.base_model!r} with {run.numbers:,} parameters, and the model that is"
                f" served here has {numbers:,}. Start the server with that model."
            )
        return adapter_of(model, run.spec, load_file(place / ADAPTER))

    def find(self, path: str) -> tuple[TrainingRun, Path]:
        """The run and the folder of a checkpoint; Refusal for one that is not here, damaged, or no path at all."""
        run_id, kind, name = parsed(path)
        place = self._run_folder(run_id) / kind / name
        if not place.is_dir() or self._expired(place):
            kept = ", ".join(one.name for one in self.list(run_id) if one.kind == kind) or "none"
            raise Refusal(f"{path} is not here; this server keeps: {kept} (folder {str(self.folder)!r}).", 404)
        if (why := damage(place)) is not None:
            raise Refusal(f"{path} is damaged: {why}. Load an earlier checkpoint.")
        return TrainingRun.of_json(json.dumps(json.loads((place / CHECKPOINT_FILE).read_text())["run"])), place

    def created(self, place: Path) -> float:
        """Time at which the state in a folder was saved, in seconds since 1970; it tells states of one name apart."""
        return float(json.loads((place / CHECKPOINT_FILE).read_text())["created"])

    def list(self, run_id: str | None = None) -> list[Checkpoint]:
        """Checkpoints of one run or of all, the newest first; deletes those that have expired.

        Refusal for an impossible id of a run.
        """
        found = []
        for place in self.folder.glob(f"{'*' if run_id is None else self._run_folder(run_id).name}/*/*/"):
            if place.parent.name not in KINDS or place.name.startswith("."):
                continue
            if self._expired(place):
                shutil.rmtree(place, ignore_errors=True)
                continue
            with suppress(OSError, ValueError, KeyError):
                noted = json.loads((place / CHECKPOINT_FILE).read_text())
                run, kind = noted["run"]["id"], place.parent.name
                size = sum(file.stat().st_size for file in place.iterdir())
                more = (noted["created"], noted["expires"], noted["steps"], noted["user_metadata"])
                path = f"tinker://{run}/{kind}/{place.name}"
                found.append(Checkpoint(path, run, kind, place.name, *more, size))
        return sorted(found, key=lambda one: one.created, reverse=True)

    def delete(self, path: str) -> None:
        """Delete a checkpoint; Refusal if it is not here."""
        run_id, kind, name = parsed(path)
        place = self._run_folder(run_id) / kind / name
        if not place.is_dir():
            raise Refusal(f"{path} is not here.", 404)
        place.rename(gone := place.with_name(f"{NEW}{secrets.token_hex(8)}"))
        shutil.rmtree(gone, ignore_errors=True)

    def keep(self, path: str, seconds: float | None) -> None:
        """Let a checkpoint expire in so many seconds from now; None for never."""
        _, place = self.find(path)
        noted = json.loads((place / CHECKPOINT_FILE).read_text())
        noted["expires"] = None if seconds is None else time.time() + seconds
        with written_whole(place / CHECKPOINT_FILE) as new:
            new.write_text(json.dumps(noted))
        seal(place)

    def _run_folder(self, run_id: str) -> Path:
        if not PATH.fullmatch(f"tinker://{run_id}/weights/x"):
            raise Refusal(f"{run_id!r} is no id of a training run.", 404)
        return self.folder / _folder_name(run_id)

    def _operation(self, place: Path) -> str | None:
        """The operation that saved the state in a folder, None where there is none."""
        try:
            found: str | None = json.loads((place / CHECKPOINT_FILE).read_text()).get("operation")
        except (OSError, ValueError, AttributeError):
            return None
        return found

    def _expired(self, place: Path) -> bool:
        try:
            expires = json.loads((place / CHECKPOINT_FILE).read_text())["expires"]
        except (OSError, ValueError, KeyError):
            return False
        return expires is not None and expires < time.time()


def parsed(path: str) -> tuple[str, str, str]:
    """Run, kind and name of a path; Refusal for anything else."""
    match = PATH.fullmatch(path) if isinstance(path, str) else None
    if match is None or match[2] not in KINDS:
        raise Refusal(
            f"{str(path)[:200]!r} is no checkpoint: its form is tinker://RUN/weights/NAME, or sampler_weights."
        )
    return match[1], match[2], match[3]


def checked_name(name: Any) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise Refusal(
            f"the name {str(name)[:200]!r} of a checkpoint may have letters, digits, '.', '_' and '-', at most 128."
        )
    return name


def _folder_name(run_id: str) -> str:
    return run_id.replace(":", ".")


def adapter_of(model: Any, spec: AdapterSpec, saved: Mapping[str, Tensor]) -> Adapter:
    """The adapter with these tensors, which have the names that PEFT gives them."""
    adapter = Adapter(spec, {})
    for name, layer in layers_of(model, spec).items():
        a, b = (saved[f"base_model.model.{name}.{kind}.weight"] for kind in ("lora_A", "lora_B"))
        adapter.matrices[name] = nn.Parameter(a.to(layer.weight.device)), nn.Parameter(b.to(layer.weight.device))
    return adapter


def moments_of(learner: Learner) -> dict[str, Tensor]:
    """State of the optimizer by the names of its parameters; empty before the first step."""
    names = learner.adapter.named()
    states = learner.optimizer.state
    tensors = {"steps": torch.tensor(learner.steps)}
    for name, parameter in names.items():
        for key, value in states.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = value.detach().clone().contiguous()
    return tensors


def load_moments(learner: Learner, tensors: Mapping[str, Tensor]) -> None:
    """Give a learner the steps and the optimizer's state that `moments_of` wrote."""
    if "steps" in tensors:
        learner.steps = int(tensors["steps"])
    for name, parameter in learner.adapter.named().items():
        state = {key: tensors[f"{name}/{key}"] for key in (*MOMENTS, "step") if f"{name}/{key}" in tensors}
        if state:
            moved = {key: value.to(parameter.device) if key in MOMENTS else value for key, value in state.items()}
            learner.optimizer.state[parameter] = moved


def _peft_config(run: TrainingRun, adapter: Adapter) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": run.base_model,
        "r": run.spec.rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(adapter.matrices),
        "inference_mode": True,
    }
