"""Vision-language models of several families: tiny, random, with real processors, on pictures made here."""

import math

import pytest
import torch

from covey import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from covey.core.batch import collate
from covey.core.model import placeholder_ids
from covey.core.records import FinishReason, Rollout
from covey.policy.adapters import part_names
from covey.policy.scoring import TokenScorer
from covey.rollout.prompts import PromptCodec
from covey.rollout.vision import Vision, tokenizer_of
from covey.trainer.build import blank_row
from tests.support import tiny_vision

FAMILIES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            name in tiny_vision.NEEDS_TORCHVISION and not tiny_vision.HAS_TORCHVISION,
            reason="this family's processor needs torchvision: tools/install_torchvision.py",
        ),
    )
    for name in tiny_vision.MAKERS
]
TWO = [FAMILIES[0], FAMILIES[3]]
OTHERS = [pytest.param(*one.values, marks=[*one.marks, pytest.mark.slow]) for one in FAMILIES if one not in TWO]
FROZEN = [
    pytest.param("gemma3", "vit"),
    pytest.param("gemma3", "aligner"),
    pytest.param(*TWO[1].values, "llm", marks=TWO[1].marks),
]


def codec_of(model, processor):
    return PromptCodec(tokenizer_of(processor), None, None, vision=Vision(processor, placeholder_ids(model.config)))


def ask(text):
    return [{"role": "user", "content": text}]


ROWS = [
    {"prompt": ask("What?"), "image": tiny_vision.picture(0)},
    {"prompt": ask("Say a number."), "image": None},
    {"prompt": ask("Both?"), "images": [tiny_vision.picture(1, (40, 16)), tiny_vision.picture(2)]},
    {
        "prompt": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a "},
                    {"type": "image", "image": tiny_vision.picture(3, (16, 16))},
                    {"type": "text", "text": " b"},
                ],
            }
        ]
    },
]


def rollouts(model, processor, completions=("yes<eos>", "no", "three!", "x<eos>")):
    codec = codec_of(model, processor)
    made = []
    for row, said in zip(ROWS, completions, strict=True):
        encoded = codec.read_row(row)
        ids = codec.tokenizer(said, add_special_tokens=False)["input_ids"]
        flags = [True] * len(ids)
        made.append(Rollout(encoded.ids, ids, flags, None, said, FinishReason.STOP, media=encoded.media))
    return made


def scores(model, batch):
    return TokenScorer(lambda one: one, temperature=1.0, vision=True, layout="padded")(model, batch).logprobs


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_do_not_depend_on_what_else_is_in_the_batch(family):
    """Each rollout alone is scored as among others with one, several and no images, and as transformers scores it."""
    model, processor = tiny_vision.make(family)
    together = rollouts(model, processor)
    with torch.no_grad():
        batch = collate(together)
        got = scores(model, batch).split(batch.lengths.tolist())
        for rollout, logprobs in zip(together, got, strict=True):
            torch.testing.assert_close(scores(model, collate([rollout])), logprobs, atol=1e-5, rtol=1e-5)
            inputs = {name: value for one in rollout.media for name, value in one.tensors.items()}
            for one in rollout.media:
                said = torch.zeros(len(rollout.completion_ids), dtype=torch.long)
                inputs |= {name: torch.cat([value, said])[None] for name, value in one.marks.items()}
            ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
            logits = model(input_ids=ids, **inputs).logits[0].log_softmax(-1)
            first = len(rollout.prompt_ids)
            expected = logits[first - 1 : -1].gather(1, ids[0, first:, None])[:, 0]
            torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_images_matter(family):
    """The same tokens after another picture of the same size have other log-probs."""
    model, processor = tiny_vision.make(family)
    codec = codec_of(model, processor)
    tokens = codec.tokenizer("ab", add_special_tokens=False)["input_ids"]
    seen = []
    for number in (0, 1):
        encoded = codec.read_row({"prompt": ask("?"), "image": tiny_vision.picture(number)})
        rollout = Rollout(encoded.ids, tokens, [True] * 2, None, "", FinishReason.STOP, media=encoded.media)
        with torch.no_grad():
            seen.append(scores(model, collate([rollout])))
    assert (seen[0] - seen[1]).abs().max() > 1e-3


def length_reward(completions, **kwargs):
    return [float(len(one[0]["content"])) for one in completions]


def config(tmp_path, kind=GRPOConfig, **changes):
    settings = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 5,
        "learning_rate": 1e-3,
        "bf16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": 3,
    }
    return kind(**{**settings, **changes})


def changed_parts(model, before):
    parts = part_names(model)
    now = dict(model.named_parameters())
    return {parts[name] for name, value in before.items() if not torch.equal(now[name].detach().cpu(), value)}


def weights(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("family", [*TWO, *OTHERS])
def test_five_steps_on_mixed_rows_train_the_vision_tower(family, tmp_path):
    model, processor = tiny_vision.make(family)
    before = weights(model)
    trainer = GRPOTrainer(model, length_reward, config(tmp_path), ROWS, processing_class=processor)
    trainer.train()
    assert trainer.state.global_step == 5
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert all(math.isfinite(loss) for loss in losses)
    assert changed_parts(trainer.model, before) == {"vit", "aligner", "llm"}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "frozen"), FROZEN)
def test_frozen_parts_keep_their_weights(family, frozen, tmp_path):
    model, processor = tiny_vision.make(family)
    before = weights(model)
    args = config(tmp_path, RLOOConfig, max_steps=2, **{f"freeze_{frozen}": True})
    RLOOTrainer(model, length_reward, args, ROWS, processing_class=processor).train()
    assert changed_parts(model, before) == {"vit", "aligner", "llm"} - {frozen}


@pytest.mark.parametrize("family", [one for one in FAMILIES if one.values == ("qwen3_vl_moe",)])
def test_an_added_image_does_not_count_in_the_load_of_experts(family):
    """Where encoding images takes all processes, passes over text alone show the model one more row."""
    model, processor = tiny_vision.make(family)
    batch = collate([Rollout([5, 6, 7], [8, 9], [True] * 2, None, "", FinishReason.STOP)])
    scorer = TokenScorer(lambda one: one, temperature=1.0, vision=True, layout="padded")
    alone = scorer.loads(model, batch, 2)
    scorer.blank, scorer.inside_head_call = blank_row(codec_of(model, processor)), True
    for loads in (scorer.loads(model, batch, 2), scorer.with_loads(model, batch, 2)[1]):
        assert loads.pairs == alone.pairs == 2 * 5  # layers and tokens
        assert torch.equal(loads.chosen, alone.chosen)
        torch.testing.assert_close(loads.probability.detach(), alone.probability)
