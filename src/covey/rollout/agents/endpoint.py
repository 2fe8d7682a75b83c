"""HTTP endpoint from which programs request completions, on 127.0.0.1 by default; each program has a session.

The session is found by its key, which a request has in its headers (`Authorization: Bearer`, `x-api-key`) or as the
first part of its path.
"""

import asyncio
import json
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web

from covey.rollout.agents.session import FULL, AgentSession, RequestError
from covey.rollout.agents.wire import APIS, Api, read_request
from covey.rollout.environments.pool import EnvironmentWarning
from covey.rollout.seats import Seat
from covey.runtime.user_code import format_error, warn

MAX_BODY = 16 << 20  # bytes of a request
MAX_AT_ONCE = 64  # most concurrent requests of a session
CLOSING = 10.0  # seconds that closing waits for the servers to end


class AgentEndpoint:
    """The server. Use it as an async context; the code that runs the programs opens and closes sessions."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, routes: Sequence[web.RouteDef] = ()) -> None:
        """Listen at `port` (0: any free one); `routes` are further paths next to those of the APIs."""
        self._address, self._routes = (host, port), routes
        self.url = ""  # without the `/v1` of the APIs' paths
        self._sessions: dict[str, AgentSession] = {}
        self._busy: dict[str, set[asyncio.Task[Any]]] = {}

    def open(self, session: AgentSession) -> str:
        """The key of a new session."""
        key = secrets.token_urlsafe(24)
        self._sessions[key], self._busy[key] = session, set()
        return key

    def close(self, key: str) -> None:
        """End a session, and cancel what is being sampled for it."""
        self._sessions.pop(key, None)
        for task in self._busy.pop(key, ()):
            task.cancel()

    async def __aenter__(self) -> "AgentEndpoint":
        app = web.Application(client_max_size=MAX_BODY)
        app.add_routes(self._routes)
        for prefix in ("", "/{key}"):
            app.router.add_get(f"{prefix}/v1/models", self._models)
            for path in APIS:
                app.router.add_post(prefix + path, self._post)
        # The rest of a refused body is read for `lingering_time`, so that the client reads the refusal.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, lingering_time=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, *self._address).start()
        self.url = f"http://{self._address[0]}:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *raised: Any) -> None:
        for key in list(self._sessions):
            self.close(key)
        await self._runner.cleanup()

    def _key(self, request: web.Request) -> str | None:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        keys = (request.match_info.get("key", ""), bearer, request.headers.get("x-api-key", ""))
        return next((key for key in keys if key in self._sessions), None)

    async def _models(self, request: web.Request) -> web.Response:
        if self._key(request) is None:
            error = _refused(request).error("this key has no session.", "invalid_api_key", 401, None)
            return web.json_response(error, status=401)
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "covey"}]})

    async def _post(self, request: web.Request) -> web.StreamResponse:
        api, key = _refused(request), self._key(request)

        def refuse(message: str, code: str, status: int, param: str | None = None) -> web.Response:
            if session is not None and code != FULL:
                session.refused = session.refused or message
            return web.json_response(api.error(message, code, status, param), status=status)

        session = None if key is None else self._sessions[key]
        if key is None or session is None:
            return refuse("this key has no session.", "invalid_api_key", 401)
        busy = self._busy[key]
        if len(busy) >= MAX_AT_ONCE:
            return refuse(f"{MAX_AT_ONCE} requests of this session are being answered.", "rate_limit_exceeded", 429)
        task = asyncio.ensure_future(self._answer(request, session, api))
        busy.add(task)
        task.add_done_callback(busy.discard)
        try:
            return await task
        except RequestError as error:
            return refuse(str(error), error.code, error.status, error.param)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            return refuse("the session has ended.", "session_ended", 400)
        except Exception as error:  # of the session, the chat template or the engine: the rollout's error says which
            return refuse(format_error(error), "server_error", 500)

    async def _answer(self, request: web.Request, session: AgentSession, api: Api) -> web.StreamResponse:
        body = await _body(request)
        asked = read_request(api, body)
        session = session.of(body.get("model"), request.headers)
        seat = session.seats.get(body.get("model"))
        if isinstance(seat, Seat):
            session.reply()
            return await self._forward(seat, request, body)
        answers = await (session.answer(asked) if seat is None else session.answer_from(seat, asked))
        session.reply()
        if seat is None and (request.transport is None or request.transport.is_closing()):
            session.return_later(asked, answers)
            return web.Response(status=499)  # the client has disconnected
        response = api.response(body, answers)
        if not body.get("stream"):
            return web.json_response(response)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for data in api.events(body, response):
            name = f"event: {data['type']}\n" if "type" in data else ""
            await stream.write(f"{name}data: {json.dumps(data)}\n\n".encode())
        if api is APIS["/v1/chat/completions"]:
            await stream.write(b"data: [DONE]\n\n")
        return stream

    async def _forward(self, seat: Seat, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """The answer of a seat's server, passed on unchanged."""
        path = "/" + request.path.rpartition("/v1/")[2]
        headers = {"Authorization": f"Bearer {seat.key}", "x-api-key": seat.key} if seat.key else {}
        headers |= {name: value for name, value in request.headers.items() if name.lower().startswith("anthropic-")}
        named = body | {"model": seat.model or body["model"]}
        try:
            async with (
                ClientSession(timeout=ClientTimeout(total=None)) as client,
                client.post(seat.address + path, json=named, headers=headers) as got,
            ):
                answer = web.StreamResponse(status=got.status, headers={"Content-Type": got.headers["Content-Type"]})
                await answer.prepare(request)
                async for part in got.content.iter_any():
                    await answer.write(part)
                return answer
        except ClientError as error:
            raise RequestError(
                f"the seat {body['model']!r} at {seat.url} does not answer: {error}", status=502
            ) from error


async def _body(request: web.Request) -> Any:
    """The JSON object of a request; RequestError for any other body, or one that is too large."""
    try:
        return await request.json()
    except web.HTTPRequestEntityTooLarge:
        raise RequestError(f"a request has at most {MAX_BODY} bytes.", "request_too_large", 413) from None
    except (ValueError, RecursionError, LookupError) as error:  # no JSON, no text, or text of an unknown encoding
        raise RequestError(f"the request's body is not JSON: {format_error(error)}.") from None


def _refused(request: web.Request) -> Api:
    """The API of a request's path; chat completions for other paths."""
    own = (one for path, one in APIS.items() if request.path.endswith(path))
    return next(own, APIS["/v1/chat/completions"])


class Service:
    """Servers on one event loop, including the endpoint, until the loop or the service ends."""

    def __init__(self, *more: Any, endpoint: AgentEndpoint | None = None):
        """Start on the running event loop; `more` are async contexts that are entered after the endpoint."""
        self.loop = asyncio.get_running_loop()
        self.endpoint = endpoint or AgentEndpoint()
        self.ready: asyncio.Future[None] = self.loop.create_future()
        self._contexts = (self.endpoint, *more)
        self._stop = asyncio.Event()
        self._ended: Future[None] = Future()
        self._thread = threading.current_thread()
        self._task = self.loop.create_task(self._serve())

    def end(self) -> bool:
        """Stop; returns False if that took too long."""
        if self.loop.is_closed() or not self.loop.is_running():
            return True  # it ended with its loop
        self.loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is self._thread:
            return True
        return bool(wait([self._ended], CLOSING).done)

    async def _serve(self) -> None:
        """Run the servers: the contexts must be entered and left in one task."""
        try:
            async with AsyncExitStack() as stack:
                for context in self._contexts:
                    await stack.enter_async_context(context)
                self.ready.set_result(None)
                await self._stop.wait()
        except Exception as error:
            if self.ready.done():
                warn(f"servers for agents failed at their end: {error}", EnvironmentWarning)
            else:
                self.ready.set_exception(error)
        finally:
            self._ended.set_result(None)
