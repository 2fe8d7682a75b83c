"""`covey doctor`: find out why a run does not learn, before it is started or from its record, and prove it.

The exit status is 0 without a finding of level error, 1 with one, 2 if nothing can be examined.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from covey.cli.config_file import RunConfig
from covey.cli.doctor import columns, completions, learning, prompts, recorded, rewards
from covey.cli.doctor.completions import FAMILIES, with_template
from covey.cli.doctor.examined import ExaminedRun, quiet
from covey.cli.explain.figures import fit
from covey.cli.explain.run import ExplainedRun, model_plan
from covey.cli.train import build_trainer, read_run, take_config
from covey.observability.dashboard import duration
from covey.observability.findings import Finding, ranked, write_findings
from covey.observability.record_files import FOLDER
from covey.rewards.contract import MissingArgument
from covey.runtime.process_memory import is_out_of_memory
from covey.runtime.quiet import without_bars
from covey.runtime.safe_text import printable

Check = Callable[[ExaminedRun], Iterator[Finding]]
STAGES: tuple[tuple[Check, ...], ...] = (
    (rewards.failing, prompts.tokenizer_drift, prompts.round_trip, learning.engine, learning.penalties),
    (completions.temperature, completions.experiments, rewards.order),
    (columns.columns,),
    (rewards.flat, rewards.scale, rewards.length, rewards.signal),
    (learning.kl_scale, learning.learning_rate, rewards.slow),
)
"""In the order of causes: an error of one stage explains what the next ones would find."""

REFUSALS = {
    "has no chat template": ("template", "Set the tokenizer's chat_template to that of the model, or give text."),
    "tokens but the model embeds only": ("tokenizer-drift", "Save the model's own tokenizer into its folder."),
    "no room to answer": ("prompt-round-trip", "Shorten or remove such rows, or take a longer context."),
    "names an end-of-sequence token": ("never-ends", "Set eos_token of the model's tokenizer."),
    "is empty: it encodes to no tokens": ("prompt-round-trip", "Use the model's own tokenizer, or remove the row."),
    "chat template cannot render": ("template", "Correct the tokenizer's chat_template, or the messages."),
    "all samples": ("reward-failing", "Correct the reward function."),
}
"""Part of the message of a run that does not start: code and fix."""

UNTOUCHED = ("--report_to", "none", "--record", "off", "--push_to_hub", "false")  # a run leaves nothing behind


@without_bars()
def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="covey doctor", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="a run file with any of its settings (--field value), or output_dir")
    parser.add_argument("--json", action="store_true", help="print findings as JSON")
    parser.add_argument("--seconds", type=float, default=75.0, help="for experiments (75)")
    given, flags = parser.parse_known_args(list(argv))
    summary: dict[str, Any] = {}
    if Path(given.run).is_dir():
        findings = ranked(recorded.examine(Path(given.run), given.seconds, summary, staged))
        write_findings(Path(given.run) / FOLDER / "findings.json", findings)
    else:
        findings = ranked(before(given.run, flags, given.seconds, summary))
    if given.json:
        print(json.dumps({"run": given.run, "findings": [one.as_dict() for one in findings], "summary": summary}))
    else:
        print(printable_report(findings, summary))
    return int(any(one.level == "error" for one in findings))


def before(path: str, flags: list[str], seconds: float, summary: dict[str, Any]) -> Iterator[Finding]:
    """Findings about a run file: what can be known without its model, then with a few samples."""
    began = time.perf_counter()
    path_of_config, settings = take_config([path, *flags])
    with tempfile.TemporaryDirectory(prefix="covey-doctor-") as place, quiet():
        own = (*UNTOUCHED, "--output_dir", place)
        run = read_run(path_of_config, [*settings, *own], None)
        found = list(fit(ExplainedRun(run.args, model_plan(run, 1, (512, 512)))))
        yield from found
        if any(one.level == "error" for one in found):
            return
        try:
            trainer = build_trainer(run)
        except Exception as error:
            explained = refusal(error, run)
            if explained is None:
                raise
            yield explained
            return
        left = max(seconds - (time.perf_counter() - began) / 2, seconds / 4)  # a large model takes long to load
        examined = ExaminedRun(trainer, trainer.train_dataset, left, summary)
        yield from staged(examined)
        trainer.rollouts.close()


def refusal(error: Exception, run: RunConfig) -> Finding | None:
    """The finding that an error stands for; None for one that is no cause of poor learning."""
    text = str(error)
    if isinstance(error, MissingArgument):
        return Finding(
            "data-columns",
            "error",
            text.partition(" Rename")[0],
            "Rename the column (`columns: {old: new}` in the run file), or the argument.",
            "The trainer refuses to start.",
        )
    if is_out_of_memory(error):
        return Finding("memory", "error", text[:300], "Take a smaller model, peft, or fewer tokens in a micro-batch.")
    for part, (code, fix) in REFUSALS.items():
        if part in text:
            proof = _with_a_template(run) if part == "has no chat template" else "The trainer refuses to start."
            return Finding(code, "error", text, fix, proof)
    return None


def _with_a_template(run: RunConfig) -> str:
    """Completions under the template of a family whose control tokens the tokenizer has."""
    tokenizer: Any = AutoTokenizer.from_pretrained(str(run.model))
    for name in FAMILIES:
        if with_template(tokenizer, name):
            trainer = build_trainer(run, processing_class=tokenizer)
            base = ExaminedRun(trainer, trainer.train_dataset, 40.0, {}).base
            ended = round((1 - base.cut) * len(base.rollouts))
            return (
                f"With the template of {name}, whose control tokens the tokenizer has, {ended} of"
                f" {len(base.rollouts)} completions end by themselves and the mean reward is {base.mean:.3g}."
            )
    return "The trainer refuses to start."


def staged(run: ExaminedRun) -> Iterator[Finding]:
    """All findings up to the first stage with an error, as far as the time goes."""
    run.summary.update(rewards.summary_of(run))
    left_out: list[str] = []
    for stage in STAGES:
        levels = []
        for check in stage:
            if run.left < 0 and check is not rewards.failing:  # which says why time has passed
                left_out.append(check.__name__)
                continue
            for finding in check(run):
                levels.append(finding.level)
                yield finding
        if left_out:
            run.summary["left_out"] = left_out
        if "error" in levels:
            return
    per_step = run.summary.get("seconds_of_sampling_and_updates", 0.0)
    run.summary["steps"], run.summary["hours"] = run.steps, round(per_step * run.steps / 3600, 4)


def printable_report(findings: list[Finding], summary: dict[str, Any]) -> str:
    left_out = summary.get("left_out")
    lines = [str(finding) for finding in findings]
    if not lines:
        lines = ["Nothing found." if left_out else "Nothing found: the run looks healthy."]
    if summary.get("completions"):
        expected = summary["groups_with_signal_expected"]
        lines.append(
            f"Examined {summary['completions']} completions of {summary['prompts']} prompts: mean reward"
            f" {summary['reward']}, {expected:.0%} of the groups are expected to have a signal, {summary['cut']:.0%} of"
            " the completions are cut."
        )
    if left_out:
        lines.append(f"No time was left to examine {', '.join(left_out)}: give more by --seconds.")
    if summary.get("hours"):
        lines.append(f"{summary['steps']} steps take about {duration(3600 * summary['hours'])} on this machine.")
    return "\n".join("\n".join(map(printable, text.split("\n"))) for text in lines)
