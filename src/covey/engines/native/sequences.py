"""Sequences being decoded: their state, and the tensors that carry a batch of them from step to step."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from covey.core.engine import SampleRequest, SamplingParams
from covey.core.records import Completion, FinishReason
from covey.engines.native.sampling import SampledTokens, sample_tokens


@dataclass(slots=True, eq=False)
class SequenceState:
    """State of one completion.

    Attributes:
        request: its request.
        index: of the completion within the request.
        budget: most tokens it may sample.
        end_ids: tokens that end it.
        done: future of the completion.
        reused: tokens taken from its draft.
        finish: why it ended; None while it is decoded.
    """

    request: SampleRequest
    index: int
    budget: int
    end_ids: set[int]
    done: asyncio.Future[Completion]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    reused: int = 0
    finish: FinishReason | None = None

    @property
    def needs_no_tokens(self) -> bool:
        """True once it is finished or its caller was cancelled."""
        return self.finish is not None or self.done.done()

    @property
    def seed(self) -> int:
        """The seed as a signed 64-bit number."""
        return (self.request.seeds[self.index] + (1 << 63)) % (1 << 64) - (1 << 63)

    @property
    def draft(self) -> list[int]:
        """Draft up to its first end token and within the budget; [] without one.

        Also [] with a repetition penalty: each position's distribution then depends on the tokens before it, which a
        parallel forward pass over the draft would have to apply position by position.
        """
        drafts = self.request.drafts
        tokens = drafts[self.index] if drafts else None
        if not tokens or self.request.params.repetition_penalty != 1.0:
            return []
        return tokens[: min(_length_to_end(tokens, self.end_ids) or len(tokens), self.budget)]

    def append(self, tokens: list[int], logprobs: list[float], entropies: list[float]) -> None:
        """Append sampled tokens, up to the one that ends the sequence; ignored when it is finished."""
        if self.finish is not None:
            return
        tokens = tokens[: self.budget - len(self.token_ids)]
        end = _length_to_end(tokens, self.end_ids)
        count = end or len(tokens)
        self.token_ids += tokens[:count]
        self.logprobs += logprobs[:count]
        self.entropies += entropies[:count]
        if end:
            self.finish = FinishReason.STOP
        elif len(self.token_ids) >= self.budget:
            self.finish = FinishReason.LENGTH

    def resolve(self) -> None:
        """Set the result of a finished sequence's future, unless its caller was cancelled."""
        assert self.finish is not None, "only a finished sequence has a result"
        if not self.done.done():
            self.done.set_result(Completion(self.token_ids, self.logprobs, self.finish, self.entropies, self.reused))


def _length_to_end(tokens: list[int], end_ids: set[int]) -> int:
    """Length up to and including the first end token; 0 without one."""
    for index, token in enumerate(tokens):
        if token in end_ids:
            return index + 1
    return 0


def sequences_of(
    request: SampleRequest, end_ids: set[int], max_context: int | None, images: bool = False
) -> list[SequenceState]:
    """New sequences of a request, one per seed, with futures of the running event loop.

    Raises:
        ValueError: unknown settings, drafts that do not match the seeds, or images unless `images`.
    """
    _check_request(request, images)
    budget, new_future = request.token_budget(max_context), asyncio.get_running_loop().create_future
    return [SequenceState(request, index, budget, end_ids, new_future()) for index in range(len(request.seeds))]


def _check_request(request: SampleRequest, images: bool) -> None:
    if request.params.extra:
        raise ValueError(
            f"the native engine does not know the generation settings {sorted(request.params.extra)}; it knows"
            " temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens."
        )
    if request.media and not images:
        raise ValueError("the native engine samples text only; images need a vision-language engine.")
    for name, given in (("drafts", request.drafts), ("draft_logprobs", request.draft_logprobs)):
        if given is not None and len(given) != len(request.seeds):
            raise ValueError(
                f"{name} holds {len(given)} lists for {len(request.seeds)} seeds; give one (or None) each."
            )
    if request.drafts and request.draft_lenience is not None:
        recorded = request.draft_logprobs or [None] * len(request.drafts)
        for draft, logprobs in zip(request.drafts, recorded, strict=True):
            if draft and len(logprobs or []) != len(draft):
                raise ValueError(
                    f"draft_lenience needs the log-prob of every draft token, and a draft of {len(draft)} tokens has"
                    f" {len(logprobs or [])}. Give draft_logprobs, or leave draft_lenience None to verify exactly."
                )


class Batch:
    """Tensors of the sequences being decoded, from one change of membership to the next.

    The only copy to the host while decoding is, every `check_interval` steps, a flag that a sequence has ended;
    sampled tokens are copied all at once by `flush`. Sequences may therefore be decoded past their end, which
    `SequenceState.append` cuts off.

    Args:
        sequences: in the cache's order.
        end_ids: tokens that end a completion.
        device: of the logits.
        check_interval: steps between checks for ended sequences, each of which waits for the device; None: 1 on a CPU,
            8 elsewhere.
    """

    def __init__(
        self,
        sequences: Sequence[SequenceState],
        end_ids: set[int],
        device: torch.device,
        check_interval: int | None = None,
    ):
        self.sequences = sequences
        self.check_interval = check_interval or (1 if device.type == "cpu" else 8)
        self.history: list[SampledTokens] = []
        self._count = 0
        columns = []
        by_settings: list[tuple[SamplingParams, list[int]]] = []
        for index, sequence in enumerate(sequences):
            prompt, sampled = sequence.request.prompt_ids, sequence.token_ids
            length = len(prompt) + len(sampled)
            columns.append(((sampled or prompt)[-1], length - 1, len(sampled), sequence.seed, sequence.budget))
            params = replace(sequence.request.params, max_tokens=0)  # budgets may differ
            for known, indices in by_settings:
                if known == params:
                    indices.append(index)
                    break
            else:
                by_settings.append((params, [index]))
        table = torch.tensor(columns, device=device).T.contiguous()
        self.last, self.positions, self.steps, self._seeds, self._budgets = table
        self._last_position = self.positions - self.steps + self._budgets - 1
        self._end_ids = torch.tensor(sorted(end_ids), dtype=torch.int64, device=device)
        self._ended = torch.zeros(len(sequences), dtype=torch.bool, device=device)
        self._by_settings = by_settings

    def sample(self, logits: Tensor) -> None:
        """Sample one token for every sequence from logits [S, V], each with its own settings."""
        if len(self._by_settings) == 1:
            params, indices = self._by_settings[0]
            seen = None if params.repetition_penalty == 1.0 else self._seen_tokens(indices, logits)
            sampled = sample_tokens(logits, self._seeds, self.steps, params, seen)
        else:
            sampled = self._sample_by_settings(logits)
        self.history.append(sampled)
        self._count += 1
        self.last = sampled.tokens
        self.steps = self.steps + 1
        self.positions = torch.minimum(self.positions + 1, self._last_position)
        self._ended |= torch.isin(sampled.tokens, self._end_ids) | (self.steps >= self._budgets)

    def _sample_by_settings(self, logits: Tensor) -> SampledTokens:
        chunks, order = [], []
        for params, indices in self._by_settings:
            order += indices
            at = torch.tensor(indices, device=logits.device)
            seen = None if params.repetition_penalty == 1.0 else self._seen_tokens(indices, logits)
            chunks.append(sample_tokens(logits[at], self._seeds[at], self.steps[at], params, seen))
        back = torch.tensor(order, device=logits.device).argsort()
        return SampledTokens(*(torch.cat(column)[back] for column in zip(*chunks, strict=True)))

    def _seen_tokens(self, indices: list[int], logits: Tensor) -> Tensor:
        """[n, V] bool: tokens that the sequences at `indices` contain."""
        self.flush()
        seen = torch.zeros(len(indices), logits.shape[1], dtype=torch.bool, device=logits.device)
        for i, index in enumerate(indices):
            sequence = self.sequences[index]
            seen[i, torch.tensor(sequence.request.prompt_ids + sequence.token_ids, device=logits.device)] = True
        return seen

    def has_ended(self) -> bool:
        """True when a sequence is known to have ended; checked every `check_interval` steps only."""
        return self._count % self.check_interval == 0 and bool(self._ended.any())

    def flush(self) -> None:
        """Append the tokens sampled since the last call to their sequences."""
        if not self.history:
            return
        columns = [torch.stack(column, dim=1).tolist() for column in zip(*self.history, strict=True)]
        for sequence, *sampled in zip(self.sequences, *columns, strict=True):
            sequence.append(*sampled)
        self.history.clear()


def compaction_moves(finished: list[bool]) -> list[tuple[int, int]]:
    """Fewest copies (source, target) that bring the unfinished items to the front."""
    moves: list[tuple[int, int]] = []
    source = remaining = finished.count(False)
    for target in range(remaining):
        if finished[target]:
            source = finished.index(False, source)
            moves.append((source, target))
            source += 1
    return moves
