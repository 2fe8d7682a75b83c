"""Write notebooks/first_hour.ipynb from docs/start.md: text as it is, files and commands as cells that run.

Usage: python tools/notebook.py
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "start.md"
NOTEBOOK = ROOT / "notebooks" / "first_hour.ipynb"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n?", re.MULTILINE | re.DOTALL)
HERE = ("mkdir ",)  # a notebook stays where it is


def render(page: str) -> str:
    """The notebook of a page."""
    cells, end = [], 0
    for block in BLOCK.finditer(page):
        text, end = page[end : block.start()], block.end()
        if text.rstrip().endswith("-->"):  # a block that is not run: part of the text
            cells.append(cell("markdown", f"{text.rstrip().rpartition('<!--')[0].rstrip()}\n\n{block[0]}"))
            continue
        if text.strip():
            cells.append(cell("markdown", text))
        cells.append(cell("code", code(text, block[1], block[2])))
    cells.append(cell("markdown", page[end:]))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    for number, made in enumerate(cells):
        made["id"] = f"cell-{number}"
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def code(before: str, language: str, content: str) -> str:
    """A cell that writes the file which the text before names and runs it if it is the last one, or runs commands."""
    named = re.search(r"`([\w.]+)`:$", before.rstrip())
    if named:
        return f"%%writefile {named[1]}\n{content}" if named[1] != "ask.py" else content
    lines = [line for line in content.splitlines() if not line.startswith(HERE)]
    return "%%bash\nset -e\n" + "\n".join(lines)


def cell(kind: str, text: str) -> dict:
    """A cell of a notebook; links lead to the pages, one folder away."""
    if kind == "markdown":
        text = re.sub(r"\]\(([\w-]+\.md)", r"](../docs/\1", text)
    made = {"cell_type": kind, "metadata": {}, "source": text.strip("\n").splitlines(keepends=True)}
    return made | ({"execution_count": None, "outputs": []} if kind == "code" else {})


if __name__ == "__main__":
    NOTEBOOK.parent.mkdir(exist_ok=True)
    NOTEBOOK.write_text(render(PAGE.read_text()))
