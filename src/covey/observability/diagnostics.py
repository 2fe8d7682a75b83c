"""Diagnostics of runs that do not learn: findings in their metrics, each reported once, with what to check."""

import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median
from typing import Any

from transformers import TrainerCallback

from covey.observability.findings import Finding, add_findings
from covey.observability.record_files import FOLDER, WARNINGS

STREAK = 5  # logs or steps in a row that must agree before something is said
BEGIN = 3  # with which the latest are compared

Log = dict[str, Any]


def advice(log_history: Sequence[Log], args: Any, ended: bool = False, entries: str = "logs") -> list[Finding]:
    """Findings about the latest logs, or steps, of training; all are enough if a run `ended` before `STREAK`."""
    logs = [entry for entry in log_history if "frac_reward_zero_std" in entry]
    needed = max(2, min(STREAK, len(logs))) if ended else STREAK
    found = [one for course in COURSES if (one := course(logs)) is not None]
    known = {one.code for one in found}
    for code, (holds, about) in FINDINGS.items():
        if code == "signal-sparse" and "reward-lost" in known:
            continue  # which says why
        start = len(logs)
        while start and holds(logs[start - 1], args):
            start -= 1
        if len(streak := logs[start:]) >= needed:
            first, last = streak[0].get("step"), streak[-1].get("step")
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            evidence, fix = (re.sub(r"\n +", " ", text) for text in about(streak, args))
            found.append(Finding(code, "warning", f"In the last {len(streak)} {entries} ({steps}) {evidence}", fix))
    return found


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
    yield f"""The task may be too hard or too easy, or the reward may never fire: read the completions in
    {args.output_dir}/completions/, or let `covey doctor {args.output_dir}` look for the cause."""


def _masked(logs: list[Log], args: Any) -> Iterator[str]:
    yield f"""every completion was cut off at max_completion_length={args.max_completion_length}, and
    mask_truncated_completions=True leaves those out of the loss: nothing is trained."""
    yield "Raise max_completion_length, or set mask_truncated_completions=False."


def _most_are_masked(log: Log, args: Any) -> bool:
    outside = log.get("sampling/importance_sampling_ratio/outside", 0)
    return outside > 0.5 and args.resolved_mismatch_mode.endswith("mask")


def _masked_by_mismatch(logs: list[Log], args: Any) -> Iterator[str]:
    level = args.resolved_mismatch_mode.partition("_")[0]
    fix = "Look for the cause of so large a difference"
    if level == "sequence":
        fix = """Use vllm_importance_sampling_mode='token_truncate' or 'token_mask', as a long completion's ratio
        multiplies that of all its tokens"""
    yield f"""more than half of the {level}s were dropped, because engine and trainer find them too differently
    probable (sampling/importance_sampling_ratio/outside)."""
    yield f"{fix}; sampling/sampling_logp_difference/mean says how far apart they are per token."


def _no_calls(logs: list[Log], args: Any) -> Iterator[str]:
    yield "no rollout called a tool, so the model learns nothing about them."
    yield f"""Let the prompts say what the tools are for and show a call, or begin with a model that calls them now and
    then. If calls stand in the completions ({args.output_dir}/completions/) as text, they are written in another
    notation than they are read in: set tool_parser ({_parser(args)})."""


def _malformed(logs: list[Log], args: Any) -> Iterator[str]:
    yield "more than half of the tool calls could not be read (tools/failures/malformed)."
    yield f"""The completions in {args.output_dir}/completions/ show what was written and why it could not be read. If
    it is another notation, set tool_parser ({_parser(args)}); if the model does not know the notation, let the
    prompts show a call."""


def _parser(args: Any) -> str:
    return f"now {args.tool_parser!r}" if args.tool_parser else "now chosen by the chat template"


def _failing_tools(logs: list[Log], args: Any) -> Iterator[str]:
    slow, raised = (sum(log.get(f"tools/failures/{kind}", 0) for log in logs) for kind in ("timeout", "exception"))
    what = f"took longer than tool_timeout={args.tool_timeout:g} s" if slow > raised else "raised an exception"
    yield f"more than half of the tool calls failed although they could be read: most of those {what} (tools/failures)."
    yield f"""That may be the tools' doing rather than the model's: read the errors in {args.output_dir}/completions/,
    and make such a call yourself."""


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
        lambda log, args: log.get("tools/failures/exception", 0) + log.get("tools/failures/timeout", 0) > 0.5,
        _failing_tools,
    ),
    "tools-budget": (
        lambda log, args: log.get("rollouts/tool_budget", 0) > 0.5 and args.max_tool_calling_iterations is not None,
        _budget,
    ),
    "tools-slow": (_tools_are_slow, _slow_tools),
}
"""Code: what each of the logs must satisfy, and evidence and fix of those that do."""


def _sides(logs: Sequence[Log]) -> tuple[Sequence[Log], Sequence[Log]]:
    """The first and the latest of a course that is long enough; else nothing."""
    return (logs[:BEGIN], logs[-STREAK:]) if len(logs) >= BEGIN + STREAK else ((), ())


def _mean(logs: Sequence[Log], name: str) -> float:
    """Mean of a metric over logs; NaN if one of them lacks it."""
    values = [log[name] for log in logs if log.get(name) is not None]
    return fmean(values) if values and len(values) == len(logs) else math.nan


def _steps(logs: Sequence[Log]) -> str:
    return f"steps {logs[0].get('step')} to {logs[-1].get('step')}"


def _collapsed(logs: Sequence[Log]) -> Finding | None:
    """One answer to different prompts, where there were others at the beginning and should be."""
    begin, end = _sides(logs)
    name = "completions/distinct_across_prompts"
    (before, now), inside = (_mean(side, name) for side in (begin, end)), _mean(end, "completions/distinct")
    wanted = _mean(end, "completions/distinct_references")
    if not (now <= 0.5 * before and all(log[name] <= 0.6 * before for log in end) and inside <= 0.5):
        return None
    enough = 0.6 * wanted if wanted == wanted else 0.25  # rows without right answers may all be answered alike
    if now > enough:
        return None
    rows = f"; the right answers would be {wanted:.0%}" if wanted == wanted else ""
    return Finding(
        "collapse",
        "warning",
        f"Completions have become alike: in {_steps(end)} {now:.0%} of the answers to different prompts are distinct"
        f" (completions/distinct_across_prompts), after {before:.0%} in {_steps(begin)}{rows}.",
        "A constant answer may be paid too well: let the reward give nothing for form alone, use more and balanced"
        " rows, and lower learning_rate or set beta.",
    )


def _without_entropy(logs: Sequence[Log]) -> Finding | None:
    """The entropy vanished and the reward has not risen."""
    begin, end = _sides(logs)
    before, now = (_mean(side, "entropy") for side in (begin, end))
    first, last = (_mean(side, "reward") for side in (begin, end))
    means = [log["reward"] for log in logs if log.get("reward") is not None]
    if not (before > 0.3 and now <= 0.1 * before and last <= first + 0.1 * (max(means) - min(means))):
        return None
    return Finding(
        "learning-rate-high",
        "warning",
        f"The entropy fell from {before:.2g} nats in {_steps(begin)} to {now:.2g} in {_steps(end)}, and the reward did"
        f" not rise ({first:.3g} and {last:.3g}): the policy samples the same whatever it is paid.",
        "Lower learning_rate, or set beta or entropy_coef.",
    )


def _exploded(logs: Sequence[Log]) -> Finding | None:
    """Gradients far larger than those before."""
    norms = [log["grad_norm"] for log in logs if log.get("grad_norm")]
    before, end = [norm for norm in norms[:-BEGIN] if math.isfinite(norm)], norms[-BEGIN:]
    if len(before) < BEGIN or not (usual := median(before)) or min(end) < 20 * usual:
        return None
    return Finding(
        "learning-rate-high",
        "warning",
        f"The gradient norm was {min(end):.3g} or more in the last {BEGIN} updates, and {usual:.3g} before (median).",
        "Lower learning_rate, or go back to a checkpoint before the rise.",
    )


def _paid_for_length(logs: Sequence[Log]) -> Finding | None:
    """Rewards that follow the length of completions in every step."""
    name, (_, end) = "reward_length_correlation", _sides(logs)
    if not end or any(abs(log.get(name) or 0.0) < 0.98 for log in end) or len({log[name] > 0 for log in end}) > 1:
        return None
    return Finding(
        "reward-length",
        "warning",
        f"Within groups the reward follows the length of completions (correlation {_mean(end, name):.3f} in"
        f" {_steps(end)}, reward_length_correlation).",
        "If length is not the aim, add a reward for content that weighs more, or take the length out of the reward.",
    )


def _lost(logs: Sequence[Log]) -> Finding | None:
    """Equal rewards, as low as any, after higher ones that differed."""
    end, earlier = logs[-STREAK:], logs[:-STREAK]
    rewards = [log["reward"] for log in earlier if log.get("reward") is not None]
    last = [log["reward"] for log in end if log.get("reward") is not None]
    if not rewards or len(last) < len(end) or any(log.get("frac_reward_zero_std") != 1 for log in end):
        return None
    peak, lowest = max(rewards), min(last)
    had_signal = any(log.get("frac_reward_zero_std", 1) < 1 for log in earlier)
    if max(last) > lowest or lowest > min(rewards) or peak <= lowest or not had_signal:
        return None
    at = next(log for log in earlier if log.get("reward") == peak)
    return Finding(
        "reward-lost",
        "warning",
        f"A reward that was there has died: it was {peak:.3g} at step {at.get('step')}, and every completion of"
        f" {_steps(end)} gets {lowest:g}.",
        "Read the completions of the steps where it fell. Lower learning_rate or set beta, and go back to a checkpoint"
        " before it; or the function depends on something that has changed.",
    )


COURSES: tuple[Callable[[Sequence[Log]], Finding | None], ...] = (
    _collapsed,
    _without_entropy,
    _exploded,
    _paid_for_length,
    _lost,
)
"""What a course of logs or steps shows, most of them by comparing its beginning with its end."""


class Advice(TrainerCallback):
    """Warns once about each finding, on the main process, while the run still goes on or at its end.

    It looks at each optimizer step by `step`, which gives its metrics, so that nothing waits for `logging_steps`.
    """

    def __init__(self, step: Callable[[], Log] = dict) -> None:
        self._step = step
        self._said: set[str] = set()
        self._history: list[Log] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A further run may be warned again."""
        self._said, self._history = set(), []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        values = self._step()
        if state.is_world_process_zero:
            self._history.append({"step": state.global_step, **values})
            self._say(args, ended=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._say(args, ended=True)

    def _say(self, args: Any, ended: bool) -> None:
        found = advice(self._history, args, ended, "steps with new completions")
        new = [finding for finding in found if finding.code not in self._said]
        for finding in new:
            self._said.add(finding.code)
            warnings.warn(finding.sentence, UserWarning, stacklevel=3)
        folder = Path(args.output_dir) / FOLDER
        if new and (folder / "run.json").exists() and args.record != "off":
            with suppress(OSError):  # the run continues without it
                add_findings(folder / WARNINGS, new)


class LogEnds(TrainerCallback):
    """Logs the first and the last step too, whatever `logging_steps` is, so that no run is without a curve."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        last = control.should_training_stop or 0 < state.max_steps <= state.global_step
        if args.logging_strategy != "no" and (state.global_step == 1 or last):
            control.should_log = True
