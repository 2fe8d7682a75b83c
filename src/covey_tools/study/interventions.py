"""Commands to a study, carried out between steps: stop, clone, resume, change."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.runtime.files import seal
from covey.runtime.user_code import warn
from covey_tools.study.commands import ENDED, Command, check_known, check_name
from covey_tools.study.turns import kept_accelerator
from covey_tools.study.variants import Variant, field_of, settings_of

if TYPE_CHECKING:
    from covey_tools.study.study import Study

SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "generation_batch_size")
KEPT = ("peft", "optim", "method", "steps_per_generation", "num_iterations", *SIZES)  # what checkpoints count in


def carry_out(study: "Study", command: Command) -> None:
    """Act on a variant; what cannot be done is written into its history and ends nothing."""
    variant = study.variants.get(command.name)
    said = " ".join([command.kind, *(f"{key}={value!r}" for key, value in command.changes.items())])
    try:
        check_known(command.name, study.variants)
        assert variant is not None, "it is known"
        study.check_players(command)
        with kept_accelerator():
            if command.kind == "clone":
                variant = _clone(study, variant, command)
                said = said.replace("clone", f"cloned from {variant.parent}", 1) + ", fresh" * command.fresh
            elif command.kind == "resume" and variant.status in ("running", "waiting"):
                raise ValueError(f"{variant.name} is {variant.status} already. Use `change` for other settings.")
            elif command.kind != "stop":
                had_ended = variant.status in ENDED and not variant.must_stop
                _restart(study, variant, command)
                if had_ended:
                    variant.resumed_at = variant.step
            else:
                variant.must_stop = False  # it has, for good
                if variant.live or variant.status == "waiting":  # if live, by an earlier command of this round
                    variant.trainer, variant.turn, variant.status = None, None, "stopped"
        variant.history.append(f"step {variant.step}: {said}")
    except Exception as error:
        if variant is not None:
            variant.history.append(f"step {variant.step}: {said} failed: {error}")
            if command.kind == "change" and variant.must_stop and variant.status == "stopped":
                study.begin(variant)  # it was stopped for this alone
        warn(f"{said} {command.name}: {error}")


def _clone(study: "Study", parent: Variant, command: Command) -> Variant:
    check_name(name := command.to or f"{parent.name}-{len(study.variants)}", list(study.variants))
    if parent.checkpoint is None:
        raise ValueError(f"{parent.name} has taken no step yet, so there is nothing to clone.")
    check_changes(study.common, parent.changes, command, kept=True)
    child = Variant(name, merged(parent.changes, command.changes), parent=parent.name, adopts=not command.fresh)
    child.step = parent.step
    child.checkpoint = f"{name}/{Path(parent.checkpoint).name}"
    folder = study.folder / child.checkpoint
    shutil.rmtree(folder, ignore_errors=True)  # of a study that was killed here
    shutil.copytree(study.folder / parent.checkpoint, folder)
    if command.fresh:
        for file in ("optimizer.pt", "scheduler.pt"):
            (folder / file).unlink(missing_ok=True)
        seal(folder)
    study.begin(child)
    study.variants[name] = child
    return child


def _restart(study: "Study", variant: Variant, command: Command) -> None:
    check_changes(study.common, variant.changes, command, kept=variant.checkpoint is not None)
    before = variant.changes, variant.adopts
    variant.changes, variant.adopts = merged(variant.changes, command.changes), bool(command.changes)
    try:
        study.begin(variant)
    except Exception:
        variant.changes, variant.adopts = before
        raise


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The settings `old`, overridden by `new`; the keys of `peft` are merged in the same way."""
    adapter = {**(old.get("peft") or {}), **(new.get("peft") or {})}
    return {**old, **new, **({"peft": adapter} if adapter else {})}


def check_changes(common: Mapping[str, Any], before: Mapping[str, Any], command: Command, kept: bool) -> None:
    """Refuse (ValueError) settings that no variant can have, and those that its checkpoint holds, if it is `kept`."""
    for name, value in command.changes.items() if kept else ():
        if (field := field_of(name)) in KEPT and not (command.fresh and field == "optim"):
            raise ValueError(
                f"{name}={value!r} does not fit the checkpoint that {command.name} continues from. Begin a new variant"
                " for it."
            )
    if command.changes:
        with kept_accelerator():
            settings_of(common, merged(before, command.changes), Path(command.to or command.name))
