"""Attention of a token tree on CUDA: FlexAttention, compiled once for all shapes.

The block mask is cached in the tree, so it is built once per forward pass. Without compilation the code runs on any
device.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex_attention_module
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from covey.policy.attention.tree import TokenTree

BLOCK = 128  # side, in tokens, of the blocks that are computed or skipped whole


@cache
def compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


def flex_tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: TokenTree,
    *,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    attend: Callable[..., Any] | None = None,
) -> Tensor:
    """Attention as in `merged_attention`, without dropout, by `attend` (None: the compiled `flex_attention`)."""
    attend = attend or compiled_flex()
    mask = block_mask_of(tree, window, query.device)
    settings = {"score_mod": _capped(cap, query.device), "block_mask": mask, "scale": scale, "enable_gqa": True}
    # Padded to whole blocks, at least two: a size of 1 or one that blocks do not divide would be compiled separately.
    padding = (0, 0, 0, _blocks(tree) * BLOCK - tree.size)
    query, key, value = (nn.functional.pad(x, padding).contiguous() for x in (query, key, value))
    for x in (query, key, value):  # else torch compiles a length that equals the number of heads as the same symbol
        torch._dynamo.mark_static(x, [0, 1, 3])
    if sinks is None:
        out = attend(query, key, value, **settings)
    else:
        # The sink takes exp(sink) of a normaliser exp(lse) + exp(sink), and its value is zero.
        out, lse = _with_lse(attend, query, key, value, settings)
        share = torch.sigmoid(lse - sinks.to(lse.dtype)[None, :, None])
        out = (out * share[..., None]).to(out.dtype)
    return out[:, :, : tree.size].transpose(1, 2).contiguous()


def block_mask_of(tree: TokenTree, window: int | None, device: torch.device) -> BlockMask:
    name = ("block mask", window, device)
    if name not in tree.cache:
        partial, full = blocks_of(tree, window)
        tokens = len(partial) * BLOCK
        tree.cache[name] = BlockMask.from_kv_blocks(
            *_listed(partial, device),
            *_listed(full, device),
            BLOCK_SIZE=BLOCK,
            mask_mod=_mask_of(tree, window, device),
            seq_lengths=(tokens, tokens),
        )
    return tree.cache[name]


def blocks_of(tree: TokenTree, window: int | None) -> tuple[Tensor, Tensor]:
    """Blocks with some visible pairs, and blocks with only visible pairs: two [blocks, blocks] bool, on the CPU.

    No block is in both. They are built from segments, so the cost grows with the number of blocks, not of tokens.
    """
    count = _blocks(tree)
    touched = torch.zeros(count, count, dtype=torch.bool)
    full = torch.zeros(count, count, dtype=torch.bool)
    back = window or tree.size
    for segment, (start, stop) in enumerate(zip(tree.starts, tree.stops, strict=True)):
        for row in range(start // BLOCK, -(-stop // BLOCK)):
            first, last = max(start, row * BLOCK), min(stop, (row + 1) * BLOCK) - 1
            whole = last - first == BLOCK - 1
            ancestor = segment
            while ancestor >= 0:
                # Index of the key at the query's own position, if the ancestor were long enough.
                shift = tree.starts[ancestor] - tree.offsets[ancestor] + tree.offsets[segment] - start
                base, end = tree.starts[ancestor], tree.stops[ancestor]
                low, high = max(base, first + shift - back + 1), min(end, last + shift + 1)
                if low < high:
                    touched[row, low // BLOCK : -(-high // BLOCK)] = True
                low, high = max(base, last + shift - back + 1), min(end, first + shift + 1)
                if whole and low < high:
                    full[row, -(-low // BLOCK) : high // BLOCK] = True
                ancestor = tree.parents[ancestor]
    return touched & ~full, full


def _with_lse(
    attend: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, settings: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; torch 2.9 renamed the argument for the latter."""
    if not hasattr(flex_attention_module, "AuxRequest"):
        return attend(query, key, value, **settings, return_lse=True)
    request = flex_attention_module.AuxRequest(lse=True)
    out, aux = attend(query, key, value, **settings, return_aux=request)
    return out, aux.lse


def _listed(blocks: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """[rows, columns] bool -> number of True columns per row [1, 1, rows], and all column indexes, True ones first."""
    counts = blocks.sum(-1, dtype=torch.int32)
    order = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts[None, None].to(device), order[None, None].to(device)


def _blocks(tree: TokenTree) -> int:
    return max(2, -(-tree.size // BLOCK))


def _mask_of(tree: TokenTree, window: int | None, device: torch.device) -> Callable[..., Tensor]:
    padding = (0, _blocks(tree) * BLOCK - tree.size)  # a reach of 0 is seen by no query
    reach, position = (nn.functional.pad(x, padding).to(device) for x in (tree.reach(), tree.positions()))

    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < reach[k])

    if window is None:
        return visible

    def visible_in_window(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < reach[k]) & (position[q] - position[k] < window)

    return visible_in_window


def _capped(cap: float | None, device: torch.device) -> Callable[..., Tensor] | None:
    if cap is None:
        return None
    bound = torch.tensor(cap, device=device)  # compiled for dynamic shapes, a number would be a symbol that fails
    return lambda score, batch, head, q, k: bound * torch.tanh(score / bound)
