"""HTTP client of one inference server: requests with a deadline, and errors with the server's own message."""

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

CONNECT_SECONDS = 10.0  # limit for opening a connection, so that dropped packets do not use up the whole deadline
HINTS = {
    **dict.fromkeys((401, 403), "Give the server's API key, or check the one you gave."),
    **dict.fromkeys((404, 405), "Is it the right server, of a version that can do this?"),
}  # by status
SHOWN = 2000  # characters of a server's answer that an error repeats


class ServerClient:
    """Client of one server, used in one event loop at a time; its key is never shown.

    Every request opens a new connection. Servers close reused connections after an error or some seconds without a
    request, and a request on a closed connection looks as if the server had died.
    """

    def __init__(self, url: str, api_key: str | None = None):
        if not re.match(r"https?://[^/\s]+/?$", url):
            raise ValueError(
                f"{url!r} is not the URL of a server: write http://HOST:PORT, without a path, as in"
                " http://127.0.0.1:8000."
            )
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connector: aiohttp.TCPConnector | None = None  # of that loop

    async def call(
        self, method: str, path: str, doing: str, deadline: float, body: Any = None, query: dict[str, Any] | None = None
    ) -> Any:
        """Send one request; the answer's JSON, or its text if that is no JSON.

        `doing` is its purpose as an infinitive, for errors: "send weights of version 3"; the whole answer must have
        arrived within `deadline` seconds. Raises a `ServerError`: a subclass of it, or itself for other failures (HTTP
        500).
        """
        connect = min(CONNECT_SECONDS, deadline)
        timeout = aiohttp.ClientTimeout(total=deadline, connect=connect)
        session = self._session(timeout)
        try:
            async with (
                session,
                session.request(method, self.url + path, json=body, params=query, allow_redirects=False) as answer,
            ):
                text = (await answer.read()).decode(errors="replace")
                status, elsewhere = answer.status, answer.headers.get("Location")
        except aiohttp.ConnectionTimeoutError as error:
            raise ServerUnreachable(self.url, doing, f"no connection within {connect:g} seconds") from error
        except TimeoutError as error:
            raise DeadlineExceeded(self.url, doing, f"no answer within {deadline:g} seconds") from error
        except aiohttp.ClientSSLError as error:
            hint = "Write http:// if it speaks no TLS; else make its certificate known to this machine."
            raise ServerRefused(self.url, doing, str(error), hint) from error
        except aiohttp.ClientConnectorError as error:
            raise ServerUnreachable(self.url, doing, str(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            message = f"the connection broke off ({type(error).__name__}: {error})"
            raise ServerUnreachable(self.url, doing, message) from error
        if status >= 300:
            raise self._failure(status, text, doing, elsewhere)
        return _as_json(text)

    async def ask(self, path: str, doing: str, deadline: float, body: Any = None) -> dict[str, Any]:
        """Send `body` with POST; the answer must be a JSON object, or `BadAnswer` is raised."""
        answer = await self.call("POST", path, doing, deadline, body)
        if not isinstance(answer, dict):
            raise BadAnswer(self.url, doing, f"{path} answered {answer!r:.200} instead of a JSON object")
        return answer

    def _session(self, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # the connector remembers the server's address, and keeps no connection
            self._loop, self._connector = loop, aiohttp.TCPConnector(limit=0, force_close=True)
        return aiohttp.ClientSession(
            headers=self._headers, timeout=timeout, connector=self._connector, connector_owner=False
        )

    def _failure(self, status: int, text: str, doing: str, elsewhere: str | None) -> ServerError:
        if status < 400:
            hint = "Requests are not sent on, and neither is the key: give the address of the server itself."
            return ServerRefused(self.url, doing, f"HTTP {status}: it sends requests on to {elsewhere!r}", hint)
        kind = ServerBusy if status in (408, 429, 502, 503, 504) else ServerRefused if status < 500 else ServerError
        return kind(self.url, doing, f"HTTP {status}: {message_of(text)}", HINTS.get(status))


def _as_json(text: str) -> Any:
    """The text's JSON value; the text itself if it is not JSON, is nested too deeply, or has too long a number."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def message_of(text: str) -> str:
    """Message in an error's body, under the keys that servers use."""
    body = _as_json(text)
    if isinstance(body, str):
        return body[:SHOWN].strip() or "(no message)"
    for key in ("error", "message", "error_message", "detail"):
        if isinstance(body, dict) and body.get(key):
            inner = body[key]
            return message_of(json.dumps(inner)) if isinstance(inner, dict) else str(inner)[:SHOWN]
    return str(body)[:SHOWN] or "(no message)"
