"""Requests of SGLang's own server: `/generate` with token ids, and its routes for training, as of release 0.5.23.

- Log-probs are taken at the sampling temperature, before top-k, top-p and min-p, after penalties and grammars. With
  SGLANG_RETURN_ORIGINAL_LOGPROB=1 in its environment, a server leaves out the temperature.
- Seeds have an effect only with `--enable-deterministic-inference`; otherwise the server draws its own random numbers.
- The health check of a paused server does not answer. A failed assertion ends the server, as when it is woken twice.
"""

import asyncio
import base64
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from covey.core.engine import SampleRequest, SamplingParams
from covey.core.media import unexpanded
from covey.core.records import Completion, FinishReason
from covey.core.routes import RouteShape
from covey.engines.servers import completions
from covey.engines.servers.errors import BadAnswer, DeadlineExceeded, ServerRefused, advised, same_vocabulary
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.protocols import ADAPTER_PREFIX, SampledChunk, ServerFacts, SettingNames
from covey.engines.servers.weights.buckets import dtype_named

# Sampling parameters that users cannot set.
RESERVED = frozenset(
    {"max_new_tokens", "n", "sampling_seed", "stop_token_ids", "ignore_eos", "beam_width", "stream_interval"}
)
ROUTED = "Start it with --enable-return-routed-experts, or leave routing_replay unset."
FLUSH_SECONDS = 5.0  # that one attempt to empty the cache waits for the last requests to end


@dataclass(kw_only=True, eq=False)
class SglangApi:
    """A `ServerApi` for SGLang's server."""

    temperature: float = 1.0  # other than 1, the server must report log-probs that include it
    extra: dict[str, Any] = field(default_factory=dict)  # settings of requests beyond those of `SamplingParams`
    vocab_size: int | None = None  # of the model that is trained; None: not compared
    routes: RouteShape | None = None  # of the model that is trained, where the experts of tokens are read

    name = "SGLang"
    settings = SettingNames(
        "sglang_server_timeout", "sglang_request_timeout", "sglang_sync_timeout", "--context-length"
    )

    def __post_init__(self) -> None:
        self._released: dict[str, list[str]] = {}
        completions.refuse_reserved(self.extra, RESERVED)

    async def probe(self, server: ServerClient, deadline: float) -> ServerFacts:
        """Read the server's properties, and resume it if it was left paused; see `ServerApi.probe`."""
        model = await model_info(server, deadline)
        info = await server_info(server, deadline)
        await self.resume(server, deadline)  # paused, it would fail its health check
        await server.call("GET", "/health", "check its health", deadline)
        await self._check_logprobs(server, deadline)
        facts = facts_of(model, info)
        return replace(facts, returns_routes=facts.returns_routes and self.routes is not None)

    async def check_alive(self, server: ServerClient, deadline: float) -> None:
        """Check that it responds, by a route that also works while it is paused, unlike its health check."""
        await model_info(server, deadline)

    async def _check_logprobs(self, server: ServerClient, deadline: float) -> None:
        """Sample single tokens to compare the vocabularies, and to check that log-probs include the temperature."""
        last = 0 if self.vocab_size is None else self.vocab_size - 1
        with same_vocabulary(last):  # `last` is only scored: as part of a prompt, an unknown token ends the server
            await self._token(server, 0, 0.0, last, deadline)
        if self.temperature == 1.0 or not last:
            return
        # Not after token 0, which often is padding: all tokens may be equally likely after it.
        greedy, _ = await self._token(server, last // 2, 0.0, last, deadline)
        (likeliest,), (cold,) = greedy.completion.token_ids, greedy.completion.logprobs or [0.0]
        _, warm = await self._token(server, last // 2, 2.0, likeliest, deadline)
        if abs(warm - cold) <= 1e-4 and cold <= -1e-3:  # nothing can be seen from a token that is certain
            hint = "Start it without SGLANG_RETURN_ORIGINAL_LOGPROB, or sample at temperature 1."
            doing = f"sample at temperature {self.temperature:g}"
            raise ServerRefused(server.url, doing, completions.BEFORE_TEMPERATURE, hint)

    async def _token(
        self, server: ServerClient, after: int, temperature: float, scored: int, deadline: float
    ) -> tuple[SampledChunk, float]:
        """Sample one token after the prompt `after`; also returns the log-prob of the token `scored` there."""
        doing = "sample a token"
        body = {
            "input_ids": [[after]],
            "sampling_params": [{**self.extra, "max_new_tokens": 1, "temperature": temperature}],
            "return_logprob": True,
            "token_ids_logprob": [[scored]],
        }
        answer = await server.call("POST", "/generate", doing, deadline, body)
        [sampled] = completions_of(server, answer, 1, doing)
        try:
            return sampled, float(answer[0]["meta_info"]["output_token_ids_logprobs"][0][0][0])
        except (LookupError, TypeError, ValueError) as error:
            raise BadAnswer(server.url, doing, f"it does not report how likely token {scored} was") from error

    async def generate(
        self, server: ServerClient, request: SampleRequest, *, model: str, ends: frozenset[int], deadline: float
    ) -> list[SampledChunk]:
        """Sample `request.n` completions in one request; one that ends with a token not in `ends` is unfinished."""
        body: dict[str, Any] = {
            "input_ids": [unexpanded(request.prompt_ids, request.media)] * request.n,
            "sampling_params": [sampling_params(request.params, seed, ends) for seed in request.seeds],
            "return_logprob": True,
        }
        if model.startswith(ADAPTER_PREFIX):
            body["lora_path"] = [model] * request.n
        keeps_routes = request.params.keep_routes and self.routes is not None
        if keeps_routes:
            body["return_routed_experts"] = True
        if request.media:
            body["image_data"] = [completions.sent_images(request)] * request.n
        answer = await server.call("POST", "/generate", "generate", deadline, body)
        chunks = completions_of(server, answer, request.n, "generate")
        if request.media:
            completions.check_expanded(server.url, request, answer[0]["meta_info"].get("prompt_tokens"))
        if keeps_routes:
            chunks = [self._routed(server, request, *pair) for pair in zip(chunks, answer, strict=True)]
        if any(name in request.params.extra for name in completions.STOPS):
            return chunks
        # The server also ends at the end tokens of the model's files: `ignore_eos` would make it ignore `ends` as well.
        return [replace(chunk, unfinished=_ends_elsewhere(chunk.completion, ends)) for chunk in chunks]

    def _routed(self, server: ServerClient, request: SampleRequest, chunk: SampledChunk, answer: Any) -> SampledChunk:
        """The chunk with the experts of its tokens, which the server sends as flat int32 numbers in base64."""
        if chunk.aborted and not chunk.completion.token_ids:
            return chunk
        assert self.routes is not None, "asked for"
        layers, given = self.routes.hidden_layers, answer["meta_info"].get("routed_experts")
        try:
            ids = np.frombuffer(base64.b64decode(given, validate=True), dtype=np.int32)
            ids = ids.reshape(-1, layers, self.routes.top_k)
        except (TypeError, ValueError) as error:
            message = f"`routed_experts` of its answer cannot be read ({error})"
            raise BadAnswer(server.url, "generate", message, ROUTED) from error
        completion = completions.with_routes(server.url, request, chunk.completion, ids, self.routes)
        return replace(chunk, completion=completion)

    async def pause(self, server: ServerClient, deadline: float) -> None:
        await server.call("POST", "/pause_generation", "pause", deadline, {"mode": "abort"})

    async def resume(self, server: ServerClient, deadline: float) -> None:
        await server.call("POST", "/continue_generation", "resume", deadline, {})

    async def clear_prefix_cache(self, server: ServerClient, deadline: float) -> None:
        """Empty the prefix cache; retries while requests use it, and raises the server's last refusal in the end."""
        doing, until = "empty the prefix cache", time.monotonic() + deadline
        refused: ServerRefused | None = None
        while True:
            left = max(until - time.monotonic(), 0.01)
            wait = min(FLUSH_SECONDS, left / 2)
            try:
                query = {"timeout": f"{wait:.3f}"}
                await server.call("POST", "/flush_cache", doing=doing, deadline=left, query=query)
                return
            except ServerRefused as error:
                if "HTTP 400" not in error.message or time.monotonic() + wait >= until:
                    raise
                refused = error
            except DeadlineExceeded as late:
                raise refused or late from None
            await asyncio.sleep(min(0.1, wait))

    async def sleep(self, server: ServerClient, level: int, deadline: float) -> None:
        """Release memory; weights too at level 2, or if the server keeps a copy of them in host memory."""
        if server.url in self._released:
            return
        info = await server_info(server, deadline)
        if not info.get("enable_memory_saver"):
            hint = "Start it with --enable-memory-saver."
            raise ServerRefused(server.url, "put it to sleep", "it was started without", hint)
        weights = level > 1 or bool(info.get("enable_weights_cpu_backup"))
        tags = ["kv_cache", "cuda_graph", *(["weights"] if weights else [])]
        await self.pause(server, deadline)
        await self.clear_prefix_cache(server, deadline)
        await server.call("POST", "/release_memory_occupation", "put it to sleep", deadline, {"tags": tags})
        self._released[server.url] = tags

    async def wake(self, server: ServerClient, deadline: float) -> None:
        tags = self._released.get(server.url)
        if tags is not None:
            await server.call("POST", "/resume_memory_occupation", "wake it", deadline, {"tags": tags})
            del self._released[server.url]
        await self.resume(server, deadline)


def sampling_params(params: SamplingParams, seed: int, ends: frozenset[int]) -> dict[str, Any]:
    return {
        "max_new_tokens": params.max_tokens,
        "sampling_seed": seed if seed < 1 << 63 else seed - (1 << 64),
        "top_k": params.top_k or -1,
        **completions.common_settings(params, ends),
        "skip_special_tokens": False,
        **params.extra,
    }


def _ends_elsewhere(completion: Completion, ends: frozenset[int]) -> bool:
    return completion.finish is FinishReason.STOP and ends.isdisjoint(completion.token_ids[-1:])


def completions_of(server: ServerClient, answer: Any, n: int, doing: str) -> list[SampledChunk]:
    if not isinstance(answer, list) or len(answer) != n:
        raise BadAnswer(server.url, doing, f"it returned {answer!r:.200} instead of {n} completions")
    try:
        return [chunk_of(item) for item in answer]
    except ValueError as error:
        raise BadAnswer(server.url, doing, str(error)) from error


def chunk_of(answer: Any) -> SampledChunk:
    """The completion in an answer of `/generate`; ValueError if tokens or log-probs are missing or do not match."""
    meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
    if not isinstance(meta, Mapping):
        raise ValueError(f"it returned {answer!r:.200} instead of a completion with `meta_info`")
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, Mapping) else reason
    if kind not in ("stop", "length", "abort"):
        raise ValueError(f"a completion ended with {reason!r:.100}, and stop, length and abort are known")
    tokens, triples = answer.get("output_ids"), meta.get("output_token_logprobs") or []
    if not isinstance(tokens, list) or not all(isinstance(triple, list) and len(triple) > 1 for triple in triples):
        raise ValueError(f"it returned {answer!r:.200}, without readable `output_ids` and log-probs")
    if kind == "abort":  # it may end after a token and before its log-prob; such a token is dropped and sampled again
        count = min(len(tokens), len(triples))
        tokens, triples = tokens[:count], triples[:count]
    if [token for _, token, *_ in triples] != tokens:
        raise ValueError(f"it returned {len(triples)} log-probs for {len(tokens)} tokens, or log-probs of other tokens")
    finish = FinishReason.STOP if kind == "stop" else FinishReason.LENGTH
    return SampledChunk(Completion(tokens, [logprob for logprob, *_ in triples], finish), aborted=kind == "abort")


def facts_of(model: Mapping[str, Any], info: Mapping[str, Any]) -> ServerFacts:
    limits = [info.get("context_length") or info.get("max_req_input_len"), info.get("max_total_num_tokens")]
    return ServerFacts(
        model=str(model.get("served_model_name") or model["model_path"]),
        max_context=min((int(limit) for limit in limits if limit), default=None),
        dtype=dtype_named(info.get("dtype")),
        takes_adapters=bool(info.get("enable_lora")),
        returns_routes=bool(info.get("enable_return_routed_experts")),
        path=str(model["model_path"]),
    )


async def model_info(server: ServerClient, deadline: float) -> dict[str, Any]:
    answer = await _properties(server, "/model_info", deadline)
    if not isinstance(answer.get("model_path"), str):
        raise BadAnswer(server.url, "read its properties", "it names no model_path", "Is it SGLang's own server?")
    return answer


async def server_info(server: ServerClient, deadline: float) -> dict[str, Any]:
    return await _properties(server, "/server_info", deadline)


async def _properties(server: ServerClient, path: str, deadline: float) -> dict[str, Any]:
    doing, hint = "read its properties", "Is it SGLang's own server (`covey sglang-serve`) that listens there?"
    with advised(hint, "HTTP 404"):
        answer = await server.call("GET", path, doing, deadline)
    if not isinstance(answer, dict):
        raise BadAnswer(server.url, doing, f"{path} answered {answer!r:.100}", hint)
    return answer
