"""Rules about which features and words there are."""

from typing import Any

from covey.config.rules.helpers import closest
from covey.core.credit import COMPARED_WITH
from covey.core.kl import KL_ESTIMATORS
from covey.core.ratios import RATIO_LEVELS

WORDS = {
    "importance_sampling_level": tuple(RATIO_LEVELS),
    "kl_estimator": tuple(KL_ESTIMATORS),
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "step_baseline": COMPARED_WITH,
    "prompt_sampler": ("uniform", "difficulty"),
    "attn_layout": ("auto", "shared_prefix", "packed", "padded"),
    "vllm_mode": ("colocate", "server"),
    "vllm_model_impl": ("vllm", "transformers"),
    "vllm_weight_transfer": ("auto", "group", "ipc", "disk"),
    "sglang_weight_transfer": ("auto", "group", "tensor", "disk"),
    "vllm_lora_sync": ("auto", "adapter", "merged"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "engine_parity": ("raise", "warn", "off"),
    "unstable_chat_template": ("raise", "keep"),
}
"""Fields that take one of a few words."""


def words_are_known(args: Any) -> None:
    """A field that takes one of a few words has one of them."""
    for name, allowed in WORDS.items():
        value = getattr(args, name)
        if value not in allowed:
            raise ValueError(
                f"{name}={value!r} is not known; choose one of: {', '.join(allowed)}.{closest(value, allowed)}"
            )


def loss_type_is_known(args: Any) -> None:
    """The loss is built in or registered."""
    from covey.algorithms import LOSS_TYPES

    if args.loss_type not in LOSS_TYPES:
        raise ValueError(
            f"loss_type={args.loss_type!r} is not known; choose one of: {', '.join(sorted(LOSS_TYPES))}."
            f"{closest(args.loss_type, LOSS_TYPES)} To add your own, call covey.algorithms.register_loss before making "
            "the config."
        )


def rloo_loss_has_its_config(args: Any) -> None:
    """The sequence-level loss of RLOO goes with RLOO's advantages."""
    if args.method == "grpo" and args.loss_type == "rloo":
        raise ValueError("loss_type='rloo' belongs to RLOO: use RLOOConfig and RLOOTrainer (`covey rloo`).")


def liger_is_off(args: Any) -> None:
    """The log-probabilities are computed by Covey's own chunked head."""
    if args.use_liger_kernel:
        raise ValueError(
            "use_liger_kernel=True is not supported: its fused loss has no place here. The LM head is already computed "
            "in chunks (logprob_chunk_size), so that logits never fill the memory."
        )
