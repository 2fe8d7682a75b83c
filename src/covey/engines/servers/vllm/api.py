"""Requests of vLLM's own server: OpenAI-compatible completions with token ids, and its routes for training.

It must be started with `VLLM_SERVER_DEV_MODE=1`, which adds the routes that pause it, empty its prefix cache and load
weights; `covey vllm-serve` does so. See also: `covey.engines.servers.vllm.weights`.
"""

import base64
import contextlib
import difflib
import re
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np

from covey.core.engine import SampleRequest
from covey.core.media import unexpanded
from covey.core.records import Completion, FinishReason
from covey.core.routes import RouteShape, read_bytes
from covey.engines.servers import completions
from covey.engines.servers.errors import BadAnswer, ServerBusy, ServerError, ServerRefused, advised, same_vocabulary
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.protocols import SampledChunk, ServerFacts, SettingNames
from covey.engines.servers.vllm.launch import OLDEST
from covey.engines.servers.weights.buckets import dtype_named

# Parts of a request that users cannot set.
RESERVED = frozenset({
    "add_special_tokens", "best_of", "echo", "ignore_eos", "logprobs", "max_tokens", "model", "n", "prompt",
    "prompt_embeds", "return_token_ids", "seed", "stream", "truncate_prompt_tokens", "use_beam_search",
})  # fmt: skip
FINISHES = {"stop": FinishReason.STOP, "repetition": FinishReason.STOP, "length": FinishReason.LENGTH}
ABORTED = "abort"
IMAGE_ROUTE = "/inference/v1/generate"  # route for prompts with images, which the completions route does not take
TEXT = ("stop", "bad_words")  # settings for which vLLM has to detokenize while it samples
ROUTED = "Start it with --enable-return-routed-experts, or leave routing_replay unset."
DEV_MODE = (
    "Start it with the environment variable VLLM_SERVER_DEV_MODE=1, which adds the routes that training needs, or with"
    " `covey vllm-serve`."
)


@dataclass(kw_only=True, eq=False)
class VllmApi:
    """A `ServerApi` for vLLM's server."""

    temperature: float = 1.0  # other than 1, the server must report log-probs that include it
    extra: dict[str, Any] = field(default_factory=dict)  # settings of requests, compared with the server's schema
    vocab_size: int | None = None  # of the model that is trained; None: not compared
    routes: RouteShape | None = None  # of the model that is trained, where the experts of tokens are read

    name = "vLLM"
    settings = SettingNames(
        "vllm_server_timeout", "vllm_server_request_timeout", "vllm_server_sync_timeout", "--max-model-len"
    )

    def __post_init__(self) -> None:
        completions.refuse_reserved(self.extra, RESERVED)

    async def probe(self, server: ServerClient, deadline: float) -> ServerFacts:
        """Read the server's properties; check its release and the way it was started. See `ServerApi.probe`."""
        await self.check_alive(server, deadline)
        await check_release(server, deadline)
        await read_world_size(server, deadline)
        model = await read_model(server, deadline)
        query = {"config_format": "json"}
        info = await server.call("GET", "/server_info", "ask for its configuration", deadline, query=query)
        config = get_path(info, "vllm_config")
        refuse_chunked_prefill(server, config)
        await check_extra(server, self.extra, deadline)
        # A run that was killed while it sent weights leaves a server paused, with layers that are partly loaded.
        answer = await self._switch(server, "/is_paused", "ask whether it is paused", deadline, method="GET")
        if get_path(answer, "is_paused"):
            with contextlib.suppress(ServerError):  # no update is open, or it reports what is missing
                await server.call("POST", "/finish_weight_update", "end an update", deadline, {})
            await self.resume(server, deadline)
        name = str(model["id"])
        after_cut = await reports_after_cut(server, name, self.vocab_size, self.temperature, deadline)
        return ServerFacts(
            model=name,
            max_context=model.get("max_model_len"),
            dtype=dtype_named(get_path(config, "model_config", "dtype")),
            reports_after_cut=after_cut,
            takes_adapters=get_path(config, "lora_config") is not None,
            path=str(model.get("root") or name),
            returns_routes=self.routes is not None
            and get_path(config, "model_config", "enable_return_routed_experts") is True,
        )

    async def check_alive(self, server: ServerClient, deadline: float) -> None:
        await server.call("GET", "/health", "check its health", deadline)

    async def generate(
        self, server: ServerClient, request: SampleRequest, *, model: str, ends: frozenset[int], deadline: float
    ) -> list[SampledChunk]:
        """Sample `request.n` completions; vLLM gives completion i the seed of the first one plus i."""
        completions.refuse_reserved(request.params.extra, RESERVED)
        if request.media:
            hint = f"Images are sent to {IMAGE_ROUTE}: start vLLM with --enable-scale-out, 0.32 or later."
            with advised(hint, "HTTP 404", "--enable-scale-out"):
                body = image_request(request, model, ends)
                answer = await server.ask(IMAGE_ROUTE, "sample with images", deadline, body)
            chunks = completions_of(server, answer)
            prompt = answer.get("prompt_token_ids")
            completions.check_expanded(server.url, request, None if prompt is None else len(prompt))
            return chunks
        body = {"model": model, "prompt": request.prompt_ids, "return_token_ids": True, "add_special_tokens": False}
        body |= sampling_settings(request, ends)
        answer = await server.ask("/v1/completions", "generate", deadline, body)
        chunks = completions_of(server, answer)
        if not request.params.keep_routes or self.routes is None:
            return chunks
        return [
            chunk
            if chunk.aborted and not chunk.completion.token_ids
            else replace(
                chunk,
                completion=completions.with_routes(
                    server.url, request, chunk.completion, routed_experts(server, choice), self.routes
                ),
            )
            for chunk, choice in zip(chunks, sorted(answer["choices"], key=itemgetter("index")), strict=True)
        ]

    async def pause(self, server: ServerClient, deadline: float) -> None:
        await self._switch(server, "/pause", "pause", deadline, {"mode": "abort"})

    async def resume(self, server: ServerClient, deadline: float) -> None:
        await self._switch(server, "/resume", "resume", deadline)

    async def clear_prefix_cache(self, server: ServerClient, deadline: float) -> None:
        answer = await self._switch(server, "/reset_prefix_cache", "empty the prefix cache", deadline)
        if get_path(answer, "success") is False:
            raise ServerBusy(server.url, "empty the prefix cache", "requests still use it")

    async def sleep(self, server: ServerClient, level: int, deadline: float) -> None:
        await self._switch(server, "/sleep", "put it to sleep", deadline, {"level": str(level)})

    async def wake(self, server: ServerClient, deadline: float) -> None:
        answer = await self._switch(server, "/is_sleeping", "ask whether it sleeps", deadline, method="GET")
        if get_path(answer, "is_sleeping") is not False:
            await self._switch(server, "/wake_up", "wake it", deadline)

    async def _switch(
        self, server: ServerClient, path: str, doing: str, deadline: float, query: Any = None, method: str = "POST"
    ) -> Any:
        with advised(DEV_MODE, "HTTP 404", message=f"it has no route {path}"):
            return await server.call(method, path, doing, deadline, query=query)


def sampling_settings(request: SampleRequest, ends: frozenset[int]) -> dict[str, Any]:
    """All sampling settings, with the seed of the first completion; `params.extra` takes precedence."""
    params = request.params
    return {
        "n": request.n,
        "seed": request.seeds[0] % 2**62,
        "max_tokens": params.max_tokens,
        "top_k": params.top_k,
        "ignore_eos": True,  # only `stop_token_ids` end a completion, not the model's own token
        "logprobs": 0,
        "skip_special_tokens": False,  # or such tokens would not be found as texts that stop
        **completions.common_settings(params, ends),
        **params.extra,
        "stop_token_ids": sorted({*ends, *(params.extra.get("stop_token_ids") or ())}),
    }


def completions_of(server: ServerClient, answer: dict[str, Any]) -> list[SampledChunk]:
    choices = answer.get("choices")
    if not isinstance(choices, list):
        raise BadAnswer(server.url, "generate", f"it answered {answer!r:.200} where choices belong")
    try:
        return [_sampled(server, choice) for choice in sorted(choices, key=lambda choice: choice["index"])]
    except (KeyError, TypeError, AttributeError) as error:
        message = f"a choice of its answer is incomplete ({type(error).__name__}: {error}): {choices!r:.300}"
        raise BadAnswer(server.url, "generate", message) from error


def _sampled(server: ServerClient, choice: dict[str, Any]) -> SampledChunk:
    tokens, logprobs, finish = choice.get("token_ids"), choice.get("logprobs"), choice["finish_reason"]
    if tokens is None and finish != ABORTED:
        hint = "Update the server: token ids come with recent releases of vLLM."
        raise BadAnswer(server.url, "generate", "it returns no token ids although return_token_ids was set", hint)
    if finish not in FINISHES and finish != ABORTED:
        raise ServerError(server.url, "generate", f"a completion ended with finish_reason={finish!r}")
    tokens = list(tokens or [])
    reported = None
    if not tokens:
        reported = []
    elif logprobs is not None and "content" in logprobs:  # the form of `IMAGE_ROUTE`
        reported = [entry["logprob"] for entry in logprobs["content"] or []]
    elif logprobs is not None:
        reported = list(logprobs["token_logprobs"])
    completion = Completion(tokens, reported, FINISHES.get(finish, FinishReason.LENGTH))
    return SampledChunk(completion, aborted=finish == ABORTED)


def routed_experts(server: ServerClient, choice: dict[str, Any]) -> np.ndarray:
    """Experts [tokens, layers, k] of prompt and sampled tokens; a choice has them as a NumPy file in base64."""
    try:
        return read_bytes(base64.b64decode(str(choice.get("routed_experts")), validate=True))
    except (TypeError, ValueError) as error:
        message = f"`routed_experts` of its answer cannot be read ({error})"
        raise BadAnswer(server.url, "generate", message, ROUTED) from error


def image_request(request: SampleRequest, model: str, ends: frozenset[int]) -> dict[str, Any]:
    settings = sampling_settings(request, ends)
    return {
        "model": model,
        "token_ids": unexpanded(request.prompt_ids, request.media),
        "content_parts": [{"type": "image_url", "url": url} for url in completions.sent_images(request)],
        "return_token_ids": True,
        "sampling_params": {"detokenize": any(name in settings for name in TEXT), **settings},
    }


async def check_release(server: ServerClient, deadline: float) -> None:
    """Raise ServerRefused for a server that is too old, or is not vLLM's own."""
    doing = "find out which vLLM this is"
    hint = "Is it vLLM's own server (`covey vllm-serve` or `vllm serve`) that listens there?"
    try:
        answer = await server.call("GET", "/version", doing, deadline)
    except ServerRefused as error:
        raise error if "API key" in str(error) else ServerRefused(server.url, doing, error.message, hint) from error
    release = get_path(answer, "version")
    if not isinstance(release, str):
        raise ServerRefused(server.url, doing, f"/version answered {answer!r:.100}", hint)
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if numbers and tuple(map(int, numbers.groups())) < OLDEST:
        message = f"it runs vLLM {release}, and {'.'.join(map(str, OLDEST))} is the oldest that is supported"
        raise ServerRefused(server.url, "train with this server", message, "Update it: pip install -U vllm.")


async def read_world_size(server: ServerClient, deadline: float, doing: str = "ask for its number of processes") -> int:
    """Number of processes that hold weights; ServerRefused if the server lacks the routes for training."""
    with advised(DEV_MODE, "HTTP 404", message="it was started without them", doing="use the routes for training"):
        answer = await server.call("GET", "/get_world_size", doing, deadline)
    size = get_path(answer, "world_size")
    if not isinstance(size, int) or size < 1:
        raise BadAnswer(server.url, doing, f"/get_world_size answered {answer!r:.100}")
    return size


async def read_model(server: ServerClient, deadline: float) -> dict[str, Any]:
    doing = "ask for its model"
    answer = await server.call("GET", "/v1/models", doing, deadline)
    base = [model for model in get_path(answer, "data") or [] if get_path(model, "id")]
    base = [model for model in base if not model.get("parent")] or base  # adapters have a parent
    if not base:
        raise BadAnswer(server.url, doing, f"it answered {answer!r:.200}")
    return base[0]


async def check_extra(server: ServerClient, extra: dict[str, Any], deadline: float) -> None:
    """Look up the names in the server's schema, because it ignores unknown settings; ServerRefused for one it lacks."""
    if not extra:
        return
    try:
        schema = await server.call("GET", "/openapi.json", "read its schema", deadline)
    except ServerRefused:
        return  # it was started with --disable-fastapi-docs
    known = get_path(schema, "components", "schemas", "CompletionRequest", "properties")
    for name in extra if isinstance(known, dict) else ():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            message = f"this vLLM does not know it{f', but {close[0]!r}' if close else ''}"
            hint = "Take it out of generation_kwargs, or write it as vLLM's completions API does."
            raise ServerRefused(server.url, f"sample with generation_kwargs {name!r}", message, hint)


async def reports_after_cut(
    server: ServerClient, model: str, vocab_size: int | None, temperature: float, deadline: float
) -> bool:
    """True if the server's log-probs are taken after cuts: then a token sampled with top_k=1 has log-prob 0."""
    token = 0 if vocab_size is None else vocab_size - 1
    body = {
        "model": model, "prompt": [token], "max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0,
        "return_token_ids": True, "ignore_eos": True,
    }  # fmt: skip
    doing = "sample a token"
    with same_vocabulary(token):
        answer = await server.ask("/v1/completions", doing, deadline, body)
    [sampled] = completions_of(server, answer)
    reported = sampled.completion.logprobs
    if not reported:
        raise BadAnswer(server.url, doing, "it reports no log-probs for what it samples")
    mode = "raw_logprobs" if temperature == 1.0 else "processed_logprobs"
    hint = f"Start it with --logprobs-mode {mode} (`covey vllm-serve` does so), or sample at temperature 1."
    if reported[0] > 1e-3:
        raise ServerRefused(server.url, doing, f"it reports logits ({reported[0]:.3g}), no log-probs", hint)
    after_cut = reported[0] > -1e-6
    if not after_cut and temperature != 1.0:
        raise ServerRefused(server.url, f"sample at temperature {temperature:g}", completions.BEFORE_TEMPERATURE, hint)
    return after_cut


def refuse_chunked_prefill(server: ServerClient, config: Any) -> None:
    """Raise ServerRefused for chunked prefill on a CPU, where vLLM's engine (0.32) crashes if a request has a seed."""
    on_cpu = str(get_path(config, "device_config", "device")) == "cpu"
    if on_cpu and get_path(config, "scheduler_config", "enable_chunked_prefill"):
        message = "it runs on a CPU and computes prompts in pieces, which would end it"
        hint = "Start it with --no-enable-chunked-prefill, or with `covey vllm-serve`."
        raise ServerRefused(server.url, "sample with seeds", message, hint)


def get_path(record: Any, *path: str) -> Any:
    """Value in nested JSON objects; None if a name is missing, or a value on the way is not an object."""
    for name in path:
        record = record.get(name) if isinstance(record, dict) else None
    return record
