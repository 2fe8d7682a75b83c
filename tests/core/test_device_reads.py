"""The loss and its metrics do not wait for the device: they are computed from tensors that cannot be read."""

from dataclasses import replace

import pytest
import torch

from covey.core.objective import policy_loss
from covey.core.stats import Max, Mean, Min, Sum, on_device, read
from covey.observability.metrics import MetricLog
from tests.core.test_objective_invariance import LOSSES, RICH
from tests.support.objective_cases import bare_batch, corrected_objective

MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def unreadable(skipped):
    """A batch of two rollouts on the device "meta", whose tensors have shapes and no numbers."""
    with torch.device("meta"):
        numbers = torch.zeros(5)
        batch = bare_batch(
            sampled=torch.ones(5, dtype=torch.bool),
            lengths=torch.ones(2, dtype=torch.long),
            **dict.fromkeys(("advantages", "weights", "entropy_weights", "old_logprobs", "ref_logprobs"), numbers),
            engine_logprobs=numbers,
            entropy_threshold=0.5,
        )
        batch.skipped_rows, batch.skipped_tokens = skipped, 3 * skipped
        return batch, torch.zeros(5, requires_grad=True), torch.zeros(5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("skipped", [0, 2])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_loss_reads_no_number_of_the_device(loss_type, skipped, mode):
    batch, logprobs, entropies = unreadable(skipped)
    o = corrected_objective(replace(RICH, loss_type=loss_type, mismatch_mode=mode))
    result = policy_loss(batch, logprobs, entropies, o, 0.2)
    result.loss.backward()
    assert on_device(result.stats) and {one.reduction for one in result.stats.values()} <= {"mean", "min", "max"}


def test_statistics_are_read_with_the_numbers_that_they_had():
    """0.1f + 0.2f is another number than 0.1 + 0.2: what is read equals `item()`, of each dtype."""
    given = [
        {"a": Mean(torch.tensor(0.1), torch.tensor(3)), "b": Min(torch.tensor(0.7)), "c": Sum(2.0)},
        {"a": Mean(torch.tensor(0.2), 1), "d": Max(torch.tensor(0.3, dtype=torch.float64))},
    ]
    first, second = read(given)
    assert first == {"a": Mean(torch.tensor(0.1).item(), 3), "b": Min(torch.tensor(0.7).item()), "c": Sum(2.0)}
    assert second == {"a": Mean(torch.tensor(0.2).item(), 1), "d": Max(0.3)}
    assert not any(map(on_device, (first, second)))
    assert given[0]["a"].merge(given[1]["a"]) == first["a"].merge(second["a"])
    assert all(type(one.value()) is float for stats in given for one in stats.values())


def test_metrics_are_read_when_they_are_logged():
    """In the order in which they came, also those that were plain numbers; `so_far` and checkpoints see them too."""
    log, kept = MetricLog(), torch.tensor(1.0)
    log.add({"x": Mean(kept, torch.tensor(2))})
    log.add({"x": Mean(1.0, 1.0), "y": Sum(3.0)})
    kept += 4.0  # it was not read yet
    assert log.so_far("train") == {"x": 2.0, "y": 3.0}
    kept += 100.0
    assert log.state_dict()["windows"]["train"]["x"] == ["mean", 6.0, 3.0]
    assert log.drain("train") == {"x": 2.0, "y": 3.0} and log.drain("train") == {}


def test_many_metrics_do_not_pile_up_on_the_device(monkeypatch):
    monkeypatch.setattr("covey.observability.metrics.MOST_UNREAD", 3)
    log, numbers = MetricLog(), [torch.tensor(float(i)) for i in range(4)]
    for number in numbers:
        log.add({"x": Sum(number)})
        number += 10.0
    assert log.so_far("train") == {"x": 10.0 + 11.0 + 2.0 + 13.0}  # the third is read as it comes
