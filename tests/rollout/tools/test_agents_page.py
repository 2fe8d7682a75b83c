"""The examples of docs/agents.md are true."""

import doctest
from pathlib import Path

from covey.rollout.tools.parsers import TOOL_PARSERS

PAGE = Path(__file__).parents[3] / "docs" / "agents.md"


def test_the_examples_give_what_the_page_says():
    assert doctest.testfile(str(PAGE), module_relative=False).failed == 0


def test_every_notation_is_on_the_page():
    assert all(f"| `{name}` |" in PAGE.read_text() for name in TOOL_PARSERS)
