"""What servers are, before the first request: a wrong one ends the run before it begins.

Not here: what becomes of them afterwards (`Fleet`).
"""

import asyncio
import time
import warnings
from collections.abc import Sequence

from covey.engines.servers.errors import RETRIED, NoServerLeft, ServerError, ServerRefused
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.protocols import ServerApi, ServerFacts
from covey.engines.servers.server_pool import FIRST_PAUSE, QUICK_SECONDS, PoolMember

LOOK_SECONDS = 30.0
"""For a server to say what it is."""


async def arrive(
    dialect: ServerApi,
    servers: Sequence[ServerClient],
    timeout: float,
    *,
    vocab_size: int | None,
    model_name: str | None,
) -> list[PoolMember]:
    """Wait for all servers to be up, and see that they suit the run.

    Args:
        dialect: how they are spoken to.
        servers: all of the run.
        timeout: seconds to wait for them.
        vocab_size: of the model that is trained; None: not compared.
        model_name: of the model that is trained; None: not compared.

    Raises:
        ServerRefused: a server is not one that this run can sample from.
        NoServerLeft: a server is not up in time.
    """
    found = await asyncio.gather(*(_first_look(dialect, server, timeout) for server in servers))
    lost = {server.url: str(look) for server, look in zip(servers, found, strict=True) if isinstance(look, ServerError)}
    if lost:
        raise NoServerLeft(
            f"{len(lost)} of {len(servers)} {dialect.name} servers did not come up within {timeout:g} seconds."
            " Check the addresses and start them; one that loads a large model may need a longer"
            f" {dialect.settings.timeout}. What came of asking:",
            lost,
        )
    facts = [look for look in found if isinstance(look, ServerFacts)]
    for server, fact in zip(servers, facts, strict=True):
        _compare(server, fact, vocab_size, model_name)
        await dialect.resume(server, QUICK_SECONDS)  # a run that was killed may have left it paused
    return [PoolMember(server, fact) for server, fact in zip(servers, facts, strict=True)]


async def _first_look(dialect: ServerApi, server: ServerClient, timeout: float) -> ServerFacts | ServerError:
    """What it is, as soon as it is up; the last failure if it is not in time."""
    until = time.monotonic() + timeout
    while True:
        try:
            return await dialect.look(server, min(LOOK_SECONDS, max(1.0, until - time.monotonic())))
        except RETRIED as error:
            if time.monotonic() + FIRST_PAUSE >= until:
                return error
        await asyncio.sleep(FIRST_PAUSE)


def _compare(server: ServerClient, facts: ServerFacts, vocab_size: int | None, model_name: str | None) -> None:
    """The server's model against the one that is trained."""
    if None not in (facts.vocab_size, vocab_size) and facts.vocab_size != vocab_size:
        raise ServerRefused(
            server.url,
            "sample for this run",
            f"its model ({facts.model}) has {facts.vocab_size} tokens, and the one that is trained has {vocab_size}",
            "Start the server with the model that is trained.",
        )
    path = facts.path or facts.model
    if model_name and _tail(path) != _tail(model_name):
        warnings.warn(
            f"{server.url} was started with {path!r} and {model_name!r} is trained. Fine if they are one"
            " architecture, since the server is sent the weights; otherwise start it with the model that is"
            " trained.",
            stacklevel=2,
        )


def _tail(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()
