"""Tiny vision-language models of several families, random, with real processors and a character tokenizer.

Nothing is mocked: models, image processors and processors are transformers', just small. Qwen's and SmolVLM's
processors hold a video processor, which needs torchvision (`tools/install_torchvision.py`); the others need Pillow.
"""

import string
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from PIL import Image, ImageDraw
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from covey.policy.weights import weight_update

PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
TEMPLATE = (
    "{% for m in messages %}<bos>{{ m['role'] }}: "
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if not loop.last or m['role'] != 'assistant' %}<eos>{% elif not continue_final_message|default(false) %}<eos>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<bos>assistant: {% endif %}"
)
"""Written for these tests; IMAGE stands for what the family's own templates write for an image."""

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": False,
}


def tokenizer(special: list[str], image: str, **named: str) -> PreTrainedTokenizerFast:
    """One token per printable character, and the family's special tokens."""
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, BOS, "<unk>", *special, *string.printable])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        unk_token="<unk>",
        chat_template=TEMPLATE.replace("IMAGE", image),
        clean_up_tokenization_spaces=False,
        extra_special_tokens=named,
    )
    made.add_special_tokens({"additional_special_tokens": [token for token in special if token not in named.values()]})
    return made


def picture(number: int = 0, size: tuple[int, int] = (20, 28)) -> Image.Image:
    """A small picture unlike the others: a rectangle in another colour and place for each number."""
    image = Image.new("RGB", size, (250, 250 - 40 * (number % 5), 240))
    at = 2 + 3 * (number % 4)
    colour = [(200, 0, 0), (0, 160, 0), (0, 0, 220), (90, 90, 0), (0, 90, 90)][number % 5]
    ImageDraw.Draw(image).rectangle([at, at, at + 8, at + 8], fill=colour)
    return image


def _scaled(model: Any, scale: float) -> Any:
    """A distribution that is far from uniform, and images that matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2 and not parameter.any():
                torch.nn.init.normal_(parameter, std=0.2)  # Gemma's projection, which would hide the images
            elif parameter.dim() == 2:
                parameter.mul_(scale)
    return model.eval()


def _qwen(kind: str, vision: dict[str, Any], special_tokens: dict[str, str], text: dict[str, Any]) -> tuple[Any, Any]:
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tok = tokenizer(names, "<|vision_start|><|image_pad|><|vision_end|>", **special_tokens)
    ids = dict(zip(("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"),
                   tok.convert_tokens_to_ids(names), strict=True))  # fmt: skip
    config_class = getattr(transformers, f"{kind}Config")
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = config_class(
        text_config={**TEXT, "vocab_size": len(tok), "rope_parameters": rope, **text}, vision_config=vision, **ids
    )
    pixels = {"patch_size": vision["patch_size"], "merge_size": 2, "min_pixels": 64, "max_pixels": 1024}
    images = transformers.Qwen2VLImageProcessor(**pixels)
    maker = "Qwen3VL" if kind.startswith("Qwen3VL") else "Qwen2VL"
    videos = getattr(transformers, f"{maker}VideoProcessor")(**pixels)
    processor_class = {
        "Qwen2VL": "Qwen2VLProcessor",
        "Qwen2_5_VL": "Qwen2_5_VLProcessor",
        "Qwen3VL": "Qwen3VLProcessor",
        "Qwen3VLMoe": "Qwen3VLProcessor",
    }
    processor = getattr(transformers, processor_class[kind])(images, tok, videos, chat_template=tok.chat_template)
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config), processor


def _qwen2_vl() -> tuple[Any, Any]:
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    return _qwen("Qwen2VL", vision, {}, {})


def _qwen2_5_vl() -> tuple[Any, Any]:
    vision = {"depth": 2, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 32,
              "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]}  # fmt: skip
    return _qwen("Qwen2_5_VL", vision, {}, {})


def _qwen3_vl(kind: str = "Qwen3VL", **text: Any) -> tuple[Any, Any]:
    vision = {"depth": 2, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 32,
              "patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}  # fmt: skip
    named = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
             "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"}  # fmt: skip
    return _qwen(kind, vision, named, {"head_dim": 8, **text})


def _qwen3_vl_moe() -> tuple[Any, Any]:
    made = _qwen3_vl("Qwen3VLMoe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    made[0].set_experts_implementation("eager")
    return made


def _gemma3() -> tuple[Any, Any]:
    named = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}
    tok = tokenizer(["<boi>", "<eoi>", "<image>"], "<boi>", **named)
    boi, eoi, image = tok.convert_tokens_to_ids(["<boi>", "<eoi>", "<image>"])
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
              "image_size": 16, "patch_size": 4}  # fmt: skip
    text = {**TEXT, "vocab_size": len(tok), "head_dim": 8, "sliding_window": 16}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4,
        boi_token_index=boi, eoi_token_index=eoi, image_token_index=image,
    )  # fmt: skip
    images = transformers.Gemma3ImageProcessor(size={"height": 16, "width": 16}, do_pan_and_scan=False)
    processor = transformers.Gemma3Processor(images, tok, chat_template=tok.chat_template, image_seq_length=4)
    return transformers.Gemma3ForConditionalGeneration(config), processor


def _llava_next() -> tuple[Any, Any]:
    tok = tokenizer(["<image>"], "<image>")
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
              "image_size": 16, "patch_size": 4, "model_type": "clip_vision_model", "projection_dim": 16}  # fmt: skip
    pinpoints = [[16, 32], [32, 16], [32, 32]]
    config = transformers.LlavaNextConfig(
        text_config={**TEXT, "vocab_size": len(tok), "model_type": "llama"}, vision_config=vision,
        image_grid_pinpoints=pinpoints, image_token_index=tok.convert_tokens_to_ids("<image>"), vision_feature_layer=-1,
    )  # fmt: skip
    images = transformers.LlavaNextImageProcessor(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}, image_grid_pinpoints=pinpoints
    )
    processor = transformers.LlavaNextProcessor(
        images, tok, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=tok.chat_template,
    )  # fmt: skip
    return transformers.LlavaNextForConditionalGeneration(config), processor


def _smolvlm() -> tuple[Any, Any]:
    rows = [f"<row_{r}_col_{c}>" for r in range(1, 5) for c in range(1, 5)]
    special = ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>", *rows]
    named = {"image_token": "<image>", "fake_image_token": special[0], "global_image_token": "<global-img>",
             "end_of_utterance_token": "<end_of_utterance>"}  # fmt: skip
    tok = tokenizer(special, "<image>", **named)
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
              "image_size": 16, "patch_size": 4}  # fmt: skip
    config = transformers.SmolVLMConfig(
        text_config={**TEXT, "vocab_size": len(tok), "model_type": "llama"}, vision_config=vision, scale_factor=2,
        image_token_id=tok.convert_tokens_to_ids("<image>"), pad_token_id=0,
    )  # fmt: skip
    sizes = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    images = transformers.SmolVLMImageProcessor(**sizes)
    videos = transformers.SmolVLMVideoProcessor(
        **sizes, video_sampling={"fps": 1, "max_frames": 2, "video_size": sizes["size"]}
    )
    processor = transformers.SmolVLMProcessor(images, tok, videos, image_seq_len=4, chat_template=tok.chat_template)
    return transformers.SmolVLMForConditionalGeneration(config), processor


def _internvl() -> tuple[Any, Any]:
    named = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
             "video_token": "<video>"}  # fmt: skip
    tok = tokenizer(list(named.values()), "<IMG_CONTEXT>", **named)
    size = {"height": 16, "width": 16}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
              "image_size": [16, 16], "patch_size": [4, 4]}  # fmt: skip
    config = transformers.InternVLConfig(
        text_config={**TEXT, "vocab_size": len(tok), "model_type": "qwen2"}, vision_config=vision,
        image_token_id=tok.convert_tokens_to_ids("<IMG_CONTEXT>"), image_seq_length=4, tie_word_embeddings=False,
    )  # fmt: skip
    images = transformers.GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=3)
    videos = transformers.InternVLVideoProcessor(size=size)
    processor = transformers.InternVLProcessor(images, tok, videos, image_seq_length=4, chat_template=tok.chat_template)
    return transformers.InternVLForConditionalGeneration(config), processor


def _lfm2_vl() -> tuple[Any, Any]:
    named = {"image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>",
             "image_thumbnail_token": "<|img_thumbnail|>"}  # fmt: skip
    rows = [f"<|img_row_{r}_col_{c}|>" for r in range(1, 4) for c in range(1, 4)]
    tok = tokenizer([*named.values(), *rows], "<image>", **named)
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_patches": 64, "patch_size": 4}  # fmt: skip
    text = {**TEXT, "vocab_size": len(tok), "model_type": "lfm2", "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False, "conv_L_cache": 3}  # fmt: skip
    config = transformers.Lfm2VlConfig(
        text_config=text, vision_config=vision, image_token_id=tok.convert_tokens_to_ids("<image>"),
        projector_hidden_size=32, tie_word_embeddings=False,
    )  # fmt: skip
    images = transformers.Lfm2VlImageProcessor(
        tile_size=16, encoder_patch_size=4, downsample_factor=2, min_image_tokens=4, max_image_tokens=16,
        min_tiles=2, max_tiles=4, max_num_patches=64, max_pixels_tolerance=2.0,
    )  # fmt: skip
    return transformers.Lfm2VlForConditionalGeneration(config), transformers.Lfm2VlProcessor(
        images, tok, chat_template=tok.chat_template
    )


MAKERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "gemma3": _gemma3,
    "internvl": _internvl,
    "lfm2_vl": _lfm2_vl,
    "llava_next": _llava_next,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "smolvlm": _smolvlm,
}
NEEDS_TORCHVISION = {"internvl", "lfm2_vl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm"}
HAS_TORCHVISION = find_spec("torchvision") is not None


def make(family: str, seed: int = 0, scale: float = 4.0) -> tuple[Any, Any]:
    """A random model in inference mode, and its processor."""
    torch.manual_seed(seed)
    model, processor = MAKERS[family]()
    return _scaled(model, scale), processor


def make_wide(seed: int = 0) -> tuple[Any, Any]:
    """A Qwen2-VL whose heads are as wide as vLLM's attention wants them."""
    torch.manual_seed(seed)
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    model, processor = _qwen("Qwen2VL", vision, {}, {"hidden_size": 128, "rope_parameters": rope})
    return _scaled(model, 3.0), processor


def extended(inputs: dict[str, Any], ids: torch.Tensor) -> dict[str, Any]:
    """A processor's inputs for a prompt that more tokens of text follow: what is said of each token says 0 of these."""

    def whole(value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(value, (0, ids.shape[1] - value.shape[1]))

    return {name: whole(value) if name.endswith("token_type_ids") else value for name, value in inputs.items()}


def by_checkpoint_name(model: Any) -> dict[str, torch.Tensor]:
    """A model's own parameters, tied ones once, by what its checkpoints call them."""
    places = {parameter.data_ptr(): parameter for parameter in model.parameters()}
    named = {name: places[tensor.data_ptr()] for name, tensor in weight_update(model, 0).tensors()}
    assert {id(one) for one in named.values()} == {id(one) for one in model.parameters()}, "all of them"
    return named
