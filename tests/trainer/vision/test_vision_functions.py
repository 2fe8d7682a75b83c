"""Rollout functions that play a whole rollout batch, and environments, with images."""

import asyncio
import base64
from contextlib import nullcontext
from io import BytesIO

import aiohttp
import pytest
import torch

from covey.core.batch import collate
from covey.core.engine import SamplingParams
from covey.core.model import media_inputs
from covey.core.records import Completion, FinishReason
from covey.rollout.episode import EpisodeEngine
from covey.rollout.images import ImageError, as_parts
from covey.rollout.tools.turn_template import TurnTemplates
from covey.rollout.user_functions import RolloutError
from covey.trainer.rollout_reports import RolloutWarning
from tests.support import runs, tiny_vision
from tests.trainer.vision.test_vision_rollouts import trainer
from tests.trainer.vision.test_vision_training import FAMILIES, codec_of, rollouts, scores


@pytest.mark.parametrize("family", FAMILIES)
def test_images_are_found_among_tokens_of_a_rollout_function(family):
    """What is found says the same to the model as what the processor made with the text: log-probs are equal."""
    model, processor = tiny_vision.make(family)
    vision = codec_of(model, processor).vision
    together = rollouts(model, processor)
    for rollout in together:
        ids = rollout.prompt_ids + rollout.completion_ids
        with torch.no_grad():
            expected = scores(model, collate([rollout]))
            rollout.media = vision.find(ids, rollout.images, [True] * len(ids))
            torch.testing.assert_close(scores(model, collate([rollout])), expected, atol=1e-5, rtol=1e-5)
    assert [len(rollout.media) for rollout in together] == [1, 0, 2, 1]
    ids = together[2].prompt_ids
    for images, message in (
        (together[2].images[:1], "stand for images that are not among the 1"),
        ([*together[2].images, tiny_vision.picture(4)], "image 2 of 3 is not among the tokens"),
    ):
        with pytest.raises(ImageError, match=message):
            vision.find(ids, images, [True] * len(ids))
    with pytest.raises(ImageError, match="image 0 of 2 is not among the tokens"):
        vision.find(ids, together[2].images, [False] * len(ids))  # the policy wrote them


def columns(completions):
    return {name: [one[name] for one in completions] for name in ("prompt_ids", "completion_ids", "logprobs")}


def collected(made):
    """All rollouts of a trainer, from here on."""
    kept, collect = [], made.collector.collect

    def keep(*given, **named):
        rollouts = collect(*given, **named)
        kept.extend(rollouts)
        return rollouts

    made.collector.collect = keep
    return kept


@pytest.mark.slow
def test_a_function_gets_images_and_is_scored_with_them(tmp_path):
    """The prompts show the rows' pictures; the engine, which sees them, and the scorer agree."""
    seen = []

    def play(prompts, trainer):
        seen.extend(prompts)
        return columns(trainer.generate_completions(prompts))

    made = trainer(tmp_path, parts={"rollout_func": play, "reward_funcs": runs.longer}, max_steps=2, learning_rate=0.0)
    rollouts = collected(made)
    made.train()
    parts = [[part for message in prompt for part in as_parts(message["content"])] for prompt in seen]
    shown = [[part["image"] for part in of_one if part["type"] == "image"] for of_one in parts]
    assert {len(images) for images in shown} == {0, 1, 2}
    for images, rollout in zip(shown, rollouts, strict=True):
        assert [one.tobytes() for one in images] == [one.tobytes() for one in rollout.images]
    with torch.no_grad():
        sampled = torch.tensor([number for rollout in rollouts for number in rollout.logprobs])
        torch.testing.assert_close(scores(made.model.eval(), collate(rollouts)), sampled, atol=1e-4, rtol=1e-4)


def in_two_turns(prompts, trainer):
    """Another picture between two turns: the conversation is encoded again, and what was added is not trained on."""
    first = trainer.generate_completions(prompts, max_tokens=3)
    picture = tiny_vision.picture(4)
    shown = {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "Now?"}]}
    longer = [
        [*prompt, {"role": "assistant", "content": one["text"]}, shown]
        for prompt, one in zip(prompts, first, strict=True)
    ]
    second = trainer.generate_completions(longer, max_tokens=3)
    returned = columns(first)
    returned |= {"env_mask": [], "images": [], "completion_ids": []}
    for prompt, one, then in zip(prompts, first, second, strict=True):
        written = then["prompt_ids"][len(one["prompt_ids"]) :]
        returned["completion_ids"].append(written + then["completion_ids"])
        returned["env_mask"].append([0] * len(written) + [1] * len(then["completion_ids"]))
        content = [part for message in prompt for part in message["content"] if isinstance(part, dict)]
        returned["images"].append([part["image"] for part in content if part["type"] == "image"] + [picture])
    return {**returned, "logprobs": None}


@pytest.mark.slow
def test_images_that_a_function_returns_are_trained_with(tmp_path):
    made = trainer(
        tmp_path,
        parts={"rollout_func": in_two_turns, "reward_funcs": runs.longer},
        max_steps=1,
        max_completion_length=64,
    )
    kept = collected(made)
    before = runs.weights(made)
    made.train()
    assert any(not torch.equal(a, b) for a, b in zip(before, runs.weights(made), strict=True))
    image = made.model.config.image_token_id
    for rollout in kept:
        ids = rollout.prompt_ids + rollout.completion_ids
        assert ids.count(image) == 4 * len(rollout.images)
        assert rollout.images[-1].tobytes() == tiny_vision.picture(4).tobytes()
        inputs = media_inputs([rollout.media], len(ids), torch.device("cpu"))
        assert inputs["pixel_values"].shape[0] == len(rollout.images)
        assert inputs["token_type_ids"][0].tolist() == [int(token == image) for token in ids]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"images": [7] * 8}, "returned int in 'images'"),
        ({"images": [["no/such.png"]] * 8}, "cannot be read"),
        ({"prompt_ids": [[5]] * 8, "images": [[tiny_vision.picture()]] * 8}, "image 0 of 1 is not among the tokens"),
    ],
)
def test_images_that_the_tokens_do_not_show_are_refused(tmp_path, changes, error):
    def play(prompts, trainer):
        return {**columns(trainer.generate_completions(prompts)), **changes}

    made = trainer(tmp_path, parts={"rollout_func": play, "reward_funcs": runs.longer}, max_steps=1)
    with pytest.raises(RolloutError, match=error):
        made.train()


class Maze:
    """A text environment that is seen; each picture is drawn over the one before."""

    def reset(self, **row):
        self.turn = 0
        self.canvas = tiny_vision.picture(0)
        return [self.canvas, "Where?"]

    def step(self, text):
        self.turn += 1
        self.canvas.paste(tiny_vision.picture(self.turn))
        return ["So:", {"type": "image", "image": self.canvas}], float(len(text)), self.turn == 2, {}


@pytest.mark.slow
def test_what_environments_show_is_seen_in_later_turns(tmp_path):
    """Each picture is the one that was shown then, and no token of it is trained on."""
    rows = [{"prompt": [{"role": "user", "content": f"{number}"}]} for number in range(4)]
    model, processor = tiny_vision.make("gemma3")
    model.generation_config.eos_token_id = [1, *range(20, 60)]  # turns end soon
    parts = {"environment_factory": Maze, "reward_funcs": None, "train_dataset": rows}
    parts |= {"model": model, "processing_class": processor}
    made = trainer(tmp_path, parts=parts, max_steps=1, max_completion_length=64, learning_rate=0.0)
    rollouts = collected(made)
    made.train()
    assert any(rollout.num_turns == 2 for rollout in rollouts)
    for rollout in rollouts:
        expected = [tiny_vision.picture(number).tobytes() for number in range(rollout.num_turns)]
        assert [image.tobytes() for image in rollout.images] == expected
        for one in rollout.media[1:]:
            start = one.start - len(rollout.prompt_ids)
            assert not any(rollout.sampled[start : start + one.length])
    with torch.no_grad():
        sampled = torch.tensor([number for rollout in rollouts for number in rollout.logprobs])
        batch = collate(rollouts)
        found = scores(made.model.eval(), batch)
        torch.testing.assert_close(found[batch.sampled], sampled[batch.sampled], atol=1e-4, rtol=1e-4)


def data_url(number):
    file = BytesIO()
    tiny_vision.picture(number).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


PARTS = {  # of each API: the path, and a picture as it is sent there
    "chat": ("chat/completions", lambda number: {"type": "image_url", "image_url": {"url": data_url(number)}}),
    "responses": ("responses", lambda number: {"type": "input_image", "image_url": data_url(number)}),
    "messages": (
        "messages",
        lambda number: {"type": "image", "source": {"type": "base64", "data": data_url(number).partition(",")[2]}},
    ),
}


async def two_pictures(row, base_url, api_key):
    """Two turns with a picture each; another conversation, a path of a file and broken pictures are refused."""
    path, picture = PARTS[row["api"]]
    name = "input" if path == "responses" else "messages"

    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:

        async def ask(messages):
            async with client.post(f"{base_url}/{path}", json={name: messages}) as response:
                return response.status, await response.json()

        first = {"role": "user", "content": [picture(0), {"type": "text", "text": "What?"}]}
        status, body = await ask([first])
        assert status == 200, body
        turn = body["choices"][0]["message"] if path == "chat/completions" else {"role": "assistant"}
        turn.setdefault("content", (body["output"][0] if path == "responses" else body).get("content"))
        status, body = await ask([first, turn, {"role": "user", "content": [picture(1)]}])
        assert status == 200, body
        for wrong, reason in (
            (picture(2), "one conversation"),
            ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "data:image"),
            ({"type": "input_image", "image_url": "data:image/png;base64,AAAA"}, "cannot be read"),
            ({"type": "image", "source": {"type": "url", "url": "http://127.0.0.1"}}, "base64"),
        ):
            status, body = await ask([{"role": "user", "content": [wrong]}])
            assert status == 400 and reason in body["error"]["message"], body


@pytest.mark.slow
def test_programs_send_images_in_each_api(tmp_path):
    rows = [{"prompt": None, "api": api} for api in (*PARTS, "chat")]
    model, processor = tiny_vision.make("gemma3")
    model.generation_config.eos_token_id = [1, *range(20, 60)]  # turns end soon
    parts = {"agent": two_pictures, "train_dataset": rows, "model": model, "processing_class": processor}
    made = trainer(tmp_path, parts=parts, max_steps=1, max_completion_length=64, learning_rate=0.0)
    rollouts = collected(made)
    made.train()
    assert [rollout.error for rollout in rollouts] == [None] * len(rollouts)
    for rollout in rollouts:
        assert [image.tobytes() for image in rollout.images] == [tiny_vision.picture(n).tobytes() for n in (0, 1)]
    with torch.no_grad():
        sampled = torch.tensor([number for rollout in rollouts for number in rollout.logprobs])
        batch = collate(rollouts)
        found = scores(made.model.eval(), batch)
        torch.testing.assert_close(found[batch.sampled], sampled[batch.sampled], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_picture_larger_than_the_context_costs_its_row(tmp_path):
    """The text of a prompt says nothing of how many tokens its images take: row 20 shows a hundred."""
    row = {"prompt": [{"role": "user", "content": "What?"}]}
    rows = [{**row, "images": [tiny_vision.picture()] * (100 if number == 20 else 1)} for number in range(24)]
    model, processor = tiny_vision.make("gemma3")
    model.config.text_config.max_position_embeddings = 256
    parts = {"model": model, "processing_class": processor, "train_dataset": rows}
    made = trainer(tmp_path, parts=parts, max_steps=6, num_generations=2, shuffle_dataset=False)
    with pytest.warns(RolloutWarning, match=r"2 of 8 rollouts failed.*row 20 of the dataset: a prompt of \d+ tokens"):
        made.train()
    assert sum(runs.history(made, "rollouts/failed")) == 0.25


@pytest.mark.parametrize("expands", [True, False])
def test_a_sampled_image_token_does_not_become_the_next_image(expands):
    """An engine that looks for images itself would find that one first; the built-in one is told where they are."""
    model, processor = tiny_vision.make("gemma3")
    codec = codec_of(model, processor)
    (stray,) = codec.vision.placeholders
    asked = []

    async def ask(request):
        asked.append(request)
        return [Completion([20, stray, 1], None, FinishReason.STOP)]

    async def play():
        row = {"prompt": [{"role": "user", "content": "What?"}], "image": tiny_vision.picture()}
        engine = EpisodeEngine(ask, TurnTemplates(codec, [1]), SamplingParams(64), (7,), row, 0, expands)
        episode = engine.begin()
        await episode.sample()
        episode.write("Go on.")
        await episode.sample()  # a stray token after the last image misleads nobody
        episode.write({"role": "user", "content": [{"type": "image", "image": tiny_vision.picture(1)}]})
        await episode.sample()

    with pytest.raises(ValueError, match="stands for an image") if expands else nullcontext():
        asyncio.run(play())
    assert len(asked) == (2 if expands else 3)
