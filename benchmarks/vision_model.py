"""A small vision-language model with random weights, for what memory takes: no hub has to be asked for one.

A LLaVA: the language model of a folder's config behind an encoder like CLIP's, of 224 x 224 pixels in patches of 16.
"""

from pathlib import Path

ENCODER = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "image_size": 224,
    "patch_size": 16,
    "projection_dim": 384,
}
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


def make(text_model: str, folder: Path) -> str:
    """Save such a model and its processor.

    Args:
        text_model: folder of a language model, whose config and tokenizer are taken.
        folder: where to.
    """
    from transformers import (
        AutoConfig,
        AutoTokenizer,
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    tokenizer = AutoTokenizer.from_pretrained(text_model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    text = AutoConfig.from_pretrained(text_model)
    text.vocab_size = max(text.vocab_size, len(tokenizer))
    config = LlavaConfig(
        text_config=text,
        vision_config=CLIPVisionConfig(**ENCODER),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    side = {"height": ENCODER["image_size"], "width": ENCODER["image_size"]}
    pixels = CLIPImageProcessor(size={"shortest_edge": ENCODER["image_size"]}, crop_size=side)
    LlavaProcessor(
        image_processor=pixels,
        tokenizer=tokenizer,
        patch_size=ENCODER["patch_size"],
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return str(folder)
