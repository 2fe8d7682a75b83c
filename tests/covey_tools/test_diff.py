"""`covey diff` names the first difference between two runs, and what was planted."""

import json

import pytest

from covey.cli.main import main
from tests.support import runs, tiny


def digits(completion_ids, **kwargs):
    return [float(ids[0] % 2) + len(ids) for ids in completion_ids]


def longer(completion_ids, **kwargs):
    return [float(ids[0] % 3) + len(ids) for ids in completion_ids]


longer.__name__ = "digits"  # as a function that was edited


def other_template():
    made = tiny.tokenizer()
    made.chat_template = made.chat_template.replace("assistant: ", "answer: ")
    return made


CHAT = {"train_dataset": tiny.rows(conversational=True)}
PLANTED = {
    "seed": ({"seed": 1}, {}, "row", "seed: 42 and 1"),
    "order": ({"shuffle_dataset": False}, {}, "row", "shuffle_dataset: True and False"),
    "rows": ({}, {"train_dataset": tiny.rows()[::-1]}, "data", "dataset (content)"),
    "template": ({}, {"processing_class": other_template(), **CHAT}, "prompt_ids", "chat template"),
    "temperature": ({"temperature": 0.5}, {}, "logprobs", "temperature: 1.0 and 0.5"),
    "top-p": ({"top_p": 0.3}, {}, "token_ids", "top_p: 1.0 and 0.3"),
    "length": ({"max_completion_length": 4}, {}, "token_ids", "max_completion_length: 6 and 4"),
    "reward": ({}, {"reward_funcs": longer}, "reward/digits", "code of the reward digits"),
    "scale": ({"scale_rewards": "none"}, {}, "advantages", "scale_rewards: 'group' and 'none'"),
    "KL": ({"beta": 0.05}, {}, "ref_logprobs", "beta: 0.0 and 0.05"),
    "learning rate": ({"learning_rate": 1e-3}, {}, "logprobs", "learning_rate: 0.01 and 0.001"),
    "clipping of gradients": ({"max_grad_norm": 0.01}, {}, "logprobs", "max_grad_norm: 1.0 and 0.01"),
}
UPDATED = ("learning rate", "clipping of gradients")


def record(folder, parts=None, kind="tokens", **changes):
    trained = runs.trainer(folder, parts={"reward_funcs": digits, **(parts or {})}, record=kind, **changes)
    trained.train()
    return str(folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return record(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    return record(tmp_path_factory.mktemp("conversations"), CHAT)


@pytest.mark.slow
@pytest.mark.parametrize("cause", PLANTED)
def test_the_planted_cause_is_named(cause, base, conversations, tmp_path, capsys):
    changes, parts, column, named = PLANTED[cause]
    first = conversations if "processing_class" in parts else base
    second = record(tmp_path, parts, **changes)
    capsys.readouterr()
    assert main(["diff", first, second]) == 1
    found = capsys.readouterr().out.splitlines()
    assert found[0].startswith(f"First difference: {column} at step {1 + (cause in UPDATED)}"), found
    begin = next(number for number, line in enumerate(found) if line == "What differs and acts there:")
    assert found[begin + 1].strip() == named, found


IN_TEXT = {  # without tokens: what is seen first, and when
    "seed": ("row", 1),
    "temperature": ("completion", 1),
    "length": ("completion", 1),
    "reward": ("reward/digits", 1),
    "learning rate": ("completion", 2),
}


@pytest.fixture(scope="module")
def in_text(tmp_path_factory):
    return record(tmp_path_factory.mktemp("text"), kind="rollouts")


@pytest.mark.parametrize("cause", IN_TEXT)
def test_without_tokens_the_first_difference_is_of_texts(cause, in_text, tmp_path, capsys):
    """Completions that differ are no "same completion" with another reward; what explains them stands first."""
    changes, parts, _, named = PLANTED[cause]
    (column, step), second = IN_TEXT[cause], record(tmp_path, parts, kind="rollouts", **changes)
    capsys.readouterr()
    assert main(["diff", in_text, second]) == 1
    found = capsys.readouterr().out.splitlines()
    assert found[0].startswith(f"First difference: {column} at step {step}"), found
    assert found[found.index("What differs and acts there:") + 1].strip() == named, found


@pytest.mark.slow
def test_a_run_with_tokens_is_compared_with_one_without(base, in_text, tmp_path, capsys):
    capsys.readouterr()
    assert main(["diff", base, in_text]) == 0, "they differ in the record alone"
    assert capsys.readouterr().out.splitlines()[1].startswith(f"{in_text} has no tokens")
    other = record(tmp_path, kind="rollouts", temperature=0.5)
    capsys.readouterr()
    assert main(["diff", base, other]) == 1
    found = capsys.readouterr().out.splitlines()
    assert found[0].startswith("First difference: completion at step 1") and other in found[1], found


def test_runs_that_are_equal_have_no_difference(base, tmp_path, capsys):
    second = record(tmp_path)
    capsys.readouterr()
    assert main(["diff", base, second]) == 0
    assert capsys.readouterr().out == "No difference: the runs recorded the same rollout batches.\n"


def test_another_version_of_a_library_is_named(base, tmp_path, capsys):
    second = record(tmp_path, {"model": tiny.model(seed=1)})
    path = tmp_path / "record" / "run.json"
    described = json.loads(path.read_text())
    described["versions"]["torch"] = "1.0\x1b[2J"
    path.write_text(json.dumps(described))
    capsys.readouterr()
    assert main(["diff", base, second]) == 1
    printed = capsys.readouterr().out
    assert "  version of torch: " in printed and "1.0\\x1b[2J" in printed and "\x1b" not in printed


def test_a_folder_without_a_record_is_an_error(base, tmp_path, capsys):
    assert main(["diff", base, str(tmp_path)]) == 2
    assert 'trained with record="tokens"' in capsys.readouterr().err
