"""Parts of a run by names with which another process can make them again: a run file's, or those of its objects."""

import inspect
import os
from typing import Any

from covey.runtime.user_code import unwrap_partial
from covey.trainer.integrations.attributes import listed


def named_parts(trainer: Any) -> dict[str, Any]:
    """Keys of a run file: model, rewards, tools and adapter; None for what has no name."""
    method = type(trainer.args).method
    if trainer.report.named:
        return {"method": method, **trainer.report.named}
    made, config = trainer.made_of, trainer.policy.config
    adapter = made.get("peft_config")
    return {
        "method": method,
        "model": str(getattr(config, "_name_or_path", "")) or None,
        "tokenizer": str(getattr(made.get("processing_class"), "name_or_path", "")) or None,
        "reward_funcs": [name_of(one) for one in listed(made.get("reward_funcs"))],
        "tools": [name_of(one) for one in made.get("tools") or ()],
        "peft": None if adapter is None else _plain(adapter.to_dict()),
        "rollout_func": name_of(made.get("rollout_func")),
        "environment_factory": name_of(made.get("environment_factory")),
    }


def name_of(part: Any) -> str | None:
    """`path/to/file.py:name` of a function or class at the top level of a file; a path or an id as it is."""
    if part is None or isinstance(part, str | os.PathLike):
        return None if part is None else os.fspath(part)
    name = getattr(part, "__qualname__", "")
    try:
        file = inspect.getsourcefile(unwrap_partial(part))
    except TypeError:
        return None
    return f"{os.path.abspath(file)}:{name}" if file and name.isidentifier() and unwrap_partial(part) is part else None


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    kept = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora", "bias", "modules_to_save")
    values = {name: settings[name] for name in kept if settings.get(name) is not None}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}
