"""How one make of inference server is spoken to. To support another, write a `ServerApi` and its `WeightTransport`s.

A dialect knows paths and bodies. It knows no load or retries (`Fleet`), versions (`ServerWeights`) or threads
(`RemoteEngine`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from covey.core.engine import SampleRequest
from covey.core.rollout import Completion
from covey.core.weights import WeightUpdate
from covey.engines.servers.http_client import ServerClient


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a server says of itself.

    Attributes:
        model: the name it answers to.
        release: the version of its software, as in "0.32.0".
        max_context: tokens it can attend to, or None if it does not say.
        world_size: processes that hold weights (tensor x pipeline x data parallel); 1 if it does not say.
        dtype: it computes in, or None if it does not say.
        vocab_size: tokens that its model embeds, or None if it does not say.
        reports_after_cut: its log-probs are those of the distribution after top-k, top-p, min-p and penalties.
        reports_temperature: its log-probs are those at the sampling temperature; False: always at temperature 1.
        sleeps: it was started so that it can release its memory.
        takes_adapters: it was started so that adapters can be loaded while it runs.
        path: where its model was loaded from, if that is not its name.
    """

    model: str
    release: str
    max_context: int | None = None
    world_size: int = 1
    dtype: torch.dtype | None = None
    vocab_size: int | None = None
    reports_after_cut: bool = False
    reports_temperature: bool = True
    sleeps: bool = False
    takes_adapters: bool = False
    path: str | None = None


@dataclass(frozen=True, slots=True)
class SampledChunk:
    """A completion as far as it got.

    Attributes:
        completion: the tokens so far.
        aborted: the server was paused or told to stop: what is missing can be asked for later, with the prompt and
            these tokens as the new prompt.
    """

    completion: Completion
    aborted: bool = False


@dataclass(frozen=True, slots=True)
class SettingNames:
    """What the settings that an error speaks of are called for one make of server.

    Attributes:
        timeout: seconds to wait for servers to be up.
        request_timeout: seconds for one request.
        sync_timeout: seconds for a weight update.
        context: the option that a server is started with for a longer context.
    """

    timeout: str
    request_timeout: str
    sync_timeout: str
    context: str


class ServerApi(Protocol):
    """What differs between makes of servers. Every method is one or a few requests, all within `deadline` seconds."""

    name: str
    """Of the make, for messages: "vLLM"."""

    settings: SettingNames
    """For messages."""

    async def look(self, server: ServerClient, deadline: float) -> ServerFacts:
        """Whether the server is up, and what it is.

        Raises:
            ServerRefused: it lacks something that training needs; the message names the option to start it with.
        """
        ...

    async def alive(self, server: ServerClient, deadline: float) -> None:
        """A cheap look at whether it can sample at all; raises a `ServerError` if it cannot."""
        ...

    async def generate(
        self, server: ServerClient, request: SampleRequest, *, model: str, ends: frozenset[int], deadline: float
    ) -> list[SampledChunk]:
        """`request.n` completions, tokens in and tokens out, with a log-prob for every token.

        What the server would do by itself (defaults of the model's generation config, its own idea of the token that
        ends a text) must not show: the request alone decides. The tokens are checked by the caller.

        Args:
            server: where.
            request: what.
            model: name to sample from: the server's model, or an adapter it was given.
            ends: tokens that end a completion, and the only ones; the one that was sampled is its last token.
            deadline: seconds.

        Raises:
            BadAnswer: completions, tokens or log-probs are missing, NaN, or of the wrong length.
        """
        ...

    async def pause(self, server: ServerClient, deadline: float) -> None:
        """Stop sampling: what is in flight comes back `aborted`, what comes meanwhile waits."""
        ...

    async def resume(self, server: ServerClient, deadline: float) -> None:
        """Go on sampling."""
        ...

    async def forget_prefixes(self, server: ServerClient, deadline: float) -> None:
        """Empty the prefix cache: what it holds was computed with other weights."""
        ...

    async def write_stamp(self, server: ServerClient, stamp: str, deadline: float) -> None:
        """Leave a note that lasts as long as the server's weights do; one that keeps no notes ignores it."""
        ...

    async def read_stamp(self, server: ServerClient, deadline: float) -> str | None:
        """The note that was left, or anything else where none was; None if the server keeps no notes.

        It tells a server that was restarted, or that another run sends weights to, from one that still has ours.
        """
        ...

    async def sleep(self, server: ServerClient, level: int, deadline: float) -> None:
        """Release memory: 1 keeps weights in host memory, 2 drops them."""
        ...

    async def wake(self, server: ServerClient, deadline: float) -> None:
        """Take the memory back."""
        ...


class WeightTransport(Protocol):
    """One way for weights to reach servers of one make."""

    name: str
    """For messages."""

    async def send(self, servers: Sequence[ServerClient], update: WeightUpdate, deadline: float) -> None:
        """Bring all servers to `update`. They are paused, and their prefix caches emptied, by the caller.

        The servers may be others than last time. After a failure it may be called again: it starts from scratch.

        Raises:
            ServerError: with the server's words, the step (`update.version`) and the tensor being sent.
        """
        ...

    def model_name(self, facts: ServerFacts, version: int) -> str:
        """What to ask for in `generate` once `version` has been sent: the server's model, or a versioned adapter."""
        ...

    def tell(self) -> Any:
        """After `send`: what `model_name` must know in processes that did not send; JSON."""
        ...

    def learn(self, told: Any) -> None:
        """In those processes: what `tell` said in the one that sent."""
        ...

    def forget(self, server: ServerClient) -> None:
        """A server that was left out comes back: it may have been started anew, and lack what it was sent."""
        ...

    async def close(self) -> None:
        """Give back groups, ports, files."""
        ...
