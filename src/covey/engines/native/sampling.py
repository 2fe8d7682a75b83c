"""Sampling: filters, an exponential race with random numbers from seed and step, and the sequences being decoded.

A sample and the bits of its log-prob depend only on the row's logits, seed and step, never on other rows of the batch:
rows are summed in blocks that threads do not divide, and functions are computed by `invariance.elementwise`.
"""

import asyncio
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covey.core.engine import SampleRequest, SamplingParams
from covey.core.records import Completion, FinishReason
from covey.engines.native.invariance import elementwise
from covey.engines.native.settings import NO_SETTINGS, GenerationSettings, read_settings

BLOCK = 256  # tokens in one block of the race
CPU_CHUNK = 1 << 19  # logits sampled from at a time on a CPU, so that they stay in the processor's cache
_NEGLIGIBLE = -200.0  # its exp is 0 in float32, and 0 times it is 0, unlike 0 times -inf
_GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, odd, as a signed number: splitmix64's stride
_STEP = -0x2E0A2D0F7C9D4A35  # an odd stride for steps, far from multiples of the other
_FIRST = -0x40A7B892E31B1A47
_SECOND = -0x6B2FB644ECCEEE15


class SampledTokens(NamedTuple):
    """Tokens [R], with log-probabilities and entropies [R] in nats at the sampling temperature, before any filter.

    With `SamplingParams.keep_mask` these are taken after all filters.
    """

    tokens: Tensor
    logprobs: Tensor
    entropies: Tensor


def sample_tokens(
    logits: Tensor,
    seeds: Tensor,
    steps: Tensor,
    params: SamplingParams,
    adjusted: Tensor | None = None,
    masks: list[list[int]] | None = None,
) -> SampledTokens:
    """Sample one token per row from logits [R, V], with [R] seeds and numbers of tokens sampled before (`steps`).

    `adjusted` [R, V] are logits to sample from instead, after penalties and biases; log-probs are still those of
    `logits`, except with `params.keep_mask`, when they are those of `adjusted` and `masks` receives the `kept_ids` of
    each row.
    """
    rows = len(logits) if logits.is_cuda else max(1, CPU_CHUNK // logits.shape[-1])
    if len(logits) > rows:
        chunks = [
            sample_tokens(logits[i], seeds[i], steps[i], params, None if adjusted is None else adjusted[i], masks)
            for i in (slice(start, start + rows) for start in range(0, len(logits), rows))
        ]
        return concatenate(chunks)
    filters = (params.truncates or adjusted is not None) and not params.keep_mask
    logits = logits.float()
    reported = logits if params.temperature in (0.0, 1.0) else logits / params.temperature
    if params.keep_mask:
        reported = logits = filter_logits(logits if adjusted is None else adjusted, params)
        if masks is not None:
            masks += kept_ids(logits)
    top, weights, below = _weights(reported)
    blocks = block_sums(weights)
    total = blocks.sum(-1)
    if filters:
        logits = filter_logits(logits if adjusted is None else adjusted, params)
    if params.temperature == 0:
        tokens = logits.argmax(-1)
    elif filters:
        _, filtered, _ = _weights(logits)
        tokens = exponential_race(filtered, block_sums(filtered), seeds, steps)
    else:
        tokens = exponential_race(weights, blocks, seeds, steps)
    return SampledTokens(tokens, *_reports(reported, tokens, top, weights, below, total))


def score_tokens(logits: Tensor, tokens: Tensor, temperature: float) -> SampledTokens:
    """Score given tokens [R] under logits [R, V] as `sample_tokens` reports sampled ones."""
    logits = logits.float()
    reported = logits if temperature in (0.0, 1.0) else logits / temperature
    top, weights, below = _weights(reported)
    return SampledTokens(tokens, *_reports(reported, tokens, top, weights, below, block_sums(weights).sum(-1)))


def _reports(
    reported: Tensor, tokens: Tensor, top: Tensor, weights: Tensor, below: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [R], from the results of `_weights` and the weights' sum [R]; overwrites `below`."""
    log_total = elementwise(torch.log, total)
    logprobs = (reported.gather(-1, tokens[:, None]) - top)[:, 0] - log_total
    return logprobs, log_total - block_sums(below.mul_(weights)).sum(-1) / total


def concatenate(chunks: list[SampledTokens]) -> SampledTokens:
    return SampledTokens(*(torch.cat(column) for column in zip(*chunks, strict=True)))


def _weights(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Largest logit [R, 1], probabilities up to a factor per row [R, V], and logits minus the largest [R, V]."""
    top = logits.amax(-1, keepdim=True)
    below = (logits - top).clamp_(min=_NEGLIGIBLE)
    return top, elementwise(torch.exp, below), below


def filter_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Logits [R, V] after temperature, top-k, top-p and min-p; -inf where a token is excluded."""
    if params.temperature not in (0.0, 1.0):
        logits = logits / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        kth = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if params.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1) - probs  # mass of the more probable tokens: the first token always stays
        drop = (before >= params.top_p).scatter(-1, order, before >= params.top_p)
        logits = logits.masked_fill(drop, -torch.inf)
    if params.min_p:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return logits


def kept_ids(filtered: Tensor) -> list[list[int]]:
    """Ids of the tokens that each row of filtered logits [R, V] keeps; [] for a row that keeps all."""
    kept = filtered > -torch.inf
    kept &= ~kept.all(-1, keepdim=True)
    row, ids = kept.nonzero().cpu().unbind(1)
    return [own.tolist() for own in ids.split(row.bincount(minlength=len(kept)).tolist())]


def block_sums(weights: Tensor) -> Tensor:
    """Weight of each block of `BLOCK` neighbouring tokens: [R, V] -> [R, ceil(V / BLOCK)]."""
    whole = weights.shape[-1] // BLOCK * BLOCK
    sums = weights[:, :whole].unflatten(-1, (-1, BLOCK)).sum(-1) if whole else weights[:, :0]
    if whole == weights.shape[-1]:
        return sums
    return torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], dim=-1)


def exponential_race(weights: Tensor, blocks: Tensor, seeds: Tensor, steps: Tensor) -> Tensor:
    """Sample a block, then a token within it, each as the winner of an exponential race: [R, V] -> [R].

    In an exponential race, contestant i arrives at time E_i / w_i with E_i ~ Exp(1), and is first with probability
    w_i / sum(w) (the Gumbel-max trick on another scale). First the blocks race, with the sums P_b of their weights;
    then the tokens of the winning block race with their own weights w_i. Token i wins with probability
    (P_b / P) (w_i / P_b) = w_i / P, exactly, with V / BLOCK + BLOCK random numbers instead of V. Every contestant has
    its own random number, so a small change of the weights changes a sample only where two contestants nearly tie; with
    inversion of the cumulative distribution, a change of one token would shift all later ones. Computed in float64, so
    that the tail of a large vocabulary keeps its probability.
    """
    count = blocks.shape[-1]
    arrival = elementwise(
        torch.log, uniforms(seeds, steps, count + BLOCK)
    )  # log u = -E: the largest quotient is the first to arrive
    block = (arrival[:, :count] / blocks).argmax(-1, keepdim=True)
    members = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    last = weights.shape[-1] - 1
    inside = weights.gather(-1, members.clamp(max=last)).masked_fill_(members > last, 0.0)
    return block[:, 0] * BLOCK + (arrival[:, count:] / inside).argmax(-1)


def uniforms(seeds: Tensor, steps: Tensor, count: int) -> Tensor:
    """Uniform random numbers [R, count] in (0, 1), float64: a hash of seed, step and index, without state.

    They are the same in any batch, in any order and on any device, and can be computed again to verify a draft. Every
    (seed, step) pair starts a splitmix64 stream (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014) at a hashed state.
    """
    start = _mix(_mix(seeds) + steps * _STEP)
    offsets = torch.arange(1, count + 1, device=seeds.device) * _GOLDEN
    return _between_0_and_1(_shift(_mix(start[:, None] + offsets), 12))


def _between_0_and_1(bits: Tensor) -> Tensor:
    """Map 52 random bits to the middle of one of 2**52 equal intervals of (0, 1); with 53 bits, 1 would be possible."""
    return bits.double().add_(0.5).mul_(2.0**-52)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser: a bijection of 64-bit integers in which every input bit affects every output bit."""
    x = (x ^ _shift(x, 30)) * _FIRST
    x = (x ^ _shift(x, 27)) * _SECOND
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64, which torch's own operator does not do: it repeats the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(slots=True, eq=False)
class SequenceState:
    request: SampleRequest
    index: int  # of the completion within the request
    budget: int  # most tokens it may sample
    end_ids: Set[int]  # tokens that end it
    done: asyncio.Future[Completion]
    settings: GenerationSettings = NO_SETTINGS
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    masks: list[list[int]] = field(default_factory=list)  # under `keep_mask`
    # under `keep_routes`: experts of the prompt's tokens and of those that followed, in parts [t, L, k]
    routes: list[Tensor] = field(default_factory=list)
    reused: int = 0  # tokens taken from its draft
    finish: FinishReason | None = None  # why it ended; None while it is decoded

    @property
    def needs_no_tokens(self) -> bool:
        """True once it is finished or its caller was cancelled."""
        return self.finish is not None or self.done.done()

    @property
    def seed(self) -> int:
        return (self.request.seeds[self.index] + (1 << 63)) % (1 << 64) - (1 << 63)

    @property
    def draft(self) -> list[int]:
        """The draft, cut at its first end token and at the budget; [] without one, and with penalties or biases.

        These make the distribution at a position depend on the tokens before it in ways that one parallel pass cannot
        compute.
        """
        drafts = self.request.drafts
        tokens = drafts[self.index] if drafts else None
        if not tokens or self.request.params.repetition_penalty != 1.0 or self.settings.reshapes:
            return []
        return tokens[: min(self._length_to_end([], tokens) or len(tokens), self.budget)]

    def append(
        self, tokens: list[int], logprobs: list[float], entropies: list[float], masks: Sequence[list[int]] = ()
    ) -> None:
        """Append sampled tokens, up to the one that ends the sequence; ignored when it is finished."""
        if self.finish is not None:
            return
        tokens = tokens[: self.budget - len(self.token_ids)]
        end = self._length_to_end(self.token_ids, tokens)
        count = end or len(tokens)
        self.token_ids += tokens[:count]
        self.logprobs += logprobs[:count]
        self.entropies += entropies[:count]
        self.masks += masks[:count]
        if end:
            self.finish = FinishReason.STOP
        elif len(self.token_ids) >= self.budget:
            self.finish = FinishReason.LENGTH

    def resolve(self) -> None:
        """Set the result of the sequence's future if the sequence is finished and the caller has not been cancelled."""
        if self.finish is None or self.done.done():
            return
        if not math.isfinite(sum(self.logprobs)):
            message = (
                "the model's logits are NaN or infinite, so nothing can be sampled from it. Its weights have diverged"
                " or its activations overflow: use bf16=True or float32 instead of float16, and begin from an earlier"
                " checkpoint with a lower learning rate."
            )
            self.done.set_exception(FloatingPointError(message))
            return
        masks = self.masks if self.request.params.keep_mask else None
        completion = Completion(
            self.token_ids, self.logprobs, self.finish, self.entropies, self.reused, sampling_mask=masks
        )
        if self.routes:  # a sequence decoded past its end also has routes of dropped tokens
            computed = len(self.request.prompt_ids) + len(self.token_ids) - 1
            completion.routes = torch.cat([part.cpu() for part in self.routes])[:computed]
        self.done.set_result(completion)

    def _length_to_end(self, before: list[int], tokens: list[int]) -> int:
        """Number of tokens up to the one that ends the sequence, by itself or by completing a stop text; else 0."""
        end = next((count for count, token in enumerate(tokens, 1) if token in self.end_ids), 0)
        return (self.settings.stop and self.settings.length_to_stop(before, tokens[: end or None])) or end


def sequences_of(
    request: SampleRequest, end_ids: set[int], max_context: int | None, images: bool = False, tokenizer: Any = None
) -> list[SequenceState]:
    """New sequences of a request, one per seed, with futures of the running event loop; ValueError as in `generate`."""
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
    budget, new_future = request.token_budget(max_context), asyncio.get_running_loop().create_future
    extra = request.params.extra
    settings = read_settings(extra, tokenizer, end_ids) if extra else NO_SETTINGS
    ends: Set[int] = settings.end_ids if extra else end_ids
    return [SequenceState(request, i, budget, ends, new_future(), settings) for i in range(len(request.seeds))]


class Batch:
    """Tensors of the sequences being decoded, in the cache's order, from one change of membership to the next.

    While decoding, only one flag is copied to the host, every `check_interval` steps (1 on a CPU, 8 elsewhere): it says
    that some sequence has ended. `flush` copies sampled tokens all at once. Sequences may therefore be decoded past
    their end, and `SequenceState.append` drops the tokens after it.
    """

    def __init__(self, sequences: Sequence[SequenceState], device: torch.device, check_interval: int | None = None):
        self.sequences = sequences
        self.check_interval = check_interval or (1 if device.type == "cpu" else 8)
        self.history: list[SampledTokens] = []
        self._masks: list[list[list[int]]] = []  # of each step of `history` and each sequence
        self._routes: list[Tensor] = []  # [S, L, k] of each step, where they are kept
        self._count = 0
        self._stops = False
        end_ids: set[int] = set()  # of any sequence; an end token of another sequence only costs a check
        columns = []
        self._by_settings: list[tuple[SamplingParams, list[int]]] = []
        for index, sequence in enumerate(sequences):
            prompt, sampled = sequence.request.prompt_ids, sequence.token_ids
            length = len(prompt) + len(sampled)
            self._stops |= bool(sequence.settings.stop)
            end_ids.update(sequence.end_ids)
            columns.append(((sampled or prompt)[-1], length - 1, len(sampled), sequence.seed, sequence.budget))
            params = replace(sequence.request.params, max_tokens=0)  # budgets may differ
            for known, indices in self._by_settings:
                if known == params:
                    indices.append(index)
                    break
            else:
                self._by_settings.append((params, [index]))
        table = torch.tensor(columns, device=device).T.contiguous()
        self.last, self.positions, self.steps, self._seeds, self._budgets = table
        self._last_position = self.positions - self.steps + self._budgets - 1
        self._end_ids = torch.tensor(sorted(end_ids), dtype=torch.int64, device=device)
        self._ended = torch.zeros(len(sequences), dtype=torch.bool, device=device)

    def sample(self, logits: Tensor, routes: Tensor | None = None) -> None:
        """Sample one token for every sequence from logits [S, V], each with its own settings.

        `routes` [S, L, k] are the experts of the tokens that gave these logits; None if no sequence keeps them.
        """
        chunks, masks, order = [], [], []
        for params, indices in self._by_settings:
            alone = len(indices) == len(self.sequences)
            at = slice(None) if alone else torch.tensor(indices, device=logits.device)
            rows = logits[at]
            own: list[list[int]] = []
            changed = params.extra or params.repetition_penalty != 1.0
            adjusted = self._adjusted(rows, indices) if changed else None
            chunks.append(sample_tokens(rows, self._seeds[at], self.steps[at], params, adjusted, own))
            masks += own or [[]] * len(indices)
            order += indices
        sampled = chunks[0]
        if len(chunks) > 1:
            back = torch.tensor(order, device=logits.device).argsort()
            sampled = SampledTokens(*(column[back] for column in concatenate(chunks)))
            masks = [masks[index] for index in back.tolist()]
        self.history.append(sampled)
        self._masks.append(masks)
        if routes is not None:
            self._routes.append(routes)
        self._count += 1
        self.last = sampled.tokens
        self.steps = self.steps + 1
        self.positions = torch.minimum(self.positions + 1, self._last_position)
        self._ended |= torch.isin(sampled.tokens, self._end_ids) | (self.steps >= self._budgets)

    def _adjusted(self, logits: Tensor, indices: list[int]) -> Tensor | None:
        """Logits [n, V] of the sequences at `indices` after penalties and biases; None if there are none."""
        first = self.sequences[indices[0]]
        penalty, settings = first.request.params.repetition_penalty, first.settings
        if penalty == 1.0 and not settings.reshapes:
            return None
        self.flush()
        logits = logits.float()
        tokens = [(self.sequences[index].request.prompt_ids, self.sequences[index].token_ids) for index in indices]
        if penalty != 1.0:
            seen = torch.zeros_like(logits, dtype=torch.bool)
            for row, (prompt, sampled) in zip(seen, tokens, strict=True):
                row[torch.tensor(prompt + sampled, device=logits.device)] = True
            logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        return settings.add_to(logits, tokens) if settings.reshapes else logits

    def has_ended(self) -> bool:
        """True if a sequence is known to have ended, which is checked only every `check_interval` steps."""
        if self._count % self.check_interval:
            return False
        if self._stops:
            self.flush()
            return any(sequence.finish is not None for sequence in self.sequences)
        return bool(self._ended.any())

    def flush(self) -> None:
        """Append the tokens sampled since the last call to their sequences."""
        if not self.history:
            return
        columns = [torch.stack(column, dim=1).tolist() for column in zip(*self.history, strict=True)]
        columns.append(list(zip(*self._masks, strict=True)))
        for sequence, *sampled in zip(self.sequences, *columns, strict=True):
            sequence.append(*sampled)
        if self._routes:
            of_sequences = torch.stack(self._routes, dim=1).cpu()
            for sequence, own in zip(self.sequences, of_sequences, strict=True):
                if sequence.request.params.keep_routes:
                    sequence.routes.append(own)
            self._routes.clear()
        self.history.clear()
        self._masks.clear()


def compaction_moves(finished: list[bool]) -> list[tuple[int, int]]:
    """Fewest copies, as pairs (source, target), that move the unfinished items to the front."""
    moves: list[tuple[int, int]] = []
    source = remaining = finished.count(False)
    for target in range(remaining):
        if finished[target]:
            source = finished.index(False, source)
            moves.append((source, target))
            source += 1
    return moves
