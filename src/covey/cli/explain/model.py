"""What `covey explain` knows of a run's model: its config, what is trained of it, how it is held, and its images."""

from dataclasses import dataclass, field
from typing import Any

from covey.cli.config_file import RunConfig
from covey.cli.explain.images import images_of_prompt
from covey.cli.explain.sentences import count
from covey.cli.train import quantisation
from covey.policy.loading import sees_images
from covey.sizing.memory import Images


@dataclass(frozen=True)
class ModelPlan:
    """A model on paper.

    Attributes:
        config: of transformers; None where it is not known.
        missing: why it is not.
        peft: arguments of `peft.LoraConfig`, when an adapter is trained.
        quantization: a `BitsAndBytesConfig`, when the weights under it are quantised.
        images: of each prompt.
        notes: what to say of it beside the memory that it takes.
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
        run: which names it.
        images: of each prompt, where it sees some.
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
    shown, notes = Images(), []
    if sees_images(config):
        shown, said = _images(run.model, config, images, image_size)
        notes.append(said)
    quantization = _quantisation(run, config) if run.peft is not None else None
    return ModelPlan(config, "", run.peft, quantization, shown, notes)


def _images(model: str, config: Any, number: int, size: tuple[int, int]) -> tuple[Images, str]:
    if number == 0:
        return Images(), "No images are counted (--images 0)."
    try:
        shown = images_of_prompt(model, config, number, size)
    except ValueError as error:
        return Images(), f"Images are not counted: {error}."
    return shown, (
        f"A prompt shows {count(number, 'image')} of {size[0]} x {size[1]} pixels (--images, --image_size), which its"
        f" processor makes {count(shown.tokens, 'token')} and {count(shown.patches, 'patch', 'es')} of."
    )


def _quantisation(run: RunConfig, config: Any) -> Any:
    """How the weights are quantised, by the run or as they were saved; None: they are not, or not in a known way."""
    saved = getattr(config, "quantization_config", None) or {}
    as_saved = {name: value for name, value in saved.items() if name != "quant_method" and not name.startswith("_")}
    given = run.quantization or (as_saved if "bitsandbytes" in str(saved.get("quant_method")) else None)
    try:
        return quantisation(given)
    except ValueError:
        return None  # which the section about the start tells
