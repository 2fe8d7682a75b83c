"""Optimizers of Covey's own in a run: what the config makes, groups, refusals."""

import pytest
import torch

from covey.config import optimizers
from covey.core.findings import CheckError
from covey.policy.optimizers import Muon, StochasticAdamW
from covey.trainer.optimizers import OWN
from tests.support import runs, tiny


def test_the_names_of_a_config_are_those_that_can_be_made():
    assert tuple(OWN) == optimizers.OWN_OPTIMIZERS


def test_muon_has_a_group_for_each_kind_of_weight(tmp_path):
    trainer = runs.trainer(
        tmp_path, optim="muon", weight_decay=0.1, adam_beta1=0.8, optim_args="momentum=0.9,nesterov=false,ns_steps=4"
    )
    assert trainer.args.optim == "muon"
    made = trainer.create_optimizer()
    assert isinstance(made, Muon)
    names = {id(weight): name for name, weight in trainer.model.named_parameters()}
    groups = {
        (group["muon"], group["weight_decay"]): {names[id(weight)].split(".")[-2] for weight in group["params"]}
        for group in made.param_groups
    }
    assert groups[True, 0.1] == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    assert "embed_tokens" in groups[False, 0.1] and all("norm" in name for name in groups[False, 0.0])
    of_muon = next(group for group in made.param_groups if group["muon"])
    assert (of_muon["momentum"], of_muon["nesterov"], of_muon["ns_steps"]) == (0.9, False, 4)
    assert of_muon["adjust_lr_fn"] == "match_rms_adamw"
    assert {group["betas"] for group in made.param_groups if not group["muon"]} == {(0.8, 0.999)}


@pytest.mark.parametrize(("optim", "kind"), [("muon", Muon), ("adamw_stochastic", StochasticAdamW)])
def test_weights_and_learning_rate_move(tmp_path, optim, kind):
    model = tiny.model().to(torch.float32 if optim == "muon" else torch.bfloat16)
    trainer = runs.trainer(
        tmp_path, parts={"model": model}, optim=optim, lr_scheduler_type="linear", max_steps=3, learning_rate=1e-3
    )
    before = runs.weights(trainer)
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, kind)
    assert any(not torch.equal(*pair) for pair in zip(before, runs.weights(trainer), strict=True))
    assert runs.history(trainer, "learning_rate") == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3])


@pytest.mark.parametrize("optim", optimizers.OWN_OPTIMIZERS)
def test_deepspeed_is_refused_by_name(tmp_path, monkeypatch, optim):
    monkeypatch.setattr(optimizers, "by_deepspeed", lambda: True)
    with pytest.raises(CheckError) as error:
        runs.config(tmp_path, optim=optim)
    assert error.value.codes == ["optimizer-sharded"]
    runs.config(tmp_path, optim="adamw_torch")


def test_a_torch_without_muon_is_named(tmp_path, monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(CheckError) as error:
        runs.config(tmp_path, optim="muon")
    assert error.value.codes == ["setting-word"] and torch.__version__ in str(error.value)
