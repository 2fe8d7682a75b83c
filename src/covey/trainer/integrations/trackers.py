"""Trackers of `report_to`: early check that they are installed, failures while they log, a workaround for SwanLab."""

import importlib.util
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from covey.config.messages import closest
from covey.observability.completions import warn_of_tracker

MODULES = {
    **{name: (name,) for name in ("wandb", "trackio", "swanlab", "mlflow", "comet_ml", "clearml")},
    **{name: (name,) for name in ("codecarbon", "dagshub", "dvclive", "neptune")},
    **{"tensorboard": ("tensorboard", "tensorboardX"), "flyte": ("flytekit",), "azure_ml": ("azureml",)},
}  # by name in `report_to`: modules of which one must be installed

GUARDED = ("on_log", "on_step_end", "on_evaluate", "on_predict", "on_save", "on_train_end")


def check_trackers(report_to: str | Sequence[str] | None) -> None:
    for name in [report_to] if isinstance(report_to, str) else report_to or ():
        if name not in INTEGRATION_TO_CALLBACK:
            raise ValueError(
                f"report_to={name!r} is no tracker; choose among: {', '.join(INTEGRATION_TO_CALLBACK)}, or 'none'."
                f"{closest(name, INTEGRATION_TO_CALLBACK)}"
            )
        modules = MODULES.get(name, ())
        if modules and not any(importlib.util.find_spec(module) for module in modules):
            raise ImportError(
                f"report_to={name!r}: the package {modules[0]} is not installed. Install it with pip install"
                f" {modules[0]}, or set report_to='none'."
            )


def guard_trackers(callbacks: Iterable[TrainerCallback]) -> None:
    """Let a run continue when a tracker fails during it, as when its server is gone; its entry is lost."""
    for callback in callbacks:
        if isinstance(callback, tuple(INTEGRATION_TO_CALLBACK.values())):
            for event in GUARDED:
                setattr(callback, event, partial(_log, getattr(callback, event)))


def _log(log: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    try:
        log(*args, **kwargs)
    except Exception as error:
        warn_of_tracker(log.__qualname__.split(".")[0], error)


class OpensSwanLab(TrainerCallback):
    """Starts SwanLab's run before transformers' callback, which expects None where SwanLab since 0.9 raises."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        import swanlab

        if not state.is_world_process_zero:
            return
        try:
            swanlab.get_run()
        except RuntimeError:
            names = [name for name in (args.run_name, state.trial_name) if name is not None]
            swanlab.init(
                project=os.environ.get("SWANLAB_PROJECT"),
                experiment_name="-".join(names) or None,
                id=os.environ.get("SWANLAB_RUN_ID"),
                resume=os.environ.get("SWANLAB_RESUME") or ("allow" if args.resume_from_checkpoint else None),
            )

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_train_begin(args, state, control)
