"""Images in requests to inference servers: PNG in base64, with prompts in which each image is a single token.

Servers expand that token with a processor of their own, so the length of the expanded prompt is compared with the
trainer's: a server that leaves images out or resizes them differently would sample from other inputs than those
trained on.
"""

import base64
from io import BytesIO
from typing import Any

from covey.core.engine import SampleRequest
from covey.core.records import images_of, unexpanded
from covey.engines.servers.errors import ServerRefused


def sent_ids(request: SampleRequest) -> list[int]:
    """Tokens of the prompt with one token for each image."""
    return unexpanded(request.prompt_ids, request.media) if request.media else request.prompt_ids


def sent_images(request: SampleRequest) -> list[str]:
    """Images as data URLs, in the order of their tokens."""
    urls = []
    for image in images_of(request.media):
        data = BytesIO()
        image.save(data, "PNG", compress_level=1)
        urls.append("data:image/png;base64," + base64.b64encode(data.getvalue()).decode())
    return urls


def check_expanded(url: str, request: SampleRequest, count: Any) -> None:
    """Compare the length of the server's expanded prompt, or None if it reports none, with the trainer's.

    Raises:
        ServerRefused: they differ.
    """
    if count != len(request.prompt_ids):
        images = sum(len(media.images) for media in request.media)
        made = "does not report how many tokens it makes" if count is None else f"makes {count} tokens"
        raise ServerRefused(
            url,
            "sample with images",
            f"it {made} of a prompt with {images} images, and the trainer's processor makes {len(request.prompt_ids)}",
            "Start it with the model that is trained and the same settings of its processor.",
        )
