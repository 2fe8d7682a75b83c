"""Module paths of version 0.1 that user code and old checkpoints may name: imported with a DeprecationWarning.

`training_args.bin` of a checkpoint pickles the path of the config's module, so it is one of them. Remove this module,
and its line in `covey/__init__.py`, with the release after next.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "covey.core.kl": "covey.core.losses",
    "covey.core.metrics": "covey.core.stats",
    "covey.core.ragged": "covey.core.batch",
    "covey.core.ratios": "covey.core.losses",
    "covey.core.rollout": "covey.core.records",
    "covey.core.surrogates": "covey.core.losses",
    "covey.core.weighting": "covey.core.losses",
    "covey.core.weights": "covey.core.engine",
    "covey.rewards.batch": "covey.rewards.functions",
    "covey.rewards.char_offsets": "covey.rewards.steps",
    "covey.rewards.decorators": "covey.rewards.contract",
    "covey.rewards.errors": "covey.rewards.contract",
    "covey.rewards.repetition": "covey.rewards.length",
    "covey.rewards.streaming": "covey.rewards.call",
    "covey.rollout.agent": "covey.rollout.tool_agent",
    "covey.rollout.engine": "covey.core.engine",
    "covey.rollout.engines": "covey.engines",
    "covey.rollout.engines.native": "covey.engines.native.engine",
    "covey.rollout.engines.remote": "covey.engines.servers",
    "covey.rollout.engines.scripted": "covey.engines.scripted",
    "covey.rollout.functions": "covey.rollout.user_functions",
    "covey.rollout.tools.call_spans": "covey.rollout.tools.calls",
    "covey.rollout.tools.parsers_xml": "covey.rollout.tools.parsers",
    "covey.rollout.tools.result_text": "covey.rollout.tools.toolbox",
    "covey.rollout.tools.schema": "covey.rollout.tools.tool",
    "covey.rollout.tools.template": "covey.rollout.tools.turn_template",
    "covey.rollout.validation": "covey.rollout.user_functions",
    "covey.trainers.config.aliases": "covey.config.aliases",
    "covey.trainers.config.base": "covey.config.base",
    "covey.trainers.dataset": "covey.data.validation",
    "covey.trainers.grpo_config": "covey.config.grpo",
    "covey.trainers.grpo_trainer": "covey.trainer.trainers",
    "covey.trainers.online_trainer": "covey.trainer.trainer",
    "covey.trainers.rloo_config": "covey.config.rloo",
    "covey.trainers.rloo_trainer": "covey.trainer.trainers",
    "covey.trainers.suites": "covey.trainer.evaluation.suites",
}
"""Old path -> new path."""

FOLDERS = ("covey.trainers", "covey.trainers.config")
"""Packages that are gone and stand in front of a moved module."""


class MovedModules(MetaPathFinder, Loader):
    """Import hook that answers for the paths of `MOVED` with the module at the new path."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Spec of a moved module; None for every other name."""
        return ModuleSpec(name, self, is_package=True) if name in MOVED or name in FOLDERS else None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module at the new path in the place of `module`, with a warning."""
        old = module.__name__
        if new := MOVED.get(old):
            warnings.warn(
                f"{old} moved to {new}: import it from there. The old path works for one more release.",
                DeprecationWarning,
                stacklevel=2,
            )
            sys.modules[old] = import_module(new)


sys.meta_path.insert(0, MovedModules())  # first, or a package at the new path would be imported again under the old one
