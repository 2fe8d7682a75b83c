"""Sections of `covey explain` as data: templates with conditions.

A paragraph is a template, a condition with a template, or a list of these: the first that holds is printed.

In a template `{args.x}` is a setting, `{a.x}` a number of the batch algebra and `{run.x}` any other fact. A format that
starts with # counts: `{a.world_size:#process|processes}` is "1 process" or "2 processes". Statements about formulas
hold for `covey.core` and `covey.algorithms`; change them together. For tables see `covey.cli.explain.figures`.
"""

import string
from collections.abc import Callable
from typing import Any

from covey.cli.explain.run import ExplainedRun
from covey.config.objective import BUILT_IN, CLIPPED

Alternative = str | tuple[Callable[[ExplainedRun], Any], str]
Section = tuple[Alternative | list[Alternative], ...]


class _Template(string.Formatter):
    """`str.format` with counts of nouns."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if not format_spec.startswith("#"):
            return super().format_field(value, format_spec)
        noun, _, plural = format_spec[1:].partition("|")
        return f"{value:,} {noun if value == 1 else plural or noun + 's'}"


def fill(section: Section, run: ExplainedRun) -> list[str]:
    """Paragraphs of a section that hold for a run."""
    lines = []
    for paragraph in section:
        for alternative in paragraph if isinstance(paragraph, list) else [paragraph]:
            holds, template = (always, alternative) if isinstance(alternative, str) else alternative
            if holds(run):
                lines.append(_Template().format(template, args=run.args, a=run.algebra, run=run))
                break
    return [line for line in lines if line]


def always(run: ExplainedRun) -> bool:
    """The condition of a template without one."""
    return True


BATCHES: Section = (
    (
        "Batch sizes count completions, not prompts. One rollout batch: {a.prompts_per_generation:#prompt}, "
        "{a.num_generations} completions each, {a.generation_batch_size} completions in all "
        "(generation_batch_size)."
    ),
    (
        "It is cut into {a.steps_per_generation:#micro-batch|micro-batches} (steps_per_generation) of "
        "{a.per_device_train_batch_size} completions in each of {a.world_size:#process|processes}."
    ),
    (lambda run: run.algebra.num_iterations > 1, "It is trained on {a.num_iterations} times (num_iterations)."),
    (
        "One optimizer update averages over {a.gradient_accumulation_steps:#micro-batch|micro-batches} "
        "(gradient_accumulation_steps), that is {a.completions_per_update} completions."
    ),
    [
        (lambda run: run.updates == 1, "One optimizer update per rollout batch."),
        (lambda run: run.updates.denominator == 1, "{run.updates} optimizer updates per rollout batch."),
        (
            lambda run: run.updates.numerator == 1,
            "One optimizer update spans {run.updates.denominator} rollout batches.",
        ),
        ("{run.updates} optimizer updates per rollout batch: some updates mix two rollout batches."),
    ],
    [
        (
            lambda run: run.prompts and run.left_over,
            "The dataset's {run.prompts:#prompt} make {run.batches_per_epoch:#rollout batch|rollout batches} per epoch "
            "({run.left_over:#prompt} left over) and {run.updates_per_epoch:#update}.",
        ),
        (
            lambda run: run.prompts,
            "The dataset's {run.prompts:#prompt} make {run.batches_per_epoch:#rollout batch|rollout batches} per epoch "
            "and {run.updates_per_epoch:#update}.",
        ),
    ],
    [
        (lambda run: run.prompts and run.args.max_steps > 0, "max_steps={args.max_steps} is {run.epochs}."),
        (
            lambda run: run.prompts,
            "num_train_epochs={args.num_train_epochs:g} makes {run.total_updates:#update} in all.",
        ),
        (
            lambda run: run.args.max_steps > 0,
            "max_steps={args.max_steps} updates are {run.max_steps_batches:g} rollout batches, "
            "{run.max_steps_prompts:g} prompts in all.",
        ),
        (
            "Every 1,000 prompts of the dataset are about {run.updates_per_thousand:.4g} updates; num_train_epochs="
            "{args.num_train_epochs:g} goes through the dataset so many times. A last, incomplete rollout batch is "
            "left out."
        ),
    ],
    (
        lambda run: run.updates == 1,
        "For several smaller updates per rollout batch, make steps_per_generation a multiple of "
        "gradient_accumulation_steps={a.gradient_accumulation_steps}: twice as many steps give 2 updates.",
    ),
    (
        lambda run: run.args.prompt_sampler == "difficulty",
        "Prompts of intermediate difficulty come more often (prompt_sampler=difficulty): in an epoch some prompts "
        "come several times and others not at all. One that is always or never solved comes about "
        "{args.difficulty_floor:g} times as often as one that is solved half of the time.",
    ),
    (
        lambda run: run.args.dynamic_sample,
        "Groups without a signal are replaced before training (dynamic_sample), in up to "
        "{args.max_resample_times:#round} (max_resample_times): a rollout batch samples at most "
        "{run.most_resampled} completions and trains on {a.generation_batch_size}.",
    ),
    (
        lambda run: run.args.stream_rewards,
        "Each group is scored as soon as it is sampled (stream_rewards): reward functions receive one group at a "
        "time and have {args.reward_timeout:g} seconds (reward_timeout) for each; phase/reward is the time that "
        "they still take after the last completion.",
    ),
)

POLICY: Section = (
    [
        (
            lambda run: not run.algebra.on_policy,
            "Off-policy (gradient_accumulation_steps={a.gradient_accumulation_steps}, steps_per_generation * "
            "num_iterations={a.micro_batches}): after the first update on a rollout batch, the policy differs from the "
            "one that sampled it.",
        ),
        (
            lambda run: run.args.max_staleness,
            "One update per rollout batch at most (gradient_accumulation_steps={a.gradient_accumulation_steps}, "
            "steps_per_generation * num_iterations={a.micro_batches}): its gradient is computed with the weights that "
            "training on the batch begins with.",
        ),
        (
            "On-policy (gradient_accumulation_steps={a.gradient_accumulation_steps}, steps_per_generation * "
            "num_iterations={a.micro_batches}): every gradient is computed with the weights that sampled the "
            "completions."
        ),
    ],
    [
        (
            lambda run: not run.algebra.on_policy,
            "The first update has ratios of 1; later ones differ from 1, and more so with a higher learning rate "
            "({args.learning_rate:g}).",
        ),
        (
            lambda run: run.args.loss_type in CLIPPED | {"rloo"},
            "So all importance ratios are exactly 1 and nothing can clip: clip_ratio/* stays 0. That is correct. To "
            "use clipping, set num_iterations above 1 or steps_per_generation above gradient_accumulation_steps.",
        ),
        (
            "So all importance ratios are exactly 1 and nothing can clip: no bound on them acts. That is correct. To "
            "use clipping, set num_iterations above 1 or steps_per_generation above gradient_accumulation_steps."
        ),
    ],
    [
        (lambda run: run.algebra.on_policy, ""),
        (
            lambda run: run.args.loss_type == "cispo",
            "Ratios above {args.resolved_epsilon_high:g} are cut to {args.resolved_epsilon_high:g} and keep their "
            "gradient; watch cispo_clip_ratio.",
        ),
        (lambda run: run.args.loss_type == "sapo", "sapo has no hard clip: a smooth gate closes as a ratio leaves 1."),
        (
            lambda run: run.args.loss_type == "vespo",
            "vespo has no hard clip: a smooth weight of the sequence's ratio falls off; watch vespo/phi_seq_mean.",
        ),
        (
            lambda run: run.args.loss_type == "gmpo",
            "Token log-ratios are clipped at -{args.epsilon:g} and +{args.resolved_epsilon_high:g}, then averaged over "
            "the completion.",
        ),
        (
            "{run.clipped_unit} whose ratio has left [{run.clip_low:g}, {run.clip_high:g}] in the direction of their "
            "advantage stop contributing; clip_ratio/* is their fraction. A few percent is healthy, tens of percent "
            "mean too many or too large updates per rollout batch."
        ),
    ],
    (
        lambda run: not run.algebra.on_policy and run.args.loss_type in CLIPPED and run.args.delta,
        "With a negative advantage, ratios are cut at delta={args.delta:g}.",
    ),
    [
        (
            lambda run: not run.algebra.on_policy,
            "An additional forward pass per rollout batch computes the old log-probabilities.",
        ),
        (
            lambda run: run.scores_old,
            "An additional forward pass per rollout batch computes the log-probabilities that the KL penalty needs.",
        ),
        ("Old log-probabilities are those of the current forward pass; no additional pass is spent on them."),
    ],
    [
        (lambda run: not run.args.corrects_mismatch, ""),
        (
            lambda run: run.scores_old,
            "Each {run.correction_level} is weighed by trainer probability over engine probability "
            "({args.resolved_mismatch_mode}){run.correction_beyond}. That reads the log-probabilities of the "
            "additional pass. Watch sampling/*.",
        ),
        (
            "Each {run.correction_level} is weighed by trainer probability over engine probability "
            "({args.resolved_mismatch_mode}){run.correction_beyond}. That compares log-probabilities of the training "
            "passes: no additional pass, except for a model with dropout. Watch sampling/*."
        ),
    ],
    (
        lambda run: run.args.max_staleness,
        "Async rollouts (max_staleness={args.max_staleness}): the weights that sample are up to "
        "{args.max_staleness:#optimizer step} older than those that training on a rollout batch begins with.",
    ),
    [
        (lambda run: not run.args.max_staleness, ""),
        (
            lambda run: run.updates > run.args.max_staleness,
            "A rollout batch feeds {run.updates} updates, so the next is sampled only during the last "
            "{args.max_staleness:#update} of them; max_staleness={run.staleness_that_overlaps} would overlap them all.",
        ),
        (lambda run: run.batches_in_flight == 1, "While one rollout batch is trained on, the next one is sampled."),
        ("While one rollout batch is trained on, up to {run.batches_in_flight} more are sampled."),
    ],
    [
        (lambda run: not run.args.max_staleness, ""),
        (
            lambda run: not run.args.corrects_mismatch,
            "Nothing corrects for the older weights (vllm_importance_sampling_correction=False).",
        ),
        (
            lambda run: run.correction_level == "sequence",
            "The ratio of trainer to engine probability corrects for the older weights. Ratios of whole sequences "
            "soon leave their bounds; vllm_importance_sampling_mode=token_truncate keeps more. "
            "sampling/importance_sampling_ratio/outside is the fraction that is lost.",
        ),
        ("The ratio of trainer to engine probability corrects for the older weights."),
    ],
)

LOSS: Section = (
    [
        (
            lambda run: run.args.loss_type in ("cispo", "vespo"),
            "{args.loss_type} logs advantage times log-probability, so its value follows how probable completions are; "
            "its size and sign mean little. Watch `reward`.",
        ),
        (
            lambda run: run.args.loss_type not in BUILT_IN,
            "The values of {args.loss_type!r}, a registered loss, are not known here. Watch `reward`.",
        ),
        (
            lambda run: not run.algebra.on_policy,
            "The loss starts near 0 on each rollout batch and may be negative: with ratios of 1 it is minus the mean "
            "advantage, and the advantages of a group add up to 0 (an update trains on some of the groups). Its "
            "gradient is not 0, and the model learns.",
        ),
        (
            lambda run: run.args.loss_type in CLIPPED - {"grpo"},
            "The loss is close to 0 and may be negative: with ratios of 1 it is minus the mean advantage, and the "
            "advantages of a group add up to 0 over completions, though not over tokens: the rest shows whether longer "
            "or shorter completions did better. Its gradient is not 0, and the model learns.",
        ),
        (
            lambda run: run.args.loss_type == "sapo",
            "The loss is 0 up to the difference of sapo's two temperatures: with ratios of 1 it is minus the mean "
            "advantage, and the advantages of a group add up to 0. Its gradient is not 0, and the model learns.",
        ),
        (
            "The loss is 0 up to rounding: with ratios of 1 it is minus the mean advantage, and the advantages of a "
            "group add up to 0. Its gradient is not 0, and the model learns."
        ),
    ],
    ("So a loss that stays around 0 and does not fall is normal here; `reward` is what should rise."),
    (
        lambda run: not run.algebra.on_policy,
        "Within a rollout batch the loss falls below 0 as the policy moves towards the better completions.",
    ),
    (
        lambda run: run.args.beta and run.args.method == "grpo",
        "The KL term adds {args.beta:g} * kl, so over time the loss rises slowly.",
    ),
    (
        lambda run: (
            run.args.method == "grpo" and run.args.scale_rewards == "group" and run.algebra.num_generations == 2
        ),
        "With groups of 2 scaled by their own standard deviation, advantages are always +0.71 and -0.71 (or 0 on a "
        "tie), however far apart the rewards are. scale_rewards=none keeps the distance.",
    ),
    (
        "A group whose rewards are all equal has advantages of 0 and teaches nothing; frac_reward_zero_std is the "
        "fraction of such groups. Near 1, the task is too hard, too easy, or the reward too coarse."
    ),
    [
        (lambda run: run.args.beta == 0, "beta=0: no KL penalty, no reference model in memory, no kl metric."),
        (
            lambda run: run.args.method == "rloo",
            "beta={args.beta:g}: {args.beta:g} * KL to the reference model is subtracted from the reward. kl starts at "
            "0. beta=0 removes the penalty and the reference model.",
        ),
        (
            "beta={args.beta:g}: {args.beta:g} * KL to the reference model is added to the loss ({args.kl_estimator}). "
            "kl starts at 0. beta=0 removes the penalty and the reference model."
        ),
    ],
    (
        lambda run: run.args.beta and run.args.sync_ref_model,
        "The reference moves towards the policy every {args.ref_model_sync_steps} updates.",
    ),
    [
        (
            lambda run: run.args.max_completion_length is None,
            "Completions end by themselves or when the context is full.",
        ),
        (
            lambda run: run.args.mask_truncated_completions,
            "Completions cut off at {args.max_completion_length} tokens are left out of the loss, kl and clip_ratio. "
            "If all of an update are cut off, there is nothing to average: the loss is 0 and kl is not logged. Keep "
            "completions/clipped_ratio well below 1.",
        ),
        (
            "Completions cut off at {args.max_completion_length} tokens are trained on like others; "
            "completions/clipped_ratio is their fraction. mask_truncated_completions leaves them out."
        ),
    ],
    (
        lambda run: run.args.entropy_coef or run.args.use_adaptive_entropy,
        "The entropy bonus is subtracted from the loss; policy_loss is without it.",
    ),
)

TOKENS: Section = (
    [
        (
            lambda run: run.args.max_completion_length is None,
            "max_completion_length is unset: completions run until the model's context is full, so there is no bound.",
        ),
        (
            "A rollout batch samples at most {run.most_sampled_tokens:,} tokens ({a.generation_batch_size} completions "
            "of up to {args.max_completion_length})."
        ),
    ],
    (
        lambda run: run.args.max_completion_length is not None,
        "An update trains on at most {run.most_trained_tokens:,} completion tokens, and with prompts of "
        "{run.prompt_tokens} tokens reads at most {run.most_read_tokens:,} in all.",
    ),
    [
        (
            lambda run: run.args.speculative_reuse == "exact",
            "When a prompt comes again, its last completions are drafts (speculative_reuse=exact): they are checked in "
            "one pass, and decoded on from the first token that differs from a new sample with the same seed. So no "
            "completion depends on its draft; for that, a prompt keeps its seeds from epoch to epoch. "
            "sampling/reused_token_fraction is the fraction of tokens that were not decoded.",
        ),
        (
            lambda run: run.args.speculative_reuse,
            "When a prompt comes again, its last completions are drafts (speculative_reuse={args.speculative_reuse}): "
            "they are checked in one pass, and decoded on from the first token that is rejected. A token stays with "
            "probability min(1, lenience * p_now / p_then), with speculative_lenience={args.speculative_lenience:g}; "
            "tokens that stay are slightly off-policy, which nothing corrects. sampling/reused_token_fraction is the "
            "fraction of tokens that were not decoded.",
        ),
    ],
)

SAMPLING: Section = (
    [
        (lambda run: run.sampler == "", ""),
        (
            lambda run: run.sampler == "vLLM",
            "Completions come from {run.server_count:#vLLM server}: {run.server_list}. A rollout batch requests "
            "{a.generation_batch_size}; each server gets about {run.completions_per_server} at once, at most "
            "{args.vllm_server_concurrency} at a time (vllm_server_concurrency).",
        ),
        (
            lambda run: run.servers,
            "Completions come from {run.server_count:#SGLang server}: {run.server_list}. A rollout batch requests "
            "{a.generation_batch_size}; a server gets at most {args.sglang_concurrency} at a time "
            "(sglang_concurrency).",
        ),
        (
            "Completions come from an SGLang server that the run starts on {args.sglang_device} and ends with "
            "(sglang_device); its log is sglang-server.log in output_dir. A rollout batch requests "
            "{a.generation_batch_size}; the server gets at most {args.sglang_concurrency} at a time "
            "(sglang_concurrency)."
        ),
    ],
    [
        (
            lambda run: run.sampler == "vLLM",
            "Each server is sent the weights before a rollout batch whenever they have changed; running completions "
            "are continued with the new ones. That may take {args.vllm_server_sync_timeout:g} s "
            "(vllm_server_sync_timeout).",
        ),
        (
            lambda run: run.sampler,
            "Before a rollout batch whose weights have changed, servers get the new ones by "
            "sglang_weight_transfer={args.sglang_weight_transfer!r}, within {args.sglang_sync_timeout:g} s "
            "(sglang_sync_timeout).",
        ),
    ],
    (
        lambda run: run.sampler == "vLLM",
        "The weights are sent {run.weight_transfer} (vllm_weight_transfer={args.vllm_weight_transfer!r}).",
    ),
    [
        (
            lambda run: run.sampler == "vLLM",
            "If a server fails, the others sample its prompts; it is used again once it is up and has the weights. If "
            "all have failed, the run waits {args.vllm_server_timeout:g} s for one (vllm_server_timeout) and then "
            "ends; a prompt may take {args.vllm_server_request_timeout:g} s (vllm_server_request_timeout).",
        ),
        (
            lambda run: run.sampler,
            "If a server fails, it is used again once it is up and has the weights. If all have failed, the run waits "
            "{args.sglang_server_timeout:g} s for one (sglang_server_timeout) and then ends.",
        ),
    ],
    (
        lambda run: (
            run.sampler == "vLLM"
            and run.algebra.generation_batch_size > run.args.vllm_server_concurrency * run.server_count
        ),
        "A rollout batch has more completions than the servers get at once: raise vllm_server_concurrency if they "
        "idle.",
    ),
    (
        lambda run: run.sampler == "vLLM" and run.args.temperature != 1.0,
        "At temperature {args.temperature:g} the servers must report log-probabilities of the distribution that "
        "they sample from: --logprobs-mode processed_logprobs, which `covey vllm-serve` sets.",
    ),
)
