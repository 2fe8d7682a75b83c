"""`covey grpo`, `covey rloo` and `covey eval`: a run file and flags in; a trained model, curves and a report out."""

import functools
import inspect
import json
import os
import shlex
import traceback
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import BitsAndBytesConfig

from covey.cli.config_file import RunConfig, idle_flags, load_run, parse_flags
from covey.cli.launch import launch_if_asked
from covey.cli.run_file import RUN_KEYS, take_config
from covey.observability.record_files import FOLDER
from covey.rewards import resolve_reward
from covey.runtime.import_path import FORMS, is_reference, resolve
from covey.runtime.quiet import without_bars
from covey.runtime.safe_text import without_secrets
from covey.runtime.user_code import report

NOT_EVALUATED = (
    *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "optim"),
    *("optim_args", "optim_target_modules", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
    *("num_train_epochs", "max_steps", "num_iterations", "shuffle_dataset", "data_seed", "resume_from_checkpoint"),
    *("save_strategy", "save_steps", "save_total_limit", "save_only_model", "load_best_model_at_end"),
    *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "dataset", "dataset_split"),
)
"""Settings that only training reads."""


def main(method: str, argv: Sequence[str]) -> int:
    path, flags = take_config(launch_if_asked(method, argv))
    train(read_run(path, flags, method))
    return 0


grpo = functools.partial(main, "grpo")
rloo = functools.partial(main, "rloo")


@without_bars()
def evaluate(argv: Sequence[str]) -> int:
    path, flags = take_config(list(argv))
    because = "an evaluation trains nothing, and its model is the one of --model"
    report(idle_flags(flags, NOT_EVALUATED, because))
    run = read_run(path, evaluated_in(flags), None, needed=("model", "eval_dataset"))
    if run.args.process_index == 0:
        print(f"evaluating {run.model}", flush=True)
    trainer = build_trainer(run, training=False)
    trainer.state.global_step = step_of(run.model)
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        assert run.args.output_dir is not None, "transformers fills it in"
        path_of_metrics = Path(run.args.output_dir) / "evaluation.json"
        path_of_metrics.write_text(json.dumps({"model": run.model, **metrics}, indent=2) + "\n")
        print(f"metrics:     {path_of_metrics}")
    return 0


def evaluated_in(flags: list[str]) -> list[str]:
    """The flags, with the model's folder as output_dir if they name one: the run file's output_dir is another run's."""
    given = parse_flags(flags)
    model = given.get("model")
    if not isinstance(model, str) or "output_dir" in given or not os.access(model, os.W_OK):
        return flags
    return [*flags, "--output_dir", model]


def step_of(model: Any) -> int:
    """Optimizer steps that a model was trained for, by its trainer_state.json; 0 if it has none."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # another library's file, or none
        return int(json.loads((Path(str(model)) / "trainer_state.json").read_text())["global_step"])
    return 0


def read_run(
    path: str | Mapping[str, Any] | None,
    flags: list[str],
    method: str | None,
    needed: Sequence[str] | None = None,
    world_size: int | None = None,
    gpu: bool = False,
) -> RunConfig:
    """The run of a file and flags, as by `load_run`; with all keys that are `needed`, by default for training."""
    try:
        run = load_run(path, flags, method=method, world_size=world_size, gpu=gpu)
    except TypeError as error:  # an unknown setting, or a value of another type
        raise ValueError(str(error)) from error
    report(run.missing(*(run.needed if needed is None else needed)))
    return run


@without_bars()
def train(run: RunConfig) -> Any:
    from covey.trainer.integrations.report import CURVES, REPORT, public_command

    if run.args.process_index == 0:
        print(f"loading {run.model}", flush=True)
    trainer = build_trainer(run)
    trainer.report.named = without_secrets({key: value for key in RUN_KEYS if (value := getattr(run, key))})
    if isinstance(run.agent, str):
        trainer.report.named["agent"] = public_command(run.agent)
    trainer.report.saves = True  # the model, in the end
    try:
        trainer.train()
    except SystemExit as error:
        if error.code:  # of a signal
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"{frame.filename}, line {frame.lineno}, called sys.exit, so the run ended without a model: raise an error"
            " there instead."
        ) from error
    trainer.save_model()
    trainer.save_state()
    if run.eval_dataset and run.args.eval_strategy == "no":
        trainer.evaluate()
        trainer.report.write()
    if trainer.is_world_process_zero():
        assert run.args.output_dir is not None, "transformers fills it in"
        for name, place in (("model", ""), ("report", REPORT), ("curves", CURVES)):
            if (path := Path(run.args.output_dir, place)).exists():
                print(f"{name + ':':<13}{path}")
        if Path(run.args.output_dir, FOLDER).exists():
            print(f"{'look at it:':<13}covey view {shlex.quote(run.args.output_dir)}")
    return trainer


def build_trainer(run: RunConfig, training: bool = True, **further: Any) -> Any:
    """The trainer of a run, with its rewards, data and adapter loaded; the training data only to train."""
    import covey
    from covey.cli.data import load_evaluations, load_rows

    trainer_class = {"grpo": covey.GRPOTrainer, "rloo": covey.RLOOTrainer}[run.method]
    renamed, functions = (run.columns, run.system_prompt), rewards(run.reward_funcs)
    parts: dict[str, Any] = {
        "model": run.model,
        "reward_funcs": functions or None,
        "args": run.args,
        "train_dataset": load_rows(run.dataset, run.dataset_split, *renamed) if run.dataset and training else None,
        **sources_of(run, dict(zip(run.reward_funcs, functions, strict=True))),
        "eval_dataset": load_evaluations(run.eval_dataset, *renamed),
        **parts_of(run),
        "peft_config": adapter(run.peft),
        "quantization_config": quantisation(run.quantization),
    }
    return trainer_class(**{**parts, **further})


def parts_of(run: RunConfig) -> dict[str, Any]:
    """Arguments of a trainer that say how rollouts are played."""
    return {
        "tools": [named(tool, "tool") for tool in run.tools] or None,
        "rollout_func": named(run.rollout_func, "rollout_func"),
        "environment_factory": environments(run.environment_factory),
        "agent": agent_of(run.agent),
        "seats": seats_of(run.seats),
        "eval_seats": seats_of(run.eval_seats),
    }


def rewards(names: Sequence[Any]) -> list[Any]:
    for name in names:
        if not isinstance(name, str):
            raise ValueError(
                f"reward_funcs holds {name!r}, a {type(name).__name__}; write names, as in `reward_funcs: "
                "[accuracy_reward]` or `['get_cosine_scaled_reward(max_len=512)']`."
            )
    return [resolve_reward(name) for name in names]


def sources_of(run: RunConfig, functions: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Arguments of a trainer about sources, for an evaluation as well: their data sets and settings.

    Names of reward functions are replaced by functions, each resolved once; `functions` are known ones by name.
    """
    from covey.cli.data import OF_THE_DATA, load_sources

    if not run.sources:
        return {}
    datasets = load_sources(run.sources, run.columns, run.system_prompt)
    known = dict(functions or {})
    settings: dict[str, dict[str, Any]] = {}
    for name, entry in run.sources.items():
        settings[name] = {key: value for key, value in entry.items() if key not in OF_THE_DATA}
        if (names := entry.get("reward_funcs")) is not None:
            texts = names if isinstance(names, list) else [names]
            known |= {text: rewards([text])[0] for text in texts if not isinstance(text, str) or text not in known}
            settings[name]["reward_funcs"] = [known[text] for text in texts]
    return {"train_dataset": datasets, "sources": settings}


def named(reference: Any, kind: str) -> Any:
    """The object of an import path: a function, a tool with a schema of its own, or an environment factory."""
    if not reference:
        return None
    if not isinstance(reference, str):
        raise ValueError(f"{kind} {reference!r} is a {type(reference).__name__}; name a function as {FORMS}.")
    return resolve(reference, kind, needs_call=kind == "rollout_func")


def environments(factory: Any, kind: str = "environment_factory") -> Any:
    """The factory, or factories by name, that a run names."""
    if isinstance(factory, dict):
        return {name: named(one, kind) for name, one in factory.items()}
    return named(factory, kind)


def agent_of(agent: Any) -> Any:
    """The command of a run's agent, or the function that it names."""
    if not isinstance(agent, str | list | None):
        raise ValueError(
            f"agent {agent!r} is a {type(agent).__name__}; write a command, or name a function as {FORMS}."
        )
    return named(agent, "agent") if isinstance(agent, str) and is_reference(agent) else agent or None


def seats_of(seats: dict[str, Any] | None) -> dict[str, Any] | None:
    """The seats that a run names: servers by their URL, functions by their place."""
    from covey.rollout.seats import FROZEN, Seat, past_steps

    def seat(name: str, given: Any) -> Any:
        if isinstance(given, dict):
            try:
                return Seat(**given)
            except TypeError as error:
                form = "{url: ..., model: ..., key: ...}"
                raise ValueError(f"the seat {name!r} is {given!r}: write {form}.") from error
        return given if given == FROZEN or past_steps(given) is not None else named(given, f"seat {name!r}:")

    return None if seats is None else {name: seat(name, given) for name, given in seats.items()}


def adapter(settings: dict[str, Any] | None) -> Any:
    if settings is None:
        return None
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError("a run with `peft` needs the peft package: pip install peft.") from error
    try:
        kinds = typing.get_type_hints(LoraConfig)
        for name, value in settings.items():
            if kinds.get(name) in (int, float) and (not isinstance(value, int | float) or value != value):
                raise TypeError(f"{name}={value!r} must be a number; write it without quotes")
        return LoraConfig(**{"task_type": "CAUSAL_LM", **settings})
    except (TypeError, ValueError) as error:
        raise ValueError(f"peft={settings!r}: {error}. See peft.LoraConfig for what it takes.") from error


def quantisation(settings: dict[str, Any] | None) -> Any:
    if settings is None:
        return None
    known = set(inspect.signature(BitsAndBytesConfig).parameters) - {"kwargs"}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ValueError(
            f"quantization={settings!r} has {', '.join(unknown)}, which transformers.BitsAndBytesConfig does not know;"
            f" it takes {', '.join(sorted(known))}."
        )
    try:
        return BitsAndBytesConfig(**settings)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"quantization={settings!r}: {error}. See transformers.BitsAndBytesConfig.") from error
