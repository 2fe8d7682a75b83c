"""The page of a run, written at every save, at its end and when it is interrupted; where it came from, for the page."""

import inspect
import math
import os
import platform
import shlex
import sys
from contextlib import suppress
from dataclasses import fields
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import TrainerCallback

from covey.core.engine import traits_of
from covey.core.model import head_size
from covey.engines.native.recurrent_engine import RecurrentEngine
from covey.observability.dashboard import ProgressDisplay
from covey.observability.page.export import PageWriter
from covey.observability.plots import plot_curves
from covey.observability.record_files import FOLDER as RECORD
from covey.runtime.definitions import main_script
from covey.runtime.packages import versions
from covey.runtime.safe_text import is_secret, without_secrets
from covey.runtime.user_code import call_all, unwrap_partial, warn
from covey.trainer.checkpoint import numbered_checkpoints
from covey.trainer.integrations.attributes import as_list
from covey.trainer.integrations.model_card import PACKAGES, PRIVATE

REPORT, CURVES = "report.html", "curves.png"


def exactness(trainer: Any) -> str:
    """The line that says how exactly a repeated or resumed run equals this one; "" for a replay."""
    engine = trainer.collector.engine
    if trainer.args.replay_from is not None:
        return ""
    device = next(trainer.model.parameters()).device.type
    reason = f"{type(engine).__name__} on {device.upper()}"
    if (
        traits_of(engine).batch_invariant
        and device == "cpu"
        and not (reason := _batch_dependence(trainer.model, engine))
    ):
        return "exactness: bit by bit, also if resumed: no completion depends on what else is sampled"
    return f"exactness: up to rounding, if repeated or resumed: kernels depend on what else is sampled ({reason})"


def _batch_dependence(model: Any, engine: Any) -> str:
    """The reason that bits of a batch-invariant engine depend on the batch with this model; "" if none is known."""
    if any(type(module).__name__ == "Linear8bitLt" for module in model.modules()):
        return "LLM.int8 chooses outliers by the whole batch"
    if isinstance(engine, RecurrentEngine) and torch.get_num_threads() > 1:
        return "layers with a state share a batch among several threads; OMP_NUM_THREADS=1 makes them exact"
    if (size := head_size(model)) and size % 4:
        return f"heads of {size} numbers, which is no multiple of 4"
    return ""


class RunReport(TrainerCallback):
    """Writes `report.html`, and `curves.png` where the config asks for it, on the main process."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.named: dict[str, Any] = {}  # settings of a run file, in addition to the config's
        self.saves = False  # something is saved, so there is a page
        self._draws = trainer.args.draw_curves
        if self._draws and find_spec("matplotlib") is None:
            raise ImportError("draw_curves=True draws a picture with matplotlib: pip install matplotlib.")
        self._page = PageWriter(Path(trainer.args.output_dir or ".") / REPORT)
        self._step = -1  # of the last page

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        lines = [line for line in (exactness(self.trainer), self.trainer.rounding.reason) if line]
        for display in self.trainer.callback_handler.callbacks if state.is_world_process_zero else ():
            if isinstance(display, ProgressDisplay):
                for line in lines:
                    display.tell(line)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saves = True
        if self._page.is_due:
            self.write()

    def end(self) -> None:
        """Write for the last time, also after an error.

        After an interrupt whose end `trainer.stop` has not reported, say how to continue.
        """
        shown = [one for one in self.trainer.callback_handler.callbacks if isinstance(one, ProgressDisplay)]
        call_all(*(callback.close for callback in shown), self._write_last)

    def _write_last(self) -> None:
        trainer, state = self.trainer, self.trainer.state
        answered = trainer.stop.signal is not None
        interrupted = answered or isinstance(sys.exc_info()[1], KeyboardInterrupt)
        try:
            if self.saves and state.log_history and not (interrupted and self._step == state.global_step):
                self.write()
        finally:  # a page may take longer than there is time to stop
            if interrupted and not answered and (line := self.farewell()):
                print(line, file=sys.stderr)
            if sys.exc_info()[1] is None and not interrupted and "COVEY_COMMAND" not in os.environ:
                self._say_places()

    def _say_places(self) -> None:
        """Print where the report and the record of a script's run are; commands print it themselves."""
        folder, callbacks = Path(self.trainer.args.output_dir), self.trainer.callback_handler.callbacks
        report = [f"report: {folder / REPORT}"] if (folder / REPORT).exists() else []
        page = [f"look at it: covey view {shlex.quote(str(folder))}"] if (folder / RECORD).exists() else []
        if self.trainer.is_world_process_zero() and (places := "  ".join([*report, *page])):
            for display in (one for one in callbacks if isinstance(one, ProgressDisplay)):
                display.tell(places)

    def farewell(self) -> str:
        """The last step of an interrupted run, and the command that continues it; nothing on other processes."""
        trainer, state = self.trainer, self.trainer.state
        if not state.is_world_process_zero:
            return ""
        saved = numbered_checkpoints(trainer.args.output_dir)
        others = trainer.checkpoints.earlier
        there = [one for one in saved if one.name not in others and int(one.name[11:]) <= state.global_step]
        way = "no checkpoint was saved"
        if there:
            wanted = there[-1] == saved[-1] or str(there[-1])
            way = f"continue from {there[-1].name} with: {resume_command(wanted)}"
        elif trainer.args.save_strategy == "no":
            way += ", as save_strategy='no'"
        return f"covey: stopped at step {state.global_step} of {state.max_steps}; {way}"

    def write(self) -> None:
        """Write the page of the record, and the curves."""
        trainer = self.trainer
        if not trainer.is_world_process_zero():
            return
        self._step, folder = trainer.state.global_step, Path(trainer.args.output_dir or ".")
        try:
            if trainer.recorder is not None:
                self._page.write([folder])
            if self._draws:
                plot_curves(trainer.state.log_history, folder / CURVES, trainer.args.method.upper())
        except Exception as error:  # a page ends no run
            warn(f"the page of the run could not be written: {error!r}")


def provenance(args: Any) -> dict[str, Any]:
    device = args.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    processes = f"{args.world_size} process{'es' if args.world_size > 1 else ''}"
    return {
        "command": command(),
        "date": f"{datetime.now().astimezone():%Y-%m-%d %H:%M %z}",
        "seed": args.seed,
        "hardware": f"{processes} on {name}, {os.cpu_count()} CPU cores",
        "versions": ", ".join(f"{package} {number}" for package, number in versions(("covey", *PACKAGES)).items()),
    }


def command() -> str:
    """The command of this process without secrets; of one that a launcher has started, the launcher's."""
    return shlex.join(public_words(shlex.split(os.environ.get("COVEY_COMMAND", "")) or ["python", *sys.argv]))


def public_words(words: list[str]) -> list[str]:
    """The words of a command without the values of flags and variables that hold secrets."""
    shown = []
    for flag, word in zip(["", *words], words, strict=False):
        name, equals, value = word.partition("=")
        if flag.startswith("--") and is_secret(flag[2:]):
            shown.append("...")
        elif equals and (name.startswith("--") or name.isidentifier()):
            shown.append(f"{name}={'...' if is_secret(name.removeprefix('--')) else _public(value)}")
        else:
            shown.append(_public(word))
    return shown


def public_command(text: str) -> str:
    """A command as one text, such as an agent's, without secrets."""
    words = shlex.split(text)
    return text if words == (public := public_words(words)) else shlex.join(public)


def _public(word: str) -> str:
    """A value of a flag; a URL, a mapping or a command in it, such as `{"token": "hf_x"}`, without secrets."""
    with suppress(ValueError):  # a lone quotation mark: it is no command
        if " --" in word:
            return public_command(word)
    if not word.lstrip().startswith("{"):
        return str(without_secrets(word))
    try:
        given = yaml.safe_load(word)
    except yaml.YAMLError:
        return "..."
    public = without_secrets(given)
    return word if public == given else yaml.safe_dump(public, default_flow_style=True, width=math.inf).strip()


def resume_command(checkpoint: str | bool = True) -> str:
    """The command that continues from a checkpoint's folder, or from the last one."""
    if "COVEY_COMMAND" not in os.environ:
        return f"trainer.train(resume_from_checkpoint={checkpoint!r})"
    kept: list[str] = []
    follows = False  # a resume flag, as its value
    for word in shlex.split(command()):
        flag, equals, _ = word.partition("=")
        resumes = flag.replace("-", "_") in ("__resume", "__resume_from_checkpoint")
        if not (resumes or (follows and not word.startswith("--"))):
            kept.append(word)
        follows = resumes and not equals
    return shlex.join([*kept, "--resume_from_checkpoint", "true" if checkpoint is True else str(checkpoint)])


PLAYED = ("rollout_func", "environment_factory", "agent")
"""Arguments of a trainer that say how rollouts are played."""


def named_parts(trainer: Any) -> dict[str, Any]:
    """Keys of a run file: model, rewards, tools and adapter, and the script; None for what has no name."""
    method = type(trainer.args).method
    if trainer.report.named:
        return {"method": method, **trainer.report.named}
    made, config = trainer.made_of, trainer.policy.config
    adapter = made.get("peft_config")
    return {
        "method": method,
        "model": str(getattr(config, "_name_or_path", "")) or None,
        "tokenizer": str(getattr(made.get("processing_class"), "name_or_path", "")) or None,
        "reward_funcs": [name_of(one) for one in as_list(made.get("reward_funcs"))],
        "tools": [name_of(one) for one in made.get("tools") or ()],
        "peft": None if adapter is None else _adapter(adapter.to_dict()),
        "rollout_func": name_of(made.get("rollout_func")),
        "environment_factory": name_of(made.get("environment_factory")),
        "unnamed": [one for one in PLAYED if made.get(one) is not None and name_of(made[one]) is None],
        "script": main_script(),
    }


def name_of(part: Any) -> str | None:
    """`path/to/file.py:name` of a function or class at the top level of a file; a path or an id as it is."""
    if part is None or isinstance(part, str | os.PathLike):
        return None if part is None else os.fspath(part)
    name = getattr(part, "__qualname__", "")
    try:
        file = inspect.getsourcefile(unwrap_partial(part))
    except TypeError:
        return None
    return f"{os.path.abspath(file)}:{name}" if file and name.isidentifier() and unwrap_partial(part) is part else None


def _adapter(settings: dict[str, Any]) -> dict[str, Any]:
    kept = (
        *("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora", "bias", "modules_to_save"),
        *("exclude_modules", "layers_to_transform", "layers_pattern", "target_parameters", "rank_pattern"),
        *("alpha_pattern", "init_lora_weights", "lora_bias"),
    )
    values = {name: settings[name] for name in kept if settings.get(name) not in (None, {})}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}


def changed(args: Any) -> dict[str, Any]:
    """Settings that differ from their defaults, without secrets and without those of a place."""
    defaults = {field.name: field.default for field in fields(args)}
    plain = {name: value for name, value in args.to_dict().items() if not (name in PRIVATE or is_secret(name))}
    return {name: value for name, value in plain.items() if value not in (defaults.get(name, value), None, [], {})}
