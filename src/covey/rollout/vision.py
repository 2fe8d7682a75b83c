"""A vision-language model's processor: text and images in, tokens and inputs of the model out.

Tokens are counted with images expanded, as the model sees them; beside them stands what inference servers are sent,
where each image is one token. What the processor returns besides tokens is kept as it is (`covey.core.media`). Not
here: reading images (`covey.rollout.images`), chat templates (`covey.rollout.prompts`).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from covey.core.media import Media
from covey.rollout.images import ImageError, read_image

REMEMBERED = 64
"""Texts with images whose inputs are kept: siblings that play by themselves share them."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a text, and the images among them.

    Attributes:
        ids: with images expanded.
        media: where and what these are; empty for text alone.
    """

    ids: list[int]
    media: tuple[Media, ...] = ()


def tokenizer_of(processing_class: Any) -> Any:
    """The tokenizer: of a processor, or what is given. It renders with the processor's chat template."""
    tokenizer = getattr(processing_class, "tokenizer", None)
    if tokenizer is None:
        return processing_class
    if getattr(processing_class, "chat_template", None):
        tokenizer.chat_template = processing_class.chat_template
    return tokenizer


def is_processor(processing_class: Any) -> bool:
    """Whether it processes images beside text."""
    return hasattr(processing_class, "tokenizer") and hasattr(processing_class, "image_processor")


class Vision:
    """Calls a processor.

    Args:
        processor: of a vision-language model, with a tokenizer and an image processor.
        placeholders: tokens that stand for images in the model.
    """

    def __init__(self, processor: Any, placeholders: Sequence[int]):
        self.processor = processor
        self.placeholders = frozenset(placeholders)
        self._known: dict[tuple[Any, ...], Encoded] = {}

    def encode(self, text: str, images: Sequence[Any], start: int = 0, **tokenizing: Any) -> Encoded:
        """Tokens of a text with images.

        Args:
            text: in which each image is what the chat template writes for one.
            images: as `read_image` takes them, in the order of the text.
            start: place of the text among the tokens of its rollout.
            tokenizing: further arguments of the tokenizer.

        Raises:
            ImageError: an image cannot be read, the text shows more or fewer than there are, or the processor fails.
        """
        if not images:
            ids = list(self.processor.tokenizer(text, **tokenizing)["input_ids"])
            if not self.placeholders.isdisjoint(ids):
                raise ImageError("the text holds a token that stands for an image, and there is none. Give the image.")
            return Encoded(ids)
        read = tuple(read_image(image, f"image {number}") for number, image in enumerate(images))
        key = (text, start, tuple(map(_digest, read)), tuple(sorted(tokenizing.items())))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._process(text, read, start, tokenizing)
            if len(self._known) > REMEMBERED:
                del self._known[next(iter(self._known))]
        return known

    def find(self, ids: Sequence[int], images: Sequence[Any], written: Sequence[bool]) -> tuple[Media, ...]:
        """Images among tokens that somebody else has put together.

        Each is processed by itself, and looked for as the tokens that stand for it, behind those of the one before.
        What is found can be trained on, and not be sent to servers, which would have to make the tokens themselves.

        Args:
            ids: tokens of a rollout, with images expanded.
            images: as `read_image` takes them, in their order.
            written: by others than the policy, one value a token: only these can stand for an image.

        Raises:
            ImageError: an image cannot be read, or its tokens are not there; or there are tokens of other images.
        """
        found: list[Media] = []
        at = 0
        for number, image in enumerate(images):
            stretch, alone = self._alone(read_image(image, f"image {number}"))
            places = range(at, len(ids) - len(stretch) + 1)
            here = (i for i in places if ids[i] == stretch[0] and list(ids[i : i + len(stretch)]) == stretch)
            start = next((i for i in here if all(written[i : i + len(stretch)])), None)
            if start is None:
                raise ImageError(
                    f"image {number} of {len(images)} is not among the tokens: the model's processor makes"
                    f" {len(stretch)} of it, and they are nowhere after token {at}."
                )
            found.append(replace(alone, start=start))
            at = start + len(stretch)
        covered = {i for one in found for i in range(one.start, one.start + one.length)}
        others = sum(token in self.placeholders and written[i] and i not in covered for i, token in enumerate(ids))
        if others:
            raise ImageError(f"{others} tokens stand for images that are not among the {len(images)} that are given.")
        return tuple(found)

    def has_stray_placeholder(self, ids: Sequence[int], media: Sequence[Media]) -> bool:
        """True where a token before the last image stands for an image and belongs to none."""
        shown = {place for one in media for place in range(one.start, one.start + one.length)}
        last = max((one.start for one in media), default=0)
        return any(token in self.placeholders and i not in shown for i, token in enumerate(ids[:last]))

    def _alone(self, image: Any) -> tuple[list[int], Media]:
        """The tokens that stand for an image, whatever is around it, and what the model is given with them."""
        tokenizer = self.processor.tokenizer
        if getattr(tokenizer, "chat_template", None):
            text = tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "image"}]}], tokenize=False)
        else:
            text = getattr(self.processor, "boi_token", None) or self.processor.image_token
        encoded = self.encode(text, [image])
        (media,) = encoded.media
        marked = [any(marks[i] for marks in media.marks.values()) for i in range(media.length)]
        places = [i for i, token in enumerate(encoded.ids) if token in self.placeholders or marked[i]]
        if not places:
            raise ImageError(
                f"{type(self.processor).__name__} makes no tokens of an image that could be told from text."
            )
        first, last = places[0], places[-1] + 1
        marks = {name: marks[first:last] for name, marks in media.marks.items()}
        return encoded.ids[first:last], replace(media, marks=marks, start=0, length=last - first, short_ids=())

    def _process(self, text: str, images: tuple[Any, ...], start: int, tokenizing: dict[str, Any]) -> Encoded:
        try:
            made = self.processor(text=[text], images=[list(images)], return_tensors="pt", **tokenizing)
        except Exception as error:  # processors check what they are given in ways of their own
            raise ImageError(
                f"{type(self.processor).__name__} cannot process {len(images)} images of"
                f" {', '.join('x'.join(map(str, one.size)) for one in images)} pixels with the text"
                f" {text[:80]!r}: {type(error).__name__}: {error}"
            ) from error
        ids = made["input_ids"][0].tolist()
        tensors, marks = {}, {}
        for name, value in made.items():
            if name in ("input_ids", "attention_mask"):
                continue
            value = torch.as_tensor(value)
            if value.shape == (1, len(ids)):
                marks[name] = value[0].long()
            else:
                tensors[name] = value
        short = tuple(self.processor.tokenizer(text, **tokenizing)["input_ids"])
        return Encoded(ids, (Media(images, tensors, marks, start, len(ids), short),))


def _digest(image: Any) -> tuple[tuple[int, int], bytes]:
    return image.size, hashlib.blake2b(image.tobytes(), digest_size=16).digest()
