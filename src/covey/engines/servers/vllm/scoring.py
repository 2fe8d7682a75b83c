"""Log-probs of given tokens from vLLM's own server: `prompt_logprobs` of OpenAI-compatible completions.

- No route for training is needed, so a server started by `vllm serve` can be used, too.
- vLLM computes these log-probs at temperature 1, whatever temperature a request has; a server started by
  `covey vllm-serve` applies the temperature of the request (`covey.engines.servers.vllm.worker`).
- `--max-logprobs`, 20 by default, bounds the number of likeliest tokens per position.
- The logits of a whole batch of prompt tokens are in memory at once: `--max-num-batched-tokens` bounds them.
"""

from typing import Any

from covey.engines.servers.errors import BadAnswer
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.protocols import ScoredToken, ScoreRequest, ServerFacts, SettingNames, as_logprob
from covey.engines.servers.vllm.api import check_release, get_path, read_model

DOING = "score tokens"


class VllmScoring:
    """A `ScoringApi` for vLLM's server."""

    name = "vLLM"
    identity = "/version"
    settings = SettingNames("teacher_server_timeout", "teacher_server_request_timeout", "", "--max-model-len")
    advice = {  # noqa: RUF012 - of the class
        "top": "start it with --max-logprobs {top}",
        "temperature": "start it with `covey vllm-serve`, which applies the temperature of a request",
    }

    def recognises(self, answer: Any) -> bool:
        return isinstance(get_path(answer, "version"), str)

    async def facts(self, server: ServerClient, deadline: float) -> ServerFacts:
        """The server's model and context, less one token, because every request must sample one."""
        await check_release(server, deadline)
        model = await read_model(server, deadline)
        longest = model.get("max_model_len")
        name = str(model["id"])
        path = str(model.get("root") or name)
        return ServerFacts(name, max_context=None if longest is None else int(longest) - 1, path=path)

    async def check_alive(self, server: ServerClient, deadline: float) -> None:
        await server.call("GET", "/health", "check its health", deadline)

    async def check_token(self, server: ServerClient, model: str, token: int, deadline: float) -> None:
        await self.score(server, ScoreRequest([token, token], 1), model=model, deadline=deadline)

    async def score(
        self, server: ServerClient, request: ScoreRequest, *, model: str, deadline: float
    ) -> list[ScoredToken]:
        """Log-probs of the prompt, which is the whole sequence; one token is sampled after it and dropped."""
        body = {
            "model": model,
            "prompt": request.token_ids,
            "max_tokens": 1,
            "temperature": request.temperature,
            "prompt_logprobs": request.top,
            "add_special_tokens": False,
        }
        answer = await server.ask("/v1/completions", DOING, deadline, body)
        try:
            places = answer["choices"][0]["prompt_logprobs"]
        except (LookupError, TypeError) as error:
            raise BadAnswer(server.url, DOING, f"it gives no prompt_logprobs: {answer!r:.200}") from error
        if not isinstance(places, list) or len(places) != len(request.token_ids):
            shown = len(places) if isinstance(places, list) else places
            message = f"it returned log-probs of {shown} tokens for a prompt of {len(request.token_ids)}"
            raise BadAnswer(server.url, DOING, message)
        first = request.first
        return [
            scored_token(server, place, token, request.top)
            for place, token in zip(places[first:], request.token_ids[first:], strict=True)
        ]


def scored_token(server: ServerClient, place: Any, token: int, top: int) -> ScoredToken:
    """Scores at one position of `prompt_logprobs`, which has entries for the token itself and the likeliest tokens."""
    own = place.get(str(token)) if isinstance(place, dict) else None
    if not isinstance(own, dict):
        message = f"the log-prob of token {token} is missing ({place!r:.100})"
        raise BadAnswer(
            server.url, DOING, message, "Does it leave out cached prefixes? Update it: pip install -U vllm."
        )
    try:
        every = [(int(name), as_logprob(entry["logprob"])) for name, entry in place.items()] if top else []
        text = own.get("decoded_token")
        logprob = as_logprob(own["logprob"])
    except (LookupError, TypeError, ValueError) as error:
        raise BadAnswer(server.url, DOING, f"a position cannot be read: {place!r:.200}") from error
    every = [(name, value) for name, value in every if value == value]  # no NaN
    likeliest = sorted(every, key=lambda pair: -pair[1])[:top]
    return ScoredToken(logprob, likeliest, text if isinstance(text, str) else None)
