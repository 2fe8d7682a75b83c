"""Rules about batches, processes and the outer training loop."""

from typing import TYPE_CHECKING

from covey.config.hardware import has_accelerator
from covey.config.messages import ignored, warn

if TYPE_CHECKING:
    from covey.config.base import OnlineConfig


def one_process_per_gpu(args: "OnlineConfig") -> None:
    """Several GPUs are driven by several processes."""
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs are visible to one process. Start one process per GPU "
            f"(accelerate launch --num_processes {args.n_gpu} script.py) or show one only (CUDA_VISIBLE_DEVICES=0)."
        )


def groups_have_two_completions(args: "OnlineConfig") -> None:
    """A completion is compared with the others of its group, so there are at least two."""
    if args.num_generations is None or args.num_generations < 2:
        raise ValueError(
            f"num_generations={args.num_generations!r}: a completion is compared with the others of its prompt, so "
            "there must be at least 2; with 1 every advantage is 0 and nothing is learned. 4 to 16 are usual."
        )


def batch_size_is_fixed(args: "OnlineConfig") -> None:
    """Nothing else changes the batch size that groups are counted in."""
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size=True would change per_device_train_batch_size, and with it how groups divide, in the "
            "middle of a run. Set per_device_train_batch_size yourself; `covey explain` estimates the memory."
        )
    if getattr(args.accelerator_config, "split_batches", False):  # transformers has parsed it
        raise ValueError(
            "accelerator_config with split_batches=True would cut groups apart. Leave it False: "
            "per_device_train_batch_size counts the completions of one process."
        )


def something_is_trained(args: "OnlineConfig") -> None:
    """The run lasts for some steps."""
    if args.max_steps == 0 or (args.max_steps < 0 and args.num_train_epochs <= 0):
        raise ValueError(
            f"num_train_epochs={args.num_train_epochs} and max_steps={args.max_steps}: nothing would be trained. Set"
            " one of them above 0; max_steps wins unless it is -1."
        )


def optimizer_steps_once_per_update(args: "OnlineConfig") -> None:
    """Weights change after all micro-batches of an update, not within a backward pass."""
    name = str(getattr(args.optim, "value", args.optim))
    if name in ("lomo", "adalomo") or name.endswith("_layerwise"):
        raise ValueError(
            f"optim={name!r} changes the weights within every backward pass, but one optimizer step takes several"
            " passes here, whose gradients belong to the same weights. Choose another optimizer, such as adamw_torch,"
            " adafactor or galore_adamw."
        )


def embeddings_are_without_noise(args: "OnlineConfig") -> None:
    """Sampling and scoring see the same embeddings."""
    if args.neftune_noise_alpha is not None:
        raise ValueError(
            f"neftune_noise_alpha={args.neftune_noise_alpha!r} adds noise to the embeddings, for supervised training."
            " Here completions would be sampled and scored by models that differ by noise. Leave it unset."
        )


def liger_is_off(args: "OnlineConfig") -> None:
    """Log-probabilities are computed by Covey's own chunked head."""
    if args.use_liger_kernel:
        raise ValueError(
            "use_liger_kernel=True is not supported: its fused loss has no place here. The LM head is already computed "
            "in chunks (logprob_chunk_size), so that logits never fill the memory."
        )


def iterations_change_the_policy(args: "OnlineConfig") -> None:
    """An update lies between two passes over a rollout batch."""
    algebra = args.algebra()
    if args.num_iterations > 1 and algebra.on_policy:
        warn(
            f"num_iterations={args.num_iterations}, but all {algebra.micro_batches} micro-batches of a rollout batch "
            f"fall into one update (gradient_accumulation_steps={args.gradient_accumulation_steps}): the same gradient "
            f"is computed {args.num_iterations} times. Lower gradient_accumulation_steps to "
            f"{algebra.steps_per_generation} or set num_iterations=1."
        )


def updates_align_with_rollout_batches(args: "OnlineConfig") -> None:
    """No update takes some micro-batches from one rollout batch and some from the next."""
    algebra = args.algebra()
    if not algebra.on_policy and algebra.updates_per_generation.denominator != 1:
        warn(
            f"A rollout batch lasts {algebra.micro_batches} micro-batches and an update takes "
            f"{algebra.gradient_accumulation_steps}: some updates mix two rollout batches. Make steps_per_generation * "
            "num_iterations a multiple of gradient_accumulation_steps, or a divisor of it."
        )


def padding_is_a_number(args: "OnlineConfig") -> None:
    """`pad_to_multiple_of` is "auto", unset or a whole number; lengths are not rounded up yet."""
    value = args.pad_to_multiple_of
    if value not in (None, "auto") and (not isinstance(value, int) or value < 1):
        raise ValueError(f"pad_to_multiple_of={value!r} must be 'auto', None or a whole number, 1 or more.")
    ignored(args, ["pad_to_multiple_of"], "sequences are padded to the longest of them and no further")


def printing_needs_log_completions(args: "OnlineConfig") -> None:
    """Settings of the table of completions need the table."""
    if not args.log_completions:
        ignored(args, ["num_completions_to_print", "log_unique_prompts"], "log_completions is False")


def supervised_options_are_off(args: "OnlineConfig") -> None:
    """Options of supervised training have no effect."""
    names = ("label_smoothing_factor", "train_sampling_strategy", "length_column_name")
    ignored(args, names, "it belongs to supervised training")
    ignored(args, ["remove_unused_columns"], "reward functions receive every column of the dataset")
    ignored(args, ["bf16_full_eval", "fp16_full_eval"], "evaluation computes like training")
    ignored(args, ["include_num_input_tokens_seen"], "the metric `num_tokens` counts them in every run")
    predictions = ("eval_accumulation_steps", "prediction_loss_only", "batch_eval_metrics")
    ignored(args, predictions, "an evaluation keeps no predictions, only metrics")
    if args.fp16 and not has_accelerator():
        ignored(args, ["fp16"], "a CPU computes in float32 then; bf16 is for CPUs that multiply bfloat16")
    loader = ("dataloader_prefetch_factor", "dataloader_persistent_workers", "dataloader_drop_last")
    ignored(args, loader, "prompts are read one rollout batch at a time, and an incomplete one is left out")


BATCH_RULES = (one_process_per_gpu, groups_have_two_completions, batch_size_is_fixed)
"""Rules that must hold before batch sizes can be worked out."""

RULES = (
    something_is_trained,
    optimizer_steps_once_per_update,
    embeddings_are_without_noise,
    liger_is_off,
    iterations_change_the_policy,
    updates_align_with_rollout_batches,
    padding_is_a_number,
    printing_needs_log_completions,
    supervised_options_are_off,
)
