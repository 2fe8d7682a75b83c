"""A study as its page shows it, read from its folder."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from covey.observability.record_files import FOLDER as RECORD
from covey_tools.study.commands import CURVES_FILE


def recorded(folder: Path) -> list[Path]:
    """Folders of the variants that have a record."""
    return [path.parent.parent for path in sorted(folder.glob(f"*/{RECORD}/run.json"))]


def page_of(folder: Path) -> dict[str, Any]:
    """The table and the history of `study.md`, and curves, as the page of a study shows them."""
    title, rows, *history = (folder / "study.md").read_text().split("\n\n", 3)
    head, _, *rest = rows.splitlines()
    curves = []
    with suppress(OSError, ValueError):
        curves = json.loads((folder / CURVES_FILE).read_text())
    return {
        "name": folder.resolve().name,
        "title": title.removeprefix("# ").strip(),
        "head": head.split(" | "),
        "rows": [row.split(" | ") for row in rest],
        "curves": curves,
        "history": [line[2:] for line in history[-1].splitlines()] if history else [],
    }
