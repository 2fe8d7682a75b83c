"""`TrainBatch`, the flat and unpadded training data of a rollout batch, and its construction from rollouts."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import accumulate, chain
from operator import attrgetter, itemgetter, methodcaller, or_
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from covey.core.media import Media
from covey.core.records import Rollout
from covey.core.routes import some, spread, unknown_like

LOSS_FIELDS = (  # [N] floating-point fields that the loss reads
    "advantages",
    "weights",
    "entropy_weights",
    "old_logprobs",
    "ref_logprobs",
    "engine_logprobs",
    "mismatch_weights",
)
WIDE_FIELDS = ("named_ids", "teacher_tops", "teacher_hidden")  # several numbers per token, [N, K]
OF_ROLLOUTS = ("token_ids", "sampled", "observed", "jumps", "kept_counts", "chosen", "origin", "routes")
TOKEN_FIELDS = (*OF_ROLLOUTS, *LOSS_FIELDS, "teacher_logprobs", "teacher_numbers", *WIDE_FIELDS)

UNREPORTED = {
    "engine_logprobs": math.nan,
    "mismatch_weights": 1.0,
    "kept_counts": 0,
    "observed": 0,
    "jumps": 0,
    "origin": -1,
    "named_ids": -1,
    "teacher_logprobs": math.nan,
    "teacher_tops": -math.inf,
    "teacher_hidden": 0.0,
    "teacher_numbers": -1,
}
"""Fill values for tokens that lack a field which other tokens of the batch have, and for the columns that narrower rows
of `WIDE_FIELDS` lack."""


@dataclass(slots=True)
class TrainBatch:
    """Completion tokens of B rollouts in flat vectors, with their prompts stored once each.

    Example:
        Two answers to one prompt, "2+2=" -> "4" and "2+2=" -> "2 2":
        `TrainBatch(token_ids=[4, 2, 2], lengths=[1, 2], sampled=[1, 1, 1], prompt_ids=[2, 9, 2, 8],
        prompt_lengths=[4], groups=[0, 0])`
    """

    token_ids: Tensor  # [N] int64, the completion tokens of all rollouts, one after the other
    lengths: Tensor  # [B] int64, completion tokens of each rollout; may be 0
    # [N] bool, the tokens that are learned from. False for tool output, and for every token of a truncated completion
    # under `mask_truncated_completions`.
    sampled: Tensor
    prompt_ids: Tensor  # [M] int64, the tokens of the P distinct prompts, one after the other
    prompt_lengths: Tensor  # [P] int64
    # [B] int64, the prompt each rollout continues: an index into `prompt_lengths`. Rollouts with equal prompts share a
    # group, so that a forward pass can share the prompt. Which rollouts are compared with one another for credit
    # follows from the order of sampling instead, G at a time.
    groups: Tensor
    # [N] int64 or None: 0 for a token that follows the one before it. At the first token of a strand
    # (`covey.core.strands`), minus the number of tokens between the token that it follows and itself
    jumps: Tensor | None = None
    advantages: Tensor | None = None  # [N] float32, credit of each token (equal over a rollout unless given per step)
    # [N] float32, weight of each token's loss, 0 where not sampled. The loss's normaliser over one optimizer step and
    # all ranks is already applied: `loss = sum(weights * token_loss)`.
    weights: Tensor | None = None
    entropy_weights: Tensor | None = None  # [N] float32 or None, the same for the entropy bonus
    old_logprobs: Tensor | None = None  # [N] float32, under the policy before the updates on it. None: on-policy
    ref_logprobs: Tensor | None = None  # [N] float32 or None, under the reference policy
    engine_logprobs: Tensor | None = None  # [N] float32 or None, by the sampling engine; NaN for rollouts without any
    mismatch_weights: Tensor | None = None  # [N] float32 or None, weights that correct the engine's distribution
    chosen: Tensor | None = None  # [N] bool or None, tokens that `Objective.choice` selected
    teacher_logprobs: Tensor | None = None  # [N] float32 or None, by the rollout's teacher; NaN: it has none
    # Tokens of the loss's further terms (`covey.core.terms`) by the term's name: [N] float32, 0 for a token that is not
    # part of it, else its share (1, or a factor of its own); and [B] float32, the normaliser of each rollout over one
    # optimizer step and all ranks. A token's weight in the term is their product.
    term_tokens: dict[str, Tensor] = field(default_factory=dict)
    term_scales: dict[str, Tensor] = field(default_factory=dict)
    origin: Tensor | None = None  # [N] int64 or None: the number of each token in the run's record
    # sampling masks (`keep_sampling_mask`): [N] int64 or None, number of tokens that each token was drawn from (0:
    # all), and the ids of these tokens, concatenated, [sum of kept_counts] int32
    kept_counts: Tensor | None = None
    kept_ids: Tensor | None = None
    # [N] int64 or None: who wrote each token (`Rollout.observed`), 0 in truncated completions that are masked
    observed: Tensor | None = None
    # [N, K] int64 or None: further tokens to score at each position, -1 for none (`named` of `TokenScorer`)
    named_ids: Tensor | None = None
    teacher_tops: Tensor | None = None  # [N, K] float32 or None, log-probs of the named tokens by the rollout's teacher
    # [N, H] or None, hidden states that the head of the rollout's teacher reads at each token, padded with 0 to the
    # widest teacher; and [N] int64 or None, the number of that head if there are several, -1 without a teacher
    teacher_hidden: Tensor | None = None
    teacher_numbers: Tensor | None = None
    # [N, L, k] and [M, L, k] uint8 or int16, or both None: experts to send each token of the completions and of the
    # prompts to (`covey.core.routes`). Prompts with equal tokens but different routes are distinct.
    routes: Tensor | None = None
    prompt_routes: Tensor | None = None
    # [B] images of each rollout, on the CPU until their micro-batch runs, or None where no rollout has any
    media: list[tuple[Media, ...]] | None = None
    entropy_threshold: float | None = None  # nats; tokens below are left out of the loss (`top_entropy_quantile`)
    skipped_tokens: int = 0  # trained tokens that were left out because they have no gradient; metrics count them
    skipped_rows: int = 0  # rollouts with such tokens

    def __len__(self) -> int:
        """Number of rollouts, B."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Number of completion tokens, N."""
        return len(self.token_ids)

    @property
    def sampled_lengths(self) -> Tensor:
        """[B] int64: the tokens of each rollout that are learned from."""
        totals = torch.zeros(len(self.lengths) + 1, dtype=torch.long, device=self.lengths.device)
        running = torch.cat([totals[:1], self.sampled.long().cumsum(0)])
        starts = segment_starts(self.lengths)
        return running[starts + self.lengths] - running[starts]

    @property
    def scored(self) -> Tensor:
        """[N] bool: the tokens whose log-probs the loss reads, for the surrogate or for a further term."""
        return reduce(or_, (shares != 0 for shares in self.term_tokens.values()), self.sampled)

    def select(self, rows: Tensor) -> "TrainBatch":
        """The rollouts `rows` [R] in that order, with only their own prompts; nothing counts as skipped."""
        tokens = token_index(rows, self.lengths)
        prompts, groups = self.groups[rows].unique(return_inverse=True)
        return TrainBatch(
            **self.of_tokens(TOKEN_FIELDS, tokens),
            lengths=self.lengths[rows],
            **self._each(("prompt_ids", "prompt_routes"), itemgetter(token_index(prompts, self.prompt_lengths))),
            prompt_lengths=self.prompt_lengths[prompts],
            groups=groups,
            term_scales={name: scales[rows] for name, scales in self.term_scales.items()},
            media=None if self.media is None else [self.media[row] for row in rows.tolist()],
            entropy_threshold=self.entropy_threshold,
        )

    def of_tokens(self, names: Iterable[str], tokens: Tensor) -> dict[str, Any]:
        """The fields `names` at the flat positions `tokens`, with the tokens' sampling masks and shares of terms."""
        kept = self.kept_ids
        if kept is not None and self.kept_counts is not None:
            kept = kept[token_index(tokens, self.kept_counts)]
        return {**self._each((*names, "term_tokens"), itemgetter(tokens)), "kept_ids": kept}

    def split(self, rows_per_part: int) -> list["TrainBatch"]:
        """Consecutive parts of `rows_per_part` rollouts; the last may be smaller."""
        order = torch.arange(len(self), device=self.lengths.device)
        return [self.select(rows) for rows in order.split(rows_per_part)] if len(self) else []

    def to(self, device: torch.device | str) -> "TrainBatch":
        return TrainBatch(**self._each(self.__slots__, methodcaller("to", device)))

    def _each(self, names: Iterable[str], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name in names:
            value = getattr(self, name)
            if isinstance(value, dict):
                values[name] = {key: change(one) for key, one in value.items()}
            else:
                values[name] = change(value) if isinstance(value, Tensor) else value
        return values

    def unrouted(self) -> "TrainBatch":
        """The batch without routes, so that each forward pass chooses the experts itself."""
        if self.prompt_routes is None:
            return self
        # prompts that differed only in their routes are one prompt now
        prompts = distinct_prompts((prompt.tolist() for prompt in self.prompts()), self.lengths.device)
        prompts["groups"] = prompts["groups"][self.groups]
        return replace(self, **prompts, routes=None)

    def silenced(self) -> "TrainBatch":
        """A copy with 0 in all `LOSS_FIELDS` where no token is trained, so that no NaN there can reach the loss."""
        return replace(self, **self._each(LOSS_FIELDS, lambda values: torch.where(self.sampled, values, 0.0)))

    def idle(self) -> "TrainBatch":
        """A dummy rollout of one token with weight 0, for ranks that have fewer micro-batches than others."""
        length = torch.ones(1, dtype=torch.long, device=self.lengths.device)
        return TrainBatch(
            **self._each(
                (*(name for name in TOKEN_FIELDS if name != "routes"), "term_tokens", "term_scales"),
                lambda values: values.new_zeros(1, *values.shape[1:]),
            ),
            **self._each(["kept_ids"], methodcaller("new_zeros", 0)),
            routes=None if self.routes is None else unknown_like(self.routes, 1),
            prompt_routes=None if self.routes is None else unknown_like(self.routes, 1),
            lengths=length,
            prompt_ids=torch.zeros_like(length),
            prompt_lengths=length,
            groups=torch.zeros_like(length),
            entropy_threshold=self.entropy_threshold,
        )

    def state(self) -> dict[str, Any]:
        """Plain containers and the batch's own tensors (not copies), from which `of_state` makes an equal batch."""
        state = {name: getattr(self, name) for name in self.__slots__}
        if self.media is not None:  # rollouts of a group share their images, in the restored batch as well
            distinct = list({id(item): item for media in self.media for item in media}.values())
            index = {id(item): number for number, item in enumerate(distinct)}
            rows = [[index[id(item)] for item in media] for media in self.media]
            state["media"] = {"distinct": [item.state() for item in distinct], "rows": rows}
        return state

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "TrainBatch":
        """Inverse of `state`."""
        saved = state.get("media")
        if saved is None:
            return cls(**state)
        distinct = [Media(**item) for item in saved["distinct"]]
        return cls(**{**state, "media": [tuple(distinct[index] for index in row) for row in saved["rows"]]})

    def prompts(self) -> list[Tensor]:
        """The P prompts' tokens, each [its length]."""
        return list(self.prompt_ids.split(self.prompt_lengths.tolist()))

    def routes_of_prompts(self) -> list[Tensor]:
        """The P prompts' routes, each [its length, L, k]; empty without routes."""
        return [] if self.prompt_routes is None else list(self.prompt_routes.split(self.prompt_lengths.tolist()))

    def completions(self) -> list[Tensor]:
        """The B completions' tokens, each [its length]."""
        return list(self.token_ids.split(self.lengths.tolist()))


def collate(rollouts: Sequence[Rollout], *, mask_truncated: bool | Sequence[bool] = False) -> TrainBatch:
    """Flatten rollouts into a `TrainBatch`; equal prompts are stored once.

    Rollouts of a group usually continue one prompt, but an environment may begin each episode in its own way.
    `mask_truncated`: learn nothing from truncated completions (DAPO's overlong filtering, arXiv 2503.14476 §3.4); one
    value for all rollouts, or one per rollout.
    """
    lengths: list[int] = []
    token_ids: list[int] = []
    sampled: list[bool] = []
    logprobs: list[float] = []
    observed: list[int] = []
    kept: list[Sequence[int]] = []
    jumps: dict[int, int] = {}
    masks = [mask_truncated] * len(rollouts) if isinstance(mask_truncated, bool) else mask_truncated
    for rollout, masked in zip(rollouts, masks, strict=True):
        size = len(rollout.completion_ids)
        for start, follows in rollout.strands:
            jumps[len(token_ids) + start] = follows - (len(rollout.prompt_ids) + start - 1)
        lengths.append(size)
        token_ids += rollout.completion_ids
        left_out = masked and rollout.truncated
        sampled += [False] * size if left_out else rollout.sampled
        observed += [0] * size if left_out or rollout.observed is None else rollout.observed
        logprobs += [math.nan] * size if rollout.logprobs is None else rollout.logprobs
        kept += [()] * size if rollout.sampling_mask is None else rollout.sampling_mask
    reporting = [rollout.completion_ids for rollout in rollouts if rollout.logprobs is not None]
    media = [rollout.media for rollout in rollouts]
    # An empty list of log-probs tells nothing about an engine, unless all completions are empty.
    reported = any(reporting) or (bool(reporting) and not token_ids)
    cut = any(map(len, kept))  # False: every token was drawn from the whole vocabulary
    shape, of_prompts, routes = some([rollout.routes for rollout in rollouts]), list[Tensor](), list[Tensor]()
    for one in rollouts if shape is not None else ():
        own = spread(one.routes, len(one.prompt_ids), len(one.completion_ids), shape)
        of_prompts.append(own[0])
        routes.append(own[1])
    batch = TrainBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.long),
        lengths=torch.tensor(lengths, dtype=torch.long),
        sampled=torch.tensor(sampled, dtype=torch.bool),
        **distinct_prompts(map(attrgetter("prompt_ids"), rollouts), routes=of_prompts or None),
        routes=torch.cat(routes) if routes else None,
        engine_logprobs=torch.tensor(logprobs, dtype=torch.float32) if reported else None,
        kept_counts=torch.tensor(list(map(len, kept)), dtype=torch.long) if cut else None,
        kept_ids=torch.tensor(list(chain.from_iterable(kept)), dtype=torch.int32) if cut else None,
        observed=torch.tensor(observed, dtype=torch.long) if any(observed) else None,
        media=media if any(media) else None,
    )
    if jumps:
        batch.jumps = torch.zeros_like(batch.token_ids)
        batch.jumps[list(jumps)] = torch.tensor(list(jumps.values()))
    return batch


def distinct_prompts(
    prompts: Iterable[Sequence[int]], device: torch.device | None = None, routes: Sequence[Tensor] | None = None
) -> dict[str, Any]:
    """Fields of a `TrainBatch` that hold its rollouts' prompts, each distinct prompt once, with their `routes`.

    Prompts with equal tokens but different routes are distinct.
    """
    numbers: dict[tuple[Any, ...], int] = {}
    first: list[int] = []  # of each distinct prompt, the first rollout that has it
    groups: list[int] = []
    for index, prompt in enumerate(prompts):
        key = (*prompt,) if routes is None else (*prompt, routes[index].cpu().numpy().tobytes())
        groups.append(numbers.setdefault(key, len(numbers)))
        if groups[-1] == len(first):
            first.append(index)
    tensor = partial(torch.tensor, dtype=torch.long, device=device)
    distinct = list(numbers) if routes is None else [key[:-1] for key in numbers]
    found = {"groups": tensor(groups), "prompt_lengths": tensor(list(map(len, distinct)))}
    found["prompt_ids"] = tensor(list(chain.from_iterable(distinct)))
    if routes is None:
        return {**found, "prompt_routes": None}
    own = [routes[index] for index in first] or list(routes[:1])
    return {**found, "prompt_routes": torch.cat(own).to(device or "cpu") if own else None}


def unreported(name: str, batch: TrainBatch, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of fill values for the field `name` that a batch lacks: [N], or [N, 0] for `WIDE_FIELDS`."""
    shape = (batch.num_tokens, 0) if name in WIDE_FIELDS else (batch.num_tokens,)
    return torch.full(shape, UNREPORTED[name], dtype=dtype, device=batch.lengths.device)


def with_unknown_routes(batch: TrainBatch, shape: Tensor) -> TrainBatch:
    """Add unknown routes to a batch without routes; L, k and the dtype are those of `shape` [..., L, k]."""
    like = shape.to(batch.lengths.device)
    of_prompts = unknown_like(like, len(batch.prompt_ids))
    return replace(batch, routes=unknown_like(like, batch.num_tokens), prompt_routes=of_prompts)


def join(batches: Sequence[TrainBatch]) -> TrainBatch:
    """Concatenate batches; equal prompts are stored once.

    A field of `UNREPORTED` or the routes may be missing in some batches, and are filled there; any other field must be
    in all of them or in none.
    """
    device = batches[0].lengths.device
    shape = some([batch.routes for batch in batches])
    if shape is not None:
        batches = [batch if batch.routes is not None else with_unknown_routes(batch, shape) for batch in batches]
    routes = [own for batch in batches for own in batch.routes_of_prompts()]
    prompts = distinct_prompts(
        (prompt.tolist() for batch in batches for prompt in batch.prompts()), device, None if shape is None else routes
    )
    offsets = [0, *accumulate(len(batch.prompt_lengths) for batch in batches)]
    rows = torch.cat([batch.groups + offset for batch, offset in zip(batches, offsets, strict=False)])
    prompts["groups"] = prompts["groups"][rows]

    def joined(name: str) -> Tensor | None:
        parts = [getattr(batch, name) for batch in batches]
        dtype = next((part.dtype for part in parts if part is not None), None)
        if name in UNREPORTED and dtype is not None:
            parts = [
                unreported(name, batch, dtype) if part is None else part
                for part, batch in zip(parts, batches, strict=True)
            ]
        if name in WIDE_FIELDS and parts[0] is not None:
            widest = max(part.shape[1] for part in parts)
            parts = [pad(part, (0, widest - part.shape[1]), value=UNREPORTED[name]) for part in parts]
        assert len({part is None for part in parts}) == 1, f"some batches have {name} and others do not"
        return None if parts[0] is None else torch.cat(parts)

    def of_terms(name: str) -> dict[str, Tensor]:
        parts = [getattr(batch, name) for batch in batches]
        assert len({(*part,) for part in parts}) == 1, "some batches have tokens of a term that others have not"
        return {term: torch.cat([part[term] for part in parts]) for term in parts[0]}

    per_token: dict[str, Any] = {name: joined(name) for name in TOKEN_FIELDS}
    media = [images for batch in batches for images in (batch.media or [()] * len(batch))]
    kept = [batch.kept_ids for batch in batches if batch.kept_ids is not None]
    return TrainBatch(
        **per_token,
        **prompts,
        kept_ids=torch.cat(kept) if kept else None,
        lengths=torch.cat([batch.lengths for batch in batches]),
        term_tokens=of_terms("term_tokens"),
        term_scales=of_terms("term_scales"),
        media=media if any(batch.media is not None for batch in batches) else None,
    )


# ---- flat sequences: values [N] with lengths [B] ---------------------------------------------------------------------


def segment_ids(lengths: Tensor, tokens: int | None = None) -> Tensor:
    """Sequence index of every token: `[2, 0, 3] -> [0, 0, 2, 2, 2]`. lengths [B] -> [N]; `tokens` as in `expand`."""
    return expand(torch.arange(len(lengths), device=lengths.device), lengths, tokens)


def segment_starts(lengths: Tensor) -> Tensor:
    """Offset of each sequence's first token: `[2, 0, 3] -> [0, 2, 2]`. lengths [B] -> [B]."""
    return lengths.cumsum(0) - lengths


def expand(values: Tensor, lengths: Tensor, tokens: int | None = None) -> Tensor:
    """Give every token its sequence's value: values [B], lengths [B] -> [N].

    `tokens` is N, if the caller knows it. Without it the lengths are summed on their device, which waits for a GPU.
    """
    return torch.repeat_interleave(values, lengths, output_size=tokens)


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum over each sequence: values [N], lengths [B] -> [B]; an empty sequence sums to 0."""
    out = torch.zeros(len(lengths), dtype=values.dtype, device=values.device)
    return out.index_add(0, segment_ids(lengths, len(values)), values)


def masked_segment_mean(values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Mean over the tokens of each sequence where `mask` is True, 0 if there are none: [N], [N], lengths [B] -> [B]."""
    count = segment_sum(mask.to(values.dtype), lengths)
    return segment_sum(torch.where(mask, values, 0.0), lengths) / count.clamp(min=1.0)


def token_index(rows: Tensor, lengths: Tensor) -> Tensor:
    """Flat positions of the tokens of `rows`, in that order: rows [R], lengths [B] -> [sum of the rows' lengths]."""
    chosen = lengths[rows]
    within = torch.arange(int(chosen.sum()), device=lengths.device) - expand(segment_starts(chosen), chosen)
    return expand(segment_starts(lengths)[rows], chosen) + within
