"""The built-in rewards beyond their documented examples, which are run here too."""

import collections
import doctest
import importlib
import inspect
import json
import math
import pickle
import threading
from pathlib import Path

import pytest

from covey import rewards
from covey.rewards import (
    accuracy,
    accuracy_reward,
    exact_match_reward,
    get_cosine_scaled_reward,
    get_exact_match_reward,
    get_json_reward,
    get_numeric_match_reward,
    get_regex_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    json_reward,
    numeric_match_reward,
    reasoning_accuracy_reward,
    think_format_reward,
)
from covey.rewards.matching import last_number
from covey.rewards.resolve import resolve_reward
from covey.runtime.isolation import WorkerFailed

INTERFACE = json.loads((Path(__file__).parents[1] / "data" / "interface.json").read_text())

MODULES = (
    *("accuracy", "contract", "format", "functions", "length", "matching", "resolve", "steps", "suite"),
    *("text", "runtime.child_process"),
)


def said(*texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


@pytest.mark.parametrize("module", MODULES)
def test_documented_examples_are_true(module):
    found = doctest.testmod(importlib.import_module(f"covey.{module}" if "." in module else f"covey.rewards.{module}"))
    assert found.failed == 0


def test_every_public_name_can_be_imported():
    assert all(getattr(rewards, name) is not None for name in rewards.__all__)
    with pytest.raises(AttributeError, match="no_such_reward"):
        _ = rewards.no_such_reward


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        (get_repetition_penalty_reward(), "repetition_penalty_reward"),
        (get_soft_overlong_punishment(10, 5), "soft_overlong_punishment_reward"),
        (get_cosine_scaled_reward(10), "cosine_scaled_reward"),
        (get_json_reward(["a"]), "json_reward"),
        (get_regex_reward("a", name="has_a"), "has_a"),
        (get_exact_match_reward(), "exact_match_reward"),
        (get_numeric_match_reward(), "numeric_match_reward"),
    ],
)
def test_factories_give_named_rewards_that_can_be_pickled(reward, name):
    assert reward.__name__ == name
    copy = pickle.loads(pickle.dumps(reward))
    assert (copy.__name__, copy.func) == (name, reward.func) and repr(copy.args) == repr(reward.args)


@pytest.mark.parametrize(
    ("factory", "arguments", "message"),
    [
        (get_repetition_penalty_reward, {"max_penalty": 0.5}, "max_penalty=0.5"),
        (get_repetition_penalty_reward, {"ngram_size": 0}, "ngram_size=0"),
        (get_soft_overlong_punishment, {"max_completion_len": 10, "soft_punish_cache": 11}, "soft_punish_cache=11"),
        (get_cosine_scaled_reward, {"max_len": 0}, "max_len=0"),
        (get_json_reward, {"required_keys": "name"}, r"\['name'\]"),
        (get_regex_reward, {"pattern": "("}, "not a regular expression"),
        (get_regex_reward, {"pattern": "a", "match": "match"}, "choose 'search' or 'fullmatch'"),
        (get_numeric_match_reward, {"relative_tolerance": -1}, "relative_tolerance=-1"),
    ],
)
def test_factories_refuse_bad_arguments(factory, arguments, message):
    with pytest.raises(ValueError, match=message):
        factory(**arguments)


# --- mathematics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "solution", "reward"),
    [
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{x+1}", "$1+x$", 1.0),
        (r"The final answer is $4$.", "4", 1.0),
        ("4", "4", 0.0),  # neither boxed nor LaTeX
        ("", "4", 0.0),
        (r"\boxed{5}", "4", 0.0),
        (r"\boxed{4}, or rather \boxed{5", "4", 0.0),  # cut off within the answer
        (r"\boxed{4}, or rather \boxed", "4", 0.0),
        (r"\boxed{5}, or rather \boxed{\left\{4\right.}", "4", 0.0),
        (r"In \boxed{\frac{8}{2}}", "4", 1.0),
        (r"\boxed{4}, for { is no end", "4", 1.0),
        (r"\boxed{5}", "no mathematics here", None),
    ],
)
def test_accuracy_compares_mathematically(answer, solution, reward):
    assert accuracy_reward([answer], [solution]) == accuracy_reward(said(answer), [solution]) == [reward]


def test_accuracy_logs_what_it_read():
    logged = {}
    accuracy_reward([r"\boxed{\frac{1}{2}}"], solution=["0.5"], log_extra=logged.__setitem__)
    assert logged["solution"] == ["0.5"] and logged["answer_parsed"][0].startswith("1/2")
    assert set(logged) == {"solution", "gold_parsed", "answer_parsed"}


@pytest.mark.slow
def test_an_uncheckable_answer_is_nan_and_the_next_is_checked(monkeypatch):
    accuracy_reward([r"\boxed{4}"], ["4"])  # the process is up
    monkeypatch.setattr("covey.rewards.accuracy.CHECK_SECONDS", 4.0)
    from covey.rewards.accuracy import verify_answers

    verdicts = verify_answers([r"\boxed{9^{9^{9^{9}}}}", r"\boxed{4}"], ["4", "4"], seconds=2.0)
    assert math.isnan(verdicts[0].reward) and verdicts[1].reward == 1.0


def test_accuracy_works_off_the_main_thread():
    got = []
    thread = threading.Thread(target=lambda: got.append(accuracy_reward([r"\boxed{4}"], ["4"])))
    thread.start()
    thread.join(30)
    assert got == [[1.0]]


def test_reasoning_accuracy_reads_after_the_first_delimiter():
    texts = [r"\boxed{5}</think>\boxed{4}</think>\boxed{6}", r"a</think>b<sep>\boxed{6}"]
    assert reasoning_accuracy_reward(said(*texts), ["6", "6"]) == [1.0, 1.0]
    # "<sep>" is not in the first text, so "</think>" is used there
    assert reasoning_accuracy_reward(texts, ["6", "6"], reasoning_delimiters=["<sep>", "</think>"]) == [1.0, 1.0]
    assert reasoning_accuracy_reward([r"<think>\boxed{6}"], ["6"]) == [0.0]


def test_cosine_reward_orders_short_and_long_right_and_wrong():
    reward = get_cosine_scaled_reward(max_len=100)
    texts = [r"\boxed{4}"] * 6
    ids = [[0] * length for length in (0, 50, 100, 200, 0, 100)]
    values = reward(said(*texts), completion_ids=ids, solution=["4"] * 4 + ["5"] * 2)
    # right: 0.5 + 0.5 * (1 + cos) / 2 from 1 to 0.5; wrong: -1 at length 0, -0.5 at the limit
    assert values == pytest.approx([1.0, 0.75, 0.5, 0.5, -1.0, -0.5])
    assert reward(["4"], completion_ids=[[1]], solution=["words"]) == [None]


@pytest.mark.parametrize("named", INTERFACE["reward parameters"])
def test_rewards_take_trls_parameters_in_its_order(named):
    reward = resolve_reward(named)
    wanted = INTERFACE["reward parameters"][named]
    parameters = list(inspect.signature(reward).parameters.values())
    assert [p.name for p in parameters if p.kind is not p.VAR_KEYWORD] == wanted
    assert parameters[-1].kind is inspect.Parameter.VAR_KEYWORD  # the dataset's other columns


def test_the_cosine_reward_can_be_called_by_position():
    # halfway: 0.5 + 0.5 / 2; a wrong answer at the limit: -0.5
    reward = get_cosine_scaled_reward(100)
    assert reward([r"\boxed{4}"] * 2, ["4", "5"], [[0] * 50, [0] * 100]) == pytest.approx([0.75, -0.5])


# --- form ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a\nb</think>c\nd", 1.0),
        ("<think></think>", 1.0),
        (" <think>a</think>b", 0.0),
        ("<think>a<think>b</think>c", 0.0),
        ("<think>a", 0.0),
        ("a</think>b", 0.0),
    ],
)
def test_think_format(text, reward):
    assert think_format_reward([text]) == think_format_reward(said(text)) == [reward]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ('{"a": 1}', 1.0),
        (" [1, 2]\n", 1.0),
        ('```json\n{"a": 1}\n```', 1.0),
        ('```\n{"a": 1}\n```', 1.0),
        ('{"a": NaN}', 0.0),
        ("{'a': 1}", 0.0),
        ('{"a": 1} done', 0.0),
        ("1", 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_json(text, reward):
    assert json_reward([text]) == json_reward(said(text)) == [reward]


def test_json_conditions():
    texts = ['{"a": 1, "b": 2}', '{"a": 1}', '["a", "b"]', '```\n{"a": 1, "b": 2}\n```']
    assert get_json_reward(["a", "b"])(texts) == [1.0, 0.0, 0.0, 1.0]
    assert get_json_reward(allow_fence=False)(texts) == [1.0, 1.0, 1.0, 0.0]


def test_regex_searches_or_matches_the_whole():
    texts = ["abc", "b"]
    assert get_regex_reward("b")(said(*texts)) == [1.0, 1.0]
    assert get_regex_reward("b", match="fullmatch")(texts) == [0.0, 1.0]


# --- length and repetition -------------------------------------------------------------------------------------------


def test_soft_overlong_punishment_without_a_cache_is_a_step():
    reward = get_soft_overlong_punishment(max_completion_len=3, soft_punish_cache=0)
    assert reward(completion_ids=[[1] * 3, [1] * 4]) == [0.0, -1.0]


def test_repetition_penalty_is_the_share_of_repeated_ngrams():
    reward = get_repetition_penalty_reward(ngram_size=1, max_penalty=-2.0)
    # 4 tokens, 2 distinct: half are repeats; too few tokens for an n-gram: no penalty
    assert reward(completion_ids=[[1, 1, 2, 2], [1, 2], []]) == [-1.0, 0.0, 0.0]
    assert get_repetition_penalty_reward()(completion_ids=[[1, 2]]) == [0.0]


# --- matching --------------------------------------------------------------------------------------------------------


def test_exact_match_reads_either_column_or_abstains():
    assert exact_match_reward(said("Paris ", "Rome"), solution=["Paris", None]) == [1.0, None]
    assert exact_match_reward(["4"], answer=[4]) == [1.0]
    assert get_exact_match_reward(ignore_whitespace=False)(["a b", "a  b"], answer=["a b", "a b"]) == [1.0, 0.0]
    with pytest.raises(ValueError, match="'answer' or 'solution'"):
        exact_match_reward(["Paris"])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", "42"),
        ("It is 42.", "42"),
        ("1,234,567", "1234567"),
        ("1{,}234", "1234"),
        ("1, 2, 3", "3"),
        ("-7", "-7"),
        ("\u22127", "-7"),
        ("x = -7.50", "-15/2"),
        ("10-3", "3"),
        ("10-3 makes -$7", "-7"),
        ("so 1,234.50 EUR.", "2469/2"),
        ("2 / 4", "1/2"),
        ("(2)-3", "3"),
        (".5", "1/2"),
        ("3/4", "3/4"),
        (r"-\frac{3}{4}", "-3/4"),
        (r"\boxed{12}", "12"),
        ("$1,200", "1200"),
        ("50%", "50"),
        ("2e3", "2000"),
        ("12 apples and CO2", "12"),
        ("#### 8", "8"),
        ("\u7b54\u6848\u662f42", "42"),
        ("1/0", "None"),
        ("9" * 5000, "None"),
        ("none", "None"),
        ("", "None"),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert str(last_number(text)) == number


def test_numeric_match():
    completions = said("so 2/4", "about 0.3333", "no idea", "7")
    assert numeric_match_reward(completions, answer=["0.5", "1/3", "1", "seven"]) == [1.0, 0.0, 0.0, None]
    assert get_numeric_match_reward(0.001)(completions, solution=["0.5", "1/3", "1", None]) == [1.0, 1.0, 0.0, None]


class Scripted:
    """A worker that fails on what holds "hard", and takes down what it is asked and how long it is given."""

    def __init__(self):
        self.asked = []

    def start(self):
        """Do nothing: a call needs no preparation."""

    def call(self, request, seconds):
        self.asked.append((request["answer"], seconds))
        if "hard" in request["answer"]:
            raise WorkerFailed("no answer")
        return {"result": {"reward": 1.0, "gold": ["4"], "answer": ["4"]}}


@pytest.fixture
def worker(monkeypatch):
    scripted = Scripted()
    monkeypatch.setattr(accuracy, "_worker", lambda: scripted)
    monkeypatch.setattr(accuracy, "_failures", collections.deque(maxlen=accuracy.RECENT_CHECKS))
    accuracy._compared.cache_clear()
    yield scripted
    accuracy._compared.cache_clear()


def test_a_pair_is_compared_once_whichever_calls_it_comes_in(worker):
    for _ in range(2):  # one call for each completion, as when rollouts are scored as they end
        assert accuracy_reward(["four"], ["4"]) == accuracy_reward(["4.0"], ["4"]) == [1.0]
    assert [answer for answer, _ in worker.asked] == ["four", "4.0"]


def test_a_failed_check_is_retried_by_the_next_call_alone(worker):
    assert all(map(math.isnan, accuracy_reward(["hard", "hard"], ["4", "4"])))
    assert len(worker.asked) == 1
    assert math.isnan(accuracy_reward(["hard"], ["4"])[0])
    assert len(worker.asked) == 2


def test_failing_checks_get_less_time_until_others_succeed(worker):
    for number in range(accuracy.MAX_FAILED_CHECKS + 1):
        accuracy_reward([f"hard {number}"], ["4"])
    assert [seconds for _, seconds in worker.asked] == [5.0] * accuracy.MAX_FAILED_CHECKS + [1.0]
    for number in range(accuracy.RECENT_CHECKS):
        accuracy_reward([f"easy {number}"], ["4"])
    assert worker.asked[-1][1] == 5.0
