"""Naming reward functions in text."""

import pytest

from covey.rewards import resolve_reward, think_format_reward
from covey.rewards.resolve import BUILT_IN

FACTORIES = ["LLMJudge", *(name for name in BUILT_IN if name.startswith("get_"))]


@pytest.fixture
def my_rewards(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_module.py").write_text(
        "def shortest(completions):\n    return [-len(text) for text in completions]\n"
        "def get_scaled(factor):\n    return lambda completions: [factor] * len(completions)\n"
        "constant = 3\n"
    )
    (tmp_path / "needs_something.py").write_text("import something_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_built_in_name_resolves():
    assert all(callable(resolve_reward(name)) for name in BUILT_IN if name not in FACTORIES)
    assert resolve_reward("think_format_reward") is think_format_reward


@pytest.mark.parametrize("form", ["my_rewards_module:shortest", "my_rewards_module.shortest"])
def test_modules_of_the_working_directory(my_rewards, form):
    assert resolve_reward(form)(["ab"]) == [-2]


def test_files_are_loaded_once(my_rewards):
    by_file = resolve_reward(f"{my_rewards}/my_rewards_module.py:shortest")
    assert by_file(["ab"]) == [-2]
    assert resolve_reward(f"{my_rewards}/my_rewards_module.py:shortest") is by_file


def test_factories_are_called_with_literals(my_rewards):
    assert resolve_reward("my_rewards_module:get_scaled(factor=2.5)")(["ab"]) == [2.5]
    assert resolve_reward("get_soft_overlong_punishment(100, soft_punish_cache=20)").args == (100, 20)


@pytest.mark.parametrize("text", ["org/model", "./folder/model", "gpt2", "Qwen2.5-0.5B-RM"])
def test_anything_else_is_a_model(text):
    assert resolve_reward(text) == text


def test_a_folder_like_an_import_path_is_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.model").mkdir()
    assert resolve_reward("reward.model") == "reward.model"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("acuracy_reward", "did you mean 'accuracy_reward'"),
        ("no_such_module_x:reward", "there is no module 'no_such_module_x'"),
        ("no_such_module_x.reward", "there is no module 'no_such_module_x'"),
        ("my_rewards_module:longest", "'longest' does not exist. There: get_scaled, shortest"),
        ("my_rewards_module:constant", "'constant' is not callable"),
        ("nowhere.py:reward", "nowhere.py' does not exist"),
        ("my_rewards_module:get_scaled(factor=x)", "arguments must be literals"),
        ("my_rewards_module:get_scaled(other=1)", "unexpected keyword argument 'other'"),
    ],
)
def test_mistakes_are_explained(my_rewards, text, message):
    with pytest.raises(ValueError, match=message):
        resolve_reward(text)


def test_a_broken_import_inside_the_module_is_not_hidden(my_rewards):
    with pytest.raises(ImportError, match=r"needs_something.*something_that_is_not_there"):
        resolve_reward("needs_something:reward")


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_must_be_called(name):
    with pytest.raises(ValueError, match=f"'{name}' is a factory.*as in '{name}\\("):
        resolve_reward(name)
