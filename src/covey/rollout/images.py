"""Images as datasets and tools give them: read into PIL images, and put where a conversation shows them.

A row has them in a column `image` or `images`, or among the parts of its messages. Not here: what a model's processor
makes of them (`covey.rollout.vision`).
"""

import base64
import os
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from covey.core.rollout import Message

COLUMNS = ("image", "images")
"""Columns of a dataset that hold the pictures of a row: one, or a list of them."""

SOURCES = ("image", "path", "url", "base64", "image_url")
"""Keys of an image part that may say which image it is."""

NEITHER = ("video", "video_url", "audio", "audio_url", "input_audio")
"""Types of parts that are neither text nor images."""

FORMS = "a PIL image, the path of a file, its bytes, or {'bytes': ..., 'path': ...} as `datasets.Image` has them"


class ImageError(ValueError):
    """An image that cannot be read, or that belongs nowhere."""


def images_of(row: Mapping[str, Any]) -> list[Any]:
    """The images in a row's columns, as they are given; [] without any.

    Raises:
        ImageError: both columns hold some.
    """
    given = {name: row[name] for name in COLUMNS if row.get(name) is not None}
    filled = {name: value for name, value in given.items() if not (isinstance(value, list | tuple) and not value)}
    if len(filled) > 1:
        raise ImageError("both columns, 'image' and 'images', hold pictures. Put a row's pictures into one of them.")
    for value in filled.values():
        return [one for one in value if one is not None] if isinstance(value, list | tuple) else [value]
    return []


def read_image(given: Any, what: str = "an image") -> Any:
    """A PIL image in RGB, upright; white where it is transparent, 16 bits scaled to 8.

    Args:
        given: a PIL image, a path, a data URL, bytes of a file, or a dictionary with `bytes` or `path`.
        what: names it in errors.

    Raises:
        ImageError: it is none of these, there is no such file, it cannot be decoded, or it has no pixels.
    """
    if isinstance(given, Mapping):
        known = [given[key] for key in ("bytes", "path") if given.get(key) is not None]
        if not known:
            raise ImageError(f"{what} is a dictionary with {sorted(map(str, given))}; give {FORMS}.")
        given = known[0]
    try:
        return _as_rgb(_opened(given, what), what)
    except ImageError:
        raise
    except Exception as error:  # decoders meet what is broken with exceptions of every kind
        shown = f" ({given!s:.200})" if isinstance(given, str | os.PathLike) else ""
        raise ImageError(
            f"{what}{shown} cannot be read: {type(error).__name__}: {error}. Mend or remove the row."
        ) from error


def _opened(given: Any, what: str) -> Any:
    from PIL import Image

    if isinstance(given, str) and given.startswith("data:"):
        given = base64.b64decode(given.partition(",")[2], validate=True)
    if isinstance(given, str | os.PathLike):
        return Image.open(_path(given, what))
    if isinstance(given, bytes | bytearray | memoryview):
        return Image.open(BytesIO(given))
    if isinstance(given, Image.Image):
        return given
    raise ImageError(f"{what} is of type {type(given).__name__}; give {FORMS}.")


def _as_rgb(opened: Any, what: str) -> Any:
    from PIL import Image, ImageOps

    picture = ImageOps.exif_transpose(opened)
    if 0 in picture.size:
        raise ImageError(f"{what} has no pixels: it is {'x'.join(map(str, picture.size))}. Mend or remove the row.")
    if picture.mode in ("I", "F") and not _within_a_byte(picture):
        raise ImageError(
            f"{what} is in PIL's mode {picture.mode!r}, whose values have no range that could be known: convert it to"
            " RGB, as by `Image.fromarray(array.astype('uint8'))`."
        )
    if picture.mode.startswith("I;16"):  # PIL itself would turn all but the darkest of it white
        return picture.convert("I").point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    if picture.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in picture.info:
        shown = (picture.convert("LA") if picture.mode == "La" else picture).convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown).convert("RGB")
    return picture.convert("RGB")


def _within_a_byte(picture: Any) -> bool:
    low, high = picture.getextrema()
    return bool(low >= 0 and high <= 255 and (picture.mode == "I" or high > 1))


def _path(given: str | os.PathLike[str], what: str) -> str:
    path = os.fspath(given).removeprefix("file://")
    if path.startswith(("http://", "https://")):
        raise ImageError(f"{what} is the address {path!r:.80}; download it first, and give {FORMS}.")
    return path


def with_images(messages: Sequence[Message], given: Sequence[Any]) -> tuple[list[Message], list[Any]]:
    """Messages whose contents are parts, and the images that these show, in their order.

    Images of a column take the places of image parts that name none. Where no message has an image part, they come in
    front of the first message of a user.

    Args:
        messages: of a prompt, or answers of tools.
        given: images of a column.

    Returns:
        Messages with `{"type": "image"}` where an image is shown and `{"type": "text", "text": ...}` elsewhere; and the
        images as they were given.

    Raises:
        ImageError: there are more or fewer images than places for them; or a part is a video or a sound.

    Example:
        >>> with_images([{"role": "user", "content": "What is it?"}], ["cat.png"])[0][0]["content"]
        [{'type': 'image'}, {'type': 'text', 'text': 'What is it?'}]
    """
    refuse_others(messages)
    written = [{**message, "content": as_parts(message.get("content"))} for message in messages]
    parts = [part for message in written for part in message["content"] if part.get("type") in ("image", "image_url")]
    if given and not parts:
        user = next((message for message in written if message.get("role") == "user"), None)
        if user is None:
            raise ImageError("there are images, and no message of a user that could show them.")
        parts = [{"type": "image"} for _ in given]
        user["content"] = [*parts, *user["content"]]
    named = [_source(part) for part in parts]
    open_places = sum(source is None for source in named)
    if open_places != len(given):
        raise ImageError(
            f"the messages have {open_places} image parts that name no image, and the row has {len(given)} images in"
            " its column. Give one for each, in order, or leave the image parts out to have all of them in front of the"
            " first user message."
        )
    rest = iter(given)
    shown = [next(rest) if source is None else source for source in named]
    for message in written:
        message["content"] = [_plain_part(part) for part in message["content"]]
    return written, shown


def showing(prompt: Any, given: Sequence[Any]) -> tuple[Any, list[Any]]:
    """A prompt whose image parts hold their images, for code that knows no columns; and the images.

    Args:
        prompt: a string or messages.
        given: images of a column.

    Returns:
        The prompt as it is where it shows none, else messages with parts `{"type": "image", "image": a PIL image}`; and
        these images in their order.

    Raises:
        ImageError: an image cannot be read or has no place, or the prompt is a string.
    """
    if not given and not shows_images(prompt):
        return prompt, []
    if isinstance(prompt, str):
        raise ImageError("a prompt that is a string cannot hold its images: write it as messages.")
    messages, shown = with_images(prompt, given)
    images = [read_image(image, f"image {number}") for number, image in enumerate(shown)]
    rest = iter(images)
    for message in messages:
        message["content"] = [
            {**part, "image": next(rest)} if part.get("type") == "image" else part for part in message["content"]
        ]
    return messages, images


def refuse_others(prompt: Any) -> None:
    """A chat template that does not know a kind of part leaves it out without a word.

    Raises:
        ImageError: a message holds a video or a sound.
    """
    messages = [one for one in prompt if isinstance(one, Mapping)] if isinstance(prompt, list | tuple) else []
    for part in (part for message in messages for part in as_parts(message.get("content"))):
        if part.get("type") in NEITHER:
            raise ImageError(
                f"a message holds a part of type {part['type']!r}, which models are not shown here: text and images"
                " are. Give a video as some of its images, or remove the row."
            )


def shows_images(prompt: Any) -> bool:
    """Whether a message of a prompt has an image among its parts."""
    messages = [one for one in prompt if isinstance(one, Mapping)] if isinstance(prompt, list) else []
    parts = [part for message in messages for part in as_parts(message.get("content"))]
    return any(part.get("type") in ("image", "image_url") for part in parts)


def as_parts(content: Any) -> list[dict[str, Any]]:
    """A message's content as parts, also where it is text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return [dict(part) for part in content if isinstance(part, Mapping)] if isinstance(content, list | tuple) else []


def _source(part: Mapping[str, Any]) -> Any:
    """The image that a part names, or None."""
    source = next((part[key] for key in SOURCES if part.get(key) is not None), None)
    if isinstance(source, Mapping) and "url" in source:  # {"type": "image_url", "image_url": {"url": ...}}
        return source["url"]
    if isinstance(source, str) and source == part.get("base64"):
        return f"data:image;base64,{source}"
    return source


def _plain_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """As chat templates know parts; tables fill the keys that a part does not have with None."""
    if part.get("type") in ("image", "image_url"):
        return {"type": "image"}
    return {key: value for key, value in part.items() if value is not None}
