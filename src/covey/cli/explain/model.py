"""Model of an explained run: its config, its trained and quantised parts, and the images of its prompts."""

from dataclasses import dataclass, field
from typing import Any

from covey.cli.config_file import RunConfig
from covey.cli.train import quantisation
from covey.policy.loading import sees_images
from covey.sizing.memory import Images


@dataclass(frozen=True)
class ModelPlan:
    """A model that is not loaded.

    Attributes:
        config: transformers config; None: unknown.
        missing: the reason.
        peft: arguments of `peft.LoraConfig`, if an adapter is trained.
        quantization: a `BitsAndBytesConfig`, if the weights under it are quantised.
        images: images of each prompt.
        notes: sentences for the section on memory.
    """

    config: Any = None
    missing: str = "no model config was given"
    peft: dict[str, Any] | None = None
    quantization: Any = None
    images: Images = field(default_factory=Images)
    notes: list[str] = field(default_factory=list)


def model_plan(run: RunConfig, images: int, image_size: tuple[int, int]) -> ModelPlan:
    """The model of a run, if it is on this machine.

    Args:
        run: the run.
        images: number of images of each prompt, if the model sees images.
        image_size: width and height of each.
    """
    if run.model is None:
        return ModelPlan(missing="the run names no model")
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(run.model, local_files_only=True)
    except (OSError, ValueError) as error:
        return ModelPlan(missing=f"the config of {run.model!r} is not on this machine ({str(error).splitlines()[0]})")
    if not hasattr(config.get_text_config(), "num_attention_heads"):
        return ModelPlan(
            missing=f"{config.model_type} has no attention, and the formulas are for layers with attention"
        )
    quantization = _quantization(run, config) if run.peft is not None else None
    if not sees_images(config):
        return ModelPlan(config, "", run.peft, quantization)
    counted, note = Images(), "No images are counted (--images 0)."
    if images:
        try:
            counted = images_of_prompt(run.model, config, images, image_size)
            note = (
                f"A prompt has {images} image(s) of {image_size[0]} x {image_size[1]} pixels (--images, --image_size),"
                f" which are {counted.tokens:,} tokens and {counted.patches:,} patches for its processor."
            )
        except ValueError as error:
            note = f"Images are not counted: {error}."
    return ModelPlan(config, "", run.peft, quantization, counted, [note])


def _quantization(run: RunConfig, config: Any) -> Any:
    """Quantization by the run, or as the weights were saved; None: none, or of an unknown kind."""
    saved = getattr(config, "quantization_config", None) or {}
    as_saved = {name: value for name, value in saved.items() if name != "quant_method" and not name.startswith("_")}
    given = run.quantization or (as_saved if "bitsandbytes" in str(saved.get("quant_method")) else None)
    try:
        return quantisation(given)
    except ValueError:
        return None  # the section about the start reports it


def images_of_prompt(model: str, config: Any, number: int, size: tuple[int, int]) -> Images:
    """Tokens, patches and pixels of a prompt's images.

    Args:
        model: folder or id of a model on this machine.
        config: its config.
        number: images of a prompt.
        size: width and height of each in pixels.

    Raises:
        ValueError: its processor is missing, or cannot be used.
    """
    from transformers import AutoProcessor

    try:
        return processed(AutoProcessor.from_pretrained(model, local_files_only=True), config, number, size)
    except Exception as error:  # processors of other people's raise anything
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"its processor cannot be used here ({type(error).__name__}: {reason[:200]})") from error


def processed(processor: Any, config: Any, number: int, size: tuple[int, int]) -> Images:
    """Tokens, patches and pixels of white images of that size, by the model's own processor."""
    from PIL import Image

    from covey.core.model import placeholder_ids
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
