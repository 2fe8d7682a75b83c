"""How functions are named, called and believed, and what a failure costs."""

import asyncio
import functools
import math
import re

import numpy as np
import pytest
import torch

from covey.core.findings import CheckError
from covey.rewards import RewardError, RewardSuite, RewardWarning


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no words")


def constant(value):
    def reward(completions):
        return [value] * len(completions)

    return reward


# --- arguments -------------------------------------------------------------------------------------------------------


def test_functions_receive_what_they_name_or_all_with_kwargs(context, rollout):
    seen = {}

    def everything(**kwargs):
        seen.update(kwargs)
        return [0.0, 0.0]

    def little(completions, answer, unasked="default"):
        assert unasked == "default"
        return [float(text == a) for text, a in zip(completions, answer, strict=True)]

    rows = [{"prompt": "p", "answer": "a", "completion": "x", "completion_ids": [9]}, {"prompt": "q", "answer": "b"}]
    rewards = RewardSuite([everything, little])(rows, [rollout("a", turns=3), rollout("a")], context).rewards
    assert rewards.tolist() == [[0.0, 1.0], [0.0, 0.0]]
    assert set(seen) == {
        *("prompts", "completions", "completion_ids", "completions_ids", "thinking_openings"),
        *("trainer_state", "log_extra", "log_metric"),
        *("answer", "turns"),
    }
    assert seen["prompts"] == ["p", "q"] and seen["completion_ids"] == [[1, 2], [1, 2]]
    assert seen["turns"] == [3, None]  # an extra that only the first rollout has


def test_an_extra_of_a_rollout_replaces_the_column_of_its_name(context, rollout):
    def reward(state):
        return [float(value) for value in state]

    rows = [{"prompt": "p", "state": 1}]
    assert RewardSuite(reward)(rows, [rollout("a", state=2)], context).rewards.tolist() == [[2.0]]


def test_one_function_cannot_disturb_the_next(score):
    def vandal(completions, **kwargs):
        count = len(completions)
        completions.clear()
        return [0.0] * count

    assert score(RewardSuite([vandal, constant(1.0)]), ["a", "b"])[0] == [[0.0, 1.0], [0.0, 1.0]]


def spoil(value):
    """Change everything that can be changed, all the way down."""
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        spoil(one)
    if isinstance(value, dict | list):
        value.clear()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_changed_arguments_reach_no_other_function(context, rollout, asynchronous):
    def vandal(**kwargs):
        count = len(kwargs["completions"])
        spoil({name: value for name, value in kwargs.items() if isinstance(value, list)})
        return [0.0] * count

    async def async_vandal(**kwargs):
        return vandal(**kwargs)

    def told(**kwargs):
        seen.append({name: value for name, value in kwargs.items() if isinstance(value, list)})
        return [1.0, 1.0]

    def sample():
        said = [{"role": "assistant", "content": "4", "tool_calls": [{"function": {"arguments": {"a": [1]}}}]}]
        return {"prompt": [{"role": "user", "content": "?"}], "tests": [["x"], {"y": [2]}]}, rollout(
            said, (1, 2), k=[3]
        )

    seen = []
    rows, rollouts = zip(*[sample(), sample()], strict=True)
    hostile = async_vandal if asynchronous else vandal
    RewardSuite([hostile, told])(list(rows), list(rollouts), context)
    RewardSuite([told])(list(rows), list(rollouts), context)
    assert seen[0] == seen[1] and seen[0]["tests"] == [[["x"], {"y": [2]}]] * 2
    assert (list(rows), list(rollouts)) == tuple(map(list, zip(*[sample(), sample()], strict=True)))


def test_objects_that_are_no_plain_data_are_given_as_they_are(context, rollout):
    class World:
        pass

    world = World()

    def reward(worlds, **kwargs):
        assert worlds == [world]
        return [1.0]

    assert RewardSuite(reward)([{"prompt": "p"}], [rollout("a", worlds=world)], context).rewards.tolist() == [[1.0]]


def test_keywords_of_a_partial_stay_bound(score):
    def scaled(completions, factor):
        return [factor * len(text) for text in completions]

    suite = RewardSuite(functools.partial(scaled, factor=3))
    assert suite.names == ["scaled"]
    assert score(suite, ["ab"], factor=[100])[0] == [[6.0]]


def test_a_missing_column_is_named_with_what_there_is(score):
    def wants(completions, ground_truth):
        return [0.0]

    with pytest.raises(RewardError, match=r"'wants' asks for 'ground_truth'.*Available: answer, completion_ids"):
        score(RewardSuite(wants), ["a"], answer=["a"])


def test_a_column_named_like_an_argument_is_refused(score):
    with pytest.raises(RewardError, match="column 'log_metric' has the name of an argument"):
        score(RewardSuite(constant(0)), ["a"], log_metric=["a"])


def test_positional_only_arguments_are_refused_at_once():
    def positional(completions, /):
        return []

    with pytest.raises(RewardError, match="takes 'completions' by position only"):
        RewardSuite(positional)


# --- names and weights -----------------------------------------------------------------------------------------------


def test_names_are_unique():
    def reward_1(completions):
        return []

    suite = RewardSuite(
        [constant(0), reward_1, constant(1), constant(2), lambda completions: [], functools.partial(reward_1)]
    )
    assert suite.names == ["reward", "reward_1", "reward_2", "reward_3", "lambda", "reward_1_1"]


def test_names_and_errors_cannot_steer_a_terminal(score):
    def escapes(completions):
        raise RewardError("\x1b[2J")

    escapes.__name__ = "\x1b[31mred"
    with pytest.raises(RewardError, match=r"'.*x1b\[31mred' failed on all 1 samples: \\x1b\[2J") as error:
        score(RewardSuite(escapes), ["a"])
    assert "\x1b" not in str(error.value)


def test_weights_default_to_one_and_are_checked():
    assert RewardSuite([constant(0), constant(1)]).weights.tolist() == [1.0, 1.0]
    assert RewardSuite([constant(0)], weights=[0.25]).weights.tolist() == [0.25]
    with pytest.raises(CheckError, match="3 reward weights for 2 reward functions") as error:
        RewardSuite([constant(0), constant(1)], weights=[1, 2, 3])
    assert error.value.codes == ["reward-weights"]
    with pytest.raises(CheckError, match="nan") as error:
        RewardSuite(constant(0), weights=[math.nan])
    assert error.value.codes == ["reward-weights"]


@pytest.mark.parametrize(
    ("arguments", "code", "value"),
    [
        ({"reward_funcs": []}, "reward-missing", "reward_funcs"),
        ({"reward_funcs": 3}, "reward-type", r"3 \(int\)"),
        ({"reward_funcs": type("Mine", (), {"__call__": len})}, "reward-type", r"Mine\(\)"),
        ({"reward_funcs": "accuracy_reward"}, "reward-type", "`covey.rewards.accuracy_reward`"),
        ({"reward_funcs": len, "timeout": 0}, "setting-range", "timeout=0"),
        ({"reward_funcs": len, "batch_size": 0}, "setting-range", "batch_size=0"),
        (
            {"reward_funcs": [len, len], "processing_classes": [None]},
            "reward-model",
            "1 reward processing classes for 2",
        ),
    ],
)
def test_bad_arguments_are_explained(arguments, code, value):
    with pytest.raises(CheckError, match=value) as error:
        RewardSuite(**arguments)
    assert error.value.codes == [code]


def test_everything_that_is_wrong_is_named_at_once():
    with pytest.raises(CheckError) as error:
        RewardSuite([len, 3, "text"], weights=[1.0], processing_classes=[None], timeout=0)
    assert error.value.codes == ["setting-range", "reward-weights", "reward-model", "reward-type"]


# --- what may be returned --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "returned",
    [
        [1, 0.5, None],
        (True, 0.5, None),
        [np.float32(1), np.float64(0.5), None],
        [torch.tensor(1), torch.tensor([0.5]), None],
    ],
)
def test_lists_of_any_scalars_are_accepted_and_none_abstains(score, returned):
    suite = RewardSuite([lambda completions: returned, constant(0.0)])
    assert [row[0] for row in score(suite, ["a", "b", "c"])[0]] == [1.0, 0.5, None]


@pytest.mark.parametrize(
    "returned",
    [
        np.array([1, 0]),
        np.array([True, False]),
        torch.tensor([1.0, 0.0], dtype=torch.bfloat16),
        torch.tensor([1.0, 0.0], requires_grad=True),
    ],
)
def test_arrays_and_tensors_are_accepted(score, returned):
    assert score(RewardSuite(lambda completions: returned), ["a", "b"])[0] == [[1.0], [0.0]]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, r"returned None \(NoneType\); expected a list of 2 numbers.*Is there a `return`\?"),
        ("12", r"returned '12' \(str\)"),
        (1.0, r"returned 1.0 \(float\)"),
        ({"a": 1, "b": 2}, r"\(dict\)"),
        ([1.0], "returned 1 rewards for 2 completions"),
        ([1.0, 2.0, 3.0], "returned 3 rewards for 2 completions"),
        ([[1.0], [2.0]], r"returned \[1.0\] \(list\) for a completion"),
        (["1", "2"], r"returned '1' \(str\) for a completion"),
        (torch.ones(2, 1), r"Its shape is \(2, 1\); flatten it to \(2,\)"),
        ([math.nan, math.nan], "returned NaN; None is how to abstain"),
    ],
)
def test_anything_else_names_the_function_and_shows_a_sample(score, returned, message):
    def broken(completions):
        return returned

    with pytest.raises(RewardError, match=f"(?s)reward function 'broken' .*{message}") as error:
        score(RewardSuite(broken), ["first answer", "second answer"], ["first question", "second question"])
    assert "prompt:     'first question'\n  completion: 'first answer'" in str(error.value)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("2", r"returned '2' \(str\) for a completion; expected a list of 3 numbers"),
        (math.inf, r"returned inf \(float\).*Give finite numbers"),
        (1e39, r"returned 1e\+39 \(float\)"),
        (10**400, "Give finite numbers"),
        (1j, r"returned 1j \(complex\)"),
        (Unprintable(), r"cannot be printed: RuntimeError: no words"),
    ],
)
def test_what_is_no_reward_costs_its_own_sample(score, bad, message):
    def broken(completions):
        return [1.0, bad, 2.0]

    with pytest.warns(RewardWarning, match=f"(?s)'broken' failed on 1 of 3 samples.*{message}.*second answer"):
        matrix, stats = score(RewardSuite(broken), ["first answer", "second answer", "third answer"])
    assert matrix == [[1.0], [None], [2.0]]
    assert stats["rewards/broken/failures"] == 1


def test_a_batch_without_distinct_samples_is_not_retried_singly(score):
    """A function that returns one number whatever it is given would seem to work."""
    calls = []

    def broken(completions):
        calls.append(len(completions))
        return [1.0, 2.0] if len(calls) == 1 else [1.0]

    suite = RewardSuite(broken)
    score(suite, ["a", "b"])
    with pytest.warns(RewardWarning, match="failed on 2 of 2 samples"):
        assert score(suite, ["a", "b"])[0] == score(suite, ["a", "b"])[0] == [[None], [None]]
    with pytest.raises(RewardError, match="failed on all 2 samples, 3 batches in a row: it returned 1 rewards for 2"):
        score(suite, ["a", "b"])
    assert calls == [2, 2, 2, 2]


def test_an_undeclared_coroutine_is_recognised(score):
    class Future:
        def __await__(self):
            yield

    with pytest.raises(RewardError, match="It is awaitable: declare the function with `async def`"):
        score(RewardSuite(lambda completions: Future()), ["a"])


# --- failures --------------------------------------------------------------------------------------------------------


def parses(completions, **kwargs):
    """Raises for the whole batch if a single completion is no number."""
    return [float(text) for text in completions]


async def parses_async(completions, **kwargs):
    return parses(completions)


@pytest.mark.parametrize("function", [parses, parses_async])
def test_a_raising_sample_costs_only_itself(score, function):
    suite = RewardSuite(function)
    name = function.__name__
    with pytest.warns(RewardWarning) as caught:
        rewards, stats = score(suite, ["1", "two", "3"], ["q1", "q2", "q3"])
    assert rewards == [[1.0], [None], [3.0]]
    assert stats[f"rewards/{name}/failures"] == 1 and stats[f"rewards/{name}/timeouts"] == 0
    message = str(caught[0].message)
    assert f"'{name}' failed on 1 of 3 samples" in message and "could not convert string to float: 'two'" in message
    assert "'q2'" in message and f"rewards/{name}/failures" in message


class Unprintable(Exception):
    def __str__(self):
        raise SystemExit(0)


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), asyncio.CancelledError(), Unprintable()])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_whatever_a_function_raises_costs_its_sample_alone(score, error, asynchronous):
    """Code of a completion may well call `exit()`."""

    def raises(completions):
        if "bad" in completions:
            raise error
        return [1.0] * len(completions)

    async def raises_async(completions):
        return raises(completions)

    suite = RewardSuite([raises_async if asynchronous else raises, constant(2.0)])
    with pytest.warns(RewardWarning, match=type(error).__name__):
        assert score(suite, ["good", "bad"])[0] == [[1.0, 2.0], [None, 2.0]]
    assert score(suite, ["good"])[0] == [[1.0, 2.0]]


def test_ctrl_c_is_no_failure(score):
    def interrupted(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(RewardSuite(interrupted), ["a"])


def test_a_task_that_exits_does_not_stop_others(score):
    async def exits():
        raise SystemExit(0)

    async def reward(completions):
        task = asyncio.get_running_loop().create_task(exits())
        await asyncio.sleep(0.05)
        assert isinstance(task.exception(), SystemExit)
        return [1.0]

    assert score(RewardSuite([reward, reward]), ["a"])[0] == [[1.0, 1.0]]


def test_failures_are_warned_about_once_but_always_counted(score, recwarn):
    suite = RewardSuite([parses, constant(0.0)])
    for _ in range(3):
        assert score(suite, ["1", "two"])[1]["rewards/parses/failures"] == 1
    assert sum("failed on" in str(warning.message) for warning in recwarn) == 1


@pytest.mark.parametrize("function", [parses, parses_async])
def test_failing_on_every_sample_from_the_start_stops_the_run(score, function):
    with pytest.raises(RewardError, match=f"'{function.__name__}' failed on all 2 samples: ValueError") as error:
        score(RewardSuite(function), ["one", "two"])
    assert isinstance(error.value.__cause__, ValueError) and "completion: 'one'" in str(error.value)


@pytest.mark.filterwarnings("ignore::covey.rewards.RewardWarning")
def test_a_function_that_worked_may_fail_on_two_batches(score):
    suite = RewardSuite(parses)
    score(suite, ["1"])
    for _ in range(2):
        assert score(suite, ["one", "two"])[0] == [[None], [None]]
    score(suite, ["1"])  # recovers, and the count starts again
    for _ in range(2):
        score(suite, ["one"])
    with pytest.raises(RewardError, match="failed on all 1 samples, 3 batches in a row"):
        score(suite, ["one"])


def test_returned_nan_counts_as_a_failure(score):
    with pytest.warns(RewardWarning, match=r"returned NaN; None is how to abstain"):
        rewards, stats = score(RewardSuite([lambda completions: [math.nan, 1.0], constant(0.0)]), ["a", "b"])
    assert rewards == [[None, 0.0], [1.0, 0.0]] and stats["rewards/lambda/failures"] == 1


def test_a_function_of_whole_groups_reports_its_own_error(score):
    def relative(completions):
        if len(completions) == 1:
            return []  # a contract broken only because the sample is alone
        raise KeyError("original")

    with pytest.raises(RewardError, match="KeyError: 'original'"):
        score(RewardSuite(relative), ["a", "b"])


def test_rows_that_nothing_scores_are_allowed_and_shown_once(score):
    suite = RewardSuite([constant(None)])
    with pytest.warns(RewardWarning, match="no reward function scored 2 of 2 samples.*columns prompt, task"):
        assert score(suite, ["a", "b"], task=["x", "y"])[0] == [[None], [None]]


def test_no_samples_give_an_empty_matrix_and_the_same_statistics(context):
    suite = RewardSuite([constant(1.0)])
    result = suite([], [], context)
    assert result.rewards.shape == (0, 1)
    assert set(result.stats) == {f"rewards/reward/{kind}" for kind in ("failures", "timeouts", "seconds")}


# --- logging ---------------------------------------------------------------------------------------------------------


def test_what_functions_log_reaches_the_trainer(score, context):
    def logs(completions, log_extra, log_metric):
        log_extra("length", [len(text) for text in completions])
        log_metric("longest", max(map(len, completions)))
        return [0.0] * len(completions)

    score(RewardSuite(logs), ["a", "bcd"])
    assert context.extras == {"length": [1, 3]} and context.metrics == [("longest", 3.0)]


def test_what_is_logged_is_plain_data(score, context):
    class Broken:
        def __str__(self):
            raise ValueError("no words")

    def reward(completions, log_extra, log_metric):
        values = [1, [math], {"a": {2}}, np.float32(0.5)]
        log_extra("kept", values)
        log_metric("3", torch.tensor(2.0))
        values[1].append(1)
        if "bad" in completions:
            log_extra("broken", [Broken()] * len(completions))
        return [1.0] * len(completions)

    score(RewardSuite(reward), ["a", "b", "c", "d"])
    assert context.extras["kept"] == [1, [str(math)], {"a": "{2}"}, 0.5]
    assert context.metrics == [("3", 2.0)]
    with pytest.raises(RewardError, match="no words"):
        score(RewardSuite(reward), ["bad"] * 4)


def test_a_failed_call_logs_nothing_and_retries_are_joined(score, context):
    def logs(completions, log_extra, log_metric):
        log_extra("raw", list(completions))
        values = [float(text) for text in completions]
        log_metric("count", len(values))
        return values

    with pytest.warns(RewardWarning):
        score(RewardSuite(logs), ["1", "two", "3"])
    assert context.extras == {"raw": ["1", None, "3"]} and context.metrics == [("count", 1.0), ("count", 1.0)]


def test_a_logged_column_has_one_value_per_sample(score):
    def logs(completions, log_extra):
        log_extra("raw", [1])
        return [0.0, 0.0]

    with pytest.raises(RewardError, match=r"log_extra\('raw', ...\) was given 1 values for 2 samples"):
        score(RewardSuite(logs), ["a", "b"])


@pytest.mark.parametrize(
    ("log", "given", "says"),
    [
        ("log_extra", "ab", "was given a str: give one value a sample"),
        ("log_extra", None, "was given a NoneType: give one value a sample"),
        ("log_metric", None, "was given None (NoneType): give a number"),
        ("log_metric", "high", "was given 'high' (str): give a number"),
        ("log_metric", 10**400, ": give a number"),
    ],
)
def test_what_cannot_be_logged_is_named(score, log, given, says):
    def logs(completions, log_extra, log_metric):
        {"log_extra": log_extra, "log_metric": log_metric}[log]("kind", given)
        return [1.0] * len(completions)

    with pytest.raises(RewardError, match=rf"{log}\('kind', ...\) .*{re.escape(says)}"):
        score(RewardSuite(logs), ["a", "b"])


def test_two_functions_that_log_one_column_are_told_apart(score, context):
    def first(completions, log_extra):
        log_extra("answer", completions)
        return [0.0] * len(completions)

    def second(completions, log_extra):
        log_extra("answer", [text.upper() for text in completions])
        return [0.0] * len(completions)

    with pytest.warns(RewardWarning, match="'first' and 'second' both log a column 'answer'"):
        score(RewardSuite([first, second]), ["a", "b"])
    assert context.extras == {"answer": ["A", "B"]}


SMALL = [1e6, 1e6 + 0.01, 1e6 + 0.02]  # of which float32 makes one number


@pytest.mark.parametrize("kind", [list, np.array, lambda values: torch.tensor(values, dtype=torch.float64)])
def test_rewards_keep_the_precision_that_the_function_gave(kind, context, rollout):
    suite = RewardSuite([lambda completions: kind(SMALL), constant(np.float64(1e6 + 0.01))], weights=[0.1, 1])
    rewards = suite([{"prompt": "p"}] * 3, [rollout("a")] * 3, context).rewards
    assert rewards.tolist() == [[small, 1e6 + 0.01] for small in SMALL]
    assert suite.weights.tolist() == [0.1, 1.0]


def test_rewards_of_steps_keep_the_precision_that_the_function_gave(context, rollout):
    suite = RewardSuite(lambda completions: [[(0, SMALL[1]), (1, SMALL[2])]])
    result = suite([{"prompt": "p"}], [rollout("a")], context)
    assert result.steps == [{0: [(0, SMALL[1]), (1, SMALL[2])]}]
    assert result.rewards.tolist() == [[SMALL[1] + SMALL[2]]]


def test_a_column_with_the_name_of_a_methods_object_is_refused(context, rollout):
    class Reward:
        def __call__(self, completions, **columns):
            return [0.0] * len(completions)

        def method(this, completions, **columns):
            return [0.0] * len(completions)

    for function, column in ((Reward(), "self"), (Reward().method, "this")):
        (found,) = RewardSuite(function).check_columns({"prompt", column})
        assert found.code == "data-columns"
        assert repr(column) in found.evidence
    assert not [*RewardSuite(lambda **columns: [0.0]).check_columns({"prompt", "self"})]


def test_an_object_that_answers_for_every_attribute_runs_as_a_function(context, rollout):
    class Stub:
        def __getattr__(self, name):
            return Stub()

        def __call__(self, completions, **columns):
            return [1.0] * len(completions)

    suite = RewardSuite(Stub())
    assert suite.names == ["Stub"] and suite([{"prompt": "p"}], [rollout("a")], context).rewards.tolist() == [[1.0]]
