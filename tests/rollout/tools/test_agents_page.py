"""docs/agents.md lists every notation of tool calls."""

from pathlib import Path

from covey.rollout.tools.parsers import TOOL_PARSERS

PAGE = Path(__file__).parents[3] / "docs" / "agents.md"


def test_every_notation_is_on_the_page():
    assert all(f"| `{name}` |" in PAGE.read_text() for name in TOOL_PARSERS)
