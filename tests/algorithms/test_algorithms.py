"""A config becomes an `Algorithm`: which advantages, which loss, which average."""

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from covey.algorithms import LOSS_TYPES, grpo, register_advantages, register_loss, rloo
from covey.config.grpo import GRPOConfig
from covey.core import losses
from covey.core.batch import TrainBatch
from covey.core.losses import SurrogateInputs
from covey.core.objective import policy_loss
from tests.support.objective_cases import bare_batch


def config(**changes):
    """The fields that algorithms read, at their defaults."""
    fields = {
        "loss_type": "dapo",
        "epsilon": 0.2,
        "resolved_epsilon_high": 0.2,
        "delta": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "kl_estimator": "k3",
        "use_bias_correction_kl": True,
        "off_policy_mask_threshold": None,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "dro_beta": 0.5,
        "cov_share": 0.5,
        "kl_cov_coef": 1.0,
        "clip_cov_low": 0.0,
        "clip_cov_high": 5.0,
        "advantages": None,
        "pass_at_k": 2,
        "kl_in_reward": False,
        "multi_objective_aggregation": "sum_then_normalize",
        "scale_rewards": "group",
        "compare": "group",
        "role_decay": 0.95,
        "reward_clip_range": None,
        "normalize_advantages": False,
        "process_weight": 1.0,
        "outcome_weight": 1.0,
        "step_discount": 1.0,
        "step_baseline": "group",
        "teacher": None,
        "supervised_roles": None,
        "demonstrations": None,
    }
    return SimpleNamespace(**{**fields, **changes})


def rloo_config(**changes):
    return config(**{"loss_type": "rloo", "beta": 0.05, "kl_estimator": "k1", **changes})


class Inputs(NamedTuple):
    batch: TrainBatch
    logprobs: torch.Tensor
    entropies: None = None


def inputs(ratios_, advantage=1.0, **more):
    """One sequence of trained tokens with the given ratios and weight 1 each."""
    count = len(ratios_)
    batch = bare_batch(
        sampled=torch.ones(count, dtype=torch.bool),
        lengths=torch.tensor([count]),
        advantages=torch.full((count,), advantage, dtype=torch.float64),
        weights=torch.ones(count, dtype=torch.float64),
        old_logprobs=torch.zeros(count, dtype=torch.float64),
        **more,
    )
    return Inputs(batch, torch.tensor(ratios_, dtype=torch.float64).log().requires_grad_())


def loss_of(settings, *args, **more):
    return policy_loss(*inputs(*args, **more), grpo.objective(settings)).loss.item()


@pytest.fixture
def new_name():
    """A loss name that is gone after the test."""
    name = "test-only"
    yield name
    LOSS_TYPES.pop(name, None)


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("grpo", losses.mean_per_sequence),
        ("bnpo", losses.mean_per_micro_batch),
        ("dr_grpo", losses.mean_constant_length),
        ("dapo", losses.mean_over_update),
        ("luspo", losses.sum_per_sequence),
        ("cispo", losses.mean_over_update),
        ("sapo", losses.mean_per_sequence),
        ("vespo", losses.mean_over_update),
        ("gmpo", losses.mean_per_sequence),
        *[(name, losses.mean_over_update) for name in ("dppo_tv", "dppo_kl", "gpg", "dro", "kl_cov", "clip_cov")],
        ("rloo", losses.mean_per_sequence),
    ],
)
def test_each_loss_type_has_its_average(loss_type, expected):
    assert LOSS_TYPES[loss_type].weighting is expected
    assert grpo.algorithm(config(loss_type=loss_type)).weighting is expected


def test_the_table_holds_these_losses():
    names = {"grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo", "gmpo", "rloo"}
    assert names <= set(LOSS_TYPES)


# One token with ratio 2 and A = 1, and what each loss makes of it.
@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        *[(name, -1.3) for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "rloo")],
        ("cispo", -1.3 * math.log(2)),
        ("sapo", -4 / (1 + math.exp(-1))),
        ("vespo", -4 * math.exp(-3) * math.log(2)),  # φ = 2² e^(3 - 6)
        ("gmpo", -math.exp(0.3)),
        ("dppo_kl", -2.0),  # π_old is 1 here, so the binary KL is log(1/2) < 0: near
        ("dppo_tv", 0.0),  # |2 - 1| > 0.3: far
        ("gpg", -math.log(2)),
        ("dro", 0.25 * math.log(2) ** 2 - math.log(2)),
    ],
)
def test_each_loss_type_has_its_surrogate(loss_type, expected):
    high = 1.3 if loss_type == "cispo" else 0.3  # cispo's is the cap itself
    assert loss_of(config(loss_type=loss_type, resolved_epsilon_high=high), [2.0]) == pytest.approx(expected)


def test_the_ratio_level_is_the_configs_unless_the_loss_has_one():
    for level in ("token", "sequence", "sequence_token"):
        settings = {"importance_sampling_level": level}
        assert grpo.objective(config(**settings)).ratio_level is losses.RATIO_LEVELS[level]
        assert grpo.objective(config(loss_type="gmpo", **settings)).ratio_level is losses.token_level
        assert grpo.objective(config(loss_type="rloo", **settings)).ratio_level is losses.sequence_sum_level


def test_clip_fractions_count_sequences_for_sequence_ratios():
    """Ratios 4 and 1: one of two tokens is clipped; their geometric mean 2 is one clipped sequence of one."""
    expected = {"token": (1, 2), "sequence": (1, 1), "sequence_token": (2, 2)}
    for level, (clipped, count) in expected.items():
        stats = policy_loss(*inputs([4.0, 1.0]), grpo.objective(config(importance_sampling_level=level))).stats
        high = stats["clip_ratio/high_mean"]
        assert (high.total, high.count) == (pytest.approx(clipped), count)


@pytest.mark.parametrize(
    ("loss_type", "metric"),
    [
        *[(name, "clip_ratio/region_mean") for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "rloo")],
        ("cispo", "cispo_clip_ratio"),
        ("vespo", "vespo/phi_seq_mean"),
    ],
)
def test_each_loss_reports_its_metric(loss_type, metric):
    assert metric in policy_loss(*inputs([2.0]), grpo.objective(config(loss_type=loss_type))).stats


def test_the_objective_takes_over_the_options():
    objective = grpo.objective(config(beta=0.1, kl_estimator="k2", off_policy_mask_threshold=0.5))
    assert objective.beta == 0.1
    assert objective.kl is losses.k2
    assert objective.correct_kl_bias
    assert objective.off_policy_threshold == 0.5


def test_delta_and_epsilons_reach_the_clip():
    settings = config(loss_type="grpo", epsilon=0.1, resolved_epsilon_high=0.5, delta=3.0)
    assert loss_of(settings, [9.0], 1.0) == pytest.approx(-1.5)
    assert loss_of(settings, [9.0], -1.0) == pytest.approx(3.0)
    assert loss_of(settings, [0.5], -1.0) == pytest.approx(0.9)


def test_an_unknown_loss_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown loss_type 'grop'; did you mean 'grpo'\? Known: .*dapo"):
        grpo.algorithm(config(loss_type="grop"))


def test_vespo_alone_applies_the_mismatch_weights_itself():
    own = {name for name, row in LOSS_TYPES.items() if row.mismatch_in_surrogate}
    assert own == {"vespo"}
    half = torch.full((1,), 0.5, dtype=torch.float64)
    assert loss_of(config(), [1.0], mismatch_weights=half) == pytest.approx(-0.5)
    # w = 0.5: φ = 0.5² e^(3 - 1.5); log π = 0.1
    logprob = math.exp(0.1)
    phi = (0.5 * logprob) ** 2 * math.exp(3 - 3 * 0.5 * logprob)
    assert loss_of(config(loss_type="vespo"), [logprob], mismatch_weights=half) == pytest.approx(-phi * 0.1)


def test_grpo_advantages_are_of_the_weighted_total():
    rewards = torch.tensor([[[0.0, 5.0], [1.0, 5.0]]])  # the second function does not tell them apart
    weights = torch.tensor([2.0, 1.0])
    assert grpo.algorithm(config(scale_rewards="none")).advantages(rewards, weights, None).tolist() == [[-1, 1]]
    # group: ±1 / (√2 + 1e-4)
    scaled = grpo.algorithm(config()).advantages(rewards, weights, None)
    assert scaled.tolist() == [pytest.approx([-1 / (math.sqrt(2) + 1e-4), 1 / (math.sqrt(2) + 1e-4)])]


def test_grpo_scales_by_batch_on_request():
    rewards = torch.tensor([[[0.0], [2.0]], [[1.0], [1.0]]])
    got = grpo.algorithm(config(scale_rewards="batch")).advantages(rewards, torch.ones(1), None)
    assert got[0, 1].item() == pytest.approx(1 / (math.sqrt(2 / 3) + 1e-4))


def test_grpo_normalises_each_reward_whatever_scale_rewards():
    rewards = torch.tensor([[[0.0, 100.0], [1.0, 0.0]]])  # equal say: they cancel up to ε
    for scale in ("group", "batch", "none"):
        method = grpo.algorithm(config(multi_objective_aggregation="normalize_then_sum", scale_rewards=scale))
        assert method.advantages(rewards, torch.ones(2), None).abs().max() < 0.6
        only_first = method.advantages(rewards, torch.tensor([1.0, 0.0]), None)
        assert only_first.tolist() == [pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-3)]


def test_grpo_has_the_kl_penalty_in_the_loss_rloo_in_the_reward():
    in_loss, in_reward = grpo.algorithm(config(beta=0.1)), rloo.algorithm(rloo_config(beta=0.1))
    assert (in_loss.name, in_loss.beta, in_loss.objective.beta) == ("GRPO", 0.1, 0.1)
    assert (in_reward.name, in_reward.beta, in_reward.objective.beta) == ("RLOO", 0.1, 0.0)
    assert not in_loss.kl_in_reward and in_reward.kl_in_reward


def test_rloo_clips_rewards_subtracts_kl_and_leaves_one_out():
    """Rewards 9, 1, 0 clip to 2, 1, 0; KL 0, 2, 4 times 0.5 makes 2, 0, -2; siblings' means -1, 0, 1."""
    rewards = torch.tensor([[[9.0], [1.0], [0.0]]])
    method = rloo.algorithm(rloo_config(reward_clip_range=(0.0, 2.0), beta=0.5))
    got = method.advantages(rewards, torch.ones(1), torch.tensor([[0.0, 2.0, 4.0]]))
    assert got.tolist() == [pytest.approx([3, 0, -3])]


def test_rloo_leaves_out_what_could_not_be_scored():
    rewards = torch.tensor([[[1.0], [math.nan], [3.0]]])
    method = rloo.algorithm(rloo_config(reward_clip_range=(0.0, 9.0)))
    assert method.advantages(rewards, torch.ones(1), torch.zeros(1, 3)).tolist() == [[-2, 0, 2]]


def test_rloo_normalises_on_request():
    rewards = torch.tensor([[[0.0], [2.0]], [[1.0], [1.0]]])
    got = rloo.algorithm(rloo_config(normalize_advantages=True)).advantages(rewards, torch.ones(1), None)
    a = 2 / (math.sqrt(8 / 3) + 1e-4)  # of [-2, 2, 0, 0]
    assert got.flatten().tolist() == pytest.approx([-a, a, 0, 0])


def test_rloo_on_policy_is_reinforce():
    """Loss -A r with r = 1; the gradient is -A of every token of the completion, averaged over completions."""
    x = inputs([1.0, 1.0, 1.0], 2.0)
    method = rloo.algorithm(rloo_config())
    weights = losses.token_weights(
        method.weighting,
        losses.BatchCounts(torch.tensor([3.0]), torch.tensor([3.0]), 1, 3, 1, None),
        x.batch.sampled,
        x.batch.lengths,
    )
    on_policy = replace(x.batch, weights=weights, old_logprobs=None)
    result = policy_loss(on_policy, x.logprobs, None, method.objective)
    (gradient,) = torch.autograd.grad(result.loss, x.logprobs)
    assert result.loss.item() == pytest.approx(-2)
    assert gradient.tolist() == pytest.approx([-2, -2, -2])


def test_rloo_off_policy_clips_the_ratio_of_the_whole_completion():
    """Three ratios of 1.1 multiply to 1.331 > 1.2: clipped, though no token's own ratio is beyond 1.2."""
    x = inputs([1.1, 1.1, 1.1])
    result = policy_loss(*x, rloo.algorithm(rloo_config()).objective)
    (gradient,) = torch.autograd.grad(result.loss, x.logprobs)
    assert result.loss.item() == pytest.approx(-3.6)
    assert gradient.tolist() == [0, 0, 0]
    assert result.stats["clip_ratio/high_mean"].value() == 1.0


def test_rloo_learns_from_each_token_by_its_own_advantage():
    """The ratio is the whole completion's, 1.21; the gradient of token t is -A_t times it, a mean over completions."""
    x = inputs([1.1, 1.1])
    advantages = torch.tensor([2.0, -1.0], dtype=torch.float64)
    weights = torch.full((2,), 0.5, dtype=torch.float64)  # mean_per_sequence of one completion of two tokens
    settings = rloo_config(epsilon=0.5, resolved_epsilon_high=0.5)
    result = policy_loss(
        replace(x.batch, advantages=advantages, weights=weights),
        x.logprobs,
        None,
        rloo.algorithm(settings).objective,
    )
    (gradient,) = torch.autograd.grad(result.loss, x.logprobs)
    assert result.loss.item() == pytest.approx(-1.21 * (2 - 1) / 2)
    assert gradient.tolist() == pytest.approx([-2 * 1.21, 1.21])


@pytest.mark.parametrize(
    ("settings", "credits"),
    [
        ({"loss_type": "dapo"}, True),
        ({"loss_type": "dapo", "importance_sampling_level": "sequence"}, False),
        ({"loss_type": "sapo", "importance_sampling_level": "sequence_token"}, True),
        ({"loss_type": "dapo", "importance_sampling_level": "sequence_sum"}, True),
        ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, True),  # the ratio is but a weight
        ({"loss_type": "vespo"}, True),
        ({"loss_type": "gmpo"}, False),
        ({"loss_type": "rloo"}, True),
    ],
)
def test_which_losses_learn_from_each_token_by_its_own_advantage(settings, credits):
    """As the objective says, and as the gradient shows: credit of the first token alone moves the second, or not."""
    objective = grpo.objective(config(**settings))
    assert objective.credits_tokens == credits
    x = inputs([1.1, 0.9])
    advantages = torch.tensor([1.0, 0.0], dtype=torch.float64)
    weights = torch.ones(2, dtype=torch.float64)
    one = replace(x.batch, advantages=advantages, weights=weights)
    (gradient,) = torch.autograd.grad(policy_loss(one, x.logprobs, None, objective).loss, x.logprobs)
    assert gradient[0] != 0 and (gradient[1] == 0) == credits


def test_rloo_can_minimise_any_other_loss():
    method = rloo.algorithm(rloo_config(loss_type="cispo", resolved_epsilon_high=5.0))
    assert policy_loss(*inputs([2.0]), method.objective).loss.item() == pytest.approx(-2 * math.log(2))
    assert method.weighting is losses.mean_over_update


def test_a_registered_loss_works_with_every_option(new_name):
    def reinforce(x: SurrogateInputs):
        return -x.advantages * x.logprobs

    assert register_loss(new_name, reinforce, losses.sum_per_sequence) is reinforce
    settings = config(loss_type=new_name, importance_sampling_level="sequence", off_policy_mask_threshold=0.5)
    method = grpo.algorithm(settings)
    assert method.weighting is losses.sum_per_sequence
    assert method.objective.ratio_level is losses.sequence_level
    assert loss_of(settings, [2.0, 3.0]) == pytest.approx(-math.log(6))
    # punished and far less probable than when sampled: dropped by the off-policy filter
    assert loss_of(settings, [0.1, 0.1], -1.0) == 0


def test_a_registered_loss_averages_over_tokens_by_default(new_name):
    register_loss(new_name, lambda x: -x.ratio * x.advantages)
    assert LOSS_TYPES[new_name].weighting is losses.mean_over_update
    with pytest.raises(ValueError, match="loss_type 'grpo' is already registered"):
        register_loss("grpo", lambda x: -x.ratio)


EVERY_ROLLOUT = ("dro", "kl_cov", "clip_cov")  # rollouts of advantage 0 have a gradient
SIGNAL = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo", "gmpo", "rloo", "gpg")
BUILT_IN = (*SIGNAL, "dppo_tv", "dppo_kl", *EVERY_ROLLOUT)


def test_a_published_loss_is_complete():
    """Its row names the options that it reads; the help of `loss_type`, the page and `BUILT_IN` name the loss."""
    registered = register_loss.__module__  # rows of `register_loss` belong to scripts
    rows = {name: row for name, row in LOSS_TYPES.items() if row.surrogate.__module__ != registered}
    assert sorted(rows) == sorted(BUILT_IN)
    assert [name for name, row in rows.items() if row.reads is None] == []
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    words = set(re.findall(r"\w+", GRPOConfig.__dataclass_fields__["loss_type"].metadata["help"]))
    assert [name for name in rows if f"| `{name}` |" not in page or name not in words | {"rloo"}] == []


@pytest.mark.parametrize("loss_type", [name for name in BUILT_IN if name not in EVERY_ROLLOUT])
def test_built_in_losses_without_advantage_have_no_gradient(loss_type):
    objective = grpo.objective(config(loss_type=loss_type))
    x = inputs([0.3, 1.0, 4.0], 0.0)
    result = policy_loss(*x, objective)
    (gradient,) = torch.autograd.grad(result.loss, x.logprobs)
    assert not objective.needs_every_rollout
    assert result.loss.item() == 0
    assert not gradient.any()


def test_kl_and_other_losses_need_rollouts_without_advantage(new_name):
    assert grpo.objective(config(beta=0.1)).needs_every_rollout
    assert not rloo.algorithm(rloo_config(beta=0.1)).objective.needs_every_rollout
    register_loss(new_name, lambda x: (x.ratio - 1) ** 2 - x.ratio * x.advantages)
    assert grpo.objective(config(loss_type=new_name)).needs_every_rollout
    LOSS_TYPES.pop(new_name)
    register_loss(new_name, lambda x: -x.ratio * x.advantages, zero_without_advantage=True)
    assert not grpo.objective(config(loss_type=new_name)).needs_every_rollout


def test_skipped_rollouts_still_count_in_clip_fractions():
    """One of two tokens clipped, two more skipped for want of an advantage: 1/4; one sequence of two: 1/2."""
    skipped = {"skipped_tokens": 2, "skipped_rows": 1}
    for loss_type, expected in (("dapo", 1 / 4), ("rloo", 1 / 2)):
        stats = policy_loss(*inputs([4.0, 1.0], **skipped), grpo.objective(config(loss_type=loss_type))).stats
        assert stats["clip_ratio/high_mean"].value() == pytest.approx(expected)
    stats = policy_loss(*inputs([4.0, 1.0], **skipped), grpo.objective(config(loss_type="cispo"))).stats
    assert stats["cispo_clip_ratio"].value() == pytest.approx(2 / 4)  # the default cap here is 0.2: both are above


@pytest.mark.parametrize("register", [register_loss, register_advantages])
def test_a_function_of_other_arguments_is_refused_at_once(register):
    with pytest.raises(TypeError, match=r"'odd', ...\): the function takes \(ratio, advantages\), but is called"):
        register("odd", lambda ratio, advantages: ratio)
