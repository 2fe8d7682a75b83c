"""`TrainBatch`: what the policy is trained on, flat and unpadded, and how rollouts become one.

Not here: how a batch is laid out for a forward pass (`covey.policy.layouts`) and what its advantages and weights are
(`covey.core.advantages`, `covey.core.weighting`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from covey.core.media import Media
from covey.core.ragged import segment_starts, segment_sum, token_index
from covey.core.rollout import Rollout

TOKEN_FIELDS = (
    "token_ids",
    "sampled",
    "advantages",
    "weights",
    "entropy_weights",
    "old_logprobs",
    "ref_logprobs",
    "engine_logprobs",
    "mismatch_weights",
)

UNREPORTED = {"engine_logprobs": math.nan, "mismatch_weights": 1.0}
"""What stands for tokens of which the engine said nothing, beside tokens of which it did."""


@dataclass(slots=True)
class TrainBatch:
    """Completion tokens of B rollouts in flat vectors, with their prompts stored once each.

    Attributes:
        token_ids: [N] int64, the completion tokens of all rollouts, one after the other.
        lengths: [B] int64, completion tokens of each rollout; may be 0.
        sampled: [N] bool, the tokens that are learned from. False for tool output, and for every token of a
            truncated completion under `mask_truncated_completions`.
        prompt_ids: [M] int64, the tokens of the P distinct prompts, one after the other.
        prompt_lengths: [P] int64.
        groups: [B] int64, the prompt each rollout continues: an index into `prompt_lengths`. Rollouts whose prompts
            are equal are in one group, wherever they were drawn. This is about what a forward pass may share, not
            about credit: which rollouts are compared with one another follows from the order of sampling, G at a time.
        advantages: [N] float32, credit of each token (equal over a rollout unless credit is given per step).
        weights: [N] float32, how much each token's loss counts; 0 where not sampled. Their sum over one optimizer
            step and all ranks is the loss's normaliser already applied: `loss = sum(weights * token_loss)`.
        entropy_weights: [N] float32 or None, the same for the entropy bonus.
        old_logprobs: [N] float32 or None, under the policy before this generation's updates. None: on-policy.
        ref_logprobs: [N] float32 or None, under the reference policy.
        engine_logprobs: [N] float32 or None, as the sampling engine reported them; NaN for rollouts without any.
        mismatch_weights: [N] float32 or None, importance weights that correct the engine's distribution.
        media: [B] what each rollout shows the model besides text, or None where none shows any. It stays on the CPU and
            goes to the device pass by pass.
        entropy_threshold: tokens with less entropy are left out of the loss (`top_entropy_quantile`), or None.
        skipped_tokens: learned tokens that were left out of this batch because they carry no gradient; metrics count
            them.
        skipped_rows: rollouts that had such tokens.

    Example:
        Two answers to one prompt, "2+2=" -> "4" and "2+2=" -> "2 2":
        `TrainBatch(token_ids=[4, 2, 2], lengths=[1, 2], sampled=[1, 1, 1], prompt_ids=[2, 9, 2, 8],
        prompt_lengths=[4], groups=[0, 0])`
    """

    token_ids: Tensor
    lengths: Tensor
    sampled: Tensor
    prompt_ids: Tensor
    prompt_lengths: Tensor
    groups: Tensor
    advantages: Tensor | None = None
    weights: Tensor | None = None
    entropy_weights: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    engine_logprobs: Tensor | None = None
    mismatch_weights: Tensor | None = None
    media: list[tuple[Media, ...]] | None = None
    entropy_threshold: float | None = None
    skipped_tokens: int = 0
    skipped_rows: int = 0

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

    def select(self, rows: Tensor) -> "TrainBatch":
        """The rollouts `rows` [R] in that order, with just the prompts they continue; nothing counts as skipped."""
        tokens = token_index(rows, self.lengths)
        prompts, groups = self.groups[rows].unique(return_inverse=True)
        values = {name: getattr(self, name) for name in TOKEN_FIELDS}
        per_token: dict[str, Any] = {k: None if v is None else v[tokens] for k, v in values.items()}
        return TrainBatch(
            **per_token,
            lengths=self.lengths[rows],
            prompt_ids=self.prompt_ids[token_index(prompts, self.prompt_lengths)],
            prompt_lengths=self.prompt_lengths[prompts],
            groups=groups,
            media=None if self.media is None else [self.media[row] for row in rows.tolist()],
            entropy_threshold=self.entropy_threshold,
        )

    def split(self, rows_per_part: int) -> list["TrainBatch"]:
        """Consecutive parts of `rows_per_part` rollouts; the last may be smaller."""
        order = torch.arange(len(self), device=self.lengths.device)
        return [self.select(rows) for rows in order.split(rows_per_part)] if len(self) else []

    def to(self, device: torch.device | str) -> "TrainBatch":
        """A copy whose tensors live on `device`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in values.items()}
        return TrainBatch(**moved)

    def without_signal_dropped(self) -> "TrainBatch":
        """Without the rollouts whose advantages are all 0; metrics still count them.

        Of a batch without any signal the shortest rollout stays: a gradient of zeros is a gradient, which optimizers
        with momentum go on from.
        """
        assert self.advantages is not None, "credit comes before the loss"
        has_signal = segment_sum((self.advantages != 0).long() * self.sampled, self.lengths) > 0
        rows = has_signal.nonzero()[:, 0]
        kept = self.select(rows if len(rows) else self.lengths.argmin()[None]) if len(self) else self
        return replace(
            kept,
            skipped_tokens=int(self.sampled.sum() - kept.sampled.sum()),
            skipped_rows=int((self.sampled_lengths > 0).sum() - (kept.sampled_lengths > 0).sum()),
        )

    def idle(self) -> "TrainBatch":
        """One token of one made-up rollout, of which nothing is learned and nothing counted.

        For a process with fewer forward passes than others, where all must run equally many.
        """
        device, values = self.lengths.device, {name: getattr(self, name) for name in TOKEN_FIELDS}
        one = torch.ones(1, dtype=torch.long, device=device)
        per_token: dict[str, Any] = {
            name: None if value is None else value.new_zeros(1) for name, value in values.items()
        }
        return TrainBatch(
            **per_token,
            lengths=one,
            prompt_ids=torch.zeros_like(one),
            prompt_lengths=one,
            groups=torch.zeros_like(one),
            entropy_threshold=self.entropy_threshold,
        )

    def state(self) -> dict[str, Any]:
        """Plain containers and tensors on the CPU; `TrainBatch.of_state` makes an equal batch of them."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        state = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in values.items()}
        if self.media is not None:  # siblings share theirs, and are to share them again
            distinct = list({id(one): one for media in self.media for one in media}.values())
            places = {id(one): place for place, one in enumerate(distinct)}
            rows = [[places[id(one)] for one in media] for media in self.media]
            state["media"] = {"distinct": [one.state() for one in distinct], "rows": rows}
        return state

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "TrainBatch":
        """The batch whose `state` this is, on the CPU."""
        saved = state.get("media")
        if saved is None:
            return cls(**state)
        distinct = [Media(**one) for one in saved["distinct"]]
        return cls(**{**state, "media": [tuple(distinct[place] for place in row) for row in saved["rows"]]})

    def prompts(self) -> list[Tensor]:
        """The P prompts' tokens, each [its length]."""
        return list(self.prompt_ids.split(self.prompt_lengths.tolist()))

    def completions(self) -> list[Tensor]:
        """The B completions' tokens, each [its length]."""
        return list(self.token_ids.split(self.lengths.tolist()))


def collate(rollouts: Sequence[Rollout], *, mask_truncated: bool = False) -> TrainBatch:
    """Flatten rollouts into a `TrainBatch`; equal prompts are stored once.

    Args:
        rollouts: finished episodes. Siblings mostly continue one prompt, but need not: an environment may begin each
            episode in its own way.
        mask_truncated: learn nothing from truncated completions (DAPO's overlong filtering, arXiv 2503.14476 §3.4).
    """
    prompts, groups = _distinct([rollout.prompt_ids for rollout in rollouts])

    def learned(rollout: Rollout) -> list[bool]:
        return [False] * len(rollout.sampled) if mask_truncated and rollout.truncated else rollout.sampled

    def reported(rollout: Rollout) -> list[float]:
        return [math.nan] * len(rollout.sampled) if rollout.logprobs is None else rollout.logprobs

    speaking = [r for r in rollouts if r.completion_ids] or rollouts  # "no log-probs" of no tokens says nothing
    have_logprobs = any(r.logprobs is not None for r in speaking)
    return TrainBatch(
        token_ids=_flat([r.completion_ids for r in rollouts], torch.long),
        lengths=torch.tensor([len(r.completion_ids) for r in rollouts], dtype=torch.long),
        sampled=_flat([learned(r) for r in rollouts], torch.bool),
        prompt_ids=_flat(prompts, torch.long),
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts], dtype=torch.long),
        groups=torch.tensor(groups, dtype=torch.long),
        engine_logprobs=_flat([reported(r) for r in rollouts], torch.float32) if have_logprobs else None,
        media=[r.media for r in rollouts] if any(r.media for r in rollouts) else None,
    )


def join(batches: Sequence[TrainBatch]) -> TrainBatch:
    """One batch of several, rollouts in order, as when processes put together what they sampled.

    Args:
        batches: with the same optional fields; what an engine reported to some of them alone is filled up. Prompts that
            are equal are kept once, also where they come from different batches.
    """
    device = batches[0].lengths.device
    kept, places = _distinct([prompt.tolist() for batch in batches for prompt in batch.prompts()])
    place = torch.tensor(places, dtype=torch.long, device=device)
    offsets = [0, *accumulate(len(batch.prompt_lengths) for batch in batches)]
    groups = [place[batch.groups + offset] for batch, offset in zip(batches, offsets, strict=False)]

    def joined(name: str) -> Tensor | None:
        parts = [getattr(batch, name) for batch in batches]
        if name in UNREPORTED and any(part is not None for part in parts):
            parts = [_or_unreported(batch, name) for batch in batches]
        assert len({part is None for part in parts}) == 1, f"{name} is there in some batches and not in others"
        return None if parts[0] is None else torch.cat(parts)

    per_token: dict[str, Any] = {name: joined(name) for name in TOKEN_FIELDS}
    return TrainBatch(
        **per_token,
        lengths=torch.cat([batch.lengths for batch in batches]),
        prompt_ids=_flat(kept, torch.long).to(device),
        prompt_lengths=torch.tensor([len(prompt) for prompt in kept], dtype=torch.long, device=device),
        groups=torch.cat(groups),
        media=_joined_media(batches),
    )


def _joined_media(batches: Sequence[TrainBatch]) -> list[tuple[Media, ...]] | None:
    if all(batch.media is None for batch in batches):
        return None
    return [media for batch in batches for media in (batch.media or [()] * len(batch))]


def _distinct(prompts: Sequence[Sequence[int]]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Every prompt once, in the order of their first appearance, and the place of each of `prompts` among them."""
    known: dict[tuple[int, ...], int] = {}
    places = [known.setdefault(tuple(prompt), len(known)) for prompt in prompts]
    return list(known), places


def _or_unreported(batch: TrainBatch, name: str) -> Tensor:
    value: Tensor | None = getattr(batch, name)
    return torch.full(batch.sampled.shape, UNREPORTED[name], device=batch.sampled.device) if value is None else value


def _flat(lists: Sequence[Sequence[Any]], dtype: torch.dtype) -> Tensor:
    return torch.tensor([x for one in lists for x in one], dtype=dtype)
