"""Commands to a study while it trains: files in its folder, each written whole and taken once, in order."""

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from covey.config.messages import closest
from covey.runtime.files import flush
from covey.runtime.safe_text import without_secrets

KINDS = ("stop", "clone", "resume", "change")
ENDED = ("stopped", "failed", "finished")
QUEUE = "commands"
STATE = "study.json"
ANYWHERE = {"use_cpu": True, "bf16": False, "fp16": False, "tf32": None}  # a command may be typed where no GPU is
CURVES_FILE, PAGE = "curves.json", "report.html"
OWN_FILES = (QUEUE, STATE, CURVES_FILE, "study.md", PAGE)


@dataclass(frozen=True)
class Command:
    """`stop`, `resume` or `change` a variant, or `clone` it under the name `to`, with `changes` of settings."""

    kind: str
    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    to: str | None = None
    fresh: bool = False  # a new optimizer and schedule, for a clone

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"there is no command {self.kind!r} to a study; there are {', '.join(KINDS)}.")
        if not (isinstance(self.name, str) and isinstance(self.to, str | None) and isinstance(self.changes, Mapping)):
            raise ValueError(
                f"{self!r}: `name` and `to` are names of variants, and `changes` is a mapping of settings."
            )
        if (self.to is not None or self.fresh) and self.kind != "clone":
            raise ValueError(f"`{self.kind}` takes no new name and no fresh optimizer: only `clone` does.")
        if self.changes and self.kind == "stop":
            raise ValueError(f"`stop` changes no settings, but was given {', '.join(self.changes)}. Use `change`.")
        check_public(self.changes)
        if self.kind == "change" and not self.changes:
            raise ValueError("`change` was given no settings. Write field=value, as in learning_rate=1e-5.")


def check_public(changes: Mapping[str, Any]) -> None:
    """ValueError for settings that `study.json` and the report cannot show: secrets, and what is not JSON."""
    if without_secrets(dict(changes)) != changes:
        raise ValueError(
            f"one of {', '.join(changes)} holds a secret, which study.json and study.md would show. Give it to the"
            " study as a whole, or in an environment variable."
        )
    try:
        json.dumps(dict(changes))
    except TypeError as error:
        raise ValueError(
            f"{dict(changes)!r} cannot be written to study.json: {error}. Name functions instead."
        ) from None


def check_name(name: str, known: Sequence[str] = ()) -> None:
    usable = isinstance(name, str) and name.isprintable() and not set(" |/\\") & set(name)
    if not (usable and 0 < len(name.encode()) <= 200 and name[0] not in ".-") or name in OWN_FILES:
        raise ValueError(
            f"a variant cannot be called {name!r}: its folder has that name, next to {', '.join(OWN_FILES)}. Use"
            " letters and digits."
        )
    if name in known:
        raise ValueError(f"there is a variant {name!r} already; choose another name than {', '.join(known)}.")


def check_known(name: str, variants: Iterable[str]) -> None:
    if name not in (known := list(variants)):
        raise ValueError(f"there is no variant {name!r}; there are {', '.join(known)}.{closest(name, known)}")


def read_state(folder: str | Path) -> dict[str, Any]:
    """Contents of `study.json`; FileNotFoundError where there is none."""
    if not (path := Path(folder) / STATE).is_file():
        raise FileNotFoundError(f"there is no study in {str(folder)!r}: it holds no {STATE}. Give its output_dir.")
    state: dict[str, Any] = json.loads(path.read_text())
    return state


def send(folder: str | Path, command: Command) -> str:
    """Queue a command for the study in a folder; returns a sentence on when it acts."""
    from covey_tools.study.interventions import check_changes, merged
    from covey_tools.study.turns import kept_accelerator
    from covey_tools.study.variants import settings_of  # all of these with torch

    folder, state = Path(folder), read_state(folder)
    variants, common = state["variants"], {**state.get("base", {}), **ANYWHERE}
    common.pop("model", None)
    settings = {name: one["changes"] for name, one in variants.items()}
    for _, one in waiting(folder):
        if one.name in settings and (one.to or one.kind != "clone"):
            settings[one.to or one.name] = merged(settings[one.name], one.changes)
    check_known(command.name, settings)
    if command.to is not None:
        check_name(command.to, [*settings])
    before, begun = settings[command.name], variants.get(command.name, {"checkpoint": "that of its parent"})
    with kept_accelerator():
        try:
            settings_of(common, before, folder)
        except ValueError:  # by the name of a loss, say, that the study's process alone knows
            common = before = {}
    check_changes(common, before, command, begun["checkpoint"] is not None or begun["status"] == "running")
    if all(one["status"] in ENDED for one in variants.values()):
        raise ValueError(
            f"the study in {str(folder)!r} has ended, so nothing would carry out `{command.kind} {command.name}`. From"
            f" Python, `study.{command.kind}(...)` before `study.train(resume=True)` does; or add variants to the file,"
            " and start it with --resume."
        )
    path = folder / QUEUE / f"{time.time_ns():020d}-{os.getpid()}.json"
    path.parent.mkdir(exist_ok=True)
    write_json(path, asdict(command))
    return "queued: it acts when the step of the next round ends"


def waiting(folder: Path) -> list[tuple[Path, Command]]:
    """Commands that have not been carried out, the earliest first; files that are none are put aside."""
    found = []
    for path in sorted((folder / QUEUE).glob("*.json")):
        try:
            found.append((path, Command(**json.loads(path.read_text()))))
        except FileNotFoundError:  # carried out meanwhile
            continue
        except (ValueError, TypeError):
            path.rename(path.with_suffix(".unreadable"))
    return found


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file that others see whole or not at all, even after a crash."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    flush(partial)
    partial.replace(path)
    flush(path.parent)
