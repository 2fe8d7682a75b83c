"""The GPU kit in miniature on a CPU, and what is done with its records."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.gpu import table
from benchmarks.gpu.__main__ import Kit, Results
from benchmarks.gpu.correct import counted
from benchmarks.gpu.jobs import PARTS, Job, jobs_of, missing_packages

ROOT = Path(__file__).parents[2]
MACHINE = {
    "device": "GPU",
    "flops": 1e12,
    "bandwidth": 1e11,
    "cores": 2,
    "date": "2026-01-01",
    "versions": {"torch": "2.11"},
}
EVERYTHING = """
import json, sys
from benchmarks.gpu import jobs
found, out = [], sys.stdout
sys.stdout = sys.stderr
for part in jobs.PARTS:
    for name, cases in jobs.jobs_of(part, quick=True).items():
        if part == "correct" or jobs.missing_packages(part, name):
            continue
        job = jobs.Job(part, name, cases, "cpu", quick=True, folder=sys.argv[1], flops=1e11, bandwidth=1e10)
        measure = jobs._module(part).measure
        found += [{"part": part, "job": name, "case": case, **measure(job, case)} for case in cases]
print(json.dumps(found), file=out)
"""


def python(*arguments):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Every job but the tests, in one process to save time."""
    run = python("-c", EVERYTHING, str(tmp_path_factory.mktemp("kit")))
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.mark.slow
def test_every_part_is_measured_and_has_a_table(records):
    assert {record["part"] for record in records} == set(PARTS) - {"correct"}
    text = table.summary({"machine": MACHINE, "records": records})
    for part in {record["part"] for record in records}:
        made = table.TABLES[part]([record for record in records if record["part"] == part])
        assert made in text


@pytest.mark.slow
def test_phases_of_a_step_add_up_to_its_time(records):
    steps = [record for record in records if record["part"] == "step"]
    assert {record["job"] for record in steps} >= {"covey_default", "covey_best"}
    for record in steps:
        for step in record["steps"]:
            assert sum(step["phases"].values()) == pytest.approx(step["seconds"])
        assert 0 < record["mfu_step"] < 1


@pytest.mark.slow
def test_both_ways_agree_on_log_probs_and_attention(records):
    for record in records:
        if record["part"] in ("head", "attention"):
            for name in ("covey", "torch"):
                assert record[name]["difference"] < 0.02  # bf16 has 8 bits


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_both_libraries_sample_the_same_lengths(records):
    rates = {r["job"]: r for r in records if r["part"] == "step" and r["case"] == "W3"}
    assert set(rates) == set(table.NAMES)


@pytest.mark.slow
def test_a_run_continues_where_it_stopped(tmp_path):
    out = tmp_path / "results.json"
    arguments = ("-m", "benchmarks.gpu", "--quick", "--device", "cpu", "--part", "head", "--out", str(out))
    first = python(*arguments)
    assert first.returncode == 0, first.stderr
    assert "head head tiny 64:" in first.stdout
    written = json.loads(out.read_text())
    assert written["machine"]["flops"] > 0 and [r["case"] for r in written["records"]] == ["tiny 64"]
    again = python(*arguments)
    assert again.returncode == 0 and "head head tiny 64:" not in again.stdout
    assert json.loads(out.read_text())["records"] == written["records"]


@pytest.fixture
def kit(tmp_path):
    given = argparse.Namespace(out=tmp_path / "r.json", quick=True, only=None, case=None, minutes=1.0, device="cpu")
    return Kit(Results(given.out), given)


def test_a_failed_case_is_recorded_and_the_others_go_on(kit, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.__main__.jobs_of", lambda part, quick: {"job": ["a", "b", "c"]})
    started = []

    def run(job, note):
        started.append(job.cases)
        for case in job.cases:
            if case == "b":
                return "ended with 1\nRuntimeError: no"
            note({"case": case, "seconds": 1.0})
        return None

    monkeypatch.setattr(kit, "_run", run)
    kit.run_part("step")
    assert started == [["a", "b", "c"], ["c"]]
    stored = Results(kit.results.path)
    assert [(r["case"], r.get("error")) for r in stored.records] == [
        ("a", None),
        ("b", "ended with 1\nRuntimeError: no"),
        ("c", None),
    ]
    kit.run_part("step")  # what failed is tried again
    assert started[2:] == [["b"]]


@pytest.mark.slow
def test_a_job_ends_with_its_time(kit, monkeypatch, tmp_path):
    script = 'import time; print(\'{"case": "a"}\', flush=True); time.sleep(600)'
    monkeypatch.setattr(Job, "dumped", lambda job: "")
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **kwargs: popen([sys.executable, "-c", script], **kwargs))
    notes = []
    assert kit._run(Job("head", "head", ["a", "b"], "cpu", seconds=2.0), notes.append) == "ended with -9"
    assert notes == [{"case": "a"}]


def test_jobs_of_full_size_have_distinct_names():
    for part in PARTS:
        for name, cases in jobs_of(part, quick=False).items():
            assert cases and len(set(cases)) == len(cases), name
    assert missing_packages("step", "covey_default") == []


def test_counts_of_tests_that_were_cut_off():
    output = "a.py::b PASSED [ 1%]\na.py::c[x y] FAILED [ 2%]\na.py::d SKIPPED (why) [ 3%]\na.py::e "
    found = counted(output)
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1)
    assert found["output"][-1] == "a.py::e "


def test_pages_hold_the_tables_of_the_records():
    results = json.loads(table.RESULTS.read_text()) if table.RESULTS.exists() else {}
    for name, made in table.PAGES.items():
        page = (ROOT / name).read_text()
        assert table.written(page, made(results)) == page, "run python -m benchmarks.gpu.table"


def test_page_without_markers_is_rejected():
    with pytest.raises(ValueError, match="no lines"):
        table.written("a page", "text")


def test_ratios_of_steps():
    def step(job, seconds):
        return {"part": "step", "job": job, "case": "W1", "seconds": seconds}

    results = {"machine": MACHINE, "records": [step("trl_default", 6.0), step("covey_default", 2.0)]}
    assert f"| {table.FIRST_PAGE['W1']} | 6.00 | 2.00 | 3.0 x | - |" in table.short(results)
