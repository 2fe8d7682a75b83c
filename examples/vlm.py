"""A vision-language model learns to name colours: prompts with images and text-only prompts in one run.

Images stand in a column `image` (or `images`, or among the parts of messages): PIL images, paths or bytes. The model's
own processor is loaded with it. `--tiny` makes a random model first, which needs no download and learns nothing.
"""

import os
import string

from PIL import Image, ImageDraw

from common import parser, settings
from covey import GRPOConfig, GRPOTrainer

COLOURS = {"red": (210, 20, 20), "green": (20, 150, 40), "blue": (20, 40, 220), "yellow": (240, 220, 30)}


def picture(colour, place):
    """A square of one colour on white."""
    image = Image.new("RGB", (64, 64), "white")
    at = 8 + 4 * place
    ImageDraw.Draw(image).rectangle([at, at, at + 24, at + 24], fill=COLOURS[colour])
    return image


def rows():
    """A picture of each colour in several places, and questions that need none."""
    question = [{"role": "user", "content": "What colour is the square? Answer in one word."}]
    pictured = [
        {"prompt": question, "image": picture(colour, place), "answer": colour}
        for place in range(4)
        for colour in COLOURS
    ]
    asked = [{"role": "user", "content": "What colour is the sky? Answer in one word."}]
    return [*pictured, {"prompt": asked, "image": None, "answer": "blue"}]


def right_colour(completions, answer, **kwargs):
    """One point for the right word, less what else is said."""
    texts = [completion[0]["content"].lower() for completion in completions]
    return [float(colour in text) - len(text) / 1000 for text, colour in zip(texts, answer, strict=True)]


def make_tiny(folder):
    """A random Gemma 3 of two layers, and a processor with a token for each character."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma3ImageProcessor,
        Gemma3Processor,
        PreTrainedTokenizerFast,
    )

    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    shown = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}
    names = [*special.values(), *shown.values()]
    characters = Tokenizer(models.WordLevel({token: i for i, token in enumerate([*names, *string.printable])}, "<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    template = (
        "{% for m in messages %}<bos>{{ m['role'] }}: {% for part in m['content'] %}"
        "{{ '<boi>' if part['type'] == 'image' else part['text'] }}{% endfor %}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<bos>assistant: {% endif %}"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, **special, extra_special_tokens=shown)
    images = Gemma3ImageProcessor(size={"height": 32, "width": 32})
    Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4).save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {name.replace("token", "token_index"): names.index(token) for name, token in shown.items()}
    text = {**sizes, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": len(tokenizer), "pad_token_id": 0}
    config = Gemma3Config(
        text_config={**text, "eos_token_id": 1, "bos_token_id": 2, "max_position_embeddings": 512},
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
        mm_tokens_per_image=4,
        **ids,
    )
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def main():
    options = parser(__doc__)
    options.add_argument("--tiny", action="store_true", help="make a random model in output_dir and train that")
    options = options.parse_args()
    model = make_tiny(os.path.join(options.output_dir, "tiny")) if options.tiny else options.model
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=right_colour,
        args=GRPOConfig(
            **settings(options),
            freeze_vit=True,  # the encoder of images keeps its weights
            log_completions=True,  # the files of completions hold small images
        ),
        train_dataset=rows(),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
