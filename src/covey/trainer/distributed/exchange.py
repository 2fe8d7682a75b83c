"""Rollouts of all processes: every process knows their sizes (`RolloutIndex`), and fetches the ones it trains on.

They stay where they were sampled (`OwnRollouts`) until a plan assigns them to another process, and then travel once.
Letters: B rollouts of all processes, P distinct prompts.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from covey.core.batch import UNREPORTED, TrainBatch, expand, join, segment_sum, token_index, unreported
from covey.core.media import Media
from covey.core.strands import strand_sizes
from covey.core.terms import term_sizes
from covey.trainer.distributed.collectives import Collectives

Moves = tuple[tuple[tuple[int, ...], ...], ...]
"""[sender][receiver]: the sender's rollouts that the receiver trains on, by their number in the sender's batch."""


@dataclass(frozen=True)
class RolloutIndex:
    """Sizes and places of rollouts, on the CPU and equal on every process."""

    owners: Tensor  # [B] int64, the process that holds each rollout
    rows: Tensor  # [B] int64, its number in that process's batch
    lengths: Tensor  # [B] int64, completion tokens
    sampled_lengths: Tensor  # [B] int64, completion tokens that are learned from
    has_signal: Tensor  # [B] bool, some learned token has an advantage other than 0, or is part of a term of the loss
    groups: Tensor  # [B] int64, the prompt that each rollout continues: an index into `prompt_lengths`
    prompt_lengths: Tensor  # [P] int64
    prompt_keys: Tensor  # [P, 2] int64, hash of each prompt's tokens, and of its routes
    # [B] float32, weights of each rollout's learned tokens, used instead of the batch's
    weights: Tensor | None = None
    entropy_weights: Tensor | None = None
    strands: Tensor | None = None  # [B, 4] int64, `strand_sizes`, or 0 of processes without strands
    sources: Tensor | None = None  # [B] int64, index of the source of each rollout; None in a run without
    absent: Tensor | None = None  # [B] bool, true for absent rollouts; None where there are none
    term_tokens: dict[str, Tensor] = field(default_factory=dict)  # [B] int64, tokens of each term of the loss
    term_scales: dict[str, Tensor] = field(default_factory=dict)  # [B] float32, used instead of the batch's
    skipped_tokens: int = 0  # learned tokens of rollouts that were dropped
    skipped_rows: int = 0  # dropped rollouts that have learned tokens

    @classmethod
    def of(
        cls, batch: TrainBatch, owner: int = 0, sources: Tensor | None = None, absent: Tensor | None = None
    ) -> "RolloutIndex":
        keys = bytearray()
        routes = batch.routes_of_prompts()
        for number, ids in enumerate(batch.prompts()):
            data = ids.cpu().numpy().tobytes() + (routes[number].cpu().numpy().tobytes() if routes else b"")
            keys += hashlib.blake2b(data, digest_size=16).digest()
        assert batch.advantages is not None, "credit is assigned before rollouts are shared"
        signal = segment_sum((batch.advantages != 0).long() * batch.sampled, batch.lengths) > 0
        terms = term_sizes(batch)
        for sizes in terms.values():
            signal |= sizes > 0
        return cls(
            owners=torch.full((len(batch),), owner),
            rows=torch.arange(len(batch)),
            lengths=batch.lengths.cpu(),
            sampled_lengths=batch.sampled_lengths.cpu(),
            has_signal=signal.cpu(),
            groups=batch.groups.cpu(),
            prompt_lengths=batch.prompt_lengths.cpu(),
            prompt_keys=torch.frombuffer(keys, dtype=torch.long).view(-1, 2),
            strands=None if batch.jumps is None else strand_sizes(batch),
            sources=sources,
            absent=absent,
            term_tokens={name: sizes.cpu() for name, sizes in terms.items()},
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def present(self) -> Tensor:
        """[B] bool, true for all but absent rollouts."""
        return torch.ones(len(self), dtype=torch.bool) if self.absent is None else ~self.absent

    def select(self, rollouts: Tensor) -> "RolloutIndex":
        """Some rollouts in the given order, with the prompts that they continue."""
        prompts, groups = self.groups[rollouts].unique(return_inverse=True)
        chosen: dict[str, Any] = {
            name: values[rollouts] for name in PER_ROLLOUT if (values := getattr(self, name)) is not None
        }
        for name in ("term_tokens", "term_scales"):
            chosen[name] = {term: values[rollouts] for term, values in getattr(self, name).items()}
        return RolloutIndex(
            **chosen, groups=groups, prompt_lengths=self.prompt_lengths[prompts], prompt_keys=self.prompt_keys[prompts]
        )

    def without_signal_dropped(self) -> "RolloutIndex":
        """Drop the rollouts whose advantages are all 0 and that have no term; metrics still count them."""
        # Without any signal the shortest stays: optimizers with momentum need a gradient, also one of zeros.
        signal = self.has_signal.nonzero()[:, 0]
        left = self.select(signal if len(signal) else self.lengths.argmin()[None])
        return replace(
            left,
            skipped_tokens=int(self.sampled_lengths.sum() - left.sampled_lengths.sum()),
            skipped_rows=int((self.sampled_lengths > 0).sum() - (left.sampled_lengths > 0).sum()),
        )


PER_ROLLOUT = (
    *("owners", "rows", "lengths", "sampled_lengths", "has_signal", "weights", "entropy_weights"),
    *("strands", "sources", "absent"),
)


def join_indexes(indexes: Sequence[RolloutIndex], offsets: Sequence[int] | None = None) -> RolloutIndex:
    lengths: dict[tuple[int, ...], int] = {}
    for index in indexes:
        for key, length in zip(index.prompt_keys.tolist(), index.prompt_lengths.tolist(), strict=True):
            lengths[tuple(key)] = length
    numbers = {key: number for number, key in enumerate(lengths)}
    groups = [
        torch.tensor([numbers[tuple(key)] for key in index.prompt_keys.tolist()], dtype=torch.long)[index.groups]
        for index in indexes
    ]
    rows = [index.rows + offset for index, offset in zip(indexes, offsets or [0] * len(indexes), strict=True)]
    names = ("owners", "lengths", "sampled_lengths", "has_signal")
    joined: dict[str, Any] = {name: torch.cat([getattr(index, name) for index in indexes]) for name in names}
    if any(index.strands is not None for index in indexes):
        parts = [torch.zeros(len(one), 4).long() if one.strands is None else one.strands for one in indexes]
        joined["strands"] = torch.cat(parts)
    if any(index.sources is not None for index in indexes):  # demonstrations have none
        parts = [torch.full((len(one),), -1) if one.sources is None else one.sources for one in indexes]
        joined["sources"] = torch.cat(parts)
    if any(index.absent is not None for index in indexes):
        joined["absent"] = ~torch.cat([index.present for index in indexes])
    joined["term_tokens"] = {
        term: torch.cat([index.term_tokens[term] for index in indexes]) for term in indexes[0].term_tokens
    }
    return RolloutIndex(
        **joined,
        rows=torch.cat(rows),
        groups=torch.cat(groups),
        prompt_lengths=torch.tensor(list(lengths.values()), dtype=torch.long),
        prompt_keys=torch.tensor(list(lengths), dtype=torch.long).view(-1, 2),
    )


def moves(index: RolloutIndex, shares: Sequence[Tensor]) -> Moves:
    """Transfers that give each process the rollouts that it trains on, those that it holds already included."""
    places = list(zip(index.owners.tolist(), index.rows.tolist(), strict=True))
    rows: list[list[set[int]]] = [[set() for _ in shares] for _ in shares]
    for receiver, share in enumerate(shares):
        for rollout in share.tolist():
            sender, row = places[rollout]
            rows[sender][receiver].add(row)
    return tuple(tuple(tuple(sorted(to)) for to in sender) for sender in rows)


class OwnRollouts:
    """Rollouts that this process sampled, and those that it received from others."""

    def __init__(self, batch: TrainBatch, rank: int):
        self.batch, self.rank = batch, rank
        self._fetched: dict[Moves, tuple[TrainBatch, dict[tuple[int, int], int]]] = {}
        self._sent: dict[int, set[int]] = {}  # images that each process received, by id
        self._received: dict[int, dict[int, Media]] = {}  # images of each process

    def fetch(self, index: RolloutIndex, shares: Sequence[Tensor], collectives: Collectives) -> TrainBatch:
        """The rollouts of this process's share, from wherever they are. Collective."""
        share = index.select(shares[self.rank])
        if collectives.size == 1:
            return _like(share, self.batch.select(share.rows.to(self.batch.lengths.device)))
        plan = moves(index, shares)
        if plan not in self._fetched:  # else an earlier iteration over the same rollouts
            self._fetched[plan] = self._collect(plan, collectives)
        batch, numbers = self._fetched[plan]
        places = zip(share.owners.tolist(), share.rows.tolist(), strict=True)
        order = torch.tensor([numbers[place] for place in places], dtype=torch.long, device=batch.lengths.device)
        return _like(share, batch.select(order))

    def _collect(self, plan: Moves, collectives: Collectives) -> tuple[TrainBatch, dict[tuple[int, int], int]]:
        """The rollouts that a plan assigns to this process, in any order, and the number of each."""
        rank = self.rank
        outgoing = [self._message(rows, to) if rows and to != rank else None for to, rows in enumerate(plan[rank])]
        incoming = collectives.exchange(outgoing, "exchange rollouts")
        senders = [sender for sender in range(len(plan)) if plan[sender][rank]]
        parts = [
            self._select(plan[rank][rank]) if sender == rank else self._read(incoming[sender], sender)
            for sender in senders
        ]
        numbers = [(sender, row) for sender in senders for row in plan[sender][rank]]
        batch = join(parts) if parts else self._select(())
        return batch, {place: number for number, place in enumerate(numbers)}

    def _select(self, rows: Sequence[int]) -> TrainBatch:
        return self.batch.select(torch.tensor(rows, dtype=torch.long, device=self.batch.lengths.device))

    def _message(self, rows: Sequence[int], receiver: int) -> Any:
        """Rollouts for another process: the batch, its images by id, and the images that it does not have yet."""
        batch = self._select(rows)
        if batch.media is None:
            return batch, None, {}
        sent = self._sent.setdefault(receiver, set())
        images = {id(item): replace(item, images=()) for media in batch.media for item in media}
        new = {key: item for key, item in images.items() if key not in sent}
        sent.update(new)
        return replace(batch, media=None), [[id(item) for item in media] for media in batch.media], new

    def _read(self, message: Any, sender: int) -> TrainBatch:
        batch, media, new = message
        received = self._received.setdefault(sender, {})
        received.update(new)
        if media is not None:
            batch = replace(batch, media=[tuple(received[key] for key in keys) for keys in media])
        return batch.to(self.batch.lengths.device)


def _like(share: RolloutIndex, batch: TrainBatch) -> TrainBatch:
    """The same rollouts with the prompts in the order of the index, and its weights."""
    device = batch.lengths.device
    groups, order = share.groups.sort(stable=True)
    first = order[torch.searchsorted(groups, torch.arange(len(share.prompt_lengths)))]
    own = batch.groups[first.to(device)]
    given = {name: weights for name in ("weights", "entropy_weights") if (weights := getattr(share, name)) is not None}
    of_tokens: dict[str, Any] = {
        name: torch.where(batch.sampled, expand(weights.to(device), batch.lengths), 0.0)
        for name, weights in given.items()
    }
    scales = {term: values.to(device) for term, values in share.term_scales.items()}
    tokens = token_index(own, batch.prompt_lengths)
    return replace(
        batch,
        term_scales=scales or batch.term_scales,
        prompt_ids=batch.prompt_ids[tokens],
        prompt_routes=None if batch.prompt_routes is None else batch.prompt_routes[tokens],
        prompt_lengths=share.prompt_lengths.to(device),
        groups=share.groups.to(device),
        **of_tokens,
    )


def pool(
    batch: TrainBatch, collectives: Collectives, sources: Tensor | None = None, absent: Tensor | None = None
) -> tuple[OwnRollouts, RolloutIndex]:
    """A rollout batch: this process's rollouts, and the index of all processes' in the order of ranks. Collective.

    `sources` [B] int64 and `absent` [B] bool are those of this process's rollouts, as in `RolloutIndex`.
    """
    own = RolloutIndex.of(batch, collectives.rank, sources, absent)
    if collectives.size == 1:
        return OwnRollouts(batch, collectives.rank), own
    present = [name for name in (*UNREPORTED, "media") if getattr(batch, name) is not None]
    everyone = collectives.gather((own, present), "share the sizes of rollouts")
    reported = {name for _, names in everyone for name in names}
    filled: dict[str, Any] = {name: unreported(name, batch) for name in reported.difference(present, ("media",))}
    if batch.media is None and "media" in reported:
        filled["media"] = [()] * len(batch)
    return OwnRollouts(replace(batch, **filled), collectives.rank), join_indexes([index for index, _ in everyone])
