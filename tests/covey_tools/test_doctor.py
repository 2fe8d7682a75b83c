"""`covey doctor` names the planted cause first, proves it, and finds nothing grave in healthy runs."""

import json
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from covey.cli.main import main as covey
from covey.core.findings import DIAGNOSED, Finding, ranked
from covey_tools.doctor.command import before, main, with_signal
from covey_tools.doctor.completions import _begins_again, _opening
from covey_tools.doctor.reward_differences import _other_column
from tests.support import faults, runs, tiny


def findings(folder, model, *, change=None, eos=None, huge=False, seconds=40.0, **settings):
    if change is not None or eos is not None:
        model = faults.changed(model, folder / "model", change, eos)
    path = faults.write(folder, faults.huge(model, folder / "model") if huge else model, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ranked(before(path, [], seconds, {}))


@pytest.fixture(scope="module")
def repeating(tmp_path_factory):
    return faults.repeating_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def unused(tmp_path_factory):
    return tiny.folder(tmp_path_factory.mktemp("random"))


@pytest.mark.doctor
@pytest.mark.parametrize("name", faults.FAULTS)
def test_the_first_finding_is_the_planted_cause(name, tmp_path, repeating):
    code, settings = faults.FAULTS[name]
    found = findings(tmp_path, repeating, **settings)
    assert found and found[0].code == code, list(map(str, found))
    assert found[0].evidence and found[0].fix and found[0].proof


@pytest.mark.doctor
@pytest.mark.parametrize("name", faults.HEALTHY)
def test_healthy_runs_have_no_error(name, tmp_path, repeating):
    found = findings(tmp_path, repeating, **faults.HEALTHY[name])
    assert [str(one) for one in found if one.level == "error"] == []


@pytest.mark.slow
def test_warnings_of_the_start_are_findings(tmp_path, unused):
    """Those of settings, of the data and of arguments, each once, behind causes of poor learning."""
    settings = {"vllm_server_port": 3, "teacher_mixup_alpha": 0.5, "teacher": "start", "reward_funcs": None}
    path = faults.write(tmp_path, unused, rows=tiny.rows(), max_steps=1, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {one.code: one for one in ranked(before(path, [], 5.0, {}))}
    evidence = found["setting-unread"].evidence + found["setting-unread"].fix
    assert found["setting-unread"].level == "warning" and found["prompt-text"].level == "warning"
    assert evidence.count("vllm_server_port=3") == 1 and evidence.count("teacher_mixup_alpha=0.5") == 1
    assert "record" not in evidence  # which the doctor itself changes
    assert "reward-failing" not in found


def test_other_columns_are_tried_while_there_is_time():
    """18 ways to fill 3 columns with other values; each takes 20 s, and 50 are left."""
    tried, row = [], {"prompt": "", "a": "One 1", "b": "Two 2", "c": "Three 3"}

    def totals(rows, rollouts):
        tried.append(rows)
        run.left -= 20.0
        return torch.zeros(len(rows))

    base = SimpleNamespace(samples=[SimpleNamespace(row=row)])
    left_out = []
    run = SimpleNamespace(
        base=base, failure=None, seconds=75.0, left=50.0, totals=totals, answering=lambda row, text: text
    )
    run.leave_out = lambda *noted: left_out.append(noted)
    assert _other_column(run, 0.0) is None and len(tried) == 3
    assert left_out == [("time", "data-columns")]


def test_a_gold_answer_with_a_line_break_is_found():
    """A reward of the last number: every form of an answer gets it, once the column is stripped."""
    base = SimpleNamespace(samples=[SimpleNamespace(row={"prompt": "", "answer": " 7\n"})], known=[0.0])

    def totals(rows, texts):
        numbers = [re.findall(r"\d+", text)[-1:] for text in texts]
        return torch.tensor([float(found == [row["answer"]]) for row, found in zip(rows, numbers, strict=True)])

    run = SimpleNamespace(
        base=base, failure=None, seconds=75.0, left=50.0, totals=totals, answering=lambda row, text: text
    )
    found = _other_column(run, 0.0)
    assert found is not None and found.code == "reward-unreachable" and "'7'" in found.proof


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in faults.FAST else pytest.mark.slow) for name in faults.QUICK]
)
def test_a_random_model_is_enough_for_some_causes(name, tmp_path, unused):
    code, settings = faults.FAULTS[name]
    settings = {"funcs": None if settings.get("code") or settings.get("rows") else ["digits"], **settings}
    found = findings(tmp_path, unused, **settings)
    assert found and found[0].code == code, list(map(str, found))


@pytest.mark.slow
def test_a_random_model_that_learns_is_healthy(tmp_path, unused):
    found = findings(tmp_path, unused, rows=faults.TEXTS, funcs=["digits"], learning_rate=5e-3)
    assert [str(one) for one in found if one.level == "error"] == []


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [5.0, 0.5])  # with less no time is left for anything else
def test_a_reward_beyond_its_time_limit_is_slow_and_not_failing(tmp_path, unused, seconds):
    code = "import time\n\ndef f(completions, **kwargs):\n    return [time.sleep(0.1) or 1.0 for one in completions]\n"
    found = findings(tmp_path, unused, code=code, seconds=seconds)
    codes = [one.code for one in found]
    assert codes[0] == "reward-slow" and "reward-failing" not in codes, list(map(str, found))


@pytest.mark.slow
def test_a_count_of_letters_is_a_length(tmp_path, unused):
    code = (
        "def f(completions, **kwargs):\n    return [sum(map(str.isalnum, one[-1]['content'])) for one in completions]\n"
    )
    found = findings(tmp_path, unused, code=code, max_completion_length=128)
    assert "reward-length" in {one.code for one in found}


@pytest.mark.slow
def test_json_and_exit_status(tmp_path, unused, capsys):
    path = faults.write(tmp_path, unused, code="def f(completions, **kwargs):\n    return [0.5] * len(completions)\n")
    assert main([path, "--json"]) == 1
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert shown["findings"][0]["code"] == "reward-constant" and shown["summary"]["reward"] == 0.5
    assert {"code", "level", "title", "evidence", "fix", "proof"} == set(shown["findings"][0])
    assert not (tmp_path / "out").exists(), "a run that is only examined leaves nothing behind"


def test_a_run_that_cannot_be_read_ends_with_status_2(tmp_path, capsys):
    assert covey(["doctor", str(tmp_path / "none.yaml")]) == 2
    assert covey(["doctor", str(tmp_path)]) == 2
    assert "has no record" in capsys.readouterr().err


def test_findings_are_ranked_by_level_then_cause():
    codes = ["reward-slow", "memory", "template"]
    found = [Finding(code, "warning", "", "") for code in codes] + [Finding("signal-sparse", "error", "", "")]
    assert [one.code for one in ranked(found)] == ["signal-sparse", "memory", "template", "reward-slow"]


def test_the_page_lists_every_code():
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    assert [code for code in DIAGNOSED if f"`{code}`" not in page] == []


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run from Python, whose reward has a name by which it is found again."""
    folder = tmp_path_factory.mktemp("recorded")
    model = tiny.folder(folder / "model")
    from transformers import AutoModelForCausalLM

    parts = {"model": AutoModelForCausalLM.from_pretrained(model), "reward_funcs": always}
    runs.trainer(folder / "run", parts=parts, record="tokens").train()
    return folder / "run"


def always(completions, **kwargs):
    """A reward that says nothing."""
    return [0.25] * len(completions)


@pytest.mark.slow
def test_a_recorded_run_is_examined_with_its_rewards(recorded, capsys):
    assert main([str(recorded), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert shown["findings"][0]["code"] == "reward-constant"
    assert not (recorded / "record" / "findings.json").exists(), "a run is read, and not written to"
    assert main([str(recorded), "--json", "--write"]) == 1
    assert json.loads((recorded / "record" / "findings.json").read_text()) == shown["findings"]


@pytest.mark.slow
def test_a_record_alone_shows_that_there_is_no_signal(tmp_path, capsys):
    parts = {"reward_funcs": lambda completions, **kwargs: [0.25] * len(completions)}
    runs.trainer(tmp_path, parts=parts, record="tokens").train()
    assert main([str(tmp_path), "--json"]) == 1
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    found, summary = shown["findings"][0], shown["summary"]
    assert (found["code"], found["level"]) == ("signal-sparse", "error") and not summary["rebuilt"]
    assert summary["not_examined"]["template"] == "part" and summary["verdict"] == "errors"
    assert not {"prompt-empty", "data-repeated", "weights-frozen"} & {*summary["not_examined"]}


def batch(prompt, texts):
    return SimpleNamespace(samples=[SimpleNamespace(row={"prompt": prompt})] * len(texts), texts=texts)


def test_of_several_beginnings_the_first_one_stops():
    shots = "Q: 1+1\nA: 2\n\nQ: 2+2\nA:"
    assert _begins_again(batch(shots, [" 4\n\nQ: 3+3\nA: 6", " 4\n\nQ: 5\nA: 5", " 4"])) == ("\nQ:", 2)
    assert _begins_again(batch(shots, [" 4", " 4\n\nQ: 5", " 5"])) is None
    assert _begins_again(batch(shots.replace("\n\n", "\n"), [" 4\nQ: 5", " 5\nQ: 6", " 6"])) == ("\n", 2)


@pytest.mark.parametrize(("answer", "opening"), [("' ' + m['content']", None), ("'bot: ' + m['content']", "bot: ")])
def test_a_space_before_answers_is_no_opening(answer, opening):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] if m['role'] == 'user' else " + answer + " }}{% endfor %}"
    )
    codec = SimpleNamespace(template_kwargs=lambda given: {}, tools=None, tokenizer=tokenizer)
    row = {"prompt": [{"role": "user", "content": "[INST] hi [/INST]"}]}
    assert _opening(codec, row) == opening


@pytest.mark.parametrize(
    ("prompts", "reason", "level"), [(6, "time", "error"), (2, "part", "error"), (2, "time", "note")]
)
def test_two_groups_without_a_signal_prove_nothing_where_time_was_short(prompts, reason, level):
    summary = {"signal": False, "prompts": prompts, "completions": 8 * prompts, "not_examined": {"template": reason}}
    (found,) = with_signal([], summary)
    assert (found.code, found.level) == ("signal-sparse", level)
