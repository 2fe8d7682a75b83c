"""Each rule of a config: one setting that breaks it, and what the message says."""

import math
import warnings
from types import SimpleNamespace

import pytest

from covey.config.grpo import GRPOConfig
from covey.config.rloo import RLOOConfig
from covey.config.rules import (
    agents,
    batches,
    colocate,
    features,
    loss,
    mismatch,
    penalties,
    prompts,
    registry,
    sampling,
    servers,
    speculation,
    staleness,
    training,
    unused,
)

SERVER = {"use_vllm": True, "vllm_mode": "server"}

# rule, config class, settings, what the error must say
REFUSED = [
    (batches.counts_are_whole_and_positive, GRPOConfig, {"num_iterations": 0}, "num_iterations=0 must be a whole"),
    (batches.counts_are_whole_and_positive, GRPOConfig, {"max_completion_length": 0}, "max_completion_length=0 must"),
    (batches.counts_are_whole_and_positive, GRPOConfig, {"steps_per_generation": 1.5}, "steps_per_generation=1.5"),
    (batches.counts_are_whole_and_positive, GRPOConfig, {"logprob_chunk_size": -1}, "logprob_chunk_size=-1"),
    (batches.groups_have_siblings, GRPOConfig, {"num_generations": 1}, "at least 2"),
    (batches.groups_have_siblings, GRPOConfig, {"num_generations": None}, "at least 2"),
    (training.numbers_are_numbers, GRPOConfig, {"beta": "high"}, "beta='high' must be a number, but is a str.*quotes"),
    (training.numbers_are_numbers, GRPOConfig, {"top_k": 1.5}, "top_k=1.5 must be a whole number, but is a float"),
    (training.numbers_are_numbers, GRPOConfig, {"epsilon": None}, "epsilon=None must be a number"),
    *(
        (training.numbers_are_numbers, GRPOConfig, {name: math.nan}, f"{name}=nan is not a number")
        for name in ("weight_decay", "entropy_coef", "max_grad_norm", "adam_epsilon", "beta", "epsilon")
    ),
    (training.learning_rate_goes_downhill, GRPOConfig, {"learning_rate": -1e-6}, "learning_rate=-1e-06 is out of"),
    (training.learning_rate_goes_downhill, GRPOConfig, {"learning_rate": math.inf}, "learning_rate=inf"),
    (training.something_is_trained, GRPOConfig, {"num_train_epochs": 0}, "nothing would be trained"),
    (training.something_is_trained, GRPOConfig, {"max_steps": 0}, "nothing would be trained"),
    (batches.batch_size_is_fixed, GRPOConfig, {"auto_find_batch_size": True}, "auto_find_batch_size=True"),
    (batches.batch_size_is_fixed, GRPOConfig, {"accelerator_config": {"split_batches": True}}, "split_batches=True"),
    (staleness.staleness_is_counted, GRPOConfig, {"max_staleness": -1}, "max_staleness=-1 .* 0 or more"),
    (
        staleness.sampling_ahead_has_an_engine,
        GRPOConfig,
        {"max_staleness": 1, "use_vllm": True},
        "vllm_mode='colocate'.*take turns",
    ),
    (
        staleness.sampling_ahead_has_an_engine,
        GRPOConfig,
        {"max_staleness": 2, "speculative_reuse": "exact"},
        "max_staleness=2 with speculative_reuse='exact'",
    ),
    (penalties.load_balancing_is_not_negative, GRPOConfig, {"router_aux_loss_coef": -0.1}, "must be 0 or more"),
    (servers.one_engine_samples, GRPOConfig, {**SERVER, "use_sglang": True}, "one engine samples. Leave the other"),
    (servers.server_limits_are_positive, GRPOConfig, {**SERVER, "vllm_server_timeout": 0}, "above 0, and finite"),
    (servers.server_limits_are_positive, GRPOConfig, {**SERVER, "vllm_server_concurrency": 0}, "1 or more"),
    (servers.server_limits_are_positive, GRPOConfig, {**SERVER, "vllm_server_port": 70000}, "1 to 65535"),
    (
        servers.sglang_limits_are_positive,
        GRPOConfig,
        {"use_sglang": True, "sglang_concurrency": 0},
        "sglang_concurrency=0",
    ),
    (agents.rollouts_have_deadlines, GRPOConfig, {"tool_timeout": 0.0}, "tool_timeout=0.0 .* greater than 0"),
    (agents.rollouts_have_deadlines, GRPOConfig, {"rollout_timeout": math.inf}, "rollout_timeout=inf"),
    (agents.tool_rounds_are_counted, GRPOConfig, {"max_tool_calling_iterations": -1}, "=-1 must be a whole number"),
    (agents.tool_parser_is_known, RLOOConfig, {"tool_parser": "lama3"}, "Did you mean 'llama3'"),
    (training.optimizer_waits_for_the_whole_step, GRPOConfig, {"optim": "adalomo"}, "within every backward pass"),
    (training.embeddings_are_without_noise, GRPOConfig, {"neftune_noise_alpha": 5.0}, "sampled and scored by models"),
    (training.optimizer_waits_for_the_whole_step, RLOOConfig, {"optim": "galore_adamw_layerwise"}, "or galore_adamw"),
    (features.words_are_known, GRPOConfig, {"prompt_sampler": "hard"}, "choose one of: uniform, difficulty"),
    (prompts.refills_are_counted, GRPOConfig, {"max_resample_times": -1}, "max_resample_times=-1 .* 0 or more"),
    (prompts.no_prompt_is_starved, GRPOConfig, {"difficulty_floor": 0.0}, "difficulty_floor=0.0 .* between 0.01 and 1"),
    (features.words_are_known, GRPOConfig, {"attn_layout": "dense"}, "choose one of: auto, shared_prefix, packed"),
    (features.words_are_known, GRPOConfig, {"kl_estimator": "k4"}, "choose one of: k1, k2, k3"),
    (features.words_are_known, GRPOConfig, {"scale_rewards": "std"}, "choose one of: group, batch, none"),
    (features.words_are_known, GRPOConfig, {"importance_sampling_level": "word"}, "token, sequence, sequence_token"),
    (features.words_are_known, GRPOConfig, {"multi_objective_aggregation": "sum"}, "sum_then_normalize"),
    (features.words_are_known, GRPOConfig, {"vllm_mode": "remote"}, "choose one of: colocate, server"),
    (colocate.memory_share_is_a_share, GRPOConfig, {"vllm_gpu_memory_utilization": 1.2}, "=1.2 is out of range"),
    (colocate.memory_share_is_a_share, GRPOConfig, {"vllm_gpu_memory_utilization": "most"}, "='most' is out of range"),
    (colocate.sleep_is_light_or_deep, GRPOConfig, {"vllm_sleep_level": 3}, "vllm_sleep_level=3 is not known: 1 keeps"),
    (
        colocate.engine_arguments_repeat_no_field,
        GRPOConfig,
        {"vllm_engine_kwargs": {"max_model_len": 9}},
        "may not hold 'max_model_len': set the field `vllm_max_model_length`",
    ),
    (batches.counts_are_whole_and_positive, GRPOConfig, {"move_model_batches": 0}, "move_model_batches=0 must be"),
    (features.words_are_known, GRPOConfig, {"vllm_importance_sampling_mode": "mask"}, "token_truncate, token_mask"),
    (features.loss_type_is_known, GRPOConfig, {"loss_type": "ppo"}, "loss_type='ppo' is not known.*dapo"),
    (features.rloo_loss_has_its_config, GRPOConfig, {"loss_type": "rloo"}, "use RLOOConfig"),
    (features.liger_is_off, GRPOConfig, {"use_liger_kernel": True}, "use_liger_kernel=True is not supported"),
    (sampling.temperature_is_positive, GRPOConfig, {"temperature": 0.0}, "temperature=0.0 is out of range"),
    (sampling.truncation_of_the_distribution_is_sane, GRPOConfig, {"top_p": 0.0}, "top_p=0.0 .* above 0 and at most 1"),
    (sampling.truncation_of_the_distribution_is_sane, GRPOConfig, {"top_p": 1.1}, "top_p=1.1"),
    (sampling.truncation_of_the_distribution_is_sane, GRPOConfig, {"top_k": -1}, "top_k=-1 .* 0 or more"),
    (sampling.truncation_of_the_distribution_is_sane, GRPOConfig, {"min_p": 2.0}, "min_p=2.0 .* between 0 and 1"),
    (sampling.truncation_of_the_distribution_is_sane, GRPOConfig, {"repetition_penalty": 0.0}, "repetition_penalty"),
    (sampling.generation_kwargs_repeat_no_field, GRPOConfig, {"generation_kwargs": {"n": 2}}, "num_generations"),
    (
        speculation.reuse_is_exact_or_lenient,
        GRPOConfig,
        {"speculative_reuse": "exakt"},
        "choose one of: exact, lenient; .*Did you mean 'exact'",
    ),
    (
        speculation.reuse_is_exact_or_lenient,
        GRPOConfig,
        {"speculative_reuse": "exact", "use_vllm": True},
        "with use_vllm=True: only the built-in engine",
    ),
    (
        speculation.reuse_is_exact_or_lenient,
        GRPOConfig,
        {"speculative_reuse": "exact", "repetition_penalty": 1.1},
        "with repetition_penalty=1.1: .* cannot be checked in one pass",
    ),
    (speculation.lenience_is_positive, GRPOConfig, {"speculative_lenience": 0.0}, "speculative_lenience=0.0 is out of"),
    (batches.counts_are_whole_and_positive, GRPOConfig, {"speculative_max_tokens": 0}, "speculative_max_tokens=0 must"),
    (sampling.generation_kwargs_repeat_no_field, GRPOConfig, {"generation_kwargs": {"top_p": 0.9}}, "field `top_p`"),
    (
        sampling.dr_grpo_has_a_length,
        GRPOConfig,
        {"loss_type": "dr_grpo", "max_completion_length": None},
        "divides by max_completion_length",
    ),
    (loss.clipping_leaves_a_range, GRPOConfig, {"epsilon": 1.0}, "epsilon=1.0 is out of range"),
    (loss.clipping_leaves_a_range, GRPOConfig, {"epsilon": -0.1}, "epsilon=-0.1"),
    (loss.clipping_leaves_a_range, GRPOConfig, {"epsilon_high": -0.1}, "epsilon_high=-0.1"),
    (loss.delta_is_beyond_the_clip, GRPOConfig, {"delta": 1.1}, r"larger than 1 \+ epsilon_high = 1.2"),
    (loss.off_policy_mask_can_happen, GRPOConfig, {"off_policy_mask_threshold": -1.0}, "off_policy_mask_threshold"),
    (loss.top_entropy_keeps_something, GRPOConfig, {"top_entropy_quantile": 0.0}, "top_entropy_quantile=0.0"),
    (loss.top_entropy_keeps_something, GRPOConfig, {"top_entropy_quantile": 20.0}, "at most 1"),
    (penalties.kl_weight_is_not_negative, GRPOConfig, {"beta": -0.1}, "beta=-0.1 is out of range"),
    (penalties.reference_sync_needs_a_reference, GRPOConfig, {"sync_ref_model": True}, "beta=0 loads none"),
    (
        penalties.reference_sync_needs_a_reference,
        GRPOConfig,
        {"sync_ref_model": True, "beta": 0.1, "ref_model_mixup_alpha": 0.0},
        "ref_model_mixup_alpha=0.0",
    ),
    (penalties.rloo_kl_is_the_log_ratio, RLOOConfig, {"kl_estimator": "k3"}, "'k1', the log ratio"),
    (penalties.entropy_controller_has_room, GRPOConfig, {"entropy_coef": -0.1}, "entropy_coef=-0.1 must be 0 or more"),
    (penalties.entropy_controller_has_room, GRPOConfig, {"entropy_coef_min": 2.0}, "entropy_coef_min=2.0"),
    (
        penalties.entropy_controller_has_room,
        GRPOConfig,
        {"use_adaptive_entropy": True, "entropy_coef": 2.0},
        r"outside \[entropy_coef_min, entropy_coef_max\]",
    ),
    (
        penalties.entropy_controller_has_room,
        GRPOConfig,
        {"use_adaptive_entropy": True, "entropy_coef_delta": 0.0},
        "needs entropy_coef_delta above 0",
    ),
    (penalties.credit_is_weighed, GRPOConfig, {"process_weight": -1.0}, "process_weight=-1.0 is out of range"),
    (penalties.credit_is_weighed, GRPOConfig, {"outcome_weight": float("inf")}, "outcome_weight=inf is out of range"),
    (penalties.credit_is_weighed, GRPOConfig, {"step_discount": 1.5}, "step_discount=1.5.*between 0 and 1"),
    (
        penalties.credit_is_weighed,
        GRPOConfig,
        {"process_weight": 0.0, "outcome_weight": 0.0},
        "leave no advantage to learn from",
    ),
    (features.words_are_known, GRPOConfig, {"step_baseline": "step"}, "choose one of: group, turn"),
    (penalties.rewards_carry_weight, GRPOConfig, {"reward_weights": [0.0, 0.0]}, "at least one of them not 0"),
    (penalties.rewards_carry_weight, GRPOConfig, {"reward_weights": [float("nan")]}, "finite number"),
    (penalties.rewards_carry_weight, GRPOConfig, {"reward_weights": []}, "one finite number per reward function"),
    (penalties.rewards_carry_weight, GRPOConfig, {"reward_weights": 1.0}, "one finite number per reward function"),
    (penalties.rewards_carry_weight, GRPOConfig, {"reward_weights": ["a"]}, "one finite number per reward function"),
    (penalties.reward_timeout_is_positive, GRPOConfig, {"reward_timeout": 0}, "reward_timeout=0"),
    (penalties.reward_clip_is_ordered, RLOOConfig, {"reward_clip_range": (1, -1)}, "first number must be smaller"),
    *(
        (mismatch.bounds_enclose_agreement, GRPOConfig, bounds, "must lie on either side of 1, .* 0.5 and 3 are usual")
        for bounds in (
            {"vllm_importance_sampling_clip_min": 4.0},
            {"vllm_importance_sampling_clip_min": -0.1},
            {"vllm_importance_sampling_clip_max": 0.9},
        )
    ),
    (features.words_are_known, GRPOConfig, {"engine_parity": "ignore"}, "choose one of: raise, warn, off"),
    (unused.padding_is_a_number, GRPOConfig, {"pad_to_multiple_of": "many"}, "pad_to_multiple_of='many'"),
]

# rule, config class, settings, what the warning must say
POINTED_OUT = [
    (
        staleness.stale_samples_are_corrected,
        GRPOConfig,
        {"max_staleness": 1, "vllm_importance_sampling_correction": False},
        "as if they were fresh",
    ),
    (
        staleness.servers_that_sample_ahead_stay_awake,
        GRPOConfig,
        {"max_staleness": 1, "use_vllm": True, "vllm_mode": "server", "vllm_enable_sleep_mode": True},
        "so they hardly sleep",
    ),
    (
        prompts.workers_know_what_to_read,
        GRPOConfig,
        {"max_staleness": 2, "dataloader_num_workers": 2},
        "`dataloader_num_workers=2` has no effect: with max_staleness=2",
    ),
    (loss.cispo_has_its_cap, GRPOConfig, {"loss_type": "cispo"}, "5 is used"),
    (loss.cispo_has_its_cap, GRPOConfig, {"loss_type": "cispo", "epsilon_high": 0.2}, "shrinks every gradient"),
    (loss.options_suit_the_loss, GRPOConfig, {"vespo_k_pos": 1.0}, "`vespo_k_pos=1.0` has no effect.*'dapo'"),
    (loss.options_suit_the_loss, GRPOConfig, {"loss_type": "sapo", "epsilon": 0.1}, "`epsilon=0.1` has no effect"),
    (
        loss.ratio_level_is_free,
        GRPOConfig,
        {"loss_type": "gmpo", "importance_sampling_level": "sequence"},
        "'gmpo' prescribes its own",
    ),
    (loss.clipping_can_happen, GRPOConfig, {"epsilon_high": 0.28}, "`epsilon_high=0.28` has no effect.*on-policy"),
    (loss.off_policy_mask_can_happen, GRPOConfig, {"off_policy_mask_threshold": 0.5}, "no completion is stale"),
    (
        loss.iterations_change_the_policy,
        GRPOConfig,
        {"num_iterations": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 1},
        "the same gradient is computed 2 times over",
    ),
    (
        loss.updates_align_with_generations,
        GRPOConfig,
        {"gradient_accumulation_steps": 2, "steps_per_generation": 3},
        "mix two generations",
    ),
    (prompts.refills_are_counted, GRPOConfig, {"max_resample_times": 5}, "dynamic_sample is False"),
    (prompts.no_prompt_is_starved, GRPOConfig, {"difficulty_floor": 0.5}, "prompt_sampler is 'uniform'"),
    (
        prompts.workers_know_what_to_read,
        GRPOConfig,
        {"prompt_sampler": "difficulty", "dataloader_num_workers": 2},
        "`dataloader_num_workers=2` has no effect: with prompt_sampler='difficulty'",
    ),
    (penalties.reference_sync_needs_a_reference, GRPOConfig, {"ref_model_sync_steps": 9}, "sync_ref_model is False"),
    (penalties.kl_options_need_kl, GRPOConfig, {"kl_estimator": "k1"}, "beta is 0"),
    (penalties.kl_options_need_kl, RLOOConfig, {"use_bias_correction_kl": False}, "carries no gradient"),
    (penalties.adaptive_options_need_adaptive_entropy, GRPOConfig, {"entropy_target": 1.0}, "use_adaptive_entropy is"),
    (penalties.scaling_is_read, RLOOConfig, {"scale_rewards": "batch"}, "RLOO's baseline"),
    (penalties.credit_is_weighed, RLOOConfig, {"outcome_weight": 0.0}, "leaves out RLOO's KL penalty .beta=0.05"),
    (
        penalties.scaling_is_read,
        GRPOConfig,
        {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"},
        "scales each reward itself",
    ),
    (speculation.reuse_can_happen, GRPOConfig, {"speculative_max_tokens": 9}, "speculative_reuse is not set"),
    (
        speculation.reuse_can_happen,
        GRPOConfig,
        {"speculative_reuse": "exact", "speculative_lenience": 2.0},
        "only speculative_reuse='lenient' reads it",
    ),
    (
        speculation.reuse_can_happen,
        GRPOConfig,
        {"speculative_reuse": "exact", "num_train_epochs": 1},
        "`speculative_reuse='exact'` has no effect: with num_train_epochs=1 no prompt comes a second time",
    ),
    (unused.engine_options_need_their_engine, GRPOConfig, {"vllm_server_port": 9}, "use_vllm is False"),
    (
        servers.sglang_settings_are_read,
        GRPOConfig,
        {"use_sglang": True, "sglang_base_url": "http://a:1", "sglang_device": "cuda:1"},
        "names servers that run already",
    ),
    (
        servers.server_settings_are_read,
        GRPOConfig,
        {"use_vllm": True, "vllm_server_port": 9},
        "vllm_mode is 'colocate', not 'server'",
    ),
    (
        servers.server_settings_are_read,
        GRPOConfig,
        {**SERVER, "vllm_server_base_url": "http://a:1", "vllm_server_port": 9},
        "vllm_server_base_url replaces it",
    ),
    (
        servers.server_settings_are_read,
        GRPOConfig,
        {**SERVER, "max_concurrent_completions": 3},
        "set vllm_server_concurrency",
    ),
    (unused.engine_options_need_their_engine, GRPOConfig, {"checkpoint_path": "x"}, "use_sglang is False"),
    (unused.engine_options_need_their_engine, GRPOConfig, {"cache_implementation": "static"}, "its own key-value"),
    (
        unused.engine_options_need_their_engine,
        GRPOConfig,
        {"ds3_gather_for_generation": False},
        "nor DeepSpeed is in use",
    ),
    (
        unused.engine_options_need_their_engine,
        GRPOConfig,
        {"transformers_continuous_batching_config": {"a": 1}},
        "batches continuously itself.* max_concurrent_completions bounds",
    ),
    (
        unused.engine_options_need_their_engine,
        GRPOConfig,
        {"use_transformers_continuous_batching": True},
        "has no effect: the built-in engine, which batches continuously itself, samples",
    ),
    (
        mismatch.correction_has_an_engine,
        GRPOConfig,
        {"vllm_importance_sampling_mode": "token_mask"},
        "has no effect: the built-in engine samples with the trainer's own weights.*correct_built_in_engine=True",
    ),
    (
        mismatch.correction_options_are_read,
        RLOOConfig,
        {"correct_built_in_engine": True, "vllm_importance_sampling_correction": False},
        "`correct_built_in_engine=True` has no effect: vllm_importance_sampling_correction is False",
    ),
    (
        mismatch.vespo_is_corrected_by_token,
        GRPOConfig,
        {
            "loss_type": "vespo",
            "correct_built_in_engine": True,
            "vllm_importance_sampling_mode": "sequence_truncate",
        },
        "multiplies the ratios of a sequence's tokens itself, so 'token_truncate' is used",
    ),
    (colocate.colocation_options_are_read, GRPOConfig, {"offload_model": True}, "use_vllm is False"),
    (colocate.colocation_options_are_read, GRPOConfig, {"move_model_batches": 4}, "use_vllm is False"),
    (
        colocate.colocation_options_are_read,
        GRPOConfig,
        {"use_vllm": True, "offload_optimizer": True},
        "`offload_optimizer=True` has no effect: vllm_enable_sleep_mode is False",
    ),
    (
        colocate.colocation_options_are_read,
        GRPOConfig,
        {"use_vllm": True, "vllm_sleep_level": 2},
        "`vllm_sleep_level=2` has no effect: vllm_enable_sleep_mode is False",
    ),
    (unused.printing_needs_log_completions, GRPOConfig, {"num_completions_to_print": 3}, "log_completions is False"),
    (unused.padding_is_a_number, GRPOConfig, {"pad_to_multiple_of": 8}, "to the longest of them"),
    (unused.supervised_options_are_off, GRPOConfig, {"label_smoothing_factor": 0.1}, "supervised training"),
    (unused.supervised_options_are_off, GRPOConfig, {"remove_unused_columns": True}, "every column of the dataset"),
    (unused.supervised_options_are_off, GRPOConfig, {"bf16_full_eval": True}, "evaluation computes like training"),
    (unused.supervised_options_are_off, GRPOConfig, {"prediction_loss_only": True}, "keeps no predictions"),
    (unused.supervised_options_are_off, GRPOConfig, {"batch_eval_metrics": True}, "keeps no predictions"),
    (
        unused.supervised_options_are_off,
        GRPOConfig,
        {"include_num_input_tokens_seen": True},
        "`num_tokens` counts them",
    ),
    (unused.supervised_options_are_off, GRPOConfig, {"dataloader_drop_last": True}, "generation by generation"),
]


def ids(cases):
    return [f"{rule.__name__}-{'-'.join(settings)}" for rule, _, settings, _ in cases]


@pytest.mark.parametrize(("rule", "cls", "settings", "message"), REFUSED, ids=ids(REFUSED))
def test_what_cannot_work_is_refused(rule, cls, settings, message):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=message) as error:
            cls(**settings)
    assert rule.__name__ in [frame.name for frame in error.traceback]


@pytest.mark.parametrize(("rule", "cls", "settings", "message"), POINTED_OUT, ids=ids(POINTED_OUT))
def test_what_has_no_effect_is_pointed_out_once(rule, cls, settings, message):
    with pytest.warns(UserWarning, match=message) as caught:
        cls(**settings)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_several_gpus_need_several_processes():
    with pytest.raises(ValueError, match=r"accelerate launch --num_processes 4"):
        batches.one_process_per_gpu(SimpleNamespace(n_gpu=4))
    batches.one_process_per_gpu(SimpleNamespace(n_gpu=1))


def test_every_rule_has_a_test():
    tested = {rule for rule, *_ in [*REFUSED, *POINTED_OUT]} | {batches.one_process_per_gpu}
    assert {*registry.BATCH_RULES, *registry.RULES} == tested


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
        {"importance_sampling_level": "sequence", "epsilon": 3e-4, "num_iterations": 2},
        {"reward_weights": [1.0, 0.0]},
        {"speculative_reuse": "lenient", "speculative_lenience": 1.2, "speculative_max_tokens": 10},
        {"speculative_reuse": "exact", "num_train_epochs": 1, "max_steps": 100},
        {"correct_built_in_engine": True, "vllm_importance_sampling_mode": "token_mask"},
        {"correct_built_in_engine": True, "loss_type": "vespo"},
        {"engine_parity": "warn"},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_sound_settings_pass_silently(settings, recwarn):
    GRPOConfig(**settings)
    assert not recwarn.list
