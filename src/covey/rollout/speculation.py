"""Speculative reuse: the last completions of a prompt, kept as drafts for its next visit.

When a prompt comes again (another epoch), the policy has changed little, and most of what it would write now is what
it wrote then. The engine checks such a draft in one parallel pass and decodes only from where it no longer holds
(SPEC-RL, arXiv 2509.23232). Here is what is remembered, what an engine is given, and how a sample is seeded; the
checking itself is the engine's (`SampleRequest.drafts`). A missing draft costs time and never changes a result.
"""

import dataclasses
import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from covey.core.engine import SampleRequest
from covey.core.metrics import Mean, Stat
from covey.core.rollout import Rollout


class DraftKey(NamedTuple):
    """Which completion a draft is of: the prompt's number, a fingerprint of its tokens, and its place in the group.

    The number tells equal prompts of a dataset apart; the fingerprint keeps drafts of one dataset from another.
    """

    prompt: int
    fingerprint: int
    sample: int


@dataclass(frozen=True, slots=True)
class Draft:
    """A completion as it is kept: 4 bytes per token, and 4 more where log-probs are kept too."""

    token_ids: array
    logprobs: array | None = None


def fingerprint(token_ids: Sequence[int]) -> int:
    """A 63-bit number that stands for these tokens."""
    digest = hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class DraftStore:
    """The last completion of every (prompt, sample) this process has seen, within a bound.

    Args:
        max_tokens: tokens kept; beyond that the completions that were sampled longest ago are forgotten.
        with_logprobs: whether a draft is kept with its log-probs; without them it is not kept at all then.
    """

    def __init__(self, max_tokens: int, *, with_logprobs: bool):
        self.max_tokens = max_tokens
        self.with_logprobs = with_logprobs
        self.num_tokens = 0
        self._drafts: dict[DraftKey, Draft] = {}  # oldest first

    def __len__(self) -> int:
        """Completions kept."""
        return len(self._drafts)

    def get(self, key: DraftKey) -> Draft | None:
        """The last completion, or None if it was never seen or is forgotten."""
        return self._drafts.get(key)

    def put(self, key: DraftKey, token_ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        """Keep a completion in place of the one before it."""
        if (old := self._drafts.pop(key, None)) is not None:
            self.num_tokens -= len(old.token_ids)
        if self.with_logprobs and logprobs is None:
            return
        kept = array("f", logprobs) if self.with_logprobs and logprobs is not None else None
        self._drafts[key] = Draft(array("i", token_ids), kept)
        self.num_tokens += len(token_ids)
        while self.num_tokens > self.max_tokens:
            oldest = self._drafts.pop(next(iter(self._drafts)))
            self.num_tokens -= len(oldest.token_ids)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything kept, in order of age: `keys` [E, 3], `lengths` [E], `token_ids` and `logprobs` [N] or [0]."""
        drafts = self._drafts.values()
        return {
            "keys": torch.tensor(list(self._drafts), dtype=torch.int64).view(-1, 3),
            "lengths": torch.tensor([len(draft.token_ids) for draft in drafts], dtype=torch.int64),
            "token_ids": _joined([draft.token_ids for draft in drafts], torch.int32),
            "logprobs": _joined([draft.logprobs for draft in drafts if draft.logprobs is not None], torch.float32),
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Keep what `state_dict` returned, and nothing else."""
        self._drafts.clear()
        self.num_tokens = 0
        lengths = state["lengths"].tolist()
        tokens = state["token_ids"].split(lengths)
        known = len(state["logprobs"]) == len(state["token_ids"])
        logprobs = state["logprobs"].split(lengths) if known else [None] * len(lengths)
        for key, ids, values in zip(state["keys"].tolist(), tokens, logprobs, strict=True):
            self.put(DraftKey(*key), ids.tolist(), None if values is None else values.tolist())


class Speculation:
    """How a run reuses earlier completions.

    Exact (`lenience=None`): a draft token stays where it is what this row would have sampled without a draft, by its
    own random numbers (common random numbers, arXiv 2408.07978). For a draft to hold, these must be the numbers that
    it was written with, so a sample's seed is the same at every visit and does not depend on the generation.

    Lenient: a draft token stays with probability min(1, lenience * p_now / p_then), judged with fresh random numbers.

    Args:
        max_tokens: bound of the store.
        lenience: None for exact.
    """

    def __init__(self, max_tokens: int, lenience: float | None = None):
        self.lenience = lenience
        self.drafts = DraftStore(max_tokens, with_logprobs=lenience is not None)

    def seed_key(self, key: tuple[int | str, ...], prompt_ids: Sequence[int]) -> tuple[int | str, ...]:
        """What seeds a prompt's samples beside their place: `key` (the generation), or the prompt itself when exact."""
        return ("reuse", fingerprint(prompt_ids)) if self.lenience is None else key

    def with_drafts(self, request: SampleRequest, prompt: int, samples: Sequence[int]) -> SampleRequest:
        """The request with what is known of its completions.

        Args:
            request: one prompt.
            prompt: its number.
            samples: the place in the group of each of its completions.
        """
        mark = fingerprint(request.prompt_ids)
        drafts = [self.drafts.get(DraftKey(prompt, mark, sample)) for sample in samples]
        if not any(drafts):
            return request
        logprobs = [draft.logprobs.tolist() if draft and draft.logprobs else None for draft in drafts]
        return dataclasses.replace(
            request,
            drafts=[draft.token_ids.tolist() if draft else None for draft in drafts],
            draft_logprobs=None if self.lenience is None else logprobs,
            draft_lenience=self.lenience,
        )

    def remember(self, prompts: Sequence[int], samples: Sequence[int], rollouts: Sequence[Rollout]) -> None:
        """Keep finished rollouts for the next visit.

        Args:
            prompts: the number of each rollout's prompt.
            samples: its place in the group.
            rollouts: in the same order.
        """
        for prompt, sample, rollout in zip(prompts, samples, rollouts, strict=True):
            key = DraftKey(prompt, fingerprint(rollout.prompt_ids), sample)
            self.drafts.put(key, rollout.completion_ids, rollout.logprobs)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return self.drafts.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.drafts.load_state_dict(state)


def reuse_stats(rollouts: Sequence[Rollout]) -> dict[str, Stat]:
    """The share of sampled tokens that were taken from drafts, as a metric."""
    reused = sum(rollout.reused for rollout in rollouts)
    return {"sampling/reused_token_fraction": Mean(float(reused), float(sum(r.num_sampled for r in rollouts)))}


def _joined(parts: Sequence[array], dtype: torch.dtype) -> torch.Tensor:
    """Arrays end to end, as one tensor of their own."""
    whole = b"".join(part.tobytes() for part in parts)
    return torch.frombuffer(bytearray(whole), dtype=dtype) if whole else torch.empty(0, dtype=dtype)
