"""`policy_loss` against an independent float64 implementation: every loss x ratio level x option, both gradients."""

import math

import pytest
import torch

from tests.support.brute_force import Options, step_loss
from tests.support.objective_cases import assert_same, covey_gradients, random_rows, reference_gradients

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo", "gmpo", "rloo"]
LOSSES += ["dppo_tv", "dppo_kl", "gpg", "dro", "kl_cov", "clip_cov"]
LEVELS = ["token", "sequence", "sequence_token"]
MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

OPTIONS: dict[str, dict] = {
    "plain": {},
    "delta": {"delta": 1.3},
    **{f"beta-{k}": {"beta": 0.3, "kl_estimator": k} for k in ("k1", "k2", "k3")},
    **{f"beta-{k}-corrected": {"beta": 0.3, "kl_estimator": k, "bias_correction": True} for k in ("k1", "k2", "k3")},
    "off-policy-mask": {"off_policy_threshold": 0.05},
    "top-entropy": {"top_entropy_quantile": 0.4},
    "entropy-bonus": {"entropy_coef": 0.2},
    **{f"{mode}-max": {"mismatch_mode": mode, "clip_max": 1.3} for mode in MODES},
    **{f"{mode}-min-max": {"mismatch_mode": mode, "clip_min": 0.7, "clip_max": 1.3} for mode in MODES},
    "everything": {
        "delta": 1.3,
        "beta": 0.3,
        "bias_correction": True,
        "off_policy_threshold": 0.05,
        "top_entropy_quantile": 0.6,
        "entropy_coef": 0.2,
        "mismatch_mode": "token_truncate",
        "clip_min": 0.7,
        "clip_max": 1.3,
    },
}


PRESCRIBED = {"vespo", "gmpo", "rloo", "dppo_tv", "dppo_kl", "gpg", "dro", "kl_cov", "clip_cov"}
"""Losses that prescribe their own ratio: one level is enough."""

COMBINATIONS = [(loss, level) for loss in LOSSES for level in LEVELS if level == "token" or loss not in PRESCRIBED]


def settings(loss_type: str, level: str, name: str) -> Options | None:
    """The named options, or None where they are none of this loss's: vespo is corrected token by token."""
    return None if loss_type == "vespo" and name.startswith("sequence") else Options(loss_type, level, **OPTIONS[name])


FAST = {"plain", "off-policy-mask", "token_mask-max", "sequence_mask-max", "everything"}
"""Options that `make test` tries at every level; the others at the token level."""

CASES = [
    pytest.param(*c, name, marks=() if c[1] == "token" or name in FAST else pytest.mark.slow)
    for c in COMBINATIONS
    for name in OPTIONS
    if settings(*c, name) is not None
]


def compare(o: Options, *, seed: int = 3, update: int = 1, dtype=torch.float64, tolerance: float = 1e-6, **shape):
    rollout_batch = random_rows(seed, **shape)
    loss = step_loss(rollout_batch.ranks(update), o, rollout_batch.tokens, rollout_batch.steps_per_generation)
    rows = [rollout_batch.flat[i] for i in rollout_batch.indices(update)]
    expected = reference_gradients(rows, loss)
    assert expected.logprobs.abs().max() > 0
    assert_same(covey_gradients(rollout_batch, o, update, dtype=dtype), expected, tolerance)


@pytest.mark.parametrize(("loss_type", "level", "name"), CASES)
def test_loss_and_gradients_equal_the_brute_force_ones(loss_type, level, name):
    compare(Options(loss_type, level, **OPTIONS[name]))


@pytest.mark.parametrize("name", ["plain", "delta", "beta-k3-corrected", "off-policy-mask", "top-entropy"])
@pytest.mark.parametrize(("loss_type", "level"), COMBINATIONS)
def test_on_policy_the_ratio_is_one_and_its_gradient_alive(loss_type, level, name):
    compare(Options(loss_type, level, **OPTIONS[name]), on_policy=True, engine=name == "off-policy-mask")


CORRECTED = [name for name in OPTIONS if name.startswith(("token", "sequence")) or name == "everything"]


@pytest.mark.parametrize("name", CORRECTED)
@pytest.mark.parametrize(("loss_type", "level"), COMBINATIONS)
def test_on_policy_the_engine_is_corrected_from_the_same_pass(loss_type, level, name):
    if settings(loss_type, level, name) is not None:
        compare(Options(loss_type, level, **OPTIONS[name]), on_policy=True)


@pytest.mark.parametrize("name", ["plain", "everything"])
@pytest.mark.parametrize(("loss_type", "level"), COMBINATIONS)
def test_float32_stays_within_the_tolerance(loss_type, level, name):
    compare(Options(loss_type, level, **OPTIONS[name]), dtype=torch.float32, tolerance=1e-5)


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_other_seeds_and_shapes_agree(loss_type, seed):
    shape = [(1, 4, 1, 1), (3, 2, 1, 2), (2, 1, 4, 1)][seed - 2]
    world, per_device, accumulation, updates = shape
    compare(
        Options(loss_type, **OPTIONS["everything"]),
        seed=seed,
        update=updates - 1,
        world=world,
        per_device=per_device,
        accumulation=accumulation,
        updates=updates,
    )


@pytest.mark.parametrize("loss_type", LOSSES)
def test_drift_is_from_the_old_policy_without_engine_log_probs(loss_type):
    compare(Options(loss_type, off_policy_threshold=0.05), engine=False)


@pytest.mark.parametrize("mode", MODES)
def test_an_engine_that_reports_nan_counts_as_agreeing(mode):
    rollout_batch = random_rows(5)
    for row in rollout_batch.flat:
        if row.engine:
            row.engine[0] = math.nan
    o = Options("grpo", mismatch_mode=mode, clip_max=1.3, off_policy_threshold=0.05)
    loss = step_loss(rollout_batch.ranks(0), o, rollout_batch.tokens, rollout_batch.steps_per_generation)
    rows = [rollout_batch.flat[i] for i in rollout_batch.indices(0)]
    assert_same(covey_gradients(rollout_batch, o), reference_gradients(rows, loss), 1e-6)


@pytest.mark.parametrize("loss_type", [name for name in LOSSES if name != "gmpo"])  # one credit per completion
def test_credit_may_differ_from_token_to_token(loss_type):
    rollout_batch = random_rows(6)
    for row in rollout_batch.flat:
        row.advantages = [(-1.0) ** t * (0.5 + 0.25 * t) for t in range(len(row.mask))]
    o = Options(loss_type, off_policy_threshold=0.05)
    loss = step_loss(rollout_batch.ranks(0), o, rollout_batch.tokens, rollout_batch.steps_per_generation)
    rows = [rollout_batch.flat[i] for i in rollout_batch.indices(0)]
    assert_same(covey_gradients(rollout_batch, o), reference_gradients(rows, loss), 1e-6)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "plain"])
def test_every_option_changes_something(name):
    """A comparison proves little where no ratio is clipped and no token dropped."""
    plain = covey_gradients(random_rows(3), Options("grpo"), 1)
    with_option = covey_gradients(random_rows(3), Options("grpo", **OPTIONS[name]), 1)
    same_logprobs = torch.equal(plain.logprobs, with_option.logprobs)
    same_entropies = torch.equal(plain.entropies, with_option.entropies)
    assert not (same_logprobs and same_entropies)
    if name.endswith("min-max"):
        without_min = Options("grpo", **{**OPTIONS[name], "clip_min": None})
        assert with_option.loss != covey_gradients(random_rows(3), without_min, 1).loss
