"""The comparison of commits: which logs count, what is found to differ first, and what may be expected."""

import sys
from pathlib import Path

import pytest

TOOLS = str(Path(__file__).resolve().parents[2] / "tools")


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    import compare_commits

    return compare_commits


def result(weights="w", entries=({"step": 1, "loss": 0.5},), records=()):
    return {"weights": weights, "logs": repr(entries), "samples": repr(records), "entries": entries, "records": records}


def test_logs_are_compared_without_times(tool):
    from golden.child import without_times

    kept = {"loss": 0.1 + 0.2, "reward": 1.0, "completions/mean_terminated_length": 3.0, "step": 2}
    times = ["step_time", "phase/train", "rewards/even/seconds", "train_runtime", "train_steps_per_second"]
    assert without_times({**kept, **dict.fromkeys(times, 1.0)}) == kept


@pytest.mark.slow
def test_every_configuration_has_a_launch_and_its_own_name(tool, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare_commits.py", "--list", "--only", "grpo,ddp*,fsdp*"])
    assert tool.main() == 0
    listed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert len({name for name, _ in listed}) == len(listed) > 8
    assert {launch for _, launch in listed} == {"(one)", "(ddp)", "(fsdp)"}


def test_the_first_difference_is_named(tool, capsys):
    old = result(entries=[{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}])
    new = result("other", entries=[{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.125}])
    assert tool.report({"grpo": "one"}, {"grpo": old}, {"grpo": new}, []) == 1
    printed = capsys.readouterr().out
    assert "DIFFERS  DIFFERS  equal" in printed and "logs: step 2: loss 0.25 -> 0.125" in printed


def test_a_sample_names_its_step_and_arguments(tool):
    old, new = [[0, "even", "prompts", "d"], [3, "even", "prompts", "e"]], [[0, "even", "prompts", "d"]]
    assert tool.first_sample(old, new) == "samples: step 3, even: only OLD has such a completion"
    renamed = [[0, "even", "queries", "d"]]
    assert tool.first_sample(new, renamed).endswith("; only one side gives prompts, queries")


def test_expected_differences_are_not_wrong(tool):
    sides = {"grpo": result()}, {"grpo": result("other")}
    assert tool.report({"grpo": "one"}, *sides, [tool.expectation("gr*:weights=a new average")]) == 0
    assert tool.report({"grpo": "one"}, *sides, [tool.expectation("gr*:logs=a new name")]) == 1
    with pytest.raises(SystemExit, match="NAME=REASON"):
        tool.expectation("grpo")


def test_a_failure_is_wrong_even_if_both_sides_fail(tool):
    failed = {"grpo": {"error": "ValueError: no"}}
    assert tool.report({"grpo": "one"}, failed, failed, [tool.expectation("*=anything")]) == 1
