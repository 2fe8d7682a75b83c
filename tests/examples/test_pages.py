"""Pages of the documentation: links lead somewhere, every code block runs.

A Python block that cannot run here has a comment before it: `<!-- not run: why -->`. Names that a block takes for
granted (a dataset, a reward function) are in `given`; trainers are built with the block's arguments and a tiny model.
"""

import doctest
import re
import shlex
import subprocess
from pathlib import Path

import datasets
import pytest

import covey
from covey import GRPOConfig, GRPOTrainer
from covey.algorithms.algorithm import LOSS_TYPES
from covey.cli.main import COMMANDS
from covey.rewards import accuracy_reward
from tests.support import runs, tiny
from tests.support.playing import TEMPLATE

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name if page.parent == ROOT else page.stem)


def blocks(page, language):
    """(line number, code) of the code blocks in a language that are not marked as not run."""
    text = page.read_text()
    for block in re.finditer(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        before = text[: block.start()].rstrip().splitlines()
        if not (before and re.fullmatch(r"<!-- not run: .+ -->", before[-1])):
            yield text[: block.start()].count("\n") + 2, block[1]


# ---- links -----------------------------------------------------------------------------------------------------------


def anchors(page):
    """The anchors that headings get: lower case, spaces as hyphens, other punctuation dropped."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name} links to {target}; {file.name} has no such heading"


@each_page
def test_source_files_that_are_named_exist(page):
    """Paths in backticks such as `core/batch.py`, relative to the library or to the repository."""
    named = re.findall(r"`((?:[\w.]+/)+[\w.]+\.(?:py|md|json|yaml))`", page.read_text())
    missing = [name for name in named if not any((root / name).exists() for root in (ROOT / "src" / "covey", ROOT))]
    assert not [name for name in missing if name.split("/")[0] not in ("my_package", "runs", "completions")]


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md"]
    assert not [name for name in pages if f"]({name})" not in index]


def test_the_page_of_the_command_line_lists_every_command():
    rows = re.findall(r"^\| (`covey .*?) \|", (ROOT / "docs" / "command-line.md").read_text(), flags=re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`covey ([\w-]+)", row)} == {*COMMANDS}


def test_members_of_the_api_page_are_defined_where_it_says():
    """The site leaves out, without a warning, a name that its module does not define."""
    text = (ROOT / "docs" / "api.md").read_text()
    named = re.findall(r"^::: ([\w.]+)\n(?:    .*\n)*?.*members: \[(\w.*)\]", text, flags=re.MULTILINE)
    assert len(named) > 10
    for place, members in named:
        path = ROOT / "src" / place.replace(".", "/")
        for source in filter(Path.exists, (path.with_suffix(".py"), path / "__init__.py")):  # none of a class
            defined = re.findall(r"^(?:class|def|async def) (\w+)", source.read_text(), flags=re.MULTILINE)
            assert {*members.split(", ")} <= {*defined}, place


def test_tests_that_forbid_bugs_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "benchmarks" / "bugs.md").read_text())
    assert len(named) >= 12
    assert not [name for path, name in named if f"def {name}(" not in (ROOT / path).read_text()]


def test_every_page_is_in_the_navigation_of_the_site():
    named = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(named) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


# ---- Python ----------------------------------------------------------------------------------------------------------


def written(arguments):
    """Keyword arguments of a block without those that it leaves out; `[row, ...]` is a list of eight such rows."""
    arguments = {name: value for name, value in arguments.items() if value is not ...}
    lists = {name: value for name, value in arguments.items() if isinstance(value, list) and value[-1:] == [...]}
    return {**arguments, **{name: [value[0]] * 8 for name, value in lists.items()}}


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Names that the pages take for granted; trainers and configs are those of tiny runs."""
    monkeypatch.chdir(tmp_path)
    chat = tiny.rows(conversational=True)
    rows = [{**row, "solution": row["answer"]} for row in chat]

    def config(*left_out, **settings):
        return GRPOConfig(**{"output_dir": str(tmp_path / "run"), **runs.DEFAULTS, "max_steps": 1, **settings})

    def trainer(*left_out, **arguments):
        tokenizer = tiny.tokenizer()
        tokenizer.chat_template = TEMPLATE
        parts = {
            "reward_funcs": runs.longer,
            "train_dataset": rows,
            "args": config(per_device_eval_batch_size=4),
            "processing_class": tokenizer,
            **written(arguments),
            "model": tiny.model(max_position_embeddings=512),
        }
        if parts["args"].eval_strategy != "no":
            parts.setdefault("eval_dataset", rows[:2])
        return GRPOTrainer(**parts)

    trained = trainer(args=config())
    trained.train()
    monkeypatch.setattr(covey, "GRPOConfig", config)
    monkeypatch.setattr(covey, "GRPOTrainer", trainer)
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: datasets.Dataset.from_list(rows))
    known = dict(LOSS_TYPES)
    yield {
        "GRPOConfig": config,
        "GRPOTrainer": trainer,
        "dataset": rows,
        "rows": rows,
        "held_out": rows[:2],
        "others": rows[2:4],
        "model": None,  # every trainer gets a tiny one
        "settings": {"per_device_eval_batch_size": 4},
        "trainer": trained,
        "tokenizer": tiny.tokenizer(),
        "right": runs.longer,
        "right_answer": runs.longer,
        "my_reward": runs.longer,
        "accuracy_reward": accuracy_reward,
    }
    for name in LOSS_TYPES.keys() - known.keys():
        del LOSS_TYPES[name]


@each_page
@pytest.mark.filterwarnings("ignore")
def test_python_blocks_run(page, given):
    if page.stem == "start":
        pytest.skip("its blocks are files: test_first_hour follows it")
    examples = doctest.DocTestParser().get_doctest(page.read_text(), given, page.name, str(page), 0)
    outcome = doctest.DocTestRunner().run(examples, clear_globs=False)
    assert not outcome.failed, "an example prints something else; see the output above"
    names = examples.globs
    for line, code in blocks(page, "python"):
        if ">>>" not in code:
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)


# ---- shell -----------------------------------------------------------------------------------------------------------


@each_page
def test_shell_commands_exist(page):
    """Blocks are valid shell; subcommands of covey, targets of make and scripts of this repository exist."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    consoles = [
        (line, "\n".join(re.findall(r"^\$ ((?:.*\\\n)*.*)$", code, re.MULTILINE)))
        for line, code in blocks(page, "console")
    ]
    for line, code in [*blocks(page, "bash"), *consoles]:
        checked = subprocess.run(["bash", "-n"], input=code, text=True, capture_output=True)
        assert checked.returncode == 0, f"{page.name}:{line}: {checked.stderr}"
        for command in code.replace("\\\n", " ").splitlines():
            words = [word for word in shlex.split(command, comments=True) if not re.match(r"[A-Z_]+=", word)]
            if words[:1] == ["covey"]:
                assert words[1] in COMMANDS, command
            if words[:1] == ["make"]:
                assert {word for word in words[1:] if "=" not in word} <= targets, command
            for word in words:
                if re.match(r"(tests|tools|examples|benchmarks)/", word):
                    assert (ROOT / word).exists(), command
