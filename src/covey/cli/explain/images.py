"""Images of a prompt, for `covey explain`: the tokens and patches that a model's own processor makes of white ones."""

from typing import Any

from covey.sizing.memory import Images

SIZE = (512, 512)
"""Pixels of an image where nobody says, width and height."""


def image_size(text: str | None) -> tuple[int, int]:
    """Width and height as in `640x480`.

    Raises:
        ValueError: it is written otherwise.
    """
    if text is None:
        return SIZE
    sides = text.lower().split("x")
    if len(sides) != 2 or not all(side.isdigit() and int(side) > 0 for side in sides):
        raise ValueError(f"--image_size must be width x height in pixels, as in 640x480, not {text!r}.")
    return int(sides[0]), int(sides[1])


def images_of_prompt(model: str, config: Any, number: int, size: tuple[int, int]) -> Images:
    """What a prompt with so many images takes.

    Args:
        model: folder or id of a model on this machine.
        config: its config.
        number: images of a prompt.
        size: of each, width and height in pixels.

    Raises:
        ValueError: its processor is not here, or cannot be used.
    """
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(model, local_files_only=True)
        return processed(processor, config, number, size)
    except Exception as error:  # what processors need and how they complain is theirs
        said = str(error).strip().partition("\n")[0]
        raise ValueError(f"its processor cannot be used here ({type(error).__name__}: {said[:200]})") from error


def processed(processor: Any, config: Any, number: int, size: tuple[int, int]) -> Images:
    """What a processor makes of white images of that size."""
    from PIL import Image

    from covey.core.media import placeholder_ids
    from covey.rollout.vision import Vision

    content = [{"type": "image"}] * number + [{"type": "text", "text": "?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    encoded = Vision(processor, placeholder_ids(config)).encode(text, [Image.new("RGB", size, "white")] * number)
    (media,) = encoded.media
    pixels = media.tensors["pixel_values"]
    tokens = len(encoded.ids) - len(media.short_ids) + number
    if pixels.dim() == 2:  # a row for each patch
        return Images(tokens, len(pixels), pixels.numel())
    side = config.vision_config.patch_size
    tiles = pixels.shape[:-3].numel()
    return Images(tokens, tiles * (pixels.shape[-2] // side) * (pixels.shape[-1] // side), pixels.numel())
