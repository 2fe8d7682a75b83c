"""Images of a rollout, where they stand among its tokens, and the tokens without them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Media:
    """The images in a span of a rollout's tokens (a prompt, or a tool result), from one call of the processor.

    Example:
        "<image>Hi" with an image that takes two tokens: `Media((image,), {"pixel_values": ...},
        {"token_type_ids": [1, 1, 0, 0]}, start=0, length=4, short_ids=(7, 12, 13))`
    """

    # PIL images in the order of their placeholder tokens; empty in a restored batch, as training reads only `tensors`
    images: tuple[Any, ...]
    tensors: dict[str, Tensor]  # inputs of the model's forward, as the processor returns them for a single sample
    marks: dict[str, Tensor]  # per-token inputs of the model by name, [length], such as `token_type_ids`
    start: int  # first token of the span, counted over the rollout's prompt and completion
    length: int  # tokens of the span
    # the span with each image as the single token of the chat template, which inference servers expand
    short_ids: tuple[int, ...]

    def state(self) -> dict[str, Any]:
        """Everything that training needs, in plain containers and tensors; `Media(**state)` restores it."""
        trained = replace(self, images=())
        return {name: getattr(trained, name) for name in self.__slots__}


def unexpanded(ids: Sequence[int], media: Iterable[Media]) -> list[int]:
    """Tokens of a prompt (and its completion) for inference servers, each image a single token.

    Example:
        >>> unexpanded([5, 9, 9, 9, 6], [Media((), {}, {}, start=1, length=3, short_ids=(7,))])
        [5, 7, 6]
    """
    short: list[int] = []
    end = 0
    for item in sorted(media, key=lambda item: item.start):
        short += [*ids[end : item.start], *item.short_ids]
        end = item.start + item.length
    return [*short, *ids[end:]]


def images_of(media: Iterable[Media]) -> list[Any]:
    """PIL images in the order of their placeholder tokens."""
    return [image for item in sorted(media, key=lambda item: item.start) for image in item.images]
