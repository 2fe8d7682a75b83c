"""Numbers that are not finite end a run before they reach the weights or a checkpoint."""

import itertools
import math

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from covey.algorithms import LOSS_TYPES, register_loss
from covey.rewards.contract import RewardError
from covey.rewards.functions import Log
from covey.trainer import checks
from covey.trainer.checks import NotFiniteError, check_model, is_finite
from covey.trainer.rollout_reports import RewardLog
from tests.support import runs, tiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_found(dtype, value):
    values = torch.ones(100, 3, dtype=dtype)
    assert is_finite(values)
    values[7, 1] = value
    assert not is_finite(values)


def test_large_finite_values_are_finite():
    assert is_finite(torch.full((4,), 3e38))  # their sum is not
    assert is_finite(torch.full((100,), 60000.0, dtype=torch.float16))


def test_weights_without_values_of_their_own_are_passed_over():
    assert is_finite(torch.empty(3, device="meta"))
    assert is_finite(torch.empty(0))
    assert is_finite(torch.ones(3, dtype=torch.uint8))


def test_the_messages_name_a_few_weights():
    assert checks.listed(list("abcde")) == "a, b, c and 2 more"
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    for parameter in model.parameters():
        parameter.data[0] = math.nan
    with pytest.raises(ValueError, match=r"NaN or infinite: 0\.weight, 0\.bias, 1\.weight and 3 more\."):
        check_model(model)


def spoil_gradient(trainer, step, value=math.nan):
    """A hook that puts a value into one weight's gradient, from the given optimizer step on."""

    def spoil(parameter):
        if trainer.state.global_step + 1 >= step:
            parameter.grad.view(-1)[0] = value

    trainer.model.model.norm.weight.register_post_accumulate_grad_hook(spoil)
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_third_such_gradient_in_a_row_ends_the_run(tmp_path, max_grad_norm, value):
    settings = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": 5}
    trainer = spoil_gradient(runs.trainer(tmp_path, max_grad_norm=max_grad_norm, **settings), 2, value)
    with pytest.raises(NotFiniteError) as caught, pytest.warns(UserWarning, match="the step is not taken") as skipped:
        trainer.train()
    message = str(caught.value)
    assert f"step 4: the norm of the gradient is {value} in 3 steps in a row, so the run ends" in message
    assert "Gradients that are not finite: model.norm.weight. All weights are still finite." in message
    assert "learning_rate=0.01, loss_type='dapo' and torch.float32" in message
    assert "checkpoint-3, is kept: resume from it" in message
    assert [str(one.message)[:8] for one in skipped if "is not taken" in str(one.message)] == ["step 2: ", "step 3: "]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    assert all(torch.isfinite(weight).all() for weight in runs.weights(trainer))
    again = spoil_gradient(runs.trainer(tmp_path, max_grad_norm=max_grad_norm, **settings), 2, value)
    with pytest.raises(NotFiniteError, match=r"step 4: .* in 3 steps in a row"):  # a resume counts on
        again.train(resume_from_checkpoint=True)
    trainer = runs.trainer(tmp_path, max_grad_norm=max_grad_norm, **settings)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 5


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adafactor"])
def test_a_skipped_step_changes_nothing_and_is_counted(tmp_path, optim):
    """With momentum and weight decay a step with a gradient of 0 would still move the weights."""
    trainer = runs.trainer(tmp_path, max_steps=4, optim=optim, weight_decay=0.1, max_grad_norm=0.0)
    seen = []

    class Watch(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            seen.append(runs.weights(trainer))

    trainer.add_callback(Watch())

    def spoil(parameter):
        if trainer.state.global_step == 1:
            parameter.grad.view(-1)[0] = math.nan

    trainer.model.model.norm.weight.register_post_accumulate_grad_hook(spoil)
    with pytest.warns(UserWarning, match=r"step 2: .*the step is not taken.*Rewards of the step: mean [\d.]+, from"):
        trainer.train()
    changed = [any(not torch.equal(a, b) for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(seen)]
    assert changed == [False, True, True]
    assert runs.history(trainer, "updates/skipped_nonfinite") == [1.0]
    assert math.isnan(runs.history(trainer, "grad_norm")[1])


@pytest.mark.slow
def test_a_loss_that_is_nan_once_is_logged_once(tmp_path):
    trainer = runs.trainer(tmp_path, max_steps=4)
    compute = trainer.compute_loss

    def spoilt(*given, **named):
        return compute(*given, **named) * (math.nan if trainer.state.global_step == 1 else 1.0)

    trainer.compute_loss = spoilt
    with pytest.warns(UserWarning, match="step 2: the norm of the gradient is nan"):
        trainer.train()
    assert [math.isnan(loss) for loss in runs.history(trainer, "loss")] == [False, True, False, False]


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    trainer = runs.trainer(tmp_path)
    spoiled = nn.Parameter(torch.full_like(trainer.model.model.norm.weight, math.nan))
    gather = trainer.gather_experience

    def gathering(*given):
        experience = gather(*given)
        trainer.model.model.norm.weight.data.copy_(spoiled)
        return experience

    trainer.gather_experience = gathering
    with pytest.raises(NotFiniteError, match=r"step 1: the loss is nan.* Weights that are not finite: model\.norm"):
        trainer.train()


def enlarge(parameter):
    parameter.grad.mul_(1e4)


@pytest.mark.parametrize("saves", [True, False])
def test_weights_that_an_optimizer_spoils_are_not_saved(tmp_path, saves):
    # The gradient is finite, but the first step of so large a learning rate is not.
    settings = {"save_strategy": "steps", "save_steps": 1} if saves else {}
    trainer = runs.trainer(tmp_path, max_steps=1, optim="sgd", learning_rate=1e38, max_grad_norm=1e30, **settings)
    for parameter in trainer.model.parameters():
        parameter.register_post_accumulate_grad_hook(enlarge)
    with pytest.raises(NotFiniteError, match=r"step 1: weights are NaN or infinite, so they are not saved: model"):
        trainer.train()
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.slow
def test_no_gradient_is_a_finite_one(tmp_path):
    trainer = runs.trainer(tmp_path, parts={"reward_funcs": lambda completions, **kwargs: [0.0] * len(completions)})
    trainer.train()
    assert runs.history(trainer, "grad_norm") == [0.0, 0.0]


@pytest.mark.slow
def test_clipping_is_transformers_own(tmp_path):
    grown = []
    for own in (True, False):
        trainer = runs.trainer(tmp_path / str(own), max_grad_norm=0.01)
        if not own:
            trainer._clip_grad_norm = lambda model, t=trainer: t.accelerator.clip_grad_norm_(model.parameters(), 0.01)
        trainer.train()
        grown.append((runs.weights(trainer), runs.history(trainer, "grad_norm")))
    (a, norms_a), (b, norms_b) = grown
    assert norms_a == norms_b and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Scaler:
    """As torch's in float16: on, and it skips steps itself."""

    def is_enabled(self):
        return True


def test_float16_may_skip_some_steps_but_not_all(tmp_path, monkeypatch):
    trainer = runs.trainer(tmp_path)
    monkeypatch.setattr(trainer.accelerator, "scaler", Scaler())
    assert trainer.finite.check_loss(math.inf, 1) == 1.0
    for _ in range(checks.MOST_SKIPPED):
        trainer.finite.check_norm(torch.tensor(math.inf))
    trainer.finite.check_norm(torch.tensor(1.0))  # counted in a row
    for _ in range(checks.MOST_SKIPPED):
        trainer.finite.check_norm(torch.tensor(math.nan))
    with pytest.raises(NotFiniteError, match="31 steps in a row"):
        trainer.finite.check_norm(torch.tensor(math.nan))


def test_a_model_that_holds_nan_is_refused(tmp_path):
    model = tiny.model()
    model.lm_head.weight.data[3, 2] = math.nan
    with pytest.raises(ValueError, match=r"NaN or infinite: .*Nothing but NaN can be trained from them"):
        runs.trainer(tmp_path, parts={"model": model})


def test_a_final_model_is_not_written_over_with_nan(tmp_path):
    trainer = runs.trainer(tmp_path)
    trainer.save_model()
    before = (tmp_path / "model.safetensors").read_bytes()
    trainer.model.lm_head.weight.data[0, 0] = math.nan
    with pytest.raises(NotFiniteError, match="so they are not saved"):
        trainer.save_model()
    assert (tmp_path / "model.safetensors").read_bytes() == before


LOSSES = {
    "averaged": (lambda x: (-x.ratio * x.advantages).mean(), r"returned shape \[\]; it must return the loss of each"),
    "a column": (lambda x: (-x.ratio * x.advantages)[:, None], r"returned shape \[\d+, 1\]"),
    "a float": (lambda x: 0.0, "returned a float"),
    "detached": (lambda x: -x.ratio.detach() * x.advantages, "without a gradient, so nothing would be trained"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_custom_loss_of_the_wrong_kind_is_refused(tmp_path, name):
    surrogate, says = LOSSES[name]
    LOSS_TYPES.pop("wrong", None)
    register_loss("wrong", surrogate)
    with pytest.raises(ValueError, match=rf"loss_type='wrong' {says}|loss_type='wrong' returned losses {says}"):
        runs.trainer(tmp_path, loss_type="wrong").train()


@pytest.mark.parametrize("name", ["reward", "event", "grad_norm", "completions/mean_length", "rewards/mine/mean"])
def test_a_reward_cannot_log_a_metric_of_the_trainers_own(tmp_path, name):
    def mine(completions, log_metric, **kwargs):
        log_metric(name, 1.0)
        return [float(len(text)) for text in completions]

    with pytest.raises(RewardError, match=rf"log_metric\('{name}', \.\.\.\): the trainer logs .* such as 'my/{name}'"):
        runs.trainer(tmp_path, parts={"reward_funcs": mine}).train()


@pytest.mark.parametrize(
    "name",
    [
        *("eval_mine", "step", "time", "config", "memory_gb", "train_runtime"),
        "",
        "mine\n",
        "a\nb",
        "a\x1b[2J",
        " a",
        5,
        None,
    ],
)
def test_names_that_a_metric_cannot_have(name):
    with pytest.raises(RewardError, match="log_metric"):
        RewardLog().log_metric(name, 1.0)


@pytest.mark.parametrize("value", [None, "1", b"1", [1], torch.ones(2), torch.ones(1, device="meta"), 10**400], ids=str)
def test_values_that_a_metric_cannot_have(value):
    with pytest.raises(RewardError, match=r"log_metric\('mine', \.\.\.\) was given .*: give a number"):
        Log(1).log_metric("mine", value)


@pytest.mark.parametrize("name", ["", "a\nb", "\x1b[2J", 5, None, "\ud800"])
def test_names_that_a_column_cannot_have(name):
    with pytest.raises(RewardError, match=r"log_extra\(.*: a name is text of printable characters, on one line"):
        Log(1).log_extra(name, [1])
