"""The benchmark of kills: runs of it that are killed end as an undisturbed one, and it sees what differs."""

import argparse
import json
from collections import Counter

import pytest
from benchmarks.kills import (
    OTHER,
    Launch,
    differences,
    elsewhere,
    now_in,
    outcome,
    trained_on,
    trial,
    undisturbed,
    wrong_in,
)
from benchmarks.kills_run import WORKERS

MODE = "off-policy"


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), MODE)


@pytest.mark.parametrize(
    ("place", "number", "signal", "status"),
    [
        ("sampling", 2, "SIGKILL", -9),
        ("optimizer", 4, "SIGKILL", -9),
        ("checkpoint: optimizer, half a file", 2, "SIGKILL", -9),
        ("checkpoint: manifest, half a file", 2, "SIGKILL", -9),
        ("rotation", 3, "SIGKILL", -9),
        ("backward", 5, "SIGTERM", 143),
    ],
)
@pytest.mark.slow
def test_a_killed_run_ends_as_an_undisturbed_one(tmp_path, known, place, number, signal, status):
    assert Launch(tmp_path, MODE, (place, str(number), signal)).end() == [status]
    assert now_in(tmp_path, 0) == (place if status < 0 else "between")
    assert Launch(tmp_path, MODE).end() == [0], (tmp_path / "output.0").read_text()[-3000:]
    assert differences(known["outcome"], outcome(tmp_path, 1)) == []


@pytest.mark.slow
def test_places_are_entered_as_often_as_there_is_something_to_do(known):
    places = known["places"]
    # Eight steps of one micro-batch; a rollout batch is sampled for every four, and a checkpoint saved every two.
    assert (places["optimizer"], places["sampling"], places["checkpoint: manifest"]) == (8, 2, 4)


@pytest.mark.slow
def test_a_difference_is_seen(known):
    found = known["outcome"]
    ((name, (first, *others)),) = found["logs"].items()
    logs = {name: [{**first, "loss": 0.5}, *others]}
    assert differences(found, {**found, "logs": logs, "weights": ["other"]}) == ["weights", "logs"]


def lines(*records):
    return [json.dumps(record) for record in records]


def test_what_is_trained_on_again_counts_once():
    begun = lines({"resumed": 0}, {"step": 0, "pairs": ["a", "a"]}, {"step": 1, "pairs": ["b"]})
    again = lines({"resumed": 1}, {"step": 1, "pairs": ["b", "c"]})
    assert trained_on([*begun, '{"step": 1, "pa', *again]) == (Counter({"0: a": 2, "1: b": 1, "1: c": 1}), 0)


def test_other_pairs_when_trained_again_are_counted():
    begun = lines({"resumed": 0}, {"step": 0, "pairs": ["a", "b"]})
    assert trained_on([*begun, *lines({"resumed": 0}, {"step": 0, "pairs": ["a", "c"]})])[1] == 1


def test_a_server_is_compared_by_pairs_alone():
    found = ["weights", "pairs"]
    assert (wrong_in("vLLM server, max_staleness 1", found), wrong_in("plain", found)) == (["pairs"], found)


def test_a_mode_without_its_package_is_skipped_with_a_reason(monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.kills.find_spec", lambda name: None)
    given = argparse.Namespace(deepspeed_python=None)
    assert (elsewhere(given, "ZeRO-3"), elsewhere(given, "plain")) == (True, False)
    assert "ZeRO-3: skipped, deepspeed is not installed; give --deepspeed-python" in capsys.readouterr().out


@pytest.mark.slow
def test_a_killed_reward_worker_changes_nothing(tmp_path):
    found = undisturbed(tmp_path, WORKERS)
    kill = trial(tmp_path, WORKERS, 5, found)  # in every fourth trial the last kill is of a worker
    assert kill["different"] == [] and kill["kills"][-1]["signal"] == OTHER
