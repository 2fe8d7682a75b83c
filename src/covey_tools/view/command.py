"""Look at runs on a page of this machine: `covey view RUN [RUN ...]`.

Shows the record of each run, also while it continues: curves, groups, completions, and every token with its values. A
study's folder is shown alone, as its table, its curves, and the commands of `covey study`.
"""

import argparse
import asyncio
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from covey.observability.page.export import MEGABYTE, LeftOut, write_page
from covey.observability.page.runs import RecordedRun
from covey_tools.study.commands import STATE
from covey_tools.study.page import page_of, recorded
from covey_tools.view.server import application, serve

PORT = 6710
MAX_MB = 64.0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="covey view", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="output_dir of a run with a record")
    parser.add_argument("--port", type=int, help=f"of the page; by default {PORT}, or any that is free")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument("--export", type=Path, metavar="FILE.html", help="write the page into one file to send instead")
    parser.add_argument("--steps", metavar="A:B", help="with --export: only rollouts of these steps, from 1")
    parser.add_argument("--max_mb", type=float, help=f"with --export: size at which tokens are left out ({MAX_MB:g})")
    options = parser.parse_args(list(argv))
    exports = options.export is not None
    for name, goes, given in (
        ("steps", exports, options.steps is not None),
        ("max_mb", exports, options.max_mb is not None),
        ("port", not exports, options.port is not None),
        ("open", not exports, options.open),
    ):
        if given and not goes:
            raise ValueError(f"--{name} does not go with{'' if exports else 'out'} --export: leave it out.")
    if options.max_mb is not None and not options.max_mb > 0:
        raise ValueError(f"--max_mb {options.max_mb:g} must be above 0.")
    is_study = (options.runs[0] / STATE).is_file()
    if is_study and len(options.runs) > 1:
        raise ValueError(f"{str(options.runs[0])!r} is a study, which is shown alone: give its folder and no other.")
    folders = recorded(options.runs[0]) if is_study else options.runs
    runs = [RecordedRun(folder) for folder in folders]
    if options.export is not None:
        study = page_of(options.runs[0]) if is_study else None
        steps, size = _steps(options.steps), (options.max_mb or MAX_MB) * MEGABYTE
        left_out = write_page(options.export, runs, study=study, steps=steps, max_bytes=size)
        print(f"{options.export}: {options.export.stat().st_size / MEGABYTE:.1f} MB{_said(left_out)}")
        return 0

    def started(address: str) -> None:
        print(f"{', '.join(map(str, options.runs))}: {address}  (Ctrl-C ends)", flush=True)
        if options.open:
            webbrowser.open(address)

    def app() -> web.Application:
        from covey_tools.view import study

        return study.application(options.runs[0]) if is_study else application(runs)

    try:
        asyncio.run(serve(app(), PORT if options.port is None else options.port, started))
    except OSError:
        if options.port is not None:
            raise
        asyncio.run(serve(app(), 0, started))
    except KeyboardInterrupt:
        print(file=sys.stderr)
    return 0


def _said(left_out: LeftOut) -> str:
    batches = [f"{left_out.batches} rollout batches"] * bool(left_out.batches)
    texts = [f"the texts of {left_out.texts} rollout batches"] * bool(left_out.texts)
    wanted = " (--steps A:B or --max_mb chooses others)"
    return f", without {' and '.join(batches + texts)}{wanted}" if batches or texts else ""


def _steps(text: str | None) -> range | None:
    if text is None:
        return None
    first, _, last = text.partition(":")
    try:
        return range(int(first or 1), int(last or first) + 1)
    except ValueError:
        raise ValueError(f"--steps {text!r}: give the first and the last step, as in --steps 3:5.") from None
