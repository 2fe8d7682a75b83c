"""Interface of an inference server's backend: vLLM, SGLang, or another.

To add a backend, write a `ServerApi` (sampling, pausing, sleeping) and a `WeightApi` (in `weights.api`), and a
`ScoringApi` if it can serve teachers. They contain only paths and bodies of requests: `ServerPool` distributes and
retries them, `ServerWeights` keeps versions, `RemoteEngine` and `ServerScorer` have the threads.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from covey.core.engine import SampleRequest
from covey.core.records import Completion
from covey.engines.servers.http_client import ServerClient

ADAPTER_PREFIX = "covey-"  # first part of the names of the trainer's adapters; no served model may be named like this


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Properties that a server reports; None for unknown ones."""

    model: str  # the name it answers to
    max_context: int | None = None  # tokens it can attend to
    dtype: torch.dtype | None = None  # it computes in
    reports_after_cut: bool = False  # its log-probs are those after top-k, top-p, min-p and penalties
    takes_adapters: bool = False  # it was started so that adapters can be loaded while it runs
    path: str | None = None  # where its model was loaded from, if that is not its name
    returns_routes: bool = False  # it returns the experts of each token, and the api knows the model's `RouteShape`


@dataclass(frozen=True, slots=True)
class SampledChunk:
    """A completion, or its first part: a request with prompt and these tokens as its prompt continues it."""

    completion: Completion
    aborted: bool = False  # the server was paused or stopped
    unfinished: bool = False  # the server ended it at a token that does not end one


@dataclass(frozen=True, slots=True)
class SettingNames:
    """Names that one backend's settings have in error messages."""

    timeout: str  # seconds to wait for servers to be up
    request_timeout: str  # seconds for one request
    sync_timeout: str  # seconds for a weight update
    context: str  # the server's option for a longer context


class ServerApi(Protocol):
    """Requests of one backend. Every method is one or a few requests, all within `deadline` seconds."""

    name: str  # of the backend, for messages: "vLLM"
    settings: SettingNames

    async def probe(self, server: ServerClient, deadline: float) -> ServerFacts:
        """Read the server's properties; ServerRefused, with the missing start option, if it cannot be used."""
        ...

    async def check_alive(self, server: ServerClient, deadline: float) -> None:
        """Check cheaply that the server can sample; raises a `ServerError` if it cannot."""

    async def generate(
        self, server: ServerClient, request: SampleRequest, *, model: str, ends: frozenset[int], deadline: float
    ) -> list[SampledChunk]:
        """Sample `request.n` completions, tokens in and tokens out, with a log-prob for every token.

        All settings are in the request: neither the model's generation config nor the server's own end-of-text token
        may have an effect. The caller checks the tokens.

        Args:
            server: to send the request to.
            request: what to sample.
            model: name to sample from: the server's model, or a loaded adapter.
            ends: the only tokens that end a completion; the one that was sampled is its last token.
            deadline: seconds in which the answer must arrive.

        Raises:
            BadAnswer: completions, tokens or log-probs are missing, NaN, or of the wrong length.
        """
        ...

    async def pause(self, server: ServerClient, deadline: float) -> None:
        """Stop sampling: requests in flight return `aborted`, new ones wait."""

    async def resume(self, server: ServerClient, deadline: float) -> None:
        """Continue sampling."""

    async def clear_prefix_cache(self, server: ServerClient, deadline: float) -> None:
        """Empty the prefix cache, because the weights have changed."""

    async def sleep(self, server: ServerClient, level: int, deadline: float) -> None:
        """Release memory: 1 keeps weights in host memory, 2 drops them."""

    async def wake(self, server: ServerClient, deadline: float) -> None:
        """Take the memory back."""


# ---- scoring given tokens --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Request for the log-probs of a sequence's tokens from index `first` on, each given all tokens before it."""

    token_ids: list[int]
    first: int  # 1 or more: nothing comes before the token at 0
    top: int = 0  # likeliest tokens to name at each of these positions
    temperature: float = 1.0


class ScoredToken(NamedTuple):
    """Scores at one position of a sequence."""

    logprob: float  # of the token there, in nats; may be NaN or -inf
    top: list[tuple[int, float]]  # likeliest tokens at this position and their log-probs, in descending order
    text: str | None  # of the token by the server's tokenizer; None: not reported


class ScoringApi(Protocol):
    """Requests of one backend for log-probs of given tokens. Every method is done within `deadline` seconds."""

    name: str  # of the backend, for messages: "vLLM"
    settings: SettingNames
    advice: dict[str, str]  # options of the server for more `top` tokens ("top") and another "temperature"

    identity: str  # path whose answer tells whether a server is of this backend

    def recognises(self, answer: Any) -> bool:
        """Tell whether this is the backend's answer to a GET request of `identity`."""
        ...

    async def facts(self, server: ServerClient, deadline: float) -> ServerFacts:
        """Read the server's properties; `max_context` is the longest sequence that it scores."""
        ...

    async def check_alive(self, server: ServerClient, deadline: float) -> None:
        """Check cheaply that the server can score; raises a `ServerError` if it cannot."""

    async def check_token(self, server: ServerClient, model: str, token: int, deadline: float) -> None:
        """ServerRefused if the server's model has no such token."""

    async def score(
        self, server: ServerClient, request: ScoreRequest, *, model: str, deadline: float
    ) -> list[ScoredToken]:
        """One `ScoredToken` for each token from `request.first` on.

        Raises:
            BadAnswer: log-probs are missing, as of a cached prefix, or belong to other tokens.
        """
        ...


def as_logprob(value: object) -> float:
    """A log-prob in an answer as a number: NaN if it is missing, -inf for numbers that servers write in its place."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    return -math.inf if value <= LEAST_REPORTED else float(value)


LEAST_REPORTED = -9998.0
"""JSON has no -inf: vLLM writes -9999."""
