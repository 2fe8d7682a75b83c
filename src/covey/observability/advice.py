"""What a run that cannot learn should say: found in the logs, told once, with what to look at.

`advice` is a pure function of the logs; `Advice` is the callback that says its findings while training, and the report
lists them. Another finding is one more function in `FINDINGS`. Nothing here changes a run.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

STREAK = 5
"""Logs in a row that must agree before something is said."""

FEWEST = 2
"""Logs that must agree at the end of a run that has fewer than `STREAK`."""

Log = dict[str, Any]


def advice(log_history: list[Log], args: Any, ended: bool = False) -> dict[str, str]:
    """Findings about the latest logs of training, by name.

    Args:
        log_history: as in `Trainer.state.log_history`.
        args: the config.
        ended: the run is over: where it has fewer than `STREAK` logs, all of them are enough.

    Example:
        `advice([{"step": 1, "reward": 0.0, "frac_reward_zero_std": 1.0}] * 5, args)` has a finding `equal_rewards`.
    """
    logs = [entry for entry in log_history if "frac_reward_zero_std" in entry]
    needed = max(FEWEST, min(STREAK, len(logs))) if ended else STREAK
    found = {}
    for name, (holds, sentence) in FINDINGS.items():
        streak = _streak(logs, lambda log, holds=holds: holds(log, args))  # type: ignore[misc]
        if len(streak) >= needed:
            found[name] = sentence(streak, args)
    return found


def _streak(logs: list[Log], holds: Callable[[Log], bool]) -> list[Log]:
    """The last logs of which all satisfy `holds`, oldest first."""
    start = len(logs)
    while start and holds(logs[start - 1]):
        start -= 1
    return logs[start:]


def _rewards_are_equal(log: Log, args: Any) -> bool:
    refilled = log.get("dynamic_sampling/trained_signal", 0)  # groups that took the place of such groups
    return log["frac_reward_zero_std"] == 1 and refilled == 0


def _about_equal_rewards(logs: list[Log], args: Any) -> str:
    values = {log.get("reward") for log in logs}
    always = len(values) == 1 and all(log.get("reward_std") == 0 for log in logs)
    which = f": every reward was {_short(next(iter(values)))}" if always else ""
    return (
        f"In the last {len(logs)} logs ({_steps(logs)}) all completions of a prompt got the same reward{which}. Groups"
        " without a difference give no gradient, so nothing is learnt from rewards. The task may be too hard or too"
        " easy, or the reward may never fire: read the completions in"
        f" {args.output_dir}/completions/, and call the reward function on one of them."
    )


def _all_are_masked(log: Log, args: Any) -> bool:
    return bool(args.mask_truncated_completions) and log.get("completions/clipped_ratio") == 1


def _about_masked(logs: list[Log], args: Any) -> str:
    return (
        f"In the last {len(logs)} logs ({_steps(logs)}) every completion was cut off at max_completion_length="
        f"{args.max_completion_length}, and mask_truncated_completions=True leaves those out of the loss: nothing is"
        " trained. Raise max_completion_length, or set mask_truncated_completions=False."
    )


def _most_are_masked(log: Log, args: Any) -> bool:
    outside = log.get("sampling/importance_sampling_ratio/outside", 0)
    return outside > 0.5 and args.resolved_mismatch_mode.endswith("mask")


def _about_masked_by_mismatch(logs: list[Log], args: Any) -> str:
    level = args.resolved_mismatch_mode.partition("_")[0]
    advice = (
        "Use vllm_importance_sampling_mode='token_truncate' or 'token_mask', as a long completion's ratio multiplies"
        " that of all its tokens"
        if level == "sequence"
        else "Look for the cause of so large a difference"
    )
    return (
        f"In the last {len(logs)} logs ({_steps(logs)}) more than half of the {level}s were dropped, because engine and"
        " trainer find them too differently probable (sampling/importance_sampling_ratio/outside)."
        f" {advice}; sampling/sampling_logp_difference/mean says how far apart they are per token."
    )


FINDINGS: dict[str, tuple[Callable[[Log, Any], bool], Callable[[list[Log], Any], str]]] = {
    "equal_rewards": (_rewards_are_equal, _about_equal_rewards),
    "all_masked": (_all_are_masked, _about_masked),
    "masked_by_mismatch": (_most_are_masked, _about_masked_by_mismatch),
}
"""Name: what each of the logs must satisfy, and the sentence about those that do."""


class Advice(TrainerCallback):
    """Warns once about each finding, on the main process, while the run still goes on or at its end."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A further run may be warned again; completions that are there already are pointed out."""
        self._said = set()
        folder = Path(args.output_dir) / "completions"
        if state.is_world_process_zero and state.global_step == 0 and any(folder.glob("completions_*.parquet")):
            warnings.warn(
                f"{folder} holds completions of an earlier run. This run replaces those of the same step; those of"
                " other steps stay, and they are of the earlier run. Choose another output_dir to keep the two apart.",
                UserWarning,
                stacklevel=2,
            )

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the logs, the newest included."""
        self._say(args, state, ended=False)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look again: a short run has few logs."""
        self._say(args, state, ended=True)

    def _say(self, args: Any, state: Any, ended: bool) -> None:
        if not state.is_world_process_zero:
            return
        for name, sentence in advice(state.log_history, args, ended).items():
            if name not in self._said:
                self._said.add(name)
                warnings.warn(sentence, UserWarning, stacklevel=2)


class LogEnds(TrainerCallback):
    """Logs the first and the last step too, whatever `logging_steps` is, so that no run is without a curve."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the training loop."""
        last = control.should_training_stop or 0 < state.max_steps <= state.global_step
        if args.logging_strategy != "no" and (state.global_step == 1 or last):
            control.should_log = True


def _steps(logs: list[Log]) -> str:
    first, last = logs[0].get("step"), logs[-1].get("step")
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)
