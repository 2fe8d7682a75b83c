"""Demonstrations: rows of a dataset whose completions the policy learns to predict, some of them in each step.

They are rollouts without a sampled token that join a step's rollouts when it is planned, so that packing, splits and
processes treat them alike. The seed and the number of a step decide which ones it has.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import datasets
import torch

from covey.core.batch import LOSS_FIELDS, UNREPORTED, TrainBatch, collate, join
from covey.core.findings import CheckError, Finding
from covey.core.losses import Weighting
from covey.core.records import FinishReason, Rollout
from covey.core.stats import Mean, Stat
from covey.core.supervision import DEMONSTRATIONS
from covey.core.terms import TermCounts
from covey.rollout.prompts import PromptCodec, sample_seed
from covey.runtime.user_code import report
from covey.trainer.distributed.exchange import OwnRollouts, RolloutIndex, join_indexes
from covey.trainer.evaluation.suites import with_user_messages
from covey.trainer.microbatches import micro_batch_tokens

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
"""Kinds of files by their suffix, as `datasets.load_dataset` names them."""


@dataclass(frozen=True, eq=False)
class Demonstrations:
    """The demonstrations of a run, and which of them each step trains on."""

    rollouts: Sequence[Rollout]  # whose completions are to be predicted
    per_step: int  # in each optimizer step, over all processes
    seed: int
    processes: int
    weighting: Weighting  # of tokens, as in the loss
    rows: int  # of a nominal micro-batch
    max_completion_length: int | None

    def of_step(self, step: int) -> list[Rollout]:
        """Demonstrations of the optimizer step after `step` others: each comes once before any comes again."""
        count = len(self.rollouts)
        places = range(step * self.per_step, (step + 1) * self.per_step)
        orders = {epoch: self._order(epoch) for epoch in {place // count for place in places}}
        return [self.rollouts[orders[place // count][place % count]] for place in places]

    def _order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(sample_seed(DEMONSTRATIONS, self.seed, epoch))
        return torch.randperm(len(self.rollouts), generator=generator).tolist()

    def added(
        self, own: OwnRollouts, index: RolloutIndex, step: int, share: float = 1.0
    ) -> tuple[OwnRollouts, RolloutIndex, dict[str, Stat]]:
        """The rollouts of a step with its demonstrations, those of all processes, and metrics.

        `share` is the part of an optimizer step that the rollouts are, below 1 at the end of an epoch.
        """
        everyone = self.of_step(step)
        parts = [everyone[rank :: self.processes] for rank in range(self.processes)]
        sizes = [torch.tensor([len(one.completion_ids) for one in part], dtype=torch.long) for part in parts]
        counts = TermCounts.sum(TermCounts.of(size, self.rows) for size in sizes)
        batches = []
        for part, size in zip(parts, sizes, strict=True):
            tokens = size.float()
            longest = self.max_completion_length
            scales = counts.scales(self.weighting, tokens, micro_batch_tokens(tokens, self.rows), longest) * share
            batches.append(_like(own.batch, part, scales))
        mine = _without(own.batch)
        if len(batches[own.rank]):
            mine = join([batches[own.rank], mine])
        before = torch.tensor([len(part) for part in parts])
        moved = replace(
            index,
            rows=index.rows + before[index.owners],
            term_tokens={**index.term_tokens, DEMONSTRATIONS: torch.zeros_like(index.lengths)},
        )
        indexes = [RolloutIndex.of(batch, rank) for rank, batch in enumerate(batches) if len(batch)]
        joined = join_indexes([*indexes, moved])
        given = dict(_padded(index, [batch.term_scales[DEMONSTRATIONS] for batch in batches]))
        stats: dict[str, Stat] = {f"{DEMONSTRATIONS}/tokens": Mean(counts.tokens, 1.0)}
        return OwnRollouts(mine, own.rank), replace(joined, **given), stats


def _like(batch: TrainBatch, part: Sequence[Rollout], scales: torch.Tensor) -> TrainBatch:
    """Demonstrations as a batch with the fields that another one has; they are part of no other term or average."""
    demonstrations = collate(part).to(batch.lengths.device)
    zeros = torch.zeros(demonstrations.num_tokens, device=batch.lengths.device)
    present = [name for name in LOSS_FIELDS if name not in UNREPORTED and getattr(batch, name) is not None]
    fields: dict[str, Any] = dict.fromkeys(present, zeros)
    return replace(
        demonstrations,
        **fields,
        term_tokens={**dict.fromkeys(batch.term_tokens, zeros), DEMONSTRATIONS: torch.ones_like(zeros)},
        term_scales={
            **dict.fromkeys(batch.term_scales, torch.zeros_like(scales).to(zeros.device)),
            DEMONSTRATIONS: scales.to(zeros.device),
        },
    )


def _without(batch: TrainBatch) -> TrainBatch:
    """The batch with the demonstrations' term, of which it has no token."""
    device = batch.lengths.device
    return replace(
        batch,
        term_tokens={**batch.term_tokens, DEMONSTRATIONS: torch.zeros(batch.num_tokens, device=device)},
        term_scales={**batch.term_scales, DEMONSTRATIONS: torch.zeros(len(batch), device=device)},
    )


def _padded(index: RolloutIndex, scales: Sequence[torch.Tensor]) -> Iterator[tuple[str, Any]]:
    """Weights of the rollouts of an index, with weights of the demonstrations put before them."""
    scale = torch.cat([one.cpu() for one in scales])
    zeros = torch.zeros_like(scale)
    for name in ("weights", "entropy_weights"):
        if (values := getattr(index, name)) is not None:
            yield name, torch.cat([zeros.to(values), values])
    if index.term_scales:
        others = {name: torch.cat([zeros.to(values), values]) for name, values in index.term_scales.items()}
        yield "term_scales", {**others, DEMONSTRATIONS: torch.cat([scale, torch.zeros(len(index))])}


def load_demonstrations(
    source: str, codec: PromptCodec, max_completion_length: int | None, as_messages: bool = False
) -> list[Rollout]:
    """Rows with `prompt` and `completion` of a file, a folder or a hub id; CheckError for what cannot be learned.

    `as_messages`: prompts of text become a message of the user each.
    """
    path = os.path.expanduser(source)
    suffix = os.path.splitext(path)[1]
    if suffix in READERS and not os.path.isfile(path):
        raise CheckError.of("dataset-missing", f"demonstrations={source!r} is no file.", "Name one that is there.")
    kind, files = (READERS[suffix], path) if suffix in READERS else (path, None)
    rows = datasets.load_dataset(kind, data_files=files, split="train")
    missing = [name for name in ("prompt", "completion") if name not in rows.column_names]
    if missing or not len(rows):
        report(
            [
                Finding.error(
                    "column-names",
                    f"demonstrations={source!r} has {len(rows)} rows with the columns {', '.join(rows.column_names)};"
                    " each demonstration has a `prompt` and a `completion`.",
                    "Rename the columns, or name another dataset.",
                )
            ]
        )
    rows = with_user_messages(rows) if as_messages else rows
    found = [_demonstration(row, number, source, codec) for number, row in enumerate(rows)]
    limits = (max_completion_length, "max_completion_length"), (codec.max_context, "the model's context")
    for number, one in enumerate(found):
        lengths = len(one.completion_ids), len(one.prompt_ids) + len(one.completion_ids)
        for length, (most, name) in zip(lengths, limits, strict=True):
            if most is not None and length > most:
                raise CheckError.of(
                    "row-type",
                    f"row {number} of demonstrations={source!r} has {length} tokens, and {name} allows {most}.",
                    "Leave such rows out, or raise max_completion_length: demonstrations are never truncated.",
                )
    return found


def _demonstration(row: dict[str, Any], number: int, source: str, codec: PromptCodec) -> Rollout:
    answer = row["completion"]
    if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], dict):
        message = answer[0]
        answer = message.get("content") if message.get("role") == "assistant" else None
    if not isinstance(answer, str) or not answer:
        raise CheckError.of(
            "row-type",
            f"row {number} of demonstrations={source!r} has the completion {str(row['completion'])[:80]!r}.",
            "A completion is text, or a list of one message of the assistant with text.",
        )
    try:
        encoded = codec.read_row(row)
    except ValueError as error:
        raise CheckError.of("row-type", f"row {number} of demonstrations={source!r}: {error}") from error
    ids = list(codec.tokenizer(answer, add_special_tokens=False)["input_ids"])
    if (end := codec.tokenizer.eos_token_id) is not None and ids[-1:] != [end]:
        ids.append(end)
    return Rollout(encoded.ids, ids, [False] * len(ids), None, answer, FinishReason.STOP, media=encoded.media)
