"""Requests of vLLM's own server: OpenAI-compatible completions with token ids, and its routes for training.

It must be started with `VLLM_SERVER_DEV_MODE=1`, which adds the routes that pause it, empty its prefix cache and take
weights; `covey vllm-serve` does so. See also: `covey.engines.servers.vllm.weights`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from covey.core.engine import SampleRequest
from covey.engines.servers.errors import ServerBusy, ServerError, ServerRefused
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.images import check_expanded
from covey.engines.servers.protocols import SampledChunk, ServerFacts, SettingNames
from covey.engines.servers.vllm.capabilities import (
    DEV_MODE,
    as_dtype,
    check_extra,
    get_path,
    read_config,
    read_model,
    read_release,
    read_world_size,
    refuse_chunked_prefill,
    reports_after_cut,
)
from covey.engines.servers.vllm.sampling import (
    IMAGE_ROUTE,
    completions_of,
    image_answer,
    image_request,
    refuse_reserved,
    sampling_settings,
)


async def write_version(server: ServerClient, version: str, deadline: float) -> None:
    """Set the version that /weight_info reports; ignored by releases without that route."""
    with _without_route():
        body, doing = {"new_version": version}, "record the version of its weights"
        await server.call("POST", "/update_weight_version", doing=doing, deadline=deadline, body=body)


async def read_version(server: ServerClient, deadline: float) -> str | None:
    """Version that /weight_info reports; None for releases without that route."""
    answer = None
    with _without_route():
        answer = await server.call("GET", "/weight_info", doing="read the version of its weights", deadline=deadline)
    return str(answer["weight_version"]) if isinstance(answer, dict) and "weight_version" in answer else None


@contextlib.contextmanager
def _without_route() -> Iterator[None]:
    try:
        yield
    except ServerRefused as error:
        if "HTTP 404" not in error.message:
            raise


class VllmApi:
    """A `ServerApi` for vLLM's server.

    Args:
        temperature: sampling temperature of the run: at another than 1 the server must report suitable log-probs.
        extra: settings of `SamplingParams.extra` that requests will hold, to be compared with the server's schema.
        vocab_size: of the model that is trained; None: not compared.

    Raises:
        ValueError: `extra` holds a reserved setting.
    """

    name = "vLLM"
    settings = SettingNames(
        "vllm_server_timeout",
        "vllm_server_request_timeout",
        "vllm_server_sync_timeout",
        "--max-model-len",
    )

    read_version = staticmethod(read_version)
    write_version = staticmethod(write_version)

    def __init__(self, *, temperature: float = 1.0, extra: dict[str, Any] | None = None, vocab_size: int | None = None):
        self._temperature = temperature
        self._extra = dict(extra or {})
        self._vocab_size = vocab_size
        refuse_reserved(self._extra)

    async def probe(self, server: ServerClient, deadline: float) -> ServerFacts:
        """Read the server's properties; check its release and the way it was started.

        Raises:
            ServerRefused: training cannot use it; the message names the option to start it with.
        """
        await self.check_alive(server, deadline)
        release = await read_release(server, deadline)
        world_size = await read_world_size(server, deadline)
        model = await read_model(server, deadline)
        config = await read_config(server, deadline)
        refuse_chunked_prefill(server, config)
        await check_extra(server, self._extra, deadline)
        # A run that was killed while it sent weights leaves a server paused, with layers that are half loaded.
        answer = await self._switch(server, "/is_paused", "ask whether it is paused", deadline, method="GET")
        if isinstance(answer, dict) and answer.get("is_paused"):
            with contextlib.suppress(ServerError):  # no update is open, or it reports what is missing
                await self._switch(server, "/finish_weight_update", "end an update", deadline, body={})
            await self.resume(server, deadline)
        name = str(model["id"])
        after_cut = await reports_after_cut(server, name, self._vocab_size, self._temperature, deadline)
        return ServerFacts(
            model=name,
            release=release,
            max_context=model.get("max_model_len"),
            world_size=world_size,
            dtype=as_dtype(get_path(config, "model_config", "dtype")),
            reports_after_cut=after_cut,
            reports_temperature=after_cut,
            sleeps=bool(get_path(config, "model_config", "enable_sleep_mode")),
            takes_adapters=get_path(config, "lora_config") is not None,
            path=str(model.get("root") or name),
        )

    async def check_alive(self, server: ServerClient, deadline: float) -> None:
        """Check that its engine lives; it answers while it loads, pauses and sleeps, too."""
        await server.call("GET", "/health", doing="check its health", deadline=deadline)

    # ---- sampling --------------------------------------------------------------------------------------------------

    async def generate(
        self, server: ServerClient, request: SampleRequest, *, model: str, ends: frozenset[int], deadline: float
    ) -> list[SampledChunk]:
        """Sample `request.n` completions; completion i has the seed of the first plus i, as vLLM counts."""
        refuse_reserved(request.params.extra)
        if request.media:
            return await self._generate_with_images(server, request, model, ends, deadline)
        body = {
            "model": model,
            "prompt": request.prompt_ids,
            "return_token_ids": True,
            "add_special_tokens": False,
            **sampling_settings(request, ends),
        }
        answer = await server.ask("/v1/completions", doing="generate", deadline=deadline, body=body)
        return completions_of(server, answer)

    async def _generate_with_images(
        self, server: ServerClient, request: SampleRequest, model: str, ends: frozenset[int], deadline: float
    ) -> list[SampledChunk]:
        try:
            body = image_request(request, model, ends)
            answer = await server.ask(IMAGE_ROUTE, doing="sample with images", deadline=deadline, body=body)
        except ServerRefused as refused:
            if "HTTP 404" not in refused.message and "--enable-scale-out" not in refused.message:
                raise
            hint = f"Images are sent to {IMAGE_ROUTE}: start vLLM with --enable-scale-out, 0.32 or later."
            raise ServerRefused(server.url, "sample with images", refused.message, hint) from refused
        answer, tokens = image_answer(server.url, answer)
        check_expanded(server.url, request, tokens)
        return completions_of(server, answer)

    # ---- training --------------------------------------------------------------------------------------------------

    async def pause(self, server: ServerClient, deadline: float) -> None:
        """Abort requests in flight and hold new ones."""
        await self._switch(server, "/pause", "pause", deadline, {"mode": "abort"})

    async def resume(self, server: ServerClient, deadline: float) -> None:
        """Continue sampling."""
        await self._switch(server, "/resume", "resume", deadline)

    async def clear_prefix_cache(self, server: ServerClient, deadline: float) -> None:
        """Empty the prefix cache.

        Raises:
            ServerBusy: it is still in use.
        """
        answer = await self._switch(server, "/reset_prefix_cache", "empty the prefix cache", deadline)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise ServerBusy(server.url, "empty the prefix cache", "requests still use it")

    async def sleep(self, server: ServerClient, level: int, deadline: float) -> None:
        """Release memory; needs a server started with --enable-sleep-mode."""
        await self._switch(server, "/sleep", "put it to sleep", deadline, {"level": str(level)})

    async def wake(self, server: ServerClient, deadline: float) -> None:
        """Take the memory back if it sleeps."""
        answer = await self._switch(server, "/is_sleeping", "ask whether it sleeps", deadline, method="GET")
        if not isinstance(answer, dict) or answer.get("is_sleeping", True):
            await self._switch(server, "/wake_up", "wake it", deadline)

    async def _switch(
        self,
        server: ServerClient,
        path: str,
        doing: str,
        deadline: float,
        query: dict[str, str] | None = None,
        method: str = "POST",
        body: Any = None,
    ) -> Any:
        try:
            return await server.call(method, path, doing=doing, deadline=deadline, query=query, body=body)
        except ServerRefused as error:
            if "HTTP 404" not in error.message:
                raise
            raise ServerRefused(server.url, doing, f"it has no route {path}", DEV_MODE) from error
