"""A run that is trained again from its record, without an engine."""

import json

import pyarrow.parquet as pq
import pytest
import torch

from covey.observability.record import Recorder, Replay, files, read_rows, read_run
from tests.support import runs, tiny
from tests.support.engines import CopyEngine
from tests.support.players import PLAYERS

KEPT = ("loss", "grad_norm", "reward", "kl", "completions/mean_length", "learning_rate", "entropy")
"""Metrics of a replay that are the recorded run's; nothing is known of what was sampled and not selected."""


class Silent:
    """Fails where a run samples."""

    def __call__(self, *args, **kwargs):
        raise AssertionError("a replay samples nothing")


def recorded(folder, **changes):
    trained = runs.trainer(folder, record="tokens", **changes)
    trained.train()
    return trained


def replayed(folder, source, **changes):
    trained = runs.trainer(folder, replay_from=str(source), **changes)
    trained.collector.collect = Silent()
    trained.train()
    return trained


CASES = {
    "grpo with a reference": {"beta": 0.05},
    "rloo, two passes": {"method": "rloo", "num_iterations": 2, "max_steps": 4},
    "dynamic sampling": {"dynamic_sample": True, "max_steps": 3},
    "sampling masks": {"keep_sampling_mask": True, "top_p": 0.8, "mask_truncated_completions": True},
    "several turns, sampled ahead": {
        "parts": {"rollout_func": PLAYERS["a group"]},
        "engine": True,
        "max_staleness": 1,
        "max_steps": 3,
        "max_completion_length": 16,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_replay_ends_with_the_same_weights(case, tmp_path):
    changes = {"max_steps": 3, **CASES[case]}
    engine = {"engine": CopyEngine(tiny.model())} if changes.pop("engine", False) else {}
    first = recorded(tmp_path / "first", **{**changes, "parts": {**changes.get("parts", {}), **engine}})
    second = replayed(tmp_path / "second", tmp_path / "first", **changes)
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(first), runs.weights(second), strict=True))
    for name in KEPT:
        assert runs.history(first, name) == runs.history(second, name), name


def test_another_learning_rate_is_tried_on_the_same_samples(tmp_path):
    first = recorded(tmp_path / "first", max_steps=2)
    second = replayed(tmp_path / "second", tmp_path / "first", max_steps=2, learning_rate=1e-3)
    assert runs.history(first, "reward") == runs.history(second, "reward")
    assert runs.history(first, "grad_norm")[0] == runs.history(second, "grad_norm")[0]
    assert runs.history(first, "grad_norm")[1] != runs.history(second, "grad_norm")[1]


def test_a_row_has_every_token(tmp_path):
    trained = recorded(tmp_path, beta=0.05, max_steps=1)
    path = files(tmp_path / "record")[0]
    rows = read_rows(path)
    assert path.name == "generation_00000.parquet" and len(rows) == 8
    for row in rows:
        tokens = len(row["token_ids"])
        of_tokens = ("sampled", "logprobs", "entropies", "advantages", "weights", "ref_logprobs")
        assert tokens and all(len(row[name]) == tokens for name in of_tokens)
        assert row["completion"] == trained.processing_class.decode(row["token_ids"], skip_special_tokens=True)
        assert row["data"] == tiny.rows()[row["row"]] and row["step"] == 1
        assert row["reward/longer"] == pytest.approx(runs.longer([row["token_ids"]])[0])
        assert row["fate"] in ("trained", "no signal")
    described = read_run(tmp_path)
    assert described["settings"]["beta"] == "0.05" and described["processes"] == 1
    assert list(described["rewards"]) == ["longer"] and "torch" in described["versions"]


def test_nothing_more_is_recorded_beyond_the_limit(tmp_path):
    with pytest.warns(UserWarning, match="record_max_gb=1e-06"):
        recorded(tmp_path, max_steps=3, record_max_gb=1e-6)
    assert len(files(tmp_path / "record")) == 1


def test_a_new_run_keeps_the_record_of_an_earlier_one(tmp_path):
    recorded(tmp_path, max_steps=3)
    with pytest.warns(UserWarning, match="files of an earlier run: .*record"):
        recorded(tmp_path, max_steps=1)
    assert [len(files(tmp_path / name)) for name in ("record", "record_1")] == [1, 3]


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_record(tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 2}
    recorded(tmp_path / "whole", max_steps=4, **changes)
    recorded(tmp_path / "cut", max_steps=3, lr_scheduler_type="constant", **changes)
    trained = runs.trainer(tmp_path / "cut", record="tokens", max_steps=4, **changes)
    trained.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    timed = {"seconds", "tool_seconds"}
    of_each = [
        [row for path in files(tmp_path / name / "record") for row in read_rows(path)] for name in ("whole", "cut")
    ]
    whole, cut = ([{k: v for k, v in row.items() if k not in timed} for row in rows] for rows in of_each)
    assert len(whole) == 32 and repr(whole) == repr(cut)


def test_a_value_that_fits_no_column_costs_its_rollout_batch(tmp_path):
    trained = runs.trainer(tmp_path, record="tokens", max_steps=1)
    add = trained.recorder.add

    def with_half_a_pair(step, rollout_batch, scored, batch):
        scored.rollouts[0].error = "\ud800"
        return add(step, rollout_batch, scored, batch)

    trained.recorder.add = with_half_a_pair
    with pytest.warns(UserWarning, match="The run continues without it"):
        trained.train()


def test_a_record_is_not_replaced_while_it_is_read(tmp_path):
    recorded(tmp_path, max_steps=1)
    with pytest.raises(ValueError, match="is the output_dir"):
        runs.trainer(tmp_path, record="tokens", replay_from=str(tmp_path))


def test_a_full_disk_costs_the_record_and_not_the_run(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Recorder, "_write", full)
    with pytest.warns(UserWarning, match="The run continues without it"):
        assert recorded(tmp_path, max_steps=1).state.global_step == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_steps": 3}, "has no rollout batch 1: it is a record of 1, the last of which is 0"),
        ({"parts": {"reward_funcs": runs.digits}}, "has the rewards longer, and this run has digits"),
    ],
)
def test_what_a_record_cannot_do_is_an_error(change, message, tmp_path):
    recorded(tmp_path / "first", max_steps=1)
    with pytest.raises(ValueError, match=message):
        replayed(tmp_path / "second", tmp_path / "first", **change)


def test_a_folder_without_a_record_is_an_error(tmp_path):
    with pytest.raises(ValueError, match='trained with record="tokens"'):
        runs.trainer(tmp_path, replay_from=str(tmp_path / "none"))


def test_as_many_processes_are_needed(tmp_path):
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "run.json").write_text(json.dumps({"processes": 2, "engine": {}}))
    with pytest.raises(ValueError, match="recorded by 2 processes, and 1 are"):
        Replay(tmp_path, ["longer"])


def test_nothing_is_written_without_a_record(tmp_path):
    runs.trainer(tmp_path, max_steps=1, record="off").train()
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_token_takes_at_most_48_bytes(tmp_path):
    recorded(tmp_path, beta=0.05, num_iterations=2, max_steps=1, max_completion_length=64)
    [path] = files(tmp_path / "record")
    of_tokens = {"token_ids", "sampled", "versions", "logprobs", "entropies", "old_logprobs", "ref_logprobs"}
    of_tokens |= {"advantages", "weights"}
    table = pq.ParquetFile(path).metadata
    groups = [table.row_group(0).column(number) for number in range(table.num_columns)]
    stored = sum(column.total_compressed_size for column in groups if column.path_in_schema.split(".")[0] in of_tokens)
    assert stored <= 48 * sum(len(row["token_ids"]) for row in read_rows(path))


def test_a_record_keeps_small_differences_of_large_rewards(tmp_path):
    def close(completions, **kwargs):
        return [1e6 + 0.01 * index for index in range(len(completions))]

    recorded(tmp_path, max_steps=1, parts={"reward_funcs": close})
    scored = Replay(tmp_path, ["close"], 0, 1).load(0)
    assert scored.rewards[:, 0].tolist() == [1e6 + 0.01 * index for index in range(8)]
    advantages = [row["advantages"][0] for row in read_rows(files(tmp_path / "record")[0])]
    assert advantages[0] < advantages[1] < advantages[2] < advantages[3]
