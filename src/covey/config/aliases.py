"""Old and foreign names of fields (`ALIASES`: add a row) and of trainer arguments, accepted with one warning."""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from covey.core.findings import CheckError
from covey.runtime.overrides import passes_through
from covey.runtime.packages import OWN
from covey.runtime.user_code import warn

Init = TypeVar("Init", bound=Callable[..., None])
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Alias:
    """Replacement of an old name: the new field (None if there is none) and advice.

    `convert` makes the new value from the old one and all keywords.
    """

    new: str | None
    advice: str = ""
    convert: Callable[[Any, Mapping[str, Any]], Any] = lambda value, keywords: value
    kind: Any = str  # of its value, for parsers of fields


def _removed(advice: str, kind: Any = str) -> Alias:
    return Alias(None, advice, kind=kind)


def _by_name(rows: Mapping[str, T]) -> dict[str, T]:
    """Rows of a table, whose keys are one or several names with spaces between them."""
    return {name: value for names, value in rows.items() for name in names.split()}


_REWARD_FACTORIES = "it belongs to a reward function: put {} into reward_funcs"
_GONE = _removed("transformers 5 has no such option")
_OVERLONG = _REWARD_FACTORIES.format("covey.rewards.get_soft_overlong_punishment(soft_max_length, soft_cache_length)")
_COSINE = _REWARD_FACTORIES.format("covey.rewards.get_cosine_scaled_reward(max_len=...)")
_REPETITION = _REWARD_FACTORIES.format("covey.rewards.get_repetition_penalty_reward(ngram_size=..., max_penalty=...)")

ALIASES: dict[str, Alias] = {
    # TRL, earlier releases
    "max_prompt_length": _removed(
        "prompts are never truncated, and one longer than the model's context is an error: filter long prompts out of "
        "the dataset",
        int,
    ),
    "vllm_guided_decoding_regex": Alias("vllm_structured_outputs_regex"),
    "vllm_importance_sampling_cap": Alias("vllm_importance_sampling_clip_max"),
    "use_liger_loss": Alias("use_liger_kernel", kind=bool),
    "use_transformers_paged": Alias("use_transformers_continuous_batching"),
    "wandb_log_unique_prompts": Alias("log_unique_prompts", kind=bool),
    # RLOO before TRL 0.22
    "rloo_k": Alias("num_generations", kind=int),
    "cliprange": Alias("epsilon", kind=float),
    "kl_coef": Alias("beta", kind=float),
    "exp_name": Alias("run_name", "the old one also appended the seed and the time"),
    "normalize_reward": Alias("normalize_advantages", "which is what it always did", kind=bool),
    "num_ppo_epochs": Alias("num_iterations", kind=int),
    "num_mini_batches": Alias("steps_per_generation", kind=int),
    "response_length": Alias("max_completion_length", kind=int),
    "total_episodes": Alias(
        "max_steps",
        "set to total_episodes / gradient_accumulation_steps, as the migration guide explains; one update trains on "
        "per_device_train_batch_size * gradient_accumulation_steps * processes completions",
        lambda episodes, keywords: max(1, int(episodes) // int(keywords.get("gradient_accumulation_steps", 1))),
        int,
    ),
    "token_level_kl": _removed("RLOO subtracts the KL of the whole completion from its reward", bool),
    "dataset_num_proc": _removed("the dataset is not rewritten before training", int),
    "local_rollout_forward_batch_size": _removed(
        "log-probabilities are computed in micro-batches by tokens, which max_tokens_per_micro_batch bounds",
        int,
    ),
    "num_sample_generations": _removed("set log_completions and logging_steps to see completions while training", int),
    "stop_token stop_token_id": _removed(
        "completions stop at the end-of-sequence ids of the model's generation config"
    ),
    # transformers 4
    "warmup_ratio": Alias("warmup_steps", "a number below 1 is a share of all updates", kind=float),
    "logging_dir": _removed("TensorBoard's folder is the environment variable TENSORBOARD_LOGGING_DIR"),
    "evaluation_strategy": Alias("eval_strategy"),
    "no_cuda": Alias("use_cpu", kind=bool),
    "per_gpu_train_batch_size": Alias("per_device_train_batch_size", kind=int),
    "per_gpu_eval_batch_size": Alias("per_device_eval_batch_size", kind=int),
    "push_to_hub_model_id": Alias("hub_model_id"),
    "push_to_hub_token": Alias("hub_token"),
    "overwrite_output_dir": _removed(
        "a run writes into output_dir whatever is there; name another folder to keep both",
        bool,
    ),
    "save_safetensors": _removed("weights are always saved as safetensors", bool),
    "group_by_length": _removed("prompts come in the sampler's order, and nothing is padded to a common length", bool),
    "include_tokens_per_second": _removed("timings are always logged", bool),
    "use_mps_device": _removed("the device is detected", bool),
    "fp16_backend fp16_opt_level half_precision_backend mp_parameters past_index ray_scope tpu_num_cores": _GONE,
    "include_inputs_for_metrics jit_mode_eval use_ipex use_legacy_prediction_loop": dataclasses.replace(
        _GONE, kind=bool
    ),
    # ms-swift
    "async_generate": Alias(
        "max_staleness", "True means 1, False means 0", lambda on, _: int(str(on).lower() in ("true", "1", "yes"))
    ),
    "overlong_filter": Alias("mask_truncated_completions"),
    "epsilon_low": Alias("epsilon"),
    "sleep_level": Alias(
        "vllm_enable_sleep_mode",
        "0 means False, 1 and 2 mean True; for level 2 set vllm_sleep_level=2 too",
        lambda level, _: bool(int(level)),
    ),
    "soft_max_length soft_cache_length": _removed(_OVERLONG),
    "cosine_min_len_value_wrong cosine_min_len_value_correct": _removed(_COSINE),
    "cosine_max_len_value_wrong cosine_max_len_value_correct cosine_max_len": _removed(_COSINE),
    "repetition_n_grams repetition_max_penalty": _removed(_REPETITION),
    "chord_sft_dataset": Alias("demonstrations"),
    "chord_enable_phi_function": Alias("demonstrations_phi", kind=bool),
    "chord_sft_per_device_train_batch_size": _removed(
        "demonstrations_per_step counts the demonstrations of an optimizer step, over all processes", int
    ),
    "chord_mu_warmup_steps chord_mu_decay_steps": _removed(
        "set demonstrations_schedule={'warmup': ..., 'peak': ..., 'decay': ..., 'valley': ...}", int
    ),
    "chord_mu_peak chord_mu_valley": _removed(
        "set demonstrations_schedule={'warmup': ..., 'peak': ..., 'decay': ..., 'valley': ...}", float
    ),
    "split_dataset_ratio": _removed("the dataset is never split: evaluation runs only with an eval_dataset of its own"),
    "use_wandb": Alias("report_to", "True means 'wandb'", lambda on, _: "wandb" if on in (True, "true", 1) else "none"),
    "batch_size": Alias("per_device_train_batch_size", "it counts completions"),
    "num_epochs": Alias("num_train_epochs"),
    "vllm_max_model_len": Alias("vllm_max_model_length"),
    "max_turns": Alias("max_tool_calling_iterations"),
    "dataset_shuffle": Alias("shuffle_dataset"),
    "tau_pos": Alias("sapo_temperature_pos"),
    "tau_neg": Alias("sapo_temperature_neg"),
    "off_policy_sequence_mask_delta": Alias("off_policy_mask_threshold"),
    "router_replay_mode": Alias(
        "routing_replay",
        "'disabled' means None",
        lambda mode, _: None if str(mode).lower() in ("disabled", "none") else mode,
    ),
    # distillation: TRL, ms-swift and others
    "teacher_model_name_or_path teacher_model_server_url": Alias("teacher"),
    "teacher_server_urls": Alias(
        "teacher",
        "the entry 'default' alone is the teacher of all rows",
        lambda urls, _: urls["default"] if isinstance(urls, dict) and {*urls} == {"default"} else urls,
    ),
    "loss_top_k": Alias("teacher_top_k", "0, the whole vocabulary, is -1", lambda count, _: int(count) or -1, int),
    "distillation_topk gkd_logits_topk topk_logits_k": Alias(
        "teacher_top_k", "None, the whole vocabulary, is -1", lambda count, _: -1 if count is None else int(count), int
    ),
    "teacher_kl_coef kl_penalty_coef opd_kl_coef distillation_loss_coef": Alias("teacher_coef", kind=float),
    "teacher_tag_key teacher_key": Alias("teacher_column"),
    "distillation_alpha": Alias("teacher_beta", kind=float),
    "teacher_update_rate": Alias("teacher_mixup_alpha", kind=float),
    "success_reward_threshold": Alias("teacher_success_reward", kind=float),
    "teacher_model_kind": Alias(
        "teacher",
        "base is 'start', live is 'policy', ema is 'follower'",
        lambda kind, _: {"base": "start", "live": "policy", "ema": "follower"}.get(kind, kind),
    ),
    "geo_mask_low": Alias("geometric_mask_min", kind=float),
    "geo_mask_high": Alias("geometric_mask_max", kind=float),
    "rollout_importance_sampling_mode": Alias("vllm_importance_sampling_mode"),
    "rollout_importance_sampling_threshold": Alias("vllm_importance_sampling_clip_max"),
}
ALIASES = _by_name(ALIASES)
_FOREIGN = list(ALIASES)[list(ALIASES).index("async_generate") :]  # of ms-swift, which has a parser of its own
_STILL_FIELDS = ("use_transformers_paged", "vllm_importance_sampling_cap")  # of TRL, too


def _parsed(alias: Alias) -> Any:
    said = f"Old name of {alias.new}; use that one." if alias.new else f"No effect: {alias.advice}."
    return dataclasses.field(default=None, metadata={"help": said})


if TYPE_CHECKING:

    @dataclasses.dataclass
    class OldNames:
        """Names of earlier releases of TRL and transformers, so that parsers of fields take them."""

else:
    OldNames = dataclasses.make_dataclass(
        "OldNames",
        [
            (name, alias.kind if alias.kind is bool else alias.kind | None, _parsed(alias))  # flags without a value
            for name, alias in ALIASES.items()
            if name not in (*_FOREIGN, *_STILL_FIELDS)
        ],
        namespace={
            "__doc__": "Names of earlier releases of TRL and transformers, so that parsers of fields take them."
        },
    )
    OldNames.__module__ = __name__  # `make_dataclass` calls it types


_PEFT = "it belongs to the adapter: `peft: {{{0}: ...}}` in a run file, `peft_config=LoraConfig({0}=...)` in a script"
_QUANTISED = (
    "it says how the model is loaded: `quantization: {{{0}: ...}}` in a run file,"
    " `quantization_config=BitsAndBytesConfig({0}=...)` in a script"
)
_ADAPTER = (
    "an adapter is trained where `peft: {r: 16}` is in the run file or a `peft_config` is given to the trainer; "
    "otherwise all weights are"
)

_ARGUMENT = "it is an argument of the trainer"

HINTS: dict[str, str] = {
    "teacher_temperature": "`temperature` is of the policy and of its teacher",
    "distillation_is_clip": "ratios are clipped by `epsilon`, and samples of another policy are corrected by"
    " `vllm_importance_sampling_clip_max`",
    "distillation_objective iw_opd_gamma iw_opd_epsilon": "IW-OPD is a function of ten lines, named by"
    " `teacher_advantage` (docs/teachers.md has it)",
    "use_successful_as_teacher solution_template": "{solution} in `teacher_prompt_template` is a rewarded answer of"
    " another rollout of the group",
    "include_environment_feedback feedback_template": "{feedback} in `teacher_prompt_template` is what the environment"
    " said, or a column",
    "environment_feedback_only_without_solution remove_thinking_from_demonstration": "`teacher_prompt_template` may be"
    " a function, path/to/file.py:name, that decides it for each rollout",
    "dont_reprompt_on_self_success": "{solution} is the answer of another rollout, for every rollout; a function as"
    " `teacher_prompt_template` may return None for those that have a reward",
    "reprompt_template": "it is `teacher_prompt_template`, with {prompt}, {solution} and {feedback}",
    "max_reprompt_len": "a teacher's prompt is never truncated: a rollout that exceeds its context has no teacher",
    "diagnostics_warning_interval diagnostics_flat_tolerance": "the run warns by itself where nothing is learnt",
    "sft_alpha": "`demonstrations` adds supervised rows, `demonstrations_coef` weighs them",
    "teacher_model": "it is `teacher`, or `teacher_model` of `DistillationTrainer`",
    "teacher_adapters": "give the adapter's folder as `teacher`",
    "offload_teacher_model": "a teacher stays on its device; `teacher` may be the URL of a server",
    "log_completions_steps": "`log_completions` logs at `logging_steps`",
    "vllm_sync_frequency weight_sync_steps": "the engine has the weights of every update; `max_staleness` lets it lag",
    "max_inflight_tasks": "it is `max_concurrent_completions`",
    "loss_add_tail distillation_add_tail add_tail_bucket": "all tokens outside the top k always form one bin:"
    " without it, moving probability out of the top k would cost nothing",
    "lmbda seq_kd": "completions are always the policy's own (lmbda=1)",
    "distillation_mode": "`teacher_top_k` is 0 for the sampled token, -1 for the whole vocabulary, or the number of"
    " tokens that are compared",
    "distillation_weight": "`teacher_coef` weighs the teacher next to the rewards",
    "kl_discount_factor": "the advantage of a token is the gap at its own position, as with a factor of 0",
    "num_loss_tokens_to_skip generate_from_teacher reverse_kl_top_1_mode": "there is no such variant here",
    "teacher_model_server": "it is `teacher`: a URL, or for several teachers {name: URL} with their names in the column"
    " `teacher_column`",
    "use_teacher_server": "`teacher` is the URL of a server, or a folder or hub id",
    "teacher_tokenizer_name_or_path use_uld_loss use_extended_uld uld_token_merge_strategy uld_use_hybrid_loss"
    " uld_hybrid_matched_weight uld_hybrid_unmatched_weight uld_crossentropy_weight uld_distillation_weight"
    " uld_student_temperature uld_teacher_temperature uld_skip_student_eos uld_skip_teacher_eos": "a"
    " teacher must have the policy's tokenizer, as other tokens cannot be compared one by one: train on its answers",
    "privileged_context": "it is a column of the rows, {context} in `teacher_prompt_template`",
    "missing_eos_penalty": "write a reward function that returns the penalty where completion_ids do not end with the "
    "eos token",
    "max_length": "prompts are never truncated, and max_completion_length limits what is sampled",
    "chat_template": "set `processing_class.chat_template` of the trainer; it has no key in a run file",
    "eos_token pad_token": "set it on the tokenizer, `processing_class` of the trainer, before it is given",
    "vllm_sampling_params": "`generation_kwargs: {stop: ..., min_tokens: ...}`, and the fields temperature, top_p,"
    " top_k and min_p",
    "unsloth_num_chunks unsloth_logit_chunk_multiplier": "`logprob_chunk_size` bounds the memory for logits",
    "unsloth_grpo_mini_batch": "`max_tokens_per_micro_batch` bounds the tokens of a micro-batch",
    "torch_dtype dtype": "it belongs to the model: `model_init_kwargs: {dtype: bfloat16}`",
    "attn_implementation attn_impl": "it belongs to the model: `model_init_kwargs: {attn_implementation: sdpa}`",
    "model_id model_name_or_path": "it is an argument of the trainer: `model`, also in a run file",
    "dataset_id dataset_name": "it is `dataset` in a run file, and `train_dataset` of the trainer",
    "prompt_data_probs prompt_probs interleave_prob domain_interleave_probs": "it is the `weight` of each of `sources`",
    "dataset_mixture datasets": "they are `sources`: {a: {dataset: a.jsonl, rows: 1000}}; without weights they come in"
    " proportion to their rows, as if they were concatenated",
    "stopping_strategy": "it has no effect: a source begins again when it is through, and max_steps or"
    " num_train_epochs ends the run",
    "dataset_config": "write it after the id: `dataset: openai/gsm8k:main`",
    "dataset_test_split": "give the evaluation's rows as `eval_dataset`",
    "dataset_streaming streaming": "a dataset loaded with `streaming=True` is streamed",
    "val_dataset": "it is `eval_dataset`, of the trainer and in a run file",
    "collate_fn": "prompts are not collated: transform rows with `dataset.map`, or on reading with `set_transform`",
    "no_apply_chat_template": "prompts that are text are never templated, messages always",
    "extra_columns": "all columns of the dataset go to the reward functions",
    "metrics_to_gather": "log with the arguments `log_metric` and `log_extra` of a reward function",
    "accelerate_config": "it is a flag: `covey grpo --accelerate_config fsdp2`",
    "use_fsdp": "`accelerate launch --use_fsdp`, or `covey grpo --accelerate_config fsdp2`",
    "reward_funcs reward_processing_classes tools environment_factory rollout_func": _ARGUMENT,
    "train_dataset eval_dataset processing_class callbacks peft_config optimizers": _ARGUMENT,
    **{name: f"`generation_kwargs: {{{name}: ...}}`" for name in ("stop", "stop_strings", "stop_token_ids")},
    "max_new_tokens max_tokens": "it is `max_completion_length`, of all turns together",
    "group_size num_return_sequences rollout_n n n_samples_per_prompt": "it is `num_generations`",
    "lr actor_learning_rate": "it is `learning_rate`",
    "epochs max_epochs": "it is `num_train_epochs`",
    "ppo_epochs": "it is `num_iterations`",
    "rollout_batch_size": "it is `generation_batch_size`, of completions",
    "use_kl_loss": "`beta` above 0 adds the KL penalty to the loss",
    "use_kl_in_reward": "it is `kl_in_reward`",
    "kl_loss_type": "it is `kl_estimator`",
    "norm_adv_by_std_in_grpo": "it is `scale_rewards`: group, batch or none",
    "loss_agg_mode": "`loss_type` chooses the average: dapo for that over tokens, grpo for that over sequences",
    "grad_clip max_norm": "it is `max_grad_norm`",
    "generate_max_len": "it is `max_completion_length`",
    "prompt_max_len": "prompts are never truncated, and `max_completion_length` limits what is sampled",
    "clip_ratio clip_range clip_eps eps_clip": "it is `epsilon`",
    "clip_ratio_high eps_clip_high": "it is `epsilon_high`",
    "kl_loss_coef kl_beta init_kl_coef": "it is `beta`",
    "adv_estimator": "it is `method` in a run file, or `advantages`",
    "max_response_length max_seq_length": "`max_completion_length` limits what is sampled",
    "train_batch_size mini_batch_size": "it is `per_device_train_batch_size`, of completions",
    "micro_train_batch_size micro_batch_size": "it is `per_device_train_batch_size`, of completions",
    "eval_batch_size": "it is `per_device_eval_batch_size`, of completions",
    "steps": "it is `max_steps`",
    "warmup": "it is `warmup_steps`",
    "gamma lam vf_coef cliprange_value": "there is no value function",
    "reward_model reward_model_path reward_model_name_or_path": "put the model's id or folder into `reward_funcs`",
    "reward_model_plugin": "put a function, as path/to/file.py:name, into `reward_funcs`",
    "ref_model ref_policy": "the reference is made from `model` where `beta` is not 0",
    "sft_model_path policy_path": "it is `model`",
    "system": "it is `system_prompt` in a run file",
    "quant_method quant_bits": "`quantization: {load_in_4bit: true}` in a run file",
    "num_processes num_machines": "it goes with `covey grpo --accelerate_config fsdp2`",
    "push_to_hub_organization": "write it before the name: `hub_model_id: organization/name`",
    "adafactor": "`optim: adafactor`",
    **{f"vllm_{name}": f"`vllm_engine_kwargs: {{{name}: ...}}`" for name in ("enforce_eager", "limit_mm_per_prompt")},
    "multi_turn_scheduler external_plugins": "give the trainer a `rollout_func` or environments",
    "completion_length_limit_scope": "`max_completion_length` is of all turns, `max_turn_length` of each",
    "model_revision": "it belongs to the model: `model_init_kwargs: {revision: main}`",
    "chat_template_path": "set `processing_class.chat_template` of the trainer",
    "gradient_checkpointing_use_reentrant": "`gradient_checkpointing_kwargs: {use_reentrant: false}`",
    "vllm_enable_prefix_caching": "`vllm_engine_kwargs: {enable_prefix_caching: true}`",
    "wandb_project": "it is the environment variable WANDB_PROJECT",
    "use_async_engine vllm_use_async_engine": "vLLM's server is asynchronous anyway; `max_staleness: 1` samples while"
    " training",
    "vllm_device": "vLLM is in the trainer's process (`vllm_mode: colocate`) or a server (`covey vllm-serve`), whose"
    " devices CUDA_VISIBLE_DEVICES chooses",
    "vllm_dtype": "`vllm_engine_kwargs: {dtype: bfloat16}`, or `covey vllm-serve --dtype bfloat16`",
    "vllm_data_parallel_size": "it belongs to the server: `covey vllm-serve --data-parallel-size 2`",
    "rlhf_type": "GRPOConfig and RLOOConfig choose the method; in a run file it is `method`",
    **{name: _QUANTISED.format(name) for name in ("load_in_4bit", "load_in_8bit")},
    **{f"bnb_4bit_{name}": _QUANTISED.format(f"bnb_4bit_{name}") for name in ("quant_type", "quant_storage")},
    "use_bnb_nested_quant": _QUANTISED.format("bnb_4bit_use_double_quant"),
    "train_type sft_type tuner_type use_peft": _ADAPTER,
    **{name: f"`{name}` is called `r` there: {_PEFT.format('r')}" for name in ("lora_rank", "lora_r")},
    **{name: _PEFT.format(name) for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")},
    **{f"lora_{name}": _PEFT.format(name) for name in ("task_type", "modules_to_save", "target_parameters")},
    "target_modules lora_target_modules": _PEFT.format("target_modules"),
}
HINTS = _by_name(HINTS)
"""Names that are refused, because dropping them would change the training, with advice."""

AS_HERE: dict[str, Any] = _by_name(
    {
        "lmbda": 1,
        "seq_kd use_teacher_server generate_from_teacher use_uld_loss": False,
        "loss_add_tail distillation_add_tail add_tail_bucket": True,
        "num_loss_tokens_to_skip kl_discount_factor sft_alpha": 0,
    }
)
"""Options of distillation with the one value that means what happens here: dropped with it, refused with another."""


class AcceptsAliases(type):
    """Metaclass of the configs: replaces old names, for dataclasses derived by users too."""

    def __call__(cls, *args: Any, **keywords: Any) -> Any:
        if inspect.unwrap(cls.__init__).__code__.co_filename != "<string>":  # type: ignore[misc]
            return super().__call__(*args, **keywords)  # an `__init__` of the user's, which calls that of a config
        made = super().__call__(*args, **renamed(cls, keywords))
        _remember(made, keywords)
        return made

    @property
    def __signature__(cls) -> Any:
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
        return inspect.Signature(parameters)


def takes_old_names(cls: T) -> T:
    """Class decorator of a config: its `__init__`, called by that of a user's class, takes old names, too."""
    kind: Any = cls
    init = kind.__init__

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **keywords: Any) -> None:
        init(self, *args, **renamed(type(self), keywords))
        _remember(self, keywords)

    kind.__init__ = wrapped
    return cls


def _remember(config: Any, keywords: Mapping[str, Any]) -> None:
    """Let scripts read a value under the old name that it was given by."""
    for name in keywords.keys() & ALIASES.keys():
        setattr(config, name, keywords[name])


def renamed(cls: type, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Replace old names in the keywords of a config class, with one warning each; unknown names raise TypeError."""
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for theirs, ours in getattr(cls, "other_names", {}).items():  # a copy is given both, and keeps them
        if theirs in keywords and ours not in keywords:
            keywords = {ours if name == theirs else name: value for name, value in keywords.items()}
    keywords = without_usual(keywords)
    result = {name: value for name, value in keywords.items() if name not in ALIASES and name != "advantage_estimator"}
    if unknown := [name for name in result if name not in fields]:
        known = [*fields, *ALIASES]
        raise TypeError(" ".join(f"{cls.__name__} has no field `{name}`{hint(name, known)}" for name in unknown))
    if keywords.get("advantage_estimator") is not None:
        _check_advantage_estimator(cls, keywords["advantage_estimator"])
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
        try:
            new_value = alias.convert(value, keywords)
        except (TypeError, ValueError, OverflowError) as error:
            raise CheckError.of("setting-type", f"`{old}={value!r}` must be a whole number.") from error
        if old == "teacher_model_kind" and new_value == "follower":
            result.setdefault("teacher_mixup_alpha", keywords.get("teacher_update_rate", 0.05))  # theirs averages
        given = result.get(alias.new, new_value)
        untouched = old in fields and given == fields[alias.new].default
        if given is not new_value and given != new_value and not untouched:
            raise CheckError.of(
                "settings-contradict",
                f"`{old}={value!r}` and `{alias.new}={given!r}` contradict each other: `{old}` is an old name of "
                f"`{alias.new}`.",
                f"Keep `{alias.new}` only.",
            )
        result[alias.new] = new_value
    return result


def without_usual(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords without options of others whose value says what happens here anyway, with a warning."""
    usual = [name for name, value in AS_HERE.items() if name in keywords and keywords[name] == value]
    if usual:
        said = ", ".join(f"`{name}={keywords[name]!r}`" for name in usual)
        warn(f"{said}: Covey always does this, so the option is dropped.", FutureWarning)
    return {name: value for name, value in keywords.items() if name not in usual}


def hint(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: advice, or the known name that is closest."""
    if name in HINTS:
        return f": {HINTS[name]}."
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.73)
    return f". Did you mean `{close[0]}`?" if close else "."


def _check_advantage_estimator(cls: Any, estimator: Any) -> None:
    """`advantage_estimator` of ms-swift chooses between methods; here the class does."""
    check_estimator(estimator)
    if estimator != cls.method:
        raise CheckError.of(
            "settings-contradict",
            f"advantage_estimator={estimator!r} contradicts {cls.__name__}: the class chooses the method.",
            f"Use {estimator.upper()}Config and {estimator.upper()}Trainer (in a run file: `method: {estimator}`).",
        )
    warn(f"`advantage_estimator={estimator!r}` is not needed: {cls.__name__} means it.", FutureWarning)


def check_estimator(name: Any) -> None:
    """ValueError for an `advantage_estimator` that is no method here."""
    if name not in ("grpo", "rloo"):
        advice = "choose one of: grpo, rloo, or see `advantages`, such as advantages='reinforce_plus_plus_baseline'."
        raise CheckError.of("setting-word", f"advantage_estimator={name!r} is not known;", advice)


# ---- arguments of trainers -------------------------------------------------------------------------------------------

RENAMED = {"config": "args", "policy": "model", "reward_model": "reward_funcs"}
"""Arguments of earlier RLOO trainers, and their names here."""

REFUSED = {
    "tokenizer": "it is called 'processing_class'",
    "reward_func reward_function rewards": "it is called 'reward_funcs'",
    "dataset": "it is called 'train_dataset'",
    "ref_policy ref_model": "there is none: the reference is made from `model` where `beta` is not 0",
    "data_collator": "there is none: prompts are not collated; leave it out",
    "compute_metrics": "there is none: log values from a reward function with its argument `log_metric`",
    "value_model": "there is none: the other completions of a prompt are the baseline",
    "formatting_func": "there is none: give the dataset a column 'prompt'",
}
REFUSED = _by_name(REFUSED)
"""Arguments of other trainers, and what to use instead."""


_ROLLOUTS = "give the trainer a `rollout_func`, tools, environments or an `engine`"
_LOSS = "register a loss (`covey.algorithms.register_loss`), which sees log-probs, ratios and entropies"
HOOKS = {
    "_generate_and_score_completions": f"{_ROLLOUTS}; or reward functions, or `register_advantages`",
    "_generate _generate_single_turn _tool_call_loop": _ROLLOUTS,
    "_calculate_rewards": "give reward functions",
    "_prepare_inputs": "change rewards, or advantages by `register_advantages`; a batch is no dictionary",
    "_compute_loss compute_liger_loss _get_high_entropy_mask get_high_entropy_mask": _LOSS,
    "_get_per_token_logps_and_entropies _get_per_token_logps _get_last_hidden_state": _LOSS,
    "get_off_policy_mask get_gamma_weights": _LOSS,
    "_tokenize_prompts _get_tool_suffix_ids": _ROLLOUTS,
    "_log_metric": "a reward function gets `log_metric`",
    "_log_completion_extra": "a reward function gets `log_extra`",
    "_get_train_sampler": "order the rows yourself with `shuffle_dataset=False`, or see `prompt_sampler`",
    "_get_eval_sampler": "order the rows of `eval_dataset` yourself",
    "_get_dataloader _prepare_input": "transform rows with `dataset.map` or `set_transform`",
    "create_optimizer_and_scheduler": "override `create_optimizer` or `create_scheduler`, or give `optimizers`",
    "prediction_step": "evaluations sample and score as training does: see `covey.EvalSuite`",
}
HOOKS = _by_name(HOOKS)
"""Methods of TRL's and transformers' trainers that scripts override and that are never called here, with advice."""

_COLUMNS = ("_set_signature_columns_if_needed", "_remove_unused_columns", "_get_collator_with_removed_columns")
NOT_NEEDED = dict.fromkeys(_COLUMNS, "every column reaches the reward functions without it")
"""Methods that are never called either, without which a run is the same, with advice."""


def accepts_old_names(init: Init) -> Init:
    """Wrap a trainer's `__init__`: rename or explain unknown arguments, and keep all arguments in `made_of`."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **keywords: Any) -> None:
        refuse_hooks(type(self))
        keywords = resolve_arguments(type(self), list(signature.parameters)[1:], keywords)
        if not args and "model" not in keywords and keywords.get("model_init") is None:
            raise TypeError(f"{type(self).__name__} needs `model`: a hub id, a folder or a model.")
        self.made_of = dict(list(signature.bind(self, *args, **keywords).arguments.items())[1:])
        init(self, *args, **keywords)

    return wrapped  # type: ignore[return-value]


def resolve_arguments(cls: Any, known: list[str], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments under the `known` names of a trainer's class; TypeError for unknown or double ones."""
    result = dict(keywords)
    for old in [name for name in keywords if name not in known]:
        if old not in RENAMED:
            raise TypeError(f"{cls.__name__} has no argument {old!r}{_argument_hint(old, known, cls.config_class)}")
        new = RENAMED[old]
        if new in keywords:
            raise TypeError(f"{old!r} is an old name of {new!r}, and {cls.__name__} was given both; keep {new!r}.")
        warn(f"{old!r} is called {new!r} in {cls.__name__}.", FutureWarning)
        result[new] = result.pop(old)
    return result


def refuse_hooks(kind: type) -> None:
    """Raise TypeError for a class that overrides a method that is never called, also by assignment.

    The class would train without the change that its author wrote. A method that only calls the original, or that
    `NOT_NEEDED` names, is warned about.
    """
    members = [member for one in kind.__mro__ for member in vars(one).items()]
    own = (*OWN, "transformers")
    theirs = {
        name: value
        for name, value in reversed(members)
        if str(getattr(value, "__module__", "")).partition(".")[0] not in own
    }
    for name, advice in {**HOOKS, **NOT_NEEDED}.items():
        if name in theirs:
            text = f"{kind.__name__} overrides `{name}`, which is not called here: {advice}."
            if name in HOOKS and not passes_through(theirs[name], name):
                raise TypeError(text)
            warn(text)


def _argument_hint(name: str, known: list[str], config_class: Any) -> str:
    if name in REFUSED:
        return f"; {REFUSED[name]}."
    if name in {field.name for field in dataclasses.fields(config_class)}:
        return f"; it is a field of the config: args={config_class.__name__}({name}=...)."
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f". It has: {', '.join(known)}."
