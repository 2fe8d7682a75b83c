"""How vLLM's own server is spoken to: its OpenAI-compatible completions with token ids, and its routes for training.

It must be started with `VLLM_SERVER_DEV_MODE=1`, which is what adds the routes that pause it, empty its prefix cache
and take weights; `covey vllm-serve` does so. Not here: how weights travel, which is the transports'.
"""

import contextlib
import difflib
import re
from typing import Any

import torch

from covey.core.rollout import Completion, FinishReason
from covey.rollout.engine import SampleRequest
from covey.rollout.engines.remote import vllm_images
from covey.rollout.engines.remote.dialect import Sampled, ServerFacts, SettingNames
from covey.rollout.engines.remote.errors import BadAnswer, ServerBusy, ServerError, ServerRefused
from covey.rollout.engines.remote.pictures import check_expanded
from covey.rollout.engines.remote.server import Server
from covey.rollout.engines.remote.vllm_flags import OLDEST
from covey.rollout.engines.remote.vllm_sampling import sampling_settings

DEV_MODE = (
    "Start it with the environment variable VLLM_SERVER_DEV_MODE=1, which adds the routes that training needs, or with"
    " `covey vllm-serve`."
)

OURS = frozenset(
    {
        "add_special_tokens",
        "best_of",
        "echo",
        "ignore_eos",
        "logprobs",
        "max_tokens",
        "model",
        "n",
        "prompt",
        "prompt_embeds",
        "return_token_ids",
        "seed",
        "stream",
        "truncate_prompt_tokens",
        "use_beam_search",
    }
)
"""Parts of a request that are not the user's to set."""

FINISHES = {"stop": FinishReason.STOP, "repetition": FinishReason.STOP, "length": FinishReason.LENGTH}

ABORTED = "abort"


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

    async def look(self, server: Server, deadline: float) -> ServerFacts:
        """Whether the server is up, of a release and started in a way that training can use.

        Raises:
            ServerRefused: it is not; the message names the option to start it with.
        """
        await self.alive(server, deadline)
        release = await self._release(server, deadline)
        world_size = await self._world_size(server, deadline)
        model = await self._model(server, deadline)
        config = await self._config(server, deadline)
        refuse_pieces(server, config)
        await self._check_extra(server, deadline)
        await self._let_go_on(server, deadline)
        after_cut = await self._probe(server, str(model["id"]), deadline)
        return ServerFacts(
            model=str(model["id"]),
            release=release,
            max_context=model.get("max_model_len"),
            world_size=world_size,
            dtype=as_dtype(_within(config, "model_config", "dtype")),
            reports_after_cut=after_cut,
            reports_temperature=after_cut,
            sleeps=bool(_within(config, "model_config", "enable_sleep_mode")),
            takes_adapters=_within(config, "lora_config") is not None,
            path=str(model.get("root") or model["id"]),
        )

    async def alive(self, server: Server, deadline: float) -> None:
        """Whether its engine lives; it answers while it loads, pauses and sleeps, too."""
        await server.call("GET", "/health", doing="look at the server", deadline=deadline)

    async def _release(self, server: Server, deadline: float) -> str:
        doing = "find out which vLLM this is"
        try:
            answer = await server.call("GET", "/version", doing=doing, deadline=deadline)
        except ServerRefused as error:
            hint = "Is it vLLM's own server (`covey vllm-serve` or `vllm serve`) that listens there?"
            raise error if "API key" in str(error) else ServerRefused(server.url, doing, error.said, hint) from error
        release = answer.get("version") if isinstance(answer, dict) else None
        if not isinstance(release, str):
            raise ServerRefused(
                server.url, doing, f"/version answered {answer!r:.100}", "Is it vLLM's own server that listens there?"
            )
        numbers = re.match(r"(\d+)\.(\d+)", release)
        if numbers and tuple(map(int, numbers.groups())) < OLDEST:
            raise ServerRefused(
                server.url,
                "train with this server",
                f"it runs vLLM {release}, and {'.'.join(map(str, OLDEST))} is the oldest that is supported",
                "Update it: pip install -U vllm.",
            )
        return release

    async def _world_size(self, server: Server, deadline: float) -> int:
        doing = "ask for its number of processes"
        try:
            answer = await server.call("GET", "/get_world_size", doing=doing, deadline=deadline)
        except ServerRefused as error:
            if "HTTP 404" not in error.said:
                raise
            raise ServerRefused(
                server.url, "use the routes for training", "it was started without them", DEV_MODE
            ) from error
        size = answer.get("world_size") if isinstance(answer, dict) else None
        if not isinstance(size, int):
            raise BadAnswer(server.url, doing, f"it answered {answer!r:.100}")
        return size

    async def _model(self, server: Server, deadline: float) -> dict[str, Any]:
        doing = "ask for its model"
        answer = await server.call("GET", "/v1/models", doing=doing, deadline=deadline)
        models = answer.get("data") if isinstance(answer, dict) else None
        base = [model for model in models or [] if isinstance(model, dict) and model.get("id")]
        base = [model for model in base if not model.get("parent")] or base  # adapters have one
        if not base:
            raise BadAnswer(server.url, doing, f"it answered {answer!r:.200}")
        return base[0]

    async def _config(self, server: Server, deadline: float) -> dict[str, Any]:
        answer = await server.call(
            "GET",
            "/server_info",
            doing="ask for its configuration",
            deadline=deadline,
            query={"config_format": "json"},
        )
        config = answer.get("vllm_config") if isinstance(answer, dict) else None
        return config if isinstance(config, dict) else {}

    async def _check_extra(self, server: Server, deadline: float) -> None:
        """The server ignores what it does not know, so names are looked up in its own description of a request."""
        if not self._extra:
            return
        try:
            schema = await server.call("GET", "/openapi.json", doing="ask what it knows", deadline=deadline)
        except ServerRefused:
            return  # it was started with --disable-fastapi-docs
        known = _within(schema, "components", "schemas", "CompletionRequest", "properties")
        for name in self._extra if isinstance(known, dict) else ():
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                raise ServerRefused(
                    server.url,
                    f"sample with generation_kwargs {name!r}",
                    f"this vLLM does not know it{f', but {close[0]!r}' if close else ''}",
                    "Take it out of generation_kwargs, or write it as vLLM's completions API does.",
                )

    async def _let_go_on(self, server: Server, deadline: float) -> None:
        """A run that was killed while it sent weights leaves a server paused, with layers that are half loaded."""
        answer = await self._switch(server, "/is_paused", "ask whether it is paused", deadline, method="GET")
        if isinstance(answer, dict) and answer.get("is_paused"):
            with contextlib.suppress(ServerError):  # no update is open, or it says what is missing
                await self._switch(server, "/finish_weight_update", "end an update", deadline, body={})
            await self.resume(server, deadline)

    async def _probe(self, server: Server, model: str, deadline: float) -> bool:
        """Sample one token to see what log-probs mean here: whether those of a cut distribution are reported.

        With top_k=1 one token is left. Its log-prob is 0 after the cut and below 0 before it.
        """
        token = 0 if self._vocab_size is None else self._vocab_size - 1
        body = {
            "model": model, "prompt": [token], "max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0,
            "return_token_ids": True, "ignore_eos": True,
        }  # fmt: skip
        doing = "sample a token"
        try:
            answer = await server.ask("/v1/completions", doing=doing, deadline=deadline, body=body)
        except ServerRefused as error:
            if "vocabulary" not in error.said:
                raise
            said = f"its vocabulary lacks token {token} of the model that is trained ({error.said})"
            raise ServerRefused(
                server.url, "sample for this run", said, "Start the server with the model that is trained."
            ) from error
        [sampled] = completions_of(server, answer)
        reported = sampled.completion.logprobs
        if not reported:
            raise BadAnswer(server.url, doing, "it reports no log-probs for what it samples")
        if reported[0] > 1e-3:
            raise ServerRefused(
                server.url, doing, f"it reports logits ({reported[0]:.3g}), no log-probs", _modes(self._temperature)
            )
        after_cut = reported[0] > -1e-6
        if not after_cut and self._temperature != 1.0:
            raise ServerRefused(
                server.url,
                f"sample at temperature {self._temperature:g}",
                "it reports log-probs from before the temperature divides the logits, which cannot be compared with"
                " the trainer's",
                _modes(self._temperature),
            )
        return after_cut

    # ---- sampling --------------------------------------------------------------------------------------------------

    async def generate(
        self, server: Server, request: SampleRequest, *, model: str, ends: frozenset[int], deadline: float
    ) -> list[Sampled]:
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
        self, server: Server, request: SampleRequest, model: str, ends: frozenset[int], deadline: float
    ) -> list[Sampled]:
        try:
            body = vllm_images.body_of(request, model, ends)
            answer = await server.ask(vllm_images.ROUTE, doing="sample with images", deadline=deadline, body=body)
        except ServerRefused as refused:
            if "HTTP 404" not in refused.said and "--enable-scale-out" not in refused.said:
                raise
            hint = f"Images are sent to {vllm_images.ROUTE}: start vLLM with --enable-scale-out, 0.32 or later."
            raise ServerRefused(server.url, "sample with images", refused.said, hint) from refused
        answer, tokens = vllm_images.as_completions(server.url, answer)
        check_expanded(server.url, request, tokens)
        return completions_of(server, answer)

    # ---- training --------------------------------------------------------------------------------------------------

    async def pause(self, server: Server, deadline: float) -> None:
        """Abort what is in flight and hold what comes."""
        await self._switch(server, "/pause", "pause", deadline, {"mode": "abort"})

    async def resume(self, server: Server, deadline: float) -> None:
        """Go on."""
        await self._switch(server, "/resume", "resume", deadline)

    async def forget_prefixes(self, server: Server, deadline: float) -> None:
        """Empty the prefix cache.

        Raises:
            ServerBusy: it is still in use.
        """
        answer = await self._switch(server, "/reset_prefix_cache", "empty the prefix cache", deadline)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise ServerBusy(server.url, "empty the prefix cache", "it says that requests still use it")

    async def write_stamp(self, server: Server, stamp: str, deadline: float) -> None:
        """Set what /weight_info answers."""
        await self._note("POST", "/update_weight_version", server, deadline, {"new_version": stamp})

    async def read_stamp(self, server: Server, deadline: float) -> str | None:
        """What /weight_info answers; None from releases without it."""
        answer = await self._note("GET", "/weight_info", server, deadline)
        return str(answer["weight_version"]) if isinstance(answer, dict) and "weight_version" in answer else None

    async def _note(self, method: str, path: str, server: Server, deadline: float, body: Any = None) -> Any:
        doing = "note which weights it holds"
        try:
            return await server.call(method, path, doing=doing, deadline=deadline, body=body)
        except ServerRefused as error:
            if "HTTP 404" in error.said:
                return None
            raise

    async def sleep(self, server: Server, level: int, deadline: float) -> None:
        """Release memory; needs a server started with --enable-sleep-mode."""
        await self._switch(server, "/sleep", "put it to sleep", deadline, {"level": str(level)})

    async def wake(self, server: Server, deadline: float) -> None:
        """Take the memory back, if it sleeps."""
        answer = await self._switch(server, "/is_sleeping", "ask whether it sleeps", deadline, method="GET")
        if not isinstance(answer, dict) or answer.get("is_sleeping", True):
            await self._switch(server, "/wake_up", "wake it", deadline)

    async def _switch(
        self,
        server: Server,
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


# ---- reading answers -------------------------------------------------------------------------------------------------


def completions_of(server: Server, answer: dict[str, Any]) -> list[Sampled]:
    """The choices of a completions answer, in order.

    Raises:
        BadAnswer: one is incomplete.
        ServerError: the engine behind the server failed.
    """
    choices = answer.get("choices")
    if not isinstance(choices, list):
        raise BadAnswer(server.url, "generate", f"it answered {answer!r:.200} where choices belong")
    try:
        return [_sampled(server, choice) for choice in sorted(choices, key=lambda choice: choice["index"])]
    except (KeyError, TypeError, AttributeError) as error:
        said = f"a choice of its answer is incomplete ({type(error).__name__}: {error}): {choices!r:.300}"
        raise BadAnswer(server.url, "generate", said) from error


def _sampled(server: Server, choice: dict[str, Any]) -> Sampled:
    tokens, logprobs, finish = choice.get("token_ids"), choice.get("logprobs"), choice["finish_reason"]
    if tokens is None and finish != ABORTED:
        hint = "Update the server: token ids come with recent releases of vLLM."
        raise BadAnswer(server.url, "generate", "it returns no token ids although return_token_ids was set", hint)
    if finish not in FINISHES and finish != ABORTED:
        raise ServerError(server.url, "generate", f"a completion ended with finish_reason={finish!r}")
    tokens = list(tokens or [])
    reported = None if logprobs is None else list(logprobs["token_logprobs"])
    if not tokens:
        reported = []
    completion = Completion(tokens, reported, FINISHES.get(finish, FinishReason.LENGTH))
    return Sampled(completion, aborted=finish == ABORTED)


def refuse_pieces(server: Server, config: dict[str, Any]) -> None:
    """A prompt with a seed that is computed in pieces ends vLLM's engine for CPUs (0.32): it turns its generator back.

    Raises:
        ServerRefused: the server is one for CPUs that computes prompts in pieces.
    """
    on_cpu = str(_within(config, "device_config", "device")) == "cpu"
    if on_cpu and _within(config, "scheduler_config", "enable_chunked_prefill"):
        raise ServerRefused(
            server.url,
            "sample with seeds",
            "it runs on a CPU and computes prompts in pieces, which would end it",
            "Start it with --no-enable-chunked-prefill, or with `covey vllm-serve`.",
        )


def refuse_ours(extra: dict[str, Any]) -> None:
    """Settings that requests decide themselves.

    Raises:
        ValueError: `extra` holds one.
    """
    if taken := sorted(OURS & extra.keys()):
        raise ValueError(
            f"generation_kwargs={dict.fromkeys(taken, '...')} would break how completions are asked for: leave out"
            f" {', '.join(taken)}."
        )


def as_dtype(name: Any) -> torch.dtype | None:
    """The type named "torch.bfloat16" or "bfloat16"."""
    found = getattr(torch, str(name).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None


def _within(record: Any, *path: str) -> Any:
    """What stands at `path` in nested dictionaries, or None."""
    for name in path:
        record = record.get(name) if isinstance(record, dict) else None
    return record


def _modes(temperature: float) -> str:
    mode = "raw_logprobs" if temperature == 1.0 else "processed_logprobs"
    return f"Start it with --logprobs-mode {mode} (`covey vllm-serve` does so), or sample at temperature 1."
