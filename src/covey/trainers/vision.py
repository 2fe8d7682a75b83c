"""What a vision-language model asks of a trainer: its processor, rows that are padded, parts that are frozen."""

from typing import Any

from covey.core.media import placeholder_ids
from covey.policy.loading import sees_images
from covey.policy.parts import freeze_parts
from covey.rollout.vision import Vision, is_processor


def build_vision(processing_class: Any, model: Any) -> Vision | None:
    """What encodes images; None where prompts are text alone."""
    return Vision(processing_class, placeholder_ids(model.config)) if is_processor(processing_class) else None


def layout_of(args: Any, vision: Vision | None) -> str:
    """How rollouts are laid out for the model: where it is shown images, in padded rows.

    Raises:
        ValueError: the user insists on another layout.
    """
    if vision is None:
        return str(args.attn_layout)
    if args.attn_layout not in ("auto", "padded"):
        raise ValueError(
            f"attn_layout={args.attn_layout!r} does not suit images, whose tokens have positions of their own and may"
            " attend in both directions: rows are padded. Leave attn_layout at 'auto', or pass"
            " `processing_class=processor.tokenizer` to train on text alone."
        )
    return "padded"


def freeze(args: Any, policy: Any) -> None:
    """Freeze the parts of the policy that the config names.

    Raises:
        ValueError: it has no such parts.
    """
    chosen = {"vit": args.freeze_vit, "aligner": args.freeze_aligner, "llm": args.freeze_llm}
    if all(chosen.values()):
        raise ValueError(
            "freeze_vit, freeze_aligner and freeze_llm are all True, so nothing would be trained: leave one at False."
        )
    if any(chosen.values()) and not sees_images(policy.config):
        named = [f"freeze_{name}=True" for name, frozen in chosen.items() if frozen]
        raise ValueError(
            f"{' and '.join(named)}: {type(policy).__name__} is no vision-language model, so it has no such part. Leave"
            " it at False; to train a few weights of a language model, use `peft_config`."
        )
    freeze_parts(policy, **chosen)
