"""Writing of the page as one file with script, style and the data of runs, bounded in size."""

import base64
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from re import MULTILINE
from re import compile as pattern
from typing import Any, NamedTuple

from covey.observability.page.runs import RecordedRun, packed
from covey.observability.record_files import FOLDER
from covey.runtime.files import written_whole

ASSETS = Path(__file__).with_name("assets")
SCRIPTS = ("core.js", "charts.js", "lists.js", "tokens.js", "run.js", "study.js", "page.js")
"""Scripts in the order of their dependencies; they are sent as one file."""
MODULE_WORDS = pattern(r"^import [^;]*;\n|^export ", MULTILINE)
MOST_LOGS = 2000  # lines of metrics in a page
MOST_BATCHES = 512  # files of rollout batches whose rollouts are listed and drawn
MEGABYTE = 10**6
OWN_BYTES, MOST_TEXTS = 6 * MEGABYTE, 8  # of the page that a run writes itself: its data, and batches with texts
SHARE = 0.05  # of a run's time that its pages may take


class LeftOut(NamedTuple):
    """Numbers of rollout batches that a page leaves out."""

    batches: int  # neither listed nor drawn
    texts: int  # listed without their texts and tokens


def script() -> str:
    return "".join(MODULE_WORDS.sub("", (ASSETS / name).read_text()) for name in SCRIPTS)


class PageWriter:
    """Writes the page of a run or a study repeatedly while it continues, in a small share of its time."""

    def __init__(self, path: Path):
        self.path = path
        self._runs: dict[Path, RecordedRun] = {}  # which keep what earlier pages have read
        self._due = 0.0

    @property
    def is_due(self) -> bool:
        """False while a further page would take more than `SHARE` of the time."""
        return time.monotonic() >= self._due

    def write(self, folders: Sequence[Path], study: Mapping[str, Any] | None = None) -> None:
        """Write the page of the runs with a record in these folders; without any record or study, write nothing."""
        began = time.monotonic()
        recorded = [folder for folder in folders if (folder / FOLDER / "run.json").exists()]
        runs = [self._runs.setdefault(folder, RecordedRun(folder, cached=2)) for folder in recorded]
        if runs or study is not None:
            write_page(self.path, runs, study=study, max_bytes=OWN_BYTES, most_texts=MOST_TEXTS)
        self._due = time.monotonic() + (time.monotonic() - began) / SHARE


def write_page(
    path: Path,
    runs: Sequence[RecordedRun],
    *,
    study: Mapping[str, Any] | None = None,
    steps: range | None = None,
    max_bytes: float = 64 * MEGABYTE,
    most_texts: int | None = None,
) -> LeftOut:
    """Write the page of runs, or of a study with the runs of its variants.

    Of a long run only every second, fourth, eighth rollout batch and so on is listed, so that the page does not grow
    with the run; of those that are listed, the latest have their texts and tokens.

    Args:
        path: the file.
        runs: their records; what is read is cached for the next page.
        study: table, curves and history, as `covey_tools.study.page.page_of` gives them.
        steps: optimizer steps whose rollouts have texts; by default all.
        max_bytes: most bytes of data; half of it for lists and curves.
        most_texts: most rollout batches of each run that have texts.
    """
    data: dict[str, str] = {}
    states, chosen, missing = [], [], 0
    for number, run in enumerate(runs):
        state = run.state()
        blocks = _listed(run, [key for key, _ in state["blocks"]], max_bytes / 2 / len(runs))
        left_out = len(state["blocks"]) - len(blocks)
        states.append({**state, "blocks": [one for one in state["blocks"] if one[0] in blocks], "left_out": left_out})
        missing += left_out
        chosen.append([*blocks])
        pairs = run.pairs()
        shown = (row for pair in pairs for row in (pair["before"], pair["after"]) if row)
        data |= {f"run/{number}": packed(run.described(MOST_LOGS)), f"pairs/{number}": packed(pairs)}
        data |= {f"blocks/{number}/{key}": block for key, block in blocks.items()}
        data |= _images(number, run, {name for row in shown for name in row["image_files"] or ()})
    data["state"] = packed({"runs": states, "study": study})
    size, without = sum(map(len, data.values())), 0
    for name, chunk in _texts(runs, chosen, steps, most_texts):
        if size + len(chunk) > max_bytes:
            without += name.startswith("rollouts/")
        elif name not in data:
            data[name] = chunk
            size += len(chunk)
    with written_whole(path) as new:
        new.write_text(_page(data))
    return LeftOut(missing, without)


def _listed(run: RecordedRun, keys: Sequence[str], max_bytes: float) -> dict[str, str]:
    """Packed summaries of as many rollout batches as fit: evenly spread ones, and the last."""
    numbers = list(dict.fromkeys(key.partition(".")[0] for key in keys))
    while True:
        kept = {*numbers[:: run.stride], *numbers[-1:]}
        listed = [key for key in keys if key.partition(".")[0] in kept]
        if len(listed) <= MOST_BATCHES or run.stride >= len(numbers):
            blocks = run.packed_blocks(listed)
            if sum(map(len, blocks.values())) <= max_bytes or run.stride >= len(numbers):
                return blocks
        run.stride *= 2


def _texts(
    runs: Sequence[RecordedRun], chosen: Sequence[Sequence[str]], steps: range | None, most: int | None
) -> Iterator[tuple[str, str]]:
    """Rollouts and images of rollout batches, the latest first."""
    for number, (run, keys) in enumerate(zip(runs, chosen, strict=True)):
        for key in [*reversed(keys)][:most]:
            rollouts = run.rollout_batch(key)
            if steps is not None and rollouts and rollouts[0]["step"] not in steps:
                continue
            yield f"rollouts/{number}/{key}", packed(rollouts)
            yield from _images(number, run, {name for one in rollouts for name in one.get("image_files") or ()}).items()


def _images(number: int, run: RecordedRun, names: set[str]) -> dict[str, str]:
    found = {}
    for name in sorted(names):
        image = base64.b64encode(run.image(name).read_bytes()).decode()
        found[f"image/{number}/{name}"] = packed(f"data:image/png;base64,{image}")
    return found


def _page(data: Mapping[str, str]) -> str:
    """The page as one file, whose content security policy allows only its own script and style."""
    page, style, code = ((ASSETS / "index.html").read_text(), (ASSETS / "style.css").read_text(), script())
    policy = (
        f"default-src 'none'; script-src {digest(code)}; style-src {digest(style)}; img-src data:; base-uri 'none';"
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


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
