"""The weight of the entropy bonus follows the entropy within its bounds."""

import pytest

from covey import GRPOConfig
from covey.trainer.loss_terms import EntropyController


@pytest.mark.parametrize(
    ("entropies", "weights"),
    [
        ([1.0, 1.0, 1.0], [0.2, 0.1, 0.1]),  # above the target it falls by 0.1 a step, to its smallest
        ([0.1, 0.1, 0.1], [0.4, 0.5, 0.5]),  # at or below it, it rises to its largest
    ],
)
def test_the_weight_moves_within_its_bounds(entropies, weights, tmp_path):
    bounds = {"entropy_coef_min": 0.1, "entropy_coef_max": 0.5, "entropy_coef_delta": 0.1, "entropy_target": 0.5}
    args = GRPOConfig(output_dir=str(tmp_path), use_adaptive_entropy=True, entropy_coef=0.3, **bounds)
    controller, seen = EntropyController(args), []
    for entropy in entropies:
        controller.observe(entropy)
        seen.append(controller.coef)
    assert seen == pytest.approx(weights)
