"""Log-probs of given tokens from SGLang's own server: input log-probs of `/generate`, as of release 0.5.23.

- The first position of an answer has no log-prob, so a request begins one token before the first that is scored.
- The last id of the vocabulary is reported as 0.
- SGLang computes these log-probs at temperature 1, whatever temperature a request has.
"""

from collections.abc import Mapping
from typing import Any

from covey.engines.servers.errors import BadAnswer
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.protocols import ScoredToken, ScoreRequest, ServerFacts, SettingNames, as_logprob
from covey.engines.servers.sglang.api import facts_of, model_info, server_info

DOING = "score tokens"


class SglangScoring:
    """A `ScoringApi` for SGLang's server."""

    name = "SGLang"
    identity = "/model_info"
    settings = SettingNames("teacher_server_timeout", "teacher_server_request_timeout", "", "--context-length")
    advice = {  # noqa: RUF012 - of the class
        "top": "set teacher_top_k to what it allows",
        "temperature": "serve the teacher with `covey vllm-serve`, which applies the temperature of a request",
    }

    def recognises(self, answer: Any) -> bool:
        return isinstance(answer, Mapping) and "model_path" in answer

    async def facts(self, server: ServerClient, deadline: float) -> ServerFacts:
        """The server's model; a sequence must be shorter than the server's context."""
        facts = facts_of(await model_info(server, deadline), await server_info(server, deadline))
        longest = None if facts.max_context is None else facts.max_context - 1
        return ServerFacts(facts.model, max_context=longest, path=facts.path)

    async def check_alive(self, server: ServerClient, deadline: float) -> None:
        await model_info(server, deadline)

    async def check_token(self, server: ServerClient, model: str, token: int, deadline: float) -> None:
        """Only ask for the token's log-prob: as part of a prompt, an unknown token would end the server."""
        body = self._body(ScoreRequest([0, 0], 1)) | {"token_ids_logprob": [[token]]}
        await server.call("POST", "/generate", DOING, deadline, body)

    async def score(
        self, server: ServerClient, request: ScoreRequest, *, model: str, deadline: float
    ) -> list[ScoredToken]:
        answer = await server.call("POST", "/generate", DOING, deadline, self._body(request))
        tokens = request.token_ids[request.first :]
        own = _last(server, answer, "input_token_logprobs", len(tokens))
        tops = _last(server, answer, "input_top_logprobs", len(tokens)) if request.top else [[]] * len(tokens)
        return [_scored(server, *place) for place in zip(own, tops, tokens, strict=True)]

    @staticmethod
    def _body(request: ScoreRequest) -> dict[str, Any]:
        return {
            "input_ids": [request.token_ids],
            "sampling_params": [{"max_new_tokens": 0, "temperature": request.temperature}],
            "return_logprob": True,
            "logprob_start_len": [request.first - 1],
            "top_logprobs_num": [request.top],
            "return_text_in_logprobs": True,
        }


def _last(server: ServerClient, answer: Any, name: str, count: int) -> list[Any]:
    """The last `count` entries of a list in `meta_info` that has one entry per scored token and one before them."""
    meta = answer[0].get("meta_info") if isinstance(answer, list) and answer and isinstance(answer[0], dict) else None
    places = meta.get(name) if isinstance(meta, Mapping) else None
    if not isinstance(places, list) or len(places) != count + 1:
        shown = len(places) if isinstance(places, list) else places
        raise BadAnswer(server.url, DOING, f"it returned {shown!r:.100} {name} instead of {count + 1}")
    return places[1:]


def _scored(server: ServerClient, own: Any, top: Any, token: int) -> ScoredToken:
    try:
        value, reported, text = own
        likeliest = [(int(name), as_logprob(one)) for one, name, _ in top or []]
    except (TypeError, ValueError) as error:
        raise BadAnswer(server.url, DOING, f"a position cannot be read: {own!r:.100}, {top!r:.100}") from error
    if reported not in (token, 0):
        raise BadAnswer(server.url, DOING, f"it returned the log-prob of token {reported!r}, but {token} was sent")
    if value is None:
        raise BadAnswer(server.url, DOING, f"the log-prob of token {token} is missing")
    return ScoredToken(as_logprob(value), likeliest, text if isinstance(text, str) and reported == token else None)
