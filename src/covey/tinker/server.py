"""The server: HTTP routes, the key, limits of requests, and long polls."""

import asyncio
import hmac
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from covey.runtime.user_code import format_error
from covey.tinker.errors import Refusal
from covey.tinker.service import TinkerService
from covey.tinker.wire import WireError, read_forward_backward

MAX_BODY = 64 << 20  # bytes of a request
READ = 60.0  # seconds in which a request's body must come
LARGE = 1 << 20  # bytes from which a body is parsed on a thread of its own
POLL = 30.0  # seconds that a question for a result is held; the client waits 45
SWEEP = 60.0  # seconds between checks for silent sessions
API = "/api/v1"
PROTOBUF = "application/x-protobuf"

Answer = dict[str, Any] | web.StreamResponse


class TinkerServer:
    """A service behind HTTP; an async context in which it listens."""

    def __init__(self, service: TinkerService, host: str = "127.0.0.1", port: int = 0, key: str | None = None):
        """Listen at a port, 0 for any that is free. Any key with the right beginning will do if `key` is None."""
        self.service, self._address, self._key = service, (host, port), key
        self.url = ""

    async def __aenter__(self) -> "TinkerServer":
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guarded])
        service = self.service
        posts: dict[str, Callable[[dict[str, Any]], Any]] = {
            "client/config": lambda body: dict(service.settings.client_config),
            "client/dynamic_config": lambda body: {"sample_cancel_enabled": True},
            "telemetry": lambda body: {"status": "accepted"},
            **{
                name: getattr(service, name)
                for name in (
                    *(
                        "create_session",
                        "session_heartbeat",
                        "create_model",
                        "load_weights",
                        "get_info",
                        "unload_model",
                    ),
                    *(
                        "optim_step",
                        "save_weights",
                        "save_weights_external",
                        "save_weights_for_sampler",
                        "weights_info",
                    ),
                    *("create_sampling_session", "asample", "cancel_future"),
                )
            },
        }
        for name, method in posts.items():
            app.router.add_post(f"{API}/{name}", self._json(method))
        app.router.add_post(f"{API}/forward_backward", self._forward_backward)
        app.router.add_post(f"{API}/retrieve_future", self._retrieve)
        app.router.add_post(f"{API}/sessions/{{id}}/finish", self._finish)
        app.router.add_get(f"{API}/healthz", self._get(lambda request: {"status": "ok"}))
        app.router.add_get(f"{API}/get_server_capabilities", self._get(lambda request: service.capabilities()))
        app.router.add_get(f"{API}/samplers/{{id}}", self._get(lambda request: service.sampler(_id(request))))
        runs = f"{API}/training_runs"
        app.router.add_get(runs, self._get(lambda request: service.training_runs(request.query)))
        app.router.add_get(f"{runs}/{{id}}", self._get(lambda request: service.training_run(_id(request))))
        app.router.add_get(f"{API}/checkpoints", self._get(lambda request: service.checkpoints(None, request.query)))
        listed = self._get(lambda request: service.checkpoints(_id(request), request.query))
        app.router.add_get(f"{runs}/{{id}}/checkpoints", listed)
        one = f"{runs}/{{id}}/checkpoints/{{checkpoint:[^/]+/[^/]+}}"
        download = self._get(lambda request: service.download(*_checkpoint(request), f"{self.url}{API}"))
        app.router.add_get(f"{one}/external_weights_urls", download)
        app.router.add_delete(one, self._get(lambda request: service.delete_checkpoint(*_checkpoint(request))))
        app.router.add_put(f"{one}/ttl", self._keep)
        app.router.add_get(f"{API}/download/{{key}}/{{name}}", self._download)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        # A body that was refused is read on for as long as `lingering_time`, so that its client reads the refusal.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, lingering_time=1.0)
        await service.restore()
        await self._runner.setup()
        await web.TCPSite(self._runner, *self._address).start()
        host = self._address[0]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._runner.addresses[0][1]}"
        self._sweeper = asyncio.create_task(self._sweep())
        return self

    async def __aexit__(self, *raised: Any) -> None:
        self._sweeper.cancel()
        await self._runner.cleanup()
        await self.service.stop()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP)
            await self.service.end_silent_sessions()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Refuse requests without the key, and answer each failure with a text."""
        try:
            if (refused := self._objection(request)) is not None:
                return refused
            response: web.StreamResponse = await handler(request)
            return response
        except Refusal as error:
            return _refused(str(error), error.status)
        except WireError as error:
            return _refused(f"the body is no message of this route: {error}", 400)
        except web.HTTPRequestEntityTooLarge:
            return _refused(f"a request has at most {MAX_BODY:,} bytes.", 413)
        except web.HTTPException as error:
            return _refused(f"{request.method} {request.path[:200]}: {error.reason}.", error.status)
        except TimeoutError:
            return _refused(f"the body did not come within {READ:.0f} seconds.", 408)
        except (web.RequestPayloadError, HttpProcessingError, ConnectionError) as error:
            return _refused(f"the body cannot be read: {format_error(error)}", 400)
        except (UnicodeError, OverflowError, RecursionError) as error:
            return _refused(f"the request cannot be read: {format_error(error)}", 400)
        except Exception as error:  # a mistake of the server: the client repeats such requests
            return _refused(format_error(error), 500)

    def _objection(self, request: web.Request) -> web.Response | None:
        if request.path.startswith(f"{API}/download/"):
            return None  # its path holds a key
        if "Origin" in request.headers:
            return _refused("requests of pages in a browser are refused.", 403)
        key = request.headers.get("X-API-Key", "")
        given = key.encode("utf-8", "surrogateescape")  # as it came
        right = key.startswith("tml-") if self._key is None else hmac.compare_digest(given, self._key.encode())
        if not right:
            return _refused("the API key is wrong: set TINKER_API_KEY to the server's.", 401)
        local = self._address[0] in ("127.0.0.1", "localhost", "::1")
        if local and request.host.rpartition(":")[0] not in ("127.0.0.1", "localhost", "[::1]"):
            return _refused(f"this server is not called {request.host[:200]!r}; use the address that it printed.", 403)
        return None

    def _json(self, method: Callable[[dict[str, Any]], Any]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            answer = method(await _body(request))
            return web.json_response(await answer if asyncio.iscoroutine(answer) else answer)

        return handle

    def _get(self, method: Callable[[web.Request], Any]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            return web.json_response(method(request))

        return handle

    async def _forward_backward(self, request: web.Request) -> web.StreamResponse:
        if request.content_type != PROTOBUF:
            raise Refusal("forward_backward is read as protobuf, which clients from 0.25.0 on send. Update `tinker`.")
        data = await _read(request)
        if len(data) < LARGE:
            return web.json_response(self.service.forward_backward(read_forward_backward(data)))
        return web.json_response(self.service.forward_backward(await asyncio.to_thread(read_forward_backward, data)))

    async def _retrieve(self, request: web.Request) -> web.StreamResponse:
        result = await self.service.retrieve_future(await _body(request), POLL)
        if result is None:
            return _refused("it is not done yet.", 408)
        if isinstance(result, bytes):
            return web.Response(body=result, content_type=PROTOBUF)
        return web.json_response(result)

    async def _finish(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(await self.service.finish_session(_id(request)))

    async def _keep(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self.service.keep_checkpoint(*_checkpoint(request), await _body(request)))

    async def _download(self, request: web.Request) -> web.StreamResponse:
        place, _ = self.service.downloads.get(request.match_info["key"], (None, 0.0))
        name = request.match_info["name"]
        if place is None or name not in ("adapter_model.safetensors", "adapter_config.json"):
            raise Refusal("there is no such file, or its address has expired; ask for it again.", 404)
        return web.FileResponse(Path(place) / name)

    async def _unknown(self, request: web.Request) -> web.StreamResponse:
        raise Refusal(f"{request.method} {request.path[:200]} is not served here.", 404)


def _id(request: web.Request) -> str:
    return request.match_info["id"]


def _checkpoint(request: web.Request) -> tuple[str, str]:
    return request.match_info["id"], request.match_info["checkpoint"]


def _refused(text: str, status: int) -> web.Response:
    return web.json_response({"detail": text}, status=status)


async def _read(request: web.Request) -> bytes:
    """A request's body; TimeoutError for one that stops halfway."""
    async with asyncio.timeout(READ):
        return await request.read()


async def _body(request: web.Request) -> dict[str, Any]:
    data = await _read(request)
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is not JSON: {format_error(error)}") from None
    if not isinstance(body, dict):
        raise Refusal(f"the body must be a JSON object, got a {type(body).__name__}.")
    return body


@contextmanager
def served(service: TinkerService, host: str = "127.0.0.1", port: int = 0, key: str | None = None) -> Iterator[str]:
    """Serve on a thread of its own within the context; gives the address."""
    ready: Future[str] = Future()
    stop: list[Callable[[], Any]] = []

    async def main() -> None:
        end, loop = asyncio.Event(), asyncio.get_running_loop()
        async with TinkerServer(service, host, port, key) as server:
            stop.append(lambda: loop.call_soon_threadsafe(end.set))
            ready.set_result(server.url)
            await end.wait()

    def run() -> None:
        try:
            asyncio.run(main())
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=run, name="covey-tinker-http", daemon=True)
    thread.start()
    try:
        yield ready.result()
    finally:
        for one in stop:
            with suppress(RuntimeError):
                one()
        thread.join()
