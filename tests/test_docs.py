"""Tables of the pages: every row has a cell for each column, or readers see it cut."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def tables(text):
    """Rows of consecutive lines that begin with a bar, without blocks of code; an escaped bar is part of a cell."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for block in re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE):
        yield [re.split(r"(?<!\\)\|", row.strip())[1:-1] for row in block.splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_rows_of_tables_have_a_cell_for_each_column(page):
    wrong = [rows[n] for rows in tables(page.read_text()) for n in range(len(rows)) if len(rows[n]) != len(rows[1])]
    assert wrong == []
