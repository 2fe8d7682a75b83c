"""`covey replay` trains again from a record alone: the run's rewards, data and tools are not needed."""

import json
import math
import shutil

import datasets
import pytest
from transformers import AutoModelForCausalLM

from covey.cli.main import main
from covey_tools.replay import span
from tests.rewards.hostile_rewards import shares_of_digits
from tests.support import runs, tiny


def digits(completion_ids, **kwargs):
    return [float(ids[0] % 2) + len(ids) for ids in completion_ids]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Four steps on record, with a checkpoint after the second, of a model in a folder."""
    folder = tmp_path_factory.mktemp("run")
    parts = {"model": AutoModelForCausalLM.from_pretrained(tiny.folder(folder / "model")), "reward_funcs": digits}
    saved = {"save_strategy": "steps", "save_steps": 2}
    trained = runs.trainer(folder / "out", parts=parts, record="tokens", max_steps=4, logging_steps=1, **saved)
    trained.train()
    trained.save_model()
    return folder / "out"


def replay(run, folder, *flags):
    return main(["replay", str(run), "--output_dir", str(folder), *flags])


@pytest.mark.slow
def test_an_unchanged_replay_is_equal(run, tmp_path, capsys):
    assert replay(run, tmp_path) == 0
    shown = capsys.readouterr().out
    assert "4 of 4 logged steps have the same loss and grad_norm" in shown and "The weights are the same." in shown


@pytest.mark.slow
def test_a_run_without_rewards_is_replayed(tmp_path, capsys):
    """A group of one completion is refused only where there are rewards."""
    parts = {"model": AutoModelForCausalLM.from_pretrained(tiny.folder(tmp_path / "model")), "reward_funcs": None}
    taught = {"num_generations": 1, "teacher": "follower", "logging_steps": 1}
    runs.trainer(tmp_path / "run", parts=parts, record="tokens", max_steps=2, **taught).train()
    assert replay(tmp_path / "run", tmp_path / "again") == 0
    assert "2 of 2 logged steps have the same loss and grad_norm" in capsys.readouterr().out


@pytest.mark.slow
def test_games_are_replayed_without_what_played_them(tmp_path, capsys):
    """Roles are on record; settings of the rollouts, which nothing reads now, are no mistakes."""

    async def play(row, engine, n):
        seats = [(role, engine.begin(f"{row['prompt']} {role}:")) for role in ("first", "second")]
        for _, episode in seats:
            await episode.sample()
        return [episode.done(role=role) for role, episode in seats]

    parts = {"model": AutoModelForCausalLM.from_pretrained(tiny.folder(tmp_path / "model")), "reward_funcs": digits}
    settings = {"compare": "role_average", "rollouts_per_game": 2, "max_turn_length": 5, "rollout_timeout": 50.0}
    made = runs.trainer(tmp_path / "run", parts={**parts, "rollout_func": play}, record="tokens", **settings)
    made.train()
    made.save_model()
    assert replay(tmp_path / "run", tmp_path / "again") == 0
    shown = capsys.readouterr()
    assert "2 of 2 logged steps have the same loss" in shown.out and "The weights are the same." in shown.out
    assert "has no effect" not in shown.err
    assert replay(tmp_path / "run", tmp_path / "role", "--compare", "role") == 0


@pytest.mark.slow
def test_other_weights_of_the_same_losses_are_a_difference(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    saved = tmp_path / "run/model.safetensors"
    saved.write_bytes(saved.read_bytes()[:-1] + b"\0")
    assert replay(tmp_path / "run", tmp_path / "again") == 1
    assert "4 of 4 logged steps" in (shown := capsys.readouterr().out) and "The weights are different." in shown


@pytest.mark.slow
def test_steps_begin_with_a_checkpoint_and_end_early(run, tmp_path, capsys):
    assert replay(run, tmp_path / "last", "--steps", "3:") == 0
    assert "2 of 2 logged steps" in (shown := capsys.readouterr().out) and "The weights are the same." in shown
    assert replay(run, tmp_path / "first", "--steps", ":2") == 0
    assert "2 of 2 logged steps" in (shown := capsys.readouterr().out) and "weights" not in shown
    assert replay(run, tmp_path / "none", "--steps", "2:3") == 2
    assert "begin with step 1 or 3" in capsys.readouterr().err


def test_another_learning_rate_differs_after_the_first_step(run, tmp_path, capsys):
    assert replay(run, tmp_path, "--learning_rate", "1e-3") == 0
    assert "1 of 4 logged steps" in (shown := capsys.readouterr().out) and "The weights are different." in shown


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


def recorded(folder, parts=None, **changes):
    """A run of two steps of the model in the folder, with its tokens on record."""
    model = AutoModelForCausalLM.from_pretrained(tiny.folder(folder / "model"))
    runs.trainer(
        folder / "out", parts={"model": model, **(parts or {})}, **{"record": "tokens", "max_steps": 2, **changes}
    ).train()
    return folder / "out"


class Guess:
    """An environment whose rows have no prompt."""

    def reset(self, seed=None):
        return "Guess a word."

    def tell(self, word: str) -> str:
        """Tell a guess.

        Args:
            word: the guess.
        """
        return "no"

    def get_reward(self):
        return 1.0


def stream():
    return datasets.Dataset.from_list(tiny.rows()).to_iterable_dataset()


CASES = {
    "a stream": (lambda: {"train_dataset": stream()}, {}),
    "rows of several types": (lambda: {"train_dataset": [{"prompt": "a", "x": 1}, {"prompt": "b", "x": "c"}]}, {}),
    "environments": (lambda: {"environment_factory": Guess, "train_dataset": None, "reward_funcs": None}, {}),
    "an infinite norm": (dict, {"max_grad_norm": math.inf, "learning_rate": 1.0}),
    "rewards in processes": (lambda: {"reward_funcs": shares_of_digits}, {"reward_isolation": "process"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_runs_of_other_kinds_are_replayed(case, tmp_path, capsys):
    parts, changes = CASES[case]
    assert replay(recorded(tmp_path, parts(), **changes), tmp_path / "again") == 0
    assert "2 of 2 logged steps" in capsys.readouterr().out


@pytest.mark.slow
def test_an_adapter_begins_with_the_same_weights(tmp_path, capsys):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="gaussian")
    assert replay(recorded(tmp_path, {"peft_config": settings}), tmp_path / "again") == 0
    assert "2 of 2 logged steps" in capsys.readouterr().out


@pytest.mark.slow
def test_logs_are_compared_over_the_same_steps(tmp_path, capsys):
    run = recorded(tmp_path, logging_steps=3, max_steps=7, save_strategy="steps", save_steps=2)
    for flags, count in (([], 4), (["--steps", "3:"], 2), (["--logging_steps", "1"], 2)):
        assert replay(run, tmp_path / "again", *flags) == 0
        assert f"{count} of {count} logged steps" in capsys.readouterr().out


@pytest.mark.slow
def test_another_micro_batch_keeps_the_rollout_batch(run, tmp_path, capsys):
    assert replay(run, tmp_path, "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4") == 0
    assert "of 4 logged steps" in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_without_a_name_can_be_given(run, tmp_path, capsys):
    shutil.copytree(run / "record", tmp_path / "run/record")
    path = tmp_path / "run/record/run.json"
    described = json.loads(path.read_text())
    named = described["parts"].pop("model")
    path.write_text(json.dumps(described))
    assert replay(tmp_path / "run", tmp_path / "again") == 2
    assert "by --model" in capsys.readouterr().err
    assert replay(tmp_path / "run", tmp_path / "again", "--model", named) == 0


def test_unknown_flags_and_a_later_end_are_errors_of_one_line(run, tmp_path, capsys):
    assert replay(run, tmp_path, "--learning_rat", "1") == 2
    assert "Did you mean `learning_rate`?" in capsys.readouterr().err
    assert replay(run, tmp_path, "--steps", "2:") == 2
    assert capsys.readouterr().err.strip().endswith("begin with step 1 or 3.")


@pytest.mark.slow
def test_from_a_checkpoint_data_and_rewards_have_not_changed(run, tmp_path, capsys):
    assert replay(run, tmp_path, "--steps", "3:") == 0
    assert "this run has changed" not in capsys.readouterr().err
