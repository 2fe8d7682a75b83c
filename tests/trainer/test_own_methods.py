"""Losses and advantages of one's own by file and name, and the KL penalty in GRPO's reward."""

import copy

import pytest
import torch

from covey import GRPOConfig
from covey.cli.config_file import load_run
from covey.core.losses import mean_per_sequence
from tests.support import runs

MINE = """
import torch

def loss(x):
    return -x.ratio * x.advantages * (1 + 0 * x.entropies) if x.entropies is not None else -x.ratio * x.advantages

def advantages(x):
    return x.totals - x.totals.nanmean(1, keepdim=True)

def of_tokens(x):
    return advantages(x)[..., None].expand(-1, -1, int(x.lengths.max()))

def mean(x):
    return (-x.ratio * x.advantages).mean()

def detached(x):
    return (-x.ratio * x.advantages).detach()

def integer(x):
    return (-x.ratio * x.advantages).long()

def nothing(x):
    pass

def certain(x):
    return -x.ratio * x.advantages / (1 + x.entropies)

def misspelt(x):
    return -x.ratios

def unequal(x):
    return torch.einsum("i,j", x.ratio)

def infinite(x):
    return -x.ratio * x.advantages / 0

calls = []

def later(x):
    calls.append(x)
    return (-x.ratio * x.advantages) if len(calls) < 3 else x.logprobs.sum()
"""

SEVERAL = {"num_iterations": 2, "max_tokens_per_micro_batch": 30}  # epochs, and micro-batches of several sizes

REGISTERED = """
from covey.algorithms import register_loss
from covey.core.losses import mean_per_sequence

def weighted(x):
    return -x.ratio * x.advantages * x.entropies

register_loss("NAME", weighted, mean_per_sequence, entropies=True)
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


def test_advantages_of_tokens_that_are_equal_are_those_of_completions(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    trained = [
        runs.trainer(tmp_path / name, advantages=f"{file}:{name}", **SEVERAL) for name in ("advantages", "of_tokens")
    ]
    for one in trained:
        one.train()
    assert all(torch.equal(a, b) for a, b in zip(*map(runs.weights, trained), strict=True))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("mean", "returned shape []"),
        ("detached", "without a gradient"),
        ("integer", "returned losses of torch.int64"),
        ("nothing", "returned a NoneType"),
        ("certain", "x.entropies is None: call register_loss(..., entropies=True)"),
        ("unequal", "in line 32 of"),  # not of torch's own file
        ("misspelt", "misspelt.py: AttributeError: 'SurrogateInputs' object has no attribute 'ratios'"),
        ("later", "returned shape []"),  # in the second step
    ],
)
def test_losses_that_cannot_train_are_refused(tmp_path, function, said):
    file = tmp_path / f"{function}.py"
    file.write_text(MINE)
    with pytest.raises(ValueError) as error:
        runs.trainer(tmp_path, loss_type=f"{file}:{function}").train()
    assert said in str(error.value)


def test_advantages_that_fail_are_named_with_their_line(tmp_path):
    file = tmp_path / "advantages_that_fail.py"
    file.write_text("def mine(x):\n    return x.rewards['accuracy']\n")
    with pytest.raises(ValueError, match=r"fail.py:mine' failed in line 2 of .*fail.py: IndexError"):
        runs.trainer(tmp_path, advantages=f"{file}:mine").train()


def test_losses_that_are_not_finite_are_named(tmp_path):
    file = tmp_path / "infinite.py"
    file.write_text(MINE)
    with pytest.warns(UserWarning, match="infinite' returned losses that are NaN or infinite for .* of .* tokens"):
        runs.trainer(tmp_path, loss_type=f"{file}:infinite", max_steps=1).train()


def test_a_loss_named_by_file_is_the_one_that_its_file_registers(tmp_path, request):
    name, file = f"own-{request.node.name}-{tmp_path.name}", tmp_path / "registered.py"
    file.write_text(REGISTERED.replace("NAME", name))
    results = []
    for loss_type in (f"{file}:weighted", name):
        trained = runs.trainer(tmp_path, loss_type=loss_type, max_steps=1)
        trained.train()
        assert trained.run.algorithm.weighting is mean_per_sequence
        results.append(runs.weights(trained))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_kl_in_reward_moves_the_policy_but_not_by_the_loss(tmp_path):
    trained = runs.trainer(tmp_path, beta=0.1, kl_in_reward=True, advantages="reinforce_plus_plus", max_steps=2)
    trained.train()
    assert trained.run.algorithm.objective.beta == 0
    assert runs.history(trained, "kl")[0] == pytest.approx(0, abs=1e-5)  # the policy is its reference still
    assert runs.history(trained, "kl")[1] != 0


def test_otb_weighs_the_baseline_by_the_scores_energy(tmp_path):
    """Against the softmax of all logits: a token's energy is |e - π|², e the one-hot vector of what was sampled."""
    trained = runs.trainer(tmp_path, advantages="otb", max_steps=1, temperature=0.7)
    batches = runs.experiences(trained)
    before = copy.deepcopy(trained.model).eval()
    trained.train()
    batch, energies = batches[0], []
    for group, ids in zip(batch.groups.tolist(), batch.completions(), strict=True):
        prompt = batch.prompts()[group]
        logits = before(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1].detach().double() / 0.7
        energies += [(torch.eye(logits.shape[1])[ids] - logits.softmax(-1)).square().sum(-1)]
    rewards = [len(ids) + int(ids.sum()) % 10 / 10 for ids in batch.completions()]
    expected = [
        rewards[i] - sum(rewards[j] * w for j, w in reach) / sum(w for _, w in reach) if len(reach) > 1 else None
        for i, own in enumerate(energies)
        for t in range(len(own))
        for reach in [
            [(j, energies[j][: t + 1].sum()) for j in range(i // 4 * 4, i // 4 * 4 + 4) if len(energies[j]) > t]
        ]
    ]
    assert [a for a, e in zip(batch.advantages.tolist(), expected, strict=True) if e is not None] == pytest.approx(
        [float(e) for e in expected if e is not None], abs=1e-4
    )


CUTS = [
    {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1},
    {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "max_tokens_per_micro_batch": 40},
]


@pytest.mark.parametrize(
    "settings",
    [{"loss_type": "kl_cov", "num_iterations": 2, "max_steps": 2}, {"loss_type": "clip_cov", "clip_cov_low": 0.0}],
    ids=lambda settings: settings["loss_type"],
)
def test_chosen_tokens_do_not_depend_on_the_cut(tmp_path, settings):
    results = []
    for number, cut in enumerate(CUTS):
        settings = {"max_steps": 1, "cov_share": 0.3, "optim": "sgd", "max_grad_norm": 0, **settings}
        trained = runs.trainer(tmp_path / str(number), **settings, **cut)
        trained.train()
        results.append(runs.weights(trained))
        assert all(0.1 < share < 0.4 for share in runs.history(trained, "chosen_token_fraction"))
    for whole, cut in zip(*results, strict=True):
        torch.testing.assert_close(whole, cut, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"loss_type": "clip_cov", "clip_cov_low": 5.0}, "clip_cov_low=5.0"),
        ({"advantages": "otb", "loss_type": "gmpo"}, "advantages='otb'"),
        ({"advantages": "otb", "importance_sampling_level": "sequence"}, "advantages='otb'"),
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


def test_settings_of_methods_without_effect_are_named(tmp_path):
    with pytest.warns(UserWarning, match="kl_cov.* punishes nothing"):
        runs.config(tmp_path, loss_type="kl_cov")
