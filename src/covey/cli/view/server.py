"""Server of the page: on this machine alone, for requests that name it, and reading only."""

import asyncio
import json
import re
from base64 import b64encode
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from covey.cli.view.runs import RecordedRun

PAGE = Path(__file__).with_name("page")
SCRIPTS = ("core.js", "charts.js", "lists.js", "tokens.js", "run.js", "page.js")
"""In the order in which one needs the others; they are sent as one file."""
MODULE_WORDS = re.compile(r"^import [^;]*;\n|^export ", re.MULTILINE)
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


def script() -> str:
    """All modules as one."""
    texts = [(PAGE / name).read_text() for name in SCRIPTS]
    return "".join(MODULE_WORDS.sub("", text) for text in texts)


def application(runs: list[RecordedRun]) -> web.Application:
    """The server's paths; what reads files runs in threads, one at a time."""
    lock = asyncio.Lock()

    async def answer(read: Callable[..., Any], *args: Any) -> web.Response:
        try:
            async with lock:
                value = await asyncio.to_thread(lambda: json.dumps(read(*args)))
        except (LookupError, ValueError, OSError) as error:
            return web.Response(status=404, text=str(error))
        return web.json_response(text=value)

    def run_of(request: web.Request) -> RecordedRun:
        number = request.match_info["run"]
        if not number.isdecimal() or int(number) >= len(runs):
            raise web.HTTPNotFound(text=f"there is no run {number}")
        return runs[int(number)]

    async def page(request: web.Request) -> web.Response:
        return web.Response(text=(PAGE / "index.html").read_text(), content_type="text/html")

    async def style(request: web.Request) -> web.Response:
        return web.Response(text=(PAGE / "style.css").read_text(), content_type="text/css")

    async def code(request: web.Request) -> web.Response:
        return web.Response(text=script(), content_type="text/javascript")

    async def state(request: web.Request) -> web.Response:
        return await answer(lambda: {"runs": [run.state() for run in runs]})

    async def described(request: web.Request) -> web.Response:
        return await answer(run_of(request).described)

    async def blocks(request: web.Request) -> web.Response:
        return await answer(run_of(request).blocks, request.query.get("keys", "").split(","))

    async def rollout(request: web.Request) -> web.Response:
        return await answer(run_of(request).rollout, request.match_info["id"])

    async def search(request: web.Request) -> web.Response:
        return await answer(run_of(request).search, request.query.get("q", ""))

    async def image(request: web.Request) -> web.StreamResponse:
        try:
            data = run_of(request).image(request.match_info["name"]).read_bytes()
        except LookupError as error:
            return web.Response(status=404, text=str(error))
        return web.Response(body=data, content_type="image/png")

    app = web.Application(middlewares=[guard])
    app.router.add_get("/", page)
    app.router.add_get("/style.css", style)
    app.router.add_get("/page.js", code)
    app.router.add_get("/api/state", state)
    app.router.add_get("/api/run/{run}", described)
    app.router.add_get("/api/blocks/{run}", blocks)
    app.router.add_get("/api/rollout/{run}/{id}", rollout)
    app.router.add_get("/api/search/{run}", search)
    app.router.add_get("/api/image/{run}/{name}", image)
    return app


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer requests that name this machine: a foreign page whose name was made to lead here names itself."""
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
    """Serve until cancelled; `started` gets the address. OSError where the port is taken."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        started(f"http://127.0.0.1:{runner.addresses[0][1]}/")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def data_address(path: Path) -> str:
    return f"data:image/png;base64,{b64encode(path.read_bytes()).decode()}"
