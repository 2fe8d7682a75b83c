"""The bank of planted faults is well-formed: runs that the command reads, files that compile, repairs that differ."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.faults import __main__ as runner
from benchmarks.faults import models
from benchmarks.faults.bank import MODEL_FIELD, Entry, faults, healthy

ENTRIES = faults() + healthy()
SETUPS = [entry.setup(repaired) for entry in ENTRIES for repaired in (False, True)[: 1 + bool(entry.repair)]]


def test_there_are_three_of_each_kind_and_twenty_healthy():
    kinds = Counter(entry.kind for entry in faults())
    assert (len(kinds), set(kinds.values()), len(healthy())) == (20, {3}, 20)
    assert all(entry.kind and entry.repair and entry.about for entry in faults())
    assert not any(entry.kind or entry.repair for entry in healthy())
    assert len({entry.name for entry in ENTRIES}) == 80
    assert not any({*entry.accepts} & {entry.kind} for entry in ENTRIES)


def test_a_repair_changes_the_run():
    for entry in faults():
        assert entry.setup() != entry.setup(repaired=True), entry.name


@pytest.mark.slow
def test_runs_are_read_by_the_command(tmp_path, monkeypatch):
    from covey.cli.config_file import load_run
    from covey.cli.run_file import RUN_KEYS

    monkeypatch.chdir(tmp_path)
    distinct = {}  # by their fields of the config, of which each combination is read once
    for run in (setup.run for setup in SETUPS):
        fields = {key: value for key, value in run.items() if key not in RUN_KEYS or key in ("method", "peft")}
        distinct[json.dumps(fields, sort_keys=True)] = run
    assert len(distinct) > 30
    for run in distinct.values():
        loaded = load_run({**run, "use_cpu": True})
        assert not [*loaded.missing(*loaded.needed)]
        assert loaded.model == MODEL_FIELD


@pytest.mark.slow
def test_functions_of_runs_can_be_imported(tmp_path, monkeypatch):
    from covey.cli.train import environments, named, rewards

    for number, setup in enumerate(SETUPS):
        folder = tmp_path / str(number)
        replace(setup, model=None).write(folder, tmp_path)
        monkeypatch.chdir(folder)
        names = setup.run.get("reward_funcs", [])
        assert len(rewards(names)) == len(names)
        references = [*setup.run.get("tools", []), *[name for name in [setup.run.get("rollout_func")] if name]]
        assert all(callable(named(reference, "function")) for reference in references)
        assert names or callable(environments(setup.run["environment_factory"]))


def test_rows_have_prompts_and_no_gaps():
    for setup in SETUPS:
        assert len(setup.rows) >= 9 and all(row["prompt"] for row in setup.rows), setup.rows[0]
        assert "$" not in json.dumps(setup.rows), "a field that was not filled in"


def test_models_of_entries_are_changed(tmp_path):
    source = tmp_path / "model"
    source.mkdir()
    (source / "model.safetensors").write_text("weights")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        (source / name).write_text("{}")
    vocabulary = {"<s>": 0, "+": 1, "a": 2, "b": 3, "c": 4, "ab": 5}
    merges = [["a", "b"]] + [["a", "c"]] * 400
    tokenizer = {"model": {"vocab": vocabulary, "merges": merges}, "added_tokens": [{"content": "<s>"}]}
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    (source / "chat_template.jinja").write_text("")
    used = {entry.model for entry in faults()} - {None}
    assert used == set(models.VARIANTS)
    for variant in used:
        folder = models.build(source, tmp_path / variant, variant)
        assert (folder / "model.safetensors").resolve() == source / "model.safetensors"
        texts = {path.name: path.read_text() for path in source.iterdir()}
        assert {path.name: path.read_text() for path in folder.iterdir()} != texts, variant


@pytest.mark.parametrize(
    ("kind", "codes", "expected"),
    [
        ("template", ["template", "kl-scale"], "right"),
        ("template", ["other"], "accepted"),
        ("template", ["kl-scale", "template"], "wrong"),
        ("template", [], "wrong"),
        (None, [], "right"),
        (None, ["template"], "false alarm"),
    ],
)
def test_the_first_finding_decides(kind, codes, expected):
    entry = Entry(name="entry", about="", task="sums", kind=kind, accepts=("other",) if kind else ())
    findings = [{"code": code, "level": "error"} for code in codes]
    assert runner.verdict(entry, {"findings": findings}) == expected


def test_warnings_on_healthy_runs_are_no_alarm():
    entry = healthy()[0]
    assert runner.verdict(entry, {"findings": [{"code": "kl-scale", "level": "warning"}]}) == "right"
    assert runner.verdict(entry, {"findings": None}) == "false alarm"


def test_gains_are_in_the_repaired_runs_rewards():
    entry = next(entry for entry in faults() if entry.name == "a thousand to one")
    # The weights of the repair, 0.05 and 1: 0.05 * 1 + 0.3 = 0.35, where the run itself logged 1000.3.
    step = {"reward": 1000.3, "rewards/ends_with_period/mean": 1.0, "rewards/numeric_match_reward/mean": 0.3}
    assert runner.rewards([step, {"loss": 1}], entry.setup(repaired=True)) == pytest.approx([0.35])
    assert runner.rewards([{"reward": 0.5}], entry.setup(repaired=True)) == [0.5]
    assert runner.gain([0.2, 0.4, 0.5, 0.6, 0.6, 0.6]) == pytest.approx(0.575 - 0.3)


def test_a_diagnosis_is_asked_of_the_command(tmp_path, monkeypatch, capsys):
    """A recorder in the command's place: arguments, folder and output of each call."""
    calls = []

    def recorder(arguments, folder, seconds):
        calls.append((arguments, sorted(path.name for path in Path(folder).iterdir())))
        output = json.dumps({"findings": [{"code": "signal-sparse", "level": "warning"}]})
        return {"status": 0, "output": output, "errors": "", "seconds": 1.0}

    monkeypatch.setattr(runner, "covey", recorder)
    monkeypatch.setattr(runner, "model_folder", lambda: tmp_path)
    for _ in range(2):  # the second finds the result of the first
        runner.main(["--kind", "signal-sparse", "--records", str(tmp_path / "results.jsonl")])
    assert [arguments for arguments, _ in calls] == [["doctor", "run.yaml", "--json"]] * 3
    assert calls[0][1] == ["rows.jsonl", "run.yaml"]
    assert "3 of 3 first findings right" in capsys.readouterr().out


def test_equal_repaired_runs_are_trained_once(tmp_path, monkeypatch, capsys):
    """Three rewards that depend on an order, which the task's own reward replaces."""
    calls = []

    def recorder(arguments, folder, seconds):
        calls.append(arguments[0])
        (folder / "out").mkdir()
        steps = [{"reward": reward} for reward in (0.2, 0.4, 0.5, 0.6, 0.6, 0.7)]
        (folder / "out/trainer_state.json").write_text(json.dumps({"log_history": steps}))
        return {"status": 0, "output": json.dumps({"findings": []}), "errors": "", "seconds": 1.0}

    monkeypatch.setattr(runner, "covey", recorder)
    monkeypatch.setattr(runner, "model_folder", lambda: tmp_path)
    runner.main(["--kind", "reward-order", "--learn", "--records", str(tmp_path / "results.jsonl")])
    assert calls == ["doctor", "grpo_or_rloo", "doctor", "doctor"]
    assert "3 of 3 gain 0.2 or more" in capsys.readouterr().out
