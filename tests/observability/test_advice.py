"""A run that cannot learn says so once, and every run logs its ends."""

import re
import warnings
from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState

from covey.observability.diagnostics import Advice, LogEnds
from covey.observability.diagnostics import advice as findings_of

ARGS = SimpleNamespace(
    output_dir="out", mask_truncated_completions=True, max_completion_length=8, logging_strategy="steps"
)


def advice(history, args, ended=False):
    return {finding.code: finding.sentence for finding in findings_of(history, args, ended)}


def logs(count, **changes):
    log = {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "frac_advantage_zero": 1.0}
    return [{"step": step, **log, "completions/clipped_ratio": 0.5, **changes} for step in range(1, count + 1)]


def test_equal_rewards_are_reported_with_value_and_advice():
    text = advice(logs(5), ARGS)["signal-sparse"]
    assert "5 logs (steps 1 to 5)" in text and "every reward was 0." in text and "out/completions/" in text


def test_rewards_that_differ_between_prompts_are_not_equal():
    assert "every reward" not in advice(logs(5, reward_std=0.5), ARGS)["signal-sparse"]


def test_one_group_with_a_difference_is_enough_to_say_nothing():
    history = logs(5)
    history[-1]["frac_advantage_zero"] = 0.75
    assert advice(history, ARGS) == {}


def test_advantages_of_0_are_reported_where_rewards_differ():
    assert "rewards differ" in advice(logs(5, frac_reward_zero_std=0.5), ARGS)["signal-sparse"]


def test_masking_everything_is_told():
    cut = logs(5, **{"completions/clipped_ratio": 1.0, "frac_advantage_zero": 0.0})
    assert "max_completion_length=8" in advice(cut, ARGS)["completions-cut"]
    assert advice(cut, SimpleNamespace(mask_truncated_completions=False)) == {}


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("sequence_mask", "half of the sequences .*token_truncate"),
        ("token_mask", "half of the tokens .*Look for the cause"),
    ],
)
def test_dropping_most_of_what_an_engine_sampled_is_told(mode, says):
    dropped = logs(5, **{"frac_advantage_zero": 0.0, "sampling/importance_sampling_ratio/outside": 0.6})
    assert re.search(
        says, advice(dropped, SimpleNamespace(**vars(ARGS), resolved_mismatch_mode=mode))["engine-mismatch"]
    )
    truncated = SimpleNamespace(**vars(ARGS), resolved_mismatch_mode=mode.replace("mask", "truncate"))
    assert advice(dropped, truncated) == {}


def test_a_short_run_is_told_at_its_end():
    assert advice(logs(3), ARGS) == {}
    assert "3 logs" in advice(logs(3), ARGS, ended=True)["signal-sparse"]
    assert advice(logs(1), ARGS, ended=True) == {}


def test_the_callback_warns_once():
    state = TrainerState(is_world_process_zero=True)
    callback = Advice()
    with pytest.warns(UserWarning, match="same reward"):
        for entry in logs(5):
            state.log_history.append(entry)
            callback.on_log(ARGS, state, TrainerControl())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback.on_log(ARGS, state, TrainerControl())
        callback.on_train_end(ARGS, state, TrainerControl())


def logged(step, max_steps=20, stop=False, strategy="steps"):
    control = TrainerControl(should_training_stop=stop)
    args = SimpleNamespace(logging_strategy=strategy)
    LogEnds().on_step_end(args, TrainerState(global_step=step, max_steps=max_steps), control)
    return control.should_log


def test_the_first_and_the_last_step_are_logged():
    assert [step for step in range(1, 21) if logged(step)] == [1, 20]
    assert logged(7, stop=True)
    assert not logged(1, strategy="no")


def test_completions_of_an_earlier_run_are_pointed_out(tmp_path):
    (tmp_path / "completions").mkdir()
    (tmp_path / "completions" / "completions_00001.parquet").touch()
    args = SimpleNamespace(output_dir=str(tmp_path))
    with pytest.warns(UserWarning, match="holds completions of an earlier run"):
        Advice().on_train_begin(args, TrainerState(is_world_process_zero=True), TrainerControl())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a resumed run goes on with its own
        Advice().on_train_begin(args, TrainerState(is_world_process_zero=True, global_step=3), TrainerControl())


TOOLS = SimpleNamespace(**vars(ARGS), tool_parser=None, tool_timeout=60.0, max_tool_calling_iterations=4)
LEARNS = {"frac_advantage_zero": 0.0, "tools/call_frequency": 2.0}


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("tools-unused", {"tools/call_frequency": 0.0}, "no rollout called a tool, .*now chosen by the chat template"),
        ("tools-malformed", {"tools/failures/malformed": 0.6}, "could not be read .*out/completions/"),
        ("tools-failing", {"tools/failures/exception": 0.6}, "raised an exception"),
        (
            "tools-failing",
            {"tools/failures/timeout": 0.4, "tools/failures/exception": 0.2},
            "took longer than tool_timeout=60 s",
        ),
        ("tools-budget", {"rollouts/tool_budget": 0.6}, "max_tool_calling_iterations=4 was used up"),
        (
            "tools-slow",
            {"tools/seconds": 3.0, "rollouts/seconds": 4.0, "phase/generate": 8.0, "phase/train": 2.0},
            "spent 75% of their time waiting for tools",
        ),
    ],
)
def test_what_goes_wrong_with_tools_is_told(name, changes, says):
    found = advice(logs(5, **{**LEARNS, **changes}), TOOLS)
    assert list(found) == [name] and re.search(says, found[name])
    assert advice(logs(4, **{**LEARNS, **changes}), TOOLS) == {}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tools/failures/malformed": 0.5, "rollouts/tool_budget": 0.5},
        # Rollouts wait, but a step is mostly training: nothing would be gained.
        {"tools/seconds": 3.0, "rollouts/seconds": 4.0, "phase/generate": 2.0, "phase/train": 8.0},
    ],
)
def test_tools_that_work_are_not_talked_about(changes):
    assert advice(logs(5, **{**LEARNS, **changes}), TOOLS) == {}
