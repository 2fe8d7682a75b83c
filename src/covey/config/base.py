"""`OnlineConfig`: everything that GRPO and RLOO share, on top of `transformers.TrainingArguments`.

The fields are declared in `covey.config.groups`, the rules that tie them together in
`covey.config.rules.registry`, old names in `covey.config.aliases`. This module normalises what users write (JSON
strings, booleans where words are meant), settles what depends on the hardware and on the number of processes, and
runs the rules. It holds no training logic.
"""

import copy
import dataclasses
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from transformers import TrainingArguments

from covey.config import groups
from covey.config.algebra import BatchAlgebra, planned_world_size, steps_of
from covey.config.aliases import AcceptsAliases
from covey.config.hardware import by_deepspeed, has_accelerator, launched, multiplies_bf16
from covey.config.rules import registry

DICT_FIELDS = (
    "model_init_kwargs",
    "generation_kwargs",
    "chat_template_kwargs",
    "transformers_continuous_batching_config",
    "vllm_engine_kwargs",
    "sglang_server_args",
)
KEYS = ("vllm_server_api_key", "sglang_api_key")
"""Fields that nobody is shown: logs, trackers and checkpoints, which may be pushed to a hub, go without."""

SECRET = re.compile(r"(.*[_-])?(token|key|secret|password)")
"""What entries of `DICT_FIELDS` are called that nobody is shown either, where they hold text."""

BY_METRIC = ("reduce_lr_on_plateau", "greedy")
"""Schedulers that look at `metric_for_best_model`."""

CISPO_CAP = 5.0
"""Largest ratio of cispo when `epsilon_high` is not given: high enough to let gradients through, as in MiniMax-M1."""


@dataclasses.dataclass
class OnlineConfig(  # type: ignore[misc]  # bf16 may be unset here
    groups.TrainingDefaults,
    groups.ModelFields,
    groups.BatchFields,
    groups.GenerationFields,
    groups.SpeculationFields,
    groups.PromptFields,
    groups.AgentFields,
    groups.RewardFields,
    groups.LossFields,
    groups.KLFields,
    groups.EntropyFields,
    groups.MismatchFields,
    groups.VllmFields,
    groups.SglangFields,
    groups.ContinuousBatchingFields,
    groups.LoggingFields,
    TrainingArguments,
    metaclass=AcceptsAliases,
):
    """The fields common to `GRPOConfig` and `RLOOConfig`; `-h` of the command line describes each.

    After construction `generation_batch_size` and `steps_per_generation` are both filled in, `bf16` is a bool,
    `scale_rewards` a word and fields that accept JSON hold dicts.

    Raises:
        TypeError: an unknown keyword; the message proposes the closest field.
        ValueError: a value or combination of values that cannot work.
    """

    method: ClassVar[str] = ""
    """`grpo` or `rloo`: what the command line and the rules call the method."""

    def __post_init__(self) -> None:
        self._normalise()
        self._settle_hardware()
        self._settle_best_metric()
        super().__post_init__()
        self._settle_direction()
        registry.check_batch_numbers(self)
        self._settle_batches()
        registry.check(self)

    @property
    def resolved_epsilon_high(self) -> float:
        """Upper clipping range in force: `epsilon_high`, or what stands in for it when it is not given."""
        if self.epsilon_high is not None:
            return self.epsilon_high
        return CISPO_CAP if self.loss_type == "cispo" else self.epsilon

    @property
    def vllm_urls(self) -> list[str]:
        """The vLLM servers of a run in server mode."""
        if self.vllm_server_base_url:
            return self.vllm_server_base_url.split(",")
        host = "127.0.0.1" if self.vllm_server_host in ("0.0.0.0", "::") else self.vllm_server_host
        return [f"http://{f'[{host}]' if ':' in host else host}:{self.vllm_server_port}"]

    @property
    def sglang_urls(self) -> list[str]:
        """The SGLang servers that run already; none if the run starts one."""
        if self.sglang_base_url:
            return self.sglang_base_url.split(",")
        return [] if self.sglang_device else ["http://127.0.0.1:30000"]

    @property
    def samples_elsewhere(self) -> bool:
        """Whether another engine than the built-in one samples, as sampling ahead takes for granted."""
        return bool(self.use_vllm or self.use_sglang or self.max_staleness > 0)

    @property
    def corrects_mismatch(self) -> bool:
        """Whether the loss is weighed for the difference between the engine's log-probs and the trainer's."""
        wanted = self.samples_elsewhere or self.correct_built_in_engine
        return self.vllm_importance_sampling_correction and wanted

    @property
    def resolved_mismatch_mode(self) -> str:
        """Mode of the correction in force: vespo takes the ratios of tokens and multiplies them itself."""
        mode = self.vllm_importance_sampling_mode
        return mode.replace("sequence", "token") if self.loss_type == "vespo" else mode

    def algebra(self, world_size: int | None = None) -> BatchAlgebra:
        """How this run's batches divide.

        Args:
            world_size: number of processes; those that are running (or planned for) by default.

        Raises:
            ValueError: for `world_size` processes the numbers do not divide.
        """
        processes = world_size or self._planned_world_size or self.world_size
        assert self.num_generations is not None, "a rule has seen to it"
        steps = self.steps_per_generation
        if self._generation_batch_size_given:
            assert self.generation_batch_size is not None, "that is what was given"
            per_device = self.per_device_train_batch_size
            steps = steps_of(self.generation_batch_size, per_device, processes, self.num_generations)
        assert steps is not None, "filled in at construction"
        algebra = BatchAlgebra(
            per_device_train_batch_size=self.per_device_train_batch_size,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            steps_per_generation=steps,
            num_iterations=self.num_iterations,
            num_generations=self.num_generations,
            world_size=processes,
            per_device_eval_batch_size=self.per_device_eval_batch_size,
            num_generations_eval=self.num_generations_eval,
        )
        algebra.check(self._generation_batch_size_given)
        return algebra

    def with_changes(self, **changes: Any) -> "OnlineConfig":
        """This config made anew with other values; what followed from a changed field follows from it again.

        Raises:
            TypeError: a field that does not exist.
            ValueError: values that cannot work.
        """
        filled_in = {
            "generation_batch_size": None if not self._generation_batch_size_given else self.generation_batch_size,
            "steps_per_generation": self._steps_given,
            "lr_scheduler_kwargs": self._scheduler_kwargs_given,
        }
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}
        return type(self)(**{**values, **filled_in, **changes})

    def to_dict(self) -> dict[str, Any]:
        """Every field, as trackers and logs are shown them: without the key of the servers."""
        shown = {**super().to_dict(), **self._plain_dicts()}
        for name in KEYS:
            if shown.get(name) is not None:
                shown[name] = f"<{name.upper()}>"
        return shown

    def _plain_dicts(self) -> dict[str, Any]:
        return {name: without_secrets(getattr(self, name)) for name in DICT_FIELDS}

    def __str__(self) -> str:
        with self.keys_aside():
            return super().__str__()

    __repr__ = __str__

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled, as into checkpoints, which may be pushed to a hub: no keys and no token."""
        return {**self.__dict__, **self._plain_dicts(), **dict.fromkeys((*KEYS, "hub_token"))}

    def __copy__(self) -> "OnlineConfig":
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> "OnlineConfig":
        copied = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    @contextmanager
    def keys_aside(self) -> Iterator[None]:
        """Within this context the servers' keys are not there, for whoever writes the config to a file."""
        keys = {name: getattr(self, name) for name in (*KEYS, *DICT_FIELDS)}
        try:
            for name, value in {**dict.fromkeys(KEYS), **self._plain_dicts()}.items():
                setattr(self, name, value)
            yield
        finally:
            for name, key in keys.items():
                setattr(self, name, key)

    def _normalise(self) -> None:
        for name in DICT_FIELDS:
            setattr(self, name, as_dict(name, getattr(self, name)))
        self.scale_rewards = as_scale(self.scale_rewards)
        self.vllm_gpu_memory_utilization = as_share(self.vllm_gpu_memory_utilization)
        for name in ("vllm_server_base_url", "sglang_base_url"):
            setattr(self, name, as_urls(name, getattr(self, name)))
        if isinstance(self.pad_to_multiple_of, str) and self.pad_to_multiple_of.isdigit():
            self.pad_to_multiple_of = int(self.pad_to_multiple_of)
        # transformers >= 5.20 renames these and warns about the old names, which scripts written for it still use.
        for old in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):
            new = old.replace("gradient", "activation")
            if getattr(self, new, False) is None:
                setattr(self, new, getattr(self, old))

    def _settle_hardware(self) -> None:
        if launched() and not has_accelerator():
            if by_deepspeed():  # it comes to a CPU by another way than the rest of accelerate
                self.use_cpu, self.bf16 = False, bool(self.bf16)
                self.ddp_backend = self.ddp_backend or "gloo"
            else:
                self.use_cpu = True  # else each process would take itself for the only one
        if self.bf16 is None:
            self.bf16 = not self.fp16 and multiplies_bf16(self.use_cpu)
            if self.bf16 and not has_accelerator():
                self.use_cpu = True  # TrainingArguments wants bfloat16 on a CPU to be asked for by this name

    def _settle_best_metric(self) -> None:
        """What is best is told by rewards where nothing else is named: the loss says nothing about quality."""
        decides = self.load_best_model_at_end or self.save_strategy == "best"
        if (decides or self.lr_scheduler_type in BY_METRIC) and self.metric_for_best_model is None:
            self.metric_for_best_model = "reward"

    def _settle_direction(self) -> None:
        """A scheduler that waits for a metric waits for it to rise or to fall, as `greater_is_better` has it."""
        given = as_dict("lr_scheduler_kwargs", self.lr_scheduler_kwargs)  # transformers has parsed text
        self._scheduler_kwargs_given = given
        if self.lr_scheduler_type in BY_METRIC:
            mode = "max" if self.greater_is_better else "min"
            self.lr_scheduler_kwargs = {"mode": mode, **(given or {})}

    def _settle_batches(self) -> None:
        self._planned_world_size = planned_world_size()
        given, steps = self.generation_batch_size, self.steps_per_generation
        micro_batch = self.per_device_train_batch_size * (self._planned_world_size or self.world_size)
        if given is not None and steps is not None and given != micro_batch * steps:
            raise ValueError(
                f"generation_batch_size={given} and steps_per_generation={steps} contradict each other: "
                f"{steps} steps of {micro_batch} completions (per_device_train_batch_size * processes) are "
                f"{micro_batch * steps}. Give one of the two; the other follows from it."
            )
        self._generation_batch_size_given = given is not None and steps is None
        self._steps_given = steps
        self.steps_per_generation = steps or self.gradient_accumulation_steps
        algebra = self.algebra()
        self.steps_per_generation = algebra.steps_per_generation
        self.generation_batch_size = algebra.generation_batch_size


def without_secrets(value: Any) -> Any:
    """A dictionary, and those within, without the entries that are called like tokens and keys and hold text.

    Example:
        >>> without_secrets({"token": "hf_abc", "revision": "main", "pad_token_id": 0})
        {'revision': 'main', 'pad_token_id': 0}
    """
    if not isinstance(value, dict):
        return value
    kept = (one for one in value.items() if not (isinstance(one[1], str) and SECRET.fullmatch(str(one[0]).lower())))
    return {name: without_secrets(inner) for name, inner in kept}


def as_dict(name: str, value: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """The value of a field that accepts a dict or JSON text.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}={value!r} is not JSON ({error}); write it like '{{\"key\": 1}}'.") from error
    if value is None or isinstance(value, dict):
        return value
    raise ValueError(f"{name} must be a dict, or JSON text of one, but is a {type(value).__name__}: {value!r}.")


def as_urls(name: str, value: str | list[str] | None) -> str | None:
    """One URL, several with commas between them, or a list: with commas between them, without trailing slashes.

    Raises:
        ValueError: one is no URL, or is there twice.
    """
    if not value:
        return None
    urls = value.split(",") if isinstance(value, str) else list(value)
    urls = [str(url).strip().rstrip("/") for url in urls if str(url).strip()]
    for url in urls:
        if "@" in url:  # not shown: there may be a password before it
            raise ValueError(
                f"{name} names a server with a user or password in its URL, which would show in every message. Write"
                " http://HOST:PORT, and give the key as vllm_server_api_key or sglang_api_key."
            )
        if not re.fullmatch(r"https?://[^/\s]+", url):
            raise ValueError(
                f"{name}={value!r}: {url!r} is not the URL of a server. Write http://HOST:PORT, without a"
                " path, as in http://127.0.0.1:8000."
            )
    if twice := next((url for url in urls if urls.count(url) > 1), None):
        raise ValueError(f"{name} names {twice} twice: every server once.")
    return ",".join(urls)


def as_scale(value: str | bool) -> str:
    """`scale_rewards` as a word: True, "True" and "true" mean "group", their opposites "none"."""
    return {"true": "group", "false": "none"}.get(str(value).lower(), value)  # type: ignore[arg-type]


def as_share(value: float | str | None) -> float | str:
    """`vllm_gpu_memory_utilization` as a number, or "auto"; text is what a command line gives."""
    try:
        return "auto" if value is None else float(value)
    except ValueError:
        return value  # type: ignore[return-value]  # a rule judges it
