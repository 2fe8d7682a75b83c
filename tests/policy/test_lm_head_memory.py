"""No tensor of tokens by vocabulary ever lives, forward or backward, and nothing grows with their product."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from covey.policy.lm_head.linear import TILE_BYTES
from covey.policy.lm_head.scores import Head, score_hidden

HIDDEN = 8


class LargestTensor(TorchDispatchMode):
    """Notes the bytes of the largest storage that any operation returns."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("tokens", "words"), [(300, 4000), (3000, 400), (1200, 1000)])
def test_the_largest_tensor_is_a_tile(tokens, words, entropy, frozen, monkeypatch):
    tile = 64 * 1024
    monkeypatch.setitem(TILE_BYTES, "cpu", tile)
    module = torch.nn.Linear(HIDDEN, words).requires_grad_(not frozen)
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    targets = torch.randint(words, (tokens,))
    saved = []
    with (
        LargestTensor() as largest,
        torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x),
    ):
        scores = score_hidden(hidden, targets, Head(module), temperature=0.9, entropy=entropy, chunk_size=128)
        (scores.logprobs.sum() + (scores.entropies.sum() if entropy else 0)).backward()
    inputs = 4 * HIDDEN * max(tokens, words)  # the gradients of hidden states and weight are as large as these
    assert largest.bytes <= max(tile, inputs) < 4 * tokens * words / 8
    assert max(x.numel() for x in saved) <= HIDDEN * max(tokens, words)


def test_called_head_runs_in_chunks_and_again_in_backward():
    shapes = []

    class Noted(torch.nn.Linear):
        def forward(self, x):
            shapes.append(len(x))
            return super().forward(x)

    hidden = torch.randn(10, HIDDEN, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        scores = score_hidden(
            hidden, torch.arange(10), Head(Noted(HIDDEN, 50)), temperature=1.0, entropy=False, chunk_size=4
        )
    assert not any(x.shape[-1:] == (50,) and x.dim() == 2 for x in saved)
    scores.logprobs.sum().backward()
    assert sorted(shapes) == [2, 2, 4, 4, 4, 4]
