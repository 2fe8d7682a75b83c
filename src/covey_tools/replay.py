"""`covey replay`: a run trained again from its record, and compared with what was logged, step by step."""

import filecmp
import math
import shlex
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, TrainerCallback

from covey.cli import parsers, train
from covey.cli.config_file import idle_flags, parse_flags, parts_of_record, settings_of
from covey.cli.launch import launch_if_asked
from covey.config.sampling import AgentFields, SpeculationFields
from covey.observability.dashboard import ProgressDisplay
from covey.observability.record_files import FOLDER, files, number_of, read_data, read_metrics, read_run
from covey.rewards.suite import no_reward
from covey.runtime.quiet import without_bars
from covey.runtime.user_code import report
from covey.trainer.checkpoint import STATE_FILE, numbered_checkpoints
from covey_tools.diff import OTHERS

COMPARED = ("loss", "grad_norm")
MOST_LINES = 20
MODEL_PARTS = ("method", "model", "peft", "quantization")
"""Parts of run.json that a replay needs; rollouts and rewards are on record."""


NOT_REPLAYED = (
    *(name for kind in (SpeculationFields, AgentFields) for name in kind.__annotations__ if name != "max_staleness"),
    *("max_completion_length", "top_p", "top_k", "min_p", "generation_kwargs", "chat_template_kwargs"),
    *("allow_control_tokens", "max_concurrent_completions", "prompts_as_messages", "stream_rewards"),
    *("reward_timeout", "reward_isolation", "reward_funcs", "dataset", "dataset_split", "columns", "system_prompt"),
    *("eval_dataset", "tools", "rollout_func", "environment_factory", "agent"),
)
"""Settings of sampling and rewards: a replay reads both from the record."""


class StopAfter(TrainerCallback):
    """Ends the training after a step, at the learning rates of the whole run; logs only `logged` steps, if given."""

    def __init__(self, step: int, logged: Collection[int] | None):
        self.step, self.logged = step, logged

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.logged is not None:
            control.should_log = state.global_step in self.logged
        control.should_training_stop = control.should_training_stop or state.global_step >= self.step


@without_bars()
def main(argv: Sequence[str]) -> int:
    given, flags = parsers.replay().parse_known_args(launch_if_asked("replay", argv))
    described = read_run(given.run)
    recorded = max(map(number_of, files(given.run / FOLDER, kind="update")), default=0)
    if not recorded:
        raise ValueError(f'{str(given.run)!r} has no tokens on record: it was not trained with record="tokens".')
    first, last = span(given.steps, recorded)
    checkpoint = given.run / f"checkpoint-{first - 1}"
    checkpoints = [path for path in numbered_checkpoints(str(given.run)) if (path / STATE_FILE.format(rank=0)).exists()]
    saved = [int(path.name[11:]) for path in checkpoints]  # of more than weights
    begin = [1, *(step + 1 for step in saved if step < recorded)]
    if first not in begin:
        raise ValueError(
            f"--steps {given.steps} begins with the weights after step {first - 1}, of which {str(given.run)!r} has no"
            f" checkpoint: begin with step {' or '.join(map(str, begin))}."
        )
    lines = read_metrics(given.run / FOLDER)
    logged = {line["step"]: line for line in lines if "loss" in line}
    named = given.run if given.run.name not in ("", "..") else given.run.resolve()
    output_dir = f"{named}_replay" if given.steps is None else f"{named}_replay_{first}-{last}"
    trainer = trainer_of(given.run, described, flags, last, logged, output_dir)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ProgressDisplay):
            callback.until = last
    trainer.train(resume_from_checkpoint=str(checkpoint) if first > 1 else None)
    trainer.save_model()
    if not trainer.is_world_process_zero():
        return 0
    replayed = {line["step"]: line for line in trainer.state.log_history if "loss" in line and line["step"] >= first}
    old, new = preceding(logged, 0), preceding(replayed, first - 1)
    both = [(step, logged[step], replayed[step]) for step in replayed if old.get(step) == new[step]]
    equal = sum(_values(one) == _values(other) for _, one, other in both)
    print(table(both))
    print(f"{equal} of {len(both)} logged steps have the same {' and '.join(COMPARED)}, bit by bit.")
    output = Path(trainer.args.output_dir)
    whole = trainer.state.global_step == max((line["step"] for line in lines), default=last)
    best = trainer.args.load_best_model_at_end  # which the replay has not looked for
    same = weights_are_equal(given.run, output) if whole and not best else None
    if same is not None:
        print(f"The weights are {'the same' if same else 'different'}.")
    print(f"look at both: covey view {shlex.quote(str(given.run))} {shlex.quote(str(output))}")
    differs = equal < len(both) or same is False
    return int(differs and not set(parse_flags(flags)) - set(OTHERS))


def span(steps: str | None, last: int) -> tuple[int, int]:
    """First and last step, of which each may be left out; ValueError for what is not on record.

    Example:
        >>> span("3:", 16), span(None, 16)
        ((3, 16), (1, 16))
    """
    if steps is None:
        return 1, last
    first, colon, end = steps.partition(":")
    if not colon or not all(part.isdecimal() for part in (first, end) if part):
        raise ValueError(f"--steps {steps!r} is not of the form A:B, as in --steps 1:8.")
    found = int(first or 1), int(end or last)
    if not 1 <= found[0] <= found[1] <= last:
        raise ValueError(f"--steps {steps} is not within the steps on record, 1:{last}.")
    return found


def preceding(logged: Iterable[int], start: int) -> dict[int, int]:
    """For each logged step the one logged before it: what a log tells is a mean over the steps between the two.

    Example:
        >>> preceding([1, 3, 6], 0)
        {1: 0, 3: 1, 6: 3}
    """
    steps = [start, *logged]
    return dict(zip(steps[1:], steps, strict=False))


def trainer_of(
    run: Path, described: dict[str, Any], flags: list[str], last: int, logged: Collection[int], output_dir: str
) -> Any:
    """The trainer of the run with these changes, which reads rollouts and rewards from the record until a step."""
    parts = parts_of_record(described)
    own = {
        **settings_of(described),
        **{name: parts[name] for name in MODEL_PARTS if name in parts},
        "output_dir": output_dir,
        "replay_from": str(run),
        "reward_isolation": "thread",
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
    }
    own.pop("steps_per_generation", None)  # follows from the size of a rollout batch, which is on record
    report(idle_flags(flags, NOT_REPLAYED, "prompts, completions and rewards are on record"))
    changed = train.read_run(own, flags, None, needed=())
    if not changed.model:
        raise ValueError(f"the model of {str(run)!r} has no name: give its folder by --model.")
    further: dict[str, Any] = {}
    if "tokenizer" in parts:
        further["processing_class"] = AutoTokenizer.from_pretrained(parts["tokenizer"])
    chosen = {"logging_steps", "logging_strategy"} & set(parse_flags(flags))
    return train.build_trainer(
        changed,
        training=False,
        reward_funcs=[_named(name) for name in described["rewards"] if name != no_reward.__name__],
        train_dataset=rows_of(run, described, changed.args.generation_batch_size),
        callbacks=[StopAfter(last, None if chosen else logged)],
        **further,
    )


def rows_of(run: Path, described: dict[str, Any], otherwise: int | None) -> list[dict[str, Any]]:
    """As many rows as the run had, since their number decides on the number of steps; those on record have content.

    Environments need no prompt; and of a stream, whose length is not known, there are `otherwise` many rows.
    """
    rows = {number: {**row, "prompt": row.get("prompt") or "?"} for number, row in read_data(run / FOLDER).items()}
    found = next(iter(rows.values()))
    count = described.get("dataset", {}).get("rows", "")
    return [rows.get(number, found) for number in range(int(count) if count.isdecimal() else otherwise or 1)]


def _named(name: str) -> Callable[..., list[float]]:
    def reward(completions: list[Any], **kwargs: Any) -> list[float]:
        raise RuntimeError(f"a replay calls no reward function, but called {name}")

    reward.__name__ = name
    return reward


def weights_are_equal(run: Path, output: Path) -> bool | None:
    """True if both folders have the same safetensors files; None where the run has none."""
    names = sorted(path.name for path in run.glob("*.safetensors"))
    if not names:
        return None
    return all((output / name).is_file() and filecmp.cmp(run / name, output / name, shallow=False) for name in names)


def table(both: Sequence[tuple[int, dict[str, Any], dict[str, Any]]]) -> str:
    """A line for each step, or for some of many: values of the record and of the replay."""
    most = min(len(both), MOST_LINES)
    shown = [both[n * (len(both) - 1) // max(most - 1, 1)] for n in range(most)]
    lines = ["  step" + "".join(f"{name + ', recorded':>22}{'replayed':>14}" for name in COMPARED)]
    for step, *pair in shown:
        cells = "".join(f"{old:>22.6g}{new:>14.6g}" for old, new in zip(*map(_values, pair), strict=True))
        lines.append(f"{step:>6}{cells}")
    return "\n".join(lines)


def _values(line: dict[str, Any]) -> list[float]:
    return [line.get(name, math.nan) for name in COMPARED]
