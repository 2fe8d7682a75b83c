"""Look at runs on a page of this machine: `covey view RUN [RUN ...]`.

Shows the record of each run, also while it goes on: curves, groups, completions, and every token with its values. A
study's folder is shown alone, as its table, its curves, and the commands of `covey study`.
"""

import argparse
import asyncio
import base64
import gzip
import hashlib
import json
import sys
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from covey.cli.view.server import PAGE, application, script, serve
from covey.observability.page.runs import RecordedRun
from covey.runtime.files import written_whole
from covey.study.commands import STATE

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
    if is_study and (len(options.runs) > 1 or options.export is not None):
        raise ValueError(f"{str(options.runs[0])!r} is a study, which is shown alone; its page to send is study.html.")
    runs = [] if is_study else [RecordedRun(folder) for folder in options.runs]
    if options.export is not None:
        left_out = export(runs, options.export, _steps(options.steps), (options.max_mb or MAX_MB) * 1e6)
        size = options.export.stat().st_size / 1e6
        print(f"{options.export}: {size:.1f} MB" + (f", without the tokens of {left_out}" if left_out else ""))
        return 0

    def started(address: str) -> None:
        print(f"{', '.join(map(str, options.runs))}: {address}  (Ctrl-C ends)", flush=True)
        if options.open:
            webbrowser.open(address)

    def app() -> web.Application:
        from covey.cli.view import study  # which imports torch

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


def export(runs: list[RecordedRun], path: Path, steps: range | None, max_bytes: float) -> str:
    """Write the page with the data of the runs; returns the generations whose tokens did not fit, in words."""
    states = [run.state() for run in runs]
    data = {"state": _packed({"runs": states})}
    for number, (run, state) in enumerate(zip(runs, states, strict=True)):
        data[f"run/{number}"] = _packed(run.described())
        data[f"blocks/{number}"] = _packed(run.blocks([key for key, _ in state["blocks"]]))
    left_out, size = 0, sum(map(len, data.values()))
    for name, chunk in _generations(runs, states, steps):
        if size + len(chunk) > max_bytes:
            left_out += 1
        else:
            data[name] = chunk
            size += len(chunk)
    with written_whole(path) as new:
        new.write_text(_page(data))
    return f"{left_out} rollout batches (--steps A:B or --max_mb chooses others)" if left_out else ""


def _generations(runs: list[RecordedRun], states: list[Any], steps: range | None) -> Iterator[tuple[str, str]]:
    """Rollouts and images, the latest first."""
    for number, (run, state) in enumerate(zip(runs, states, strict=True)):
        images: set[str] = set()
        for key, _ in reversed(state["blocks"]):
            rollouts = run.generation(key)
            if steps is not None and rollouts and rollouts[0]["step"] not in steps:
                continue
            yield f"generation/{number}/{key}", _packed(rollouts)
            for name in {name for one in rollouts for name in one.get("image_files") or ()} - images:
                images.add(name)
                image = base64.b64encode(run.image(name).read_bytes()).decode()
                yield f"image/{number}/{name}", _packed(f"data:image/png;base64,{image}")


def _page(data: dict[str, str]) -> str:
    """The page as one file, whose policy allows its own script and style and nothing from elsewhere."""
    page, style, code = ((PAGE / "index.html").read_text(), (PAGE / "style.css").read_text(), script())
    policy = (
        f"default-src 'none'; script-src {_digest(code)}; style-src {_digest(style)}; img-src data:; base-uri 'none';"
        " form-action 'none'"
    )
    held = json.dumps(data).replace("<", "\\u003c")
    viewport = '<meta name="viewport"'
    scripts = f'<script type="application/json" id="data">{held}</script>\n<script type="module">{code}</script>'
    for old, new in (
        (viewport, f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n{viewport}'),
        ('<link rel="stylesheet" href="style.css">', f"<style>{style}</style>"),
        ('<script type="module" src="page.js"></script>', scripts),
    ):
        assert page.count(old) == 1, old
        page = page.replace(old, new)
    return page


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _packed(value: Any) -> str:
    return base64.b64encode(gzip.compress(json.dumps(value).encode(), 6)).decode()


def _steps(text: str | None) -> range | None:
    if text is None:
        return None
    first, _, last = text.partition(":")
    try:
        return range(int(first or 1), int(last or first) + 1)
    except ValueError:
        raise ValueError(f"--steps {text!r}: give the first and the last step, as in --steps 3:5.") from None
