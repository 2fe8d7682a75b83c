"""The memory estimate of vision-language models, against the tensors that passes of tiny ones keep."""

import random

import pytest
import torch
from PIL import Image

from covey.cli.explain.run import processed
from covey.config.grpo import GRPOConfig
from covey.core.batch import collate
from covey.core.model import placeholder_ids
from covey.core.records import FinishReason, Rollout
from covey.policy.adapters import freeze_parts, part_names
from covey.policy.scoring import TokenScorer
from covey.rollout.vision import Vision
from covey.sizing.memory import Images, Precision, encoder_bytes, estimate, layer_bytes
from covey.sizing.model_spec import count_parameters
from tests.support import tiny_vision

SIZE, LENGTH, GROUP = (28, 28), 16, 4

families = pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                name in tiny_vision.NEEDS_TORCHVISION and not tiny_vision.HAS_TORCHVISION, reason="needs torchvision"
            ),
        )
        for name in tiny_vision.MAKERS
    ],
)


def noise():
    """An image of which no two tiles are alike, for those would be encoded once."""
    return Image.frombytes("RGB", SIZE, random.Random(0).randbytes(SIZE[0] * SIZE[1] * 3))


def kept_by_a_pass(model, processor):
    """Bytes of all tensors that autograd keeps of a forward pass over a group that shows an image; and its tokens."""
    content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    prompt = Vision(processor, placeholder_ids(model.config)).encode(text, [noise()])
    chance = torch.Generator().manual_seed(0)
    said = [torch.randint(20, 60, (LENGTH,), generator=chance).tolist() for _ in range(GROUP)]
    rollouts = [
        Rollout(prompt.ids, one, [True] * LENGTH, None, "", FinishReason.STOP, media=prompt.media) for one in said
    ]
    scorer = TokenScorer(lambda m: m, temperature=1.0, layout="padded", pad_token_id=0, vision=True)
    batch = collate(rollouts)
    scorer.layout_of(model, batch)
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scorer(model, batch, entropy=True)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), GROUP * (len(prompt.ids) + LENGTH)


@pytest.mark.slow
@families
@pytest.mark.parametrize("frozen", [(), ("vit",), ("llm",)])
def test_saved_bytes_of_images_and_text_match_a_pass(family, frozen):
    model, processor = tiny_vision.make(family)
    freeze_parts(model.train(), frozen)
    kept, tokens = kept_by_a_pass(model, processor)
    counts, text = count_parameters(model.config, frozen=frozen), model.config.get_text_config()
    precision = Precision(4, 4, 4, False, counts.saved)
    expected = tokens * (text.num_hidden_layers * layer_bytes(text, precision) + 3 * text.hidden_size * 4)
    images = processed(processor, model.config, 1, SIZE)
    expected += encoder_bytes(counts.vision, precision, images, False, rows=GROUP, shown=1)
    # One of LFM2's two layers is a convolution, which keeps less than the attention that is counted.
    assert expected == pytest.approx(kept, rel=0.2 if family == "lfm2_vl" else 0.15)


@families
def test_the_parameters_of_each_part_are_counted(family):
    model, _ = tiny_vision.make(family)
    parts = part_names(model)
    sizes = {
        part: sum(p.numel() for name, p in model.named_parameters() if parts[name] == part) for part in parts.values()
    }
    assert count_parameters(model.config).parameters == sum(sizes.values())
    assert count_parameters(model.config, frozen=["vit"]).trainable == sizes["aligner"] + sizes["llm"]


def test_the_tokens_and_patches_of_an_image():
    # of 16 x 16 pixels in patches of 4: 16, which Gemma makes 4 tokens of, between two marks and four line breaks
    model, processor = tiny_vision.make("gemma3")
    assert processed(processor, model.config, 1, SIZE)[1:] == (16, 3 * 16 * 16)
    assert processed(processor, model.config, 3, SIZE).patches == 48


def test_rows_with_images_are_padded_and_sampled_by_prompt():
    config = tiny_vision.make("gemma3")[0].config
    args = GRPOConfig(bf16=False, max_completion_length=8, num_generations=4, use_cpu=True)
    shown = estimate(config, args, prompt_tokens=4, images=Images(8, 16, 768))
    assert (shown.micro_batch_tokens, shown.micro_batches) == (8 * (4 + 8 + 8), 1)
    # four completions with the prompt in each, 2 layers, keys and values of 2 heads of 8
    assert shown.kv_cache == 4 * 20 * 2 * 2 * 16 * 4
    assert estimate(config, args, prompt_tokens=4).activations < shown.activations


def test_a_frozen_encoder_keeps_nothing_but_what_it_reads():
    config = tiny_vision.make("llava_next")[0].config
    args = GRPOConfig(bf16=False, use_cpu=True, freeze_vit=True, freeze_aligner=True, max_completion_length=8)
    assert estimate(config, args, prompt_tokens=4, images=Images(88, 80, 3840)).encoder == 8 * 3840 * 4
