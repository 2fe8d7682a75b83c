"""What happens around vision-language models: sampling, tools that show images, adapters, evaluation, resuming."""

import asyncio

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForImageTextToText, AutoProcessor

from covey.core.batch import collate
from covey.core.engine import SampleRequest, SamplingParams
from covey.core.records import FinishReason, Rollout
from covey.engines.native.recurrent_engine import RecurrentEngine
from covey.rollout.tools.turn_template import TurnTemplate
from tests.support import runs, tiny_vision
from tests.trainer.vision.test_vision_training import FAMILIES, ROWS, codec_of, length_reward, scores

GEMMA = "gemma3"


def trainer(tmp_path, family=GEMMA, parts=None, **settings):
    model, processor = tiny_vision.make(family)
    given = {"model": model, "processing_class": processor, "train_dataset": ROWS, "reward_funcs": length_reward}
    return runs.trainer(tmp_path, parts={**given, **(parts or {})}, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_scored_as_they_were_sampled(family):
    """Log-probs of decoding step by step from a cache are those of one pass over everything, images included.

    And with the logits of transformers' own generate, greedily, the tokens are the same.
    """
    model, processor = tiny_vision.make(family)
    codec = codec_of(model, processor)
    engine = RecurrentEngine(lambda: model, eos_token_ids={1})
    encoded = [codec.read_row(row) for row in ROWS]

    async def sample(one, n, temperature):
        params = SamplingParams(max_tokens=8, temperature=temperature)
        return await engine.generate(SampleRequest(one.ids, n, params, list(range(n)), media=one.media))

    for one in encoded:
        with engine.awake():
            completions = asyncio.run(sample(one, 3, 1.0))
            (greedy,) = asyncio.run(sample(one, 1, 0.0))
        rollouts = [
            Rollout(one.ids, c.token_ids, [True] * len(c.token_ids), None, "", FinishReason.STOP, media=one.media)
            for c in completions
        ]
        with torch.no_grad():
            expected = scores(model, collate(rollouts))
        sampled = torch.tensor([number for c in completions for number in c.logprobs])
        torch.testing.assert_close(sampled, expected, atol=1e-4, rtol=1e-4)
        inputs = {name: value for media in one.media for name, value in media.tensors.items()}
        inputs |= {name: value[None] for media in one.media for name, value in media.marks.items()}
        ids = torch.tensor([one.ids])
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **inputs, max_new_tokens=8, do_sample=False,
            eos_token_id=1, pad_token_id=0,
        )  # fmt: skip
        assert made[0, ids.shape[1] :].tolist() == greedy.token_ids


@pytest.mark.slow
def test_pictures_that_tools_return_are_seen(tmp_path):
    """The image is in the conversation, in its tokens and in what is trained on."""
    seen = []

    async def play(row, engine):
        episode = engine.begin()
        await episode.sample(2)
        episode.write([{"role": "tool", "name": "show", "content": [{"type": "text", "text": "Here:"}, picture]}])
        await episode.sample(2)
        rollout = episode.done()
        seen.append(rollout)
        return rollout

    picture = {"type": "image", "image": tiny_vision.picture(4)}
    made = trainer(
        tmp_path, parts={"rollout_func": play, "reward_funcs": runs.longer}, max_steps=1, max_completion_length=64
    )
    before = runs.weights(made)
    made.train()
    assert any(not torch.equal(a, b) for a, b in zip(before, runs.weights(made), strict=True))
    shown = [rollout for rollout in seen if len(rollout.media) > len(made.collector.codec.read(rollout.prompt).media)]
    assert shown, "at least in rows of text"
    image = made.model.config.image_token_id
    for rollout in seen:
        *_, last = rollout.media
        tokens = [*rollout.prompt_ids, *rollout.completion_ids][last.start : last.start + last.length]
        assert last.start >= len(rollout.prompt_ids) and tokens.count(image) == 4
        assert last.marks["token_type_ids"].tolist() == [int(token == image) for token in tokens]
        assert not any(rollout.sampled[last.start - len(rollout.prompt_ids) :][: last.length])


@pytest.mark.slow
def test_reward_functions_get_prompts_whose_parts_hold_the_images(tmp_path):
    seen = {}

    def reward(prompts, completions, **columns):
        seen.update(
            {
                prompt[0]["content"][-1]["text"] if isinstance(prompt[0]["content"], list) else "": prompt
                for prompt in prompts
            }
        )
        return length_reward(completions=completions, **columns)

    trainer(tmp_path, parts={"reward_funcs": reward, "train_dataset": ROWS}, max_steps=2).train()
    assert [part["type"] for part in seen["What?"][0]["content"]] == ["image", "text"]
    assert [part["type"] for part in seen["Both?"][0]["content"]] == ["image", "image", "text"]
    assert seen["What?"][0]["content"][0]["image"].size == ROWS[0]["image"].size
    assert seen[""] == ROWS[1]["prompt"]  # without an image it is the row's own


def test_tokens_after_a_turn_are_those_of_the_conversation():
    model, processor = tiny_vision.make(GEMMA)
    codec = codec_of(model, processor)
    turns = TurnTemplate(codec.tokenizer, end_ids=[1], vision=codec.vision)
    result = {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "image", "image": ROWS[0]["image"]}]}
    ask = [{"role": "user", "content": "b"}]
    said = codec.tokenizer("so<eos>", add_special_tokens=False)["input_ids"]
    answer = turns.answer([result], ended_with=1, start=9)
    whole = codec.read([*ask, {"role": "assistant", "content": "so"}, result])
    assert codec.read(ask).ids + said + answer.ids == whole.ids
    assert answer.media[0].start == 9 and answer.media[0].length == len(answer.ids)


@pytest.mark.slow
def test_adapters_train_on_images_and_load_again(tmp_path):
    folder = tmp_path / GEMMA
    model, processor = tiny_vision.make(GEMMA)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    parts = {"model": str(folder), "processing_class": None, "peft_config": config}
    made = trainer(tmp_path / "run", parts=parts, freeze_vit=True, beta=0.1, learning_rate=0.1)
    made.train()
    trained = {name for name, one in made.model.named_parameters() if one.requires_grad}
    assert trained and all("language_model" in name for name in trained)
    made.save_model()
    base = AutoModelForImageTextToText.from_pretrained(folder)
    again = PeftModel.from_pretrained(base, tmp_path / "run")
    encoded = made.collector.codec.read_row(ROWS[0])
    batch = collate([Rollout(encoded.ids, [20, 21], [True] * 2, None, "", FinishReason.STOP, media=encoded.media)])
    with torch.no_grad():
        expected = scores(made.model.eval(), batch)
        torch.testing.assert_close(scores(again.eval(), batch), expected)
        assert not torch.allclose(scores(model, batch), expected, atol=1e-4)


@pytest.mark.slow
def test_checkpoints_hold_the_processor_and_resume_exactly(tmp_path):
    """Three updates of one rollout batch, stopped after the first: its images wait in the checkpoint."""
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "beta": 0.1}
    settings |= {"gradient_accumulation_steps": 1, "steps_per_generation": 4}
    whole = trainer(tmp_path / "whole", **settings)
    whole.train()
    resumed = trainer(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(whole), runs.weights(resumed), strict=True))
    folder = tmp_path / "whole" / "checkpoint-3"
    assert type(AutoProcessor.from_pretrained(folder)) is type(whole.processing_class)
    assert AutoModelForImageTextToText.from_pretrained(folder).config.model_type == GEMMA


@pytest.mark.slow
def test_evaluation_sees_images(tmp_path):
    made = trainer(tmp_path, parts={"eval_dataset": ROWS})
    assert made.evaluate()["eval_reward"] >= 0
