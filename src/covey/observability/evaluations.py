"""Evaluation sets of a log. Every evaluation logs its runtime and a reward, which tells names of sets from metrics'."""

from collections.abc import Mapping
from typing import Any


def evaluation_sets(log: Mapping[str, Any]) -> list[str]:
    """Names of the evaluation sets in a log; "" is the set without a name."""
    if "eval_loss" in log or "eval_reward" in log:
        return [""]
    names = [key[5:-7] for key in log if key.startswith("eval_") and key.endswith("_reward")]
    return [name for name in names if f"eval_{name}_loss" in log or f"eval_{name}_runtime" in log]


def all_sets(log_history: list[dict[str, Any]]) -> list[str]:
    """The sets of a whole run, in the order of their first evaluation."""
    return list(dict.fromkeys(name for log in log_history for name in evaluation_sets(log)))


def prefix(name: str) -> str:
    return f"eval_{name}_" if name else "eval_"


def metrics_of(name: str, log: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(prefix(name)): value for key, value in log.items() if key.startswith(prefix(name))}


def with_interval(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Labels and texts of the shares (`pass@k`, `maj@k`) among the `metrics_of` a set, with their intervals."""
    return [
        (name, f"{value:.1%} ({100 * metrics[f'{name}_low']:.1f} to {100 * metrics[f'{name}_high']:.1f})")
        for name, value in metrics.items()
        if "@" in name and f"{name}_low" in metrics and f"{name}_high" in metrics
    ]
