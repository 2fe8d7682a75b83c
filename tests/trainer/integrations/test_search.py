"""Hyperparameter search: real optuna trials of tiny models."""

import json

import pytest
import torch
from transformers import TrainerCallback

from covey import GRPOTrainer
from covey.trainer.distributed.collectives import CollectiveError
from covey.trainer.integrations.search import _Trials
from tests.support import runs, tiny

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.WARNING)

EVALUATED = {"per_device_eval_batch_size": 4, "num_generations_eval": 2}


class Remembers(TrainerCallback):
    """What each trial began and ended with. Copies of it, which trials get, share its list."""

    def __init__(self):
        self.trials = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        first = next(iter(model.parameters())).detach().clone()
        self.trials.append({"args": args, "weights": first, "name": state.trial_name, "params": state.trial_params})

    def on_train_end(self, args, state, control, **kwargs):
        self.trials[-1]["steps"] = state.global_step


def searched(tmp_path, space, parts=None, settings=None, **options):
    remembers = Remembers()
    parts = {
        "model": None,
        "model_init": tiny.model,
        "eval_dataset": tiny.rows(2),
        "callbacks": [remembers],
        **(parts or {}),
    }
    trainer = runs.trainer(tmp_path, parts=parts, max_steps=1, **{**EVALUATED, **(settings or {})})
    return trainer, remembers, trainer.hyperparameter_search(space, **{"n_trials": 3, **options})


def lengths(trial):
    return {"max_completion_length": trial.suggest_categorical("max_completion_length", [2, 4, 6])}


GRID = {"max_completion_length": [2, 4, 6]}


@pytest.mark.slow
@pytest.mark.parametrize("direction", [None, pytest.param("minimize", marks=pytest.mark.slow)])
def test_trials_differ_by_their_settings_alone(tmp_path, direction):
    sampler = optuna.samplers.GridSampler(GRID)
    trainer, remembers, best = searched(tmp_path, lengths, sampler=sampler, direction=direction)
    assert sorted(one["args"].max_completion_length for one in remembers.trials) == [2, 4, 6]
    assert best.hyperparameters == {"max_completion_length": 2 if direction else 6}  # longer ones are rewarded
    values = {trial.params["max_completion_length"]: trial.value for trial in best.run_summary.trials}
    assert best.objective == values[2 if direction else 6] and values[2] < values[4] < values[6]
    fresh = [one["weights"] for one in remembers.trials]
    assert all(torch.equal(fresh[0], weights) for weights in fresh)
    assert [one["name"] for one in remembers.trials] == ["run-0", "run-1", "run-2"]
    assert [path.name for path in sorted(tmp_path.glob("run-*"))] == ["run-0", "run-1", "run-2"]
    assert trainer.args.max_completion_length == 6 and trainer.state.global_step == 0  # the searching one is as it was


@pytest.mark.slow
def test_batches_follow_from_what_a_trial_changes(tmp_path):
    space = lambda trial: {"num_generations": trial.suggest_categorical("num_generations", [2, 8])}  # noqa: E731
    sampler = optuna.samplers.GridSampler({"num_generations": [2, 8]})
    model = tiny.folder(tmp_path / "model")
    _, remembers, _ = searched(tmp_path, space, {"model": model, "model_init": None}, n_trials=2, sampler=sampler)
    assert {one["args"].algebra().prompts_per_rollout_batch for one in remembers.trials} == {4, 1}


@pytest.mark.slow
def test_a_pruned_trial_ends_at_the_evaluation_that_tells(tmp_path):
    class Second(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return trial.number == 1

    settings = {"eval_strategy": "steps", "eval_steps": 1}
    rates = lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2), "max_steps": 3}  # noqa: E731
    _, remembers, best = searched(tmp_path, rates, settings=settings, pruner=Second())
    assert [one["steps"] for one in remembers.trials] == [3, 1, 3]
    states = [trial.state.name for trial in best.run_summary.trials]
    assert states == ["COMPLETE", "PRUNED", "COMPLETE"]
    assert sorted(best.run_summary.trials[0].intermediate_values) == [1, 2, 3]


def test_models_depend_on_trials_and_objectives_on_metrics(tmp_path):
    def layers(trial):
        if trial is None:
            return tiny.model()
        return tiny.model(num_hidden_layers=trial.suggest_int("layers", 1, 2))

    _, _, best = searched(
        tmp_path,
        lambda trial: {},
        {"model_init": layers},
        n_trials=1,
        compute_objective=lambda metrics: (metrics["eval_reward"], metrics["eval_completions/mean_length"]),
        direction=["maximize", "minimize"],
        hp_name=lambda trial: f"deep-{trial.number}",
    )
    (one,) = best
    assert len(one.objective) == 2 and one.hyperparameters["layers"] in (1, 2)
    assert (tmp_path / "deep-0").is_dir()


@pytest.mark.slow
def test_engines_are_closed_between_trials(tmp_path, monkeypatch):
    from covey.engines.native.engine import NativeEngine

    closed = []
    monkeypatch.setattr(NativeEngine, "close", lambda self: closed.append(self), raising=False)
    searched(tmp_path, lengths, n_trials=2)
    assert len({id(engine) for engine in closed}) == len(closed) == 2


def test_what_fails_in_a_trial_says_which_it_was(tmp_path):
    with pytest.raises(ValueError, match="num_generations=1") as caught:
        searched(tmp_path, lambda trial: {"num_generations": 1})
    assert caught.value.__notes__ == ["This was in trial 0 of the search, with {'num_generations': 1}."]
    with pytest.raises(TypeError, match="learning_rate"):
        searched(tmp_path, lambda trial: {"leraning_rate": 1})


@pytest.mark.parametrize(
    ("parts", "options", "says"),
    [
        ({"model": tiny.model(), "model_init": None}, {}, "trains a fresh model in every trial"),
        ({"eval_dataset": None}, {}, "give an `eval_dataset`"),
        ({}, {"backend": "ray"}, "works with optuna alone"),
        ({}, {"n_jobs": 2}, "one after another"),
        ({}, {"compute_objective": json.dumps}, "needs to know what is better"),
        ({"model": tiny.model()}, {}, "were both given"),
        ({"model_init": lambda: None}, {}, "returned None"),
    ],
)
def test_searches_that_cannot_work_are_refused(tmp_path, parts, options, says):
    with pytest.raises(ValueError, match=says):
        searched(tmp_path, lengths, parts, **options)


def test_a_trainer_needs_a_model_or_its_maker():
    with pytest.raises(TypeError, match="needs `model`"):
        GRPOTrainer(reward_funcs=runs.longer)


def test_another_kind_of_schedule_gets_no_old_settings(tmp_path):
    config = runs.config(tmp_path, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps", eval_steps=1)
    assert config.lr_scheduler_kwargs == {"mode": "max"}
    assert not config.with_changes(lr_scheduler_type="linear").lr_scheduler_kwargs
    falling = config.with_changes(greater_is_better=False)
    assert falling.lr_scheduler_kwargs == {"mode": "min"}


def test_a_failed_search_ends_other_processes_with_its_error(tmp_path):
    told = []

    def gather(what, doing):
        told.append(what)
        if what and what[0] == "failed":
            raise CollectiveError("the other process is gone")
        return [what]

    trainer = runs.trainer(tmp_path, parts={"model": None, "model_init": tiny.model, "eval_dataset": tiny.rows(2)})
    trainer.collectives.gather = gather
    with pytest.raises(TypeError, match="has no field `rate`"):
        trainer.hyperparameter_search(lambda trial: {"rate": 1.0}, n_trials=1)
    assert [one[0] for one in told] == ["trial", "failed"]
    trainer.collectives.gather = lambda what, doing: [told[-1]]  # what another process hears
    with pytest.raises(RuntimeError, match=r"ended in the first process: TypeError: .*has no field `rate`"):
        _Trials(trainer, str, len, ()).follow()
