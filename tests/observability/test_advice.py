"""A run that cannot learn says so once, and every run logs its ends."""

import re
import warnings
from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState

from covey.core.findings import CheckWarning
from covey.observability.diagnostics import Advice, Course, LogEnds
from covey.observability.diagnostics import advice as findings_of

ARGS = SimpleNamespace(
    output_dir="out",
    mask_truncated_completions=True,
    max_completion_length=8,
    max_turn_length=None,
    logging_strategy="steps",
)


def advice(history, args, ended=False):
    return {finding.code: finding.sentence for finding in findings_of(history, args, ended)}


def logs(count, **changes):
    log = {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "frac_advantage_zero": 1.0}
    return [{"step": step, **log, "completions/clipped_ratio": 0.5, **changes} for step in range(1, count + 1)]


def test_equal_rewards_are_reported_with_value_and_advice():
    text = advice(logs(5), ARGS)["signal-sparse"]
    assert "5 logs (steps 1 to 5)" in text and "every reward was 0." in text and "covey view out" in text


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


@pytest.mark.parametrize(("longest", "named"), [(6.0, "max_turn_length=3"), (8.0, "max_completion_length=8")])
def test_the_limit_of_turns_is_named_where_completions_had_room(longest, named):
    cut = {"completions/clipped_ratio": 1.0, "frac_advantage_zero": 0.0, "completions/max_length": longest}
    said = advice(logs(5, **cut), SimpleNamespace(**vars(ARGS) | {"max_turn_length": 3}))["completions-cut"]
    assert f"cut off at {named}," in said and f"Raise {named.partition('=')[0]}," in said


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


def test_the_callback_warns_once_whatever_logging_steps_is():
    """It looks at the metrics of each step, and nothing is logged here."""
    entries = iter(logs(6))
    state, callback = TrainerState(is_world_process_zero=True), Advice(lambda: next(entries))

    def step():
        state.global_step += 1
        callback.on_step_end(ARGS, state, TrainerControl())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            step()
    with pytest.warns(CheckWarning) as caught:
        step()
    assert [warning.message.finding.code for warning in caught] == ["signal-sparse"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
        callback.on_train_end(ARGS, state, TrainerControl())


@pytest.mark.slow
def test_a_course_does_not_grow_with_the_run():
    """What is kept after ten thousand steps is what is kept after two hundred."""
    long, short = Course(), Course()
    for number, log in enumerate(logs(10_000, grad_norm=0.5)):
        long.add(log, ARGS)
        if number < 200:
            short.add(log, ARGS)
    assert size(long) == size(short) and long.count == 10_000
    (said,) = long.findings(ARGS)
    assert said.code == "signal-sparse" and "10000 logs (steps 1 to 10000)" in said.evidence


def size(course):
    """Number of logs and numbers that a course holds."""
    held = [course.begin, course.end, course.norms, *(streak.logs for streak in course.streaks.values())]
    return sum(map(len, held))


def codes(history):
    return set(advice(history, ARGS))


def course(*parts, **constant):
    """Logs of a course: of each part a number of steps and what differs in it."""
    learns = {"reward": 0.5, "reward_std": 0.2, "frac_reward_zero_std": 0.0, "frac_advantage_zero": 0.0}
    entries = [{**learns, **constant, **changes} for count, changes in parts for _ in range(count)]
    return [{"step": step, **entry} for step, entry in enumerate(entries, 1)]


COMMON, RIGHT = "completions/most_common", "completions/most_common_reference"


def test_one_answer_to_all_prompts_is_told():
    """At the end 9 of 10 completions say the same, and half of the rows have that right answer."""
    before, after = {COMMON: 0.3}, {COMMON: 0.9}
    assert codes(course((3, before), (5, after), **{RIGHT: 0.5})) == {"collapse"}
    assert codes(course((3, before), (5, after))) == {"collapse"}, "without right answers and without a gain"
    assert codes(course((3, {**before, "reward": 0.1}), (5, after))) == set(), "it may be what is asked for"


def test_few_right_answers_are_no_collapse():
    """Where 4 of 5 rows have the same right answer, that is what all say who are right."""
    before, after = {COMMON: 0.3}, {COMMON: 0.85}
    assert codes(course((3, before), (5, after), **{RIGHT: 0.8})) == set()
    assert codes(course((8, after), **{RIGHT: 0.1})) == set(), "as it was from the beginning"


def test_entropy_that_vanishes_without_a_gain_is_told():
    high, low = {"entropy": 2.0}, {"entropy": 0.1}
    assert codes(course((3, high), (5, {**low, "reward": 0.4}))) == {"learning-rate-high"}
    assert codes(course((3, high), (5, {**low, "reward": 0.9}))) == set(), "the reward has risen"
    assert codes(course((8, low))) == set(), "it was low from the beginning"


def test_a_gradient_that_explodes_is_told():
    assert codes(course((6, {"grad_norm": 0.5}), (3, {"grad_norm": 41.0}))) == {"learning-rate-high"}
    assert codes(course((6, {"grad_norm": 0.5}), (3, {"grad_norm": 4.0}))) == set()
    assert codes(course((6, {"grad_norm": 0.0}), (3, {"grad_norm": 4.0}))) == set(), "none was there before"


def test_a_reward_that_is_length_is_told():
    assert codes(course((8, {}), reward_length_correlation=0.995)) == {"reward-length"}
    assert codes(course((8, {}), reward_length_correlation=0.9)) == set()
    assert codes(course((4, {}), (4, {"reward_length_correlation": -0.99}), reward_length_correlation=0.99)) == set()


def test_a_reward_that_dies_is_told_as_such():
    dead = {"reward": 0.0, "reward_std": 0.0, "frac_reward_zero_std": 1.0, "frac_advantage_zero": 1.0}
    assert codes(course((4, {}), (5, dead))) == {"reward-lost"}
    assert codes(course((9, dead))) == {"signal-sparse"}, "it was never there"
    assert codes(course((4, {}), (5, {**dead, "reward": 1.0}))) == {"signal-sparse"}, "all is right"


def test_no_reward_is_not_called_the_same_reward():
    none = [{name: value for name, value in log.items() if name != "reward"} for log in logs(5)]
    with_reward, without = (advice(history, ARGS)["signal-sparse"] for history in (logs(5), none))
    assert with_reward != without and "None" in without


def logged(step, max_steps=20, stop=False, strategy="steps"):
    control = TrainerControl(should_training_stop=stop)
    args = SimpleNamespace(logging_strategy=strategy)
    LogEnds().on_step_end(args, TrainerState(global_step=step, max_steps=max_steps), control)
    return control.should_log


def test_the_first_and_the_last_step_are_logged():
    assert [step for step in range(1, 21) if logged(step)] == [1, 20]
    assert logged(7, stop=True)
    assert not logged(1, strategy="no")


TOOLS = SimpleNamespace(**vars(ARGS), tool_parser=None, tool_timeout=60.0, max_tool_calling_iterations=4)
LEARNS = {"frac_advantage_zero": 0.0, "tools/call_frequency": 2.0}


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("tools-unused", {"tools/call_frequency": 0.0}, "no rollout called a tool, .*now chosen by the chat template"),
        ("tools-malformed", {"tools/failures/malformed": 0.6}, "could not be read .*covey view out"),
        ("tools-failing", {"tools/failures/exception": 0.6}, "raised an exception"),
        (
            "tools-failing",
            {"tools/failures/timeout": 0.4, "tools/failures/exception": 0.2},
            "took longer than tool_timeout=60 s",
        ),
        ("tools-failing", {"tools/failures/wrong_argument": 0.6}, "unknown or of another type .*rename the tool's"),
        ("tools-failing", {"tools/failures/unknown_tool": 0.6}, "named a tool that does not exist"),
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


def test_a_teacher_that_disagrees_about_everything_is_reported():
    """Also where there are no rewards, whose metrics are then absent."""
    history = [{"step": step, "teacher/kl": 4.0, "completions/clipped_ratio": 0.5} for step in range(1, 6)]
    assert "4.0 nats" in advice(history, ARGS)["teacher-disagrees"]
    assert advice([{**log, "teacher/kl": 1.0} for log in history], ARGS) == {}
