"""What makes a vLLM server ask for its API key on every path; `covey vllm-serve` hands it over as `--middleware`.

vLLM asks for the key where completions are served and nowhere else: the paths on which weights are replaced and methods
of its workers are called would stand open to whoever reaches the port.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

OPEN = frozenset({"/health", "/ping"})
"""For load balancers, which have no key; they say nothing but that the server lives."""

PATH = f"{__name__}.RequireKey"
"""The value of `--middleware`."""


class RequireKey:
    """ASGI middleware: answers 401 unless a request carries `Authorization: Bearer KEY`.

    Args:
        app: what is behind it.

    Raises:
        ValueError: there is no key in `$VLLM_API_KEY`.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]):
        key = os.environ.get("VLLM_API_KEY")
        if not key:
            raise ValueError("RequireKey needs the key in the environment variable VLLM_API_KEY, which is not set.")
        self._app = app
        self._expected = _digest(b"Bearer " + key.encode())

    async def __call__(
        self, scope: dict[str, Any], receive: Callable[..., Any], send: Callable[[dict[str, Any]], Awaitable[None]]
    ) -> None:
        """Pass the request on, or answer it."""
        if scope["type"] == "lifespan" or scope.get("path") in OPEN or self._knows_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            words = {"error": {"message": "the API key is missing or wrong", "code": 401}}
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": json.dumps(words).encode()})

    def _knows_key(self, scope: dict[str, Any]) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(_digest(given[0]), self._expected)


def _digest(text: bytes) -> bytes:
    """Of one length, so that the time of a comparison tells nothing."""
    return hashlib.sha256(text).digest()
