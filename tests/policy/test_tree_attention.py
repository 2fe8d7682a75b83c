"""Attention of a token tree: rectangles merged by log-sum-exp and FlexAttention against the softmax written out."""

import itertools
import math
import random

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import flex_attention

from covey.policy.attention import TokenTree, flex, packed_attention, tree
from covey.policy.attention.tree import merged_attention

GROUP = TokenTree([3, 2, 4], [-1, 0, 0])
"""A prompt of three tokens with completions of two and of four."""


def sees(row, window=None):
    """[T, T] bool, from each token's list of ancestors."""
    visible = torch.zeros(row.size, row.size, dtype=torch.bool)
    for segment, (start, stop) in enumerate(zip(row.starts, row.stops, strict=True)):
        before, parent = [], row.parents[segment]
        while parent >= 0:
            before = [*range(row.starts[parent], row.stops[parent]), *before]
            parent = row.parents[parent]
        sequence = [*before, *range(start, stop)]
        for query in range(start, stop):
            seen = sequence[: sequence.index(query) + 1]
            visible[query, seen[-window:] if window else seen] = True
    return visible


def written_out(query, key, value, row, *, scale, window=None, cap=None, sinks=None):
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.mT * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~sees(row, window), -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : row.size] @ value).transpose(1, 2)


def random_tree(seed, longest=9):
    chance = random.Random(seed)
    lengths, parents = [], []

    def grow(parent, depth):
        place = len(lengths)
        lengths.append(chance.randint(1, longest))
        parents.append(parent)
        for _ in range(chance.randint(0, 3) if depth < 3 else 0):
            grow(place, depth + 1)

    for _ in range(chance.randint(1, 3)):
        grow(-1, 0)
    return TokenTree(lengths, parents)


def inputs(row, dtype=torch.float64, features=(8, 8), device="cpu"):
    """query with 4 heads, key and value with 2, sinks; all want gradients. Heads lie innermost, as a model has them."""
    chance = torch.Generator().manual_seed(1)

    def values(heads, width):
        made = torch.randn(1, row.size, heads, width, generator=chance, dtype=torch.float64)
        return made.to(device, dtype).transpose(1, 2).requires_grad_()

    sinks = torch.randn(4, generator=chance, dtype=torch.float64).to(device, dtype).requires_grad_()
    return values(4, features[0]), values(2, features[0]), values(2, features[1]), sinks


def assert_same(attend, row, tolerance=1e-12, features=(8, 8), sinks=False, **settings):
    query, key, value, sink = inputs(row, features=features)
    wanted = (query, key, value, sink) if sinks else (query, key, value)
    results = []
    for function in (written_out, attend):
        out = function(query, key, value, row, scale=0.7, sinks=sink if sinks else None, **settings)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        results.append((out, *torch.autograd.grad((out * weights).sum(), wanted)))
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance)


def test_visibility_by_eye():
    # positions: the second completion continues from the prompt's third token, not from the first completion.
    assert GROUP.positions().tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6]
    # reach: the prompt is seen to the end of the row, the first completion to its own end.
    assert GROUP.reach().tolist() == [9, 9, 9, 5, 5, 9, 9, 9, 9]


def test_prompt_is_one_rectangle_for_all_completions():
    own, ancestors = GROUP.parts(None)
    assert [(part.queries, part.causal) for part in own] == [
        (slice(0, 3), True),
        (slice(3, 5), True),
        (slice(5, 9), True),
    ]
    assert [(part.queries, part.keys) for part in ancestors] == [(slice(3, 9), slice(0, 3))]
    assert GROUP.parts(None) is GROUP.parts(None)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("window", [None, 1, 2, 5, 12])
def test_rectangles_cover_what_is_visible_exactly_once(seed, window, monkeypatch):
    monkeypatch.setattr(tree, "BAND_BLOCK", 4)
    monkeypatch.setattr(tree, "CAUSAL_BLOCK", 3)
    row = random_tree(seed)
    count = torch.zeros(row.size, row.size)
    for part in itertools.chain(*row.parts(window)):
        visible = part.visible(torch.device("cpu"))
        count[part.queries, part.keys] += 1 if visible is None else visible
        assert visible is None or visible.any(1).all()
    assert torch.equal(count, sees(row, window).float())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("window", [None, 3, 12])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
def test_merged_rectangles_are_the_softmax_over_all(seed, window, cap, sinks, monkeypatch):
    monkeypatch.setattr(tree, "BAND_BLOCK", 4)
    monkeypatch.setattr(tree, "CAUSAL_BLOCK", 3)
    monkeypatch.setattr(tree, "SCORES_AT_ONCE", 200)
    assert_same(merged_attention, random_tree(seed), window=window, cap=cap, sinks=sinks)


def test_values_may_be_narrower_than_keys():
    assert_same(merged_attention, GROUP, features=(8, 6))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
def test_flex_attention_is_the_softmax_over_all(window, cap, sinks, monkeypatch):
    # Its uncompiled form would differentiate on the CPU, were it not forbidden.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)

    def uncompiled(*args, **settings):
        return flex.flex_tree_attention(*args, attend=flex_attention, **settings)

    assert_same(uncompiled, random_tree(0), window=window, cap=cap, sinks=sinks, tolerance=1e-9)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("window", [None, 3, 40])
def test_skipped_blocks_hide_everything_and_full_ones_nothing(seed, window, monkeypatch):
    monkeypatch.setattr(flex, "BLOCK", 8)
    row = random_tree(seed, longest=30)
    partial, full = flex.blocks_of(row, window)
    visible = sees(row, window)
    assert not (partial & full).any()
    for i in range(len(full)):
        for j in range(len(full)):
            block = visible[i * 8 : i * 8 + 8, j * 8 : j * 8 + 8]
            assert bool(partial[i, j] | full[i, j]) >= bool(block.any())
            assert not full[i, j] or block.all()
            assert not partial[i, j] or block.any(), "a block without work is not computed"


def test_the_block_mask_is_built_once_a_forward():
    row = random_tree(0)
    device = torch.device("cpu")
    assert flex.block_mask_of(row, None, device) is flex.block_mask_of(row, None, device)
    assert flex.block_mask_of(row, None, device) is not flex.block_mask_of(row, 3, device)
    assert flex.compiled_flex() is flex.compiled_flex()


@pytest.mark.slow
def test_one_compilation_serves_all_sizes():
    # As many blocks as key/value heads at first, more later: the two must not be compiled as one number.
    counter = CompileCounter()
    compiled = torch.compile(flex_attention, dynamic=True, backend=counter)
    for row in (TokenTree([8, 7, 7], [-1, 0, 0]), TokenTree([100, *[140] * 7], [-1, *[0] * 7]), random_tree(3)):
        query, key, value = (torch.randn(1, heads, row.size, 16) for heads in (4, 2, 2))
        with torch.no_grad():
            flex.flex_tree_attention(query, key, value, row, scale=0.25, attend=compiled)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_dropout_is_the_same_in_the_backward_pass():
    """With the draws fixed, attention is a smooth function whose gradient can be checked numerically."""
    row = TokenTree([2, 2, 1], [-1, 0, 0])
    query, key, value, _ = inputs(row, features=(4, 4))

    def attend(*tensors):
        torch.manual_seed(5)
        return merged_attention(*tensors, row, scale=0.7, dropout=0.5)

    assert not torch.equal(attend(query, key, value), merged_attention(query, key, value, row, scale=0.7))
    torch.autograd.gradcheck(attend, (query, key, value))


def test_dropout_keeps_the_expected_output():
    row = random_tree(2)
    query, key, value, _ = inputs(row)
    torch.manual_seed(0)
    with torch.no_grad():
        mean = sum(merged_attention(query, key, value, row, scale=0.7, dropout=0.3) for _ in range(400)) / 400
        expected = merged_attention(query, key, value, row, scale=0.7)
    assert (mean - expected).abs().max() < 0.4 and (mean - expected).abs().mean() < 0.05


def test_half_precision_is_as_near_as_it_can_be():
    row = random_tree(1)
    exact = written_out(*inputs(row)[:3], row, scale=0.7)
    for settings in ({}, {"cap": 50.0}):
        half = merged_attention(*inputs(row, torch.bfloat16)[:3], row, scale=0.7, **settings)
        assert half.dtype == torch.bfloat16
        assert (half - exact).abs().mean() < 0.01


def test_autocast_casts_as_for_torchs_attention():
    query, key, value, _ = inputs(GROUP, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = packed_attention(nn.Module(), query, key, value.bfloat16(), None, token_tree=GROUP)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert query.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"position_bias": torch.zeros(1)}, "with position_bias"), ({"is_causal": False}, "does not attend causally")],
)
def test_unsupported_attention_arguments_are_refused(kwargs, message):
    query, key, value, _ = inputs(GROUP)
    with pytest.raises(ValueError, match=message):
        packed_attention(nn.Module(), query, key, value, None, token_tree=GROUP, **kwargs)


def test_tree_that_does_not_reach_the_layers_is_an_error():
    query, key, value, _ = inputs(GROUP)
    with pytest.raises(ValueError, match="attn_layout='padded'"):
        packed_attention(nn.Module(), query, key, value, torch.zeros(1, 1, 1, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
def test_compiled_flex_attention_on_cuda(window, cap, sinks):
    row = TokenTree([200, 150, 3, 90, 60, 70], [-1, 0, 0, -1, 3, 3])
    on_cpu = inputs(row, torch.float32, (64, 64))
    on_cuda = inputs(row, torch.float32, (64, 64), "cuda")
    results = []
    for query, key, value, sink in (on_cpu, on_cuda):
        settings = {"softcap": cap, "s_aux": sink if sinks else None, "sliding_window": window}
        out, _ = packed_attention(nn.Module(), query, key, value, None, token_tree=row, **settings)
        results.append((out, *torch.autograd.grad(out.square().sum(), (query, key, value))))
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_flex_attention_is_compiled_once_for_all_shapes():
    counters = torch._dynamo.utils.counters
    counters.clear()
    torch._dynamo.reset()
    flex.compiled_flex.cache_clear()
    for seed in range(6):
        row = random_tree(seed, longest=200)
        query, key, value, _ = inputs(row, torch.bfloat16, (64, 64), "cuda")
        packed_attention(nn.Module(), query, key, value, None, token_tree=row)[0].sum().backward()
    # One graph, or two where the first, smallest shape was specialised.
    assert counters["stats"]["unique_graphs"] <= 2
