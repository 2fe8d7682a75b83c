"""Callbacks written for TRL read the trainer's attributes."""

import time

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from covey import GRPOTrainer
from covey.config.aliases import HOOKS, NOT_NEEDED
from covey.core.findings import CheckError
from covey.rewards import RewardError
from covey.trainer.integrations.attributes import FIELDS, VIEWS
from tests.support import runs, tiny


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
    with pytest.raises(TypeError, match=f"Mine overrides `{name}`, which is not called here"):
        mine("model")


def test_methods_that_are_not_needed_are_warned_about(tmp_path, recwarn):
    kind = type("Mine", (GRPOTrainer,), dict.fromkeys(NOT_NEEDED, lambda self, *given: None))
    runs.trainer(tmp_path, kind=kind)
    said = [str(one.message) for one in recwarn if "not called here" in str(one.message)]
    assert [name in text for name, text in zip(NOT_NEEDED, said, strict=True)] == [True] * len(NOT_NEEDED)


def test_an_assigned_method_that_is_never_called_is_refused(monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "_generate", lambda self, prompts: None, raising=False)
    with pytest.raises(TypeError, match="GRPOTrainer overrides `_generate`, which is not called here"):
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


@pytest.mark.parametrize("name", ["temperature", "tools", "num_generations", "generation_kwargs"])
def test_what_a_run_reads_once_cannot_be_assigned_but_to_its_own_value(trained, name):
    setattr(trained[0], name, getattr(trained[0], name))
    with pytest.raises(AttributeError, match=f"`trainer.{name}` cannot be changed"):
        setattr(trained[0], name, 0.25)


def test_elements_of_what_a_run_reads_once_cannot_be_assigned(trained):
    trainer = trained[0]
    for change in (
        lambda: trainer.reward_func_names.__setitem__(0, "other"),
        lambda: trainer.tools.append(len),
        lambda: trainer.chat_template_kwargs.update(enable_thinking=False),
        lambda: trainer.generation_kwargs.setdefault("stop", "."),
        lambda: setattr(trainer.generation_config, "temperature", 0.5),
        lambda: trainer.reward_funcs.append(runs.digits),
    ):
        with pytest.raises(AttributeError, match="cannot be changed"):
            change()
    assert trainer.generation_kwargs == {} and trainer.generation_config.temperature == 1.0


class Sets(TrainerCallback):
    """Does something at the beginning of the second step."""

    def __init__(self, change):
        self.change = change

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.change(self.trainer)


def changed(folder, change, **settings):
    callback = Sets(change)
    made = runs.trainer(folder, parts={"callbacks": [callback], **settings.pop("parts", {})}, **settings)
    callback.trainer = made
    made.train()
    return made


def test_the_kl_penalty_may_be_annealed(tmp_path):
    """The second step's gradient is that of a run which had the second beta from the start, but for its weights."""
    settings = {"beta": 0.1, "learning_rate": 0.0, "optim": "sgd", "num_iterations": 2, "max_steps": 2}
    made = changed(tmp_path, lambda trainer: setattr(trainer, "beta", 0.0), **settings)
    assert made.beta == 0.0 and made.args.beta == 0.1
    assert made.run.algorithm.objective.beta == 0.0
    assert len(runs.history(made, "kl")) == 1  # of the first step


def test_a_penalty_needs_its_reference_from_the_start(tmp_path):
    made = runs.trainer(tmp_path)
    with pytest.raises(AttributeError, match="the run began with beta=0"):
        made.beta = 0.1
    with pytest.raises(AttributeError, match="without an entropy bonus"):
        made.entropy_coef = 0.1
    with pytest.raises(ValueError):
        made.epsilon_low = "small"
    assert made.epsilon_low == 0.2
    made.epsilon_low = 0.1
    assert made.epsilon_low == made.epsilon == 0.1


def test_the_adaptive_coefficient_is_read_and_set(tmp_path):
    """It starts at 0.5 and falls by 0.1 after each step, as the entropy is above the target of 0."""
    settings = {"use_adaptive_entropy": True, "entropy_coef": 0.5, "entropy_coef_delta": 0.1, "entropy_target": 0.0}
    made = changed(tmp_path, lambda trainer: None, **settings)
    assert made.entropy_coef == pytest.approx(0.3)
    made.entropy_coef = 0.9
    assert made.updates.entropy.coef == 0.9


def test_weights_and_functions_of_rewards_may_change_while_it_trains(tmp_path):
    """The total of the second step is the second function's alone, and then that of the one in its place."""

    def hundred(completions, **kwargs):
        return [100.0] * len(completions)

    def drop(trainer):
        trainer.reward_weights[0] = 0.0
        trainer.reward_funcs[1] = lambda completions, **kwargs: [7.0] * len(completions)

    made = changed(tmp_path, drop, parts={"reward_funcs": [runs.longer, hundred]})
    first, second = runs.history(made, "reward")
    assert first > 100 and second == 7.0
    assert made.reward_func_names == ["longer", "hundred"]
    made.reward_weights = [1.0, 2.0]
    assert made.rewards.weights.tolist() == [1.0, 2.0]
    with pytest.raises(AttributeError, match="has 2 functions and cannot become 1"):
        made.reward_funcs = [hundred]
    with pytest.raises(CheckError):
        made.reward_funcs[0] = 3


@pytest.mark.parametrize("name", [*HOOKS, "data_collator", "compute_loss_func"])
def test_what_is_never_called_cannot_be_put_on_a_trainer(trained, name):
    with pytest.raises(AttributeError, match=f"`trainer.{name}` was assigned, and is not called here"):
        setattr(trained[0], name, lambda *given: None)


def test_a_method_of_the_model_that_is_never_called_is_warned_about(tmp_path):
    made = runs.trainer(tmp_path, max_steps=1)
    made.model.generate = lambda *given, **named: None
    with pytest.warns(UserWarning, match="`model.generate` was assigned, and is never called"):
        made.train()


def test_overrides_that_only_call_super_are_warned_about(tmp_path):
    class Times(GRPOTrainer):
        def _prepare_inputs(self, inputs):
            began = time.perf_counter()
            prepared = super()._prepare_inputs(inputs)
            self.seconds = time.perf_counter() - began
            print(len(inputs))
            return prepared

        def _get_train_sampler(self, dataset=None):
            return super()._get_train_sampler(dataset)

    with pytest.warns(UserWarning, match="overrides `_get_train_sampler`, which is not called here"):
        runs.trainer(tmp_path, kind=Times, max_steps=1).train()


class Changes(GRPOTrainer):
    def _generate(self, prompts):
        prompts = prompts[:1]
        return super()._generate(prompts)

    def _calculate_rewards(self, *given):
        rewards = super()._calculate_rewards(*given)
        rewards[0] = 1.0
        return rewards

    def _prepare_inputs(self, inputs):
        found = super()._prepare_inputs(inputs)
        self.adjust(found)
        return found

    def _get_train_sampler(self, dataset=None):
        return list(range(8))

    def _tokenize_prompts(self, prompts):
        return super()._tokenize_prompts([*prompts, "more"])

    def _log_metric(self, name, value):
        if value:
            return super()._log_metric(name, value)
        return None


@pytest.mark.parametrize("name", [name for name in vars(Changes) if name in HOOKS])
def test_overrides_that_change_something_are_refused(name):
    kind = type("Mine", (GRPOTrainer,), {name: vars(Changes)[name]})
    with pytest.raises(TypeError, match=f"overrides `{name}`"):
        kind("model")


@pytest.mark.parametrize("method", ["get_train_dataloader", "get_eval_dataloader"])
def test_dataloaders_of_ones_own_are_refused_and_those_of_super_taken(tmp_path, method):
    def own(self, *given):
        return DataLoader(tiny.rows(), batch_size=4, collate_fn=list)

    def inherited(self, *given):
        self.asked = True
        return getattr(super(GRPOTrainer, self), method)(*given)

    for function in (inherited, own):
        made = runs.trainer(
            tmp_path, kind=type("Mine", (GRPOTrainer,), {method: function}), parts={"eval_dataset": tiny.rows(4)}
        )
        run = made.train if method == "get_train_dataloader" else made.evaluate
        if function is own:
            with pytest.raises(TypeError, match=f"`{method}` was overridden"):
                run()
        else:
            run()
            assert made.asked


def test_callbacks_get_the_dataloader_of_an_evaluation(tmp_path):
    seen = []

    class Looks(TrainerCallback):
        def on_evaluate(self, args, state, control, eval_dataloader=None, **kwargs):
            seen.append(isinstance(eval_dataloader, DataLoader))

    runs.trainer(tmp_path, parts={"eval_dataset": tiny.rows(4), "callbacks": [Looks()]}).evaluate()
    assert seen == [True]


def test_a_budget_of_tokens_ends_a_run(tmp_path):
    class Budget(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(state.num_input_tokens_seen)
            control.should_training_stop = state.num_input_tokens_seen > 0

    seen = []
    made = runs.trainer(tmp_path, parts={"callbacks": [Budget()]}, max_steps=3)
    made.train()
    assert seen == runs.history(made, "num_tokens") and made.state.global_step == 1


@pytest.mark.slow
def test_an_overridden_loss_is_given_tensors_by_trls_names(tmp_path):
    batches = []

    class Bonus(GRPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            assert isinstance(inputs, dict) and "advantages" in inputs
            batches.append(inputs)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    losses = []
    for kind in (GRPOTrainer, Bonus):
        made = runs.trainer(tmp_path, max_steps=1, kind=kind, beta=0.1)
        made.train()
        losses += runs.history(made, "grad_norm")
    assert losses[0] == losses[1]
    inputs, batch = batches[0], batches[0].batch
    rows = len(batch)
    assert inputs["advantages"].shape == (rows,) and inputs["prompt_ids"].shape == inputs["prompt_mask"].shape
    assert inputs["completion_mask"].sum(1).tolist() == batch.lengths.tolist()
    assert inputs["completion_ids"][inputs["completion_mask"].bool()].tolist() == batch.token_ids.tolist()
    assert inputs["prompt_mask"][:, -1].tolist() == [1] * rows  # padded on the left
    assert "ref_per_token_logps" in inputs and "old_per_token_logps" not in inputs
    assert inputs.lengths is batch.lengths
    with pytest.raises(TypeError, match="cannot be changed"):
        inputs["advantages"] = inputs["advantages"] * 2
    with pytest.raises(KeyError, match="advantages"):
        _ = inputs["rewards"]


def test_a_reward_may_train_something_of_its_own(tmp_path):
    weight = torch.nn.Parameter(torch.ones(()))

    def learns(completion_ids, **kwargs):
        (weight * sum(map(len, completion_ids))).backward()
        return [float(len(ids)) for ids in completion_ids]

    runs.trainer(tmp_path, parts={"reward_funcs": learns}, max_steps=1).train()
    assert weight.grad > 0 and torch.is_grad_enabled()
