"""The choice of a layout: what is learned from trying one, and what is not."""

import pytest
import torch

from covey.core.batch import collate
from covey.core.records import FinishReason, Rollout
from covey.policy.layouts import choose_layout, slowest
from covey.policy.scoring import TokenScorer
from tests.support import tiny

CPU = torch.device("cpu")


def failing_unless_padded(error):
    def score(layout, batch):
        if layout != "padded":
            raise error
        return torch.zeros(batch.num_tokens)

    return score


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("injected"), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), MemoryError()]
)
@pytest.mark.parametrize("wanted", ["auto", "packed"])
def test_out_of_memory_does_not_exclude_a_layout(wanted, error):
    with pytest.raises(type(error)) as raised:
        choose_layout(wanted, tiny.model(), failing_unless_padded(error), CPU)
    assert raised.value is error


def test_other_failures_exclude_a_layout():
    broken = failing_unless_padded(RuntimeError("no such kernel"))
    with pytest.warns(UserWarning, match="RuntimeError: no such kernel"):
        assert choose_layout("auto", tiny.model(), broken, CPU) == "padded"


def test_common_layout_is_the_slowest_of_all_processes():
    assert slowest(["shared_prefix", "shared_prefix"]) == "shared_prefix"
    assert slowest(["shared_prefix", "packed"]) == "packed"
    assert slowest(["padded", "shared_prefix", "packed"]) == "padded"


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_slower_layout_can_be_adopted(layout):
    model, scorer = tiny.model(), TokenScorer(lambda m: m, temperature=1.0)
    rollouts = [Rollout([5, 6], ids, [True] * len(ids), None, "", FinishReason.STOP) for ids in ([7, 8], [9])]
    batch = collate(rollouts)
    expected = scorer(model, batch).logprobs
    assert scorer.layout == "shared_prefix"
    scorer.adopt(model, layout)
    assert scorer.layout == scorer.layout_of(model, batch) == layout
    torch.testing.assert_close(scorer(model, batch).logprobs, expected, rtol=0, atol=1e-5)
