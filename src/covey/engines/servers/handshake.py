"""First contact with the servers of a run: a server that does not suit it ends the run before it begins."""

import asyncio
import time
import warnings
from collections.abc import Sequence

from covey.engines.servers.errors import RETRIED, NoServerLeft, ServerError, ServerRefused
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.protocols import ServerApi, ServerFacts
from covey.engines.servers.server_pool import FIRST_PAUSE, QUICK_SECONDS, PoolMember

PROBE_SECONDS = 30.0
"""For a server to report its properties."""


async def connect(
    api: ServerApi,
    servers: Sequence[ServerClient],
    timeout: float,
    *,
    vocab_size: int | None,
    model_name: str | None,
) -> list[PoolMember]:
    """Wait for all servers to be up, and check that they suit the run.

    Args:
        api: requests of their backend.
        servers: all servers of the run.
        timeout: seconds to wait for them.
        vocab_size: of the model that is trained; None: not compared.
        model_name: of the model that is trained; None: not compared.

    Raises:
        ServerRefused: the run cannot sample from a server.
        NoServerLeft: a server is not up in time.
    """
    found = await asyncio.gather(*(_first_probe(api, server, timeout) for server in servers))
    lost = {server.url: str(one) for server, one in zip(servers, found, strict=True) if isinstance(one, ServerError)}
    if lost:
        raise NoServerLeft(
            f"{len(lost)} of {len(servers)} {api.name} servers did not come up within {timeout:g} seconds."
            " Check the addresses and start them; one that loads a large model may need a longer"
            f" {api.settings.timeout}. The last error of each:",
            lost,
        )
    members = [
        PoolMember(server, facts)
        for server, facts in zip(servers, found, strict=True)
        if not isinstance(facts, ServerError)  # none is, by now
    ]
    for member in members:
        _compare(member.server, member.facts, vocab_size, model_name)
        await api.resume(member.server, QUICK_SECONDS)  # a run that was killed may have left it paused
    return members


async def _first_probe(api: ServerApi, server: ServerClient, timeout: float) -> ServerFacts | ServerError:
    """Properties of the server as soon as it is up; the last failure if it is not in time."""
    until = time.monotonic() + timeout
    while True:
        try:
            return await api.probe(server, min(PROBE_SECONDS, max(1.0, until - time.monotonic())))
        except RETRIED as error:
            if time.monotonic() + FIRST_PAUSE >= until:
                return error
        await asyncio.sleep(FIRST_PAUSE)


def _compare(server: ServerClient, facts: ServerFacts, vocab_size: int | None, model_name: str | None) -> None:
    """Compare the server's model with the one that is trained."""
    if None not in (facts.vocab_size, vocab_size) and facts.vocab_size != vocab_size:
        raise ServerRefused(
            server.url,
            "sample for this run",
            f"its model ({facts.model}) has {facts.vocab_size} tokens, and the one that is trained has {vocab_size}",
            "Start the server with the model that is trained.",
        )
    path = facts.path or facts.model
    if model_name and _basename(path) != _basename(model_name):
        warnings.warn(
            f"{server.url} was started with {path!r} and {model_name!r} is trained. Fine if they are one"
            " architecture, since the server is sent the weights; otherwise start it with the model that is"
            " trained.",
            stacklevel=2,
        )


def _basename(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()
