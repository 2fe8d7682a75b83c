"""Losses and advantages of one's own by file and name, and the KL penalty in GRPO's reward."""

import pytest
import torch

from covey import GRPOConfig
from covey.cli.config_file import load_run
from tests.support import runs

MINE = """
def loss(x):
    return -x.ratio * x.advantages * (1 + 0 * x.entropies) if x.entropies is not None else -x.ratio * x.advantages

def advantages(x):
    return x.totals - x.totals.nanmean(1, keepdim=True)

def mean(x):
    return (-x.ratio * x.advantages).mean()

def detached(x):
    return (-x.ratio * x.advantages).detach()
"""


def test_loss_and_advantages_are_named_by_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    (tmp_path / "run.yaml").write_text(
        f"loss_type: {file}:loss\nadvantages: {file}:advantages\noutput_dir: {tmp_path}\nreport_to: none\nuse_cpu: true"
    )
    args = load_run(tmp_path / "run.yaml").args
    assert (args.loss_type, args.advantages) == (f"{file}:loss", f"{file}:advantages")
    own = runs.trainer(tmp_path / "own", loss_type=args.loss_type, advantages=args.advantages)
    own.train()
    known = runs.trainer(tmp_path / "known", scale_rewards="none")
    known.train()
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(own), runs.weights(known), strict=True))


@pytest.mark.parametrize(("function", "said"), [("mean", "returned shape []"), ("detached", "without a gradient")])
def test_losses_that_cannot_train_are_refused(tmp_path, function, said):
    file = tmp_path / f"{function}.py"
    file.write_text(MINE)
    with pytest.raises(ValueError) as error:
        runs.trainer(tmp_path, loss_type=f"{file}:{function}").train()
    assert said in str(error.value)


def test_kl_in_reward_moves_the_policy_but_not_by_the_loss(tmp_path):
    trained = runs.trainer(tmp_path, beta=0.1, kl_in_reward=True, advantages="reinforce_plus_plus", max_steps=2)
    trained.train()
    assert trained.context.algorithm.objective.beta == 0
    assert runs.history(trained, "kl")[0] == pytest.approx(0, abs=1e-5)  # the policy is its reference still
    assert runs.history(trained, "kl")[1] != 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"advantages": "opa"}, "Did you mean 'opo'"),
        ({"advantages": "opo", "multi_objective_aggregation": "normalize_then_sum"}, "two ways"),
        ({"kl_in_reward": True, "beta": 0.1, "multi_objective_aggregation": "normalize_then_sum"}, "kl_in_reward=True"),
        ({"advantages": "pass_at_k", "pass_at_k": 9}, "pass_at_k=9"),
        ({"loss_type": "nowhere.py:mine"}, "does not exist"),
    ],
)
def test_settings_of_methods_that_cannot_work(tmp_path, settings, said):
    with pytest.raises(ValueError) as error:
        GRPOConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, **settings)
    assert said in str(error.value)
