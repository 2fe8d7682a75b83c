"""What real trackers have written, offline, after a run with two evaluation sets; see `make test-trackers`."""

import importlib.util
import json
from pathlib import Path

import pytest

from covey import EvalSuite
from covey.trainer.integrations.trackers import MODULES, check_trackers, guard_trackers
from tests.support import runs, tiny
from tests.support.mistakes.cases import Bench
from tests.support.mistakes.evaluation import offline


def even(completions, **kwargs):
    """1 where the first character has an even code."""
    return [float(text != "" and ord(text[0]) % 2 == 0) for text in completions]


def run(folder, tracker):
    """Two steps, each logged and evaluated, with tables of completions."""
    suites = {"sums": EvalSuite(tiny.rows(2), num_generations=2, pass_at=(1, 2)), "plain": tiny.rows(2)}
    trainer = runs.trainer(
        folder / "out",
        parts={"reward_funcs": even, "eval_dataset": suites},
        report_to=[tracker],
        run_name="first",
        log_completions=True,
        num_completions_to_print=1,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
    )
    trainer.train()
    return trainer


PROMISED = ("train/reward", "train/rewards/even/mean", "eval/sums_pass@1", "eval/sums_pass@2_low", "eval/plain_reward")


def test_tensorboard(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trainer = run(tmp_path, "tensorboard")
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert not [name for name in PROMISED if name not in board.Tags()["scalars"]]
    written = [(event.step, event.value) for event in board.Scalars("train/reward")]
    assert written == [
        (1, pytest.approx(runs.history(trainer, "reward")[0])),
        (2, pytest.approx(runs.history(trainer, "reward")[1])),
    ]
    settings = board.Tensors("args/text_summary")[0].tensor_proto.string_val[0].decode()
    assert '"num_generations": 4' in settings


def test_wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    run(tmp_path, "wandb")
    wandb.finish()
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    log = written.read_bytes()
    assert not [name for name in (*PROMISED, "num_generations", "first") if name.encode() not in log]
    tables = [json.loads(path.read_text()) for path in tmp_path.rglob("table/completions_*.table.json")]
    assert len(tables) == 2 and {"prompt", "completion", "even", "advantage"} <= set(tables[0]["columns"])
    assert [len(table["data"]) for table in tables] == [8, 8]
    # each evaluation's as well, by set: 2 prompts of 2 completions, and of as many as in training
    for name, judged, rows in (("sums", {"right"}, 4), ("plain", {"advantage"}, 8)):
        tables = [json.loads(path.read_text()) for path in tmp_path.rglob(f"{name}_completions_*.table.json")]
        assert [len(table["data"]) for table in tables] == [rows, rows]
        assert {"prompt", "completion", "even", *judged} <= set(tables[0]["columns"])


def test_trackio(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    import sqlite3

    from trackio import sqlite_storage, utils

    for module in (utils, sqlite_storage):  # read from the environment when they are imported
        if hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    trainer = run(tmp_path, "trackio")
    (written,) = (tmp_path / "trackio").glob("*.db")
    rows = [json.loads(row) for (row,) in sqlite3.connect(written).execute("select metrics from metrics")]
    assert not [name for name in PROMISED if not any(name in row for row in rows)]
    assert [row["train/reward"] for row in rows if "train/reward" in row] == runs.history(trainer, "reward")
    tables = [row["completions"]["_value"] for row in rows if "completions" in row]
    assert [len(table) for table in tables] == [8, 8] and {"prompt", "completion", "even"} <= set(tables[0][0])
    tables = [row["eval/sums_completions"]["_value"] for row in rows if "eval/sums_completions" in row]
    assert [len(table) for table in tables] == [4, 4] and {"prompt", "completion", "right"} <= set(tables[0][0])
    assert sum("eval/plain_completions" in row for row in rows) == 2
    settings = json.loads(sqlite3.connect(written).execute("select config from configs").fetchone()[0])
    assert settings["num_generations"] == 4


def test_swanlab(tmp_path, monkeypatch):
    swanlab = pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_LOG_DIR", str(tmp_path / "swanlog"))
    monkeypatch.chdir(tmp_path)
    run(tmp_path, "swanlab")
    swanlab.finish()
    log = b"".join(path.read_bytes() for path in (tmp_path / "swanlog").rglob("*.swanlab"))
    assert not [name for name in PROMISED if name.encode() not in log]
    (settings,) = (tmp_path / "swanlog").rglob("config.yaml")
    assert "num_generations" in settings.read_text()
    tables = [path.read_text() for path in (tmp_path / "swanlog").rglob("*.json") if "echarts" in str(path)]
    assert len(tables) == 6 and all("completion" in table for table in tables)  # of training and two sets, twice each
    assert b"eval/sums_completions" in log and b"eval/plain_completions" in log


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)  # where artifacts go
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    trainer = run(tmp_path, "mlflow")
    client = mlflow.MlflowClient()
    (written,) = client.search_runs(["0"])
    names = {name.removeprefix("train/").replace("eval/", "eval_").replace("@", "_") for name in PROMISED}
    assert names <= set(written.data.metrics)  # its names hold no @
    history = [point.value for point in client.get_metric_history(written.info.run_id, "reward")]
    assert history == runs.history(trainer, "reward")
    assert written.data.params["num_generations"] == "4" and written.info.run_name == "first"
    table = mlflow.load_table("completions/completions_00001.json", run_ids=[written.info.run_id])
    assert len(table) == 8 and {"prompt", "completion", "even"} <= set(table.columns)
    table = mlflow.load_table("completions/eval/sums_completions_00002.json", run_ids=[written.info.run_id])
    assert len(table) == 4 and {"prompt", "completion", "right"} <= set(table.columns)


def test_completions_are_sent_once_the_tracker_run_is_open(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    trainer = runs.trainer(tmp_path / "out", report_to=["wandb"], log_completions=True, per_device_eval_batch_size=4)
    trainer.evaluate(EvalSuite(tiny.rows(2), num_generations=2))
    trainer.predict(EvalSuite(tiny.rows(2), num_generations=2))
    written = Path(wandb.run.dir)
    wandb.finish()
    tables = sorted(path.parent.name for path in written.rglob("completions_*.table.json"))
    assert tables == ["eval", "test"]


def test_an_unknown_tracker_is_refused_before_a_model_is_loaded(tmp_path):
    with pytest.raises(ValueError, match=r"report_to='wandbb' is no tracker.*Did you mean 'wandb'"):
        runs.trainer(tmp_path, parts={"model": "no/such-model"}, report_to="wandbb")


def test_a_tracker_that_is_not_installed_is_named():
    missing = [name for name, (module, *_) in MODULES.items() if importlib.util.find_spec(module) is None]
    assert missing, "some of them always are"
    name = missing[-1]
    with pytest.raises(ImportError, match=f"report_to='{name}': the package {MODULES[name][0]} is not installed"):
        check_trackers([name])


def test_every_tracker_of_transformers_is_known():
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    assert set(INTEGRATION_TO_CALLBACK) - {"kubeflow"} <= set(MODULES)  # kubeflow needs no package


def test_a_tracker_that_fails_costs_its_entries_and_not_the_run(tmp_path):
    with pytest.warns(UserWarning, match="could not log"):
        trained = offline(Bench(tmp_path, ""))
    assert len(runs.history(trained, "reward")) == trained.state.global_step == 2


@pytest.mark.parametrize("event", ["on_log", "on_save", "on_train_end"])
def test_what_a_tracker_raises_once_a_run_has_begun_is_a_warning(event):
    from transformers.integrations import TensorBoardCallback

    def fails(*given, **named):
        raise ConnectionError("gone")

    tracker = TensorBoardCallback.__new__(TensorBoardCallback)
    setattr(tracker, event, fails)
    guard_trackers([tracker])
    with pytest.warns(UserWarning, match="could not log .*gone"):
        assert getattr(tracker, event)(None, None, None) is None
