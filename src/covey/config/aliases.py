"""Names that other libraries, and older releases of them, use for Covey's fields.

An old name is accepted wherever a field is (constructor, run file, command line) and replaced by the new one with one
warning. To add a name, add a row to `ALIASES`: a renamed field needs no code, a changed meaning a conversion.
"""

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from covey.config.messages import warn


@dataclasses.dataclass(frozen=True)
class Alias:
    """Replacement of an old name.

    Attributes:
        new: the field that replaces it; None if none does.
        advice: advice for the user, shown after the new name.
        convert: (old value, all keywords of the call) -> new value.
    """

    new: str | None
    advice: str = ""
    convert: Callable[[Any, Mapping[str, Any]], Any] = lambda value, keywords: value


def _removed(advice: str) -> Alias:
    return Alias(None, advice)


def _updates_of_episodes(episodes: Any, keywords: Mapping[str, Any]) -> int:
    return max(1, int(episodes) // int(keywords.get("gradient_accumulation_steps", 1)))


def _one_if_on(flag: Any, keywords: Mapping[str, Any]) -> int:
    return int(str(flag).lower() in ("true", "1", "yes"))


def _is_on(level: Any, keywords: Mapping[str, Any]) -> bool:
    return bool(int(level))


_REWARD_FACTORIES = "it belongs to a reward function: put {} into reward_funcs"
_OVERLONG = _REWARD_FACTORIES.format("covey.rewards.get_soft_overlong_punishment(soft_max_length, soft_cache_length)")
_COSINE = _REWARD_FACTORIES.format("covey.rewards.get_cosine_scaled_reward(max_len=...)")
_REPETITION = _REWARD_FACTORIES.format("covey.rewards.get_repetition_penalty_reward(ngram_size=..., max_penalty=...)")

ALIASES: dict[str, Alias] = {
    # TRL, earlier releases
    "max_prompt_length": _removed(
        "prompts are never truncated, and one longer than the model's context is an error: filter long prompts out of "
        "the dataset"
    ),
    "vllm_guided_decoding_regex": Alias("vllm_structured_outputs_regex"),
    "vllm_importance_sampling_cap": Alias("vllm_importance_sampling_clip_max"),
    "use_transformers_paged": Alias("use_transformers_continuous_batching"),
    "wandb_log_unique_prompts": Alias("log_unique_prompts"),
    # RLOO before TRL 0.22
    "rloo_k": Alias("num_generations"),
    "cliprange": Alias("epsilon"),
    "kl_coef": Alias("beta"),
    "exp_name": Alias("run_name", "the old one also appended the seed and the time"),
    "normalize_reward": Alias("normalize_advantages", "which is what it always did"),
    "num_ppo_epochs": Alias("num_iterations"),
    "num_mini_batches": Alias("steps_per_generation"),
    "response_length": Alias("max_completion_length"),
    "total_episodes": Alias(
        "max_steps",
        "set to total_episodes / gradient_accumulation_steps as the migration guide has it; one update trains on "
        "per_device_train_batch_size * gradient_accumulation_steps * processes completions",
        _updates_of_episodes,
    ),
    "token_level_kl": _removed("RLOO subtracts the KL of the whole completion from its reward"),
    "dataset_num_proc": _removed("the dataset is not rewritten before training"),
    "local_rollout_forward_batch_size": _removed(
        "log-probabilities are computed in micro-batches by tokens, which max_tokens_per_micro_batch bounds"
    ),
    "num_sample_generations": _removed("set log_completions and logging_steps to see completions while training"),
    "stop_token": _removed("completions stop at the end-of-sequence ids of the model's generation config"),
    "stop_token_id": _removed("completions stop at the end-of-sequence ids of the model's generation config"),
    # transformers 4
    "warmup_ratio": Alias("warmup_steps", "a number below 1 is a share of all updates"),
    "logging_dir": _removed("TensorBoard's folder is the environment variable TENSORBOARD_LOGGING_DIR"),
    "evaluation_strategy": Alias("eval_strategy"),
    "no_cuda": Alias("use_cpu"),
    "per_gpu_train_batch_size": Alias("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": Alias("per_device_eval_batch_size"),
    "push_to_hub_model_id": Alias("hub_model_id"),
    "push_to_hub_token": Alias("hub_token"),
    "overwrite_output_dir": _removed(
        "a run writes into output_dir whatever is there; name another folder to keep both"
    ),
    "save_safetensors": _removed("weights are always saved as safetensors"),
    "group_by_length": _removed("prompts come in the sampler's order, and nothing is padded to a common length"),
    "include_tokens_per_second": _removed("timings are always logged"),
    "use_mps_device": _removed("the device is detected"),
    # ms-swift
    "async_generate": Alias("max_staleness", "True means 1, False means 0", _one_if_on),
    "overlong_filter": Alias("mask_truncated_completions"),
    "epsilon_low": Alias("epsilon"),
    "log_entropy": _removed("entropy is always logged"),
    "sleep_level": Alias(
        "vllm_enable_sleep_mode", "0 means False, 1 and 2 mean True; for level 2 set vllm_sleep_level=2 too", _is_on
    ),
    "soft_max_length": _removed(_OVERLONG),
    "soft_cache_length": _removed(_OVERLONG),
    "cosine_min_len_value_wrong": _removed(_COSINE),
    "cosine_max_len_value_wrong": _removed(_COSINE),
    "cosine_min_len_value_correct": _removed(_COSINE),
    "cosine_max_len_value_correct": _removed(_COSINE),
    "cosine_max_len": _removed(_COSINE),
    "repetition_n_grams": _removed(_REPETITION),
    "repetition_max_penalty": _removed(_REPETITION),
    "split_dataset_ratio": _removed("the dataset is never split: evaluation runs only with an eval_dataset of its own"),
    "vllm_max_model_len": Alias("vllm_max_model_length"),
    "max_turns": Alias("max_tool_calling_iterations"),
    "dataset_shuffle": Alias("shuffle_dataset"),
    "tau_pos": Alias("sapo_temperature_pos"),
    "tau_neg": Alias("sapo_temperature_neg"),
    "off_policy_sequence_mask_delta": Alias("off_policy_mask_threshold"),
    "rollout_importance_sampling_mode": Alias("vllm_importance_sampling_mode"),
    "rollout_importance_sampling_threshold": Alias("vllm_importance_sampling_clip_max"),
}


_PEFT = "it belongs to the adapter: `peft: {{{}: ...}}` in a run file, `peft_config=LoraConfig({}=...)` in a script"

_QUANTISED = (
    "it says how the model is loaded: `quantization: {{{}: ...}}` in a run file,"
    " `quantization_config=BitsAndBytesConfig({}=...)` in a script"
)

_ADAPTER = (
    "an adapter is trained where `peft: {r: 16}` is in the run file or a `peft_config` is given to the trainer; "
    "otherwise all weights are"
)

HINTS: dict[str, str] = {
    "missing_eos_penalty": "write a reward function that returns the penalty where completion_ids do not end with the "
    "eos token",
    "max_length": "prompts are never truncated, and max_completion_length limits what is sampled",
    "torch_dtype": "it belongs to the model: `model_init_kwargs: {dtype: bfloat16}`",
    "dtype": "it belongs to the model: `model_init_kwargs: {dtype: bfloat16}`",
    "attn_implementation": "it belongs to the model: `model_init_kwargs: {attn_implementation: sdpa}`",
    "rlhf_type": "GRPOConfig and RLOOConfig choose the method; in a run file it is `method`",
    "load_in_4bit": _QUANTISED.format("load_in_4bit", "load_in_4bit"),
    "load_in_8bit": _QUANTISED.format("load_in_8bit", "load_in_8bit"),
    "bnb_4bit_quant_type": _QUANTISED.format("bnb_4bit_quant_type", "bnb_4bit_quant_type"),
    "use_bnb_nested_quant": _QUANTISED.format("bnb_4bit_use_double_quant", "bnb_4bit_use_double_quant"),
    "train_type": _ADAPTER,
    "use_peft": _ADAPTER,
    "lora_rank": _PEFT.format("r", "r"),
    "lora_r": _PEFT.format("r", "r"),
    "lora_alpha": _PEFT.format("lora_alpha", "lora_alpha"),
    "lora_dropout": _PEFT.format("lora_dropout", "lora_dropout"),
    "target_modules": _PEFT.format("target_modules", "target_modules"),
    "lora_target_modules": _PEFT.format("target_modules", "target_modules"),
}
"""Names that are refused, because dropping them would change the training, with advice."""


class AcceptsAliases(type):
    """Metaclass of the configs: replaces old names before the dataclass constructor sees the keywords.

    A metaclass rather than a wrapped `__init__`, so that dataclasses derived by users accept the old names too.
    """

    def __call__(cls, *args: Any, **keywords: Any) -> Any:
        return super().__call__(*args, **renamed(cls, keywords))

    @property
    def __signature__(cls) -> Any:
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
        return inspect.Signature(parameters)


def renamed(cls: type, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Replace old names in the keywords of a config class, with one warning each.

    Example:
        `renamed(GRPOConfig, {"kl_coef": 0.1})` warns that `kl_coef` is `beta` now and returns `{"beta": 0.1}`.

    Raises:
        TypeError: a name that is neither a field nor an old name of one.
        ValueError: an old name and its new one with different values.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    result = {name: value for name, value in keywords.items() if name not in ALIASES and name != "advantage_estimator"}
    if unknown := [name for name in result if name not in fields]:
        known = [*fields, *ALIASES]
        raise TypeError(" ".join(f"{cls.__name__} has no field `{name}`{hint(name, known)}" for name in unknown))
    _check_advantage_estimator(cls, keywords)
    for old, value in keywords.items():
        if old not in ALIASES or (old in fields and value == fields[old].default):
            continue  # an old name that is still a field, as parsers pass it: at its default, hence not given
        alias = ALIASES[old]
        if alias.new is None:
            warn(f"`{old}` has no effect here and is dropped: {alias.advice}.", FutureWarning)
            continue
        warn(f"`{old}` is called `{alias.new}` here{'; ' + alias.advice if alias.advice else ''}.", FutureWarning)
        if alias.new not in fields:
            raise TypeError(f"`{old}` is called `{alias.new}` here, and {cls.__name__} has no such field.")
        new_value = alias.convert(value, keywords)
        given = result.get(alias.new, new_value)
        untouched = old in fields and given == fields[alias.new].default
        if given != new_value and not untouched:
            raise ValueError(
                f"`{old}={value!r}` and `{alias.new}={given!r}` contradict each other: `{old}` is an old name of "
                f"`{alias.new}`. Keep `{alias.new}` only."
            )
        result[alias.new] = new_value
    return result


def hint(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: advice, or the known name that is closest.

    Example:
        >>> hint("num_generation", ["num_generations"])
        '. Did you mean `num_generations`?'
        >>> hint("max_length", [])
        ': prompts are never truncated, and max_completion_length limits what is sampled.'
    """
    if name in HINTS:
        return f": {HINTS[name]}."
    close = difflib.get_close_matches(name, known, n=1)
    return f". Did you mean `{close[0]}`?" if close else "."


def _check_advantage_estimator(cls: Any, keywords: Mapping[str, Any]) -> None:
    """`advantage_estimator` of ms-swift chooses between methods; here the class does."""
    estimator = keywords.get("advantage_estimator")
    if estimator is None:
        return
    if estimator == cls.method:
        warn(f"`advantage_estimator={estimator!r}` is not needed: {cls.__name__} means it.", FutureWarning)
        return
    allowed = {"grpo": "GRPOConfig and GRPOTrainer", "rloo": "RLOOConfig and RLOOTrainer"}
    if estimator not in allowed:
        raise ValueError(f"advantage_estimator={estimator!r} is not known; choose one of: {', '.join(allowed)}.")
    raise ValueError(
        f"advantage_estimator={estimator!r} contradicts {cls.__name__}: the class chooses the method. Use "
        f"{allowed[estimator]} (in a run file: `method: {estimator}`)."
    )
