"""What a trainer does for callbacks, optimizers, schedulers and the best model: as `transformers.Trainer` does."""

import os

import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState

from covey import EvalSuite
from tests.support import runs, tiny

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
SAVED = {"save_strategy": "steps", "save_steps": 1}


class Diary(TrainerCallback):
    """Writes down every event, and what it was told."""

    def __init__(self):
        self.events, self.told = [], {}

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(args, state, control, **kwargs):
            assert isinstance(state, TrainerState) and isinstance(control, TrainerControl)
            assert kwargs["model"] is not None and kwargs["processing_class"] is not None
            self.events.append((name, state.global_step))
            self.told[name] = kwargs

        return note


def test_every_event_comes_in_its_turn_with_what_belongs_to_it(tmp_path):
    diary = Diary()
    trainer = runs.trainer(
        tmp_path, parts={"callbacks": [diary], "eval_dataset": tiny.rows(2)}, max_steps=1, **EVALUATED, **SAVED
    )
    trainer.train()
    trainer.predict(tiny.rows(2))
    assert [name for name, _ in diary.events] == [
        "on_init_end",
        "on_train_begin",
        "on_epoch_begin",
        "on_step_begin",
        "on_substep_end",  # the first of two micro-batches
        "on_pre_optimizer_step",
        "on_optimizer_step",
        "on_step_end",
        "on_log",
        "on_prediction_step",
        "on_log",
        "on_evaluate",
        "on_save",
        "on_epoch_end",
        "on_log",
        "on_train_end",
        "on_prediction_step",
        "on_predict",
    ]
    assert [step for name, step in diary.events if name in ("on_step_begin", "on_step_end")] == [0, 1]
    assert diary.told["on_evaluate"]["metrics"]["eval_reward"] > 0
    assert diary.told["on_predict"]["metrics"]["test_reward"] > 0
    assert "train_runtime" in diary.told["on_log"]["logs"]
    for part in ("optimizer", "lr_scheduler", "train_dataloader"):
        assert diary.told["on_step_end"][part] is not None
    assert diary.told["on_train_begin"]["model"] is trainer.model


class Asks(TrainerCallback):
    """Sets controls at the end of one step."""

    def __init__(self, step=2, **controls):
        self.step, self.controls = step, controls

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            for name, value in self.controls.items():
                setattr(control, name, value)
        return control


@pytest.mark.slow
def test_what_a_callback_asks_for_is_done(tmp_path):
    asks = Asks(should_log=True, should_evaluate=True, should_save=True, should_training_stop=True)
    trainer = runs.trainer(
        tmp_path,
        parts={"callbacks": [asks], "eval_dataset": tiny.rows(2)},
        max_steps=9,
        logging_steps=100,
        per_device_eval_batch_size=4,
    )
    trainer.train()
    assert trainer.state.global_step == 2
    assert [entry["step"] for entry in trainer.state.log_history if "reward" in entry] == [1, 2]  # 1 is always logged
    assert [entry["step"] for entry in trainer.state.log_history if "eval_reward" in entry] == [2]
    assert (tmp_path / "checkpoint-2" / "model.safetensors").exists()


def test_callbacks_come_as_classes_or_objects_and_go_again(tmp_path):
    trainer = runs.trainer(tmp_path, parts={"callbacks": [Diary]})
    (diary,) = (one for one in trainer.callback_handler.callbacks if isinstance(one, Diary))
    assert trainer.pop_callback(Diary) is diary and trainer.pop_callback(Diary) is None
    stop = Asks(step=1, should_training_stop=True)
    trainer.add_callback(stop)
    trainer.remove_callback(stop)
    trainer.add_callback(Diary)
    trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.slow
def test_a_run_ended_by_a_callback_resumes_from_its_checkpoint(tmp_path):
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise RuntimeError("out of paper")

    trainer = runs.trainer(tmp_path, parts={"callbacks": [Fails]}, max_steps=3, **SAVED)
    with pytest.raises(RuntimeError, match="out of paper"):
        trainer.train()
    again = runs.trainer(tmp_path, max_steps=3, **SAVED)
    again.train(resume_from_checkpoint=True)
    straight = runs.trainer(tmp_path / "straight", max_steps=3)
    straight.train()
    assert all(map(torch.equal, runs.weights(again), runs.weights(straight)))


def by_step(scores):
    """A reward that is `scores[step]` in evaluations (whose prompts end in a question mark)."""

    def reward(prompts, completion_ids, trainer_state, **kwargs):
        score = scores[min(trainer_state.global_step, len(scores) - 1)]
        return [score if "?" in p else len(ids) + ids[0] % 3 for p, ids in zip(prompts, completion_ids, strict=True)]

    return reward


ASKED = [{"prompt": f"{i}?"} for i in range(2)]


@pytest.mark.slow
def test_early_stopping_stops(tmp_path):
    stopper = EarlyStoppingCallback(early_stopping_patience=2)
    trainer = runs.trainer(
        tmp_path,
        parts={"callbacks": [stopper], "eval_dataset": ASKED, "reward_funcs": by_step([0, 1.0, 3.0, 2.0, 2.5, 4.0])},
        max_steps=9,
        load_best_model_at_end=True,
        metric_for_best_model="eval_reward",
        **EVALUATED,
        **SAVED,
    )
    trainer.train()
    assert trainer.state.global_step == 4  # best at 2, and twice not better
    assert trainer.state.best_metric == 3.0 and trainer.state.best_model_checkpoint.endswith("checkpoint-2")


@pytest.mark.slow
@pytest.mark.parametrize("metric", [None, "named"])
def test_the_best_model_is_kept_and_loaded(tmp_path, metric):
    named = metric == "named"
    suites = {"other": ASKED, "asked": EvalSuite(ASKED, num_generations=2, pass_at=1, success_threshold=3.0)}
    after_step_two = []

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 2:
                after_step_two.extend(parameter.detach().clone() for parameter in model.parameters())

    trainer = runs.trainer(
        tmp_path,
        parts={
            "callbacks": [Keep],
            "eval_dataset": suites if named else ASKED,
            "reward_funcs": by_step([0, 1.0, 3.0, 2.0, 2.5]),
        },
        max_steps=4,
        load_best_model_at_end=True,
        metric_for_best_model="eval_asked_pass@1" if named else metric,
        save_total_limit=2,
        **EVALUATED,
        **SAVED,
    )
    assert trainer.args.greater_is_better
    trainer.train()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    assert trainer.state.best_metric == (1.0 if named else 3.0)
    assert all(map(torch.equal, runs.weights(trainer), after_step_two))


@pytest.mark.slow
def test_an_evaluation_without_the_metric_is_not_the_best(tmp_path):
    trainer = runs.trainer(
        tmp_path,
        parts={"eval_dataset": ASKED, "reward_funcs": by_step([0, 1.0, None, 2.0])},
        max_steps=3,
        load_best_model_at_end=True,
        metric_for_best_model="reward",
        **EVALUATED,
        **SAVED,
    )
    with pytest.warns(UserWarning, match="step 2: this evaluation has no eval_reward"):
        trainer.train()
    assert [trainer.state.best_metric, trainer.state.best_global_step] == [2.0, 3]


def test_a_best_metric_that_no_evaluation_has_is_an_error(tmp_path):
    settings = {**EVALUATED, **SAVED, "metric_for_best_model": "rewrad", "load_best_model_at_end": True}
    with pytest.raises(KeyError, match="eval_rewrad"):
        runs.trainer(tmp_path, parts={"eval_dataset": ASKED}, **settings).train()


@pytest.mark.slow
def test_only_better_models_are_saved_with_save_strategy_best(tmp_path):
    trainer = runs.trainer(
        tmp_path,
        parts={"eval_dataset": ASKED, "reward_funcs": by_step([0, 1.0, 3.0, 2.0, 4.0])},
        max_steps=4,
        save_strategy="best",
        **EVALUATED,
    )
    trainer.train()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2", "checkpoint-4"}


@pytest.mark.slow
def test_an_optimizer_and_a_scheduler_of_ones_own(tmp_path):
    model = tiny.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    halved = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    trainer = runs.trainer(tmp_path, parts={"model": model, "optimizers": (optimizer, halved)}, max_steps=3)
    before = runs.weights(trainer)
    trainer.train()
    assert runs.history(trainer, "learning_rate") == [1.0, 0.5, 0.25]
    assert any(not torch.equal(a, b) for a, b in zip(before, runs.weights(trainer), strict=True))


def test_an_optimizer_by_its_class(tmp_path):
    class Counting(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            Counting.steps += 1
            return super().step(closure)

    trainer = runs.trainer(tmp_path, parts={"optimizer_cls_and_kwargs": (Counting, {"lr": 0.5, "momentum": 0.9})})
    trainer.train()
    assert Counting.steps == 2 and trainer.optimizer.param_groups[0]["momentum"] == 0.9
    assert runs.history(trainer, "learning_rate") == [0.5, 0.5]


class TwoSets(torch.optim.SGD):
    """As schedule-free optimizers: trains one set of weights and recommends another, here the first ones."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.training = True
        self.other = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def _swap(self, training):
        if training != self.training:
            for p, q in zip((p for group in self.param_groups for p in group["params"]), self.other, strict=True):
                held = p.detach().clone()
                p.data.copy_(q)
                q.copy_(held)
        self.training = training

    def train(self):
        self._swap(True)

    def eval(self):
        self._swap(False)


@pytest.mark.slow
def test_recommended_weights_are_evaluated_and_training_resumes(tmp_path):
    ends = []
    for settings in ({}, EVALUATED):
        parts = {"optimizer_cls_and_kwargs": (TwoSets, {"lr": 0.5}), "eval_dataset": tiny.rows(4)}
        trainer = runs.trainer(tmp_path, parts=parts, max_steps=3, **settings)
        before = runs.weights(trainer)
        trainer.train()
        ends.append(trainer.optimizer.optimizer.other)  # what was trained, set aside
        assert all(map(torch.equal, runs.weights(trainer), before))  # what it recommends
    evaluated = runs.history(trainer, "eval_reward")
    assert len(evaluated) == 3 and len(set(evaluated)) == 1  # always of the first weights
    assert all(map(torch.equal, *ends)) and not all(map(torch.equal, ends[0], before))


@pytest.mark.parametrize("name", ["adamw_torch_fused", "adafactor", "adagrad", "rmsprop"])
def test_optimizers_that_need_nothing_else_train(tmp_path, name):
    trainer = runs.trainer(tmp_path, optim=name, max_steps=1)
    before = runs.weights(trainer)
    trainer.train()
    after = runs.weights(trainer)
    assert all(torch.isfinite(weights).all() for weights in after)
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


SCHEDULES = {  # the rates of four steps, with learning_rate 1
    "linear": ({}, [1.0, 0.75, 0.5, 0.25]),
    "cosine_with_min_lr": (
        {"min_lr_rate": 0.5},
        [1.0, 0.92678, 0.75, 0.57322],
    ),  # a mean of 1 and (1 + cos(pi t / 4)) / 2
    "warmup_stable_decay": ({"num_decay_steps": 2, "decay_type": "linear"}, [1.0, 1.0, 1.0, 0.5]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_followed(tmp_path, name):
    options, expected = SCHEDULES[name]
    trainer = runs.trainer(
        tmp_path, lr_scheduler_type=name, lr_scheduler_kwargs=options, learning_rate=1.0, optim="sgd", max_steps=4
    )
    trainer.train()
    assert runs.history(trainer, "learning_rate") == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["warmup", "reduce_lr_on_plateau"])
def test_schedules_that_begin_low_or_wait(tmp_path, kind):
    if kind == "warmup":
        trainer = runs.trainer(
            tmp_path, lr_scheduler_type="constant_with_warmup", warmup_steps=2, learning_rate=1.0, max_steps=3
        )
        trainer.train()
        assert runs.history(trainer, "learning_rate") == [0.0, 0.5, 1.0]
        return
    trainer = runs.trainer(
        tmp_path,
        parts={"eval_dataset": ASKED, "reward_funcs": by_step([0, 1.0, 2.0, 2.0, 2.0])},
        lr_scheduler_type=kind,
        lr_scheduler_kwargs={"factor": 0.1, "patience": 0},
        learning_rate=1.0,
        max_steps=4,
        **EVALUATED,
    )
    trainer.train()  # the reward rises at first, which is no reason to slow down; after step 3 it does not
    assert runs.history(trainer, "learning_rate") == pytest.approx([1.0, 1.0, 1.0, 0.1])


@pytest.mark.slow
def test_callbacks_survive_a_checkpoint(tmp_path):
    """State of callbacks that keep one is in the checkpoint."""
    settings = {**EVALUATED, **SAVED, "metric_for_best_model": "reward", "load_best_model_at_end": True}
    parts = {"eval_dataset": ASKED, "reward_funcs": by_step([0, 3.0, 1.0, 1.0, 1.0])}
    first = runs.trainer(tmp_path, parts={**parts, "callbacks": [EarlyStoppingCallback(3)]}, max_steps=2, **settings)
    first.train()
    second = runs.trainer(
        tmp_path,
        parts={**parts, "callbacks": [EarlyStoppingCallback(3)]},
        max_steps=9,
        restore_callback_states_from_checkpoint=True,
        **settings,
    )
    second.train(resume_from_checkpoint=os.fspath(tmp_path / "checkpoint-2"))
    assert second.state.global_step == 4  # not better at 2, 3 and 4
