"""The tables of the page about metrics are read, each row."""

from covey.observability.metric_docs import is_taken, meaning, meanings
from covey.runtime.files import shipped


def test_every_row_of_the_page_is_read():
    page = shipped("docs/metrics.md").read_text().split("## Your own")[0]
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert [f"| `{name}` | {text} |" for name, text in meanings().items()] == rows and len(rows) > 60


def test_names_of_the_page_are_taken():
    assert is_taken("reward") and is_taken("loss") and is_taken("rewards/mine/mean") and is_taken("pass@8")
    assert not is_taken("my/own") and not is_taken("environment/own") and not is_taken("pass@k")
    assert meaning("eval_reward") == meanings()["reward"]
