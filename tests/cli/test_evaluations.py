"""Evaluation sets of run files, and `covey eval`."""

import json
import shutil

import pytest

from covey import EvalSuite
from covey.cli.data import load_evaluations
from covey.cli.main import main

REWARD = """
from covey.rewards import answers

@answers(lambda text: text[:1])
def even(completions, **kwargs):
    return [float(text != "" and ord(text[0]) % 2 == 0) for text in completions]

def second(text):
    return text[1:2]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "even.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(4)))
    return tmp_path


def test_a_file_a_suite_or_several_by_name(folder):
    assert len(load_evaluations("rows.jsonl")) == 4
    one = load_evaluations({"dataset": "rows.jsonl", "pass_at": [1], "answer": "even.py:second"})
    assert isinstance(one, EvalSuite) and one.pass_at == (1,) and one.answer("ab") == "b"
    both = load_evaluations("{plain: rows.jsonl, part: {dataset: rows.jsonl, split: 'train[:3]', temperature: 0}}")
    assert len(both["plain"]) == 4 and len(both["part"].dataset) == 3 and both["part"].temperature == 0
    assert load_evaluations(None) is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"hard": {"dataset": "rows.jsonl", "tempreature": 1}}, "has no setting 'tempreature'.*Did you mean 'temp"),
        ({"hard": {"temperature": 1}}, "an evaluation set is a file or hub id, or settings with one"),
        ({"hard": 3}, "an evaluation set is a file or hub id"),
        ({"dataset": "rows.jsonl", "answer": "even.py:third"}, "third"),
    ],
)
def test_other_values_are_no_evaluation_set(folder, given, says):
    with pytest.raises(ValueError, match=says):
        load_evaluations(given)


def test_eval_samples_scores_prints_and_writes(folder, tiny_folder, capsys):
    suites = {"greedy": {"dataset": "rows.jsonl", "temperature": 0, "pass_at": 1}}
    suites["votes"] = {"dataset": "rows.jsonl", "num_generations": 6, "pass_at": [1, 6], "maj_at": 3}
    settings = {"model": str(tiny_folder), "reward_funcs": ["even.py:even"], "output_dir": "out", "bf16": False}
    settings |= {"eval_dataset": suites, "max_completion_length": 4, "use_cpu": True}
    (folder / "run.json").write_text(json.dumps(settings))
    assert main(["eval", "--config", "run.json"]) == 0
    metrics = json.loads((folder / "out" / "evaluation.json").read_text())
    assert metrics["model"] == str(tiny_folder)
    assert metrics["eval_greedy_prompts"] == 4 and 0 <= metrics["eval_votes_maj@3"] <= 1
    assert (folder / "out" / "record" / "evaluations" / "eval_votes_00000.parquet").is_file()
    printed = capsys.readouterr().out
    assert f"pass@1 {metrics['eval_greedy_pass@1']:.1%} (" in printed and "evaluation.json" in printed
    assert f"evaluating {tiny_folder}\n" in printed
    assert main(["explain", "run.json"]) == 0
    explained = capsys.readouterr().out
    assert "Suite greedy: 1 completion(s) of each prompt, greedy." in explained
    assert "Suite votes: 6 completion(s) of each prompt." in explained


@pytest.mark.slow
def test_eval_of_a_trained_model_keeps_those_of_the_untrained(folder, tiny_folder):
    trained = folder / "trained"
    shutil.copytree(tiny_folder, trained)
    (trained / "trainer_state.json").write_text(json.dumps({"global_step": 20}))
    settings = {"model": str(tiny_folder), "reward_funcs": ["even.py:even"], "output_dir": "out", "bf16": False}
    settings |= {"eval_dataset": "rows.jsonl", "max_completion_length": 4, "use_cpu": True}
    (folder / "run.json").write_text(json.dumps(settings))
    assert main(["eval", "run.json"]) == 0 and main(["eval", "run.json", "--model", str(trained)]) == 0
    names = {
        place: [path.name for path in (folder / place / "record" / "evaluations").iterdir()]
        for place in ("out", "trained")
    }
    assert names == {"out": ["eval_00000.parquet"], "trained": ["eval_00020.parquet"]}


def test_eval_needs_something_to_evaluate(tmp_path, capsys):
    assert main(["eval", "--model", str(tmp_path)]) == 2
    assert "the run names no `eval_dataset`" in capsys.readouterr().err
