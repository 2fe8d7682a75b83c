"""Covey's loop beside that of Hugging Face's `Trainer`: the same events at the same places."""

import pytest
import torch
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from covey.core.records import PlannedMicroStep
from covey.observability.diagnostics import LogEnds
from tests.support import runs, tiny

EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_") and name != "on_init_end"]


class Noting(TrainerCallback):
    """Notes each event with step and epoch; `stops` are flags to set, by (event, step)."""

    def __init__(self, stops=None):
        self.seen, self.stops = [], stops or {}

    def note(self, event, state, control):
        self.seen.append((event, state.global_step, state.epoch))
        if (event, state.global_step) in self.stops:
            setattr(control, self.stops[event, state.global_step], True)


def _noting(event):
    return lambda self, args, state, control, **kwargs: self.note(event, state, control)


for event in EVENTS:
    setattr(Noting, event, _noting(event))


class Regression(nn.Module):
    """One weight; its loss is its square, times the input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x, labels=None):
        return {"loss": (self.weight * x).square().mean()}


def of_hugging_face(folder, callback, resume=None, **settings):
    """The events of a plain `Trainer` with as many micro-steps in an epoch: eight of one row."""
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=settings.pop("gradient_accumulation_steps", 2),
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="steps",
        **{"save_strategy": "no", **settings},
    )
    rows = [{"x": torch.ones(1), "labels": torch.ones(1)} for _ in range(8)]
    trainer = Trainer(Regression(), args, train_dataset=rows, eval_dataset=rows[:2], callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    return [one for one in callback.seen if one[0] != "on_prediction_step"]


def of_covey(folder, callback, resume=None, **settings):
    """The same of a trainer: eight prompts make four rollout batches of two micro-steps."""
    parts = {"callbacks": [callback], "eval_dataset": tiny.rows(2)}
    usual = {"per_device_eval_batch_size": 4, "steps_per_generation": 2, "logging_first_step": False}
    trainer = runs.trainer(folder, parts=parts, **{**usual, **settings})
    trainer.remove_callback(LogEnds)  # which logs the last step, whatever `logging_steps` says
    trainer.train(resume_from_checkpoint=resume)
    return [one for one in callback.seen if one[0] != "on_prediction_step"]


SCHEDULES = {
    "steps": {"max_steps": 3, "logging_steps": 1},
    "epochs, a log over two steps": {"num_train_epochs": 2, "max_steps": -1, "logging_steps": 2},
    "an epoch's last step is short": {"num_train_epochs": 2, "max_steps": -1, "gradient_accumulation_steps": 3},
    "evaluations and checkpoints": {
        **{"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2},
        **{"save_strategy": "steps", "save_steps": 2, "logging_steps": 1},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SCHEDULES.values(), ids=SCHEDULES)
def test_callbacks_see_the_events_of_hugging_faces_loop(tmp_path, settings):
    theirs = of_hugging_face(tmp_path / "theirs", Noting(), **{"logging_steps": 1, **settings})
    ours = of_covey(tmp_path / "ours", Noting(), **settings)
    assert ours == theirs


@pytest.mark.parametrize(
    "stops",
    [
        {("on_substep_end", 1): "should_training_stop"},
        {("on_substep_end", 1): "should_epoch_stop"},
        {("on_step_end", 2): "should_training_stop"},
        {("on_step_end", 2): "should_epoch_stop"},
        {("on_step_end", 1): "should_log", ("on_step_end", 2): "should_evaluate"},
    ],
    ids=str,
)
def test_flags_of_callbacks_act_as_in_hugging_faces_loop(tmp_path, stops):
    settings = {"num_train_epochs": 2, "max_steps": -1, "logging_steps": 100}
    theirs = of_hugging_face(tmp_path / "theirs", Noting(stops), **settings)
    assert of_covey(tmp_path / "ours", Noting(stops), **settings) == theirs


@pytest.mark.slow
@pytest.mark.parametrize("skips", [True, False])
def test_a_resumed_run_has_the_events_of_hugging_faces_loop(tmp_path, skips):
    settings = {"max_steps": 3, "logging_steps": 1, "save_strategy": "steps", "save_steps": 1}
    settings["ignore_data_skip"] = not skips
    seen = []
    for run, folder in ((of_hugging_face, tmp_path / "theirs"), (of_covey, tmp_path / "ours")):
        run(folder, Noting(), **settings)
        seen.append(run(folder, Noting(), resume=str(folder / "checkpoint-1"), **settings))
    assert seen[0] == seen[1]


def test_a_step_that_is_broken_off_leaves_no_gradient(tmp_path):
    trainer = runs.trainer(
        tmp_path,
        parts={"callbacks": [Noting({("on_substep_end", 0): "should_epoch_stop"})]},
        num_train_epochs=1,
        max_steps=-1,
    )
    before = runs.weights(trainer)
    trainer.train()
    assert trainer.state.global_step == 0 and all(one.grad is None for one in trainer.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, runs.weights(trainer), strict=True))


@pytest.mark.slow
def test_early_stopping_ends_a_run(tmp_path):
    def never_better(completions, **kwargs):
        return [float(number % 4) for number in range(len(completions))]

    parts = {"callbacks": [EarlyStoppingCallback(2)], "eval_dataset": tiny.rows(2), "reward_funcs": never_better}
    looks = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best = {"metric_for_best_model": "reward", "load_best_model_at_end": True, "per_device_eval_batch_size": 4}
    trainer = runs.trainer(tmp_path, parts=parts, max_steps=6, **looks, **best)
    trainer.train()
    assert trainer.state.global_step == 3 and trainer.state.best_global_step == 1


def test_an_overridden_step_is_given_its_micro_batches(tmp_path):
    given = []

    class Counting(runs.GRPOTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            given.append((inputs, float(loss)))
            return loss

    trainer = runs.trainer(tmp_path, kind=Counting, max_steps=1, max_tokens_per_micro_batch=20)
    trainer.train()
    steps = [inputs for inputs, _ in given]
    assert [one.number for one in steps] == [0, 1] and all(isinstance(one, PlannedMicroStep) for one in steps)
    assert [one.is_last for one in steps] == [False, True] and steps[1].earlier == len(steps[0].micro_batches)
    assert sum(len(one.micro_batches) for one in steps) == runs.history(trainer, "micro_batches/count")[0]
    assert all(len(one.stats) == len(one.micro_batches) for one in steps)
    assert runs.history(trainer, "loss") == [pytest.approx(sum(loss for _, loss in given), abs=1e-6)]
