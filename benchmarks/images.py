"""Time saved by encoding an image once per group: forward and backward of scoring, with and without.

A random Qwen2-VL with the proportions of the 2B one (its encoder has half the parameters that the language model's
layers have), an eighth as wide and a quarter as deep. Both ways take turns; a ratio is the median of the rounds'
ratios. No rewards and no sampling are in it. `python -m benchmarks.images`.
"""

import argparse
import statistics
from contextlib import nullcontext
from time import perf_counter
from unittest.mock import patch

import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from covey.core.batch import TrainBatch, collate
from covey.core.media import Media
from covey.core.records import FinishReason, Rollout
from covey.policy.scoring import TokenScorer

IMAGE, START, END = 4, 5, 6
PATCH, MERGED = 1176, 4
"""Numbers in a patch, 3 colours of 2 frames of 14 x 14, and patches that become one token."""


def model() -> Qwen2VLForConditionalGeneration:
    """Random weights; 7 layers of 192 channels behind an encoder of 8 layers of 160."""
    torch.manual_seed(0)
    vision = {"depth": 8, "embed_dim": 160, "hidden_size": 192, "num_heads": 4, "mlp_ratio": 4}
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6}
    text = {
        "hidden_size": 192, "intermediate_size": 1120, "num_hidden_layers": 7, "num_attention_heads": 6,
        "num_key_value_heads": 2, "vocab_size": 4096, "rope_parameters": rope, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    ids = {"image_token_id": IMAGE, "video_token_id": 7, "vision_start_token_id": START, "vision_end_token_id": END}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **ids))


def batch(side: int, siblings: int, answer: int) -> TrainBatch:
    """Completions of `answer` tokens to one prompt of an image, `side` patches high and wide, and a few words."""
    tokens = side * side // MERGED
    prompt = [START, *[IMAGE] * tokens, END, *range(100, 120)]
    pixels = {"pixel_values": torch.randn(side * side, PATCH), "image_grid_thw": torch.tensor([[1, side, side]])}
    marks = {"mm_token_type_ids": torch.tensor([int(token == IMAGE) for token in prompt])}
    media = (Media((), pixels, marks, 0, len(prompt), ()),)
    said = torch.randint(100, 4096, (siblings, answer)).tolist()
    flags = [True] * answer
    return collate([Rollout(prompt, ids, flags, None, "", FinishReason.STOP, media=media) for ids in said])


def seconds(policy: Qwen2VLForConditionalGeneration, scorer: TokenScorer, siblings: TrainBatch, once: bool) -> float:
    """Of a forward pass and its way back."""
    with nullcontext() if once else patch("covey.policy.scoring.deduplicated_images", lambda model: nullcontext()):
        began = perf_counter()
        scorer(policy, siblings).logprobs.sum().backward()
        taken = perf_counter() - began
    policy.zero_grad()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    policy = model()
    scorer = TokenScorer(lambda one: one, temperature=1.0, vision=True, layout="padded")
    encoder = sum(p.numel() for p in policy.model.visual.parameters())
    layers = sum(p.numel() for p in policy.model.language_model.layers.parameters())
    print(f"encoder {encoder / 1e6:.1f}M parameters, layers of the language model {layers / 1e6:.1f}M")
    print("| image | siblings | answer | each (s) | once (s) | ratio |\n|---|---|---|---|---|---|")
    for side, siblings, answer in ((16, 8, 64), (16, 8, 256), (24, 4, 64)):
        rows = batch(side, siblings, answer)
        seconds(policy, scorer, rows, True)  # proves itself, and warms up
        pairs = [
            (seconds(policy, scorer, rows, False), seconds(policy, scorer, rows, True)) for _ in range(options.rounds)
        ]
        each, once = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        print(
            f"| {side * side // MERGED} tokens | {siblings} | {answer} tokens | {each:.2f} | {once:.2f} | {ratio:.2f} |"
        )


if __name__ == "__main__":
    main()
