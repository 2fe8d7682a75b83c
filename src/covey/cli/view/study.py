"""Page of a study while it trains: its table and curves, and the commands that `covey study` sends."""

import asyncio
import html
import json
from functools import lru_cache, partial
from pathlib import Path

from aiohttp import web

from covey.cli.study import changes_of
from covey.cli.view import server
from covey.cli.view.server import HEADERS, PAGE, guard, send_text
from covey.observability.page.runs import RecordedRun
from covey.observability.plots import Panel
from covey.observability.record_files import FOLDER
from covey.observability.report import page_of
from covey.runtime.user_code import format_error
from covey.study.commands import CURVES_FILE, Command, read_state, send
from covey.study.report import curves_of, drawn, title_and_sections
from covey.study.variants import Variant

POLICY = HEADERS["Content-Security-Policy"].replace("style-src 'self'", "style-src 'unsafe-inline'")
DIALOG = """<dialog aria-labelledby="asked"><form>
<h2 id="asked"></h2>
<label>Name of the clone <input name="to" autocomplete="off"></label>
<label>Settings, a field=value in each line <textarea name="changes" rows="3"></textarea></label>
<label><input type="checkbox" name="fresh"> Begin with a new optimizer</label>
<p role="status"></p>
<p><button>Send</button> <button type="button">Cancel</button></p>
</form></dialog>"""


def application(folder: Path) -> web.Application:
    """The paths of the page: itself, its script, where commands are sent, and the page of the variants' runs."""
    runs: list[RecordedRun] = []  # in the order in which their records appeared
    one_at_a_time = asyncio.Lock()  # matplotlib's settings are of the whole process

    async def page(request: web.Request) -> web.Response:
        try:
            for path in sorted(folder.glob(f"*/{FOLDER}/run.json")):  # earlier ones keep their places: their addresses
                if path.parent.parent not in [run.folder for run in runs]:
                    runs.append(RecordedRun(path.parent.parent))
            async with one_at_a_time:
                text = await asyncio.to_thread(live_page, folder, [run.folder.name for run in runs])
        except OSError as error:
            raise web.HTTPNotFound(text=f"the study has not finished a round yet: {error}") from error
        return web.Response(text=text, content_type="text/html", headers={"Content-Security-Policy": POLICY})

    async def command(request: web.Request) -> web.Response:
        if request.content_type != "application/json":  # which no form of another page sends unasked
            raise web.HTTPUnsupportedMediaType(text="A command is JSON.")
        try:
            asked = await request.json()
            words = [line.strip() for line in str(asked["changes"]).splitlines() if line.strip()]  # field=value in each
            wanted = (str(asked["kind"]), str(asked["name"]), asked["to"] or None, asked["fresh"] is True)
        except (TypeError, ValueError, LookupError) as error:
            return web.Response(status=400, text=f"This is no command: {format_error(error)}")
        kind, name, to, fresh = wanted
        try:
            return web.Response(text=send(folder, Command(kind, name, changes_of(words), to, fresh=fresh)))
        except (ValueError, OSError) as error:  # what the command asks for cannot be done
            return web.Response(status=400, text=str(error))

    app = web.Application(middlewares=[guard])
    app.router.add_get("/", page)
    app.router.add_get("/study.js", partial(send_text, "text/javascript", (PAGE / "study.js").read_text))
    app.router.add_post("/command", command)
    app.add_subapp("/runs/", server.application(runs))
    return app


def live_page(folder: Path, recorded: list[str]) -> str:
    """The page with the table and the curves of the last round."""
    if (folder / CURVES_FILE).is_file():
        curves = _drawn((folder / CURVES_FILE).read_text())
    else:  # of an earlier release
        variants = read_state(folder)["variants"].items()
        curves = drawn(curves_of({name: Variant(**one) for name, one in variants}))
    title, sections = title_and_sections((folder / "study.md").read_text(), curves)
    shown = f'<div id="study" data-runs="{html.escape(json.dumps(recorded))}">{"".join(sections)}</div>'
    return page_of(title, ['<p role="status"></p>', shown, DIALOG, '<script src="study.js"></script>'])


@lru_cache(1)
def _drawn(curves: str) -> str:
    return drawn([(points, Panel(**panel)) for points, panel in json.loads(curves)])
