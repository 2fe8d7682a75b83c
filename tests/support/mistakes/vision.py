"""Mistakes with images and vision-language models."""

from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from PIL import Image

from covey.rollout.user_functions import RolloutError
from covey.trainer.rollout_reports import RolloutWarning
from tests.support import tiny, tiny_vision
from tests.support.mistakes.cases import TRAINING, Bench, Mistake, checked
from tests.support.mistakes.models import launched_with


def seeing(bench: Bench, rows, settings=None, **parts):
    """A trainer of a vision-language model whose processor needs nothing but Pillow."""
    model, processor = tiny_vision.make("gemma3")
    given = {"model": model, "processing_class": processor, "train_dataset": rows, **parts}
    return bench.build(settings, **given)


def row(image, text="What?"):
    return {"prompt": [{"role": "user", "content": text}], "image": image}


def broken(bench: Bench):
    path = bench.path / "broken.png"
    path.write_bytes(b"no picture")
    return seeing(bench, [row(tiny_vision.picture()), row(str(path))])


def broken_later(bench: Bench):
    made = seeing(bench, Rows(20), {"shuffle_dataset": False, "max_steps": 9})
    made.train()


def columns(completions):
    return {name: [one[name] for one in completions] for name in ("prompt_ids", "completion_ids", "logprobs")}


def other_images(prompts, trainer):
    return {**columns(trainer.generate_completions(prompts)), "images": [[]] * len(prompts)}


def from_tokens(prompts, trainer):
    first = trainer.generate_completions(prompts)
    return columns(trainer.generate_completions([one["prompt_ids"] for one in first]))


def adapted():
    model, _ = tiny_vision.make("gemma3")
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))


class Rows:
    """A dataset whose seventeenth row, which nobody looks at beforehand, has a picture that cannot be read."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        if number >= self.count:
            raise IndexError
        return row(b"no picture" if number == 16 else tiny_vision.picture(), str(number))


TWO = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "?"}]

VISION = [
    checked(
        "Gave images to a model that is trained with a tokenizer",
        lambda b: b.build(train_dataset=[{"prompt": "1+1=", "image": tiny_vision.picture()}] * 2),
        "row-unread",
        "row 0 of `train_dataset`",
        "'image' or 'images'",
    ),
    checked(
        "Gave images to a model that is trained with a tokenizer",
        lambda b: b.build(train_dataset=[{"prompt": [{"role": "user", "content": TWO}]}] * 2),
        "row-unread",
        "row 0 of `train_dataset`",
        "'image' or 'images'",
    ),
    checked(
        "Gave an image that cannot be read",
        broken,
        "row-unread",
        "row 1 of `train_dataset`",
        r"image 0 \(.*broken.png\)",
    ),
    Mistake(
        "Gave an image that cannot be read, in a row that is first looked at when it is sampled",
        broken_later,
        ("16",),
        when=TRAINING,
        kind=RolloutWarning,
    ),
    checked(
        "Gave an image of floating-point numbers or of 32 bits",
        lambda b: seeing(b, [row(Image.new("F", (4, 4), 0.5))] * 2),
        "row-unread",
        "row 0 of `train_dataset`",
        "'F'",
    ),
    Mistake(
        "Returned from a rollout_func tokens that do not show the images that go with them",
        lambda b: seeing(b, [row(tiny_vision.picture())] * 4, rollout_func=other_images).train(),
        ("rollout_func", "'images'"),
        when=TRAINING,
        kind=RolloutError,
    ),
    Mistake(
        "Gave a rollout_func's `generate_completions` the tokens of a prompt with images",
        lambda b: seeing(b, [row(tiny_vision.picture())] * 4, rollout_func=from_tokens).train(),
        ("`generate_completions`",),
        when=TRAINING,
        kind=RolloutError,
    ),
    checked(
        "Gave something as an image that is none",
        lambda b: seeing(b, [row(7)] * 2),
        "row-unread",
        "row 0 of `train_dataset`",
        " int;",
    ),
    checked(
        "Put a video or a sound into a message",
        lambda b: seeing(b, [{"prompt": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]}] * 2),
        "row-unread",
        "row 0 of `train_dataset`",
        "'video'",
    ),
    checked(
        "Put a video or a sound into a message",
        lambda b: b.build(
            train_dataset=[{"prompt": [{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}]}] * 2
        ),
        "row-unread",
        "row 0 of `train_dataset`",
        "'audio'",
    ),
    checked(
        "Gave the address of an image",
        lambda b: seeing(b, [row("https://example.org/cat.png")] * 2),
        "row-unread",
        "row 0 of `train_dataset`",
        "https://example.org/cat.png",
    ),
    checked(
        "Gave more or fewer images than the messages have places",
        lambda b: seeing(b, [{"prompt": [{"role": "user", "content": TWO}], "image": tiny_vision.picture()}] * 2),
        "row-unread",
        "row 0 of `train_dataset`",
        "2 image parts .* 1 images",
    ),
    checked(
        "Gave pictures in both columns, image and images",
        lambda b: seeing(b, [{**row(tiny_vision.picture()), "images": [tiny_vision.picture()]}] * 2),
        "row-unread",
        "row 0 of `train_dataset`",
        "'image' and 'images'",
    ),
    checked(
        "Wrote the token of an image into a prompt without an image",
        lambda b: seeing(b, [row(None, "<image>What?")] * 2),
        "row-unread",
        "row 0 of `train_dataset`",
        "a token that stands for an image",
    ),
    checked(
        "Set freeze_vit, freeze_aligner or freeze_llm for a model that sees no images",
        lambda b: b.build({"freeze_vit": True}),
        "model-part",
        "freeze_vit=True",
        "LlamaForCausalLM",
        "peft_config",
    ),
    checked(
        "Set freeze_vit, freeze_aligner or freeze_llm and gave a PeftModel",
        lambda b: seeing(b, [row(None)] * 2, {"freeze_vit": True}, model=adapted(), processing_class=None),
        "model-part",
        "freeze_vit=True",
        "PeftModel",
        "target_modules",
    ),
    checked(
        "Froze all parts of a vision-language model",
        lambda b: seeing(b, [row(None)] * 2, {"freeze_vit": True, "freeze_aligner": True, "freeze_llm": True}),
        "nothing-trained",
        "freeze_vit, freeze_aligner and freeze_llm",
    ),
    checked(
        "Chose attn_layout for a vision-language model",
        lambda b: seeing(b, [row(None)] * 8, {"attn_layout": "packed"}),
        "model-layout",
        "attn_layout='packed'",
        "'auto'",
    ),
    checked(
        "Chose speculative_reuse for a vision-language model",
        lambda b: seeing(b, tiny.rows(), {"speculative_reuse": "exact"}),
        "draft-reuse",
        "speculative_reuse='exact'",
    ),
    checked(
        "Set ds3_gather_for_generation=False for a vision-language model",
        lambda b: seeing(
            b,
            [row(None)] * 8,
            {"ds3_gather_for_generation": False},
            trainer=launched_with(distributed_type=DistributedType.FSDP, is_fsdp2=True),
        ),
        "sampling-in-step",
        "ds3_gather_for_generation=False",
    ),
]
