"""Support for vision-language models: processor, padded layout, present blocks."""

from typing import Any

from covey.core.model import placeholder_ids
from covey.core.records import FinishReason, Rollout
from covey.rollout.prompts import PromptCodec
from covey.rollout.vision import Vision, is_processor


def build_vision(processing_class: Any, model: Any) -> Vision | None:
    """The encoder of images; None where prompts are text alone."""
    return Vision(processing_class, placeholder_ids(model.config)) if is_processor(processing_class) else None


def layout_of(args: Any, vision: Vision | None) -> str:
    """Layout of rollouts for the model; padded where it is shown images.

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


def name_present_blocks(policy: Any) -> None:
    """Leave out classes of blocks that a model names and does not have, such as those of an encoder of text.

    Accelerate wraps the blocks that a model names for FSDP and refuses a model that lacks one.
    """
    base = policy.get_base_model() if hasattr(policy, "peft_config") else policy
    named = getattr(base, "_no_split_modules", None)
    if named:
        present = {type(module).__name__ for module in base.modules()}
        base._no_split_modules = type(named)(name for name in named if name in present)


def blank_row(codec: PromptCodec) -> Rollout:
    """A prompt that shows a small white image, and nothing after it."""
    from PIL import Image

    content = [{"type": "image", "image": Image.new("RGB", (64, 64), "white")}, {"type": "text", "text": "?"}]
    encoded = codec.read([{"role": "user", "content": content}])
    return Rollout(encoded.ids, [], [], None, "", FinishReason.STOP, media=encoded.media)
