"""`OnlineConfig`: the settings that GRPO and RLOO share, on top of `transformers.TrainingArguments`."""

import copy
import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar, Self

from transformers import TrainingArguments

from covey.algorithms import ADVANTAGES, LOSS_TYPES, register_advantages
from covey.algorithms.registered import register_loss_of_file
from covey.config import engines, objective, rules, sampling, supervision, teachers, training
from covey.config.algebra import PLANNED, BatchAlgebra, planning_for, steps_of
from covey.config.aliases import AcceptsAliases, OldNames
from covey.config.fields import DICT_FIELDS, FILE_FIELDS, SAMPLING_FIELDS, none_means_unset
from covey.config.hardware import (
    announce_meeting,
    by_deepspeed,
    has_accelerator,
    launched,
    meet_on_cpu,
    multiplies_bf16,
    require_deepspeed,
)
from covey.config.messages import default_of, is_set
from covey.config.optimizers import OWN_OPTIMIZERS
from covey.config.teacher_sources import is_server
from covey.core.findings import CheckError, Finding
from covey.runtime.files import unique
from covey.runtime.import_path import is_reference, resolve
from covey.runtime.safe_text import is_secret, without_secrets
from covey.runtime.user_code import report

OLD = frozenset(field.name for field in dataclasses.fields(OldNames))


class HidesSecrets(TrainingArguments):
    """Training arguments that are printed, logged and pickled without secrets."""

    def to_dict(self) -> dict[str, Any]:
        """Every field, as trackers and logs show it: with placeholders for keys and tokens."""
        values = {name: value for name, value in super().to_dict().items() if name not in OLD}
        return self._public(values, lambda name: f"<{name.upper()}>")

    def __str__(self) -> str:
        shown = (f"{name}={value!r}" for name, value in sorted(self.to_dict().items()))
        return f"{type(self).__name__}({', '.join(shown)})"

    def __getstate__(self) -> dict[str, Any]:
        return self._public(self.__dict__, lambda name: None)

    @staticmethod
    def _public(values: Mapping[str, Any], placeholder: Callable[[str], Any]) -> dict[str, Any]:
        return {
            name: placeholder(name) if isinstance(value, str) and is_secret(name) else without_secrets(value)
            for name, value in values.items()
        }

    def __copy__(self) -> Self:  # copies within the process keep the secrets, which `__getstate__` would drop
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = copy.copy(self)
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied


@dataclasses.dataclass(repr=False)
class OnlineConfig(  # type: ignore[misc]  # bf16 may be unset here
    OldNames,
    training.TrainingDefaults,
    training.ModelFields,
    training.BatchFields,
    sampling.GenerationFields,
    sampling.SpeculationFields,
    sampling.PromptFields,
    sampling.AgentFields,
    objective.RewardFields,
    objective.LossFields,
    objective.KLFields,
    objective.EntropyFields,
    teachers.TeacherFields,
    supervision.SupervisionFields,
    engines.MismatchFields,
    engines.VllmFields,
    engines.SglangFields,
    engines.ContinuousBatchingFields,
    training.LoggingFields,
    HidesSecrets,
    metaclass=AcceptsAliases,
):
    """Fields common to `GRPOConfig` and `RLOOConfig`; `-h` of the command line describes each.

    After construction `generation_batch_size` and `steps_per_generation` are both filled in, `bf16` is a bool,
    `scale_rewards` a word and fields that accept JSON hold dicts.

    Raises:
        TypeError: an unknown keyword; the message proposes the closest field.
        CheckError (a ValueError): a value or combination of values that cannot work.
    """

    method: ClassVar[str] = ""
    """`grpo` or `rloo`."""

    def __post_init__(self) -> None:
        self.planned = PLANNED.get()
        self._note_given()
        fill_unset(self)
        self._normalise()
        report(rules.check_fields(self))  # before transformers, whose errors seldom name a field
        self._settle_names()
        self._settle_hardware()
        self._settle_best_metric()
        full_eval, self.bf16_full_eval = self.bf16_full_eval, False  # refused without bfloat16, but ignored here
        optim = self.optim
        if optim in OWN_OPTIMIZERS:
            self.optim = "adamw_torch"  # transformers refuses names that it does not know
        tf32 = self.tf32
        if not has_accelerator():
            self.tf32 = None  # refused on a CPU, where it has no effect and which a run file may have been moved to
        super().__post_init__()
        self.bf16_full_eval, self.tf32 = full_eval, tf32
        if optim in OWN_OPTIMIZERS:
            self.optim = optim
        self._settle_direction()
        report(rules.check_batch_settings(self))
        self._settle_batches()
        report(rules.check_rules(self))
        self.use_liger_kernel = False  # transformers would replace layers
        self._settled = dict(vars(self))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__repr__" not in vars(cls):
            cls.__repr__ = cls.__repr__  # type: ignore[method-assign]  # else that of a dataclass, which shows keys

    def __repr__(self) -> str:
        """The fields that were given, or assigned since; `str()` has every field."""
        names = [name for name in (field.name for field in dataclasses.fields(self)) if name not in OLD]
        names = [name for name in names if is_set(self, name)]
        shown = self._public({name: getattr(self, name) for name in names}, lambda name: f"<{name.upper()}>")
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def given(self) -> frozenset[str]:
        """Names of the fields that were set to another value than their default, at construction or since."""
        return frozenset(self.__dict__.get("_given", set())).union(filter(self.was_given, FIELDS))

    def was_given(self, name: str) -> bool:
        """True for the name of one of the fields `given`."""
        values = self.__dict__
        settled = values.get("_settled", {})
        assigned = name in FIELDS and name in settled and values[name] is not settled[name]
        return assigned or name in values.get("_given", ())

    def _note_given(self) -> None:
        names = [field.name for field in dataclasses.fields(self) if field.name not in OLD]
        self._given = {name for name in names if getattr(self, name) != default_of(type(self), name)}

    @property
    def resolved_epsilon_high(self) -> float:
        """Upper clipping range in force: `epsilon_high`, or the default of the loss."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return 5.0 if self.loss_type == "cispo" else self.epsilon  # lets gradients through, as in MiniMax-M1

    @property
    def resolved_data_seed(self) -> int:
        """Seed of the order of prompts: `data_seed`, or `seed`."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def teachers(self) -> dict[str, str]:
        """Source of each teacher (folder, hub id, URL or word of `OF_THE_POLICY`) by name; a single teacher is named
        ""."""
        if self.teacher is None:
            return {}
        return {"": self.teacher} if isinstance(self.teacher, str) else dict(self.teacher)

    @property
    def vllm_urls(self) -> list[str]:
        """URLs of the vLLM servers of a run in server mode. `server_pool_file` has precedence."""
        if self.vllm_server_base_url:
            return self.vllm_server_base_url.split(",")
        host = "127.0.0.1" if self.vllm_server_host in ("0.0.0.0", "::") else self.vllm_server_host
        return [f"http://{f'[{host}]' if ':' in host else host}:{self.vllm_server_port}"]

    @property
    def sglang_urls(self) -> list[str]:
        """URLs of SGLang servers that run already; none if the run starts one. `server_pool_file` has precedence."""
        if self.sglang_base_url:
            return self.sglang_base_url.split(",")
        return [] if self.sglang_device else ["http://127.0.0.1:30000"]

    @property
    def exports_completions(self) -> bool:
        """True if completions are also written to files as TRL writes them, for readers of these or for the hub."""
        return self.export_completions or self.log_completions_hub_repo is not None

    @property
    def samples_elsewhere(self) -> bool:
        """True if another engine than the built-in one samples; async rollouts require one."""
        return bool(self.use_vllm or self.use_sglang or self.max_staleness > 0)

    @property
    def rounds_engine(self) -> bool:
        """True if the built-in engine samples with weights that are rounded to `engine_dtype`; with `auto` it may."""
        same = self.engine_dtype == "bfloat16" and self.bf16  # autocast rounds already
        return self.engine_dtype is not None and not self.samples_elsewhere and not same

    @property
    def penalises_reward(self) -> bool:
        """True if the KL penalty is subtracted from the reward."""
        return bool(self.beta) and (self.kl_in_reward or self.method == "rloo")

    @property
    def corrects_mismatch(self) -> bool:
        """True if the loss is weighted by trainer probability over engine probability."""
        wanted = self.samples_elsewhere or self.correct_built_in_engine or self.rounds_engine
        return self.vllm_importance_sampling_correction and wanted

    @property
    def rejects_completions(self) -> bool:
        """True if completions are left out whose trainer-to-engine ratio is too far from 1 in the geometric mean."""
        return self.geometric_mask_min is not None or self.geometric_mask_max is not None

    @property
    def resolved_mismatch_mode(self) -> str:
        """Mode of the correction in force: by token for vespo, which multiplies the ratios of a sequence itself."""
        mode = self.vllm_importance_sampling_mode
        return mode.replace("sequence", "token") if self.loss_type == "vespo" else mode

    def frozen_parts(self) -> list[str]:
        """Parts of the policy that keep their weights, of "vit", "aligner" and "llm"; CheckError if all would."""
        chosen = {"vit": self.freeze_vit, "aligner": self.freeze_aligner, "llm": self.freeze_llm}
        if all(chosen.values()):
            evidence = "freeze_vit, freeze_aligner and freeze_llm are all True, so nothing would be trained:"
            raise CheckError.of("nothing-trained", evidence, "leave one at False.")
        return [part for part, frozen in chosen.items() if frozen]

    def algebra(self, world_size: int | None = None) -> BatchAlgebra:
        """Division of this run's batches for `world_size` processes; by default those that run or are planned for."""
        processes = world_size or self.planned.world_size or self.world_size
        assert self.num_generations is not None, "checked by a rule"
        steps, total = self.steps_per_generation, self.generation_batch_size
        if self._generation_batch_size_given and total is not None:
            steps = steps_of(total, self.per_device_train_batch_size, processes, self.num_generations)
        assert steps is not None, "filled in at construction"
        sizes = {field.name: getattr(self, field.name) for field in dataclasses.fields(BatchAlgebra)}
        algebra = BatchAlgebra(**{**sizes, "steps_per_generation": steps, "world_size": processes})
        report(algebra.check(self._generation_batch_size_given))
        return algebra

    def with_changes(self, **changes: Any) -> "OnlineConfig":
        """A copy of this config with other values, from which dependent fields are derived again."""
        filled_in = {
            "generation_batch_size": self.generation_batch_size if self._generation_batch_size_given else None,
            "steps_per_generation": self._steps_given,
            "lr_scheduler_kwargs": self._scheduler_kwargs_given,
        }
        fields = [field.name for field in dataclasses.fields(self) if field.init and field.name not in OLD]
        values = {name: getattr(self, name) for name in fields}
        with planning_for(self.planned.world_size, self.planned.gpu):
            return type(self)(**{**values, **filled_in, **changes})

    def _normalise(self) -> None:
        for name, known, register in (
            ("loss_type", LOSS_TYPES, register_loss_of_file),
            ("advantages", ADVANTAGES, register_advantages),
        ):
            value = getattr(self, name)
            if isinstance(value, str) and value not in known and is_reference(value):
                register(value, resolve(value, name))
        if self.compare is None or str(self.compare).lstrip().startswith("{"):  # unset, or JSON
            given = as_dict("compare", self.compare)
            self.compare = "group" if given is None else given
        for name in DICT_FIELDS:
            setattr(self, name, as_dict(name, getattr(self, name)))
        for name in self._VALID_DICT_FIELDS:  # of transformers, whose error would not name the field
            value, takes_file = getattr(self, name), name in FILE_FIELDS
            if isinstance(value, str) and not (takes_file and os.path.isfile(value)):
                read = as_dict(name, value, ", or name a file that is there" * takes_file) if value else None
                setattr(self, name, read and value.strip())  # transformers reads numbers and words within, too
        if isinstance(self.prompt_sampler, str) and self.prompt_sampler.lstrip().startswith("{"):
            self.prompt_sampler = as_dict("prompt_sampler", self.prompt_sampler)
        set_fields_from_generation_kwargs(self)
        if isinstance(self.teacher, str):
            text = self.teacher.strip()
            self.teacher = as_dict("teacher", text) if text.startswith("{") else os.path.expanduser(text) or None
        if isinstance(self.teacher, dict):
            self.teacher = {name: teacher_source(source) for name, source in self.teacher.items()}
        else:
            self.teacher = teacher_source(self.teacher)
        for name in (
            "replay_from",
            "resume_from_checkpoint",
            "vllm_weight_folder",
            "checkpoint_path",
            "server_pool_file",
        ):
            if isinstance(folder := getattr(self, name), str):
                setattr(self, name, os.path.expanduser(folder))
        if self.report_to is None:
            self.report_to = "none"
        scale = str(self.scale_rewards)  # True and "true" mean "group", their opposites "none"
        self.scale_rewards = {"true": "group", "false": "none"}.get(scale.lower(), scale)
        self.vllm_gpu_memory_utilization = as_memory_share(self.vllm_gpu_memory_utilization)
        for name in ("vllm_server_base_url", "sglang_base_url"):
            setattr(self, name, as_urls(name, getattr(self, name)))
        if isinstance(self.torch_compile_backend, str):
            self.torch_compile_backend = self.torch_compile_backend.lower()
        if isinstance(self.pad_to_multiple_of, str) and self.pad_to_multiple_of.isdigit():
            self.pad_to_multiple_of = int(self.pad_to_multiple_of)

    def _settle_names(self) -> None:
        """Copy fields to their names in transformers >= 5.20, which warns about the old ones."""
        for old in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):
            new = old.replace("gradient", "activation")
            if getattr(self, new, False) is None:
                setattr(self, new, getattr(self, old))

    def _settle_hardware(self) -> None:
        if self.deepspeed:
            require_deepspeed(f"deepspeed={self.deepspeed!r}")
        if launched() and not has_accelerator():
            if by_deepspeed():  # it takes another path to a CPU than the rest of accelerate
                self.use_cpu, self.bf16 = False, bool(self.bf16)
                self.ddp_backend = self.ddp_backend or "gloo"
            else:
                self.use_cpu = True  # else each process would believe that it is the only one
        announce_meeting(self.use_cpu)
        if self.use_cpu:
            meet_on_cpu(self.ddp_timeout, self.ddp_backend)
        if self.bf16 is None:
            self.bf16 = not self.fp16 and (self.planned.gpu or multiplies_bf16(self.use_cpu))
            if self.bf16 and not has_accelerator():
                self.use_cpu = True  # TrainingArguments wants bfloat16 on a CPU to be asked for by this name
        elif self.planned.gpu and not has_accelerator():
            self.use_cpu = True  # what this machine lacks, the planned GPU may have
        elif self.bf16 and not (has_accelerator() or self.use_cpu or by_deepspeed()):
            self.use_cpu = True  # there is nothing else
            if not multiplies_bf16(self.use_cpu):
                emulated = Finding.warning(
                    "bf16-emulated",
                    "bf16=True on a CPU that does not multiply bfloat16: it is emulated, several times slower than"
                    " float32.",
                    "Leave bf16 unset, which takes bfloat16 where the hardware has it.",
                )
                report([emulated])

    def _settle_best_metric(self) -> None:
        """Default `metric_for_best_model` to the reward: the loss is not a measure of quality."""
        decides = self.load_best_model_at_end or self.save_strategy == "best"
        if (decides or self.lr_scheduler_type in training.BY_METRIC) and self.metric_for_best_model is None:
            self.metric_for_best_model = "reward"

    def _settle_direction(self) -> None:
        """Set the direction of a scheduler that reads a metric by `greater_is_better`."""
        given = as_dict("lr_scheduler_kwargs", self.lr_scheduler_kwargs)
        self._scheduler_kwargs_given = given
        if self.lr_scheduler_type in training.BY_METRIC:
            mode = "max" if self.greater_is_better else "min"
            self.lr_scheduler_kwargs = {"mode": mode, **(given or {})}

    def _settle_batches(self) -> None:
        given, steps = self.generation_batch_size, self.steps_per_generation
        micro_batch = self.per_device_train_batch_size * (self.planned.world_size or self.world_size)
        if given is not None and steps is not None and given != micro_batch * steps:
            raise CheckError.of(
                "settings-contradict",
                f"generation_batch_size={given} and steps_per_generation={steps} contradict each other: "
                f"{steps} steps of {micro_batch} completions (per_device_train_batch_size * processes) are "
                f"{micro_batch * steps}.",
                "Give one of the two; the other follows from it.",
            )
        self._generation_batch_size_given = given is not None and steps is None
        self._steps_given = steps
        self.steps_per_generation = steps or self.gradient_accumulation_steps
        algebra = self.algebra()
        self.steps_per_generation = algebra.steps_per_generation
        self.generation_batch_size = algebra.generation_batch_size


FIELDS = frozenset(field.name for field in dataclasses.fields(OnlineConfig)) - OLD


def fill_unset(args: OnlineConfig) -> None:
    """Replace None by the default where both mean the same, and `max_grad_norm=None` by 0, no clipping."""
    for name in FIELDS:
        if getattr(args, name) is None and none_means_unset(name, default := default_of(type(args), name)):
            setattr(args, name, default)
    if args.max_grad_norm is None:
        args.max_grad_norm = 0.0


# ---- values as users write them (JSON text, numbers, lists), in the form that the code reads -------------------------


def as_dict(name: str, value: dict[str, Any] | str | None, others: str = "") -> dict[str, Any] | None:
    """The value of field `name` as a dict, from a dict or JSON text.

    `others` ends the message with further accepted forms. Raises CheckError for other types and for text that is not
    JSON.
    """
    if isinstance(value, str):
        text = value
        try:
            value = json.loads(text, object_pairs_hook=unique)
        except ValueError as error:
            shown = "..." if any(map(is_secret, re.findall(r"[\w-]+", text))) else repr(text)
            evidence = f"{name}={shown} is not JSON ({error});"
            raise CheckError.of("setting-format", evidence, f"write it like '{{\"key\": 1}}'{others}.") from error
    if value is None or isinstance(value, dict):
        return value
    shown = repr(without_secrets(value))
    evidence = f"{name}={shown} must be a dict, or JSON text of one, but is a {type(value).__name__}."
    raise CheckError.of("setting-type", evidence)


def teacher_source(source: Any) -> Any:
    """The source of a teacher; URLs of servers are joined by commas. Raises CheckError as `as_urls`."""
    return as_urls("teacher", source, "teacher_server_api_key") if is_server(source) else source


def as_urls(name: str, value: str | list[str] | None, key: str = "vllm_server_api_key or sglang_api_key") -> str | None:
    """The URLs of field `name`, joined by commas, from one URL, several with commas between them, or a list.

    `key` names the field for the API key, which no URL may contain. Raises CheckError for values that are no URLs, that
    have a path or a secret, or that name a server twice.
    """
    if not value:
        return None
    if not isinstance(value, str | list | tuple):
        evidence = f"{name}={value!r} must be the URL of a server, or a list of such, as in http://127.0.0.1:8000."
        raise CheckError.of("setting-type", evidence)
    urls = value.split(",") if isinstance(value, str) else list(value)
    urls = [str(url).strip().rstrip("/") for url in urls if str(url).strip()]
    for url in urls:
        if "@" in url or without_secrets(url) != url:  # not shown
            raise CheckError.of(
                "secret-in-url",
                f"{name} names a server with a user or password in its URL, which would show in every message.",
                f"Write http://HOST:PORT, and give the key as {key}.",
            )
        if not re.fullmatch(r"https?://[^/\s]+", url):
            raise CheckError.of(
                "setting-format",
                f"{name}={value!r}: {url!r} is not the URL of a server.",
                "Write http://HOST:PORT, without a path, as in http://127.0.0.1:8000.",
            )
    if twice := next((url for url in urls if urls.count(url) > 1), None):
        raise CheckError.of("setting-format", f"{name} names {twice} twice: list each server once.")
    return ",".join(urls)


def as_memory_share(value: float | str | None) -> float | str:
    """`vllm_gpu_memory_utilization` as a number above 0 and at most 1, or "auto"; else CheckError."""
    if value in (None, "auto"):
        return "auto"
    with suppress(TypeError, ValueError):
        if 0 < float(value) <= 1:
            return float(value)
    raise CheckError.of(
        "setting-range",
        f"vllm_gpu_memory_utilization={value!r} is out of range: it must be above 0 and at most 1, or 'auto', which"
        " works it out (`covey explain` shows how).",
    )


def as_range(value: object) -> tuple[float, float] | None:
    """`reward_clip_range` as two numbers, from a pair or from text like "-1,1" or "[-1, 1]"; CheckError for others."""
    if value is None:
        return None
    if isinstance(value, tuple) and all(isinstance(part, str) and len(part) == 1 for part in value):
        value = "".join(value)  # argparse makes a tuple of characters of such text
    parts = value.strip("()[] ").split(",") if isinstance(value, str) else value
    try:
        low, high = (float(part) for part in parts)  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        evidence = f"reward_clip_range={value!r} is not a pair of numbers;"
        fix = "give the smallest and the largest reward, as in (-1.0, 1.0)."
        raise CheckError.of("setting-format", evidence, fix) from error
    if not low < high:
        raise CheckError.of(
            "setting-range",
            f"reward_clip_range=({low:g}, {high:g}): the first number must be smaller than the second, or every "
            "reward becomes the same.",
        )
    return low, high


def set_fields_from_generation_kwargs(args: Any) -> None:
    """Move keys of `generation_kwargs` that have a field into the field, and drop keys without effect.

    Raises CheckError where the field was given another value.
    """
    given = dict(args.generation_kwargs or {})
    for key, because in sampling.IDLE_KEYS.items():
        if key in given and given[key] == sampling.IDLE_AT.get(key, given[key]):
            value = given.pop(key)
            if key != "do_sample":  # which says what happens
                evidence = f"`generation_kwargs[{key!r}]={value!r}` has no effect: {because}."
                report([Finding.warning("setting-unread", evidence)])
            args.generation_kwargs = given
    for key in SAMPLING_FIELDS.keys() & given:
        name, value = SAMPLING_FIELDS[key], given.pop(key)
        if (current := getattr(args, name)) not in (value, type(args).__dataclass_fields__[name].default):
            evidence = f"generation_kwargs[{key!r}]={value!r} and {name}={current!r} differ: leave one out."
            raise CheckError.of("settings-contradict", evidence)
        setattr(args, name, value)
        args.generation_kwargs = given
