"""Server of the page: reached from this machine only, and reading only, except for commands to a study."""

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from aiohttp import web

from covey.observability.page.export import ASSETS, script
from covey.observability.page.runs import NotRecorded, RecordedRun
from covey.runtime.user_code import format_error

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
NAMES = ("127.0.0.1", "localhost")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def send_text(kind: str, read: Callable[[], str], request: web.Request) -> web.Response:
    return web.Response(text=read(), content_type=kind)


def application(runs: list[RecordedRun], study: Callable[[], Any] = lambda: None) -> web.Application:
    """The server's paths; what reads files runs in threads, one at a time. `study` may add runs, and is shown first."""
    lock = asyncio.Lock()
    texts: dict[str, tuple[str, Callable[[], str]]] = {
        "/": ("text/html", (ASSETS / "index.html").read_text),
        "/style.css": ("text/css", (ASSETS / "style.css").read_text),
        "/page.js": ("text/javascript", script),
    }
    values: dict[str, Callable[[web.Request], Any]] = {
        "state": lambda request: {"study": study(), "runs": [run.state() for run in runs]},
        "run/{run}": lambda request: run_of(request).described(),
        "blocks/{run}": lambda request: run_of(request).blocks(request.query.get("keys", "").split(",")),
        "pairs/{run}": lambda request: run_of(request).pairs(),
        "rollout/{run}/{id}": lambda request: run_of(request).rollout(request.match_info["id"]),
        "search/{run}": lambda request: run_of(request).search(request.query.get("q", "")),
    }

    def run_of(request: web.Request) -> RecordedRun:
        number = request.match_info["run"]
        if not number.isdecimal() or int(number) >= len(runs):
            raise web.HTTPNotFound(text=f"there is no run {number}")
        return runs[int(number)]

    async def send_value(read: Callable[[web.Request], Any], request: web.Request) -> web.Response:
        try:
            async with lock:
                value = await asyncio.to_thread(lambda: json.dumps(read(request)))
        except (NotRecorded, OSError) as error:  # a file may have been removed meanwhile
            return web.Response(status=404, text=str(error))
        except (LookupError, ValueError, TypeError) as error:
            return web.Response(status=500, text=f"the record cannot be read ({format_error(error)})")
        return web.json_response(text=value)

    async def image(request: web.Request) -> web.StreamResponse:
        try:
            data = run_of(request).image(request.match_info["name"]).read_bytes()
        except NotRecorded as error:
            return web.Response(status=404, text=str(error))
        return web.Response(body=data, content_type="image/png")

    app = web.Application(middlewares=[guard])
    for path, text in texts.items():
        app.router.add_get(path, partial(send_text, *text))
    for path, value in values.items():
        app.router.add_get(f"/api/{path}", partial(send_value, value))
    app.router.add_get("/api/image/{run}/{name}", image)
    return app


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer only requests whose Host and Origin name this machine.

    The page of another site, whose name was made to resolve to this machine (DNS rebinding), sends its own name.
    """
    name = request.host.rpartition(":")[0] or request.host
    origin = request.headers.get("Origin")
    if name not in NAMES or (origin is not None and origin != f"http://{request.host}"):
        response: web.StreamResponse = web.Response(status=403, text="This page is for the machine it runs on.")
    else:
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = error
    response.headers.update({**HEADERS, **response.headers})
    return response


async def serve(app: web.Application, port: int, started: Callable[[str], None]) -> None:
    """Serve until cancelled, Ctrl-C or SIGTERM; `started` gets the address. OSError where the port is taken."""
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(RuntimeError, ValueError, NotImplementedError):  # on another thread, or another system
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        started(f"http://127.0.0.1:{runner.addresses[0][1]}/")
        await ended.wait()
    finally:
        await runner.cleanup()
