"""Parallel forward passes before decoding: prompts, tokens that continue computed prompts, and the masks of both.

Rows of a forward pass are padded to one length, but each row attends in its own shape (`attention_alone`), because
attention kernels divide queries and keys depending on their number. So neither padding nor other rows change a row's
bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from covey.core.model import cache_argument, compute_dtype, decoder_of
from covey.engines.native.invariance import aligned
from covey.engines.native.sampling import (
    SampledTokens,
    SequenceState,
    concatenate,
    sample_tokens,
    score_tokens,
    uniforms,
)

ALONE_ATTENTION = "covey_alone"  # attention implementation for prompts and for tokens that continue them
MOST_LOGITS = 1 << 24  # most logits that exist at once
STORED_TOKENS = 1 << 14  # most prompt tokens in a `PrefixStore`

KeysAndValues = list[tuple[Tensor, Tensor]]  # keys and values of each layer


def keys_and_values(prefilled: Cache) -> KeysAndValues:
    """Per layer, `[prompts, kv_heads, width, head_dim]` each."""
    layers: list[Any] = list(prefilled.layers)
    return list(map(attrgetter("keys", "values"), layers))


def additive_masks(
    token_positions: Tensor, exists: Tensor, query_positions: Tensor, config: Any, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """Causal masks, within the sliding window in layers that have one, of tokens stored in any order.

    Args:
        token_positions: position of each stored token, [S, width].
        exists: [S, width] bool, False where nothing is stored.
        query_positions: positions of the queries, [S] or [S, T].
        config: of the model, which has the sliding window and the types of layers.
        dtype: of the masks.

    Returns:
        [S, 1, T, width], 0 where visible and the dtype's minimum elsewhere; for models that mix layer types, a
        dictionary of masks by layer type.
    """
    if query_positions.dim() == 1:
        query_positions = query_positions[:, None]
    distance = query_positions[:, :, None] - token_positions[:, None]
    causal = (distance >= 0) & exists[:, None]
    window = getattr(config, "sliding_window", None)
    layer_types = set(getattr(config, "layer_types", None) or [])
    sliding = causal & (distance < window) if window else causal
    if len(layer_types) > 1:
        return {kind: _additive(sliding if kind == "sliding_attention" else causal, dtype) for kind in layer_types}
    uses_window = "sliding_attention" in layer_types if layer_types else window is not None
    return _additive(sliding if uses_window else causal, dtype)


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


@dataclass(frozen=True)
class Rows:
    """For each row of a padded forward pass, the tokens of its computed prompt and the tokens to compute."""

    before: Sequence[int]
    new: Sequence[int]
    softcap: bool  # False: soft-capping is ignored, as by transformers' SDPA


def attention_alone(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    rows: Rows | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of each row in its own shape, with the signature of transformers' attention functions.

    Queries [B, heads, T, D]; keys and values of the padded prompts followed by the T tokens. Without `rows` it is plain
    SDPA.
    """
    if rows is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    width = key.shape[2] - query.shape[2]  # of the prompts
    out = query.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[3])

    def own(x: Tensor, dim: int, row: int) -> Tensor:
        before, new = (x[row : row + 1].narrow(dim, *span) for span in ((0, rows.before[row]), (width, rows.new[row])))
        return aligned(torch.cat([before, new], dim) if before.shape[dim] else new)

    for row, count in enumerate(rows.new):
        if not count:
            continue
        of_row = aligned(query[row : row + 1, :, :count]), own(key, 2, row), own(value, 2, row)
        mask = own(attention_mask[..., :count, :], 3, row)
        if (softcap and rows.softcap) or s_aux is not None:
            attended = _attend(*of_row, mask, scaling, softcap if rows.softcap else None, s_aux)
        else:
            attended = sdpa_attention_forward(module, *of_row, mask, scaling=scaling)[0]
        out[row, :count] = attended[0]
    return out, None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention of one row with soft-capping or sinks, with explicit scores: [1, heads, T, D] -> [1, T, heads, D]."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return (weights[..., : key.shape[2]] @ value).transpose(1, 2)


AttentionInterface.register(ALONE_ATTENTION, attention_alone)
AttentionMaskInterface.register(ALONE_ATTENTION, sdpa_mask)


class ContinuationCache(Cache):
    """Keys and values of tokens that continue computed prompts, and attend to their prompt and to each other.

    `owners` [S] are the indices of the prompts that the sequences continue.
    """

    def __init__(self, prefilled: Cache | None, owners: Tensor):
        super().__init__(layers=[])
        self._prompts = [] if prefilled is None else keys_and_values(prefilled)
        self._owners = owners
        self.own: KeysAndValues = []  # per layer, `[S, kv_heads, T, head_dim]` keys and values of the continuations

    @property
    def prompt_width(self) -> int:
        return self._prompts[0][0].shape[2] if self._prompts else 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values; returns those of the prompts, followed by the new ones."""
        self.own.append((key_states, value_states))
        if not self._prompts:
            return key_states, value_states
        keys, values = (x[self._owners].to(key_states.dtype) for x in self._prompts[layer_idx])
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.prompt_width


def continue_prompts(
    model: Any,
    prefilled: Cache | None,
    prompts: list[list[int]],
    owners: list[int],
    tokens: list[list[int]],
    softcap: bool | None = None,
) -> tuple[Tensor, ContinuationCache]:
    """Compute, in one forward pass, all positions that predict `tokens`, which follow computed prompts.

    `prefilled` holds the prompts without their last tokens, right-padded; sequence i continues the prompt `owners[i]`
    with at least one token. `softcap` as in `Rows`; None: the model uses its own attention.

    Returns:
        Hidden states [sum of lengths, H] in the order of the sequences, where state i of a sequence predicts its token
        i; and a cache with the last prompt token and all tokens but the last of each sequence.
    """
    device = next(model.parameters()).device
    inputs = [[prompts[owner][-1], *continuation[:-1]] for owner, continuation in zip(owners, tokens, strict=True)]
    width = max(map(len, inputs))
    ids = torch.tensor([input_ids + input_ids[-1:] * (width - len(input_ids)) for input_ids in inputs], device=device)
    owner = torch.tensor(owners, device=device)
    cache = ContinuationCache(prefilled, owner)
    before = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)[owner][:, None]
    positions = before + torch.arange(width, device=device)
    of_prompt = torch.arange(cache.prompt_width, device=device).expand(len(inputs), -1)
    exists = torch.cat([of_prompt < before, torch.ones_like(positions, dtype=torch.bool)], dim=1)
    config = model.config.get_text_config()
    masks = additive_masks(torch.cat([of_prompt, positions], dim=1), exists, positions, config, compute_dtype(model))
    decoder = decoder_of(model)
    given = {cache_argument(decoder): cache, "use_cache": True}
    if softcap is not None:
        given["rows"] = Rows([len(prompts[i]) - 1 for i in owners], [*map(len, inputs)], softcap)
    hidden = decoder(input_ids=ids, position_ids=positions, attention_mask=masks, **given).last_hidden_state
    lengths = torch.tensor([*map(len, inputs)], device=device)
    return hidden[torch.arange(width, device=device) < lengths[:, None]], cache


def logit_tiles(model: Any, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Logits of hidden states [N, H], with the model's scale and soft-capping, in parts: pairs (slice, [n, V])."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    size = max(1, MOST_LOGITS // config.vocab_size)
    for start in range(0, len(hidden), size):
        tile = slice(start, start + size)
        logits = head(hidden[tile]) * scale if scale != 1.0 else head(hidden[tile])
        yield tile, torch.tanh(logits / cap) * cap if cap else logits


def verify_drafts(
    model: Any,
    prefilled: Any,
    prompts: list[list[int]],
    owners: list[int],
    sequences: list[SequenceState],
    softcap: bool | None = None,
) -> tuple[ContinuationCache, list[int]]:
    """Append to each sequence the tokens of its draft that the policy would have sampled, and the token after them.

    Exact acceptance samples at every position of a draft with the random numbers that sampling would use there
    (`uniforms`, see `sample_tokens`). As long as the sampled token is the draft's, it is accepted; the first other one
    is the token that sampling would have given, and ends the draft. The completion is therefore the one that its seed
    gives without a draft: drafter-invariant speculative decoding (Daliri, Musco and Suresh, arXiv 2408.07978). Similar
    policies mostly sample the same token from the same random numbers, so most of an earlier policy's completion is
    accepted. Lenient acceptance accepts token i with probability min(1, l p_now / p_then) (SPEC-RL, arXiv 2509.23232).

    All sequences must have a draft, no sampled tokens and equal settings; other arguments as in `continue_prompts`.
    Returns the cache of the forward pass, and how many of its tokens belong to each sequence: one per appended token.
    """
    drafts = [sequence.draft for sequence in sequences]
    hidden, computed = continue_prompts(model, prefilled, prompts, owners, drafts, softcap)
    lengths = [len(draft) for draft in drafts]
    device, counts = hidden.device, torch.tensor(lengths, device=hidden.device)
    seeds = torch.tensor([sequence.seed for sequence in sequences], device=device).repeat_interleave(counts)
    steps = torch.cat([torch.arange(length, device=device) for length in lengths])
    tokens = torch.tensor([token for draft in drafts for token in draft], device=device)
    params = sequences[0].request.params
    lenient = sequences[0].request.draft_lenience is not None and params.temperature > 0
    sampled_tiles, draft_tiles = [], []
    masks: list[list[int]] = []
    for tile, logits in logit_tiles(model, hidden):
        sampled_tiles.append(sample_tokens(logits, seeds[tile], steps[tile], params, None, masks))
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
        own, masks = masks[: len(mask)], masks[len(mask) :]
        sequence.append(*(result[: sequence.reused + 1].tolist() for result in results), own)
    return computed, [len(sequence.token_ids) for sequence in sequences]


def _accept_leniently(
    logprobs: Tensor, seeds: Tensor, steps: Tensor, sequences: list[SequenceState], lengths: list[int]
) -> Tensor:
    then, lenience = [], []
    for sequence, length in zip(sequences, lengths, strict=True):
        request = sequence.request
        then += ((request.draft_logprobs or [])[sequence.index] or [])[:length]
        lenience += [request.draft_lenience or 0.0] * length
    ratio = (logprobs.double() - torch.tensor(then, dtype=torch.float64, device=logprobs.device)).exp()
    coin = uniforms(seeds, -1 - steps, 1)[:, 0]  # negative steps: random numbers that no race uses
    return coin < torch.tensor(lenience, dtype=torch.float64, device=logprobs.device) * ratio


class PrefixStore:
    """Store of computed prompts that later turns begin with; the least recently used are removed first."""

    def __init__(self, most_tokens: int = STORED_TOKENS):
        self.most_tokens = most_tokens
        self.layers: dict[tuple[int, ...], KeysAndValues] = {}  # least recently used first
        self.routes: dict[tuple[int, ...], Tensor] = {}  # [t, L, k] experts of their tokens, where they were read

    def has(self, prompt: tuple[int, ...], with_routes: bool) -> bool:
        return prompt in self.layers and (prompt in self.routes or not with_routes)

    def add(self, prompt: tuple[int, ...], prefilled: Cache | None, index: int, routes: Tensor | None = None) -> None:
        """Copy keys and values of `prompt`, row `index` of a computed batch, without its last token."""
        if prefilled is None or len(prompt) < 2:
            return
        if routes is not None:
            self.routes[prompt] = routes.clone()
        if prompt in self.layers:
            return
        computed = slice(0, len(prompt) - 1)
        self.layers[prompt] = [
            (k[index, :, computed].clone(), v[index, :, computed].clone()) for k, v in keys_and_values(prefilled)
        ]

    def trim(self) -> None:
        """Keep the most recently used prompts, up to `most_tokens` tokens together."""
        left = self.most_tokens
        for prompt in reversed(list(self.layers)):
            if len(prompt) <= left:
                left -= len(prompt)
            else:
                del self.layers[prompt]
                self.routes.pop(prompt, None)

    def clear(self) -> None:
        self.layers.clear()
        self.routes.clear()

    def prefilled(self, prompts: list[tuple[int, ...]]) -> Cache:
        """Stored prompts without their last tokens, right-padded, as one cache."""
        cache = DynamicCache()
        width = max(map(len, prompts)) - 1
        stored = [self.layers.pop(prompt) for prompt in prompts]
        self.layers.update(zip(prompts, stored, strict=True))
        for number, layer in enumerate(zip(*stored, strict=True)):
            keys, values = (
                torch.stack([nn.functional.pad(x, (0, 0, 0, width - x.shape[1])) for x in tensors])
                for tensors in zip(*layer, strict=True)  # [kv_heads, tokens, D] of each prompt
            )
            cache.update(keys, values, number)
        return cache
