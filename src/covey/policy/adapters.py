"""Putting an adapter on a model, and which can be trained. Not here: what of a model they change (`weights`)."""

import warnings
from collections.abc import Collection
from typing import Any

from covey.policy.quantization import quantisation_of
from covey.policy.vlm_parts import outside_of

NEED_INPUTS = ("POLY", "XLORA", "CPT")
"""Kinds of adapter that need more than tokens in a forward pass, or two of them."""


def with_adapter(model: Any, peft_config: Any, frozen: Collection[str] = ()) -> Any:
    """A PEFT model of a transformers model.

    Args:
        model: what the adapter is put on.
        peft_config: its kind and places.
        frozen: parts of a vision-language model that get none: "vit", "aligner", "llm".

    Raises:
        ValueError: the config is none, or of a kind that cannot be trained, or does not suit the model.
        ImportError: PEFT is not installed.
    """
    try:
        from peft import PeftConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
    except ImportError as error:
        raise ImportError("`peft_config` needs PEFT: pip install 'covey[peft]'") from error
    if isinstance(model, PeftModel):
        raise ValueError(
            "a PeftModel and a `peft_config` were both given; pass the base model with the config, or the PeftModel"
            " alone."
        )
    if not isinstance(peft_config, PeftConfig):
        raise ValueError(
            f"`peft_config` must be a PEFT config, got {type(peft_config).__name__}: {peft_config!r:.80}. Make one,"
            " such as peft.LoraConfig(r=16, target_modules='all-linear')."
        )
    _check_kind(peft_config, "`peft_config`")
    if quantisation_of(model) is not None:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if frozen:
        peft_config = outside_of(model, peft_config, frozen)
    try:
        return get_peft_model(model, peft_config)
    except ValueError as error:
        raise ValueError(f"the adapter of `peft_config` does not fit {type(model).__name__}: {error}") from error


def check_adapters(model: Any) -> None:
    """Refuse a model whose adapters are not PEFT's usual ones, or of a kind that cannot be trained.

    Raises:
        ValueError: it has such adapters.
    """
    adapters = getattr(model, "peft_config", None)
    if adapters is None:
        return
    from peft import PeftModel

    if not isinstance(model, PeftModel):
        raise ValueError(
            f"this {type(model).__name__} holds adapters without being a PeftModel, as `model.add_adapter` and PEFT's"
            " mixed models make them. Give the model without them and a `peft_config`, or make it with"
            " peft.get_peft_model."
        )
    _check_kind(adapters[model.active_adapter], "the adapter of the model")


def _check_kind(config: Any, name: str) -> None:
    kind = getattr(config.peft_type, "value", config.peft_type)
    if config.task_type not in (None, "CAUSAL_LM"):
        raise ValueError(
            f"{name} has task_type={str(config.task_type)!r}, but the policy is a causal language model:"
            " use task_type='CAUSAL_LM' or leave it out."
        )
    if config.is_prompt_learning:
        raise ValueError(
            f"{name} is a {type(config).__name__}, which puts virtual tokens before the prompt; sampling"
            " and scoring support adapters inside the layers. Use LoRA or one of its relatives."
        )
    if kind in NEED_INPUTS:
        raise ValueError(
            f"{name} is a {type(config).__name__}, which needs more than tokens in a forward pass; sampling and"
            " scoring give it none. Use LoRA or one of its relatives."
        )
    if kind == "ADALORA":
        warnings.warn(
            f"{name} is an AdaLoraConfig: nothing here calls its `update_and_allocate`, so every layer keeps its first"
            f" rank, init_r={config.init_r}. Call it in a callback's `on_optimizer_step`, or use LoRA.",
            stacklevel=2,
        )
