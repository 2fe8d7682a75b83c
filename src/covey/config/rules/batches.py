"""Rules about batches and processes; they run before the batch algebra."""

from typing import Any

COUNTS = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "num_iterations",
    "num_generations_eval",
    "max_completion_length",
    "max_concurrent_completions",
    "speculative_max_tokens",
    "logprob_chunk_size",
    "max_tokens_per_micro_batch",
    "ref_model_sync_steps",
    "num_completions_to_print",
    "vllm_tensor_parallel_size",
    "vllm_weight_bucket",
    "vllm_max_model_length",
    "move_model_batches",
)
"""Fields that are whole numbers from 1 (or unset)."""


def one_process_per_gpu(args: Any) -> None:
    """Several GPUs are driven by several processes, never by one."""
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs are visible to one process. Start one process per GPU "
            f"(accelerate launch --num_processes {args.n_gpu} script.py) or show one only (CUDA_VISIBLE_DEVICES=0)."
        )


def counts_are_whole_and_positive(args: Any) -> None:
    """Sizes and counts are whole numbers from 1."""
    for name in COUNTS:
        value = getattr(args, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r} must be a whole number, 1 or more.")


def groups_have_siblings(args: Any) -> None:
    """A completion is judged against its siblings, so there are at least two."""
    if not isinstance(args.num_generations, int) or args.num_generations < 2:
        raise ValueError(
            f"num_generations={args.num_generations!r}: a completion is compared with the others of its prompt, so "
            "there must be at least 2; with 1 every advantage is 0 and nothing is learned. 4 to 16 are usual."
        )


def batch_size_is_fixed(args: Any) -> None:
    """Nothing else may change the batch size that groups are counted in."""
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size=True would change per_device_train_batch_size, and with it how groups divide, in the "
            "middle of a run. Set per_device_train_batch_size yourself; `covey explain` estimates the memory."
        )
    if args.accelerator_config.split_batches:
        raise ValueError(
            "accelerator_config with split_batches=True would cut groups apart. Leave it False: "
            "per_device_train_batch_size counts the completions of one process."
        )
