"""Every mistake in the catalogue: one clear error or warning, as early as it can be known, and nothing is lost.

docs/troubleshooting.md and benchmarks/messages.md show how each begins; `python tools/troubleshooting.py` writes them.
"""

import ast
import math
import os
from functools import cache
from pathlib import Path

import pytest
import torch

from covey import GRPOConfig, GRPOTrainer
from covey.core.findings import CheckError
from tests.support import runs, tiny
from tests.support.failing_processes import WAYS
from tests.support.mistakes.advice import SECTIONS
from tests.support.mistakes.cases import Bench
from tests.support.mistakes.colocate import SHOWN_BY_VLLM
from tests.support.mistakes.data import REWARDS
from tests.support.mistakes.page import MISTAKES, PAGES, produced, read, render, same, shown

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


@pytest.fixture
def bench(tmp_path, tiny_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Bench(tmp_path, tiny_folder)


@cache
def rows() -> dict[str, str]:
    """Messages on the page, by what the user did."""
    return read(DOCS)


FIRST = {mistake.what: mistake for mistake in reversed(MISTAKES)}
"""The mistakes whose messages are on the page: the first one of each description."""


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what.replace(" ", "-"))
def test_one_clear_message(bench, mistake):
    message = produced(mistake, bench)
    if mistake is FIRST[mistake.what]:
        message = f"{mistake.kind.__name__}: {shown(message, bench)}"
        advice = f"run: python tools/troubleshooting.py {mistake.what}"
        assert same(message, rows()[mistake.what]), f"{advice}\n{message}\nis on the page as\n{rows()[mistake.what]}"


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
    with pytest.raises(CheckError) as raised:
        bench.build(train_dataset=rows_left)
    assert raised.value.codes == ["dataset-type"]
    assert next(rows_left) == tiny.rows()[0]


def right(completions, department):
    return [0.0 for _ in completions]


def test_rewards_are_checked_before_a_model_is_loaded(tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), report_to="none", num_generations=2)
    with pytest.raises(CheckError, match="'department'") as raised:
        GRPOTrainer(model="no-such/model", reward_funcs=right, args=args, train_dataset=[{"prompt": "2+2="}])
    assert raised.value.codes == ["dataset-small", "data-columns"]  # named together


def test_weights_are_counted_before_a_model_is_loaded(tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), report_to="none", reward_weights=[1.0, 2.0])
    with pytest.raises(CheckError) as raised:
        GRPOTrainer(model="no-such/model", reward_funcs=right, args=args, train_dataset=[{"prompt": "2+2="}] * 8)
    assert raised.value.codes == ["reward-weights", "data-columns"]  # named together


def test_an_eval_batch_size_matters_only_with_an_eval_dataset(bench):
    bench.build({"per_device_eval_batch_size": 3})


@pytest.mark.slow
def test_an_interrupted_run_resumes_exactly_from_its_checkpoint(bench):
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


@pytest.mark.slow
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


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_the_script_renders(name):
    assert (DOCS / name).read_text() == render(rows())[name], "run: python tools/troubleshooting.py"


def test_the_page_has_every_mistake_and_no_other():
    advised = [what for rows in SECTIONS.values() for what in rows]
    assert len(advised) == len(set(advised))
    assert set(advised) == set(FIRST) | set(WAYS) | SHOWN_BY_VLLM


@pytest.mark.slow
def test_messages_that_other_tests_produce_are_in_the_source():
    texts = [text for source in (ROOT / "src").rglob("*.py") for text in strings(source)]
    for what in {*WAYS, *SHOWN_BY_VLLM}:
        for piece in " ".join(rows()[what].split()).split("…"):
            assert any(piece.strip(" .") in text for text in texts), f"{what}: {piece}"


def test_a_model_without_weights_is_refused(tmp_path):
    with torch.device("meta"):
        empty = tiny.LlamaForCausalLM(tiny.config())
    with pytest.raises(ValueError, match="on the device `meta`"):
        runs.trainer(tmp_path, parts={"model": empty})


@pytest.mark.slow
def test_a_context_of_eight_tokens_is_enough(tmp_path):
    parts = {"train_dataset": [{"prompt": "abcd"}] * 8, "model": tiny.model(max_position_embeddings=8)}
    runs.trainer(tmp_path, parts=parts, max_steps=1).train()


@pytest.mark.parametrize("folder", ["", "file/run", "file", "x" * 300, "a\0b", "a\x1b[2J"])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, folder):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is not a folder that can be written to"):
        runs.trainer(tmp_path / folder if folder else "")
