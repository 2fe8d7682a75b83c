"""Write docs/troubleshooting.md and benchmarks/messages.md: make each mistake, note its message.

The tables of benchmarks/survival.md are written, too, from tests/support/hostile.

Usage: python tools/troubleshooting.py [WORDS]

With WORDS, only mistakes whose description contains them are made again; the others keep the message on the page. So do
those that cannot be made on this machine (several processes, a real vLLM, Triton) and those whose message lacks what
the catalogue promises. Takes about a minute.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402
import torch  # noqa: E402
from tests.support import tiny  # noqa: E402
from tests.support.hostile import page as hostile  # noqa: E402
from tests.support.mistakes.cases import Bench  # noqa: E402
from tests.support.mistakes.page import MISTAKES, produced, read, render, shown  # noqa: E402

DOCS = ROOT / "docs"
ROBUSTNESS = ROOT / "benchmarks" / "survival.md"


def main(words: str) -> None:
    torch.set_num_threads(1)
    tiny.quick()
    messages = read(DOCS)
    first = {mistake.what: mistake for mistake in reversed(MISTAKES)}
    with tempfile.TemporaryDirectory() as home:
        folder = tiny.folder(Path(home, "tiny-llama"))
        for number, (what, mistake) in enumerate(first.items()):
            if words.lower() not in what.lower():
                continue
            path = Path(home, str(number))
            path.mkdir()
            os.chdir(path)
            bench = Bench(path, folder)
            try:
                messages[what] = f"{mistake.kind.__name__}: {shown(produced(mistake, bench), bench)}"
            except (AssertionError, pytest.skip.Exception) as reason:
                print(f"not renewed: {what}: {reason}", file=sys.stderr)
        os.chdir(ROOT)
    for name, text in render(messages).items():
        (DOCS / name).write_text(text)
    ROBUSTNESS.write_text(hostile.render(ROBUSTNESS.read_text()))


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
