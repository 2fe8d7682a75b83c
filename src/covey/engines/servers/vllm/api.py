"""How vLLM's own server is spoken to: its OpenAI-compatible completions with token ids, and its routes for training.

It must be started with `VLLM_SERVER_DEV_MODE=1`, which is what adds the routes that pause it, empty its prefix cache
and take weights; `covey vllm-serve` does so. Not here: how weights travel, which is the transports'.
"""

import contextlib
from typing import Any

from covey.core.engine import SampleRequest
from covey.engines.servers.errors import ServerBusy, ServerError, ServerRefused
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.images import check_expanded
from covey.engines.servers.protocols import SampledChunk, ServerFacts, SettingNames
from covey.engines.servers.vllm import images
from covey.engines.servers.vllm.capabilities import (
    DEV_MODE,
    as_dtype,
    check_extra,
    config_of,
    model_of,
    refuse_pieces,
    release_of,
    reports_after_cut,
    within,
    world_size_of,
)
from covey.engines.servers.vllm.sampling import completions_of, refuse_ours, sampling_settings


class VllmDialect:
    """Speaks with vLLM's server.

    Args:
        temperature: that will be sampled at: at another than 1 the server must be told which log-probs to report.
        extra: settings of `SamplingParams.extra` that requests will hold, to be compared with what the server knows.
        vocab_size: of the model that is trained; None: not compared.
    """

    name = "vLLM"
    settings = SettingNames(
        "vllm_server_timeout",
        "vllm_server_request_timeout",
        "vllm_server_sync_timeout",
        "--max-model-len",
    )

    def __init__(self, *, temperature: float = 1.0, extra: dict[str, Any] | None = None, vocab_size: int | None = None):
        self._temperature = temperature
        self._extra = dict(extra or {})
        self._vocab_size = vocab_size
        refuse_ours(self._extra)

    # ---- what it is ------------------------------------------------------------------------------------------------

    async def look(self, server: ServerClient, deadline: float) -> ServerFacts:
        """Whether the server is up, of a release and started in a way that training can use.

        Raises:
            ServerRefused: it is not; the message names the option to start it with.
        """
        await self.alive(server, deadline)
        release = await release_of(server, deadline)
        world_size = await world_size_of(server, deadline)
        model = await model_of(server, deadline)
        config = await config_of(server, deadline)
        refuse_pieces(server, config)
        await check_extra(server, self._extra, deadline)
        await self._let_go_on(server, deadline)
        name = str(model["id"])
        after_cut = await reports_after_cut(server, name, self._vocab_size, self._temperature, deadline)
        return ServerFacts(
            model=name,
            release=release,
            max_context=model.get("max_model_len"),
            world_size=world_size,
            dtype=as_dtype(within(config, "model_config", "dtype")),
            reports_after_cut=after_cut,
            reports_temperature=after_cut,
            sleeps=bool(within(config, "model_config", "enable_sleep_mode")),
            takes_adapters=within(config, "lora_config") is not None,
            path=str(model.get("root") or name),
        )

    async def alive(self, server: ServerClient, deadline: float) -> None:
        """Whether its engine lives; it answers while it loads, pauses and sleeps, too."""
        await server.call("GET", "/health", doing="look at the server", deadline=deadline)

    async def _let_go_on(self, server: ServerClient, deadline: float) -> None:
        """A run that was killed while it sent weights leaves a server paused, with layers that are half loaded."""
        answer = await self._switch(server, "/is_paused", "ask whether it is paused", deadline, method="GET")
        if isinstance(answer, dict) and answer.get("is_paused"):
            with contextlib.suppress(ServerError):  # no update is open, or it says what is missing
                await self._switch(server, "/finish_weight_update", "end an update", deadline, body={})
            await self.resume(server, deadline)

    # ---- sampling --------------------------------------------------------------------------------------------------

    async def generate(
        self, server: ServerClient, request: SampleRequest, *, model: str, ends: frozenset[int], deadline: float
    ) -> list[SampledChunk]:
        """`request.n` completions; completion i has the seed of the first plus i, which is how vLLM counts."""
        refuse_ours(request.params.extra)
        if request.media:
            return await self._with_images(server, request, model, ends, deadline)
        body = {
            "model": model,
            "prompt": request.prompt_ids,
            "return_token_ids": True,
            "add_special_tokens": False,
            **sampling_settings(request, ends),
        }
        answer = await server.ask("/v1/completions", doing="generate", deadline=deadline, body=body)
        return completions_of(server, answer)

    async def _with_images(
        self, server: ServerClient, request: SampleRequest, model: str, ends: frozenset[int], deadline: float
    ) -> list[SampledChunk]:
        try:
            body = images.body_of(request, model, ends)
            answer = await server.ask(images.ROUTE, doing="sample with images", deadline=deadline, body=body)
        except ServerRefused as refused:
            if "HTTP 404" not in refused.said and "--enable-scale-out" not in refused.said:
                raise
            hint = f"Images are sent to {images.ROUTE}: start vLLM with --enable-scale-out, 0.32 or later."
            raise ServerRefused(server.url, "sample with images", refused.said, hint) from refused
        answer, tokens = images.as_completions(server.url, answer)
        check_expanded(server.url, request, tokens)
        return completions_of(server, answer)

    # ---- training --------------------------------------------------------------------------------------------------

    async def pause(self, server: ServerClient, deadline: float) -> None:
        """Abort what is in flight and hold what comes."""
        await self._switch(server, "/pause", "pause", deadline, {"mode": "abort"})

    async def resume(self, server: ServerClient, deadline: float) -> None:
        """Go on."""
        await self._switch(server, "/resume", "resume", deadline)

    async def forget_prefixes(self, server: ServerClient, deadline: float) -> None:
        """Empty the prefix cache.

        Raises:
            ServerBusy: it is still in use.
        """
        answer = await self._switch(server, "/reset_prefix_cache", "empty the prefix cache", deadline)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise ServerBusy(server.url, "empty the prefix cache", "it says that requests still use it")

    async def write_stamp(self, server: ServerClient, stamp: str, deadline: float) -> None:
        """Set what /weight_info answers."""
        await self._note("POST", "/update_weight_version", server, deadline, {"new_version": stamp})

    async def read_stamp(self, server: ServerClient, deadline: float) -> str | None:
        """What /weight_info answers; None from releases without it."""
        answer = await self._note("GET", "/weight_info", server, deadline)
        return str(answer["weight_version"]) if isinstance(answer, dict) and "weight_version" in answer else None

    async def _note(self, method: str, path: str, server: ServerClient, deadline: float, body: Any = None) -> Any:
        doing = "note which weights it holds"
        try:
            return await server.call(method, path, doing=doing, deadline=deadline, body=body)
        except ServerRefused as error:
            if "HTTP 404" in error.said:
                return None
            raise

    async def sleep(self, server: ServerClient, level: int, deadline: float) -> None:
        """Release memory; needs a server started with --enable-sleep-mode."""
        await self._switch(server, "/sleep", "put it to sleep", deadline, {"level": str(level)})

    async def wake(self, server: ServerClient, deadline: float) -> None:
        """Take the memory back, if it sleeps."""
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
            if "HTTP 404" not in error.said:
                raise
            raise ServerRefused(server.url, doing, f"it has no route {path}", DEV_MODE) from error
