"""Callbacks written for TRL read the trainer's attributes."""

import pytest
from transformers import TrainerCallback

from covey import GRPOTrainer
from covey.config.aliases import HOOKS, NOT_NEEDED
from covey.rewards import RewardError
from covey.trainer.integrations.attributes import FIELDS, VIEWS
from tests.support import runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    seen = {}

    class Reads(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.update(trainer._metrics["train"])

    trainer = runs.trainer(
        tmp_path_factory.mktemp("run"), beta=0.1, epsilon_high=0.3, num_iterations=2, logging_steps=9
    )
    trainer.add_callback(Reads())
    trainer.train()
    return trainer, seen


@pytest.mark.parametrize("name", sorted(VIEWS))
def test_every_view_can_be_read(trained, name):
    assert hasattr(trained[0], name)


def test_views_show_what_the_run_uses(trained):
    trainer, seen = trained
    assert (trainer.beta, trainer.epsilon_low, trainer.epsilon_high, trainer.num_generations) == (0.1, 0.2, 0.3, 4)
    assert trainer.reward_funcs == [runs.longer]
    assert trainer.reward_func_names == ["longer"]
    assert trainer.reward_weights.tolist() == [1.0]
    assert trainer.tools == []
    assert trainer.reward_processing_classes == [None]
    assert (trainer.num_generations_eval, trainer.chat_template_kwargs) == (4, {})
    assert trainer._metrics["eval"] == {}  # of no open window
    assert trainer.ref_model is not None
    assert not trainer.aux_loss_enabled
    assert seen["reward"][0] > 0


def test_own_fields_of_the_config_are_attributes(trained):
    assert {"beta", "temperature", "loss_type", "num_iterations"} <= FIELDS
    assert "learning_rate" not in FIELDS and not hasattr(trained[0], "learning_rate")
    assert trained[0].loss_type == trained[0].args.loss_type


def test_other_names_are_unknown_still(trained):
    with pytest.raises(AttributeError, match="'GRPOTrainer' object has no attribute 'epsilom_low'"):
        _ = trained[0].epsilom_low
    assert not hasattr(trained[0], "reward_clip_range")  # RLOO's
    with pytest.raises(AttributeError, match="'environments': each rollout makes its own"):
        _ = trained[0].environments


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_methods_that_are_never_called_cannot_be_overridden(name):
    mine = type("Mine", (type("Mixin", (), {name: lambda self, *given: None}), GRPOTrainer), {})
    with pytest.raises(TypeError, match=f"Mine overrides `{name}`, which is never called"):
        mine("model")


def test_methods_that_are_not_needed_are_warned_about(tmp_path, recwarn):
    kind = type("Mine", (GRPOTrainer,), dict.fromkeys(NOT_NEEDED, lambda self, *given: None))
    runs.trainer(tmp_path, kind=kind)
    said = [str(one.message) for one in recwarn if "never called" in str(one.message)]
    assert [name in text for name, text in zip(NOT_NEEDED, said, strict=True)] == [True] * len(NOT_NEEDED)


def test_an_assigned_method_that_is_never_called_is_refused(monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "_generate", lambda self, prompts: None, raising=False)
    with pytest.raises(TypeError, match="GRPOTrainer overrides `_generate`, which is never called"):
        GRPOTrainer("model")


def test_the_loss_may_be_overridden(tmp_path):
    class Halved(GRPOTrainer):
        def compute_loss(self, *given, **named):
            return super().compute_loss(*given, **named) / 2

    norms = []
    for kind in (GRPOTrainer, Halved):
        made = runs.trainer(tmp_path, max_steps=1, kind=kind)
        made.train()
        norms += runs.history(made, "grad_norm")
    assert norms[1] == pytest.approx(norms[0] / 2)


def test_scripts_append_values_of_their_own_to_the_window(tmp_path):
    """1 and 3 in the first step, 5 in the second."""

    class Mine(GRPOTrainer):
        def training_step(self, *given, **named):
            loss = super().training_step(*given, **named)
            if self.state.global_step:
                self._metrics["train"]["mine"].append(5.0)
            else:
                self._metrics["train"]["mine"].extend([1.0, 3.0])
            assert self._metrics["train"].setdefault("mine", []) is not None
            return loss

    made = runs.trainer(tmp_path, kind=Mine, gradient_accumulation_steps=1)
    made.train()
    assert runs.history(made, "mine") == [2.0, 5.0]


def test_values_of_the_trainer_cannot_be_changed_by_scripts(trained):
    with pytest.raises(RewardError, match="the trainer logs a metric of this name itself"):
        trained[1]["reward"].append(1.0)
    with pytest.raises(AttributeError, match="append a value"):
        trained[0]._metrics["train"]["mine"] = [1.0]


@pytest.mark.parametrize("name", ["reward_funcs", "beta", "tools", "num_generations"])
def test_views_cannot_be_assigned(trained, name):
    with pytest.raises(AttributeError, match=f"GRPOTrainer.{name} cannot be assigned"):
        setattr(trained[0], name, None)
