"""The task with tools: what counts as right, and that a policy which does it right is found to."""

import json
import re

import pytest

from benchmarks import tools
from covey.engines.scripted import ScriptedEngine
from tests.support import tiny

ONE = tools.problem(317, ("times", 468))
TWO = tools.problem(345, ("times", 12), ("minus", 140))


def call(name, **arguments):
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def result(text):
    return {"role": "tool", "name": "multiply", "tool_call_id": "call00000", "content": text}


def says(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("completion", "is_right"),
    [
        ([call("multiply", a=317, b=468), result("148356"), says("148356")], True),
        ([call("multiply", a=468, b=317), result("148356"), says("no idea")], True),
        ([call("add", a=317, b=468), result("785"), says("148356")], False),
        ([call("multiply", a="317", b=468), result("Error: ..."), says("148356")], False),
        ([call("multiply", x=317, y=468), result("Error: ..."), says("148356")], False),
        ([says("{broken"), result("Error: ..."), call("multiply", a=317, b=468), result("148356")], False),
        ([call("add", a=1, b=1), result("2"), call("multiply", a=317, b=468), result("148356")], False),
        ([says("148356")], False),
    ],
)
def test_the_right_call_is_the_only_one_with_tool_and_numbers(completion, is_right):
    (score,) = tools.right_calls([completion], calls=[ONE["calls"]])
    assert (score == 1) == is_right


def test_only_sums_and_products_may_be_turned_round():
    wanted = [tools.problem(468, ("minus", 317))["calls"]]
    assert tools.right_calls([[call("subtract", a=468, b=317), result("151")]], calls=wanted) == [1.0]
    assert tools.right_calls([[call("subtract", a=317, b=468), result("-151")]], calls=wanted) == [0.0]


def test_a_second_call_takes_the_result_of_the_first():
    first, second = call("multiply", a=345, b=12), call("subtract", a=4140, b=140)
    for completion, score in (
        ([first, result("4140"), second, result("4000"), says("4000")], 1.0),
        ([first, result("4140"), says("4140")], 0.5),
        ([first, result("4140"), call("subtract", a=345, b=140), result("205")], 0.5),
        ([second, result("4000"), first, result("4140")], 0.0),  # it cannot know the number yet
        ([first, result("4140"), second, result("4000"), second, result("4000")], 0.0),
    ):
        assert tools.right_calls([completion], calls=[TWO["calls"]]) == [score]


def test_the_right_answer_is_the_number_alone():
    for completion, score in (
        ([call("multiply", a=317, b=468), result("148356"), says("148356")], 1.0),
        ([says("148356")], 1.0),
        ([says("It is 148356")], 0.0),
        ([says("148,356")], 0.0),
        ([call("multiply", a=317, b=468), result("148356")], 0.0),
    ):
        assert tools.right_answer([completion], answer=[ONE["answer"]]) == [score]


def test_an_example_shows_its_calls_and_results():
    assert [message["content"] for message in tools.opening(2)[1:]] == [
        "What is 345 times 12, minus 140?",
        '{"name": "multiply", "arguments": {"a": 345, "b": 12}}',
        "4140",
        '{"name": "subtract", "arguments": {"a": 4140, "b": 140}}',
        "4000",
        "4000",
    ]


@pytest.mark.parametrize("calls", [1, 2])
def test_no_question_is_asked_twice(calls):
    train, held_out = tools.questions(0, 300, 60, calls)
    asked = [row["prompt"][-1]["content"] for row in train + held_out]
    assert len(asked) == len(set(asked)) == 360
    kinds = [tuple(one["name"] for one in row["calls"]) for row in train + held_out]
    assert {kinds.count(kind) for kind in set(kinds)} == {360 // 3**calls}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.folder(tmp_path_factory.mktemp("model") / "long", max_position_embeddings=1024)  # a token a character


SMALL = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "num_generations": 2,
    "learning_rate": 1e-5,
}


def test_a_policy_that_calls_and_answers_is_found_to_be_right(folder, tmp_path):
    """Scripted: it calls rightly, and forgets the last digit of the answer where the question was a difference."""
    tokenizer = tiny.tokenizer()

    def policy(prompt_ids, seed):
        text = tokenizer.decode(prompt_ids)
        a, word, b, rest = re.search(r".*What is (\d+) (\w+) (\d+)\?(.*)", text, re.DOTALL).groups()
        if told := re.search(r"tool: (\d+)", rest):
            said = told[1][:-1] if word == "minus" else told[1]
        else:
            said = json.dumps({"name": tools.TOOLS[word].__name__, "arguments": {"a": int(a), "b": int(b)}})
        return [*tokenizer(said, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    train, held_out = tools.questions(0, 8, 3)
    engine = ScriptedEngine(policy)
    trainer = tools.build(folder, train, tmp_path, 0, 1, engine, **SMALL, max_completion_length=200)
    found = tools.measure(trainer, held_out, "test", 0)
    for way in ("sampled", "greedy"):
        assert found[way]["call"]["mean"] == 1.0
        assert found[way]["answer"]["mean"] == found[way]["both"]["mean"] == pytest.approx(2 / 3)


@pytest.mark.slow
def test_the_benchmark_runs_in_miniature(folder, tmp_path):
    run = tools.learn(folder, 0, 1, tmp_path / "out", held_out=3, **SMALL, max_completion_length=8)
    assert run["before"]["sampled"]["both"] == {"mean": 0.0, "interval": [0.0, 0.0]}  # random weights
    assert [len(curve) for curve in run["curves"].values()] == [1] * 5
    tools.plot([run], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    assert tools.table([run]).splitlines()[-1].startswith("| 0 | 0.0% (0.0% to 0.0%) | 0.0% (0.0% to 0.0%) |")
