"""Effects of settings: the parts of a trainer as text, and the outcome of a short run."""

import enum
import functools
import re
import types
import warnings
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments

from tests.support import runs, tiny

OPENED = ("covey", "tests", "accelerate", "torch.optim", "torch.utils.data", "transformers.trainer_")
CONFIGS = ("args", "made_of", "dataloader_config", "own_callbacks")  # values as given, and ids of objects
PLAIN = (int, float, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
UNSTEADY = re.compile(r"time|runtime|second|phase/|overlap/|tok|memory|cpu")  # metrics that depend on the clock


def parts(value: Any, seen: set[int] | None = None) -> Any:
    """An object and the objects below it as dictionaries, lists and texts, without configs and ids."""
    seen = set() if seen is None else seen
    if isinstance(value, PLAIN):
        return repr(value)
    if id(value) in seen or isinstance(value, TrainingArguments):
        return "..."
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype} {value.double().sum().item()}"
    if isinstance(value, dict):
        return {str(key) if isinstance(key, str | int) else "": parts(one, seen) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [parts(one, seen) for one in value]
    if isinstance(value, functools.partial):
        return parts([value.func, value.args, value.keywords], seen)
    if isinstance(value, types.MethodType):
        return [value.__func__.__qualname__, parts(value.__self__, seen)]
    if isinstance(value, types.FunctionType):
        return [
            value.__qualname__,
            [parts(cell.cell_contents, seen) for cell in value.__closure__ or () if filled(cell)],
        ]
    if isinstance(value, type) or not type(value).__module__.startswith(OPENED):
        return getattr(value, "__qualname__", type(value).__qualname__)
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    held = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
    own = {name: parts(one, seen) for name, one in held.items() if name not in CONFIGS}
    return {"": type(value).__qualname__, **own}


def filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # of a name that is not set yet
        return False


def differences(one: Any, other: Any, path: str = "") -> set[str]:
    """Paths at which two results of `parts` differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        names = one.keys() | other.keys()
        return set().union(*(differences(one.get(name), other.get(name), f"{path}.{name}") for name in names))
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return set().union(*(differences(*pair, f"{path}[{number}]") for number, pair in pairs))
    return set() if one == other else {path}


def built(folder: Any, method: str = "grpo", given: dict[str, Any] | None = None, **settings: Any) -> Any:
    """The parts of a trainer that is made, and of the optimizer and schedule that it would begin with."""
    made = runs.trainer(folder, method, parts=given, **settings)
    made.create_optimizer_and_scheduler(4)
    return parts(vars(made))


def said(name: str, make: Any) -> tuple[Any, bool]:
    """Result of `make`, and True if a warning or the error names the field."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            made = make()
        except (ValueError, ImportError) as error:
            return None, name in str(error)
    return made, any(name in str(warning.message) for warning in caught)


class Watch(TrainerCallback):
    """Notes which events came at which step, and the state of the model during one."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        layers = [bool(getattr(module, "gradient_checkpointing", False)) for module in model.modules()]
        hooks = sum(len(module._forward_hooks) for module in model.modules())
        self.seen.append((state.global_step, sum(layers), hooks, torch.are_deterministic_algorithms_enabled()))

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append((state.global_step, "log"))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append((state.global_step, "evaluate"))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append((state.global_step, "save"))


def outcome(folder: Any, method: str = "grpo", given: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Results of a run: prompts in the order of their scores, weights, metrics, events and files."""
    prompts: list[Any] = []
    watch = Watch()

    def score(prompts_: Any, completion_ids: Any) -> list[float]:
        prompts.append([str(prompt) for prompt in prompts_])
        return runs.longer(completion_ids=completion_ids)

    def longer(prompts: Any, completion_ids: Any, **kwargs: Any) -> list[float]:
        return score(prompts, completion_ids)

    resume = settings.pop("resume", None)
    arguments = {"reward_funcs": longer, **(given or {}), "callbacks": [watch, *(given or {}).get("callbacks", [])]}
    run = runs.trainer(folder, method, parts=arguments, **settings)
    result = run.train(resume_from_checkpoint=resume)
    history = [
        {name: value for name, value in entry.items() if not UNSTEADY.search(name)} for entry in run.state.log_history
    ]
    return {
        "prompts": prompts,
        "weights": [float(weight.double().sum()) for weight in run.model.parameters()],
        "history": [{name: repr(value) for name, value in entry.items()} for entry in history],
        "metrics": sorted(result.metrics),
        "events": watch.seen,
        "best": (run.state.best_metric, run.state.best_global_step),
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()),
    }


def with_dropout() -> Any:
    return tiny.model(attention_dropout=0.2)
