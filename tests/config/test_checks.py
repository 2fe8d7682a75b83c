"""Rules of the configs: settings that break each of them, and the settings that the message names."""

import dataclasses
import math
import re
import warnings
from types import NoneType, SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch

from covey.config import rules
from covey.config.algebra import planning_for
from covey.config.aliases import ALIASES
from covey.config.base import OLD
from covey.config.fields import LIMITS, none_means_unset
from covey.config.grpo import GRPOConfig
from covey.config.messages import default_of
from covey.config.rloo import RLOOConfig
from covey.core.findings import CHECKED, CONFIG, CheckError, CheckWarning

SERVER = {"use_vllm": True, "vllm_mode": "server"}

# settings of GRPOConfig of which the first is wrong
REFUSED = [
    # limits of single fields
    {"num_iterations": 0},
    {"max_completion_length": 0},
    {"steps_per_generation": 1.5},
    {"per_device_train_batch_size": 0},
    {"gradient_accumulation_steps": 0},
    {"logprob_chunk_size": -1},
    {"move_model_batches": 0},
    {"speculative_max_tokens": 0},
    {"beta": "high"},
    {"beta": -0.1},
    {"top_k": 1.5},
    {"top_k": -1},
    {"top_k": True},
    {"epsilon": None},
    {"learning_rate": -1e-6},
    *({name: math.nan} for name in ("weight_decay", "entropy_coef", "max_grad_norm", "adam_epsilon", "epsilon")),
    {"learning_rate": math.nan},
    {"max_steps": True},
    {"max_grad_norm": -1.0},
    {"weight_decay": -1.0},
    {"save_steps": 0},
    {"save_total_limit": 0},
    {"seed": -1},
    {"seed": 2**40},
    {"ddp_timeout": 0},
    {"entropy_coef": math.inf},
    {"reward_timeout": math.inf},
    {"reward_timeout": 1e10},
    *({name: math.inf} for name in ("logging_steps", "save_steps", "num_train_epochs", "warmup_steps", "adam_epsilon")),
    {"eval_steps": -3},
    {"logging_steps": -1},
    {"max_steps": -7},
    {"adam_beta1": 1.5},
    {"use_vllm": "false"},
    {"bf16": "no"},
    {"optim_args": "momentum=nan"},
    {"lr_scheduler_kwargs": {"num_cycles": math.nan}},
    {"lr_scheduler_kwargs": {"min_lr": math.inf}},
    {"lr_scheduler_kwargs": "{min_lr: 0}"},
    {"gradient_checkpointing_kwargs": 7},
    {"accelerator_config": [1]},
    {"adam_beta1": 1.0},
    {"log_completions": 2},
    {"log_completions": math.nan},
    {"metric_for_best_model": 7},
    {"replay_from": 7},
    {"vllm_server_base_url": 8000},
    {"learning_rate": None},
    {"use_cpu": 7},
    {"engine_parity": None},
    {"log_level": "foo"},
    {"debug": 7},
    {"optim": "adam"},
    {"lr_scheduler_type": None},
    {"save_strategy": 7},
    {"ddp_backend": "foo"},
    {"gradient_checkpointing": "yes"},
    {"gradient_checkpointing_kwargs": "foo"},
    {"accelerator_config": "foo.json"},
    {"fsdp": [1, 2]},
    {"optim_args": "momentum"},
    {"torch_compile_mode": "fast"},
    {"dataloader_num_workers": -1},
    {"report_to": {"wandb": True}},
    {"sapo_temperature_pos": -1.0, "loss_type": "sapo"},
    {"sapo_temperature_neg": 0.0, "loss_type": "sapo"},
    {"reward_weights": [1e39]},
    {"learning_rate": math.inf},
    {"max_staleness": -1},
    {"router_aux_loss_coef": -0.1},
    {"vllm_server_timeout": 0, **SERVER},
    {"vllm_server_concurrency": 0, **SERVER},
    {"vllm_server_port": 70000, **SERVER},
    {"sglang_concurrency": 0, "use_sglang": True},
    {"tool_timeout": 0.0},
    {"rollout_timeout": math.nan},
    {"max_tool_calling_iterations": -1},
    {"max_resample_times": -1},
    {"difficulty_floor": 0.0},
    {"temperature": 0.0},
    {"top_p": 0.0},
    {"top_p": 1.1},
    {"min_p": 2.0},
    {"repetition_penalty": 0.0},
    {"speculative_lenience": 0.0},
    {"epsilon_high": -0.1},
    {"off_policy_mask_threshold": -1.0},
    {"top_entropy_quantile": 0.0},
    {"top_entropy_quantile": 20.0},
    {"ref_model_mixup_alpha": 0.0, "sync_ref_model": True, "beta": 0.1},
    {"entropy_coef": -0.1},
    {"entropy_coef_min": -1.0},
    {"process_weight": -1.0},
    {"outcome_weight": math.inf},
    {"step_discount": 1.5},
    {"reward_timeout": 0},
    {"prompt_sampler": "hard"},
    {"attn_layout": "dense"},
    {"kl_estimator": "k4"},
    {"scale_rewards": "std"},
    {"importance_sampling_level": "word"},
    {"multi_objective_aggregation": "sum"},
    {"vllm_mode": "remote"},
    {"vllm_importance_sampling_mode": "mask"},
    {"step_baseline": "step"},
    {"engine_parity": "ignore"},
    # rules
    {"num_generations": 1},
    {"num_generations": None},
    {"num_train_epochs": 0},
    {"max_steps": 0},
    {"auto_find_batch_size": True},
    {"optim": "adalomo"},
    {"optim": "galore_adamw_layerwise"},
    {"neftune_noise_alpha": 5.0},
    {"pad_to_multiple_of": "many"},
    {"max_staleness": 1, "use_vllm": True},
    {"max_staleness": 1, "use_transformers_continuous_batching": True},
    {"max_staleness": 2, "speculative_reuse": "exact"},
    {"speculative_reuse": "exakt"},
    {"speculative_reuse": "exact", "use_vllm": True},
    {"speculative_reuse": "exact", "repetition_penalty": 1.1},
    {"keep_sampling_mask": True, "top_p": 0.8, "use_vllm": True},
    {"keep_sampling_mask": True, "top_p": 0.8, "use_sglang": True},
    {"keep_sampling_mask": True, "top_p": 0.8, "speculative_reuse": "lenient"},
    {"routing_replay": "R1"},
    {"routing_replay": "R3", "torch_compile": True},
    {"routing_replay": "R3", "use_vllm": True},
    {"tool_parser": "lama3"},
    {"use_vllm": True, "use_sglang": True},
    {"vllm_gpu_memory_utilization": 1.2},
    {"vllm_gpu_memory_utilization": "most"},
    {"vllm_sleep_level": 3},
    {"vllm_importance_sampling_clip_min": 4.0},
    {"vllm_importance_sampling_clip_min": -0.1},
    {"vllm_importance_sampling_clip_max": 0.9},
    {"geometric_mask_min": 1.01},
    {"geometric_mask_max": 0.99},
    {"optim": "moun"},
    {"optim": "muon", "optim_args": "momentm=0.9"},
    {"optim": "muon", "optim_args": "momentum=much"},
    {"optim": "muon", "optim_args": "adjust_lr_fn=none"},
    {"loss_type": "ppo"},
    {"loss_type": "rloo"},
    {"loss_type": "dr_grpo", "max_completion_length": None},
    {"epsilon": 1.0},
    {"epsilon": -0.1},
    {"epsilon": -0.1, "loss_type": "gmpo"},
    {"delta": 1.1},
    {"sync_ref_model": True},
    {"teacher": "policy"},
    {"teacher": "https://a.example", "keep_sampling_mask": True, "top_k": 4},
    {"teacher": {"a": ""}},
    {"loss_type": "gmpo", "teacher": "start"},
    {"teacher_prompt": "a", "teacher_prompt_template": "{prompt}", "teacher": "start"},
    {"teacher_schedule": {"peak": 1.0}, "teacher": "start"},
    {"teacher_beta": 0.5, "teacher": "start", "teacher_loss": "divergence"},
    {"supervised_roles": {"assistant": 0.1}},
    {"supervised_roles": {"tool": 0}},
    {"supervised_roles": {}},
    {"demonstrations_schedule": {"warmup": 1, "peak": 1.5, "decay": 2, "valley": 0.1}, "demonstrations": "a.jsonl"},
    {"demonstrations_schedule": {"peak": 0.5}, "demonstrations": "a.jsonl"},
    {"demonstrations_coef": 0.0, "demonstrations": "a.jsonl"},
    {"entropy_coef_min": 2.0},
    {"entropy_coef": 2.0, "use_adaptive_entropy": True},
    {"use_adaptive_entropy": True, "entropy_coef_delta": 0.0},
    {"process_weight": 0, "outcome_weight": 0},
    {"reward_weights": [0.0, 0.0]},
    {"reward_weights": [math.nan]},
    {"reward_weights": []},
    {"reward_weights": 1.0},
    {"reward_weights": ["a"]},
]

# config class, settings, what the error names in the place of `field=value`
REFUSED_BY_NAME = [
    (GRPOConfig, {"accelerator_config": {"split_batches": True}}, "split_batches=True"),
    (
        GRPOConfig,
        {"vllm_engine_kwargs": {"max_model_len": 9}},
        "'max_model_len': set the field `vllm_max_model_length`",
    ),
    (GRPOConfig, {"generation_kwargs": {"n": 2}}, "'n': set the field `num_generations`"),
    (GRPOConfig, {"generation_kwargs": {"top_p": 0.9}, "top_p": 0.8}, r"\['top_p'\]=0.9 and top_p=0.8 differ"),
    (GRPOConfig, {"generation_kwargs": {"top_p": 1.9}}, "top_p=1.9"),
    (GRPOConfig, {"output_dir": 5}, "output_dir=5 must be text"),
    (GRPOConfig, {"debug": ["underflow"]}, "debug='underflow' is not known.*'underflow_overflow'"),
    (GRPOConfig, {"ddp_backend": "cpu:gloo,cuda:foo"}, "ddp_backend='foo' is not known; choose one of: nccl, gloo"),
    (GRPOConfig, {"sleep_level": "deep"}, "`sleep_level='deep'` must be a whole number"),
    (GRPOConfig, {"total_episodes": "many"}, "`total_episodes='many'` must be a whole number"),
    (RLOOConfig, {"tool_parser": "lama3"}, "Did you mean 'llama3'"),
    (RLOOConfig, {"kl_estimator": "k3"}, "kl_estimator='k3'"),
    (RLOOConfig, {"reward_clip_range": (1, -1)}, r"reward_clip_range=\(1, -1\)"),
    (GRPOConfig, {"compare": "rolle"}, "compare='rolle' is not known.*'role'"),
    (GRPOConfig, {"compare": {"judge": "role_average"}}, r"compare\['judge'\]='role_average' is not known"),
    (GRPOConfig, {"compare": '{"judge": "rol"}'}, r"compare\['judge'\]='rol' is not known"),
    (GRPOConfig, {"compare": "{}"}, "compare={} must give each role"),
    (GRPOConfig, {"compare": "role_average", "dynamic_sample": True}, "dynamic_sample=True .*compare='role_average'"),
    (
        GRPOConfig,
        {"chat_template_kwargs": {"today": lambda: 1}, "save_strategy": "no"},
        "chat_template_kwargs=.*cannot be saved with a model",
    ),
    (GRPOConfig, {"gates": {"mixed": print}}, "gates: mixed=.* is a function.*gates.py:mixed"),
    (GRPOConfig, {"compare": "role_average", "gates": {"signal": True}}, "gates=.*compare='role_average'"),
    (
        GRPOConfig,
        {"compare": "role_average", "advantages": "opo"},
        "compare='role_average' and advantages='opo'",
    ),
]

ELSEWHERE = [  # settings whose findings other tests look at
    {"num_generations": 3},
    {"rollouts_per_game": 3},
    {"generation_batch_size": 7},
    {"vllm_server_base_url": "http://me:secret@a:8000", **SERVER},
    {"advantages": "opo", "multi_objective_aggregation": "normalize_then_sum"},
    {"advantages": "otb", "loss_type": "gmpo"},
    {"loss_type": "kl_cov"},
    {"loss_type": "dapo", "importance_sampling_level": "sequence"},
]

# config class, settings of which the last is pointed out, code and values of the warning
WARNED = [
    (
        GRPOConfig,
        {"max_staleness": 1, "vllm_importance_sampling_correction": False},
        "async-uncorrected",
        "max_staleness=1 ",
    ),
    (GRPOConfig, {**SERVER, "max_staleness": 1, "vllm_enable_sleep_mode": True}, "async-sleep", "max_staleness=1"),
    (GRPOConfig, {"loss_type": "cispo"}, "clip-cap", "`epsilon_high`.* 5 "),
    (GRPOConfig, {"loss_type": "cispo", "epsilon_high": 0.2}, "clip-cap", r"epsilon_high=0\.2"),
    (
        GRPOConfig,
        {"num_iterations": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 1},
        "updates-repeat",
        "num_iterations=2.*gradient_accumulation_steps=2.* 2 times",
    ),
    (
        GRPOConfig,  # 3 micro-batches a rollout batch, 2 an update
        {"gradient_accumulation_steps": 2, "steps_per_generation": 3},
        "updates-mix",
        " 3 micro-batches .* 2:",
    ),
    (RLOOConfig, {"outcome_weight": 0.0}, "kl-dropped", r"outcome_weight=0.*beta=0\.05"),
    (
        GRPOConfig,
        {"engine_dtype": "int8", "vllm_importance_sampling_correction": False},
        "engine-dtype-uncorrected",
        "engine_dtype='int8'",
    ),
    (
        GRPOConfig,
        {
            "loss_type": "vespo",
            "correct_built_in_engine": True,
            "vllm_importance_sampling_mode": "sequence_truncate",
        },
        "correction-level",
        "'sequence_truncate'.*'token_truncate'",
    ),
]

# config class, settings of which the last has no effect, the reason that the warning gives
WITHOUT_EFFECT = [
    (GRPOConfig, {"max_staleness": 2, "dataloader_num_workers": 2}, "max_staleness=2"),
    (GRPOConfig, {"prompt_sampler": "difficulty", "dataloader_num_workers": 2}, "prompt_sampler='difficulty'"),
    (GRPOConfig, {"vespo_k_pos": 1.0}, "loss_type='dapo'"),
    (GRPOConfig, {"loss_type": "sapo", "epsilon": 0.1}, "loss_type='sapo'"),
    (GRPOConfig, {"loss_type": "gmpo", "importance_sampling_level": "sequence"}, "loss_type='gmpo'"),
    (GRPOConfig, {"epsilon_high": 0.28}, "on-policy"),
    (GRPOConfig, {"off_policy_mask_threshold": 0.5}, "on-policy"),
    (GRPOConfig, {"geometric_mask_max": 1.01}, "correct_built_in_engine=True"),
    (GRPOConfig, {"optim": "adamw_stochastic", "optim_args": "a=1"}, "reads none"),
    (GRPOConfig, {"optim": "muon", "optim_target_modules": ["q_proj"]}, "treats all modules alike"),
    (GRPOConfig, {"pass_at_k": 2}, "advantages is None"),
    (GRPOConfig, {"compare": "role", "role_decay": 0.5}, "compare is 'role'"),
    (GRPOConfig, {"advantages": "opo", "pass_at_k": 2}, "advantages is 'opo'"),
    (GRPOConfig, {"advantages": "opo", "scale_rewards": "batch"}, "advantages='opo'"),
    (RLOOConfig, {"advantages": "opo", "normalize_advantages": True}, "advantages='opo'"),
    (GRPOConfig, {"kl_in_reward": True}, "beta is 0"),
    (RLOOConfig, {"kl_in_reward": True}, "RLOO"),
    (GRPOConfig, {"kl_in_reward": True, "beta": 0.1, "kl_estimator": "k2"}, "kl_in_reward"),
    (GRPOConfig, {"ref_model_sync_steps": 9}, "sync_ref_model is False"),
    (GRPOConfig, {"teacher": "start", "teacher_mixup_alpha": 0.5}, "'follower'"),
    (GRPOConfig, {"teacher": "start", "teacher_model_revision": "v1"}, "is loaded"),
    (GRPOConfig, {"teacher": "http://a:1", "teacher_model_revision": "v1"}, "is loaded"),
    (GRPOConfig, {"teacher": "start", "teacher_server_timeout": 9.0}, "no teacher is a server"),
    (GRPOConfig, {"teacher": "start", "teacher_column": "who"}, "one teacher"),
    (GRPOConfig, {"teacher": "start", "teacher_top_k": 9}, "'advantage'"),
    (
        GRPOConfig,
        {"teacher": "start", "teacher_loss": "divergence", "teacher_top_k": 9, "teacher_clip": 2.0},
        "sampled",
    ),
    (GRPOConfig, {"teacher": "start", "teacher_loss": "divergence", "teacher_advantage": "a.py:f"}, "'divergence'"),
    (GRPOConfig, {"teacher": "start", "teacher_success_reward": 0.5}, "{solution}"),
    (GRPOConfig, {"kl_estimator": "k1"}, "beta is 0"),
    (GRPOConfig, {"demonstrations_phi": True}, "demonstrations is unset"),
    (
        GRPOConfig,
        {
            "demonstrations": "a.jsonl",
            "demonstrations_schedule": {"warmup": 1, "peak": 0.5, "decay": 2, "valley": 0.1},
            "demonstrations_coef": 0.5,
        },
        "demonstrations_schedule is set",
    ),
    (GRPOConfig, {"supervised_filter": "a.py:f"}, "supervised_roles is unset"),
    (RLOOConfig, {"use_bias_correction_kl": False}, "RLOO"),
    (GRPOConfig, {"entropy_target": 1.0}, "use_adaptive_entropy is False"),
    (RLOOConfig, {"scale_rewards": "batch"}, "RLOO"),
    (
        GRPOConfig,
        {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"},
        "multi_objective_aggregation='normalize_then_sum'",
    ),
    (GRPOConfig, {"speculative_max_tokens": 9}, "speculative_reuse is not set"),
    (GRPOConfig, {"speculative_reuse": "exact", "speculative_lenience": 2.0}, "speculative_reuse='lenient'"),
    (GRPOConfig, {"num_train_epochs": 1, "speculative_reuse": "exact"}, "num_train_epochs=1"),
    (GRPOConfig, {"vllm_server_port": 9}, "use_vllm is False"),
    (GRPOConfig, {"offload_model": True}, "use_vllm is False"),
    (GRPOConfig, {"move_model_batches": 4}, "use_vllm is False"),
    (GRPOConfig, {"use_vllm": True, "vllm_server_port": 9}, "vllm_mode is 'colocate'"),
    (GRPOConfig, {**SERVER, "vllm_server_base_url": "http://a:1", "vllm_server_port": 9}, "vllm_server_base_url"),
    (GRPOConfig, {**SERVER, "max_concurrent_completions": 3}, "vllm_server_concurrency"),
    (GRPOConfig, {**SERVER, "vllm_tensor_parallel_size": 2}, "vllm_mode is 'server'"),
    (GRPOConfig, {"use_vllm": True, "offload_optimizer": True}, "vllm_enable_sleep_mode is False"),
    (GRPOConfig, {"use_vllm": True, "vllm_sleep_level": 2}, "vllm_enable_sleep_mode is False"),
    (GRPOConfig, {"use_sglang": True, "sglang_base_url": "http://a:1", "sglang_device": "cuda:1"}, "sglang_base_url"),
    (GRPOConfig, {"checkpoint_path": "x"}, "use_sglang is False"),
    (GRPOConfig, {"cache_implementation": "static"}, "the built-in engine"),
    (GRPOConfig, {"routing_replay": "R2"}, "each rollout batch has one update"),
    (GRPOConfig, {"keep_sampling_mask": True}, "top_p, top_k, min_p and repetition_penalty change nothing"),
    (GRPOConfig, {"ds3_gather_for_generation": False}, "neither FSDP nor DeepSpeed"),
    (GRPOConfig, {"transformers_continuous_batching_config": {"a": 1}}, "max_concurrent_completions"),
    (GRPOConfig, {"use_transformers_continuous_batching": True}, "the built-in engine"),
    (GRPOConfig, {"vllm_importance_sampling_mode": "token_mask"}, "correct_built_in_engine=True"),
    (GRPOConfig, {"engine_dtype": "int8", "correct_built_in_engine": True}, "corrected anyway"),
    (GRPOConfig, {**SERVER, "engine_dtype": "float8"}, "--quantization fp8"),
    (
        RLOOConfig,
        {"vllm_importance_sampling_correction": False, "correct_built_in_engine": True},
        "vllm_importance_sampling_correction is False",
    ),
    (GRPOConfig, {"num_completions_to_print": 3}, "log_completions is False"),
    (GRPOConfig, {"log_completions_total_limit": 3}, "export_completions is False"),
    (GRPOConfig, {"pad_to_multiple_of": 8}, "padded"),
    (GRPOConfig, {"label_smoothing_factor": 0.1}, "supervised training"),
    (GRPOConfig, {"optim": "adamw_torch", "optim_args": "a=1"}, "optim='adamw_torch' reads none"),
    (GRPOConfig, {"optim_target_modules": ["q_proj"]}, "all modules alike"),
    (GRPOConfig, {"liger_kernel_config": {"rope": True}}, "logprob_chunk_size"),
    (GRPOConfig, {"use_liger_kernel": True}, "logprob_chunk_size"),
    (GRPOConfig, {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"a": 1}}, "'constant' has no settings"),
    (GRPOConfig, {"lr_scheduler_type": "constant", "warmup_steps": 5}, "'constant_with_warmup' does"),
    (GRPOConfig, {"save_strategy": "no", "save_steps": 5}, "save_strategy is 'no'"),
    (GRPOConfig, {"save_strategy": "no", "save_only_model": True}, "no checkpoints"),
    (GRPOConfig, {"eval_steps": 5}, "eval_strategy is 'no'"),
    (GRPOConfig, {"eval_delay": 5}, "eval_strategy is 'no'"),
    (GRPOConfig, {"logging_strategy": "epoch", "logging_steps": 5}, "logging_strategy is 'epoch'"),
    (GRPOConfig, {"max_steps": 5, "num_train_epochs": 1}, "max_steps=5"),
    (GRPOConfig, {"hub_strategy": "end"}, "push_to_hub is False"),
    (GRPOConfig, {"project": "mine"}, "trackio"),
    (GRPOConfig, {"ddp_find_unused_parameters": False}, "one process"),
    (GRPOConfig, {"fsdp_config": {"min_num_params": 1}}, "fsdp is not set"),
    (GRPOConfig, {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {"use_reentrant": False}}, "off"),
    (GRPOConfig, {"average_tokens_across_devices": False}, "all processes"),
    (GRPOConfig, {"use_cache": True}, "cache of its own"),
    (GRPOConfig, {"shuffle_dataset": False, "data_seed": 3}, "shuffle_dataset is False"),
    (GRPOConfig, {"metric_for_best_model": "reward"}, "eval_strategy is 'no'"),
    (GRPOConfig, {"run_name": "mine"}, "no tracker"),
    (GRPOConfig, {"eval_do_concat_batches": False}, "predictions"),
    (GRPOConfig, {"eval_use_gather_object": True}, "predictions"),
    (GRPOConfig, {"include_for_metrics": ["loss"]}, "predictions"),
    (GRPOConfig, {"dataloader_pin_memory": False}, "no tensors"),
    (GRPOConfig, {"dataloader_multiprocessing_context": "spawn"}, "dataloader_num_workers is 0"),
    (GRPOConfig, {"remove_unused_columns": True}, "reward functions"),
    (GRPOConfig, {"bf16_full_eval": True}, "evaluation"),
    (GRPOConfig, {"prediction_loss_only": True}, "predictions"),
    (GRPOConfig, {"batch_eval_metrics": True}, "predictions"),
    (GRPOConfig, {"include_num_input_tokens_seen": "all"}, "num_tokens"),
    (GRPOConfig, {"dataloader_drop_last": True}, "rollout batch"),
]


def test_arguments_that_an_optimizer_reads_have_an_effect():
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckWarning)
        GRPOConfig(optim="sgd", optim_args="momentum=0.9")


def refusal(cls, settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CheckError) as error:
            cls(**settings)
    return str(error.value)


def label(case):
    """Settings without the addresses of functions, which differ between the processes among which tests are spread."""
    if not isinstance(case, dict):
        return None
    return re.sub(r" at 0x\w+", "", "-".join(f"{name}={value}" for name, value in case.items()))


@pytest.mark.parametrize("settings", REFUSED, ids=label)
def test_a_wrong_setting_is_refused_by_name_and_value(settings):
    name, value = next(iter(settings.items()))
    assert f"{name}={value!r}" in refusal(GRPOConfig, settings)


@pytest.mark.parametrize(("cls", "settings", "named"), REFUSED_BY_NAME, ids=label)
def test_a_wrong_entry_or_default_is_refused_by_name(cls, settings, named):
    assert re.search(named, refusal(cls, settings))


@pytest.mark.slow
@pytest.mark.parametrize("value", [None, "foo", "", -1, 7, True, [], {}, [1, 2], math.nan, math.inf], ids=repr)
@pytest.mark.filterwarnings("ignore")
def test_every_field_takes_a_value_or_names_itself(value, monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # transformers sets it
    hints, taken = get_type_hints(RLOOConfig), set()
    for name in (field.name for field in dataclasses.fields(RLOOConfig) if field.init and field.name not in OLD):
        try:
            RLOOConfig(**{"use_cpu": True, name: value})
            taken.add(name)
        except (ValueError, ImportError) as error:
            new = ALIASES[name].new if name in ALIASES else name
            assert name in str(error) or str(new) in str(error), (name, value)
    optional = {name for name, hint in hints.items() if NoneType in get_args(hint)}
    unset = {name for name in taken if none_means_unset(name, default_of(RLOOConfig, name))}
    assert value is not None or taken - optional - unset == {"debug", "max_grad_norm"}


def test_none_is_a_default_where_nothing_else_is_meant(tmp_path):
    names = (
        "top_p",
        "top_k",
        "repetition_penalty",
        "vllm_mode",
        "vllm_server_host",
        "vllm_server_port",
        "vllm_sleep_level",
    )
    args = GRPOConfig(output_dir=str(tmp_path), **dict.fromkeys(names))
    assert [getattr(args, name) for name in names] == [1.0, 0, 1.0, "colocate", "0.0.0.0", 8000, 1]
    assert GRPOConfig(output_dir=str(tmp_path), max_grad_norm=None).max_grad_norm == 0  # which does not clip


def test_settings_that_cannot_work_are_named_together():
    wrong = {"top_p": 3, "beta": -1, "loss_type": "x"}
    assert all(f"{name}={value!r}" in refusal(GRPOConfig, wrong) for name, value in wrong.items())
    by_rule = {"sync_ref_model": True, "entropy_coef_min": 2.0}
    assert all(f"{name}={value!r}" in refusal(GRPOConfig, by_rule) for name, value in by_rule.items())


@pytest.mark.parametrize(
    "given",
    [
        {"pad_token_id": 0},
        {"num_beams": 1},
        {"use_cache": True},
        {"output_scores": True},
        {"skip_special_tokens": True},
    ],
)
def test_idle_keys_of_generation_kwargs_are_dropped_with_a_warning(tmp_path, given):
    (name,) = given
    with pytest.warns(UserWarning, match=f"generation_kwargs.*{name}.*has no effect"):
        args = GRPOConfig(output_dir=str(tmp_path), generation_kwargs={**given, "do_sample": True, "stop": ["x"]})
    assert args.generation_kwargs == {"stop": ["x"]}


@pytest.mark.parametrize(("cls", "settings", "code", "values"), WARNED, ids=label)
def test_a_doubtful_setting_is_pointed_out_once(cls, settings, code, values):
    with pytest.warns(CheckWarning, match=values) as caught:
        cls(**settings)
    assert [warning.message.finding.code for warning in caught] == [code]
    assert [warning.filename for warning in caught] == [__file__]


def test_an_ignored_precision_is_refused_on_no_machine(monkeypatch):
    """transformers asks this of the hardware, here as on a CPU without bfloat16 and on one that multiplies it."""
    for supported in (False, True):
        monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda answer=supported: answer)
        with pytest.warns(UserWarning, match="bf16_full_eval"):
            assert GRPOConfig(bf16_full_eval=True, bf16=False).bf16_full_eval


def test_tf32_of_a_gpu_is_no_error_on_a_cpu(monkeypatch):
    """Neither in a run file that was moved here nor in the plan of a GPU's run, which has the effect there."""
    for module in ("base", "training"):
        monkeypatch.setattr(f"covey.config.{module}.has_accelerator", lambda: False)
    with pytest.warns(UserWarning, match="tf32=True` has no effect"):
        assert GRPOConfig(tf32=True, bf16=False, use_cpu=True).tf32
    with warnings.catch_warnings(), planning_for(1, gpu=True):
        warnings.simplefilter("error")
        assert GRPOConfig(tf32=True).tf32


@pytest.mark.parametrize(("cls", "settings", "reason"), WITHOUT_EFFECT, ids=label)
def test_a_setting_without_effect_is_pointed_out_once(cls, settings, reason):
    name, value = list(settings.items())[-1]
    with pytest.warns(UserWarning) as caught:
        cls(**settings)
    (warning,) = caught
    finding = warning.message.finding
    assert finding.code == "setting-unread"
    assert finding.evidence.startswith(f"`{name}={value!r}`")
    assert reason in finding.evidence
    assert warning.filename == __file__


def test_several_gpus_need_several_processes():
    found = next(rules.check_batch_settings(SimpleNamespace(n_gpu=4)))
    assert found.code == "gpus-in-one-process"
    assert "--num_processes 4" in found.fix


@pytest.mark.slow
def test_every_rule_has_a_case(monkeypatch):
    acted = set()

    def recorded(rule):
        def checked(args):
            for finding in rule(args):
                acted.add(rule.__name__)
                yield finding

        return checked

    names = {rule.__name__ for rule in rules.RULES}
    assert len(names) > 25
    monkeypatch.setattr(rules, "RULES", tuple(map(recorded, rules.RULES)))
    others = [*REFUSED_BY_NAME, *WARNED, *WITHOUT_EFFECT]
    for cls, settings, *_ in [*((GRPOConfig, case) for case in REFUSED), *others]:
        try:
            cls(**settings)
        except ValueError:
            continue
    assert acted == names


def test_limits_accept_the_default_and_refuse_a_value_beyond():
    for field in RLOOConfig.__dataclass_fields__.values():
        limits = LIMITS.get(field.name)
        if limits is None:
            continue
        if field.default is not None:
            assert not [*limits.check(field.name, field.default)]
        low = limits.ge - 1 if limits.ge is not None else limits.gt
        (found,) = limits.check(field.name, "no such word" if limits.choices else low)
        assert found.code == ("setting-word" if limits.choices else "setting-range")
        assert found.evidence.startswith(f"{field.name}=")


@pytest.mark.slow
def test_every_code_of_a_config_has_a_case():
    """But those of the machine, of run files and of studies, which have tests of their own."""
    found, cases = set(), [*REFUSED_BY_NAME, *WARNED, *((GRPOConfig, case) for case in [*REFUSED, *ELSEWHERE])]
    for cls, settings, *_ in cases:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                cls(**settings)
            except CheckError as error:
                found.update(error.codes)
        found.update(one.message.finding.code for one in caught if isinstance(one.message, CheckWarning))
    others = ("launcher-variables", "gpus-in-one-process", "bf16-emulated", "optimizer-sharded", "run-", "study-")
    of_configs = {code for code, row in CHECKED.items() if row.stage == CONFIG and not code.startswith(others)}
    assert of_configs - found == set()


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo", "gmpo"])
@pytest.mark.parametrize("cls", [GRPOConfig, RLOOConfig])
@pytest.mark.filterwarnings("ignore:loss_type='cispo' needs")
def test_every_loss_is_accepted_by_both_methods(cls, loss_type):
    assert cls(loss_type=loss_type).loss_type == loss_type


def test_a_registered_loss_is_accepted_and_may_read_any_option(monkeypatch, recwarn):
    from covey.algorithms import LOSS_TYPES, register_loss

    register_loss("mine", lambda x: -x.advantages)
    try:
        args = GRPOConfig(loss_type="mine", vespo_k_pos=1.0, epsilon=0.5)
    finally:
        del LOSS_TYPES["mine"]
    assert args.loss_type == "mine"
    assert not recwarn.list


@pytest.mark.parametrize(
    "settings",
    [
        {"epsilon_high": 0.28, "num_iterations": 2},
        {"delta": 3.0, "num_iterations": 2},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"beta": 0.04, "sync_ref_model": True, "ref_model_sync_steps": 64},
        {"entropy_coef": 0.01, "use_adaptive_entropy": True, "entropy_target": 0.5},
        {"log_completions": True, "num_completions_to_print": 4, "log_unique_prompts": True},
        {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4, "num_iterations": 2},
        {"reward_weights": [1.0, 0.0]},
        {"speculative_reuse": "lenient", "speculative_lenience": 1.2, "speculative_max_tokens": 10},
        {"speculative_reuse": "exact", "max_steps": 100},
        {"correct_built_in_engine": True, "vllm_importance_sampling_mode": "token_mask"},
        {"correct_built_in_engine": True, "loss_type": "vespo"},
        {"engine_dtype": "auto", "vllm_importance_sampling_mode": "token_mask", "correct_built_in_engine": True},
        {"engine_dtype": "int8", "vllm_importance_sampling_clip_max": 2.0},
        {"engine_parity": "warn"},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_sound_settings_cause_no_warning(settings, recwarn):
    GRPOConfig(**settings)
    assert not recwarn.list


@pytest.mark.parametrize("loss_type", ["bnpo", "dr_grpo", "dapo", "cispo"])
def test_ratios_of_completions_in_a_mean_over_tokens(tmp_path, loss_type):
    with pytest.warns(CheckWarning) as caught:
        GRPOConfig(output_dir=str(tmp_path), loss_type=loss_type, importance_sampling_level="sequence", epsilon_high=5)
    assert "ratio-length" in [warning.message.finding.code for warning in caught]


def test_a_backend_that_a_script_registered_is_taken(monkeypatch, tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    args.ddp_backend = "own"
    (found,) = rules.check_fields(args)
    assert (found.code, "ddp_backend='own'" in found.evidence) == ("setting-word", True)
    monkeypatch.setattr(torch.distributed.Backend, "backend_list", ["gloo", "own"])
    assert not rules.check_fields(args)
