"""Properties of a vLLM server: release, model, configuration and log-probs, each with the check that a run needs."""

import difflib
import re
from typing import Any

import torch

from covey.engines.servers.errors import BadAnswer, ServerRefused, same_vocabulary
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.vllm.launch import OLDEST
from covey.engines.servers.vllm.sampling import completions_of

DEV_MODE = (
    "Start it with the environment variable VLLM_SERVER_DEV_MODE=1, which adds the routes that training needs, or with"
    " `covey vllm-serve`."
)


async def read_release(server: ServerClient, deadline: float) -> str:
    """Version of vLLM; a server that is too old is refused."""
    doing = "find out which vLLM this is"
    try:
        answer = await server.call("GET", "/version", doing=doing, deadline=deadline)
    except ServerRefused as error:
        hint = "Is it vLLM's own server (`covey vllm-serve` or `vllm serve`) that listens there?"
        raise error if "API key" in str(error) else ServerRefused(server.url, doing, error.message, hint) from error
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


async def read_world_size(server: ServerClient, deadline: float) -> int:
    """Number of processes that hold weights; a server without the routes for training is refused."""
    doing = "ask for its number of processes"
    try:
        answer = await server.call("GET", "/get_world_size", doing=doing, deadline=deadline)
    except ServerRefused as error:
        if "HTTP 404" not in error.message:
            raise
        raise ServerRefused(
            server.url, "use the routes for training", "it was started without them", DEV_MODE
        ) from error
    size = answer.get("world_size") if isinstance(answer, dict) else None
    if not isinstance(size, int):
        raise BadAnswer(server.url, doing, f"it answered {answer!r:.100}")
    return size


async def read_model(server: ServerClient, deadline: float) -> dict[str, Any]:
    """Description of the base model."""
    doing = "ask for its model"
    answer = await server.call("GET", "/v1/models", doing=doing, deadline=deadline)
    models = answer.get("data") if isinstance(answer, dict) else None
    base = [model for model in models or [] if isinstance(model, dict) and model.get("id")]
    base = [model for model in base if not model.get("parent")] or base  # adapters have a parent
    if not base:
        raise BadAnswer(server.url, doing, f"it answered {answer!r:.200}")
    return base[0]


async def read_config(server: ServerClient, deadline: float) -> dict[str, Any]:
    """Configuration that it was started with; empty where it does not report one."""
    answer = await server.call(
        "GET",
        "/server_info",
        doing="ask for its configuration",
        deadline=deadline,
        query={"config_format": "json"},
    )
    config = answer.get("vllm_config") if isinstance(answer, dict) else None
    return config if isinstance(config, dict) else {}


async def check_extra(server: ServerClient, extra: dict[str, Any], deadline: float) -> None:
    """Look up names in the server's own schema, since it ignores unknown ones.

    Raises:
        ServerRefused: it does not know one.
    """
    if not extra:
        return
    try:
        schema = await server.call("GET", "/openapi.json", doing="read its schema", deadline=deadline)
    except ServerRefused:
        return  # it was started with --disable-fastapi-docs
    known = get_path(schema, "components", "schemas", "CompletionRequest", "properties")
    for name in extra if isinstance(known, dict) else ():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise ServerRefused(
                server.url,
                f"sample with generation_kwargs {name!r}",
                f"this vLLM does not know it{f', but {close[0]!r}' if close else ''}",
                "Take it out of generation_kwargs, or write it as vLLM's completions API does.",
            )


async def reports_after_cut(
    server: ServerClient, model: str, vocab_size: int | None, temperature: float, deadline: float
) -> bool:
    """Sample one token to find out which log-probs it reports; True if those of the distribution after cuts.

    With top_k=1 one token is left. Its log-prob is 0 after the cut and below 0 before it.

    Raises:
        ServerRefused: it reports logits, or log-probs from before the temperature while the run needs those after it.
    """
    token = 0 if vocab_size is None else vocab_size - 1
    body = {
        "model": model, "prompt": [token], "max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0,
        "return_token_ids": True, "ignore_eos": True,
    }  # fmt: skip
    doing = "sample a token"
    with same_vocabulary(token):
        answer = await server.ask("/v1/completions", doing=doing, deadline=deadline, body=body)
    [sampled] = completions_of(server, answer)
    reported = sampled.completion.logprobs
    if not reported:
        raise BadAnswer(server.url, doing, "it reports no log-probs for what it samples")
    if reported[0] > 1e-3:
        raise ServerRefused(
            server.url, doing, f"it reports logits ({reported[0]:.3g}), no log-probs", _logprobs_mode_hint(temperature)
        )
    after_cut = reported[0] > -1e-6
    if not after_cut and temperature != 1.0:
        raise ServerRefused(
            server.url,
            f"sample at temperature {temperature:g}",
            "it reports log-probs from before the temperature divides the logits, which cannot be compared with"
            " the trainer's",
            _logprobs_mode_hint(temperature),
        )
    return after_cut


def refuse_chunked_prefill(server: ServerClient, config: dict[str, Any]) -> None:
    """Refuse chunked prefill on a CPU: with a seed it ends vLLM's engine there (0.32), which rewinds its generator.

    Raises:
        ServerRefused: the server runs on a CPU with chunked prefill.
    """
    on_cpu = str(get_path(config, "device_config", "device")) == "cpu"
    if on_cpu and get_path(config, "scheduler_config", "enable_chunked_prefill"):
        raise ServerRefused(
            server.url,
            "sample with seeds",
            "it runs on a CPU and computes prompts in pieces, which would end it",
            "Start it with --no-enable-chunked-prefill, or with `covey vllm-serve`.",
        )


def as_dtype(name: Any) -> torch.dtype | None:
    """Type of the name "torch.bfloat16" or "bfloat16"."""
    found = getattr(torch, str(name).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None


def get_path(record: Any, *path: str) -> Any:
    """Value at `path` in nested dictionaries, or None."""
    for name in path:
        record = record.get(name) if isinstance(record, dict) else None
    return record


def _logprobs_mode_hint(temperature: float) -> str:
    mode = "raw_logprobs" if temperature == 1.0 else "processed_logprobs"
    return f"Start it with --logprobs-mode {mode} (`covey vllm-serve` does so), or sample at temperature 1."
