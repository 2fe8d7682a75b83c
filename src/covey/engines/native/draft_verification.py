"""Verification of drafts: how much of a text that is already there the policy would have written.

Exact acceptance runs, at every position of a draft, the very race that sampling would have run there: its noise is a
function of seed and step (see `covey.engines.native.counter_rng`). While the winner is the draft's token the draft is
right; the first other winner is what sampling would have drawn in its stead. The completion is therefore the one its
seed would have given without a draft, whatever wrote the draft: drafter-invariant speculative decoding (Daliri, Musco
and Suresh, arXiv 2408.07978). Exponential races make it useful as well: two policies that are close crown the same
winner mostly.

Lenient acceptance keeps token i with probability min(1, l p_now / p_then) (SPEC-RL, arXiv 2509.23232).
"""

from typing import Any

import torch
from torch import Tensor

from covey.engines.native.chunked_prefill import Extension, extend, logit_tiles
from covey.engines.native.counter_rng import uniforms
from covey.engines.native.sampling import SampledTokens, describe, draw
from covey.engines.native.sequences import SequenceState


def verify(
    model: Any, prefilled: Any, prompts: list[list[int]], owners: list[int], rows: list[SequenceState]
) -> tuple[Extension, list[int]]:
    """Let rows take from their drafts what they can, and the token after it.

    Args:
        model: a transformers causal language model in inference mode.
        prefilled: the prompts without their last tokens, right-padded, computed.
        prompts: the prompts in full.
        owners: which prompt each row continues.
        rows: rows with a draft and nothing sampled yet, all with the same sampling settings.

    Returns:
        What the pass computed, and how many of its tokens each row holds now: one per token the row has taken.
    """
    drafts = [row.draft for row in rows]
    hidden, computed = extend(model, prefilled, prompts, owners, drafts)
    lengths = [len(draft) for draft in drafts]
    device = hidden.device
    seeds = torch.tensor([row.seed for row in rows], device=device).repeat_interleave(
        torch.tensor(lengths, device=device)
    )
    steps = torch.cat([torch.arange(length, device=device) for length in lengths])
    tokens = torch.tensor([token for draft in drafts for token in draft], device=device)
    params = rows[0].request.params
    lenient = rows[0].request.draft_lenience is not None and params.temperature > 0
    drawn, given = [], []
    for part, logits in logit_tiles(model, hidden):
        drawn.append(draw(logits, seeds[part], steps[part], params))
        if lenient:
            given.append(describe(logits, tokens[part], params.temperature))
    chosen = _join(drawn)
    kept = chosen.tokens == tokens
    if lenient:
        described = _join(given)
        kept = _lenient(described.logprobs, _then(rows, lengths, device), seeds, steps, rows)
        chosen = SampledTokens(*(torch.where(kept, a, b) for a, b in zip(described, chosen, strict=True)))
    for row, keeps, *columns in zip(rows, kept.split(lengths), *(x.split(lengths) for x in chosen), strict=True):
        row.reused = int(keeps.long().cumprod(0).sum())
        row.take(*(column[: row.reused + 1].tolist() for column in columns))
    return computed, [len(row.token_ids) for row in rows]


def _lenient(now: Tensor, then: Tensor, seeds: Tensor, steps: Tensor, rows: list[SequenceState]) -> Tensor:
    """[N] bool: which draft tokens a coin with P(heads) = min(1, l p_now / p_then) keeps."""
    lenience = torch.cat([then.new_full((len(row.draft),), row.request.draft_lenience or 0.0) for row in rows])
    coin = uniforms(seeds, -1 - steps, 1)[:, 0]  # negative steps: noise that no race uses
    return coin < lenience * (now.double() - then).exp()


def _then(rows: list[SequenceState], lengths: list[int], device: torch.device) -> Tensor:
    """Log-probs of the draft tokens under the policy that wrote them, [N] float64."""
    recorded = [(row.request.draft_logprobs or [])[row.index] or [] for row in rows]
    flat = [logprob for record, length in zip(recorded, lengths, strict=True) for logprob in record[:length]]
    return torch.tensor(flat, dtype=torch.float64, device=device)


def _join(parts: list[SampledTokens]) -> SampledTokens:
    return SampledTokens(*(torch.cat(column) for column in zip(*parts, strict=True)))
