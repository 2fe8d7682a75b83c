"""`covey doctor`: find out why a run does not learn, before it is started or from its record, and prove it.

The exit status is 0 if everything was examined without an error, 1 if there is an error or something could not be
examined, and 2 if nothing can be examined. A run's folder is read and not written to, except by --write.
"""

import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from covey.cli import parsers
from covey.cli.config_file import RunConfig
from covey.cli.explain.figures import fit
from covey.cli.explain.run import ExplainedRun, model_plan
from covey.cli.run_file import take_config
from covey.cli.train import build_trainer, read_run
from covey.core.findings import CheckError, CheckWarning, Finding, ranked
from covey.observability.dashboard import duration
from covey.observability.findings import write_findings
from covey.observability.record_files import FINDINGS, FOLDER
from covey.rewards import RewardError
from covey.runtime.process_memory import is_out_of_memory
from covey.runtime.quiet import without_bars
from covey.runtime.safe_text import printable
from covey_tools.doctor import (
    columns,
    completions,
    data,
    learning,
    prompts,
    recorded,
    reward_calls,
    reward_differences,
    reward_values,
)
from covey_tools.doctor.completions import FAMILIES, with_template
from covey_tools.doctor.data import sets_of
from covey_tools.doctor.examined import ExaminedRun, quiet

Check = Callable[[ExaminedRun], Iterator[Finding]]
OF_OTHER_TEXTS = (
    "reward-order",
    "reward-sign",
    "reward-constant",
    "reward-saturated",
    "reward-unreachable",
    "reward-length",
    "reward-repeats",
)
TOOLS = ("tools-unused", "tools-malformed", "tools-failing", "tools-budget")
STAGES: tuple[dict[Check, tuple[str, ...]], ...] = (
    {
        reward_calls.failing: ("reward-failing",),
        prompts.tokenizer_drift: ("tokenizer-drift",),
        prompts.round_trip: ("prompt-round-trip",),
        learning.engine: ("engine-mismatch",),
        learning.routes: ("routes-differ",),
        learning.penalties: ("engine-mismatch",),
        learning.dropout: ("engine-mismatch",),
        data.empty: ("prompt-empty",),
        data.contradicting: ("data-contradicts",),
        data.repeated: ("data-repeated",),
        data.answer_in_prompt: ("answer-in-prompt",),
        data.evaluation: ("eval-overlap", "eval-differs"),
    },
    {
        completions.temperature: ("temperature-low",),
        completions.experiments: ("template", "never-ends", "completions-cut"),
        completions.calls: TOOLS,
        reward_calls.order: ("reward-order",),
        data.order: ("data-order",),
    },
    {columns.columns: ("data-columns",)},
    {
        reward_values.sign: ("reward-sign",),
        reward_differences.flat: ("reward-constant", "reward-saturated", "reward-unreachable"),
        reward_values.scale: ("reward-scale",),
        reward_values.small: ("reward-scale",),
        reward_values.length: ("reward-length", "reward-repeats"),
        reward_values.signal: ("groups-small", "signal-sparse"),
    },
    {
        learning.kl_scale: ("kl-scale",),
        learning.bonus_scale: ("kl-scale",),
        learning.decay: ("learning-rate-high",),
        learning.rounding: ("weights-rounded",),
        learning.learning_rate: ("learning-rate-high", "learning-rate-low"),
        reward_calls.slow: ("reward-slow",),
    },
)
"""Checks with the codes that they can find, in the order of causes: an error of one stage explains the next ones'."""

OF_REWARDS: tuple[Check, ...] = (
    *(reward_calls.failing, reward_calls.order, reward_calls.slow, data.order, columns.columns),
    *(reward_values.sign, reward_differences.flat, reward_values.scale, reward_values.small),
    *(reward_values.length, reward_values.signal),
    *(learning.kl_scale, learning.bonus_scale, learning.decay, learning.learning_rate),
)
"""Checks of rewards, and of updates by their advantages: a run that only a teacher teaches has neither."""

ENOUGH = 4  # prompts without a signal that say something of a run
REASONS = {
    "time": "no time was left: give more by --seconds",
    "part": "a part of the run cannot be made again",
    "kind": "where tools or an environment decide on the reward, other texts tell nothing of it",
    "taught": "there are no rewards: the policy learns from its teacher alone",
}
OF_THE_RUN = ("kind", "taught")  # reasons that lie in what the run is: it is examined completely all the same
UNTOUCHED = ("--report_to", "none", "--record", "off", "--push_to_hub", "false")  # a run leaves nothing behind


@without_bars()
def main(argv: Sequence[str]) -> int:
    given, flags = parsers.doctor().parse_known_args(list(argv))
    summary: dict[str, Any] = {}
    recorded_run = Path(given.run) if Path(given.run).is_dir() else None
    if recorded_run is not None:
        if flags:
            raise ValueError(f"{flags[0]!r} is no option for a run that has ended: settings can follow a run file.")
        findings = ranked(recorded.examine(recorded_run, given.seconds, summary, staged))
        if given.write:
            write_findings(recorded_run / FOLDER / FINDINGS, findings)
    else:
        if given.write:
            raise ValueError(f"--write needs the output_dir of a run with a record, and {given.run!r} is no folder.")
        findings = ranked(before(given.run, flags, given.seconds, summary))
    findings = with_signal(findings, summary)
    grave = any(one.level == "error" for one in findings)
    missing = {reason for reason in summary.get("not_examined", {}).values() if reason not in OF_THE_RUN}
    summary["verdict"] = "errors" if grave else "incomplete" if missing else "examined"
    if given.json:
        print(json.dumps({"run": given.run, "findings": [one.as_dict() for one in findings], "summary": summary}))
    else:
        print(printable_report(findings, summary))
    return int(summary["verdict"] != "examined")


def before(path: str, flags: list[str], seconds: float, summary: dict[str, Any]) -> Iterator[Finding]:
    """Findings about a run file: what can be known without its model, then with a few samples."""
    began = time.perf_counter()
    path_of_config, settings = take_config([path, *flags])
    with tempfile.TemporaryDirectory(prefix="covey-doctor-") as place, quiet():
        own, said = (*UNTOUCHED, "--output_dir", place), list[warnings.WarningMessage]()
        with _kept(said):
            read_run(path_of_config, settings, None)  # with what the doctor changes, there would be other warnings
        run = read_run(path_of_config, [*settings, *own], None)
        found = list(fit(ExplainedRun(run.args, model_plan(run, 1, (512, 512)))))
        yield from found
        if any(one.level == "error" for one in found):
            return
        try:
            with _kept(said):
                trainer = build_trainer(run)
        except Exception as error:
            explained = refusal(error, run)
            if not explained:
                raise
            yield from explained
            return
        finally:
            yield from of_checks(said)
        left = max(seconds - (time.perf_counter() - began), seconds / 10)  # of what loading has left
        sets = sets_of(trainer.eval_dataset)
        examined = ExaminedRun(trainer, trainer.train_dataset, left, summary, evaluations=sets)
        try:
            yield from staged(examined)
        finally:
            trainer.rollouts.close()


@contextmanager
def _kept(said: list[warnings.WarningMessage]) -> Iterator[None]:
    """Keep the warnings that are given within, also those before an error."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            yield
        finally:
            said += caught


def of_checks(said: Sequence[warnings.WarningMessage]) -> Iterator[Finding]:
    """Findings that the checks of a start warned of, one for each code."""
    given = dict.fromkeys(one.message.finding for one in said if isinstance(one.message, CheckWarning))
    for code in dict.fromkeys(one.code for one in given):
        *others, last = (one for one in given if one.code == code)
        yield replace(last, evidence=" ".join([*(one.sentence for one in others), last.evidence]))


def refusal(error: BaseException, run: RunConfig) -> list[Finding]:
    """The findings that an error stands for; none for one that no check has found."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, CheckError | RewardError):
        cause = cause.__cause__
    if isinstance(cause, CheckError):
        return [replace(one, proof=_with_a_template(run, one.code)) for one in cause.findings]
    if isinstance(cause, RewardError):
        return [Finding("reward-failing", "error", str(cause), "Correct the reward function.", "It was called.")]
    if is_out_of_memory(error):
        fix = "Take a smaller model, peft, or fewer tokens at a time."
        return [Finding("memory", "error", str(error)[:300], fix)]
    return []


def _with_a_template(run: RunConfig, code: str) -> str:
    """Completions under the template of a family whose control tokens the tokenizer has, where it has no template."""
    tokenizer: Any = AutoTokenizer.from_pretrained(str(run.model)) if code == "template" else None
    if tokenizer is None or tokenizer.chat_template is not None:
        return "The trainer refuses to start."
    for name in FAMILIES:
        if with_template(tokenizer, name):
            trainer = build_trainer(run, processing_class=tokenizer)
            base = ExaminedRun(trainer, trainer.train_dataset, 40.0, {}).base
            ended = round((1 - base.cut) * len(base.present))
            return (
                f"With the template of {name}, whose control tokens the tokenizer has, {ended} of"
                f" {len(base.present)} completions end by themselves and the mean reward is {base.mean:.3g}."
            )
    return "The trainer refuses to start."


def staged(run: ExaminedRun, stages: int | None = None) -> Iterator[Finding]:
    """All findings up to the first stage with an error, as far as the time goes; of the first `stages` alone."""
    run.summary.update(reward_values.summary_of(run))
    if not run.rescores:
        run.leave_out("kind", *OF_OTHER_TEXTS, "data-columns")
    found: dict[str, str] = {}  # levels by code
    for stage in STAGES[:stages]:
        for check, codes in stage.items():
            if run.suite.abstains and check in OF_REWARDS:
                run.leave_out("taught", *codes)
                continue
            if run.left < 0 and check not in (reward_calls.failing, reward_calls.slow):  # which say why time has passed
                run.leave_out("time", *codes)
                continue
            for finding in check(run):
                if (supported := finding.supported) is not None:
                    found[supported.code] = supported.level
                    yield supported
        if "error" in found.values():
            break
    if "reward-order" not in found and not run.suite.abstains:
        yield from reward_calls.remembered(run)
    if "error" in found.values():
        return
    per_step = run.summary.get("seconds_of_sampling_and_updates", 0.0)
    run.summary["steps"], run.summary["hours"] = run.steps, round(per_step * run.steps / 3600, 4)


def with_signal(findings: list[Finding], summary: dict[str, Any]) -> list[Finding]:
    """The findings, and one more where no group had a signal and no error says why."""
    if summary.get("signal", True) or any(one.level == "error" for one in findings):
        return findings
    few = summary.get("prompts", 0) < ENOUGH and "time" in summary.get("not_examined", {}).values()
    none = Finding(
        "signal-sparse",
        "note" if few else "error",  # of two or three groups none may have one by chance
        f"no group has a signal: the rewards of all {summary.get('completions', 0)} completions are equal within their"
        f" groups (mean reward {summary.get('reward')}).",
        "Read the completions, and see what the reward gives to a right answer: `covey rewards test FILE.py:f --run"
        " RUN`, or `covey view RUN`.",
        "Nothing was tried: see what was not examined." if summary.get("not_examined") else "",
    )
    return ranked([*findings, none])


def printable_report(findings: list[Finding], summary: dict[str, Any]) -> str:
    not_examined: dict[str, str] = summary.get("not_examined", {})
    lines = [str(finding) for finding in findings]
    if not lines:
        healthy = "Nothing found: the run looks healthy."
        whole = summary.get("verdict", "examined") == "examined"
        lines = [healthy if whole else "Nothing found in what could be examined."]
    if summary.get("completions"):
        expected, of_rewards = summary["groups_with_signal_expected"], ""
        if expected is not None:
            of_rewards = (
                f"mean reward {summary['reward']}, {expected:.0%} of the groups are expected to have a signal, "
            )
        lines.append(
            f"Examined {summary['completions']} completions of {summary['prompts']} prompts: {of_rewards}"
            f"{summary['cut']:.0%} of the completions are cut."
        )
    for reason, text in REASONS.items():
        if codes := [code for code, why in not_examined.items() if why == reason]:
            lines.append(f"Not examined: {', '.join(codes)} ({text}).")
    if summary.get("problem"):
        lines.append(f"The run's trainer cannot be made again: {summary['problem']}.")
    if summary.get("hours"):
        lines.append(f"{summary['steps']} steps take about {duration(3600 * summary['hours'])} on this machine.")
    return "\n".join("\n".join(map(printable, text.split("\n"))) for text in lines)
