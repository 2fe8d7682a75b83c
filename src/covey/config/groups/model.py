"""Fields about the policy itself, how it is trained and how batches are cut."""
# ruff: noqa: RUF009 - `described` makes a dataclass field

from dataclasses import dataclass
from typing import Any

from covey.config.groups.describe import described


@dataclass
class TrainingDefaults:
    """Fields of `transformers.TrainingArguments` whose defaults suit reinforcement learning."""

    learning_rate: float = described(1e-6, "Initial learning rate of the optimizer.")
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
        "How completions are laid out in forward passes: `shared_prefix` (each prompt once, its completions after it), "
        "`packed` (end to end, no padding), `padded` (one row each), or `auto` (the first of these with which the "
        "model gives the same results).",
    )
    logprob_chunk_size: int = described(
        1024,
        "Tokens whose logits are held in memory at once. Smaller: less memory, slightly slower; results do not change.",
    )


@dataclass
class BatchFields:
    """How many completions, of how many prompts, at which moments."""

    num_generations: int | None = described(
        8, "Completions sampled for each prompt: the group they are compared within. At least 2."
    )
    num_generations_eval: int | None = described(
        None, "Completions per prompt during evaluation. Unset: the same as `num_generations`."
    )
    generation_batch_size: int | None = described(
        None,
        "Completions sampled at a time over all processes. Unset: per_device_train_batch_size * processes * "
        "steps_per_generation. Give this or `steps_per_generation`.",
    )
    steps_per_generation: int | None = described(
        None,
        "Micro-batches that one generation is cut into. Unset: gradient_accumulation_steps, so that one generation "
        "feeds one update. Give this or `generation_batch_size`.",
    )
    max_tokens_per_micro_batch: int | None = described(
        None,
        "Most tokens of one forward and backward pass: the knob for memory. Unset: at most what "
        "per_device_train_batch_size rollouts take when padded, and no more than keeps the hardware busy. Results do "
        "not depend on it.",
    )
    num_iterations: int = described(
        1, "Passes over each generation (mu in the GRPO paper). More than 1 reuses completions of an older policy."
    )
    shuffle_dataset: bool | None = described(True, "Shuffle the training prompts.")
    pad_to_multiple_of: int | str | None = described(
        "auto", "Round padded lengths up to a multiple of this number. `auto` and unset pad to the longest row only."
    )
    ds3_gather_for_generation: bool = described(
        True,
        "Where FSDP2 or DeepSpeed ZeRO-3 share out the weights, gather all of them in each process while the built-in "
        "engine samples: much faster, where they fit. False gathers layer by layer, with every token anew.",
    )


def frozen_parts(args: Any) -> list[str]:
    """Parts of the policy that keep their weights.

    Raises:
        ValueError: all of them would.
    """
    chosen = {"vit": args.freeze_vit, "aligner": args.freeze_aligner, "llm": args.freeze_llm}
    if all(chosen.values()):
        raise ValueError(
            "freeze_vit, freeze_aligner and freeze_llm are all True, so nothing would be trained: leave one at False."
        )
    return [part for part, frozen in chosen.items() if frozen]
