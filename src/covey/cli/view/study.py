"""Page of a study while it trains: its table and curves, and the commands that `covey study` sends."""

import asyncio
import re
from pathlib import Path
from typing import Any

from aiohttp import web

from covey.cli.study import changes_of
from covey.cli.view.server import HEADERS, PAGE, guard
from covey.observability.report import page_of
from covey.study.commands import Command, send
from covey.study.report import title_and_sections

CURVES = re.compile(r"<section><h2>Curves</h2>.*?</section>", re.DOTALL)
POLICY = HEADERS["Content-Security-Policy"].replace("style-src 'self'", "style-src 'unsafe-inline'")
FORM = """<form aria-label="Command to a variant">
<label>Variant <input name="name" required autocomplete="off"></label>
<label>New name, of a clone <input name="to" autocomplete="off"></label>
<label>Settings, a field=value in each line <textarea name="changes" rows="2"></textarea></label>
<label><input type="checkbox" name="fresh"> A clone begins with a new optimizer</label>
<p><button>stop</button> <button>resume</button> <button>change</button> <button>clone</button></p>
<p role="status"></p>
</form>"""


def application(folder: Path) -> web.Application:
    """The paths of the page: itself, its script, and where commands are sent."""

    async def page(request: web.Request) -> web.Response:
        try:
            text = await asyncio.to_thread(live_page, folder)
        except OSError as error:
            raise web.HTTPNotFound(text=f"the study has not finished a round yet: {error}") from error
        return web.Response(text=text, content_type="text/html", headers={"Content-Security-Policy": POLICY})

    async def code(request: web.Request) -> web.Response:
        return web.Response(text=(PAGE / "study.js").read_text(), content_type="text/javascript")

    async def command(request: web.Request) -> web.Response:
        if request.content_type != "application/json":  # which no form of another page sends unasked
            raise web.HTTPUnsupportedMediaType(text="A command is JSON.")
        try:
            send(folder, command_of(await request.json()))
        except (TypeError, AttributeError, ValueError, KeyError, OSError) as error:
            return web.Response(status=400, text=str(error))
        return web.Response(text="queued: it acts at the end of the step that runs")

    app = web.Application(middlewares=[guard])
    app.router.add_get("/", page)
    app.router.add_get("/study.js", code)
    app.router.add_post("/command", command)
    return app


def live_page(folder: Path) -> str:
    """The page with the table of the last round, and the curves that were drawn last."""
    drawn = CURVES.search((folder / "study.html").read_text()) if (folder / "study.html").is_file() else None
    title, sections = title_and_sections((folder / "study.md").read_text(), drawn[0] if drawn else "")
    shown = f'<div id="study">{"".join(sections)}</div>'
    return page_of(title, [shown, "<h2>Command</h2>", FORM, '<script src="study.js"></script>'])


def command_of(asked: dict[str, Any]) -> Command:
    """A command as the page sends it: `kind`, `name`, `to`, `fresh`, and `changes` as lines of field=value."""
    words = [line.strip() for line in str(asked["changes"]).splitlines() if line.strip()]
    return Command(
        str(asked["kind"]), str(asked["name"]), changes_of(words), asked["to"] or None, asked["fresh"] is True
    )
