"""What a vision-language model asks of a trainer: its processor, rows that are padded, parts that are frozen."""

from typing import Any

from covey.core.media import placeholder_ids
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
