"""docs/troubleshooting.md as rendered from the catalogue of mistakes and the messages that they cause.

`tools/troubleshooting.py` writes the page; the tests compare every message with it.
"""

import re
import sys
import textwrap
import warnings

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

HEAD = """\
# Troubleshooting

<!-- Written by `python tools/troubleshooting.py` from tests/support/mistakes: edit those, not this page. -->

Covey's errors and warnings, as they appear, and what to do about each. Messages say what was given, what is allowed
and what to do; paths, names and numbers are examples, and … stands for text of other libraries. Everything that can be
known is checked before training: a config when it is made; models, tokenizers, datasets and reward functions when the
trainer is made. An error loses nothing: datasets are not consumed, checkpoints not touched, and a run that ended in an
error continues exactly from its last checkpoint (`trainer.train(resume_from_checkpoint=True)`).

Warnings do not stop a run. Failures of inference servers during a run are
[on the page about engines](server-faults.md#what-can-go-wrong-with-a-server-and-what-happens).
"""

QUOTED = (
    r"(?<=could not be loaded: )We couldn't connect .*?(?= Check the spelling)",
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
            found = [str(error)]
            assert bench.stage == mistake.when, f"noticed at {bench.stage}, expected at {mistake.when}"
        else:
            assert is_warning, "no error was raised"
            found = [str(w.message) for w in caught if issubclass(w.category, mistake.kind)]
            found = [text for text in found if re.search(mistake.says[0], text)]
    assert len(found) == 1, f"expected one warning with {mistake.says[0]!r}, got {len(found)}"
    for pattern in mistake.says:
        assert re.search(pattern, found[0]), f"{pattern!r} is not in {found[0]!r}"
    return found[0]


def shown(message: str, bench: Bench) -> str:
    """A message as it is on the page: without what differs between two runs or two machines."""
    for text, example in ((bench.folder, "my-model"), (f"{bench.path}/", ""), (sys.executable, "python")):
        message = message.replace(text, example)
    message = re.sub(r"(127\.0\.0\.1(?::|', )|port )\d{4,5}", r"\g<1>8000", message)
    message = re.sub(r"0x[0-9a-f]{6,}", "0x…", message)
    message = re.sub(r"(covey-|checksum is |manifest says )[0-9a-f]{8}", r"\g<1>…", message)
    message = re.sub(r"process \d+ on \S+, since [\d: -]+", "process 4711 on …, since …", message)
    message = re.sub(r"bytes instead of [\d,]+", "bytes instead of …", message)
    for pattern in QUOTED:
        message = re.sub(pattern, "…", message, flags=re.DOTALL)
    return message


def same(message: str, on_page: str) -> bool:
    """Compare two messages but for line breaks, fractions (measured, most of them) and what … stands for."""

    def plain(text: str) -> str:
        return re.sub(r"\d+\.\d+(e-?\d+)?", "#", " ".join(text.split()))

    pattern = ".*?".join(re.escape(piece) for piece in plain(on_page).split("…"))
    return re.fullmatch(pattern, plain(message), re.DOTALL) is not None


def read(page: str) -> dict[str, str]:
    """Kind and message by what the user did, from a page."""
    found = re.findall(r"^### ([^\n]+)\n\n```text\n(.*?)\n```$", page, flags=re.MULTILINE | re.DOTALL)
    return dict(found)


def render(messages: dict[str, str]) -> str:
    """The page; `messages` are those of `read`."""
    parts = [HEAD]
    for section, rows in SECTIONS.items():
        parts.append(f"## {section}\n")
        if section in INTRODUCTIONS:
            parts.append(f"{INTRODUCTIONS[section]}\n")
        for what, advice in rows.items():
            message = "\n".join(wrapped(line) for line in messages[what].splitlines())
            parts.append(f"### {what}\n\n```text\n{message}\n```\n")
            if advice:
                parts.append(f"{advice}\n")
    return "\n".join(parts)


def wrapped(line: str) -> str:
    """A line of a message in several lines of at most 110 characters."""
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(
        line, 110, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
