"""One inference server, as HTTP sees it: requests with a deadline, answers or errors that carry its own words."""

import asyncio
import json
import re
from typing import Any

import aiohttp

from covey.engines.servers.errors import (
    BadAnswer,
    DeadlineExceeded,
    ServerBusy,
    ServerError,
    ServerRefused,
    ServerUnreachable,
)

CONNECT_SECONDS = 10.0
"""To get a connection at all; a machine that drops packets must not use up the whole deadline."""

SHOWN = 2000
"""Characters of a server's answer that an error repeats."""


class ServerClient:
    """Speaks HTTP with one server.

    A connection pool belongs to an event loop; every loop that calls gets its own, which `close` gives back.

    Args:
        url: as in http://127.0.0.1:8000, without a path.
        api_key: sent as a bearer token, never shown.

    Raises:
        ValueError: the URL is none.
    """

    def __init__(self, url: str, api_key: str | None = None):
        if not re.match(r"https?://[^/\s]+/?$", url):
            raise ValueError(
                f"{url!r} is not the URL of a server: write http://HOST:PORT, without a path, as in"
                " http://127.0.0.1:8000."
            )
        self.url = url.rstrip("/")
        self._api_key = api_key
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}

    async def call(
        self,
        method: str,
        path: str,
        *,
        doing: str,
        deadline: float,
        body: Any = None,
        query: dict[str, Any] | None = None,
    ) -> Any:
        """One request; the answer's JSON, or its text if it is none.

        Args:
            method: GET, POST, ...
            path: as in "/health".
            doing: what for, as an infinitive, for errors: "send weights of version 3".
            deadline: seconds until the whole answer must be there.
            body: sent as JSON.
            query: parameters of the URL.

        Raises:
            ServerUnreachable, DeadlineExceeded, ServerBusy, ServerRefused, ServerError: see there.
        """
        patience = min(CONNECT_SECONDS, deadline)
        timeout = aiohttp.ClientTimeout(total=deadline, connect=patience)
        try:
            async with self._session().request(
                method, self.url + path, json=body, params=query, timeout=timeout, allow_redirects=False
            ) as answer:
                text = (await answer.read()).decode(errors="replace")
                status, elsewhere = answer.status, answer.headers.get("Location")
        except (TimeoutError, aiohttp.ConnectionTimeoutError) as error:
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                raise ServerUnreachable(self.url, doing, f"no connection within {patience:g} seconds") from error
            raise DeadlineExceeded(self.url, doing, f"no answer within {deadline:g} seconds") from error
        except aiohttp.ClientSSLError as error:
            hint = "Write http:// if it speaks no TLS; else make its certificate known to this machine."
            raise ServerRefused(self.url, doing, str(error), hint) from error
        except aiohttp.ClientConnectorError as error:
            raise ServerUnreachable(self.url, doing, str(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            said = f"the connection broke off ({type(error).__name__}: {error})"
            raise ServerUnreachable(self.url, doing, said) from error
        if status >= 300:
            raise self._failure(status, text, doing, elsewhere)
        return _as_json(text)

    async def ask(self, path: str, *, doing: str, deadline: float, body: Any = None) -> dict[str, Any]:
        """POST `body`; the answer must be a JSON object.

        Raises:
            BadAnswer: it is something else; and what `call` raises.
        """
        answer = await self.call("POST", path, doing=doing, deadline=deadline, body=body)
        if not isinstance(answer, dict):
            raise BadAnswer(self.url, doing, f"{path} answered {answer!r:.200} where a JSON object belongs")
        return answer

    async def close(self) -> None:
        """Give this event loop's connections back."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        for other in [other for other in self._sessions if other.is_closed()]:
            del self._sessions[other]
        if loop not in self._sessions:
            headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else None
            # A new connection each time: servers close kept ones after an error, or after seconds of silence, and a
            # request that runs into that looks like a server that died.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._sessions[loop] = aiohttp.ClientSession(headers=headers, connector=connector)
        return self._sessions[loop]

    def _failure(self, status: int, text: str, doing: str, elsewhere: str | None) -> ServerError:
        said = f"HTTP {status}: {message_of(text)}"
        if status < 400:
            hint = "Requests are not sent on, and neither is the key: give the address of the server itself."
            return ServerRefused(self.url, doing, f"HTTP {status}: it sends requests on to {elsewhere!r}", hint)
        if status in (401, 403):
            return ServerRefused(self.url, doing, said, "Give the server's API key, or check the one you gave.")
        if status in (404, 405):
            return ServerRefused(self.url, doing, said, "Is it the right server, of a version that can do this?")
        if status in (408, 429, 502, 503, 504):
            return ServerBusy(self.url, doing, said)
        return (ServerRefused if status < 500 else ServerError)(self.url, doing, said)


def _as_json(text: str) -> Any:
    """What a text says in JSON, or the text itself; also where it is made to be too deep or too long for a reader."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def message_of(text: str) -> str:
    """The words in an error's body, wherever servers put them."""
    body = _as_json(text)
    if isinstance(body, str):
        return body[:SHOWN].strip() or "(no message)"
    for key in ("error", "message", "error_message", "detail"):
        if isinstance(body, dict) and body.get(key):
            inner = body[key]
            return message_of(json.dumps(inner)) if isinstance(inner, dict) else str(inner)[:SHOWN]
    return str(body)[:SHOWN] or "(no message)"
