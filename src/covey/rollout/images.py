"""Images of prompts and tool results: reading them as PIL images, and placing them in messages."""

import base64
import os
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from covey.core.records import Message

SOURCES = ("image", "path", "url", "base64", "image_url")  # keys of an image part that may name the image
FORMS = "a PIL image, the path of a file, its bytes, or {'bytes': ..., 'path': ...} as `datasets.Image` has them"


class ImageError(ValueError):
    """An image that cannot be read, or that does not belong to any message."""


def read_image(source: Any, name: str = "an image") -> Any:
    """An upright PIL image in RGB, with white for transparent pixels and 16 bits scaled to 8.

    ImageError if it cannot be read.
    """
    if isinstance(source, Mapping):
        known = [source[key] for key in ("bytes", "path") if source.get(key) is not None]
        if not known:
            raise ImageError(f"{name} is a dictionary with {sorted(map(str, source))}; give {FORMS}.")
        source = known[0]
    try:
        return _to_rgb(_open(source, name), name)
    except ImageError:
        raise
    except Exception as error:  # decoders raise exceptions of every kind for broken files
        shown = f"{name} ({source!s:.200})" if isinstance(source, str | os.PathLike) else name
        raise ImageError(f"{shown} cannot be read: {type(error).__name__}: {error}. Mend or remove the row.") from error


def _open(source: Any, name: str) -> Any:
    from PIL import Image

    if isinstance(source, str) and source.startswith("data:"):
        source = base64.b64decode(source.partition(",")[2], validate=True)
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source).removeprefix("file://")
        if path.startswith(("http://", "https://")):
            raise ImageError(f"{name} is the address {path!r:.80}; download it first, and give {FORMS}.")
        return Image.open(path)
    if isinstance(source, bytes | bytearray | memoryview):
        return Image.open(BytesIO(source))
    if isinstance(source, Image.Image):
        return source
    raise ImageError(f"{name} is of type {type(source).__name__}; give {FORMS}.")


def _to_rgb(image: Any, name: str) -> Any:
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if 0 in image.size:
        raise ImageError(f"{name} has no pixels: it is {'x'.join(map(str, image.size))}. Mend or remove the row.")
    if image.mode in ("I", "F"):
        low, high = image.getextrema()
        if low < 0 or high > 255 or (image.mode == "F" and high <= 1):
            raise ImageError(
                f"{name} is in PIL's mode {image.mode!r}, whose range of values is not known: convert it to RGB, as by"
                " `Image.fromarray(array.astype('uint8'))`."
            )
    if image.mode.startswith("I;16"):  # PIL itself would turn all but the darkest of it white
        return image.convert("I").point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        rgba = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def with_images(messages: Sequence[Message], column: Sequence[Any]) -> tuple[list[Message], list[Any]]:
    """Messages whose contents are parts, and the images in them in order, as they were given.

    Images of the row's column fill the image parts that have no image. If no message has an image part, they are put
    before the text of the first message of a user. ImageError if images and image parts do not match.
    """
    refuse_unsupported_parts(messages)
    messages = [{**message, "content": as_parts(message.get("content"))} for message in messages]
    parts = [part for message in messages for part in message["content"] if _is_image_part(part)]
    if column and not parts:
        user = next((message for message in messages if message.get("role") == "user"), None)
        if user is None:
            raise ImageError("there are images, and no message of a user that could show them.")
        parts = [{"type": "image"} for _ in column]
        user["content"] = [*parts, *user["content"]]
    sources = [_source(part) for part in parts]
    unnamed = sum(source is None for source in sources)
    if unnamed != len(column):
        raise ImageError(
            f"the messages have {unnamed} image parts that name no image, and the row has {len(column)} images in its"
            " column. Give one for each, in order, or leave the image parts out to have all of them in front of the"
            " first user message."
        )
    rest = iter(column)
    shown = [next(rest) if source is None else source for source in sources]
    for message in messages:  # tables fill the keys that a part does not have with None
        message["content"] = [
            {"type": "image"} if _is_image_part(part) else {k: v for k, v in part.items() if v is not None}
            for part in message["content"]
        ]
    return messages, shown


def embed_images(prompt: Any, column: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The prompt with the images in its image parts, for code that does not read the row's columns; and the images."""
    if not column and not has_images(prompt):
        return prompt, []
    if isinstance(prompt, str):
        raise ImageError("a prompt that is a string cannot hold its images: write it as messages.")
    messages, shown = with_images(prompt, column)
    images = [read_image(image, f"image {number}") for number, image in enumerate(shown)]
    rest = iter(images)
    for message in messages:
        message["content"] = [
            {**part, "image": next(rest)} if part.get("type") == "image" else part for part in message["content"]
        ]
    return messages, images


def refuse_unsupported_parts(prompt: Any) -> None:
    """Raise ImageError for videos, sounds and files, which many chat templates leave out without an error."""
    for part in _parts(prompt):
        if not isinstance(part.get("text"), str) and not _is_image_part(part):
            raise ImageError(
                f"a message holds a part of type {part['type']!r}; only text and images are supported. Give a video as"
                " some of its images, or remove the row."
            )


def has_images(prompt: Any) -> bool:
    return any(map(_is_image_part, _parts(prompt)))


def as_parts(content: Any) -> list[dict[str, Any]]:
    """A message's content as a list of parts; text becomes one part."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    given = content if isinstance(content, list | tuple) else []
    return [dict(part) if isinstance(part, Mapping) else {"type": "text", "text": str(part)} for part in given]


def _parts(prompt: Any) -> list[dict[str, Any]]:
    messages = prompt if isinstance(prompt, list | tuple) else []
    return [part for one in messages if isinstance(one, Mapping) for part in as_parts(one.get("content"))]


def _is_image_part(part: Mapping[str, Any]) -> bool:
    return part.get("type") in ("image", "image_url")


def _source(part: Mapping[str, Any]) -> Any:
    source = next((part[key] for key in SOURCES if part.get(key) is not None), None)
    if isinstance(source, Mapping) and "url" in source:  # {"type": "image_url", "image_url": {"url": ...}}
        return source["url"]
    if isinstance(source, str) and source == part.get("base64"):
        return f"data:image;base64,{source}"
    return source
