"""The trial of the doctor is well-formed: runs that the command reads, codes that there are, figures that add up."""

import doctest
import json

import pytest
from benchmarks.doctor_trial import __main__ as trial
from benchmarks.doctor_trial import model
from benchmarks.doctor_trial.cases import Case
from benchmarks.doctor_trial.faulty import FAULTY
from benchmarks.doctor_trial.fresh import FRESH_FAULTY, FRESH_HEALTHY
from benchmarks.doctor_trial.healthy import HEALTHY
from benchmarks.records import Records

from covey.core.findings import CODES

CASES = [*FAULTY, *HEALTHY, *FRESH_FAULTY, *FRESH_HEALTHY]


def test_there_are_enough_cases_with_codes_that_there_are():
    assert len(FAULTY) >= 30 and len(HEALTHY) >= 20 and len({case.name for case in CASES}) == len(CASES)
    assert all({*case.right, *case.accepts} <= CODES.keys() and not {*case.right} & {*case.accepts} for case in CASES)
    assert all(case.about and case.right for case in [*FAULTY, *FRESH_FAULTY])
    assert not any(case.right for case in [*HEALTHY, *FRESH_HEALTHY])
    assert len({case.digest for case in CASES}) == len(CASES)


@pytest.mark.slow
def test_run_files_are_read_and_their_functions_are_there(tmp_path, monkeypatch):
    from covey.cli.config_file import load_run
    from covey.cli.train import environments, named, rewards

    known = {}
    for number, case in enumerate(CASES):
        folder = tmp_path / str(number)
        source = tmp_path / "model"
        source.mkdir(exist_ok=True)
        (source / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
        case.write(folder, source)
        monkeypatch.chdir(folder)
        settings = {**case.settings, "model": str(source)}
        if (key := json.dumps(case.settings, sort_keys=True)) not in known:
            known[key] = load_run(settings)
            assert not [*known[key].missing(*known[key].needed)], case.name
        names = case.settings.get("reward_funcs", [])
        assert len(rewards(names)) == len(names), case.name
        assert all(callable(named(tool, "function")) for tool in case.settings.get("tools", [])), case.name
        assert names or callable(environments(case.settings["environment_factory"]))
        if case.script:
            compile((folder / "train.py").read_text(), "train.py", "exec")


def test_the_small_models_examples_are_conversations():
    import random

    draw = random.Random(0)
    texts = [model.example(draw) for _ in range(200)]
    assert any("<tool_call>" in text for text in texts) and any(text.startswith("Q: ") for text in texts)
    assert all(text.endswith("\n") and len(text) < 512 for text in texts)
    ids = model.tokenizer()(texts)["input_ids"]
    assert model.tokenizer().unk_token_id not in {number for text in ids for number in text}


def finding(code, level="error", fix=""):
    return {"code": code, "level": level, "evidence": "of f", "fix": fix, "proof": "tried"}


@pytest.mark.parametrize(
    ("case", "findings", "said"),
    [
        (Case("a", "", right=("template",)), ["template"], "right"),
        (Case("a", "", right=("template",), names="stop"), ["template"], "accepted"),  # not by what it is
        (Case("a", "", right=("template",), accepts=("never-ends",)), ["never-ends", "template"], "accepted"),
        (Case("a", "", right=("template",)), ["never-ends", "template"], "wrong"),
        (Case("a", "", right=("template",)), [], "wrong"),
        (Case("a", ""), [], "right"),
        (Case("a", ""), ["template"], "alarm"),
    ],
)
def test_a_first_finding_is_judged_by_what_was_written_down(case, findings, said):
    assert trial.verdict(case, {"findings": [finding(code) for code in findings]}) == said


def test_a_note_is_no_alarm():
    assert trial.verdict(Case("a", ""), {"findings": [finding("data-repeated", "note")]}) == "right"


def test_the_table_counts_each_round_by_itself(tmp_path):
    records = Records(tmp_path / "trial.jsonl")
    fault, sound = FAULTY[0], HEALTHY[0]
    own = {"crashed": False, "changed": False}
    for name, codes in (("first", []), ("second", [fault.right[0]])):
        one = {"case": fault.name, "digest": fault.digest, "round": name}
        records.add(**one, phase="before", findings=[finding(code) for code in codes], **own)
        records.add(**one, phase="fixes", tried=[{"refuted": ""}, {"refuted": "the reward is lower"}])
        records.add(case=sound.name, digest=sound.digest, round=name, phase="before", findings=[], **own)
    records.add(case=fault.name, digest="of an older case", round="first", phase="before", findings=[], **own)
    lines = trial.table(records).splitlines()
    assert "| first | before | 0 of 1 | 0 | 1 | 0 of 1 | 0 | 0 |" in lines
    assert "| second | before | 1 of 1 | 0 | 0 | 0 of 1 | 0 | 0 |" in lines
    assert "second: of 2 proposed settings 1 were refuted." in lines


def test_a_changed_folder_is_seen(tmp_path):
    (tmp_path / "a").write_text("1")
    before = trial.digest_of(tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "rewards.pyc").write_text("compiled")
    assert trial.digest_of(tmp_path) == before
    (tmp_path / "a").write_text("2")
    assert trial.digest_of(tmp_path) != before


def test_examples_of_the_runner():
    assert doctest.testmod(trial).failed == 0
