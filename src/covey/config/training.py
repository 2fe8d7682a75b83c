"""Fields and rules about the policy, batches, the outer training loop and what is shown of completions."""

import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from covey.config.fields import Args, describe_fields, limited
from covey.config.hardware import by_fsdp, has_accelerator
from covey.config.messages import ignored
from covey.config.optimizers import OPTIMIZERS, STOCHASTIC, check_own, name_of
from covey.core.findings import Finding

BY_METRIC = ("reduce_lr_on_plateau", "greedy")  # schedulers that read `metric_for_best_model`


@dataclass
class TrainingDefaults:
    """Fields of `transformers.TrainingArguments` whose defaults suit reinforcement learning."""

    learning_rate: float = limited(
        1e-6, ge=0, finite=True, advice="1e-6 to 1e-5 are usual, ten times that for an adapter."
    )
    """Initial learning rate of the optimizer."""
    bf16: bool | None = None
    """Train in bfloat16 mixed precision. Unset: wherever the hardware multiplies bfloat16 (a CUDA GPU since Ampere, a
    CPU with AMX or AVX512-BF16) and float32 elsewhere."""
    optim: str = limited("adamw_torch_fused", choices=OPTIMIZERS)
    """Optimizer: a name of transformers' `OptimizerNames`, `muon` (torch's, for matrices of hidden layers, with AdamW
    for all else) or `adamw_stochastic` (AdamW that rounds weights held in bfloat16 up or down by chance)."""
    gradient_checkpointing: bool | None = True
    """Let layers recompute their activations in the backward pass where memory has no room to keep them: less memory,
    up to a third more compute, the same result. With gradient_checkpointing_kwargs every layer recomputes them."""
    logging_steps: float = 10
    """Log every this many optimizer updates; a number below 1 is a share of all updates."""
    logging_nan_inf_filter: bool = False
    """Log the average of earlier losses instead of a loss that is NaN or infinite."""
    remove_unused_columns: bool = False
    """No effect: reward functions receive every column of the dataset."""


@dataclass
class ModelFields:
    """The policy."""

    model_init_kwargs: dict[str, Any] | str | None = None
    """Keyword arguments of `from_pretrained` (a dict or JSON), used when the model is given by id or path."""
    trust_remote_code: bool = False
    """Run model code that comes with a checkpoint. Only for checkpoints whose code you have read."""
    router_aux_loss_coef: float | None = limited(
        None, ge=0, finite=True, advice="0 switches the loss off; 0.001 to 0.02 are usual."
    )
    """Weight of the load-balancing loss of mixtures of experts, taken over all tokens of an optimizer step. Unset:
    router_aux_loss_coef of the model's own config (0.001 for Qwen3-MoE); 0 switches the loss off."""
    freeze_vit: bool = False
    """Freeze the image encoder (vision tower) of a vision-language model."""
    freeze_aligner: bool = False
    """Freeze the projector between image encoder and language model of a vision-language model."""
    freeze_llm: bool = False
    """Freeze the language model of a vision-language model, with its head."""
    disable_dropout: bool = False
    """Set every dropout probability to 0, so that the same tokens always get the same log-probabilities."""
    cast_lm_head_to_fp32: bool = False
    """Compute the logits in float32 although the model runs in a lower precision."""
    attn_layout: str = limited("auto", choices=("auto", "shared_prefix", "packed", "padded"))
    """Layout of completions in forward passes: `shared_prefix` (each prompt once, its completions after it), `packed`
    (end to end, no padding), `padded` (one row each), or `auto` (the first of these with which the model gives the same
    results)."""
    logprob_chunk_size: int = limited(1024, ge=1)
    """Tokens whose logits are held in memory at once. Smaller: less memory, slightly slower; results do not change."""


@dataclass
class BatchFields:
    """Numbers of completions and prompts in a rollout batch and in an update."""

    num_generations: int | None = 8
    """Completions sampled for each prompt: the group they are compared within. At least 2."""
    num_generations_eval: int | None = limited(None, ge=1)
    """Completions per prompt during evaluation. Unset: the same as `num_generations`."""
    generation_batch_size: int | None = limited(None, ge=1)
    """Completions sampled at a time over all processes. Unset: per_device_train_batch_size * processes *
    steps_per_generation. Give this or `steps_per_generation`."""
    steps_per_generation: int | None = limited(None, ge=1)
    """Micro-batches that one rollout batch is cut into. Unset: gradient_accumulation_steps, so that one rollout batch
    feeds one update. Give this or `generation_batch_size`."""
    max_tokens_per_micro_batch: int | None = limited(None, ge=1)
    """Most tokens of a micro-batch, the part of a batch that one forward and backward pass takes: the setting for
    memory. Unset: the tokens of per_device_train_batch_size rollouts when padded, or more where a GPU's memory
    suffices, but never more than it takes to keep the hardware busy. Results do not depend on it."""
    num_iterations: int = limited(1, ge=1)
    """Epochs of training on each rollout batch (mu in the GRPO paper). More than 1 reuses completions of an older
    policy."""
    shuffle_dataset: bool | None = True
    """Shuffle the training prompts."""
    pad_to_multiple_of: int | str | None = "auto"
    """Round padded lengths up to a multiple of this number. `auto` and unset pad to the longest row only."""
    ds3_gather_for_generation: bool = True
    """Where FSDP2 or DeepSpeed ZeRO-3 shard the weights, gather all of them in each process while the built-in engine
    samples: much faster, if they fit. False gathers them layer by layer, again for every token."""


@dataclass
class LoggingFields:
    """Completions on the console, in trackers and in the output folder."""

    log_completions: bool = False
    """Show sampled prompts and completions at every log, on the console and in the trackers."""
    log_entropy: bool = False
    """Log the mean, smallest and largest entropy of completions, and add it to the tables of completions. Engines that
    do not measure entropy, such as servers, need one more scoring pass for it."""
    log_multimodal: bool = True
    """Add thumbnails of the images that a vision-language model was given to the tables of completions."""
    num_completions_to_print: int | None = limited(None, ge=0)
    """With `log_completions`: number of completions to print; 0 prints none, unset prints all."""
    log_unique_prompts: bool = False
    """With `log_completions`: show one completion of each prompt only."""
    export_completions: bool = False
    """Also write the latest rollout batch of all processes as text: at every log to
    `completions/completions_{step}.parquet`, as TRL does, and at every evaluation to a file in `evaluations/`.
    `record/` has the same completions."""
    log_completions_total_limit: int | None = limited(None, ge=1)
    """With `export_completions`: number of the latest files to keep; unset keeps all."""
    record: str = limited("rollouts", choices=("rollouts", "tokens", "off"))
    """Contents of `record/` in the output folder, for `covey view`: `rollouts` (prompts, completions, rewards and
    metrics of every step and evaluation), `tokens` (in addition each training token with its log-probs, which
    `replay_from` and `covey diff` read) or `off`."""
    draw_curves: bool = False
    """Draw `curves.png` at every save and at the end: the curves of `report.html` as a picture. Needs matplotlib."""
    record_max_gb: float = limited(20.0, gt=0)
    """Size of `record/` in gigabytes, for each process, at which nothing more is recorded."""
    replay_from: str | None = None
    """Folder of a run with `record="tokens"`: train on its completions and rewards instead of sampling. The same
    settings give the same weights, bit by bit; others show what they would have learned from the same samples."""
    log_completions_hub_repo: str | None = None
    """Hub data set, such as me/completions, to which the files of `export_completions` are pushed during training;
    naming it writes these files, too."""


describe_fields(__name__)

# ---- rules -----------------------------------------------------------------------------------------------------------


def settings_can_be_saved(args: Args) -> Iterator[Finding]:
    """A saved model comes with the config, so that saving fails if a setting cannot be written.

    An error with save_strategy="no", too: `save_model` after training would fail and write no weights.
    """
    nested = [name for name, value in vars(args).items() if name[0] != "_" and isinstance(value, dict | list | tuple)]
    for name in nested:
        try:
            pickle.dumps(getattr(args, name))
        except Exception as error:  # whatever the value's class raises
            yield Finding.error(
                "setting-type",
                f"{name}={getattr(args, name)!r} cannot be saved with a model: {error}.",
                "Define it at the top level of a file.",
            )


def something_is_trained(args: Args) -> Iterator[Finding]:
    if args.max_steps == 0 or (args.max_steps < 0 and args.num_train_epochs <= 0):
        yield Finding.error(
            "nothing-trained",
            f"num_train_epochs={args.num_train_epochs} and max_steps={args.max_steps}: nothing would be trained.",
            "Set one of them above 0; max_steps wins unless it is -1.",
        )


def one_update_has_many_micro_batches(args: Args) -> Iterator[Finding]:
    name = name_of(args)
    if name in ("lomo", "adalomo") or name.endswith("_layerwise"):
        yield Finding.error(
            "optimizer-in-backward",
            f"optim={name!r} changes the weights within every backward pass, but one optimizer step takes several"
            " micro-batches here, whose gradients belong to the same weights.",
            "Choose another optimizer, such as adamw_torch, adafactor or galore_adamw.",
        )


def own_optimizers_can_be_made(args: Args) -> Iterator[Finding]:
    yield from check_own(args)


def optimizers_and_schedules_read_their_options(args: Args) -> Iterator[Finding]:
    optimizer, schedule = name_of(args), _word(args.lr_scheduler_type)
    if optimizer in ("adamw_torch", "adamw_torch_fused", STOCHASTIC):
        yield from ignored(args, ["optim_args"], f"optim={optimizer!r} reads none")
    if not re.match("galore|apollo", optimizer):
        yield from ignored(args, ["optim_target_modules"], f"optim={optimizer!r} treats all modules alike")
    if schedule in ("constant", "constant_with_warmup"):
        yield from ignored(args, ["lr_scheduler_kwargs"], f"the schedule {schedule!r} has no settings")
    if schedule in ("constant", "reduce_lr_on_plateau", "greedy"):
        advice = "; 'constant_with_warmup' does" if schedule == "constant" else ""
        yield from ignored(args, ["warmup_steps"], f"the schedule {schedule!r} does not warm up{advice}")


def intervals_are_read(args: Args) -> Iterator[Finding]:
    """A number of steps needs a strategy that counts steps, and options of saving and evaluating need these."""
    for kind in ("logging", "eval", "save"):
        if (strategy := _word(getattr(args, f"{kind}_strategy"))) != "steps" and (kind, strategy) != ("save", "best"):
            yield from ignored(args, [f"{kind}_steps"], f"{kind}_strategy is {strategy!r}, not 'steps'")
    if _word(args.save_strategy) == "no":
        yield from ignored(
            args, ["save_total_limit", "save_only_model"], "save_strategy is 'no', so there are no checkpoints"
        )
    if _word(args.eval_strategy) == "no":
        names = ["eval_delay", "load_best_model_at_end"]
        if args.lr_scheduler_type not in BY_METRIC:
            names += ["metric_for_best_model", "greater_is_better"]
        yield from ignored(args, names, "eval_strategy is 'no', so no evaluation decides")
    if args.max_steps > 0:
        yield from ignored(args, ["num_train_epochs"], f"max_steps={args.max_steps} ends the run")


def places_are_read(args: Args) -> Iterator[Finding]:
    """Options of the hub and of a tracker need these."""
    if not args.push_to_hub:
        yield from ignored(args, ["hub_strategy", "hub_always_push"], "push_to_hub is False")
    trackers = args.report_to if isinstance(args.report_to, list) else [args.report_to]
    if set(trackers) <= {"none", None}:
        yield from ignored(args, ["run_name"], "report_to names no tracker")
    if not {"trackio", "all"} & set(trackers):
        names = ["project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"]
        yield from ignored(args, names, "it is trackio's, and report_to does not name it")


def processes_are_several(args: Args) -> Iterator[Finding]:
    if (args.planned.world_size or args.world_size) > 1:
        return
    names = [f"ddp_{name}" for name in ("find_unused_parameters", "bucket_cap_mb", "broadcast_buffers", "static_graph")]
    yield from ignored(
        args, [*names, "ddp_backend", "save_on_each_node", "log_on_each_node"], "the run has one process"
    )
    if not (args.fsdp or by_fsdp()):
        yield from ignored(args, ["fsdp_config"], "fsdp is not set")


def recomputation_is_on(args: Args) -> Iterator[Finding]:
    if not args.gradient_checkpointing:
        names = ["gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"]
        yield from ignored(args, names, "gradient_checkpointing is off")


def embeddings_are_without_noise(args: Args) -> Iterator[Finding]:
    if args.neftune_noise_alpha is not None:
        yield Finding.error(
            "embedding-noise",
            f"neftune_noise_alpha={args.neftune_noise_alpha!r} adds noise to the embeddings, for supervised training."
            " Here completions would be sampled and scored by models that differ by noise.",
            "Leave it unset.",
        )


def liger_is_not_needed(args: Args) -> Iterator[Finding]:
    because = "the LM head is computed in chunks (logprob_chunk_size) without it, so that logits never fill the memory"
    yield from ignored(args, ["use_liger_kernel", "liger_kernel_config"], because)


def updates_divide_rollout_batches(args: Args) -> Iterator[Finding]:
    """An update lies between two epochs over a rollout batch, and none mixes two rollout batches."""
    algebra = args.algebra()
    if args.num_iterations > 1 and algebra.on_policy:
        yield Finding.warning(
            "updates-repeat",
            f"num_iterations={args.num_iterations}, but all {algebra.micro_batches} micro-batches of a rollout batch "
            f"fall into one update (gradient_accumulation_steps={args.gradient_accumulation_steps}): the same gradient "
            f"is computed {args.num_iterations} times.",
            f"Lower gradient_accumulation_steps to {algebra.steps_per_generation} or set num_iterations=1.",
        )
    if not algebra.on_policy and algebra.updates_per_rollout_batch.denominator != 1:
        yield Finding.warning(
            "updates-mix",
            f"A rollout batch lasts {algebra.micro_batches} micro-batches and an update takes "
            f"{algebra.gradient_accumulation_steps}: some updates mix two rollout batches.",
            "Make steps_per_generation * num_iterations a multiple of gradient_accumulation_steps, or a divisor of it.",
        )


def padding_is_a_number(args: Args) -> Iterator[Finding]:
    value = args.pad_to_multiple_of
    if value not in (None, "auto") and (not isinstance(value, int) or value < 1):
        evidence = f"pad_to_multiple_of={value!r} must be 'auto', None or a whole number, 1 or more."
        yield Finding.error("setting-range", evidence)
        return
    yield from ignored(args, ["pad_to_multiple_of"], "sequences are padded to the longest of them and no further")


def printing_needs_log_completions(args: Args) -> Iterator[Finding]:
    if not args.log_completions:
        names = ["log_unique_prompts", *["num_completions_to_print"] * (args.num_completions_to_print != 0)]
        yield from ignored(args, names, "log_completions is False")


def limiting_files_needs_an_export(args: Args) -> Iterator[Finding]:
    if not args.exports_completions:
        yield from ignored(args, ["log_completions_total_limit"], "export_completions is False")


def supervised_options_are_off(args: Args) -> Iterator[Finding]:
    names = ("label_smoothing_factor", "label_names", "train_sampling_strategy", "length_column_name")
    yield from ignored(args, names, "it belongs to supervised training")
    yield from ignored(args, ["average_tokens_across_devices"], "tokens are counted over all processes in every run")
    yield from ignored(args, ["remove_unused_columns"], "reward functions receive every column of the dataset")
    yield from ignored(args, ["use_cache"], "sampling has a cache of its own, and scoring needs none")
    yield from ignored(args, ["bf16_full_eval", "fp16_full_eval"], "evaluation computes like training")
    yield from ignored(args, ["include_num_input_tokens_seen"], "the metric `num_tokens` counts them in every run")
    predictions = ("eval_accumulation_steps", "prediction_loss_only", "batch_eval_metrics", "include_for_metrics")
    gathered = ("eval_do_concat_batches", "eval_use_gather_object")
    yield from ignored(args, [*predictions, *gathered], "an evaluation keeps no predictions, only metrics")
    if not (has_accelerator() or args.planned.gpu):
        yield from ignored(args, ["torch_empty_cache_steps"], "a CPU has no such cache")
    if args.tf32 and not (has_accelerator() or args.planned.gpu):
        yield from ignored(args, ["tf32"], "it is for GPUs")
    if args.fp16 and not (has_accelerator() or args.planned.gpu):
        yield from ignored(args, ["fp16"], "a CPU computes in float32 instead; bf16 is for CPUs that multiply bfloat16")
    loader = ("dataloader_prefetch_factor", "dataloader_persistent_workers", "dataloader_drop_last")
    yield from ignored(args, loader, "prompts are read one rollout batch at a time, and an incomplete one is left out")
    yield from ignored(
        args, ["dataloader_pin_memory", "dataloader_in_order"], "rows are read in order, and hold no tensors"
    )
    if not args.dataloader_num_workers:
        yield from ignored(args, ["dataloader_multiprocessing_context"], "dataloader_num_workers is 0")
    given = args.accelerator_config if args.was_given("accelerator_config") else None  # transformers has parsed it
    for name, default in (("dispatch_batches", None), ("even_batches", True), ("use_seedable_sampler", True)):
        if getattr(given, name, default) != default:
            yield Finding.warning(
                "setting-unread",
                f"accelerator_config with {name}={getattr(given, name)!r} has no effect: each process reads its own"
                " share of every rollout batch, in an order that `data_seed` or `seed` decides.",
            )
    if getattr(given, "non_blocking", False):
        evidence = "accelerator_config with non_blocking=True has no effect: rows hold no tensors to move."
        yield Finding.warning("setting-unread", evidence)


def seeds_are_read(args: Args) -> Iterator[Finding]:
    chosen = args.prompt_sampler != "uniform" or args.dynamic_sample or args.gates
    if not args.shuffle_dataset and not chosen:
        yield from ignored(args, ["data_seed"], "shuffle_dataset is False, so prompts come in the order of the dataset")


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))
