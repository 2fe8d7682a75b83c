"""Evaluation sets of a log, by the names of its metrics.

An evaluation's metrics have the prefix `eval_`, those of a named set `eval_{name}_`. Every evaluation logs its runtime
and a reward, which distinguishes the name of a set from the name of a metric.
"""

from collections.abc import Mapping
from typing import Any


def evaluation_sets(log: Mapping[str, Any]) -> list[str]:
    """Names of the evaluation sets in a log; "" is the set without a name.

    Example:
        >>> evaluation_sets({"eval_easy_runtime": 2.0, "eval_easy_reward": 1.0})
        ['easy']
        >>> evaluation_sets({"eval_loss": 0.0, "eval_reward": 1.0, "eval_my_reward": 2.0})
        ['']
    """
    if "eval_loss" in log or "eval_reward" in log:
        return [""]
    names = [key.removeprefix("eval_").removesuffix("_reward") for key in log if _is_named_reward(key)]
    return [name for name in names if f"eval_{name}_loss" in log or f"eval_{name}_runtime" in log]


def with_interval(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Labels and texts of an evaluation's estimates: its shares (`pass@k`, `maj@k`) with their intervals.

    Args:
        metrics: of one set, without prefix.

    Example:
        >>> with_interval({"pass@1": 0.5, "pass@1_low": 0.25, "pass@1_high": 0.75, "loss": 0.1})
        [('pass@1', '50.0% (25.0 to 75.0)')]
    """
    return [
        (name, f"{value:.1%} ({100 * metrics[f'{name}_low']:.1f} to {100 * metrics[f'{name}_high']:.1f})")
        for name, value in metrics.items()
        if "@" in name and f"{name}_low" in metrics and f"{name}_high" in metrics
    ]


def prefix(name: str) -> str:
    """Prefix of the metrics of a set: `eval_`, or `eval_easy_`."""
    return f"eval_{name}_" if name else "eval_"


def all_sets(log_history: list[dict[str, Any]]) -> list[str]:
    """The sets of a whole run, in the order of their first evaluation."""
    return list(dict.fromkeys(name for log in log_history for name in evaluation_sets(log)))


def _is_named_reward(key: str) -> bool:
    return key.startswith("eval_") and key.endswith("_reward") and key != "eval_reward"
