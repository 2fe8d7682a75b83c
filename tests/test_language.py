"""The English of the field: openings of docstrings, words and names (glossary in CONTRIBUTING.md)."""

import ast
import collections
import functools
import re
from pathlib import Path

from tests.support.sources import statements

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "examples").rglob("*.py")])
SUPPORT = sorted((ROOT / "tests" / "support").rglob("*.py"))
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])

RIDDLE = re.compile(r"\s*(What|Whether|How|Who|Where|Those|That of|Not here)\b")
"""Openings of docstrings that hide what a thing is: begin with a noun or a verb."""

GLOSSARY = {
    r"anew": "again",
    r"for ever": "indefinitely",
    r"shared out": "sharded, distributed",
    r"in words(?![.\]:])": "(leave it out)",
    r"on paper": "estimated",
    r"(?<!\")siblings": "group",
    r"let go": "released",
    r"beside": "in addition to, next to",
    r"told": "given, informed; message",
    r"made of": "consists of",
    r"fleets?": "server pool",
    r"(?<!\.)dialects?": "API",
    r"(?<!in )(?<!in-)(?<!\")flights?": "in-flight batch",
    r"agency": "rollout spec",
    r"nobody's business": "(say whose it is)",
}
"""Private word -> the field's."""


@functools.cache
def documented(path: Path) -> list[tuple[ast.AST, str]]:
    """Modules, classes and functions of a file with their docstrings."""
    tree = ast.parse(path.read_text())
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [tree, *(node for node in statements(tree) if isinstance(node, kinds))]
    return [(node, ast.get_docstring(node) or "") for node in nodes]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_docstrings_begin_with_a_noun_or_a_verb():
    riddles = []
    for path in (*SOURCES, *SUPPORT):
        for node, doc in documented(path):
            if RIDDLE.match(doc):
                riddles.append(f"{relative(path)}:{getattr(node, 'lineno', 1)}: {doc.splitlines()[0]}")
        assert "Not here:" not in path.read_text(), path
    assert riddles == []


def test_words_are_those_of_the_glossary():
    found = []
    for path in (*SOURCES, *SUPPORT, *PAGES):
        text = path.read_text()
        for word, instead in GLOSSARY.items():
            for match in re.finditer(rf"\b{word}\b", text, re.IGNORECASE):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{relative(path)}:{line}: {match[0]!r}: write {instead}")
    assert found == []


def test_private_words_are_found():
    assert re.search(r"\b(?<!in )(?<!in-)flights?\b", "a flight of two")
    assert not re.search(r"\b(?<!in )(?<!in-)flights?\b", "requests in flight, in-flight batches")
    assert RIDDLE.match("Whether it is so.") and not RIDDLE.match("Howard's formula.")


def test_public_classes_have_names_of_their_own():
    homes = collections.defaultdict(set)
    for path in (ROOT / "src").rglob("*.py"):
        for node, _ in documented(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(relative(path))
    assert {name: sorted(paths) for name, paths in homes.items() if len(paths) > 1} == {}
