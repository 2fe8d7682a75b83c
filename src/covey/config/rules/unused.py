"""Rules about options of engines, displays and trainers that are not in use."""

import dataclasses
from typing import Any

from covey.config.hardware import by_deepspeed, by_fsdp, has_accelerator
from covey.config.rules.helpers import ignored
from covey.config.rules.mismatch import CORRECTION

SERVERS_OF_ANY_MAKE = ("vllm_lora_sync", "vllm_structured_outputs_regex")
"""Fields of vLLM's name that SGLang's servers are asked for as well."""


def engine_options_need_their_engine(args: Any) -> None:
    """Settings of vLLM, SGLang and transformers' generation need those engines."""
    names = [field.name for field in dataclasses.fields(args)]
    if not args.use_vllm:
        read = {*CORRECTION, *(SERVERS_OF_ANY_MAKE if args.use_sglang else ())}
        ignored(args, [n for n in names if n.startswith("vllm_") and n not in read], "use_vllm is False")
    if not args.use_sglang:
        ignored(args, [n for n in names if n.startswith("sglang_")] + ["checkpoint_path"], "use_sglang is False")
    own = "the built-in engine, which batches continuously itself, samples in the place of transformers'"
    ignored(args, ["use_transformers_continuous_batching"], own)
    ignored(args, ["transformers_continuous_batching_config"], f"{own}; max_concurrent_completions bounds its batch")
    if args.samples_elsewhere:
        ignored(args, ["ds3_gather_for_generation"], "another engine samples, from weights of its own")
    elif not (args.deepspeed or args.fsdp or by_deepspeed() or by_fsdp()):
        ignored(args, ["ds3_gather_for_generation"], "neither FSDP nor DeepSpeed is in use")
    ignored(args, ["cache_implementation"], "the built-in engine manages its own key-value cache")


def printing_needs_log_completions(args: Any) -> None:
    """Settings of the table of completions need the table."""
    if not args.log_completions:
        ignored(args, ["num_completions_to_print", "log_unique_prompts"], "log_completions is False")


def padding_is_a_number(args: Any) -> None:
    """`pad_to_multiple_of` is "auto", unset or a whole number; lengths are not rounded up yet."""
    value = args.pad_to_multiple_of
    if value not in (None, "auto") and (not isinstance(value, int) or value < 1):
        raise ValueError(f"pad_to_multiple_of={value!r} must be 'auto', None or a whole number, 1 or more.")
    ignored(args, ["pad_to_multiple_of"], "rows are padded to the longest of them and no further")


def supervised_options_are_off(args: Any) -> None:
    """Options of supervised training that mean nothing here are pointed out."""
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
    ignored(args, loader, "prompts are drawn generation by generation, and an incomplete one is left out")
