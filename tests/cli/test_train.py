"""`covey grpo` and `covey rloo` train what a file describes and leave their results."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from covey import __version__
from covey.cli.config_file import config_of
from covey.cli.main import main
from covey.cli.run_file import RUN_KEYS, take_config
from covey.cli.run_help import help_text
from covey.cli.train import adapter, build_trainer, read_run, rewards, train
from covey.config.base import OLD
from covey.observability.record_files import FOLDER, files
from covey.observability.record_files import read_run as read_record
from covey.trainer.checkpoint import resume_from

ACTING = '''
from covey.rollout.tools.tool import Tool

seen = []


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


by_hand = Tool("look", {"type": "function", "function": {"name": "look", "parameters": {}}}, lambda: "nothing")
number = 5


async def play(row, engine):
    episode = engine.begin()
    await episode.sample()
    seen.append(row["prompt"])
    return episode.done()


class Room:
    def reset(self, **row):
        return " Go."

    def step(self, text):
        return "on", float(len(text)), True, {}
'''
REWARD = "def brief(completions, **kwargs):\n    return [-float(len(text)) for text in completions]\n"


@pytest.fixture
def run_file(tmp_path, tiny_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "brief.py").write_text(REWARD)
    (tmp_path / "leaves.py").write_text("def leave(x):\n    raise SystemExit(0)\n")
    for name in ("latin.yaml", "latin.md"):
        (tmp_path / name).write_bytes("# é".encode("latin-1"))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1="}) + "\n" for i in range(8)))
    path = tmp_path / "run.json"
    settings = {
        "model": str(tiny_folder),
        "dataset": "rows.jsonl",
        "reward_funcs": ["brief.py:brief"],
        "output_dir": "out",
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 4,
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
    }
    path.write_text(json.dumps(settings))
    return path


@pytest.mark.pages
def test_a_run_leaves_model_curves_report_and_completions(run_file, capsys):
    assert main(["grpo", "--config", str(run_file), "--learning_rate", "1e-4"]) == 0
    out = run_file.parent / "out"
    assert (out / "model.safetensors").exists() and (out / "trainer_state.json").exists()
    assert not (out / "completions").exists()  # the record has them
    assert len(files(out / FOLDER)) == 2
    described = read_record(out)
    assert described["changed"]["learning_rate"] == 1e-4 and "brief" in described["rewards"]
    assert not (out / "curves.png").exists()  # of `draw_curves`
    printed, noise = capsys.readouterr()
    assert "step 1/2  reward" in printed and "out/report.html" in printed
    assert printed.splitlines()[0] == f"covey {__version__}: grpo by {run_file}"
    assert "loading" in printed.splitlines()[1] and "to step 2, output: out" in printed.splitlines()[2]
    assert "%|" not in noise and "Generating" not in noise  # no bars of libraries


@pytest.mark.slow
def test_rloo_takes_the_same_file(run_file):
    trained = train(read_run(str(run_file), ["--max_steps", "1", "--eval_dataset", "rows.jsonl"], "rloo"))
    assert trained.args.method == "rloo"
    assert any("eval_reward" in entry for entry in trained.state.log_history)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--leraning_rate", "1"], "learning_rate"),
        (["--reward_funcs", "accuracy_rewrad"], "accuracy_reward"),
        (["--reward_funcs", "brief.py:missing"], "missing"),
        (["--dataset", "none.jsonl"], "there is no data file"),
        (["--dataset_split", "test"], "no split 'test'"),
        (["--resume_from_checkpoint", "nowhere"], "there is no checkpoint 'nowhere'"),
        (["--peft", "{rank: 4}"], "rank"),
        (["--quantization", "{load_in_4bits: true}"], "load_in_4bits, which transformers.BitsAndBytesConfig does not"),
        (["--quantization", "{load_in_4bit: true}"], "`quantization_config` was given without `peft_config`"),
        (["--num_generations", "3"], "num_generations"),
        (["--use_peft", "--lora_r", "["], "--lora_r"),
        (["--peft", "{r: 4, r: 8}"], "`r` is in line 1 and in line 1"),
        (["--eval_dataset", "{a: "], "cannot be read"),
        (["--columns", "{answer: 7}"], "the new names must be text, and all different"),
        (["--accelerate_config", "latin.yaml"], "latin.yaml is not UTF-8 text"),
        (["--reward_funcs", "LLMJudge('http://127.0.0.1:9', 'latin.md')"], "latin.md is not UTF-8 text"),
        (["--loss_type", "leaves.py:leave"], "leaves.py, line 2, called sys.exit"),
        (["--advantages", "leaves.py:leave"], "leaves.py, line 2, called sys.exit"),
        (["--config"], "--config: expected one argument"),
    ],
)
def test_mistakes_are_one_line_and_no_traceback(run_file, capsys, flags, message):
    assert main(["grpo", "--config", str(run_file), *flags] if flags != ["--config"] else ["grpo", "--config"]) == 2
    error = capsys.readouterr().err.splitlines()
    shown = [line for line in error if line.startswith("covey: error:")]
    assert len(shown) == 1 and message in shown[0]
    assert "Traceback" not in "".join(error)


@pytest.fixture
def acting(run_file):
    """A run file's words."""
    (run_file.parent / "acting.py").write_text(ACTING)
    messages = ({"prompt": [{"role": "user", "content": f"{i}+1="}]} for i in range(8))
    (run_file.parent / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in messages))
    return [str(run_file), "--dataset", "chats.jsonl"]


@pytest.mark.slow
@pytest.mark.pages
@pytest.mark.filterwarnings("ignore:the chat template does not tell the model about tools")
def test_tools_are_named_like_rewards(acting, capsys):
    flags = ["--tools", "acting.py:add", "acting.py:by_hand", "--max_tool_calling_iterations", "2", "--max_steps", "1"]
    trained = train(read_run(acting[0], [*acting[1:], *flags], "grpo"))
    assert list(trained.collector.spec.play.toolbox.tools) == ["add", "look"]
    assert trained.collector.spec.play.max_iterations == 2
    assert "rollouts/turns" in trained.state.log_history[0]
    named = read_record(Path(trained.args.output_dir))["parts"]["tools"]
    assert [name.rpartition("/")[2] for name in named] == ["acting.py:add", "acting.py:by_hand"]


@pytest.mark.slow
def test_a_rollout_function_is_named_like_a_reward(acting):
    from covey.runtime.import_path import resolve

    assert main(["rloo", *acting, "--rollout_func", "acting.py:play", "--max_steps", "1"]) == 0
    assert len(resolve("acting.py:seen", "list", needs_call=False)) == 4


@pytest.mark.slow
@pytest.mark.pages
def test_environments_are_named_like_rewards_and_may_need_none(acting):
    run_file = Path(acting[0])
    run = json.loads(run_file.read_text())
    run_file.write_text(json.dumps({key: value for key, value in run.items() if key != "reward_funcs"}))
    flags = ["--environment_factory", "acting.py:Room", "--max_steps", "1"]
    trained = train(read_run(acting[0], [*acting[1:], *flags], "grpo"))
    assert trained.rewards.names == ["Room"]
    assert read_record(Path(trained.args.output_dir))["parts"]["environment_factory"].endswith("acting.py:Room")


def test_an_agent_is_a_command_or_is_named(acting):
    run_file = Path(acting[0])
    run = json.loads(run_file.read_text())
    (run_file.parent / "talking.py").write_text("async def talk(row, base_url, api_key): ...")
    for agent in ("python talking.py --quiet", "talking.py:talk"):
        run_file.write_text(json.dumps({**run, "reward_funcs": [], "agent": agent, "max_steps": 1}))
        made = build_trainer(read_run(acting[0], [], "grpo"))
        assert made.rewards.names == ["environment"]
    assert main(["explain", acting[0]]) == 0


@pytest.mark.slow
def test_environments_by_name_need_no_dataset(acting):
    run_file = Path(acting[0])
    run = json.loads(run_file.read_text())
    factory = {"one": "acting.py:Room", "two": "acting.py:Room"}
    run = {key: value for key, value in run.items() if key not in ("reward_funcs", "dataset")}
    run_file.write_text(json.dumps(run | {"environment_factory": factory, "max_steps": 1}))
    assert main(["explain", acting[0]]) == 0
    trained = train(read_run(acting[0], [], "grpo"))
    assert [row["environment"] for row in trained.train_dataset[:3]] == ["one", "two", "one"]
    assert {"environment/one/reward", "environment/two/reward"} & trained.state.log_history[0].keys()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--environment_factory", "acting.py:Hall"], "environment_factory 'acting.py:Hall': 'Hall' does not exist"),
        (["--tools", "acting.py:addd"], "tool 'acting.py:addd': 'addd' does not exist. There: Room, Tool, add, play"),
        (["--tools", "nothing.py:add"], "nothing.py' does not exist"),
        (["--tools", "add"], "tool 'add' names no function. Write 'path/to/file.py:name'"),
        (["--tools", "acting.py:number"], "tools must be functions"),
        (["--rollout_func", "acting.py:number"], "rollout_func 'acting.py:number': 'number' is not callable"),
        (["--rollout_func", "acting.py:play", "--tools", "acting.py:add"], "give one of the two"),
    ],
)
def test_an_unknown_function_is_named(acting, capsys, flags, message):
    assert main(["grpo", *acting, *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_run_without_required_keys_is_refused(tmp_path, capsys):
    assert main(["grpo", "--output_dir", str(tmp_path)]) == 2
    assert "`model`" in capsys.readouterr().err


def test_the_run_file_is_found_wherever_it_stands():
    assert take_config(["run.yaml", "--beta", "1"]) == ("run.yaml", ["--beta", "1"])
    assert take_config(["--beta", "1", "--config=run.yaml"]) == ("run.yaml", ["--beta", "1"])
    assert take_config(["--beta", "1"]) == (None, ["--beta", "1"])


def test_rewards_must_be_names():
    with pytest.raises(ValueError, match="a dict"):
        rewards([{"name": "accuracy_reward"}])


def test_resuming_takes_a_folder_or_the_latest(tmp_path):
    assert resume_from(None) is None and resume_from("false") is None
    assert resume_from(False) is None and resume_from(True) is True  # as YAML has them
    assert resume_from("True") is True and resume_from("last") is True
    assert resume_from(str(tmp_path)) == str(tmp_path)


def test_no_adapter_unless_asked_for():
    assert adapter(None) is None
    assert adapter({"r": 4}).task_type == "CAUSAL_LM"


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_help_describes_every_field_and_run_key(method):
    text = help_text(method, everything=True)
    names = {f.name for f in dataclasses.fields(config_of(method))} - OLD
    missing = [name for name in names if f"--{name} " not in text.replace("\n", " ")]
    assert missing == []
    assert all(f"--{key}" in text for key in RUN_KEYS)
    assert "%%" not in text


def test_short_help_fits_the_screen_width_and_groups_by_theme(capsys):
    assert main(["grpo", "-h"]) == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "\nThe entropy bonus.\n" in text
    assert "Weight of the KL penalty" in text


def test_settings_of_a_run_file_are_kept_without_secrets(run_file, monkeypatch):
    made = SimpleNamespace(report=SimpleNamespace(), train=lambda: sys.exit(143))
    monkeypatch.setattr("covey.cli.train.build_trainer", lambda run: made)
    flags = ["--dataset", "https://me:S@host/rows.csv?token=S", "--reward_funcs", "brief.py:make(key='abcdefgh')"]
    with pytest.raises(SystemExit):
        train(read_run(str(run_file), flags, "grpo"))
    assert made.report.named["dataset"] == "https://host/rows.csv?token=..."
    assert made.report.named["reward_funcs"] == ["brief.py:make(key='...')"]


def test_what_the_first_step_took_stands_next_to_the_estimate(run_file, capsys):
    assert main(["grpo", "--config", str(run_file), "--max_steps", "1"]) == 0
    capsys.readouterr()
    measured = "measured in its first step"
    assert main(["explain", str(run_file)]) == 0 and measured in " ".join(capsys.readouterr().out.split())
    assert main(["explain", str(run_file), "--max_completion_length", "3"]) == 0
    assert measured not in " ".join(capsys.readouterr().out.split())
