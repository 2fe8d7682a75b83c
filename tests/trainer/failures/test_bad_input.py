"""Every mistake in the catalogue: one clear error or warning, as early as it can be known, and nothing is lost.

docs/troubleshooting.md has one row for each; the last tests keep the two together.
"""

import ast
import math
import os
import re
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from tests.support import runs, tiny
from tests.support.failing_processes import WAYS
from tests.support.mistakes.agents import AGENTS
from tests.support.mistakes.cases import Bench
from tests.support.mistakes.colocate import COLOCATION, SHOWN_BY_VLLM
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

MISTAKES = [*MODELS, *ARGUMENTS, *TOKENIZERS, *DATASETS, *REWARDS, *SETTINGS, *RUNTIME, *RESUMING, *RUN_FILES, *SERVERS]
MISTAKES += WEIGHTS
MISTAKES += COLOCATION
MISTAKES += REMOTE
MISTAKES += AGENTS
MISTAKES += ENVIRONMENTS
MISTAKES += EVALUATION
MISTAKES += VISION
ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "troubleshooting.md"


@pytest.fixture
def bench(tmp_path, tiny_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Bench(tmp_path, tiny_folder)


@cache
def rows() -> dict[str, str]:
    """What Covey says, by what you did, from the page."""
    cells = [line.strip().strip("|").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {what.strip(): says.strip() for what, says, _ in cells if what.strip() not in ("What you did", "---")}


def quoted(fragment: str) -> re.Pattern[str]:
    """A fragment of the page as a pattern; … stands for what varies."""
    return re.compile(".*?".join(re.escape(piece.strip()) for piece in fragment.split("…")), re.DOTALL)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what.replace(" ", "-"))
def test_one_clear_message(bench, mistake):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if issubclass(mistake.kind, Warning):
            mistake.make(bench)
        else:
            with pytest.raises(mistake.kind) as error:
                mistake.make(bench)
    if issubclass(mistake.kind, Warning):
        messages = [str(w.message) for w in caught if issubclass(w.category, mistake.kind)]
        messages = [message for message in messages if quoted(rows()[mistake.what]).search(message)]
        assert len(messages) == 1, "told once"
        message = messages[0]
    else:
        message = str(error.value)
        assert bench.stage == mistake.when
    for pattern in mistake.says:
        assert re.search(pattern, message), f"{pattern!r} is not in {message!r}"
    assert quoted(rows()[mistake.what]).search(message), f"the page says otherwise: {message!r}"


SURVIVED = [m for m in REWARDS if issubclass(m.kind, Warning) and m.when == "training"]


@pytest.mark.parametrize("mistake", SURVIVED, ids=lambda mistake: mistake.what.replace(" ", "-"))
@pytest.mark.filterwarnings("ignore")
def test_a_run_survives_rewards_that_fail(bench, mistake):
    trained = mistake.make(bench)
    assert trained.state.global_step == 1
    assert all(math.isfinite(loss) for loss in runs.history(trained, "loss"))
    assert all(parameter.isfinite().all() for parameter in trained.model.parameters())


def test_a_tokenizer_without_padding_pads_with_its_end(bench):
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = None
    trained = bench.train(processing_class=tokenizer)
    assert trained.state.global_step == 1
    assert tokenizer.pad_token == tokenizer.eos_token


def test_an_iterator_is_refused_before_anything_is_read_from_it(bench):
    rows_left = iter(tiny.rows())
    with pytest.raises(ValueError, match="read only once"):
        bench.build(train_dataset=rows_left)
    assert next(rows_left) == tiny.rows()[0]


def test_an_eval_batch_size_matters_only_with_an_eval_dataset(bench):
    bench.build({"per_device_eval_batch_size": 3})


def test_a_run_that_ended_goes_on_from_its_checkpoint_as_if_nothing_had_happened(bench):
    def breaks_at_step_two(completion_ids, trainer_state, **kwargs):
        if trainer_state.global_step == 2:
            raise KeyboardInterrupt
        return runs.longer(completion_ids)

    settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    straight = bench.train({"max_steps": 3})
    with pytest.raises(KeyboardInterrupt):
        bench.train(settings, reward_funcs=breaks_at_step_two)
    resumed = bench.resume(True, {"max_steps": 3})
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(straight), runs.weights(resumed), strict=True))


def test_a_refused_resume_leaves_the_checkpoint_as_it_was(bench):
    checkpoint = bench.checkpoint()
    before = {name: os.stat(os.path.join(checkpoint, name)).st_mtime_ns for name in os.listdir(checkpoint)}
    with pytest.raises(ValueError, match="was made with"):
        bench.resume(checkpoint, {"num_generations": 2})
    assert before == {name: os.stat(os.path.join(checkpoint, name)).st_mtime_ns for name in os.listdir(checkpoint)}
    assert bench.resume(checkpoint).state.global_step == 2


# ---- the page --------------------------------------------------------------------------------------------------------


def strings(source: Path) -> list[str]:
    """All texts of a source file, those of f-strings cut where something is filled in."""
    nodes = ast.walk(ast.parse(source.read_text()))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


@cache
def messages() -> list[str]:
    sources = [*(ROOT / "src").rglob("*.py"), Path(transformers.__file__).with_name("trainer.py")]
    return [text for source in sources for text in strings(source)]


def test_the_page_has_a_row_for_every_mistake_and_no_other():
    assert len(rows()) >= 40
    assert set(rows()) == {mistake.what for mistake in MISTAKES} | set(WAYS) | SHOWN_BY_VLLM


@pytest.mark.parametrize("what", rows() if PAGE.exists() else [], ids=lambda what: what.replace(" ", "-"))
def test_the_page_quotes_the_source(what):
    for piece in rows()[what].split("…"):
        assert any(piece.strip() in message for message in messages()), piece
