"""A vision-language model's processor: text and images in, tokens and inputs of the model out.

Tokens have images expanded, as the model reads them; inference servers get tokens in which each image is one.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from covey.core.media import Media
from covey.rollout.images import ImageError, read_image

CACHED_TEXTS = 64  # texts with images whose inputs are cached: the rollouts of a group share them


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of a text with images expanded, and the positions and model inputs of the images."""

    ids: list[int]
    media: tuple[Media, ...] = ()


def tokenizer_of(processing_class: Any) -> Any:
    """The tokenizer of a processor, with its chat template; a tokenizer is returned as it is."""
    tokenizer = getattr(processing_class, "tokenizer", None)
    if tokenizer is None:
        return processing_class
    if getattr(processing_class, "chat_template", None):
        tokenizer.chat_template = processing_class.chat_template
    return tokenizer


def is_processor(processing_class: Any) -> bool:
    return hasattr(processing_class, "tokenizer") and hasattr(processing_class, "image_processor")


class Vision:
    """Calls a processor."""

    def __init__(self, processor: Any, placeholders: Sequence[int]):
        self.processor = processor
        self.placeholders = frozenset(placeholders)
        self._cache: dict[tuple[Any, ...], Encoded] = {}

    def encode(self, text: str, images: Sequence[Any], start: int = 0, **tokenizing: Any) -> Encoded:
        if not images:
            ids = list(self.processor.tokenizer(text, **tokenizing)["input_ids"])
            if not self.placeholders.isdisjoint(ids):
                raise ImageError("the text holds a token that stands for an image, and there is none. Give the image.")
            return Encoded(ids)
        read = tuple(read_image(image, f"image {number}") for number, image in enumerate(images))
        key = (text, start, tuple(map(_digest, read)), tuple(sorted(tokenizing.items())))
        encoded = self._cache.get(key)
        if encoded is None:
            encoded = self._cache[key] = self._process(text, read, start, tokenizing)
            if len(self._cache) > CACHED_TEXTS:
                del self._cache[next(iter(self._cache))]
        return encoded

    def find(self, ids: Sequence[int], images: Sequence[Any], written: Sequence[bool]) -> tuple[Media, ...]:
        """Images among tokens that a user's code returned; they can be trained on, but not be sent to servers.

        ValueError if tokens and images do not match.
        """
        found: list[Media] = []
        at = 0
        for number, image in enumerate(images):
            own, alone = self._alone(read_image(image, f"image {number}"))
            n = len(own)
            starts = (i for i in range(at, len(ids) - n + 1) if ids[i] == own[0] and list(ids[i : i + n]) == own)
            start = next((i for i in starts if all(written[i : i + n])), None)
            if start is None:
                raise ImageError(
                    f"image {number} of {len(images)} is not among the tokens: the model's processor makes {n} of it,"
                    f" and they are nowhere after token {at}."
                )
            found.append(replace(alone, start=start))
            at = start + n
        covered = {i for one in found for i in range(one.start, one.start + one.length)}
        others = sum(token in self.placeholders and written[i] and i not in covered for i, token in enumerate(ids))
        if others:
            raise ImageError(f"{others} tokens stand for images that are not among the {len(images)} that are given.")
        return tuple(found)

    def has_stray_placeholder(self, ids: Sequence[int], media: Sequence[Media]) -> bool:
        """True if a token before the last image is an image placeholder that belongs to no image."""
        shown = {index for one in media for index in range(one.start, one.start + one.length)}
        last = max((one.start for one in media), default=0)
        return any(token in self.placeholders and i not in shown for i, token in enumerate(ids[:last]))

    def _alone(self, image: Any) -> tuple[list[int], Media]:
        """The tokens of an image without text around it, and its inputs of the model."""
        tokenizer = self.processor.tokenizer
        if getattr(tokenizer, "chat_template", None):
            text = tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "image"}]}], tokenize=False)
        else:
            text = getattr(self.processor, "boi_token", None) or self.processor.image_token
        encoded = self.encode(text, [image])
        (media,) = encoded.media
        marked = [any(marks[i] for marks in media.marks.values()) for i in range(media.length)]
        indices = [i for i, token in enumerate(encoded.ids) if token in self.placeholders or marked[i]]
        if not indices:
            raise ImageError(f"{type(self.processor).__name__} makes no tokens of an image that differ from text.")
        first, last = indices[0], indices[-1] + 1
        marks = {name: marks[first:last] for name, marks in media.marks.items()}
        return encoded.ids[first:last], replace(media, marks=marks, start=0, length=last - first, short_ids=())

    def _process(self, text: str, images: tuple[Any, ...], start: int, tokenizing: dict[str, Any]) -> Encoded:
        try:
            made = self.processor(text=[text], images=[list(images)], return_tensors="pt", **tokenizing)
        except Exception as error:  # processors raise errors of every kind
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
