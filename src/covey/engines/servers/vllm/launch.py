"""Start of a vLLM server that can be sent weights: options, environment, and middleware that requires its API key.

Imports neither torch nor vLLM: the command line prints the options, and vLLM's API server loads `RequireKey`.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

OLDEST = (0, 28)  # first release with every route that is used; the newest of them is /weight_info
WORKER = "covey.engines.servers.vllm.worker.CoveyWorker"  # worker extension; importing it registers `BACKEND`
BACKEND = "covey"  # Covey's backend for vLLM's weight transfer: gloo or NCCL, as the trainer chooses
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}  # opens the routes that take weights
LORA_ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}  # opens the routes that take adapters
ADAPTERS = 3  # adapter versions that a server keeps: the current one, and those of requests still in flight
MIDDLEWARE = f"{__name__}.RequireKey"  # value of `--middleware`
WEIGHT_FLAGS = {"worker-extension-cls": WORKER, "weight-transfer-config": f'{{"backend": "{BACKEND}"}}'}
LORA_FLAGS = {"max-loras": str(ADAPTERS), "max-cpu-loras": str(ADAPTERS)}  # these go with --enable-lora
OPEN_PATHS = frozenset({"/health", "/ping"})  # open to load balancers, which have no key; they only say that it is up


class RequireKey:
    """ASGI middleware: answers 401 unless a request carries `Authorization: Bearer $VLLM_API_KEY`.

    vLLM itself requires the key only where completions are served, not where weights are replaced.
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
        if scope["type"] == "lifespan" or scope.get("path") in OPEN_PATHS or self._knows_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            error = {"error": {"message": "the API key is missing or wrong", "code": 401}}
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": json.dumps(error).encode()})

    def _knows_key(self, scope: dict[str, Any]) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(_digest(given[0]), self._expected)


def _digest(text: bytes) -> bytes:
    """Hash of constant length, so that the time of a comparison reveals nothing."""
    return hashlib.sha256(text).digest()
