"""What a config must satisfy: each rule is one function, named after what it guarantees.

A rule takes the config and raises `ValueError` for what cannot work, or warns about an option that has no effect.
To add one, write the function into the module of its theme in `covey.config.rules` and put it into `RULES`;
nothing else calls rules by name. Rules about the arguments of a trainer (model, dataset, reward functions) live with
the trainer; divisibility lives in `covey.config.algebra`.
"""

from collections.abc import Callable
from typing import Any

from covey.config.rules import (
    agents,
    batches,
    colocate,
    features,
    loss,
    mismatch,
    penalties,
    prompts,
    sampling,
    servers,
    speculation,
    staleness,
    training,
    unused,
)

Rule = Callable[[Any], None]

BATCH_RULES: tuple[Rule, ...] = (
    batches.one_process_per_gpu,
    batches.counts_are_whole_and_positive,
    batches.groups_have_siblings,
    training.numbers_are_numbers,
    batches.batch_size_is_fixed,
)
"""Rules that must hold before batch sizes can be worked out."""

RULES: tuple[Rule, ...] = (
    training.learning_rate_goes_downhill,
    training.something_is_trained,
    training.optimizer_waits_for_the_whole_step,
    training.embeddings_are_without_noise,
    speculation.reuse_is_exact_or_lenient,
    speculation.lenience_is_positive,
    speculation.reuse_can_happen,
    staleness.staleness_is_counted,
    staleness.sampling_ahead_has_an_engine,
    staleness.stale_samples_are_corrected,
    staleness.servers_that_sample_ahead_stay_awake,
    servers.one_engine_samples,
    features.words_are_known,
    features.loss_type_is_known,
    features.rloo_loss_has_its_config,
    features.liger_is_off,
    sampling.temperature_is_positive,
    sampling.truncation_of_the_distribution_is_sane,
    sampling.generation_kwargs_repeat_no_field,
    sampling.dr_grpo_has_a_length,
    prompts.refills_are_counted,
    prompts.no_prompt_is_starved,
    prompts.workers_know_what_to_read,
    loss.clipping_leaves_a_range,
    loss.delta_is_beyond_the_clip,
    loss.cispo_has_its_cap,
    loss.options_suit_the_loss,
    loss.ratio_level_is_free,
    loss.clipping_can_happen,
    loss.off_policy_mask_can_happen,
    loss.top_entropy_keeps_something,
    loss.iterations_change_the_policy,
    loss.updates_align_with_generations,
    penalties.kl_weight_is_not_negative,
    penalties.load_balancing_is_not_negative,
    penalties.reference_sync_needs_a_reference,
    penalties.kl_options_need_kl,
    penalties.rloo_kl_is_the_log_ratio,
    penalties.entropy_controller_has_room,
    penalties.adaptive_options_need_adaptive_entropy,
    penalties.rewards_carry_weight,
    penalties.credit_is_weighed,
    penalties.reward_timeout_is_positive,
    penalties.reward_clip_is_ordered,
    penalties.scaling_is_read,
    unused.engine_options_need_their_engine,
    colocate.memory_share_is_a_share,
    colocate.sleep_is_light_or_deep,
    colocate.colocation_options_are_read,
    colocate.engine_arguments_repeat_no_field,
    servers.server_settings_are_read,
    servers.server_limits_are_positive,
    servers.sglang_settings_are_read,
    servers.sglang_limits_are_positive,
    mismatch.correction_has_an_engine,
    mismatch.correction_options_are_read,
    mismatch.bounds_enclose_agreement,
    mismatch.vespo_is_corrected_by_token,
    agents.rollouts_have_deadlines,
    agents.tool_rounds_are_counted,
    agents.tool_parser_is_known,
    unused.printing_needs_log_completions,
    unused.padding_is_a_number,
    unused.supervised_options_are_off,
)
"""All other rules, in the order in which they are checked."""


def check_batch_numbers(args: Any) -> None:
    """Run the rules that precede the batch algebra."""
    for rule in BATCH_RULES:
        rule(args)


def check(args: Any) -> None:
    """Run every other rule on a config whose batch sizes are settled."""
    for rule in RULES:
        rule(args)
