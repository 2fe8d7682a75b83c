"""The page about metrics says what the code says."""

from pathlib import Path

from covey.observability.metric_docs import METRIC_MEANINGS

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_every_metric_is_documented_with_its_meaning():
    page = PAGE.read_text()
    assert [name for name, text in METRIC_MEANINGS.items() if f"| `{name}` | {text} |" not in page] == []


def test_nothing_else_is_documented():
    page = PAGE.read_text().split("## Your own")[0]
    rows = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(METRIC_MEANINGS)
