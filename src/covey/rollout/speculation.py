"""Speculative reuse: the last completions of a prompt are drafts when the prompt is sampled again.

The engine verifies a draft in one parallel pass and decodes from the first token that it rejects (SPEC-RL, arXiv
2509.23232; `SampleRequest.drafts`). In exact mode a missing draft costs time and never changes a result.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from covey.core.engine import SampleRequest
from covey.core.records import Rollout
from covey.core.stats import Mean, Stat

DraftKey = tuple[int, int, int]  # (number of the prompt, fingerprint of its tokens, index of the sample)


@dataclass(frozen=True, slots=True)
class Draft:
    """A stored completion: 4 bytes per token, and 4 more with log-probs."""

    token_ids: array
    logprobs: array | None = None


def fingerprint(token_ids: Sequence[int]) -> int:
    digest = hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Speculation:
    """Reuse of earlier completions in a run.

    Exact (`lenience=None`): a draft token is accepted if the sequence would have sampled it without a draft, with its
    own random numbers (common random numbers, arXiv 2408.07978). The draft must have been sampled with the same random
    numbers, so a sample's seed is the same whenever its prompt is sampled, and does not depend on the batch.

    Lenient: a draft token is accepted with probability min(1, lenience * p_now / p_then), with new random numbers.
    """

    def __init__(self, max_tokens: int, lenience: float | None = None):
        self.max_tokens, self.lenience, self.num_tokens = max_tokens, lenience, 0
        self._drafts: dict[DraftKey, Draft] = {}  # oldest first; each at most once for a (prompt, sample)

    def put(self, key: DraftKey, token_ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        if (old := self._drafts.pop(key, None)) is not None:
            self.num_tokens -= len(old.token_ids)
        if self.lenience is not None and logprobs is None:
            return  # a lenient draft needs them
        stored = None if self.lenience is None or logprobs is None else array("f", logprobs)
        self._drafts[key] = Draft(array("i", token_ids), stored)
        self.num_tokens += len(token_ids)
        while self.num_tokens > self.max_tokens:
            oldest = self._drafts.pop(next(iter(self._drafts)))
            self.num_tokens -= len(oldest.token_ids)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All drafts, oldest first: `keys` [E, 3], `lengths` [E], `token_ids` and `logprobs` [N] or [0]."""
        drafts = self._drafts.values()
        return {
            "keys": torch.tensor(list(self._drafts), dtype=torch.int64).view(-1, 3),
            "lengths": torch.tensor([len(draft.token_ids) for draft in drafts], dtype=torch.int64),
            "token_ids": _joined([draft.token_ids for draft in drafts], torch.int32),
            "logprobs": _joined([draft.logprobs for draft in drafts if draft.logprobs is not None], torch.float32),
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._drafts.clear()
        self.num_tokens = 0
        lengths = state["lengths"].tolist()
        tokens = state["token_ids"].split(lengths)
        known = len(state["logprobs"]) == len(state["token_ids"])
        logprobs = state["logprobs"].split(lengths) if known else [None] * len(lengths)
        for key, ids, values in zip(state["keys"].tolist(), tokens, logprobs, strict=True):
            self.put(tuple(key), ids.tolist(), None if values is None else values.tolist())

    def seed_key(self, key: tuple[int | str, ...], prompt_ids: Sequence[int]) -> tuple[int | str, ...]:
        """Key for the seeds of a prompt's samples: `key` (of the batch), or in exact mode the prompt itself."""
        return ("reuse", fingerprint(prompt_ids)) if self.lenience is None else key

    def with_drafts(self, request: SampleRequest, prompt: int, samples: Sequence[int]) -> SampleRequest:
        """The request for prompt number `prompt`, with stored drafts for its completions `samples`."""
        mark = fingerprint(request.prompt_ids)
        drafts = [self._drafts.get((prompt, mark, sample)) for sample in samples]
        if not any(drafts):
            return request
        logprobs = [draft.logprobs.tolist() if draft and draft.logprobs else None for draft in drafts]
        return replace(
            request,
            drafts=[draft.token_ids.tolist() if draft else None for draft in drafts],
            draft_logprobs=None if self.lenience is None else logprobs,
            draft_lenience=self.lenience,
        )

    def remember(self, prompts: Sequence[int], samples: Sequence[int], rollouts: Sequence[Rollout]) -> None:
        for prompt, sample, rollout in zip(prompts, samples, rollouts, strict=True):
            key = prompt, fingerprint(rollout.prompt_ids), sample
            self.put(key, rollout.completion_ids, rollout.logprobs)


def reuse_stats(rollouts: Sequence[Rollout]) -> dict[str, Stat]:
    reused = sum(rollout.reused for rollout in rollouts)
    return {"sampling/reused_token_fraction": Mean(float(reused), float(sum(r.num_sampled for r in rollouts)))}


def _joined(parts: Sequence[array], dtype: torch.dtype) -> torch.Tensor:
    """Concatenation of arrays, as a tensor with memory of its own."""
    whole = b"".join(part.tobytes() for part in parts)
    return torch.frombuffer(bytearray(whole), dtype=dtype) if whole else torch.empty(0, dtype=dtype)
