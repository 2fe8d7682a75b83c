"""Draft verification: accept the first tokens of a draft that the policy would have sampled.

Exact acceptance runs, at every position of a draft, the race that sampling would have run there: its random numbers
are a function of seed and step (`covey.engines.native.sampling.uniforms`). While the winner is the draft's token the
draft is accepted; the first other winner is the token that sampling would have given. The completion is therefore the
one its seed gives without a draft, whatever the draft's origin: drafter-invariant speculative decoding (Daliri, Musco
and Suresh, arXiv 2408.07978). Exponential races of two similar policies mostly have the same winner, so most of an
earlier policy's completion is accepted.

Lenient acceptance accepts token i with probability min(1, l p_now / p_then) (SPEC-RL, arXiv 2509.23232).
"""

from typing import Any

import torch
from torch import Tensor

from covey.engines.native.prefill import ContinuationCache, continue_prompts, logit_tiles
from covey.engines.native.sampling import SampledTokens, concatenate, sample_tokens, score_tokens, uniforms
from covey.engines.native.sequences import SequenceState


def verify_drafts(
    model: Any, prefilled: Any, prompts: list[list[int]], owners: list[int], sequences: list[SequenceState]
) -> tuple[ContinuationCache, list[int]]:
    """Append to each sequence the accepted tokens of its draft, and the token after them.

    Args:
        model: a transformers causal language model in inference mode.
        prefilled: the prompts without their last tokens, right-padded, computed.
        prompts: the whole prompts.
        owners: per sequence the index of its prompt.
        sequences: with a draft and nothing sampled yet, all with the same sampling settings.

    Returns:
        The cache of the forward pass, and how many of its tokens belong to each sequence: one per appended token.
    """
    drafts = [sequence.draft for sequence in sequences]
    hidden, computed = continue_prompts(model, prefilled, prompts, owners, drafts)
    lengths = [len(draft) for draft in drafts]
    device = hidden.device
    seeds = torch.tensor([sequence.seed for sequence in sequences], device=device).repeat_interleave(
        torch.tensor(lengths, device=device)
    )
    steps = torch.cat([torch.arange(length, device=device) for length in lengths])
    tokens = torch.tensor([token for draft in drafts for token in draft], device=device)
    params = sequences[0].request.params
    lenient = sequences[0].request.draft_lenience is not None and params.temperature > 0
    sampled_tiles, draft_tiles = [], []
    for tile, logits in logit_tiles(model, hidden):
        sampled_tiles.append(sample_tokens(logits, seeds[tile], steps[tile], params))
        if lenient:
            draft_tiles.append(score_tokens(logits, tokens[tile], params.temperature))
    chosen = concatenate(sampled_tiles)
    accepted = chosen.tokens == tokens
    if lenient:
        scored = concatenate(draft_tiles)
        accepted = _accept_leniently(scored.logprobs, seeds, steps, sequences, lengths)
        chosen = SampledTokens(*(torch.where(accepted, a, b) for a, b in zip(scored, chosen, strict=True)))
    columns = [column.split(lengths) for column in chosen]
    for sequence, mask, *results in zip(sequences, accepted.split(lengths), *columns, strict=True):
        sequence.reused = int(mask.long().cumprod(0).sum())
        sequence.append(*(result[: sequence.reused + 1].tolist() for result in results))
    return computed, [len(sequence.token_ids) for sequence in sequences]


def _accept_leniently(
    logprobs: Tensor, seeds: Tensor, steps: Tensor, sequences: list[SequenceState], lengths: list[int]
) -> Tensor:
    """[N] bool: True with probability min(1, l p_now / p_then) for each draft token."""
    then, lenience = [], []
    for sequence, length in zip(sequences, lengths, strict=True):
        request = sequence.request
        then += ((request.draft_logprobs or [])[sequence.index] or [])[:length]
        lenience += [request.draft_lenience or 0.0] * length
    ratio = (logprobs.double() - torch.tensor(then, dtype=torch.float64, device=logprobs.device)).exp()
    coin = uniforms(seeds, -1 - steps, 1)[:, 0]  # negative steps: random numbers that no race uses
    return coin < torch.tensor(lenience, dtype=torch.float64, device=logprobs.device) * ratio
