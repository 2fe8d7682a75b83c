"""Part of a record: log-probs of tokens in the updates that trained on them, and which tokens were clipped.

`update_00012.parquet` has a row for each rollout that a process trained on in step 12: the process that sampled it, the
number of its rollout batch (column `generation`), the index of its first token among all tokens of that batch, and
lists with a value for each of its tokens.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from covey.core.batch import TrainBatch, segment_starts, segment_sum
from covey.core.losses import token_level
from covey.core.objective import Objective, policy_loss
from covey.observability.record_files import file_name, write_table

PLACE_BITS = 32  # lower bits, a token's index in its rollout batch; those above number rollout batch and process


@dataclass(eq=False)
class UpdateLog:
    """Collects the values of tokens in the micro-batches of an optimizer step."""

    folder: Path
    rank: int
    processes: int
    _entropies: bool = field(default=False, init=False)  # keep the updates' entropies, because the engine reported none
    _rollouts: list[dict[str, Any]] = field(default_factory=list, init=False)

    def numbered(self, batch: TrainBatch, rollout_batch: int, entropies: bool) -> TrainBatch:
        """The batch with `origin` set, by which tokens are recognised in the updates.

        `entropies`: keep the updates' entropies, because the engine reported none for some rollout.
        """
        self._entropies = entropies
        first = (rollout_batch * self.processes + self.rank) << PLACE_BITS
        return replace(batch, origin=torch.arange(first, first + batch.num_tokens, device=batch.token_ids.device))

    def on_micro_batch(
        self, batch: TrainBatch, logprobs: Tensor, entropies: Tensor | None, objective: Objective, step: int = 0
    ) -> None:
        """Keep the values of a micro-batch; if it is repeated because memory ran out, the last ones."""
        if batch.origin is None or not batch.num_tokens:
            return
        kept = {"logprobs": logprobs}
        if entropies is not None and self._entropies:
            kept["entropies"] = entropies
        if batch.old_logprobs is not None:
            kept["clipped"] = clipped_tokens(batch, logprobs, entropies, objective, step)
            if objective.ratio_level is not token_level:
                kept["log_ratios"] = objective.ratio_level(logprobs, batch.old_logprobs, batch.sampled, batch.lengths)
        of_each = {name: values.detach().cpu().split(batch.lengths.tolist()) for name, values in kept.items()}
        held = (
            segment_sum(batch.scored.long(), batch.lengths) > 0
        ).tolist()  # without dummy rollouts, which equalise the number of micro-batches
        starts = segment_starts(batch.lengths).clamp(max=batch.num_tokens - 1)
        for row, origin in enumerate(batch.origin[starts].tolist()):
            if held[row] and origin >= 0:
                self._rollouts.append({"origin": origin, **{name: of_each[name][row] for name in of_each}})

    def write(self, step: int) -> Path | None:
        """Write the rollouts that were trained on since the last call."""
        rollouts = sorted({one["origin"]: one for one in self._rollouts}.values(), key=lambda one: one["origin"])
        self._rollouts = []
        if not rollouts:
            return None
        places = [divmod(one["origin"] >> PLACE_BITS, self.processes) for one in rollouts]
        columns: dict[str, Any] = {
            "generation": [rollout_batch for rollout_batch, _ in places],
            "rank": [rank for _, rank in places],
            "first": [one["origin"] & ((1 << PLACE_BITS) - 1) for one in rollouts],
        }
        for name in dict.fromkeys(name for one in rollouts for name in one if name != "origin"):
            kind = pa.bool_() if name == "clipped" else pa.float32()
            values = [one[name].numpy() if name in one else None for one in rollouts]
            columns[name] = pa.array(values, pa.list_(kind))
        return write_table(self.folder / file_name(step, self.rank, self.processes, "update"), columns)


def clipped_tokens(
    batch: TrainBatch, logprobs: Tensor, entropies: Tensor | None, objective: Objective, step: int = 0
) -> Tensor:
    """[N] bool: trained tokens with an advantage but no gradient from the surrogate, because of a clip or filter."""
    assert batch.advantages is not None and batch.weights is not None, "credit and weights come before the loss"
    constant = None if entropies is None else entropies.detach()
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        loss = policy_loss(batch, leaf, constant, replace(objective, beta=0.0, terms=()), step=step).loss
    (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    still = torch.ones_like(batch.sampled) if gradient is None else gradient == 0
    return still & batch.sampled & (batch.weights != 0) & (batch.advantages != 0)


def vocabulary_of(tokenizer: Any) -> list[bytes]:
    """Bytes of each token in a text, by its id."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    words = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    decoder = str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", ""))
    table = {character: byte for byte, character in bytes_to_unicode().items()} if "ByteLevel" in decoder else {}
    return [_bytes_of(word or "", table) for word in words]


def _bytes_of(word: str, table: dict[str, int]) -> bytes:
    if table:
        known = [table.get(character) for character in word]
        if None not in known:
            return bytes(number for number in known if number is not None)
    elif len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
        return bytes.fromhex(word[3:5])
    return word.replace("▁", " ").encode("utf-8", "replace")
