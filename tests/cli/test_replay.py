"""`covey replay` trains again from a record alone: the run's rewards, data and tools are not needed."""

import shutil

import pytest

from covey.cli.main import main
from covey.cli.replay import span
from tests.support import runs, tiny


def digits(completion_ids, **kwargs):
    return [float(ids[0] % 2) + len(ids) for ids in completion_ids]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Four steps on record, with a checkpoint after the second, of a model in a folder."""
    folder = tmp_path_factory.mktemp("run")
    from transformers import AutoModelForCausalLM

    parts = {"model": AutoModelForCausalLM.from_pretrained(tiny.folder(folder / "model")), "reward_funcs": digits}
    saved = {"save_strategy": "steps", "save_steps": 2}
    trained = runs.trainer(folder / "out", parts=parts, record="tokens", max_steps=4, logging_steps=1, **saved)
    trained.train()
    trained.save_model()
    return folder / "out"


def replay(run, folder, *flags):
    return main(["replay", str(run), "--output_dir", str(folder), *flags])


def test_an_unchanged_replay_is_equal(run, tmp_path, capsys):
    assert replay(run, tmp_path) == 0
    shown = capsys.readouterr().out
    assert "4 of 4 logged steps have the same loss and grad_norm" in shown and "The weights are the same." in shown


def test_steps_begin_with_a_checkpoint_and_end_early(run, tmp_path, capsys):
    assert replay(run, tmp_path / "last", "--steps", "3:") == 0
    assert "2 of 2 logged steps" in (shown := capsys.readouterr().out) and "The weights are the same." in shown
    assert replay(run, tmp_path / "first", "--steps", ":2") == 0
    assert "2 of 2 logged steps" in (shown := capsys.readouterr().out) and "weights" not in shown
    assert replay(run, tmp_path / "none", "--steps", "2:3") == 2
    assert "begin with step 1 or 3" in capsys.readouterr().err


def test_another_learning_rate_differs_after_the_first_step(run, tmp_path, capsys):
    assert replay(run, tmp_path, "--learning_rate", "1e-3") == 0
    assert "1 of 4 logged steps" in (shown := capsys.readouterr().out) and "The weights are other ones." in shown


def test_a_run_that_was_interrupted_is_replayed_up_to_there(run, tmp_path, capsys):
    shutil.copytree(run / "record", tmp_path / "run/record")
    for name in ("generation_00003", "update_00004"):
        (tmp_path / f"run/record/{name}.parquet").unlink()
    assert replay(tmp_path / "run", tmp_path / "again") == 0
    assert "3 of 3 logged steps" in capsys.readouterr().out


@pytest.mark.parametrize("steps", ["0:2", "3:2", "1:99", "4", "a:b", "-1:2"])
def test_steps_that_are_not_on_record_are_an_error(steps):
    with pytest.raises(ValueError, match="--steps"):
        span(steps, 16)


def test_a_record_without_tokens_is_an_error(tmp_path, capsys):
    runs.trainer(tmp_path, max_steps=1).train()
    assert main(["replay", str(tmp_path)]) == 2
    assert "no tokens on record" in capsys.readouterr().err
