"""Whether the trackers that a run reports to are there, asked before anything costs time; and a run for SwanLab.

What trackers are told is transformers' business, and that of tables of completions `covey.observability.completions`'.
"""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback

from covey.config.messages import closest

MODULES = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "swanlab": ("swanlab",),
    "mlflow": ("mlflow",),
    "comet_ml": ("comet_ml",),
    "clearml": ("clearml",),
    "codecarbon": ("codecarbon",),
    "dagshub": ("dagshub",),
    "dvclive": ("dvclive",),
    "neptune": ("neptune",),
    "flyte": ("flytekit",),
    "azure_ml": ("azureml",),
}
"""Trackers by the name that `report_to` gives them: modules of which one must be there."""


def check_trackers(report_to: str | Sequence[str] | None) -> None:
    """Refuse trackers that do not exist or are not installed.

    Raises:
        ValueError: there is no such tracker.
        ImportError: its package is missing.
    """
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

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


class OpensSwanLab(TrainerCallback):
    """Begins SwanLab's run where transformers' callback would fail to.

    That callback asks for the current run and expects None where there is none; SwanLab since 0.9 raises an error.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called before the other callback."""
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
        """An evaluation logs without training."""
        self.on_train_begin(args, state, control)
