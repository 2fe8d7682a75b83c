"""What a generation leaves in the logs: metrics, and the completions themselves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from covey.algorithms.credit import Scores
from covey.core.batch import TrainBatch
from covey.core.media import thumbnails
from covey.core.metrics import Mean, Stat, merge_all
from covey.core.rollout import Rollout
from covey.core.transcript import Counts, count
from covey.rewards.batch import RewardContext
from covey.rollout.collector import PromptSample


@dataclass
class RewardLog:
    """What reward functions log beside their rewards, while they run.

    Attributes:
        columns: extra columns of the completions table, by name, one value per rollout of this process.
        metrics: scalars by name.
    """

    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, Stat] = field(default_factory=dict)

    def log_extra(self, column: str, values: list[Any]) -> None:
        """Add a column to the completions table."""
        self.columns[column] = list(values)

    def log_metric(self, name: str, value: float) -> None:
        """Add a value to a metric, averaged over calls, processes and the logging window."""
        merge_all(self.metrics, {name: Mean(float(value), 1.0)})

    def context(self, trainer_state: Any) -> RewardContext:
        """What the reward functions are given."""
        return RewardContext(trainer_state, self.log_extra, self.log_metric)


@dataclass(frozen=True)
class RankShard:
    """One process's part of a generation, as every process gets to see it.

    Attributes:
        scores: what its n completions earned.
        kl: [n] KL penalty of each completion, or None.
        tokens: trained tokens of each rollout.
        parts: nominal micro-batches.
        lengths, truncated, prompt_lengths: of each rollout: sampled tokens, whether it was cut off, prompt tokens.
        oldest: optimizer steps by which the weights that sampled a token are older than the current ones, at most.
        table: columns of the completions table.
    """

    scores: Scores
    kl: Tensor | None
    tokens: list[int]
    parts: int
    lengths: list[int]
    truncated: list[bool]
    prompt_lengths: list[int]
    oldest: int
    table: dict[str, list[Any]]


def describe(
    draws: list[PromptSample], rollouts: list[Rollout], columns: dict[str, list[Any]], images: bool = True
) -> dict[str, list[Any]]:
    """The completions table's columns that do not depend on other processes; with `images`, small ones of each."""
    known: dict[int, bytes] = {}
    return {
        "images": [thumbnails(rollout.images, known) if images else [] for rollout in rollouts],
        "prompt": [rollout.asked(draw.row) or "" for draw, rollout in zip(draws, rollouts, strict=True)],
        "completion": [rollout.completion for rollout in rollouts],
        "finish": [str(rollout.finish) for rollout in rollouts],
        "counts": [_counts(rollout) for rollout in rollouts],
        "error": [rollout.error for rollout in rollouts],
        "extras": [{name: values[i] for name, values in columns.items()} for i in range(len(rollouts))],
    }


def _counts(rollout: Rollout) -> Counts:
    """Turns and calls: as the messages show, which hold calls that were not executed, and as the rollout says."""
    shown, answered = count(rollout.completion), sum(rollout.calls.values())
    failed = answered - rollout.calls.get("ok", 0) if answered else shown.failed_calls
    return Counts(rollout.num_turns or shown.turns, max(answered, shown.calls), failed)


def sampling_entropy(rollouts: Sequence[Rollout], batch: TrainBatch) -> dict[str, Stat]:
    """The `entropy` metric, over every trained token, where the engine measured it while sampling; else nothing."""
    if any(rollout.entropies is None for rollout in rollouts):
        return {}
    flat = torch.tensor([entropy for rollout in rollouts for entropy in rollout.entropies or []])
    trained = flat[batch.sampled.cpu()]
    return {"entropy": Mean(trained.sum().item(), len(trained))}


class GlobalBatch:
    """All processes' shares of one generation, joined.

    Args:
        shares: in the order of ranks.
        rank: this process.
    """

    def __init__(self, shares: list[RankShard], rank: int):
        self.shares = shares
        self.scores = Scores.joined([share.scores for share in shares])
        self.kl = (
            torch.cat([share.kl for share in shares if share.kl is not None]) if shares[0].kl is not None else None
        )
        self.lengths = self._joined(lambda s: s.lengths)
        self.truncated = self._joined(lambda s: s.truncated)
        self.total_tokens = sum(sum(share.tokens) for share in shares)
        self.total_parts = sum(share.parts for share in shares)
        self.oldest = max(share.oldest for share in shares)
        self.processed_tokens = sum(self.lengths) + sum(self._joined(lambda s: s.prompt_lengths))
        sizes = [len(share.lengths) for share in shares]
        self.mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))

    def __len__(self) -> int:
        """Rollouts of all processes."""
        return len(self.lengths)

    def table(self, names: list[str], advantages: Tensor) -> dict[str, Any]:
        """The completions table over all processes, as arguments of `CompletionLog.add`.

        Args:
            names: of the reward functions.
            advantages: [rollouts], of each one's first token.
        """
        cells: list[dict[str, Any]] = self._joined(lambda share: share.table["extras"])
        extra_names = dict.fromkeys(name for cell in cells for name in cell)
        return {
            "prompts": self._joined(lambda share: share.table["prompt"]),
            "completions": self._joined(lambda share: share.table["completion"]),
            "rewards": {name: none_for_nan(self.scores.rewards[:, k]) for k, name in enumerate(names)},
            "advantages": advantages.tolist(),
            "extras": {name: [cell.get(name) for cell in cells] for name in extra_names} | self._steps(names),
            "finish": self._joined(lambda share: share.table["finish"]),
            "counts": self._joined(lambda share: share.table["counts"]),
            "errors": self._joined(lambda share: share.table["error"]),
            "images": self._joined(lambda share: share.table["images"]),
            "lengths": self.lengths,
        }

    def _steps(self, names: list[str]) -> dict[str, list[Any]]:
        """A column with the steps of each process function: the last token and the reward of each."""
        return {
            f"{names[function]}_steps": [
                [[float(end), None if reward != reward else reward] for end, reward in pairs]
                for pairs in self.scores.steps_of(function)
            ]
            for function in self.scores.process_functions
        }

    def _joined(self, part: Callable[[RankShard], list[Any]]) -> list[Any]:
        return [value for share in self.shares for value in part(share)]


def none_for_nan(values: Tensor) -> list[float | None]:
    """Numbers as tables hold them."""
    return [None if value != value else value for value in values.tolist()]
