"""Tiny real components of golden runs: models, tokenizers, rows, rewards, engines, tools and environments.

They are built from torch, transformers and Covey's public names alone. Types of the engine protocol are looked up in
`HOMES`; add a module there when they move.
"""

import asyncio
import copy
import functools
import hashlib
import importlib
import inspect
import string
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from PIL import Image, ImageDraw
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from covey import FinishReason

HOMES = {
    "Completion": ("covey.core.records", "covey.core.rollout"),
    "EngineTraits": ("covey.core.engine", "covey." + "rollout.engine"),  # two parts: a codemod must not rename it
}
"""Modules that define a type of the engine protocol, from the newest layout to the oldest."""


def protocol(name: str) -> Any:
    """Find a type of the engine protocol, in whichever layout the commit has."""
    for home in HOMES[name]:
        try:
            return getattr(importlib.import_module(home), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"no module of {HOMES[name]} defines {name}: add its module to HOMES in {__file__}")


# ---- models and tokenizers -------------------------------------------------------------------------------------------

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
TEMPLATE = (
    "{% for t in tools or [] %}<bos>tool: {{ t.function.name }}<eos>{% endfor %}"
    "{% for m in messages %}<bos>{{ m['role'] }}: "
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if not loop.last or m['role'] != 'assistant' %}<eos>{% elif not continue_final_message|default(false) %}<eos>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<bos>assistant: {% endif %}"
)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
VOCABULARY = {"vocab_size": len(SPECIAL) + len(string.printable)}


def tokenizer(special: tuple[str, ...] = (), image: str = "", **named: str) -> PreTrainedTokenizerFast:
    """One token per printable character, and a chat template that shows tools and images."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *special, *string.printable])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    tok = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        chat_template=TEMPLATE.replace("IMAGE", image),
        clean_up_tokenization_spaces=False,
        extra_special_tokens=named,
    )
    tok.add_special_tokens({"additional_special_tokens": [token for token in special if token not in named.values()]})
    return tok


def scaled(model: Any, scale: float) -> Any:
    """The model with matrices multiplied, so that its distribution is far from uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():
                torch.nn.init.normal_(parameter, std=0.2)  # Gemma's projection, which would hide the images
            elif parameter.dim() > 1:
                parameter.mul_(scale)
    return model.eval()


def language_model(kind: str = "Llama", scale: float = 5.0, **changes: Any) -> Any:
    """A random causal language model of two layers."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**VOCABULARY, **SIZES, "tie_word_embeddings": True, **changes})
    return scaled(getattr(transformers, f"{kind}ForCausalLM")(config), scale)


def mixture_of_experts() -> Any:
    """A random mixture of four experts."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    model = language_model("Qwen3Moe", scale=10.0, tie_word_embeddings=False, **experts)
    model.set_experts_implementation("eager")
    return model


def hybrid() -> Any:
    """A random model of a convolution layer and an attention layer."""
    layers = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    return language_model("Lfm2", scale=5.0, **layers)


def reward_model() -> tuple[Any, Any]:
    """A random sequence classifier with one output, and its tokenizer."""
    torch.manual_seed(5)
    config = transformers.LlamaConfig(**VOCABULARY, **SIZES, num_labels=1)
    return transformers.LlamaForSequenceClassification(config).eval(), tokenizer()


def gemma3() -> tuple[Any, Any]:
    """A random vision-language model and its processor; needs Pillow alone."""
    named = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"}
    tok = tokenizer(tuple(named.values()), "<boi>", **named)
    boi, eoi, image = tok.convert_tokens_to_ids(list(named.values()))
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config={**SIZES, "vocab_size": len(tok), "head_dim": 8, "sliding_window": 16},
        vision_config={**vision, "image_size": 16, "patch_size": 4},
        mm_tokens_per_image=4,
        boi_token_index=boi,
        eoi_token_index=eoi,
        image_token_index=image,
    )
    images = transformers.Gemma3ImageProcessor(size={"height": 16, "width": 16}, do_pan_and_scan=False)
    processor = transformers.Gemma3Processor(images, tok, chat_template=tok.chat_template, image_seq_length=4)
    torch.manual_seed(0)
    return scaled(transformers.Gemma3ForConditionalGeneration(config), 4.0), processor


def qwen2_vl() -> tuple[Any, Any]:
    """A random vision-language model with images of any size, and its processor; needs torchvision."""
    names = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tok = tokenizer(names, "<|vision_start|><|image_pad|><|vision_end|>")
    fields = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    config = transformers.Qwen2VLConfig(
        text_config={**SIZES, "vocab_size": len(tok), "rope_parameters": rope},
        vision_config=vision,
        **dict(zip(fields, tok.convert_tokens_to_ids(list(names)), strict=True)),
    )
    pixels = {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 1024}
    images, videos = transformers.Qwen2VLImageProcessor(**pixels), transformers.Qwen2VLVideoProcessor(**pixels)
    processor = transformers.Qwen2VLProcessor(images, tok, videos, chat_template=tok.chat_template)
    torch.manual_seed(0)
    return scaled(transformers.Qwen2VLForConditionalGeneration(config), 4.0), processor


# ---- rows ------------------------------------------------------------------------------------------------------------


def rows(count: int = 8, conversational: bool = False) -> list[dict[str, Any]]:
    """Prompts with an answer column."""

    def prompt(text: str) -> Any:
        return [{"role": "user", "content": text}] if conversational else text

    return [{"prompt": prompt(f"{i}+{i}="), "answer": str(2 * i)} for i in range(count)]


def picture(number: int) -> Image.Image:
    """A small picture: a rectangle in another colour and place for each number."""
    image = Image.new("RGB", (20, 28), (250, 250 - 40 * number, 240))
    at = 2 + 3 * number
    ImageDraw.Draw(image).rectangle([at, at, at + 8, at + 8], fill=(60 * number, 160 - 50 * number, 90))
    return image


def rows_with_images() -> list[dict[str, Any]]:
    """Prompts with one image, with two and with none."""
    ask = [[{"role": "user", "content": text}] for text in ("What?", "Which?", "Say.", "Speak.")]
    return [
        {"prompt": ask[0], "image": picture(0)},
        {"prompt": ask[1], "images": [picture(1), picture(2)]},
        {"prompt": ask[2], "image": None},
        {"prompt": ask[3], "image": picture(3)},
    ]


# ---- samples, as reward functions see them ---------------------------------------------------------------------------

SAMPLES: list[dict[str, Any]] = []
"""What reward functions of this process were called with, one entry per function and completion."""


def plain(value: Any) -> Any:
    """The value as JSON; tensors and images as digests of their bytes, other objects as a placeholder."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, torch.Tensor):
        return ["tensor", list(value.shape), hashlib.sha256(value.numpy().tobytes()).hexdigest()]
    if isinstance(value, Image.Image):
        return ["image", list(value.size), hashlib.sha256(value.tobytes()).hexdigest()]
    return "object"


def noted(function: Any) -> Any:
    """Make a reward function note what it is called with, in `SAMPLES`.

    Completions are noted one by one, because timing decides which ones streamed rewards are called with together.
    """

    def note(given: dict[str, Any]) -> None:
        step = getattr(given.get("trainer_state"), "global_step", None)
        values, count = plain(given), len(given["completion_ids"])
        for index in range(count):
            own = {k: v[index] if isinstance(v, list) and len(v) == count else v for k, v in values.items()}
            SAMPLES.append({"step": step, "function": function.__name__, "names": sorted(given), "values": own})

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def noting_async(**given: Any) -> Any:
            note(given)
            return await function(**given)

        return noting_async

    @functools.wraps(function)
    def noting(**given: Any) -> Any:
        note(given)
        return function(**given)

    return noting


# ---- rewards ---------------------------------------------------------------------------------------------------------


@noted
def longer(completion_ids, **kwargs):
    """One point per token, and a tenth for each of the last digit of their sum, so that ties are rare."""
    return [len(ids) + sum(ids) % 10 / 10 for ids in completion_ids]


@noted
def even(completion_ids, **kwargs):
    """The share of even token ids."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


@noted
def for_odd_prompts(prompts, completion_ids, **kwargs):
    """Prompts of even numbers give no signal."""
    return [float(sum(ids) % 7 * (int(p[0]) % 2)) for p, ids in zip(prompts, completion_ids, strict=True)]


@noted
def sometimes_none(completion_ids, answer, **kwargs):
    """None where the sum of ids is a multiple of three."""
    return [
        None if sum(ids) % 3 == 0 else float(sum(ids) % 5 + len(text))
        for ids, text in zip(completion_ids, answer, strict=True)
    ]


@noted
async def waits(completion_ids, log_metric, log_extra, **kwargs):
    """Asynchronous, with a metric and a column of its own."""
    await asyncio.sleep(0.001)
    log_metric("first_id", sum(ids[0] for ids in completion_ids) / len(completion_ids))
    log_extra("last_id", [ids[-1] for ids in completion_ids])
    return [float(ids[0] % 4) for ids in completion_ids]


@noted
def sometimes_fails(completion_ids, **kwargs):
    """Nonsense for some completions: counted as failures."""
    return ["nonsense" if sum(ids) % 11 == 0 else float(ids[-1] % 3) for ids in completion_ids]


@noted
def by_steps(completion_ids, **kwargs):
    """Steps for some completions, numbers for others, None for a few."""

    def grade(ids):
        if sum(ids) % 5 == 0:
            return None
        return [(0, ids[0] % 2), (len(ids) - 1, 1)] if sum(ids) % 3 else float(sum(ids) % 7)

    return [grade(ids) for ids in completion_ids]


@noted
def by_turns(completion_ids, **kwargs):
    """A reward for the first turn."""
    from covey.rewards import TurnEnd

    return [[(TurnEnd(0), float(sum(ids) % 4))] for ids in completion_ids]


def streamed() -> list[Any]:
    """A reward function that is called as soon as rollouts end, and an asynchronous one."""
    from covey.rewards import per_completion

    @per_completion
    @noted
    def single(completion_ids, **kwargs):
        return [len(ids) + sum(ids) % 10 / 10 for ids in completion_ids]

    return [single, waits]


def built_in() -> list[Any]:
    """Covey's own rewards, and one that notes what they are called with."""
    from covey.rewards import exact_match_reward, get_repetition_penalty_reward, think_format_reward

    return [exact_match_reward, think_format_reward, get_repetition_penalty_reward(2, -0.5), even]


# ---- engines ---------------------------------------------------------------------------------------------------------


class Scripted:
    """An engine of which prompt and seed alone decide every token; it takes weights while it samples.

    Args:
        script: (prompt ids, seed) -> token ids.
    """

    def __init__(self, script: Any):
        self.traits = protocol("EngineTraits")(updates_in_flight=True)
        self.script = script
        self.version = 0

    async def generate(self, request):
        version = self.version
        await asyncio.sleep(0)
        return [self._completion(request, seed, version) for seed in request.seeds]

    def load_weights(self, update):
        for _ in update.tensors():
            pass
        self.version = update.version

    def awake(self):
        return nullcontext()

    def _completion(self, request, seed, version):
        ids = self.script(request.prompt_ids, seed)
        finish = FinishReason.LENGTH if len(ids) > request.params.max_tokens else FinishReason.STOP
        ids = ids[: request.params.max_tokens]
        return protocol("Completion")(ids, None, finish, versions=[version] * len(ids))


class PolicyCopy:
    """An engine that samples from its own copy of the model, token by token, with the weights it was sent."""

    def __init__(self, model: Any):
        self.traits = protocol("EngineTraits")()
        self.model = copy.deepcopy(model).eval()
        self.version = 0

    async def generate(self, request):
        await asyncio.sleep(0)
        return [self._completion(request, seed) for seed in request.seeds]

    @torch.no_grad()
    def load_weights(self, update):
        own = self.model.state_dict()
        for name, tensor in update.tensors():
            own[name].copy_(tensor)
        self.version = update.version

    def awake(self):
        return nullcontext()

    @torch.no_grad()
    def _completion(self, request, seed):
        generator = torch.Generator().manual_seed(seed)
        ids, logprobs = [], []
        while len(ids) < request.params.max_tokens and 1 not in ids:
            logits = self.model(torch.tensor([[*request.prompt_ids, *ids]])).logits[0, -1]
            scores = torch.log_softmax(logits.float() / request.params.temperature, -1)
            ids.append(int(torch.multinomial(scores.exp(), 1, generator=generator)))
            logprobs.append(float(scores[ids[-1]]))
        finish = FinishReason.STOP if 1 in ids else FinishReason.LENGTH
        return protocol("Completion")(ids, logprobs, finish, versions=[self.version] * len(ids))


def letters(prompt_ids, seed):
    """A script: 1 to 6 printable characters."""
    length, start = 1 + seed % 6, seed // 6 + sum(prompt_ids)
    return [4 + (start + place * place) % 90 for place in range(length)]


def talk(*turns: Any) -> Any:
    """A script: the n-th turn is one of the n-th texts, by the seed; further turns repeat the last."""
    tok = tokenizer()

    def script(prompt_ids, seed):
        texts = turns[min(tok.decode(prompt_ids).count("<bos>assistant: ") - 1, len(turns) - 1)]
        text = f"{texts[seed % len(texts)]}{seed % 100}"
        return [*tok(text, add_special_tokens=False)["input_ids"], tok.eos_token_id]

    return script


def call(name: str, **arguments: int) -> str:
    """A tool call as the template writes it."""
    written = ", ".join(f'"{key}": {value}' for key, value in arguments.items())
    return f'<tool_call>{{"name": "{name}", "arguments": {{{written}}}}}</tool_call>'


# ---- tools, environments, rollout functions --------------------------------------------------------------------------


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def halve(a: int) -> float:
    """Halve an even number.

    Args:
        a: The number.
    """
    if a % 2:
        raise ValueError(f"{a} is odd")
    return a / 2


class Counter:
    """An environment whose method is a tool; its reward is what it counted."""

    def reset(self, answer, **row):
        self.value = 0
        return f" [{answer}]"

    def add(self, by: int) -> str:
        """Add.

        Args:
            by: how much.
        """
        self.value += by
        return str(self.value)

    def get_reward(self):
        return float(self.value)


class Talk:
    """A text environment: a point for each even character, over after two turns."""

    def reset(self):
        self.turns = 0
        return "Say something."

    def step(self, text):
        self.turns += 1
        return "more", float(sum(ord(character) % 2 == 0 for character in text)), self.turns == 2, {}


async def twice(row, engine):
    """A rollout of two turns, with a word between them that the policy did not sample."""
    episode = engine.begin()
    await episode.sample(max_tokens=3)
    if episode.write("so "):
        await episode.sample()
    return episode.done(turns=len(episode.turn_ends))


async def tree(row, engine, n):
    """A stem and n branches of it."""
    stem = engine.begin()
    await stem.sample(max_tokens=2)
    branches = [stem.fork() for _ in range(n)]
    await asyncio.gather(*(branch.sample() for branch in branches))
    return [branch.done() for branch in branches]


def second_drafts(prompts, trainer):
    """The second of two completions of every prompt."""
    trainer.generate_completions(prompts, max_tokens=2)
    completions = trainer.generate_completions(prompts)
    fields = {name: [one[name] for one in completions] for name in ("prompt_ids", "completion_ids", "logprobs")}
    return {**fields, "place": list(range(len(prompts)))}
