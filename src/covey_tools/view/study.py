"""The page of a study while it trains: its table, curves and runs, and the commands that `covey study` sends."""

from pathlib import Path
from typing import Any

from aiohttp import web

from covey.observability.page.runs import RecordedRun
from covey.runtime.user_code import format_error
from covey_tools.study.command import changes_of
from covey_tools.study.commands import Command, send
from covey_tools.study.page import page_of, recorded
from covey_tools.view import server


def application(folder: Path) -> web.Application:
    """The paths of the page of a study's runs, with the study itself, and where commands are sent."""
    runs: list[RecordedRun] = []  # in the order in which their records appeared, as addresses name their places

    def study() -> dict[str, Any]:
        runs.extend(RecordedRun(one) for one in recorded(folder) if one not in [run.folder for run in runs])
        return {**page_of(folder), "takes_commands": True}

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

    app = server.application(runs, study)
    app.router.add_post("/api/command", command)
    return app
