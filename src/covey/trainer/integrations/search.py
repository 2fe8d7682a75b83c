"""Hyperparameter search with optuna; every trial is a new trainer with changed settings and fresh weights."""

import copy
import inspect
import os
import statistics
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate.utils.memory import clear_device_cache
from transformers.trainer_utils import BestRun

from covey.observability.metric_docs import evaluation_sets, prefix
from covey.runtime.user_code import call_all, format_error
from covey.trainer.distributed.collectives import CollectiveError

if TYPE_CHECKING:
    from covey.trainer.trainer import OnlineTrainer

OF_OPTIMIZE = ("timeout", "n_jobs", "gc_after_trial", "catch", "callbacks", "show_progress_bar")
"""Arguments that go to `optuna.Study.optimize`; all others go to `optuna.create_study`."""

Objective = Callable[[dict[str, float]], Any]


def hyperparameter_search(
    self: "OnlineTrainer",
    hp_space: Callable[[Any], dict[str, Any]] | None = None,
    compute_objective: Objective | None = None,
    n_trials: int = 20,
    direction: str | list[str] | None = None,
    backend: Any = None,
    hp_name: Callable[[Any], str] | None = None,
    **kwargs: Any,
) -> BestRun | list[BestRun]:
    """Train with `n_trials` settings and return the best. Collective.

    Trials write into `output_dir/run-N`. Each evaluation is reported to optuna, which may end the trial
    (`pruner=...`). The last evaluation gives the objective; a trial without any is evaluated at its end.

    Args:
        hp_space: from an `optuna.Trial` to config fields and their values; learning rates from 1e-7 to 1e-5 if
            None.
        compute_objective: from the metrics of an evaluation to a number (or several); their reward if None, the
            mean over evaluation sets with names.
        n_trials: number of trials.
        direction: "maximize" or "minimize", or one for each number; "maximize" where the objective is the reward.
        backend: "optuna", the only one.
        hp_name: from a trial to the name of its folder and of its run in trackers.
        kwargs: further arguments of `optuna.create_study` and `optuna.Study.optimize`.

    Returns:
        The best run, or the best ones where there are several numbers; the study is its `run_summary`. Processes
        other than the first get the same result, without the study.

    Raises:
        ImportError: optuna is not installed.
        ValueError: nothing to evaluate, a model that cannot be had afresh, or arguments that do not suit.
    """
    name = getattr(backend, "value", backend)
    if name not in (None, "optuna"):
        raise ValueError(f"backend={name!r}: hyperparameter_search works with optuna alone; leave `backend` out.")
    if kwargs.get("n_jobs", 1) != 1:
        raise ValueError(f"n_jobs={kwargs['n_jobs']}: trials run one after another here; leave it out.")
    if compute_objective is not None and direction is None:
        raise ValueError(
            "hyperparameter_search with a compute_objective needs to know what is better: direction='maximize' (a"
            " reward) or direction='minimize' (a loss)."
        )
    _check_searchable(self)
    try:
        import optuna
    except ImportError as error:
        raise ImportError("hyperparameter_search needs optuna: pip install optuna.") from error
    caught = kwargs.get("catch", ())
    caught = tuple(caught) if isinstance(caught, Iterable) else (caught,)
    trials = _Trials(self, hp_name or (lambda one: f"run-{one.number}"), compute_objective or mean_reward, caught)
    if self.args.process_index:
        return trials.follow()
    optimize = {key: kwargs.pop(key) for key in OF_OPTIMIZE if key in kwargs}
    several = isinstance(direction, list)
    wanted = {"directions": direction} if several else {"direction": direction or "maximize"}
    study = optuna.create_study(**wanted, **kwargs)
    space = hp_space or (lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-7, 1e-5, log=True)})
    try:
        study.optimize(lambda trial: trials.lead(trial, space(trial)), n_trials, **optimize)
        best_trials: list[Any] = study.best_trials if several else [study.best_trial]
        best = [BestRun(str(one.number), one.values if several else one.value, one.params) for one in best_trials]
    except BaseException as error:
        with suppress(CollectiveError):  # the other processes may have ended already
            trials.tell("failed", format_error(error))
        raise
    trials.tell("end", best if several else best[0])
    best = [one._replace(run_summary=study) for one in best]
    return best if several else best[0]


def _check_searchable(trainer: "OnlineTrainer") -> None:
    if trainer.eval_dataset is None:
        raise ValueError("hyperparameter_search compares trials by their evaluation: give an `eval_dataset`.")
    model = trainer.made_of.get("model")
    if trainer.made_of.get("model_init") is None and not isinstance(model, str | os.PathLike):
        raise ValueError(
            "hyperparameter_search trains a fresh model in every trial, and this trainer was given one that is loaded"
            f" ({type(model).__name__}). Give its hub id or folder, or a function that makes it: model_init=..."
        )
    if any(part is not None for part in trainer.made_of.get("optimizers") or ()):
        raise ValueError(
            "hyperparameter_search cannot use `optimizers`: they belong to one model, and every trial has another."
            " Name it in the config (optim=...), or give `optimizer_cls_and_kwargs`."
        )


@dataclass(frozen=True)
class _Trials:
    """Runs trials on all processes; the first one decides and sends its decisions to the others."""

    _original: "OnlineTrainer"
    _name: Callable[[Any], str]
    _objective: Objective
    _caught: tuple[type[BaseException], ...]  # types of errors that end a trial and not the search

    def tell(self, *message: Any) -> None:
        self._original.collectives.gather(message, "begin a trial")

    def lead(self, trial: Any, changes: dict[str, Any]) -> Any:
        """Run one trial on the first process; returns its objective."""
        import optuna

        self.tell("trial", trial.number, trial.params, changes, self._name(trial))
        value, pruned = self._run(trial, changes, self._name(trial))
        if pruned:
            raise optuna.TrialPruned
        return value

    def follow(self) -> Any:
        """Run trials on the other processes until the first one has the best."""
        import optuna

        while True:
            outcome, *details = self._original.collectives.gather(None, "begin a trial")[0]
            if outcome == "failed":
                raise RuntimeError(f"the search ended in the first process: {details[0]}")
            if outcome == "end":
                return details[0]
            number, params, changes, name = details
            with suppress(*self._caught):  # as optuna does in the first process
                self._run(optuna.trial.FixedTrial(params, number), changes, name)

    def _run(self, trial: Any, changes: dict[str, Any], name: str) -> tuple[Any, bool]:
        """The objective of a trial, and True if it was pruned."""
        original = self._original
        callbacks = original.callback_handler.callbacks  # copies of the user's, since some count
        given = [copy.copy(callback) for callback in callbacks if id(callback) not in original.own_callbacks]
        parts = {**original.made_of, "callbacks": given}
        if (make := parts.get("model_init")) is not None:
            parts["model_init"] = lambda: make_model(make, trial)
        try:
            folder = os.path.join(original.args.output_dir or ".", name)
            parts["args"] = original.args.with_changes(**{"output_dir": folder, **changes})
            try:
                return self._with_trainer(parts, trial)
            finally:
                clear_device_cache(garbage_collection=True)  # weights and optimizer of the trainer
        except BaseException as error:
            error.add_note(f"This was in trial {trial.number} of the search, with {changes}.")
            raise

    def _with_trainer(self, parts: dict[str, Any], trial: Any) -> tuple[Any, bool]:
        trainer: Any = type(self._original)(**parts)
        try:
            return self._trained(trainer, trial)
        finally:
            close = getattr(trainer.collector.engine, "close", None)
            own = [] if close is None or self._original.made_of.get("engine") is not None else [close]
            call_all(*own, trainer.accelerator.free_memory)

    def _trained(self, trainer: Any, trial: Any) -> tuple[Any, bool]:
        value, pruned = None, False

        def on_evaluated(metrics: dict[str, float], step: int) -> bool:
            nonlocal value, pruned
            value, ended = self._objective(metrics), False
            if trainer.is_world_process_zero() and not isinstance(value, list | tuple):  # one number alone is pruned
                trial.report(value, step)
                ended = bool(trial.should_prune())
            pruned = trainer.collectives.gather(ended, "decide on the trial")[0]
            return pruned

        trainer.on_evaluated = on_evaluated
        trainer.hp_name = lambda _: os.path.basename(trainer.args.output_dir)
        trainer.train(trial=trial)
        return self._objective(trainer.evaluate()) if value is None else value, pruned


def make_model(model_init: Callable[..., Any], trial: Any = None) -> Any:
    """The model of a `model_init`, which may take the trial."""
    parameters = list(inspect.signature(model_init).parameters.values())
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [one.name for one in parameters if one.default is one.empty and one.kind not in several]
    if len(required) > 1:
        raise ValueError(
            f"`model_init` needs {', '.join(required)}; it is called with the trial of a search, or with nothing."
        )
    model = model_init(trial) if required or [one.name for one in parameters[:1]] == ["trial"] else model_init()
    if model is None:
        raise ValueError("`model_init` returned None; it must return a model, its hub id or its folder.")
    return model


def mean_reward(metrics: dict[str, float]) -> float:
    names = (f"{prefix(name)}reward" for name in evaluation_sets(metrics))
    rewards = [metrics[name] for name in names if name in metrics]
    if not rewards:
        raise ValueError("no completion of the evaluation had a reward, so trials cannot be compared by it.")
    return statistics.fmean(rewards)
