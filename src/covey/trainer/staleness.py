"""How old the weights were that sampled a token, in optimizer steps, and what a trainer makes of it.

The correction of stale samples is that of any mismatch between the engine's distribution and the trainer's
(`covey.core.ratios.mismatch_weights`): the engine reports log-probs under the weights it sampled with, the trainer
works out its own under the weights it trains, and the ratio of the two holds rounding and staleness alike. Not here:
when what is sampled (`covey.trainer.async_rollouts`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from covey.core.metrics import Max, Mean, Stat
from covey.core.rollout import Rollout


def staleness(rollout: Rollout, version: int) -> list[int]:
    """Of every sampled token: how many optimizer steps its weights are older than `version`; empty if unknown."""
    if rollout.versions is None:
        return []
    pairs = zip(rollout.versions, rollout.sampled, strict=True)
    return [version - sampled_with for sampled_with, sampled in pairs if sampled]


def staleness_stats(rollouts: Sequence[Rollout], version: int) -> dict[str, Stat]:
    """The metrics, over every sampled token."""
    ages = [age for rollout in rollouts for age in staleness(rollout, version)]
    if not ages:
        return {}
    return {
        "sampling/staleness/mean": Mean(float(sum(ages)), len(ages)),
        "sampling/staleness/max": Max(float(max(ages))),
    }


def oldest(rollouts: Sequence[Rollout], version: int) -> int:
    """The largest staleness of a token."""
    return max((age for rollout in rollouts for age in staleness(rollout, version)), default=0)


def fresh_rows(rollouts: Sequence[Rollout], version: int) -> Tensor:
    """[R] int64: the rollouts that were sampled with weights of `version` from their first token to their last."""
    return torch.tensor([i for i, one in enumerate(rollouts) if not any(staleness(one, version))], dtype=torch.long)


def check_fresh_enough(oldest: int, max_staleness: int) -> None:
    """Make sure that nothing staler is trained on than the run allows.

    Args:
        oldest: the largest staleness of all processes' tokens.
        max_staleness: the run's.

    Raises:
        RuntimeError: the engine has sampled with older weights than it was given.
    """
    if oldest > max_staleness:
        raise RuntimeError(
            f"the engine says that it sampled tokens with weights {oldest} optimizer steps older than those that are"
            f" trained, and max_staleness={max_staleness} allows {max_staleness}: it has not taken weights that it was"
            " sent. Look at the engine's log; a server that was restarted comes back with the weights it was started"
            " with. A rollout function must not return rollouts that it has kept from an earlier step."
        )


def refuse_shared_weights(args: Any, engine: str, shares_policy: bool) -> None:
    """Sampling ahead needs an engine with weights of its own.

    Raises:
        ValueError: it samples with the very weights that are trained.
    """
    if args.max_staleness and shares_policy:
        raise ValueError(
            f"max_staleness={args.max_staleness} with {engine} samples with the very weights that are trained: they"
            " cannot be trained at the same time. Sample with a server (use_vllm=True with"
            " vllm_mode='server', or use_sglang=True), give the trainer an `engine` of your own, or set"
            " max_staleness=0."
        )
