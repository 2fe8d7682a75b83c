"""Diagnostics of runs that do not learn: findings in their metrics, each reported once, with advice."""

import math
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from transformers import TrainerCallback

from covey.core.findings import CheckWarning, Finding
from covey.observability.findings import add_findings
from covey.observability.record_files import FOLDER, WARNINGS

STREAK = 5  # logs or steps in a row that must agree before a finding is reported
BEGIN = 3  # first logs or steps, with which the latest are compared
RECENT = 100  # gradient norms whose median counts as the usual one

# What a course shows, in a run and in `covey doctor` alike
ONE_ANSWER = 0.8  # share of completions with the same answer, over different prompts
EARLIER = 0.6  # largest share at the beginning, relative to the share at the end
BEYOND = 0.25  # smallest excess over the share of the most common right answer
VANISHED, SOME = 0.1, 0.1  # largest share of the entropy that is left, and smallest entropy at the beginning, in nats
EXPLODED = 20.0  # times the usual gradient norm
RISEN = 0.1  # share of the range of rewards by which the mean must have risen
BY_LENGTH = 0.98  # correlation of rewards with lengths

Log = dict[str, Any]


@dataclass
class Streak:
    """Latest logs in a row that satisfy a condition."""

    count: int = 0
    first: Any = None  # step
    logs: deque[Log] = field(default_factory=lambda: deque(maxlen=STREAK))


class Course:
    """The course of a run so far: its first and latest logs or steps, and a summary of those in between.

    Its size does not grow with the run. `begin` and `end` are the numbers of logs that are compared.
    """

    def __init__(self, begin: int = BEGIN, end: int = STREAK) -> None:
        self.begin: list[Log] = []
        self._first, self._least = begin, begin + end
        self.end: deque[Log] = deque(maxlen=end)
        self.count = 0
        self.peak: Log | None = None  # of highest reward, before the latest
        self.lowest = math.inf  # reward before the latest
        self.means = (math.inf, -math.inf)  # lowest and highest reward of all
        self.had_signal = False  # before the latest
        self.norms: deque[float] = deque(maxlen=RECENT)
        self.streaks = {code: Streak() for code in FINDINGS}

    def add(self, log: Log, args: Any) -> None:
        """Add the metrics of a log or step; one without new completions is ignored."""
        if "frac_reward_zero_std" not in log and "teacher/kl" not in log:
            return
        if len(self.end) == self.end.maxlen:
            self._keep(self.end[0])
        self.count += 1
        if len(self.begin) < self._first:
            self.begin.append(log)
        self.end.append(log)
        if log.get("grad_norm"):
            self.norms.append(log["grad_norm"])
        if (reward := log.get("reward")) is not None:
            self.means = min(self.means[0], reward), max(self.means[1], reward)
        for code, (holds, _) in FINDINGS.items():
            if not holds(log, args):
                self.streaks[code] = Streak()
                continue
            streak = self.streaks[code]
            streak.first = log.get("step") if not streak.count else streak.first
            streak.count += 1
            streak.logs.append(log)

    def _keep(self, log: Log) -> None:
        """Add a log to the summary when it is no longer among the latest."""
        self.had_signal = self.had_signal or log.get("frac_reward_zero_std", 1) < 1
        if (reward := log.get("reward")) is None:
            return
        self.lowest = min(self.lowest, reward)
        if self.peak is None or reward > self.peak["reward"]:
            self.peak = {"reward": reward, "step": log.get("step")}

    @property
    def sides(self) -> tuple[Sequence[Log], Sequence[Log]]:
        """The first and the latest logs, if the course is long enough; else empty lists."""
        return (self.begin, [*self.end]) if self.count >= self._least else ((), ())

    @property
    def rose(self) -> bool:
        """True if the mean reward has risen from beginning to end by more than a tenth of its range."""
        first, last = (_mean(side, "reward") for side in self.sides)
        return last > first + RISEN * (self.means[1] - self.means[0])

    def findings(self, args: Any, ended: bool = False, entries: str = "logs") -> Iterator[Finding]:
        """Findings about the latest logs or steps; fewer than `STREAK` are enough if the run has `ended`."""
        found = [one for course in COURSES if (one := course(self)) is not None]
        yield from found
        needed = max(2, min(STREAK, self.count)) if ended else STREAK
        for code, streak in self.streaks.items():
            if streak.count < needed or (code == "signal-sparse" and any(one.code == "reward-lost" for one in found)):
                continue  # the lost reward is the cause
            first, last = streak.first, streak.logs[-1].get("step")
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            evidence, fix = _said(code, [*streak.logs], args)
            evidence = f"In the last {streak.count} {entries} ({steps}) {evidence}"
            yield Finding(code, "warning", evidence, fix)


def advice(log_history: Iterable[Log], args: Any, ended: bool = False) -> list[Finding]:
    """Findings about the latest logs of training; fewer than `STREAK` are enough if the run has `ended`."""
    course = Course()
    for entry in log_history:
        course.add(entry, args)
    return [*course.findings(args, ended)]


def said_of(log: Log, args: Any) -> Iterator[tuple[str, str, str]]:
    """Code, evidence and fix of each cause that can be seen in a single log."""
    for code, (holds, _) in FINDINGS.items():
        if holds(log, args):
            yield code, *_said(code, [log], args)


def _said(code: str, logs: list[Log], args: Any) -> tuple[str, str]:
    evidence, fix = (re.sub(r"\n +", " ", text) for text in FINDINGS[code][1](logs, args))
    return evidence, fix


def _no_advantage(logs: list[Log], args: Any) -> Iterator[str]:
    value = next((log["reward"] for log in logs if log.get("reward") is not None), None)
    always = all(log.get("reward") == value and log.get("reward_std") == 0 for log in logs)
    which = f": every reward was {f'{value:g}' if isinstance(value, int | float) else value}" if always else ""
    if any(log["frac_reward_zero_std"] < 1 for log in logs):
        yield "rewards differ, but all advantages from them are 0, so nothing is learnt from rewards."
        yield "Look at what makes advantages of rewards: advantages, outcome_weight, reward_clip_range."
        return
    if value is None:
        yield "no completion got a reward, as all functions returned None or failed: nothing is learnt from rewards."
        yield "Let a function return a number for every row; `covey rewards test` calls it on completions."
        return
    yield f"""all completions of a prompt got the same reward{which}. So rewards give no completion an advantage, and
    nothing is learnt from them."""
    yield f"""The task may be too hard or too easy, or the reward may never fire: look at the
    completions with `covey view {args.output_dir}`, or let `covey doctor {args.output_dir}` find the cause."""


def _masked(logs: list[Log], args: Any) -> Iterator[str]:
    name, longest = "max_completion_length", max(log.get("completions/max_length", math.inf) for log in logs)
    if args.max_turn_length is not None and longest < (args.max_completion_length or math.inf):
        name = "max_turn_length"  # with room left
    yield f"""every completion was cut off at {name}={getattr(args, name)}, and
    mask_truncated_completions=True leaves those out of the loss: nothing is trained."""
    yield f"Raise {name}, or set mask_truncated_completions=False."


def _most_are_masked(log: Log, args: Any) -> bool:
    outside = log.get("sampling/importance_sampling_ratio/outside", 0)
    return _most_are_rejected(log) or (outside > 0.5 and args.resolved_mismatch_mode.endswith("mask"))


def _most_are_rejected(log: Log) -> bool:
    return log.get("sampling/geometric_ratio/outside", 0) > 0.5


def _masked_by_mismatch(logs: list[Log], args: Any) -> Iterator[str]:
    level = args.resolved_mismatch_mode.partition("_")[0]
    fix = "Look for the cause of so large a difference"
    if _most_are_rejected(logs[-1]):
        yield f"""more than half of the completions were left out, because engine and trainer find their tokens too
        differently probable in the geometric mean (sampling/geometric_ratio/outside): bounds are
        geometric_mask_min={args.geometric_mask_min} and geometric_mask_max={args.geometric_mask_max}."""
        yield f"""{fix}, or widen the bounds; sampling/sampling_logp_difference/mean says how far apart they are per
        token."""
        return
    if level == "sequence":
        fix = """Use vllm_importance_sampling_mode='token_truncate' or 'token_mask', as a long completion's ratio
        multiplies that of all its tokens"""
    yield f"""more than half of the {level}s were dropped, because engine and trainer find them too differently
    probable (sampling/importance_sampling_ratio/outside)."""
    yield f"{fix}; sampling/sampling_logp_difference/mean says how far apart they are per token."


def _no_calls(logs: list[Log], args: Any) -> Iterator[str]:
    yield "no rollout called a tool, so the model learns nothing about them."
    yield f"""Let the prompts say what the tools are for and show a call, or begin with a model that calls them now and
    then. If calls stand in the completions as text (`covey view {args.output_dir}`), they are written in another
    notation than they are read in: set tool_parser ({_parser(args)})."""


def _malformed(logs: list[Log], args: Any) -> Iterator[str]:
    yield "more than half of the tool calls could not be read (tools/failures/malformed)."
    yield f"""`covey view {args.output_dir}` shows what was written and why it could not be read. If it is another
    notation, set tool_parser ({_parser(args)}); if the model does not know the notation, let the prompts show a
    call."""


def _parser(args: Any) -> str:
    return f"now {args.tool_parser!r}" if args.tool_parser else "now chosen by the chat template"


OF_THE_CALL = {
    "wrong_argument": "had an argument that is missing, unknown or of another type",
    "unknown_tool": "named a tool that does not exist",
}
FAILED = ("timeout", "exception", *OF_THE_CALL)
"""Kinds of failures of calls that could be read."""


def _failing_tools(logs: list[Log], args: Any) -> Iterator[str]:
    kind = max(FAILED, key=lambda kind: sum(log.get(f"tools/failures/{kind}", 0) for log in logs))
    of_the_tool = {
        "timeout": f"took longer than tool_timeout={args.tool_timeout:g} s",
        "exception": "raised an exception",
    }
    what = (of_the_tool | OF_THE_CALL)[kind]
    yield f"more than half of the tool calls failed although they could be read: most of those {what} (tools/failures)."
    if kind in OF_THE_CALL:
        yield f"""Compare names and parameters of the tools with the calls that the model writes (`covey view
        {args.output_dir}` shows them and the errors): rename the tool's, or let the prompts show a right call."""
    else:
        yield f"""That may be the tools' doing rather than the model's: read the errors with `covey view
        {args.output_dir}`, and make such a call yourself."""


def _budget(logs: list[Log], args: Any) -> Iterator[str]:
    yield f"""more than half of the rollouts ended with a call that was not executed, because
    max_tool_calling_iterations={args.max_tool_calling_iterations} was used up (rollouts/tool_budget): they have no
    answer to reward."""
    yield "Raise it, or let the prompts say how many calls there are."


def _tools_are_slow(log: Log, args: Any) -> bool:
    seconds = {name: value for name, value in log.items() if name.startswith("phase/")}
    sampling = seconds.get("phase/generate", 0) + seconds.get("phase/wait", 0)
    waits = log.get("tools/seconds", 0) > 0.5 * log.get("rollouts/seconds", float("inf"))
    return waits and sampling > 0.5 * sum(seconds.values())


def _slow_tools(logs: list[Log], args: Any) -> Iterator[str]:
    share = sum(log["tools/seconds"] for log in logs) / sum(log["rollouts/seconds"] for log in logs)
    yield f"""rollouts spent {share:.0%} of their time waiting for tools (tools/seconds of rollouts/seconds), and
    sampling is most of a step."""
    yield f"""Have more rollouts under way at a time (a larger generation_batch_size, or max_staleness=1 to train
    meanwhile), or make the tools faster: async ones, a cache, a smaller tool_timeout (now {args.tool_timeout:g}
    s)."""


DISAGREES = 3.0  # nats a token between policy and teacher; a larger model of the same family is a tenth of that away


def _another_teacher(logs: list[Log], args: Any) -> Iterator[str]:
    gap = fmean(log["teacher/kl"] for log in logs)
    yield f"""the teacher finds the policy's tokens {gap:.1f} nats a token less likely than the policy does
    (teacher/kl): they disagree about everything, not about single tokens."""
    yield f"""Mostly one of the two reads a chat template that it was not trained with, or the teacher's own prompt does
    not lead to such an answer: ask the teacher itself for a few completions. Tokens by their gap are in `covey view
    {args.output_dir}` (record="tokens"); teacher_clip bounds them."""


FINDINGS: dict[str, tuple[Callable[[Log, Any], bool], Callable[[list[Log], Any], Iterator[str]]]] = {
    "signal-sparse": (lambda log, args: log.get("frac_advantage_zero") == 1, _no_advantage),
    "completions-cut": (
        lambda log, args: bool(args.mask_truncated_completions) and log.get("completions/clipped_ratio") == 1,
        _masked,
    ),
    "engine-mismatch": (_most_are_masked, _masked_by_mismatch),
    "tools-unused": (lambda log, args: log.get("tools/call_frequency") == 0, _no_calls),
    "tools-malformed": (lambda log, args: log.get("tools/failures/malformed", 0) > 0.5, _malformed),
    "tools-failing": (
        lambda log, args: sum(log.get(f"tools/failures/{kind}", 0) for kind in FAILED) > 0.5,
        _failing_tools,
    ),
    "tools-budget": (
        lambda log, args: log.get("rollouts/tool_budget", 0) > 0.5 and args.max_tool_calling_iterations is not None,
        _budget,
    ),
    "tools-slow": (_tools_are_slow, _slow_tools),
    "teacher-disagrees": (lambda log, args: log.get("teacher/kl", 0.0) > DISAGREES, _another_teacher),
}
"""By code: the condition that each log must satisfy, and a function that gives evidence and fix."""


def _mean(logs: Sequence[Log], name: str) -> float:
    """Mean of a metric over logs; NaN if a log lacks it."""
    values = [log[name] for log in logs if log.get(name) is not None]
    return fmean(values) if values and len(values) == len(logs) else math.nan


def _steps(logs: Sequence[Log]) -> str:
    return f"steps {logs[0].get('step')} to {logs[-1].get('step')}"


def collapsed(started: float, share: float, right: float) -> bool:
    """Finding if one answer is given to most prompts, unlike at the beginning and unlike the right answers."""
    return share >= ONE_ANSWER and started <= EARLIER * share and share - right >= BEYOND


def entropy_is_lost(before: float, now: float) -> bool:
    return before > SOME and now <= VANISHED * before


def _collapsed(course: Course) -> Finding | None:
    begin, end = course.sides
    name = "completions/most_common"
    (before, now), right = (_mean(side, name) for side in (begin, end)), _mean(end, f"{name}_reference")
    known = right == right
    if not collapsed(before, now, right if known else 0.0) or (not known and course.rose):
        return None  # without right answers, one answer to all rows may be what the reward wants
    rows = f"; the most common right answer would be {right:.0%}" if known else ""
    return Finding(
        "collapse",
        "warning",
        f"Completions have become alike: in {_steps(end)} {now:.0%} of them give the same answer, to different prompts"
        f" (completions/most_common), after {before:.0%} in {_steps(begin)}{rows}.",
        "The reward may be too high for a constant answer: give nothing for format alone, use more and balanced"
        " rows, and lower learning_rate or set beta.",
    )


def _without_entropy(course: Course) -> Finding | None:
    """Finding if the entropy vanished while the reward did not rise."""
    begin, end = course.sides
    before, now = (_mean(side, "entropy") for side in (begin, end))
    first, last = (_mean(side, "reward") for side in (begin, end))
    if not entropy_is_lost(before, now) or first != first or last != last or course.rose:
        return None
    return Finding(
        "learning-rate-high",
        "warning",
        f"The entropy fell from {before:.2g} nats in {_steps(begin)} to {now:.2g} in {_steps(end)}, and the reward did"
        f" not rise ({first:.3g} and {last:.3g}): the policy samples the same completions whatever reward they get.",
        "Lower learning_rate, or set beta or entropy_coef.",
    )


def _exploded(course: Course) -> Finding | None:
    """Finding if gradients are far larger than before."""
    norms = [*course.norms]
    before, end = [norm for norm in norms[:-BEGIN] if math.isfinite(norm)], norms[-BEGIN:]
    if len(before) < BEGIN or not (usual := median(before)) or min(end) < EXPLODED * usual:
        return None
    return Finding(
        "learning-rate-high",
        "warning",
        f"The gradient norm was {min(end):.3g} or more in the last {BEGIN} updates, and {usual:.3g} before (median).",
        "Lower learning_rate, or go back to a checkpoint before the rise.",
    )


def _paid_for_length(course: Course) -> Finding | None:
    """Finding if rewards follow the length of completions in every step."""
    name, (_, end) = "reward_length_correlation", course.sides
    if not end or any(abs(log.get(name) or 0.0) < BY_LENGTH for log in end) or len({log[name] > 0 for log in end}) > 1:
        return None
    return Finding(
        "reward-length",
        "warning",
        f"Within groups the reward follows the length of completions (correlation {_mean(end, name):.3f} in"
        f" {_steps(end)}, reward_length_correlation).",
        "If length is not the aim, add a reward for content that weighs more, or take the length out of the reward.",
    )


def lost(course: Course) -> bool:
    """True if all rewards are equal and as low as any before, after higher rewards that differed."""
    end = course.end
    last = [log["reward"] for log in end if log.get("reward") is not None]
    if course.peak is None or len(last) < len(end) or any(log.get("frac_reward_zero_std") != 1 for log in end):
        return False
    lowest = min(last)
    alike = max(last) <= lowest + 1e-9 and lowest <= course.lowest + 1e-9
    return alike and course.peak["reward"] > lowest + 1e-9 and course.had_signal


def _lost(course: Course) -> Finding | None:
    if course.peak is None or not lost(course):
        return None
    return Finding(
        "reward-lost",
        "warning",
        f"Completions no longer get the reward that they got before: its mean was {course.peak['reward']:.3g} at step"
        f" {course.peak['step']}, and every completion of {_steps([*course.end])} gets {course.end[-1]['reward']:g}.",
        "Read the completions of the steps where it fell. Lower learning_rate or set beta, and go back to a checkpoint"
        " before it; or the function depends on something that has changed.",
    )


COURSES: tuple[Callable[[Course], Finding | None], ...] = (
    _collapsed,
    _without_entropy,
    _exploded,
    _paid_for_length,
    _lost,
)
"""Functions that find causes in the course of a run, mostly by comparing its beginning with its end."""


class Advice(TrainerCallback):
    """Warns once about each finding, on the main process, during the run or at its end.

    `step` returns the metrics of each optimizer step, so that findings do not wait for `logging_steps`.
    """

    def __init__(self, step: Callable[[], Log] = dict) -> None:
        self._step = step
        self._said: set[str] = set()
        self._course = Course()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start again: a further run may warn again."""
        self._said, self._course = set(), Course()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        values = self._step()
        if state.is_world_process_zero:
            self._course.add({"step": state.global_step, **values}, args)
            self._say(args, ended=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._say(args, ended=True)

    def _say(self, args: Any, ended: bool) -> None:
        found = self._course.findings(args, ended, "steps with new completions")
        new = [finding for finding in found if finding.code not in self._said]
        for finding in new:
            self._said.add(finding.code)
            warnings.warn(CheckWarning(finding), stacklevel=3)
        folder = Path(args.output_dir) / FOLDER
        if new and (folder / "run.json").exists() and args.record != "off":
            with suppress(OSError):  # the run continues without it
                add_findings(folder / WARNINGS, new)


class LogEnds(TrainerCallback):
    """Logs the first and the last step as well, whatever `logging_steps` is, so that every run has a curve."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        last = control.should_training_stop or 0 < state.max_steps <= state.global_step
        if args.logging_strategy != "no" and (state.global_step == 1 or last):
            control.should_log = True
