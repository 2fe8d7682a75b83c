"""docs/troubleshooting.md and benchmarks/messages.md, rendered from the mistakes and their messages.

The first has what needs advice, the second what its own text explains; both show how a message begins.
`tools/troubleshooting.py` writes the pages; the tests compare every message with them.
"""

import re
import sys
import warnings
from pathlib import Path

from covey.core.findings import CheckError, CheckWarning
from tests.support.mistakes.advice import INTRODUCTIONS, SECTIONS
from tests.support.mistakes.agents import AGENTS
from tests.support.mistakes.cases import Bench, Mistake
from tests.support.mistakes.colocate import COLOCATION
from tests.support.mistakes.data import DATASETS, REWARDS
from tests.support.mistakes.environments import ENVIRONMENTS
from tests.support.mistakes.evaluation import EVALUATION
from tests.support.mistakes.models import ARGUMENTS, MODELS, TOKENIZERS
from tests.support.mistakes.remote import REMOTE
from tests.support.mistakes.runtime import RUNTIME
from tests.support.mistakes.servers import SERVERS
from tests.support.mistakes.settings import RESUMING, RUN_FILES, SETTINGS
from tests.support.mistakes.vision import VISION
from tests.support.mistakes.weights import WEIGHTS

MISTAKES = [
    *MODELS,
    *ARGUMENTS,
    *TOKENIZERS,
    *DATASETS,
    *REWARDS,
    *SETTINGS,
    *RUNTIME,
    *RESUMING,
    *RUN_FILES,
    *SERVERS,
    *WEIGHTS,
    *COLOCATION,
    *REMOTE,
    *AGENTS,
    *ENVIRONMENTS,
    *EVALUATION,
    *VISION,
]

PAGES = ("troubleshooting.md", "../benchmarks/messages.md")
"""Files of the pages, from docs/: with advice, and without."""

WORDS = 12
"""Words of a message on the page: enough to find it by. Whoever looks for it has the rest on the screen."""

HEAD = """\
# Troubleshooting

<!-- Written by `python tools/troubleshooting.py` from tests/support/mistakes: edit those, not this page. -->

What to do about errors and warnings, by how their messages begin; paths, names and numbers are examples. Messages say
what was given, what is allowed and what to do. Messages that need no further explanation are
[on another page](../benchmarks/messages.md), and so are
[failures of inference servers](../benchmarks/server-faults.md).

Everything that can be known is checked before training: a config when it is made; models, tokenizers, datasets and
reward functions when the trainer is made. An error loses nothing: a run that ended in one continues exactly from its
last checkpoint (`trainer.train(resume_from_checkpoint=True)`). Warnings do not stop a run.

Each finding of a check has a code that stays the same when the words of the message change. A `CheckError` (a
`ValueError`) has the codes of all its errors in `codes`; a `CheckWarning` has its code in `finding.code`. Both classes
are in `covey.core.findings`.
"""

CLEAR = """\
# Messages that explain themselves

<!-- Written by `python tools/troubleshooting.py` from tests/support/mistakes: edit those, not this page. -->

Errors and warnings that say all there is to do, by how they begin. The others are in
[troubleshooting](../docs/troubleshooting.md).
"""

QUOTED = (
    r"(?<=language model: )Unrecognized configuration class .*?AutoModelForCausalLM\.",
    r"(?<=\}: )LlamaForCausalLM\.__init__\(\).*?'flash'",
    r"(?<=: )FlashAttention2 has been .*? installed\.(?= Install it;)",
    r"(?<=transformers says: ).*",
    r"(?<=torch says: ).*",
    r"(?<=TemplateError: ).*?(?=\. Change the messages)",
    r"(?<=TemplateSyntaxError: ).*?(?=\. Change the messages)",
    r"(?<=UnidentifiedImageError: ).*?(?=\. Mend)",
    r"(?<=cannot be read: )while parsing.*",
    r"(?<=raised RuntimeError: )Server error:.*?CAPACITY_REACHED\)",
)
"""Text of other libraries within messages, which differs between their versions."""


def produced(mistake: Mistake, bench: Bench) -> str:
    """Message of the one error or warning that a mistake causes on a bench; fails if there is none, or another."""
    is_warning = issubclass(mistake.kind, Warning)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            mistake.make(bench)
        except mistake.kind as error:
            assert not is_warning, error
            found = [error]
            assert bench.stage == mistake.when, f"noticed at {bench.stage}, expected at {mistake.when}"
        else:
            assert is_warning, "no error was raised"
            found = [w.message for w in caught if issubclass(w.category, mistake.kind)]
            found = [one for one in found if codes(one) == [mistake.code] and re.search(mistake.says[0], str(one))]
    assert len(found) == 1, f"expected one warning {mistake.code} with {mistake.says[0]!r}, got {len(found)}"
    assert codes(found[0]) == [mistake.code]
    for pattern in mistake.says:
        assert re.search(pattern, str(found[0])), f"{pattern!r} is not in {found[0]!r}"
    return str(found[0])


def codes(found: Warning | Exception) -> list[str]:
    """Codes of an error or warning; [""] for one that no check has found."""
    match found:
        case CheckError():
            return found.codes
        case CheckWarning():
            return [found.finding.code]
    return [""]


def shown(message: str, bench: Bench) -> str:
    """A message as it is on the page: without what differs between two runs or two machines."""
    for text, example in ((bench.folder, "my-model"), (f"{bench.path}/", ""), (sys.executable, "python")):
        message = message.replace(text, example)
    message = re.sub(r"(127\.0\.0\.1(?::|', )|port )\d{4,5}", r"\g<1>8000", message)
    message = re.sub(r"0x[0-9a-f]{6,}", "0x…", message)
    message = re.sub(r"(covey-|checksum is |manifest says )[0-9a-f]{8}", r"\g<1>…", message)
    message = re.sub(r"process \d+ on \S+, since [\d: -]+", "process 4711 on …, since …", message)
    message = re.sub(r"bytes instead of [\d,]+", "bytes instead of …", message)
    message = re.sub(r"\(\S*tests/support/[\w/]+\.py, line \d+\)", "(mine.py, line …)", message)  # of the user's code
    for pattern in QUOTED:
        message = re.sub(pattern, "…", message, flags=re.DOTALL)
    return message


def same(message: str, on_page: str) -> bool:
    """Compare two messages but for line breaks, fractions (measured, most of them) and what … stands for."""

    def plain(text: str) -> str:
        return re.sub(r"\d+\.\d+(e-?\d+)?", "#", " ".join(text.split()))

    pattern = ".*?".join(re.escape(piece) for piece in plain(on_page).split("…"))
    return re.fullmatch(pattern, plain(message), re.DOTALL) is not None


def read(docs: Path) -> dict[str, str]:
    """Kind and beginning of the message by what the user did, from both pages."""
    text = "".join((docs / name).read_text() for name in PAGES)
    return dict(re.findall(r"^### (.+)\n\n    (.+)$", text, flags=re.MULTILINE))


def render(messages: dict[str, str]) -> dict[str, str]:
    """The text of each page; `messages` are those of `read`, in any length."""
    codes_of = {mistake.what: mistake.code for mistake in reversed(MISTAKES)}
    pages = dict(zip(PAGES, ([HEAD], [CLEAR]), strict=True))
    for section, rows in SECTIONS.items():
        for name, parts in pages.items():
            chosen = {what: advice for what, advice in rows.items() if bool(advice) == (name == PAGES[0])}
            if chosen:
                parts.append(f"## {section}\n")
            if chosen and section in INTRODUCTIONS and name == PAGES[0]:
                parts.append(f"{INTRODUCTIONS[section]}\n")
            for what, advice in chosen.items():
                parts.append(f"### {what}\n\n    {beginning(messages[what])}\n")
                if code := codes_of.get(what):
                    parts.append(f"Code `{code}`.\n")
                if advice:
                    parts.append(f"{advice}\n")
    return {name: "\n".join(parts) for name, parts in pages.items()}


def beginning(message: str) -> str:
    """The first words of a message, on one line."""
    words = message.split()
    return " ".join([*words[:WORDS], "…"] if len(words) > WORDS + 1 else words)
