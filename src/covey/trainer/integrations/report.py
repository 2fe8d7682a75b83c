"""The page and the curves of a run, written at every save, at its end and when it is interrupted."""

import inspect
import math
import os
import platform
import shlex
import sys
import time
from contextlib import suppress
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import TrainerCallback

from covey.core.engine import traits_of
from covey.core.model import head_size
from covey.engines.native.recurrent_engine import RecurrentEngine
from covey.observability.dashboard import ProgressDisplay, duration
from covey.observability.diagnostics import advice
from covey.observability.metric_docs import all_sets, evaluation_sets, metrics_of, with_interval
from covey.observability.pairs import pairs
from covey.observability.plots import plot_curves
from covey.observability.record_files import FOLDER as RECORD
from covey.observability.record_files import ends_of
from covey.observability.report import Sample, write_report
from covey.observability.timeline import plot_timeline
from covey.runtime.definitions import main_script
from covey.runtime.packages import versions
from covey.runtime.safe_text import is_secret, without_secrets
from covey.runtime.user_code import call_all, unwrap_partial, warn
from covey.trainer.checkpoint import numbered_checkpoints
from covey.trainer.integrations.attributes import listed
from covey.trainer.integrations.model_card import PACKAGES, PRIVATE

SHOWN = 8  # pairs of completions in the page
SHARE = 0.05  # of a run's time that pages may take

Row = dict[str, Any]


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
    """Writes `summary.html`, `curves.png` and `timeline.png` into the output folder, on the main process."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.named: dict[str, Any] = {}  # settings of a run file, in addition to the config's
        self.saves = False  # something is saved, so there is a page
        self._due, self._step = 0.0, -1  # clock from which, and step after which, another one may be written

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and (promise := exactness(self.trainer)):
            for display in self.trainer.callback_handler.callbacks:
                if isinstance(display, ProgressDisplay):
                    display.tell(promise)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saves = True
        if time.monotonic() >= self._due:
            self.write()

    def end(self) -> None:
        """Write for the last time, also after an error; say how to continue after an interrupt that nobody answers."""
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
        """Tell where the report and the page of a run are that a script has made; a command tells it by itself."""
        folder, callbacks = Path(self.trainer.args.output_dir), self.trainer.callback_handler.callbacks
        report = [f"report: {folder / 'summary.html'}"] if (folder / "summary.html").exists() else []
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
        others = trainer.checkpoints.context.earlier
        there = [one for one in saved if one.name not in others and int(one.name[11:]) <= state.global_step]
        way = "no checkpoint was saved"
        if there:
            wanted = there[-1] == saved[-1] or str(there[-1])
            way = f"continue from {there[-1].name} with: {resume_command(wanted)}"
        elif trainer.args.save_strategy == "no":
            way += ", as save_strategy='no'"
        return f"covey: stopped at step {state.global_step} of {state.max_steps}; {way}"

    def write(self, **own: Any) -> None:
        """Write all three; `own` arguments of `write_report` take the place of what a run shows."""
        if self.trainer.is_world_process_zero():
            began, self._step = time.monotonic(), self.trainer.state.global_step
            try:
                self._write(Path(self.trainer.args.output_dir), own)
            except Exception as error:  # a picture ends no run
                warn(f"the page of the run could not be written: {error!r}")
            self._due = time.monotonic() + (time.monotonic() - began) / SHARE

    def _write(self, folder: Path, own: dict[str, Any]) -> None:
        trainer, args, history = self.trainer, self.trainer.args, self.trainer.state.log_history
        model = getattr(trainer.policy.config, "_name_or_path", "") or type(trainer.policy).__name__
        record = folder / RECORD
        shown_pairs = pairs(record, trainer.rewards.weights.tolist()) if trainer.recorder is not None else []
        samples = [[None if row is None else _sample(row, record) for row in pair] for pair in shown_pairs]
        before, after = (
            [one for one in column if one] for column in (zip(*samples, strict=True) if samples else ((), ()))
        )
        shown: dict[str, Any] = {
            "title": f"{args.method.upper()}: {os.path.basename(model.rstrip('/'))}",
            "config": {"method": args.method, "model": model, **self.named, **changed(args)},
            "before": before,
            "after": after,
            "summary": key_figures(history),
            **own,
        }
        plot_curves(history, folder / "curves.png", shown["title"])
        plot_timeline(trainer.timeline, folder / "timeline.png")
        write_report(
            folder / "summary.html",
            log_history=history,
            timeline=trainer.timeline,
            advice=[finding.sentence for finding in advice(history, args, ended=True)],
            provenance=provenance(args),
            **shown,
        )


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
    """The command that goes on from a checkpoint's folder, or from the last one."""
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
        "reward_funcs": [name_of(one) for one in listed(made.get("reward_funcs"))],
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


def key_figures(history: list[dict[str, Any]]) -> dict[str, Any]:
    rewards = [entry["reward"] for entry in history if "reward" in entry]
    figures: dict[str, Any] = {}
    if ends := ends_of(rewards):
        figures["Reward at first"], figures["Reward at last"] = (round(value, 4) for value in ends)
    latest = {key: value for entry in history for key, value in entry.items()}
    for name in all_sets(history):
        metrics = metrics_of(name, latest)
        first = metrics_of(name, next(entry for entry in history if name in evaluation_sets(entry)))
        changed_to = f"{first.get('reward', math.nan):.4g} → {metrics['reward']:.4g}"
        same = first.get("reward") == metrics["reward"]
        figures[f"Reward in evaluation {name}".rstrip()] = metrics["reward"] if same else changed_to
        for label, text in with_interval(metrics):
            change = f"{first[label]:.1%} → " if first.get(label, metrics[label]) != metrics[label] else ""
            figures[f"{label} {name}".rstrip()] = change + text
    figures["Optimizer steps"] = latest.get("step", 0)
    if "num_tokens" in latest:
        figures["Tokens"] = int(latest["num_tokens"])
    if "train_runtime" in latest:
        figures["Training time"] = duration(latest["train_runtime"])
    return figures


def _sample(row: Row, record: Path) -> Sample:
    note = ", ".join(filter(None, (f"step {row['step']}", row["finish"])))
    images = [path.read_bytes() for name in row["image_files"] if (path := record / "images" / name).exists()]
    return Sample(row["prompt"], row["completion"], row["reward"], note, images)
