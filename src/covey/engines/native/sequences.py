"""Completions in progress: what each has so far, and the tensors that carry a batch of them from step to step."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from covey.core.engine import SampleRequest, SamplingParams
from covey.core.rollout import Completion, FinishReason
from covey.engines.native.sampling import SampledTokens, draw


@dataclass(slots=True, eq=False)
class SequenceState:
    """One completion in progress.

    Attributes:
        request: what it belongs to; `index` says which of its completions this is.
        budget: most tokens it may sample.
        ends: tokens that end it.
        done: resolved when it is finished.
        finish: why it is; None while it is not.
    """

    request: SampleRequest
    index: int
    budget: int
    ends: set[int]
    done: asyncio.Future[Completion]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    reused: int = 0
    finish: FinishReason | None = None

    @property
    def leaves(self) -> bool:
        """Whether it needs no further token: it is finished, or nobody waits for it any more."""
        return self.finish is not None or self.done.done()

    @property
    def seed(self) -> int:
        """The seed as a signed 64-bit number."""
        return (self.request.seeds[self.index] + (1 << 63)) % (1 << 64) - (1 << 63)

    @property
    def draft(self) -> list[int]:
        """What may be reused: the draft up to its first end token and within the budget; [] without one.

        With a repetition penalty nothing is: there each position's distribution depends on the tokens before it in a
        way that a parallel pass over the draft would have to build position by position.
        """
        drafts = self.request.drafts
        tokens = (drafts[self.index] if drafts else None) or []
        if self.request.params.repetition_penalty != 1.0:
            return []
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.ends), len(tokens))
        return tokens[: min(end, self.budget)]

    @property
    def length(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    @property
    def last_token(self) -> int:
        """The token the next one follows."""
        return self.token_ids[-1] if self.token_ids else self.request.prompt_ids[-1]

    def take(self, tokens: list[int], logprobs: list[float], entropies: list[float]) -> None:
        """Append sampled tokens, up to the one that ends the row; a finished row takes none."""
        if self.finish is not None:
            return
        tokens = tokens[: self.budget - len(self.token_ids)]
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.ends), None)
        count = len(tokens) if end is None else end
        self.token_ids += tokens[:count]
        self.logprobs += logprobs[:count]
        self.entropies += entropies[:count]
        if end is not None:
            self.finish = FinishReason.STOP
        elif len(self.token_ids) >= self.budget:
            self.finish = FinishReason.LENGTH

    def resolve(self) -> None:
        """Answer whoever waits for a finished row."""
        assert self.finish is not None, "only a finished row has an answer"
        if not self.done.done():  # its caller may have been cancelled
            self.done.set_result(Completion(self.token_ids, self.logprobs, self.finish, self.entropies, self.reused))


class Batch:
    """The rows being decoded, as tensors, from one change of membership to the next.

    Nothing is copied to the host while decoding but, every `period` steps, whether any row has ended; what was drawn
    is handed to the rows all at once. Rows may therefore be decoded past their end, which `SequenceState.take` cuts
    off.

    Args:
        rows: the rows, in the cache's order.
        ends: tokens that end a completion.
        device: where logits will be.
        period: steps between two looks at whether a row has ended.
    """

    def __init__(self, rows: list[SequenceState], ends: set[int], device: torch.device, period: int):
        self.rows = rows
        self.period = period
        self.history: list[SampledTokens] = []
        self._count = 0
        columns = [(row.last_token, row.length - 1, len(row.token_ids), row.seed, row.budget) for row in rows]
        table = torch.tensor(columns, device=device).T.contiguous()
        self.last, self.positions, self.steps, self._seeds, self._budgets = table
        self._furthest = self.positions - self.steps + self._budgets - 1  # no row needs a position beyond
        self._ends = torch.tensor(sorted(ends), dtype=torch.int64, device=device)
        self._ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
        self._draws = [(params, torch.tensor(places, device=device)) for params, places in _by_settings(rows)]
        self._order = torch.cat([places for _, places in self._draws]).argsort()

    def draw(self, logits: Tensor) -> None:
        """One token for every row from logits [rows, V], each with its own settings."""
        parts = []
        for params, places in self._draws:
            some = logits if len(self._draws) == 1 else logits[places]
            seen = self._seen(places, params, some)
            parts.append(draw(some, self._seeds[places], self.steps[places], params, seen))
        drawn = SampledTokens(*(torch.cat(column)[self._order] for column in zip(*parts, strict=True)))
        self.history.append(drawn)
        self._count += 1
        self.last = drawn.tokens
        self.steps = self.steps + 1
        self.positions = torch.minimum(self.positions + 1, self._furthest)
        self._ended |= torch.isin(drawn.tokens, self._ends) | (self.steps >= self._budgets)

    def _seen(self, places: Tensor, params: SamplingParams, logits: Tensor) -> Tensor | None:
        """[rows, V] bool: what the rows contain already, where there is a repetition penalty to know it."""
        if params.repetition_penalty == 1.0:
            return None
        self.settle()
        seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        for i, place in enumerate(places.tolist()):
            row = self.rows[place]
            seen[i, torch.tensor(row.request.prompt_ids + row.token_ids, device=logits.device)] = True
        return seen

    def has_ended(self) -> bool:
        """Whether a row is known to have ended; looks every `period` steps only."""
        return self._count % self.period == 0 and bool(self._ended.any())

    def settle(self) -> None:
        """Hand the rows what was drawn for them since the last time."""
        if not self.history:
            return
        columns = [torch.stack(column, dim=1).tolist() for column in zip(*self.history, strict=True)]
        for row, *drawn in zip(self.rows, *columns, strict=True):
            row.take(*drawn)
        self.history.clear()


def steps_per_look(device: torch.device) -> int:
    """Decoding steps between two looks at which rows have ended: looking waits for the device."""
    return 1 if device.type == "cpu" else 8


def _by_settings(rows: list[SequenceState]) -> list[tuple[SamplingParams, list[int]]]:
    """Which rows are drawn alike: equal settings, whatever their budgets."""
    found: list[tuple[SamplingParams, list[int]]] = []
    for place, row in enumerate(rows):
        params = replace(row.request.params, max_tokens=0)
        for known, places in found:
            if known == params:
                places.append(place)
                break
        else:
            found.append((params, [place]))
    return found


def closing_moves(finished: list[bool]) -> list[tuple[int, int]]:
    """(source, target) copies that bring the unfinished to the front, as few as possible."""
    remaining = finished.count(False)
    holes = [place for place in range(remaining) if finished[place]]
    movers = [place for place in range(remaining, len(finished)) if not finished[place]]
    return list(zip(movers, holes, strict=True))


def apply_moves(rows: list[Any], moves: list[tuple[int, int]], remaining: int) -> list[Any]:
    """The list after the same moves."""
    rows = list(rows)
    for source, target in moves:
        rows[target] = rows[source]
    return rows[:remaining]
