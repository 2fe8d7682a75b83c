"""Fields that GRPO and RLOO share: each is declared, typed, limited and described (in the text below it) once."""

import ast
import dataclasses
import inspect
import math
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from accelerate.utils import DynamoBackend
from transformers.training_args import trainer_log_levels

from covey.config.messages import closest
from covey.core.findings import Finding

if TYPE_CHECKING:
    from covey.config.base import OnlineConfig

Args: TypeAlias = "OnlineConfig"  # argument of a rule


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of a number, or its allowed words; `advice` ends the error message."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    finite: bool = False
    choices: tuple[str, ...] = ()
    advice: str = ""

    def check(self, name: str, value: Any) -> Iterator[Finding]:
        if self.choices:
            if value not in self.choices:
                known = f"{name}={value!r} is not known; choose one of: {', '.join(self.choices)}."
                yield Finding.error("setting-word", f"{known}{closest(value, self.choices)}", self.advice)
            return
        above = (self.ge is None or value >= self.ge) and (self.gt is None or value > self.gt)
        below = (self.le is None or value <= self.le) and not (self.finite and value == math.inf)
        if not (above and below):  # NaN is never inside
            evidence = f"{name}={value!r} is out of range: it must be {self}."
            yield Finding.error("setting-range", evidence, self.advice)

    def __str__(self) -> str:
        if self.ge is not None and self.le is not None:
            return f"between {self.ge} and {self.le}"
        lower = f"{self.ge} or more" if self.ge is not None else f"above {self.gt}"
        if self.le is not None:
            return f"{lower} and at most {self.le}"
        return f"{lower}, and finite" if self.finite else lower


LIMITS = {  # by the name of the field; transformers declares these
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), Limits(ge=1)),
    "gradient_accumulation_steps": Limits(ge=1),
    **dict.fromkeys(("seed", "data_seed"), Limits(ge=0, le=2**32 - 1, advice="Seeds are 32-bit numbers.")),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), Limits(ge=0, le=1 - 1e-9, advice="0.9 and 0.999 are usual.")),
    "adam_epsilon": Limits(ge=0, finite=True, advice="1e-8 is usual."),
    "num_train_epochs": Limits(finite=True, ge=-1, advice="max_steps ends a run earlier."),
    "max_steps": Limits(ge=-1, advice="-1 trains for num_train_epochs."),
    "warmup_steps": Limits(ge=0, finite=True, advice="Below 1 it is a share of all updates."),
    **dict.fromkeys(("logging_steps", "eval_steps"), Limits(gt=0, finite=True)),
    "max_grad_norm": Limits(ge=0, advice="0 leaves gradients as they are; 1.0 is usual."),
    "weight_decay": Limits(ge=0, finite=True, advice="Below 0 weights would grow."),
    "save_steps": Limits(gt=0, finite=True, advice="save_strategy='no' saves nothing."),
    "save_total_limit": Limits(ge=1, advice="Leave it unset to keep all checkpoints."),
    **dict.fromkeys(("log_level", "log_level_replica"), Limits(choices=tuple(trainer_log_levels))),
    "dataloader_multiprocessing_context": Limits(choices=("fork", "spawn", "forkserver")),
    "torch_compile_backend": Limits(choices=tuple(backend.value.lower() for backend in DynamoBackend)),
    "torch_compile_mode": Limits(choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")),
    "eval_delay": Limits(ge=0, finite=True),
    "dataloader_num_workers": Limits(ge=0),
    "ddp_bucket_cap_mb": Limits(ge=1),
    "ddp_timeout": Limits(gt=0, le=10**9, advice="It is in seconds; 1800 is the default."),
}
HELP: dict[str, str] = {}  # by the name of the field

DICT_FIELDS = (
    "model_init_kwargs",
    "teacher_model_init_kwargs",
    "teacher_schedule",
    "supervised_roles",
    "demonstrations_schedule",
    "generation_kwargs",
    "chat_template_kwargs",
    "gates",
    "transformers_continuous_batching_config",
    "vllm_engine_kwargs",
    "sglang_server_args",
)  # those that accept JSON
FILE_FIELDS = ("accelerator_config", "deepspeed", "fsdp_config")  # those that accept the path of a JSON file, too
SAMPLING_FIELDS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    **dict.fromkeys(("max_new_tokens", "max_tokens"), "max_completion_length"),
}
"""Keys of `generation_kwargs` that set a field."""

SCHEDULE = ("warmup", "peak", "decay", "valley")
"""Keys of a weight's schedule: steps from 0 to the peak, the peak, steps to the valley, the valley."""


def none_means_unset(name: str, default: Any) -> bool:
    """True for numbers and words of sampling and of engines that scripts write out as None, meaning the default."""
    of_engine = name.startswith(("vllm_", "sglang_")) and not name.startswith("vllm_importance_")
    is_word = default is not None and not isinstance(default, bool)  # 1 is equal to True
    return name in ("top_p", "top_k", "repetition_penalty") or (of_engine and is_word)


def limited(default: Any, **limits: Any) -> Any:
    """A dataclass field with the `Limits` of these keywords."""
    return dataclasses.field(default=default, metadata={"limits": Limits(**limits)})


def check_schedule(name: str, given: Any, most: float = math.inf) -> Iterator[Finding]:
    """Error of a schedule with missing or unknown keys, steps that are no whole numbers, or weights outside [0,
    most]."""
    if given is None:
        return
    whole = isinstance(given, dict) and {*given} == {*SCHEDULE}
    if whole and all(isinstance(value, int | float) and 0 <= value < math.inf for value in given.values()):
        steps, weights = (given["warmup"], given["decay"]), (given["peak"], given["valley"])
        if max(weights) <= most and not any(count % 1 for count in steps):
            return
    allowed = "0 or more" if most == math.inf else f"0 to {most:g}"
    yield Finding.error(
        "setting-format",
        f"{name}={given!r} must have the keys {', '.join(SCHEDULE)}: two whole numbers of steps and two weights of"
        f" {allowed}.",
        f"Write {name}={{'warmup': 10, 'peak': 0.9, 'decay': 100, 'valley': 0.1}}.",
    )


def document(config: type) -> None:
    """Add the fields with their descriptions to the documentation of a config class, as `help()` shows it."""
    fields = [field for field in dataclasses.fields(config) if field.name in HELP]
    default = {field.name: "" if field.default is dataclasses.MISSING else f" ({field.default!r})" for field in fields}
    rows = [f"    {field.name}{default[field.name]}: {HELP[field.name].replace('%%', '%')}" for field in fields]
    rest = "and every field of `transformers.TrainingArguments`."
    config.__doc__ = "\n".join([inspect.getdoc(config) or "", "", "Args:", *rows, f"    {rest}"])


def describe_fields(module: str) -> None:
    """Read the limits of the fields declared in a module, and the text below each of them as its help.

    The metadata of a field holds nothing else, because `HfArgumentParser` hands all of it to argparse, which treats
    `%` specially: write `%%`. A program without source files, as some packagers make, has no help.
    """
    with suppress(OSError):
        for node in ast.parse(inspect.getsource(sys.modules[module])).body:
            for pair in pairwise(node.body if isinstance(node, ast.ClassDef) else ()):
                match pair:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        HELP[name] = " ".join(text.split())
    for group in vars(sys.modules[module]).values():
        if getattr(group, "__module__", None) == module and dataclasses.is_dataclass(group):
            for field in dataclasses.fields(group):
                if limits := field.metadata.get("limits"):
                    LIMITS[field.name] = limits
                if limits or field.name in HELP:
                    field.metadata = MappingProxyType({"help": HELP.get(field.name, "")})
