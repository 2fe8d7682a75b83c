"""Verification of drafts: how much of a text that is already there the policy would have written.

Exact acceptance runs, at every position of a draft, the very race that sampling would have run there: its noise is a
function of seed and step (see `covey.rollout.noise`). While the winner is the draft's token the draft is right; the
first other winner is what sampling would have drawn in its stead. The completion is therefore the one its seed would
have given without a draft, whatever wrote the draft: drafter-invariant speculative decoding (Daliri, Musco and Suresh,
arXiv 2408.07978). Exponential races make it useful as well: two policies that are close crown the same winner mostly.

Lenient acceptance keeps token i with probability min(1, l p_now / p_then) (SPEC-RL, arXiv 2509.23232).
"""

from typing import Any

import torch
from torch import Tensor

from covey.rollout.engines.extension import Extension, extend, logit_tiles
from covey.rollout.engines.rows import Row
from covey.rollout.noise import uniforms
from covey.rollout.sampling import Drawn, describe, draw


def verify(
    model: Any, prefilled: Any, prompts: list[list[int]], owners: list[int], rows: list[Row]
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
    winners = _join(drawn)
    if lenient:
        winners = _leniently(winners, _join(given), _then(rows, lengths, device), seeds, steps, rows)
    for row, draft, *columns in zip(rows, drafts, *(column.split(lengths) for column in winners), strict=True):
        chosen, logprobs, entropies = (column.tolist() for column in columns)
        agreed = next((i for i, (a, b) in enumerate(zip(chosen, draft, strict=True)) if a != b), len(draft))
        row.reused = agreed
        row.take(*(column[: agreed + 1] for column in (chosen, logprobs, entropies)))
    return computed, [len(row.token_ids) for row in rows]


def _leniently(winners: Drawn, given: Drawn, then: Tensor, seeds: Tensor, steps: Tensor, rows: list[Row]) -> Drawn:
    """The draft's tokens where they are kept, the race's winners where they are not, [N] each."""
    lenience = torch.cat([then.new_tensor([row.request.draft_lenience]).expand(len(row.draft)) for row in rows])
    coin = uniforms(seeds, -1 - steps, 1)[:, 0]  # negative steps: noise that no race uses
    kept = coin < lenience * (given.logprobs.double() - then).exp()
    return Drawn(*(torch.where(kept, a, b) for a, b in zip(given, winners, strict=True)))


def _then(rows: list[Row], lengths: list[int], device: torch.device) -> Tensor:
    """Log-probs of the draft tokens under the policy that wrote them, [N] float64."""
    recorded = [(row.request.draft_logprobs or [])[row.index] or [] for row in rows]
    flat = [logprob for record, length in zip(recorded, lengths, strict=True) for logprob in record[:length]]
    return torch.tensor(flat, dtype=torch.float64, device=device)


def _join(parts: list[Drawn]) -> Drawn:
    return Drawn(*(torch.cat(column) for column in zip(*parts, strict=True)))
