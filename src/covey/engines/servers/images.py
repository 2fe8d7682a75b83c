"""Images on their way to inference servers: as PNG in base64, beside prompts in which each is a single token.

Servers expand that token themselves, with a processor of their own, so what they make of a prompt is compared with what
the trainer's processor made of it: a server that leaves the images out, or resizes them otherwise, would sample from
something else than what is trained on. Not here: where in a request images belong, which differs by make.
"""

import base64
from io import BytesIO
from typing import Any

from covey.core.engine import SampleRequest
from covey.core.media import images_of, unexpanded
from covey.engines.servers.errors import ServerRefused

SAME = "Start it with the model that is trained and the same settings of its processor"
"""What makes the two agree."""


def sent_ids(request: SampleRequest) -> list[int]:
    """The prompt as servers are sent it."""
    return unexpanded(request.prompt_ids, request.media) if request.media else request.prompt_ids


def sent_images(request: SampleRequest) -> list[str]:
    """Its images as data URLs, in the order of the tokens that stand for them."""
    return [_data_url(image) for image in images_of(request.media)]


def check_expanded(url: str, request: SampleRequest, count: Any) -> None:
    """Refuse a server that makes other tokens of a prompt with images.

    Args:
        url: of the server.
        request: with images.
        count: tokens that the server says it made of the prompt; None if it says nothing.

    Raises:
        ServerRefused: they are more or fewer than the trainer's.
    """
    if count != len(request.prompt_ids):
        images = sum(len(one.images) for one in request.media)
        said = "does not say how many tokens" if count is None else f"makes {count} tokens"
        raise ServerRefused(
            url,
            "sample with images",
            f"it {said}{' it makes' if count is None else ''} of a prompt with {images} images, and the trainer's"
            f" processor makes {len(request.prompt_ids)}",
            f"{SAME}.",
        )


def _data_url(image: Any) -> str:
    data = BytesIO()
    image.save(data, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
