"""Fields about the policy, its training, batches and what is shown of completions."""
# ruff: noqa: RUF009 - `described` makes a dataclass field

import math
from dataclasses import dataclass
from typing import Any

from covey.config.groups.describe import described


@dataclass
class TrainingDefaults:
    """Fields of `transformers.TrainingArguments` whose defaults suit reinforcement learning."""

    learning_rate: float = described(
        1e-6,
        "Initial learning rate of the optimizer.",
        ge=0,
        lt=math.inf,
        advice="1e-6 to 1e-5 are usual, ten times that for an adapter.",
    )
    bf16: bool | None = described(
        None,
        "Train in bfloat16 mixed precision. Unset: wherever the hardware multiplies bfloat16 (a CUDA GPU since Ampere, "
        "a CPU with AMX or AVX512-BF16) and float32 elsewhere.",
    )
    gradient_checkpointing: bool | None = described(
        True, "Recompute activations in the backward pass: less memory, about a third more compute."
    )
    logging_steps: float = described(
        10, "Log every this many optimizer updates; a number below 1 is a share of all updates."
    )
    logging_nan_inf_filter: bool = described(
        False, "Log the average of earlier losses in the place of one that is NaN."
    )
    remove_unused_columns: bool = described(False, "No effect: reward functions receive every column of the dataset.")


@dataclass
class ModelFields:
    """The policy."""

    model_init_kwargs: dict[str, Any] | str | None = described(
        None, "Keyword arguments of `from_pretrained` (a dict or JSON), used when the model is given by id or path."
    )
    trust_remote_code: bool = described(
        False, "Run model code that comes with a checkpoint. Only for checkpoints whose code you have read."
    )
    router_aux_loss_coef: float | None = described(
        None,
        "Weight of the load-balancing loss of mixtures of experts, taken over all tokens of an optimizer step. Unset: "
        "router_aux_loss_coef of the model's own config (0.001 for Qwen3-MoE); 0 switches the loss off.",
        ge=0,
        lt=math.inf,
        advice="0 switches the loss off; 0.001 to 0.02 are usual.",
    )
    freeze_vit: bool = described(
        False, "Of a vision-language model, train everything but what encodes images (the vision tower)."
    )
    freeze_aligner: bool = described(
        False, "Of a vision-language model, train everything but what brings encoded images to the language model."
    )
    freeze_llm: bool = described(
        False, "Of a vision-language model, train everything but the language model and its head."
    )
    disable_dropout: bool = described(
        False, "Set every dropout probability to 0, so that the same tokens always get the same log-probabilities."
    )
    cast_lm_head_to_fp32: bool = described(
        False, "Compute the logits in float32 although the model runs in a lower precision."
    )
    attn_layout: str = described(
        "auto",
        "Layout of completions in forward passes: `shared_prefix` (each prompt once, its completions after it), "
        "`packed` (end to end, no padding), `padded` (one row each), or `auto` (the first of these with which the "
        "model gives the same results).",
        choices=("auto", "shared_prefix", "packed", "padded"),
    )
    logprob_chunk_size: int = described(
        1024,
        "Tokens whose logits are held in memory at once. Smaller: less memory, slightly slower; results do not change.",
        ge=1,
    )


@dataclass
class BatchFields:
    """Numbers of completions and prompts in a rollout batch and in an update."""

    num_generations: int | None = described(
        8, "Completions sampled for each prompt: the group they are compared within. At least 2."
    )
    num_generations_eval: int | None = described(
        None, "Completions per prompt during evaluation. Unset: the same as `num_generations`.", ge=1
    )
    generation_batch_size: int | None = described(
        None,
        "Completions sampled at a time over all processes. Unset: per_device_train_batch_size * processes * "
        "steps_per_generation. Give this or `steps_per_generation`.",
        ge=1,
    )
    steps_per_generation: int | None = described(
        None,
        "Micro-batches that one rollout batch is cut into. Unset: gradient_accumulation_steps, so that one rollout "
        "batch feeds one update. Give this or `generation_batch_size`.",
        ge=1,
    )
    max_tokens_per_micro_batch: int | None = described(
        None,
        "Most tokens of one forward and backward pass: the knob for memory. Unset: at most what "
        "per_device_train_batch_size rollouts take when padded, and no more than keeps the hardware busy. Results do "
        "not depend on it.",
        ge=1,
    )
    num_iterations: int = described(
        1,
        "Passes over each rollout batch (mu in the GRPO paper). More than 1 reuses completions of an older policy.",
        ge=1,
    )
    shuffle_dataset: bool | None = described(True, "Shuffle the training prompts.")
    pad_to_multiple_of: int | str | None = described(
        "auto", "Round padded lengths up to a multiple of this number. `auto` and unset pad to the longest row only."
    )
    ds3_gather_for_generation: bool = described(
        True,
        "Where FSDP2 or DeepSpeed ZeRO-3 shard the weights, gather all of them in each process while the built-in "
        "engine samples: much faster, where they fit. False gathers layer by layer, again for every token.",
    )


@dataclass
class LoggingFields:
    """Completions on the console and in trackers; the parquet files are always written."""

    log_completions: bool = described(
        False, "Show sampled prompts and completions at every log, on the console and in the trackers."
    )
    log_multimodal: bool = described(
        True, "Include small images of what vision-language models are shown in the tables of completions."
    )
    num_completions_to_print: int | None = described(
        None, "With `log_completions`: how many to print; unset prints all.", ge=1
    )
    log_unique_prompts: bool = described(False, "With `log_completions`: one completion of each prompt only.")
    log_completions_hub_repo: str | None = described(
        None,
        "Hub data set to which the parquet files of completions are pushed while training, such as me/completions.",
    )
