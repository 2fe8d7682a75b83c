"""Every key of a run file and every option of a command changes something, or it is said that it does not.

As in `tests/config/test_every_option.py`: names are those of the code, and each has a case.
"""

import contextlib
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
from transformers import BitsAndBytesConfig

from covey.cli import train
from covey.cli.config_file import load_run
from covey.cli.main import COMMANDS, main
from covey.cli.run_file import OTHER_NAMES, RUN_KEYS, SCRIPT_FLAGS
from covey.config.grpo import GRPOConfig
from covey_tools import replay
from covey_tools.study.plan import KEYS, variants_of
from tests.support import runs, tiny
from tests.support.outcomes import differences, parts, said

ROOT = Path(__file__).parents[2]

CODE = '''
def f(completions, **columns):
    return [float(len(str(one))) for one in completions]

def g(completions, **columns):
    return [1.0 for one in completions]

def rows():
    return [{"prompt": [{"role": "user", "content": "hi"}], "answer": "1"}] * 8

def own_system():
    return [{"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "hi"}]}] * 8

def look(query: str) -> str:
    """Look.

    Args:
        query: What for.
    """
    return query

async def play(row, engine):
    return None

class World:
    def reset(self, **row):
        return "go"

    def step(self, text):
        return "on", 1.0, True, {}
'''


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    tiny.folder(folder / "model")
    tiny.folder(folder / "other", hidden_size=16)
    (folder / "code.py").write_text(CODE)
    for name, rows in (("data", tiny.rows(16)), ("more", tiny.rows(12))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


# Keys alone, and together with what they need; `None` takes a key of the usual run away
KEYS_OF_A_RUN: dict[str, list[dict[str, Any]]] = {
    "method": [{"method": "rloo"}],
    "model": [{"model": "other"}],
    "dataset": [{"dataset": "more.jsonl"}],
    "sources": [
        {"sources": {"a": {"dataset": "data.jsonl", "weight": 2}, "b": {"dataset": "more.jsonl"}}, "dataset": None},
    ],
    "dataset_split": [{"dataset_split": "train[:8]"}, {"dataset_split": "train[:8]", "dataset": None}],
    "columns": [{"columns": {"answer": "solution"}}, {"columns": {"answer": "x"}, "dataset": None}],
    "system_prompt": [
        {"system_prompt": "Add."},
        {"system_prompt": "Add.", "dataset": "code.py:own_system"},
        {"system_prompt": "Add.", "dataset": None},
    ],
    "eval_dataset": [{"eval_dataset": "more.jsonl"}],
    "reward_funcs": [{"reward_funcs": ["code.py:g"]}, {"reward_funcs": ["code.py:f", "code.py:f"]}],
    "tools": [{"tools": ["code.py:look"], "dataset": "code.py:rows"}],
    "rollout_func": [{"rollout_func": "code.py:play"}],
    "environment_factory": [{"environment_factory": "code.py:World", "dataset": "code.py:rows"}],
    "agent": [{"agent": "echo x"}],
    "seats": [{"seats": {"other": "frozen"}, "rollout_func": "code.py:play"}, {"seats": {"other": "frozen"}}],
    "eval_seats": [{"eval_seats": {"other": {"url": "http://a/v1"}}, "rollout_func": "code.py:play"}],
    "peft": [{"peft": {"r": 2, "target_modules": ["q_proj"]}}],
    "quantization": [{"quantization": {"load_in_4bit": True}}],
}


def values(home: Path, changes: dict[str, Any]) -> dict[str, Any]:
    usual = {"model": "model", "dataset": "data.jsonl", "reward_funcs": ["code.py:f"], **runs.DEFAULTS}
    usual |= {"output_dir": str(home / "out"), "prompts_as_messages": False}
    return {name: value for name, value in {**usual, **changes}.items() if value is not None}


def of_run(home: Path, changes: dict[str, Any]) -> Any:
    trainer = train.build_trainer(train.read_run(values(home, changes), [], None, needed=()))
    seen = [list(one or ()) for one in (trainer.train_dataset, trainer.eval_dataset)]
    kinds = [type(trainer).__name__, trainer.rewards.names, seen]
    return [str(kinds), parts({**vars(trainer), "train_dataset": None, "eval_dataset": None})]


@pytest.mark.parametrize(
    ("key", "changes"), [(key, one) for key, many in KEYS_OF_A_RUN.items() for one in many], ids=str
)
@pytest.mark.filterwarnings("ignore")
def test_a_key_of_a_run_file_changes_its_trainer_or_says_that_it_does_not(key, changes, home, monkeypatch):
    monkeypatch.chdir(home)
    others = {name: value for name, value in changes.items() if name != key}
    if "dataset" in others and others["dataset"] is None:
        others |= {"environment_factory": "code.py:World", "reward_funcs": None}
    made, named = said(key, lambda: of_run(home, {**others, **{key: changes[key]}}))
    if named:
        return
    usual, again = (of_run(home, others) for _ in range(2))
    assert differences(usual, made) - differences(usual, again)


def test_each_key_of_a_run_file_has_a_case():
    assert {*RUN_KEYS} == {*KEYS_OF_A_RUN}


OTHERS: dict[str, tuple[Any, str, Any]] = {  # other names of keys: a value, the key and what it becomes
    "model_name_or_path": ("a", "model", "a"),
    "dataset_name": ("b", "dataset", "b"),
    "train_dataset": ("b", "dataset", "b"),
    "dataset_train_split": ("test", "dataset_split", "test"),
    "peft_config": ({"r": 2}, "peft", {"r": 2}),
    "quantization_config": ({"load_in_4bit": True}, "quantization", {"load_in_4bit": True}),
    "resume": ("auto", "resume_from_checkpoint", "auto"),
    "reward_model_name_or_path": ("c", "reward_funcs", ["code.py:f", "c"]),
    "dataset_config": ("main", "dataset", "data.jsonl:main"),
}
NUMBERS = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.25}


@pytest.mark.parametrize("name", [*OTHERS, *(name for names in SCRIPT_FLAGS.values() for name in names)])
@pytest.mark.filterwarnings("ignore")
def test_another_name_of_a_key_sets_the_key(name, home):
    if name in OTHERS:
        value, key, expected = OTHERS[name]
        taken = {key: None} if key in ("model", "dataset") and name != "dataset_config" else {}
        run = load_run(values(home, {name: value, **taken}))
        assert getattr(run, key, None) == expected or getattr(run.args, key, None) == expected
        return
    key = next(key for key, names in SCRIPT_FLAGS.items() if name in names)
    inner = SCRIPT_FLAGS[key][name]
    value = NUMBERS.get(inner, True if inner.startswith(("use_", "load_", "bnb_4bit_use")) else "x")
    run = load_run(values(home, {name: value, **({"use_peft": True} if key == "peft" else {})}))
    held = run.args.model_init_kwargs if key == "model_init_kwargs" else getattr(run, key)
    assert held[inner] == value or held[inner] == [value]


def test_each_other_name_has_a_case():
    assert {*OTHER_NAMES} <= {*OTHERS}


def test_arguments_within_keys_are_those_of_their_classes(home):
    """What a mapping holds goes to a class that refuses unknown names."""
    known = (({"peft": {"rr": 1}}, peft.LoraConfig), ({"quantization": {"bits": 1}}, BitsAndBytesConfig))
    for changes, kind in known:
        with pytest.raises(ValueError, match=kind.__name__):
            run = load_run(values(home, changes))
            train.adapter(run.peft)
            train.quantisation(run.quantization)
    assert variants_of({"variants": {"a": {"beta": 0.1}}}) == {"a": {"beta": 0.1}}
    assert set(KEYS) == {"variants", "grid", "random", "eval_steps", "save_rounds", "halving"}


# ---- commands --------------------------------------------------------------------------------------------------------

CLI = "cli/test_"
TOOLS = "covey_tools/test_"
OPTIONS: dict[str, dict[str, str]] = {  # by command: a test in which an option acts
    "init": {},
    "env": {},
    "diff": {},
    "demo": {
        **dict.fromkeys(("max_steps", "minutes"), f"{CLI}demo.py::test_training_ends_when_the_time_is_up"),
        **dict.fromkeys(("output_dir", "seed"), f"{CLI}demo.py::"),
    },
    "doctor": {
        "json": f"{TOOLS}doctor.py::test_json_and_exit_status",
        "seconds": f"{TOOLS}doctor.py::test_other_columns_are_tried_while_there_is_time",
        "write": f"{TOOLS}doctor_records.py::",
        "field": f"{TOOLS}doctor.py::",
    },
    "replay": {
        "steps": f"{TOOLS}replay.py::test_steps_that_are_not_on_record_are_an_error",
        "field": f"{CLI}every_key.py::test_flags_that_a_command_does_not_read_are_pointed_out",
    },
    "rewards": {
        "completions": f"{CLI}rewards.py::test_lines_are_read_as_json_lines",
        "run": f"{CLI}rewards.py::test_completions_of_a_run_are_read",
        **dict.fromkeys(("limit", "timeout"), f"{CLI}every_key.py::test_limits_of_a_test_of_rewards_act"),
    },
    "view": {
        **dict.fromkeys(("export", "max_mb"), f"{TOOLS}view.py::test_an_export_says_what_did_not_fit"),
        "steps": f"{TOOLS}view.py::test_an_export_is_one_file_with_its_data",
        **dict.fromkeys(("open", "port"), f"{CLI}every_key.py::test_options_of_a_page_and_of_a_file_do_not_mix"),
    },
    "explain": {
        **dict.fromkeys(("world_size", "num_processes"), f"{CLI}explain.py::test_the_command_plans_for_more_processes"),
        "accelerate_config": f"{CLI}explain.py::test_an_accelerate_config_gives_the_processes",
        "gpu": f"{CLI}explain.py::test_a_gpu_is_planned_in_its_own_precision",
        "gpu_memory": f"{CLI}explain.py::test_a_run_too_large_for_the_gpu_is_announced",
        "prompt_tokens": f"{CLI}every_key.py::test_a_flag_of_explain_changes_its_text_or_says_that_it_does_not",
        "gpus_of_node": f"{CLI}every_key.py::test_a_flag_of_explain_changes_its_text_or_says_that_it_does_not",
        **dict.fromkeys(
            ("images", "image_size"), f"{CLI}explain.py::test_images_are_counted_by_the_processor_of_the_model"
        ),
        **dict.fromkeys(("config", "field"), f"{CLI}explain.py::test_the_command_reads_the_file_and_its_model"),
    },
    "study": {
        "resume": "covey_tools/study/test_study.py::test_a_study_of_a_file_is_driven_from_the_command_line",
        **dict.fromkeys(
            ("study", "to", "fresh"),
            "covey_tools/study/test_study.py::test_a_study_of_a_file_is_driven_from_the_command_line",
        ),
        "field": "covey_tools/study/test_study.py::",
    },
    "tinker-serve": {
        **dict.fromkeys(
            ("model", "as", "checkpoints", "log"),
            f"{CLI}tinker_serve.py::test_a_command_finds_the_server_and_its_status_is_the_servers",
        ),
        **dict.fromkeys(
            ("host", "api_key", "substitute", "port"), f"{CLI}tinker_serve.py::test_flags_that_cannot_be_are_refused"
        ),
        **dict.fromkeys(
            ("max_clients", "max_rank", "max_tokens", "max_waiting", "token_budget", "seed", "device", "durable"),
            f"{CLI}tinker_serve.py::test_limits_reach_the_server",
        ),
    },
    "eval": {
        "config": f"{CLI}evaluations.py::",
        "model": f"{CLI}evaluations.py::",
        "field": f"{CLI}every_key.py::test_flags_that_a_command_does_not_read_are_pointed_out",
    },
}
FORWARDED = ("vllm-serve", "sglang-serve")  # flags of another program, which refuses unknown ones
FIELDS_OF_CONFIGS = ("grpo", "rloo")  # tests/config/test_every_option.py


@pytest.mark.parametrize("command", OPTIONS)
def test_each_option_of_a_command_has_a_test_in_which_it_acts(command, capsys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        with contextlib.suppress(SystemExit):
            main([command, "-h"])
    named = {name.replace("-", "_") for name in re.findall(r"--([a-z][\w-]*)", capsys.readouterr().out)} - {"help"}
    assert named == {*OPTIONS[command]}
    for place in OPTIONS[command].values():
        path, _, test = place.partition("::")
        source = (ROOT / "tests" / path).read_text()
        assert f"def {test}(" in source if test else source


def test_each_command_has_a_case():
    assert {*COMMANDS} == {*OPTIONS, *FORWARDED, *FIELDS_OF_CONFIGS}


@pytest.mark.parametrize(
    ("command", "words", "names"),
    [
        ("eval", train.NOT_EVALUATED, "an evaluation"),
        ("replay", replay.NOT_REPLAYED, "a replay"),
    ],
)
def test_flags_that_a_command_does_not_read_are_those_of_fields_or_keys(command, words, names):
    fields = {one.name for one in dataclasses.fields(GRPOConfig)}
    assert {*words} <= fields | {*RUN_KEYS} | {"warmup_ratio"}, names


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--learning_rate 0.5", "--resume_from_checkpoint x", "--dataset_split test"])
def test_flags_that_a_command_does_not_read_are_pointed_out(flag, home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    (home / "run.yaml").write_text(json.dumps(values(home, {"eval_dataset": "more.jsonl"})))
    assert main(["eval", "run.yaml", *flag.split()]) == 0
    assert flag.split()[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag",
    ["images 3", "image_size 9x9", "gpus_of_node 2", "prompt_tokens 77", "gpus_of_node 2 --world_size 4"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_flag_of_explain_changes_its_text_or_says_that_it_does_not(flag, home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    (home / "run.yaml").write_text(json.dumps(values(home, {})))
    name, *more = flag.split()
    texts = []
    for words in (more[1:], [f"--{name}", *more]):  # the first of `more` is the value
        assert main(["explain", "run.yaml", *words]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1]


@pytest.mark.parametrize("words", ["--steps 1:2", "--max_mb 3", "--export x.html --port 1", "--export x.html --open"])
def test_options_of_a_page_and_of_a_file_do_not_mix(words, tmp_path, capsys):
    assert main(["view", str(tmp_path), *words.split()]) == 2
    assert words.split()[0 if "export" not in words else 2] in capsys.readouterr().err


def test_limits_of_a_test_of_rewards_act(tmp_path, capsys):
    (tmp_path / "late.py").write_text(
        "import time\ndef late(completions):\n    time.sleep(1.0)\n    return [1.0] * 2\n"
    )
    (tmp_path / "said.jsonl").write_text(3 * (json.dumps({"prompt": "a", "completion": "b"}) + "\n"))
    words = ["rewards", "test", f"{tmp_path}/late.py:late", "--completions", str(tmp_path / "said.jsonl")]
    main([*words, "--limit", "2", "--timeout", "0.2"])
    assert "2 of 2, 2 failed or late" in capsys.readouterr().out
