"""Every field of a config changes something or says that it does not.

A field alone, at another value than its default, is refused, pointed out, or changes a part of the trainer (`built`) or
the outcome of a run (`outcome`). One that needs another setting has a row with that setting in `WITH`. To add a field,
nothing is needed where a part holds it; otherwise a row.
"""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from covey.algorithms import LOSS_TYPES
from covey.config import engines
from covey.config.base import FIELDS
from covey.config.fields import LIMITS
from covey.config.grpo import GRPOConfig
from covey.config.messages import default_of
from covey.config.rloo import RLOOConfig
from covey.config.teachers import OF_SERVERS
from covey.trainer import served_teachers
from covey.trainer.engines import servers
from tests.support import runs, tiny
from tests.support.outcomes import built, differences, outcome, said, with_dropout


def each(names: tuple[str, ...], value: Any) -> dict[str, Any]:
    return {name: dict(value) for name in names}


# Values to try where the type does not give one
VALUES: dict[str, Any] = {
    **{"optim": "sgd", "lr_scheduler_type": "linear", "loss_type": "sapo", "advantages": "opo"},
    **{"scale_rewards": "batch", "kl_estimator": "k2", "tool_parser": "llama3", "report_to": "none"},
    **{"logging_strategy": "epoch", "save_strategy": "steps", "eval_strategy": "no", "hub_strategy": "end"},
    **{"reward_weights": [0.5], "reward_clip_range": (-1.0, 1.0), "num_generations": 2, "temperature": 0.5},
    **{"prompt_sampler": "difficulty", "gates": {"signal": True}},
    **{"model_init_kwargs": {"dtype": "float32"}, "generation_kwargs": {"stop": ["1"]}},
    **{"chat_template_kwargs": {"unknown": 1}, "lr_scheduler_kwargs": {"num_cycles": 2}},
    **{"optim_args": "momentum=0.5", "optim_target_modules": ["q_proj"], "max_completion_length": 4},
    **each(("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"), {"use_reentrant": True}),
    **{"accelerator_config": {"even_batches": False}, "fsdp_config": {"min_num_params": 1}, "label_names": ["x"]},
    **{"liger_kernel_config": {"rope": True}, "include_for_metrics": ["loss"], "debug": "underflow_overflow"},
    **{"train_sampling_strategy": "group_by_length", "include_num_input_tokens_seen": "all"},
    **{"pad_to_multiple_of": 8, "steps_per_generation": 4, "per_device_train_batch_size": 8, "max_steps": 3},
    **{"gradient_accumulation_steps": 4, "generation_batch_size": 16, "vllm_gpu_memory_utilization": 0.5},
    **{"vllm_server_base_url": "http://a:1", "sglang_base_url": "http://a:1", "num_generations_eval": 2},
    **{
        "adam_beta1": 0.5,
        "adam_beta2": 0.5,
        "epsilon": 0.3,
        "delta": 3.0,
        "entropy_coef_max": 0.5,
        "learning_rate": 0.5,
    },
    **{
        "learning_rate": 0.5,
        "max_grad_norm": 1e-3,
        "top_entropy_quantile": 0.3,
        "logging_steps": 2,
        "use_cpu": True,
        "cov_share": 0.5,
    },
    **{
        "compare": "role",
        "rollouts_per_game": 2,
        "pass_at_k": 2,
        "speculative_reuse": "exact",
        "max_steps": 3,
        "vllm_sleep_level": 2,
    },
    **{"teacher": "start", "teacher_prompt": "answer", "teacher_prompt_template": "{prompt} {answer}"},
    **{"teacher_schedule": {"warmup": 1, "peak": 0.5, "decay": 2, "valley": 0.1}},
    **{"teacher_model_init_kwargs": {"dtype": "bfloat16"}, "teacher_advantage": "tests/support/gaps.py:none"},
    **{"supervised_roles": {"tool": 0.5}, "supervised_filter": "tests/support/objective_cases.py:bare_batch"},
    **{"demonstrations": "tests/support/demonstrations.jsonl"},
    **{"demonstrations_schedule": {"warmup": 1, "peak": 0.5, "decay": 2, "valley": 0.1}},
    "engine_dtype": "int8",
    **{"max_tokens_per_micro_batch": 16, "vllm_importance_sampling_clip_min": 0.5, "entropy_target": 1.0},
    **{"geometric_mask_min": 0.5, "geometric_mask_max": 1.5},
    **each(("transformers_continuous_batching_config", "vllm_engine_kwargs", "sglang_server_args"), {"a": 1}),
}

# Fields whose effect needs other hardware, processes, services or models than a test here has, and where it is shown
ELSEWHERE = {
    **dict.fromkeys(("deepspeed", "fsdp", "parallelism_config"), "several processes: tests/trainer/distributed"),
    **dict.fromkeys(("bf16", "fp16", "tf32", "use_cpu"), "hardware: tests/config/test_config_fields.py, test-gpu"),
    **dict.fromkeys(("freeze_vit", "freeze_aligner", "freeze_llm"), "images: tests/trainer/vision"),
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), "transformers keeps them for scripts to read"),
    **dict.fromkeys(("hub_model_id", "hub_private_repo", "hub_token", "hub_revision"), "`trainer.push_to_hub()`"),
    **dict.fromkeys(("push_to_hub", "log_completions_hub_repo"), "the hub: tests/trainer/integrations"),
    **dict.fromkeys(("log_level", "log_level_replica"), "messages of transformers"),
    "local_rank": "the number of a process, which a launcher gives",
    "normalize_over": "rollouts of several turns: tests/trainer/agents",
    "output_dir": "every run has one of its own",
    "report_to": "packages of trackers: tests/trainer/integrations/test_trackers.py",
    "resume_from_checkpoint": "tests/trainer/test_resume.py",
    "restore_callback_states_from_checkpoint": "callbacks that keep a state: transformers restores it",
    "router_aux_loss_coef": "a mixture of experts: tests/trainer/models",
    "routing_replay": "a mixture of experts: tests/trainer/models/test_routing_replay.py",
    "disable_tqdm": "a terminal: tests/observability/test_progress_display.py",
    "trust_remote_code": "a checkpoint with code of its own: tests/policy/test_loading.py",
    "dataloader_num_workers": "processes: tests/data/test_data_workers.py",
    "entropy_coef_min": "a weight that has fallen: tests/trainer/test_loss_terms.py",
    "use_vllm": "vLLM, or a server: tests/trainer/servers",
    "use_sglang": "a server: tests/trainer/servers",
    "ignore_data_skip": "a resumed run: transformers begins the epoch again",
    "stream_rewards": "the order of calls: tests/trainer/test_streamed_rewards.py",
    "reward_isolation": "a process of its own: tests/runtime/test_isolation.py",
    "logging_nan_inf_filter": "a loss that is NaN, in the loop of transformers",
    "greater_is_better": "an evaluation decides: tests/trainer/evaluation",
    **dict.fromkeys(("step_baseline", "process_weight", "step_discount"), "rewards of steps: tests/rewards"),
    "debug": "hooks of transformers that print at an overflow",
    "torch_compile_backend": "a compiler; torch_compile shows that it is used",
}

ROWS = tiny.rows()
SUITE: dict[str, Any] = {"given": {"eval_dataset": ROWS[:2]}, "per_device_eval_batch_size": 4}
EVALUATED: dict[str, Any] = {**SUITE, "eval_strategy": "steps", "eval_steps": 2}
SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
OFF_POLICY: dict[str, Any] = {"gradient_accumulation_steps": 1, "num_iterations": 2, "learning_rate": 0.1}
ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.3}
VLLM = {"use_vllm": True, "vllm_mode": "server"}


def lookup(query: str) -> str:
    """Look it up.

    Args:
        query: What to look for.
    """
    return query


async def plays(row: Any, engine: Any) -> Any:
    """Play a rollout of one turn."""
    episode = engine.begin()
    await episode.sample()
    return episode.done(role="first")


async def plays_game(row: Any, engine: Any, n: int) -> Any:
    """Play all rollouts of a game."""
    return [await plays(row, engine) for _ in range(n)]


# Settings with which a field changes the outcome of a run, for fields that no part of a trainer holds
RUN: dict[str, dict[str, Any]] = {
    **each(("generation_kwargs", "loss_type", "max_grad_norm", "max_steps", "top_entropy_quantile"), {}),
    **each(("mask_truncated_completions", "shuffle_dataset", "data_seed", "scale_rewards"), {}),
    **each(("log_entropy", "gradient_checkpointing", "max_tokens_per_micro_batch"), {}),
    **each(("full_determinism",), {}),
    "logging_first_step": {"logging_strategy": "no"},
    **each(("logging_steps", "logging_strategy"), {"max_steps": 4}),
    "normalize_advantages": {"scale_rewards": "none", "optim": "sgd"},
    "reward_clip_range": {},
    "outcome_weight": {"optim": "sgd", "max_grad_norm": 0.0},
    "multi_objective_aggregation": {"given": {"reward_funcs": [runs.longer, runs.digits]}},
    "disable_dropout": {"given": {"model": with_dropout()}},
    "eval_on_start": SUITE,
    "eval_strategy": SUITE,
    "eval_steps": {**SUITE, "eval_strategy": "steps"},
    "eval_delay": EVALUATED,
    "load_best_model_at_end": {**EVALUATED, **SAVED, "eval_steps": 1, "metric_for_best_model": "eval_loss"},
    "metric_for_best_model": {**EVALUATED, **SAVED, "load_best_model_at_end": True, "save_steps": 2},
    "save_steps": {"save_strategy": "steps"},
    "save_total_limit": SAVED,
    "save_only_model": SAVED,
    "num_train_epochs": {"max_steps": -1},
    "epsilon": {**OFF_POLICY, "epsilon": 0.01},
    "ref_model_sync_steps": {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 9},
    "num_completions_to_print": {"log_completions": True},
    "ref_model_mixup_alpha": {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 1},
    "pass_at_k": {"advantages": "pass_at_k", "given": {"reward_funcs": runs.digits}},  # some of which are 0
    "entropy_target": ADAPTIVE,
    **each(("entropy_coef_max", "entropy_coef_delta"), {**ADAPTIVE, "entropy_target": 99.0}),  # the weight rises
}
RUN_VALUES: dict[str, Any] = {
    **{"eval_strategy": "epoch", "eval_steps": 2, "eval_delay": 9, "metric_for_best_model": "eval_loss"},
    **{"save_steps": 1, "save_total_limit": 1, "num_train_epochs": 1, "ref_model_sync_steps": 1},
    **{"entropy_coef_max": 0.3, "entropy_target": 99.0, "gradient_checkpointing": True},
}

# Settings with which a field that is pointed out alone is held by a part
RECOMPUTED = {"gradient_checkpointing": True}
STEP_BY_STEP = {"gradient_accumulation_steps": 1, "num_iterations": 2}  # off-policy, so that ratios are not 1
TAUGHT = {"teacher": "start"}
NAMED_ROWS = [{**row, "teacher": "a", "x": "a"} for row in ROWS]
SGLANG = {"use_sglang": True, "sglang_base_url": "http://a:1"}
TOOLS: dict[str, Any] = {"given": {"tools": [lookup], "train_dataset": tiny.rows(conversational=True)}}
SHOWN = {"demonstrations": "tests/support/demonstrations.jsonl"}
WITH: dict[str, dict[str, Any]] = {
    **each([f"demonstrations_{name}" for name in ("per_step", "coef", "schedule", "phi")], SHOWN),
    "supervised_roles": TOOLS,
    "supervised_filter": {**TOOLS, "supervised_roles": {"tool": 0.1}},
    **{name: {"loss_type": loss} for loss, row in LOSS_TYPES.items() for name in row.reads or ()},
    **each(("epsilon", "epsilon_high", "delta"), {**STEP_BY_STEP, "loss_type": "grpo"}),
    **each(("off_policy_mask_threshold", "importance_sampling_level"), {**STEP_BY_STEP, "loss_type": "grpo"}),
    "cov_share": {**STEP_BY_STEP, "loss_type": "kl_cov"},
    "kl_cov_coef": {**STEP_BY_STEP, "loss_type": "kl_cov"},
    **each(("kl_estimator", "use_bias_correction_kl", "kl_in_reward", "sync_ref_model"), {"beta": 0.1}),
    "max_resample_times": {"dynamic_sample": True},
    "compare": {"given": {"rollout_func": plays}},
    "role_decay": {"compare": "role_average", "given": {"rollout_func": plays}},
    "rollouts_per_game": {"given": {"rollout_func": plays_game}},
    "opponents_kept": {"given": {"rollout_func": plays, "seats": {"other": "policy:1"}}},
    "difficulty_floor": {"prompt_sampler": "difficulty"},
    **each(("speculative_lenience", "speculative_max_tokens"), {"speculative_reuse": "lenient"}),
    "keep_sampling_mask": {"top_p": 0.9},
    **each(("teacher_loss", "teacher_advantage", "teacher_coef", "teacher_schedule", "teacher_clip"), TAUGHT),
    **each(("teacher_prompt", "teacher_prompt_template"), TAUGHT),
    **each(("teacher_top_k", "teacher_beta"), {**TAUGHT, "teacher_loss": "divergence", "teacher_top_k": 4}),
    "teacher_success_reward": {**TAUGHT, "teacher_prompt_template": "{prompt} {solution}"},
    "teacher_column": {"teacher": {"a": "start"}, "given": {"train_dataset": NAMED_ROWS}},
    **each(("teacher_mixup_alpha", "teacher_sync_steps"), {"teacher": "follower"}),
    **each(tuple(f"teacher_server_{name}" for name in OF_SERVERS), {"teacher": "http://a:1"}),
    "log_unique_prompts": {"log_completions": True},
    "log_completions_total_limit": {"export_completions": True},
    "warmup_steps": {"lr_scheduler_type": "linear"},
    "lr_scheduler_kwargs": {"lr_scheduler_type": "cosine_with_restarts"},
    "optim_args": {"optim": "sgd"},
    **dict.fromkeys(("tool_timeout", "rollout_timeout", "tool_parser", "max_tool_calling_iterations"), TOOLS),
    **dict.fromkeys(("max_turn_length", "trained_turns", "unstable_chat_template"), TOOLS),
    **each((*engines.CORRECTION_OPTIONS, *engines.GEOMETRIC), {"correct_built_in_engine": True}),
    "vllm_importance_sampling_correction": VLLM,
    **{f"vllm_server_{name}": VLLM for name in ("base_url", "host", "port", "timeout", "api_key", "concurrency")},
    **{f"vllm_server_{name}_timeout": VLLM for name in ("request", "sync")},
    **{f"vllm_weight_{name}": VLLM for name in ("transfer", "folder", "bucket", "differences")},
    **dict.fromkeys(("vllm_group_port", "vllm_lora_sync", "vllm_structured_outputs_regex", "max_staleness"), VLLM),
    "vllm_enable_sleep_mode": VLLM,
    "server_pool_file": VLLM,
    **{f"sglang_{name}": SGLANG for name in ("api_key", "server_timeout", "request_timeout", "sync_timeout")},
    **{f"sglang_{name}": SGLANG for name in ("base_url", "concurrency", "weight_transfer", "group_port")},
    "checkpoint_path": {**SGLANG, "sglang_weight_transfer": "disk"},
    "generation_batch_size": {},
}
WITH_VALUES = {"max_staleness": 1, "sglang_base_url": "http://b:1", "sglang_group_port": 9, "vllm_group_port": 9}
WITH_VALUES["server_pool_file"] = "tests/support/servers/pool.txt"

# Fields that never have an effect here: a warning, or an error, is all that they do
NEVER = {
    *("auto_find_batch_size", "average_tokens_across_devices", "batch_eval_metrics", "bf16_full_eval"),
    *("cache_implementation", "dataloader_drop_last", "dataloader_in_order", "dataloader_persistent_workers"),
    *("dataloader_pin_memory", "dataloader_prefetch_factor", "eval_accumulation_steps", "eval_do_concat_batches"),
    *("eval_use_gather_object", "fp16_full_eval", "include_for_metrics", "include_num_input_tokens_seen"),
    *("label_names", "label_smoothing_factor", "length_column_name", "liger_kernel_config", "neftune_noise_alpha"),
    *("pad_to_multiple_of", "prediction_loss_only", "remove_unused_columns", "train_sampling_strategy", "use_cache"),
    *("transformers_continuous_batching_config", "use_liger_kernel", "use_transformers_continuous_batching"),
    *("use_transformers_paged", "vllm_importance_sampling_cap"),  # old names
}

# Fields that are pointed out alone, and whose effect a test here cannot have
NEED_MORE = {
    **dict.fromkeys(("hub_always_push", "hub_strategy"), "the hub"),
    **dict.fromkeys(("project", "run_name"), "a tracker: tests/trainer/integrations/test_trackers.py"),
    **{f"trackio_{name}_id": "trackio" for name in ("space", "bucket", "static_space")},
    **{f"ddp_{name}": "processes" for name in ("find_unused_parameters", "bucket_cap_mb", "broadcast_buffers")},
    **dict.fromkeys(("ddp_static_graph", "ddp_backend", "log_on_each_node", "save_on_each_node"), "processes"),
    **dict.fromkeys(("fsdp_config", "ds3_gather_for_generation"), "sharded weights: tests/trainer/distributed"),
    **dict.fromkeys(("vllm_mode", "vllm_model_impl", "vllm_sleep_level", "vllm_gpu_memory_utilization"), "vLLM"),
    **dict.fromkeys(("vllm_max_model_length", "vllm_tensor_parallel_size", "vllm_engine_kwargs"), "vLLM"),
    **dict.fromkeys(("move_model_batches", "offload_model", "offload_optimizer"), "vLLM: tests/real_vllm"),
    **dict.fromkeys(("sglang_device", "sglang_server_args"), "SGLang: tests/trainer/servers"),
    **dict.fromkeys(("accelerator_config", "model_init_kwargs", "chat_template_kwargs"), "keys that differ"),
    **dict.fromkeys(("dataloader_multiprocessing_context",), "tests/data/test_data_workers.py"),
    "log_multimodal": "images: tests/observability/test_image_logging.py",
    "optim_target_modules": "an optimizer of another package",
    "replay_from": "a record: tests/trainer/test_replay.py",
    **{f"teacher_model_{name}": "a folder: tests/trainer/test_teachers.py" for name in ("init_kwargs", "revision")},
    "torch_empty_cache_steps": "a GPU",
}


def value_of(name: str) -> Any:
    """Another value than the default, by the type and the limits of a field."""
    if name in VALUES:
        return VALUES[name]
    default, limits = default_of(RLOOConfig, name), LIMITS.get(name)
    if limits is not None and limits.choices:
        return next(word for word in limits.choices if word != default)
    kind = str(RLOOConfig.__dataclass_fields__[name].type)
    if isinstance(default, bool) or kind in ("bool", "bool | None", str(bool)):
        return not default
    if isinstance(default, str) or "str" in kind:
        return "x"
    if "float" in kind:
        return (default or 0.0) * 0.5 + 0.25
    if "int" in kind:
        return (default or 0) + 3
    return "x"


def method_of(name: str) -> str:
    return "rloo" if name in ("normalize_advantages", "reward_clip_range") else "grpo"


@functools.cache
def usual_parts(folder: Any, method: str) -> tuple[Any, set[str]]:
    """Parts of a trainer with the settings of tests, and where they differ from one to the next."""
    first, second = built(folder, method), built(folder, method)
    return first, differences(first, second)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("usual")


NAMES = sorted(FIELDS | {field.name for field in dataclasses.fields(RLOOConfig)} - {"method"})
OWN = sorted(set(NAMES) & (FIELDS | {"normalize_advantages", "reward_clip_range"}))


@pytest.mark.parametrize("name", [name for name in OWN if name not in (*ELSEWHERE, *RUN)])
def test_a_field_alone_changes_a_part_of_the_trainer_or_says_that_it_does_not(name, home):
    method = method_of(name)
    made, named = said(name, lambda: built(home, method, **{name: value_of(name)}))
    usual, unsteady = usual_parts(home, method)
    assert named or differences(usual, made) - unsteady


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
@pytest.mark.filterwarnings("ignore")
def test_a_field_changes_the_outcome_of_a_run(name, tmp_path, capsys):
    settings = RUN[name]
    value = RUN_VALUES.get(name, value_of(name))
    method = method_of(name)
    usual = outcome(tmp_path / "usual", method, **settings), capsys.readouterr().out.replace("usual", "")
    changed = (
        outcome(tmp_path / "changed", method, **{**settings, name: value}),
        capsys.readouterr().out.replace("changed", ""),
    )
    torch.use_deterministic_algorithms(False)
    assert usual[0] != changed[0] or (name == "num_completions_to_print" and usual[1] != changed[1])


CACHE: dict[str, tuple[Any, set[str]]] = {}


def parts_with(folder: Any, settings: tuple[Any, ...]) -> tuple[Any, set[str]]:
    """Parts of a trainer with these settings, and where they differ from one trainer to the next."""
    if (key := repr(settings)) not in CACHE:
        first, second = (built(folder, **dict(settings)) for _ in range(2))
        CACHE[key] = first, differences(first, second)
    return CACHE[key]


class Recorded:
    """An engine that keeps what it would be made of."""

    def __init__(self, *given: Any, **named: Any):
        self.given = given, named


class RecordedScorer(Recorded):
    """A teacher's servers, which keep what they would be made of."""

    max_context, whole, probe = None, True, SimpleNamespace(last=1)


@pytest.mark.parametrize("name", sorted(WITH))
@pytest.mark.filterwarnings("ignore")
def test_a_field_changes_a_part_where_its_condition_is_met(name, home, monkeypatch):
    monkeypatch.setattr(servers, "RemoteEngine", Recorded)
    monkeypatch.setattr(served_teachers, "ServerScorer", RecordedScorer)
    settings, value = WITH[name], WITH_VALUES.get(name, value_of(name))
    usual, unsteady = parts_with(home, tuple(settings.items()))
    assert differences(usual, built(home, **{**settings, name: value})) - unsteady


@pytest.mark.parametrize("name", [name for name in OWN if name not in ELSEWHERE])
@pytest.mark.filterwarnings("ignore")
def test_a_field_that_is_pointed_out_alone_has_a_case_with_its_condition(name, tmp_path):
    kind = RLOOConfig if method_of(name) == "rloo" else GRPOConfig
    _, named = said(name, lambda: kind(output_dir=str(tmp_path), use_cpu=True, **{name: value_of(name)}))
    assert not named or name in {*WITH, *RUN, *NEVER, *NEED_MORE, *ELSEWHERE}


def test_no_case_is_of_an_unknown_field():
    newer = {"activation_checkpointing_kwargs"}  # of transformers 5.2x
    assert {*WITH, *RUN, *NEVER, *NEED_MORE, *ELSEWHERE, *VALUES} <= {*NAMES, *newer}
