"""Tools: described, checked, called under a deadline; whatever they do, the policy gets an answer."""

import asyncio
import collections
import contextlib
import dataclasses
import enum
import functools
import math
import sys
import threading
import time
from typing import Any, Literal, Optional

import pytest
from PIL import Image

from covey.core.records import FinishReason, Rollout
from covey.rollout.tool_agent import as_message
from covey.rollout.tools.calls import AssistantTurn, MalformedCall, ToolCall
from covey.rollout.tools.tool import Tool
from covey.rollout.tools.toolbox import Failure, Toolbox, call_stats, count_outcomes
from covey.runtime.deadlines import MAX_STILL_RUNNING


class Unit(enum.Enum):
    METRES = "m"
    FEET = "ft"


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "awake"


def typed(
    mode: Literal["a", "b"] = "a",
    unit: Unit = Unit.METRES,
    number: float = 0.0,
    maybe: Optional[int] = None,  # noqa: UP045 (both spellings are tools' own)
    either: int | list[int] = 0,
    table: dict[str, list[int]] = {},  # noqa: B006
    pair: tuple[int, str] = (0, ""),
    flag: bool = False,
    anything: Any = None,
) -> str:
    """Show what came.

    Args:
        mode: A letter.
        unit: A unit.
        number: A number.
        maybe: Perhaps a number.
        either: One or several.
        table: Lists by name.
        pair: Two.
        flag: Yes or no.
        anything: At all.
    """
    return repr((mode, unit, number, maybe, either, table, pair, flag, anything))


def tool(function, **properties):
    """A tool without a description, for what the call does rather than how it is described."""
    parameters = {"type": "object", "properties": properties}
    schema = {"type": "function", "function": {"name": "t", "description": "", "parameters": parameters}}
    return Tool("t", schema, function)


def ask(box, *calls):
    return asyncio.run(box.answer(AssistantTurn("", [ToolCall(name, arguments) for name, arguments in calls])))


def answer(function, timeout=5.0, **limits):
    return ask(Toolbox([tool(function)], timeout=timeout, **limits), ("t", {}))[0]


# --- description -------------------------------------------------------------------------------------------------


def test_the_schema_comes_from_hints_and_docstring():
    (schema,) = Toolbox([add]).schemas
    assert schema["function"]["name"] == "add"
    assert schema["function"]["description"] == "Add two numbers."
    assert schema["function"]["parameters"]["properties"]["a"] == {"type": "integer", "description": "The first."}
    assert schema["function"]["parameters"]["required"] == ["a"]


class Counter:
    """Keeps a count."""

    def __init__(self):
        self.count = 0

    def step(self, by: int) -> int:
        """Count on.

        Args:
            by: How far.
        """
        self.count += by
        return self.count

    def __call__(self, by: int) -> int:
        """Count on.

        Args:
            by: How far.
        """
        return self.step(by)


def test_methods_and_callable_objects_are_tools_too():
    counter = Counter()
    box = Toolbox([counter.step, counter])
    assert list(box.tools) == ["step", "Counter"]
    assert ask(box, ("step", {"by": 2}))[0].content == "2"
    assert ask(box, ("Counter", {"by": 3}))[0].content == "5"


def found(term: str, connection: threading.Lock, limit: int = 3) -> str:
    """Search.

    Args:
        term: What for.
        connection: Nothing that the policy knows of.
        limit: How many lines.
    """
    return f"{term} {connection.locked()} {limit}"


def test_what_is_bound_already_is_not_shown_to_the_policy():
    box = Toolbox([functools.partial(found, connection=threading.Lock()), functools.cache(add)])
    parameters = box.schemas[0]["function"]["parameters"]
    assert (list(box.tools), list(parameters["properties"])) == (["found", "add"], ["term", "limit"])
    assert parameters["required"] == ["term"]
    assert ask(box, ("found", {"term": "x"}))[0].content == "x False 3"
    assert ask(box, ("found", {"term": "x", "connection": 1}))[0].content.startswith("{'error': \"there is no argument")
    assert ask(box, ("add", {"a": 1, "b": 2}))[0].content == "3"


def survey(
    one: Unit | None, more: list[Unit], either: list[Unit] | Unit | int, pair: tuple[int, Unit] = (0, Unit.FEET)
) -> str:
    """Survey.

    Args:
        one: A unit, or none.
        more: Units.
        either: Some, one, or a number.
        pair: A number and a unit.
    """
    return repr((one, more, either, pair))


@pytest.mark.parametrize(
    ("arguments", "got"),
    [
        (
            {"one": "ft", "more": ["m", "ft"], "either": "m"},
            (Unit.FEET, [Unit.METRES, Unit.FEET], Unit.METRES, (0, Unit.FEET)),
        ),
        ({"one": None, "more": [], "either": ["ft"], "pair": [1, "m"]}, (None, [], [Unit.FEET], [1, Unit.METRES])),
        ({"one": "m", "more": [], "either": 4}, (Unit.METRES, [], 4, (0, Unit.FEET))),
    ],
)
def test_values_become_enum_members_wherever_hints_name_them(arguments, got):
    assert ask(Toolbox([survey]), ("survey", arguments))[0].content == repr(got)


def undocumented(a: int):
    return a


def unhinted(a):
    """Do.

    Args:
        a: It.
    """


def variadic(*args: int):
    """Do.

    Args:
        args: Them.
    """


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (undocumented, "'undocumented' cannot be described .*no docstring.*type hint for every argument"),
        (unhinted, "'unhinted' cannot be described .*missing a type hint"),
        (variadic, r"'\*args: int' cannot be given by name"),
        (len, "'len' cannot be described"),
        (Counter.step, "its parameter 'self' has no value.*`thing.step`"),
        (functools.partial(unhinted, b=1), "'unhinted' cannot be described"),
        (3, "must be functions, methods or callable objects, got 3"),
        (int, "must be functions, methods or callable objects"),
    ],
)
def test_what_cannot_be_described_is_refused_at_once(bad, message):
    with pytest.raises(ValueError, match=message):
        Toolbox([bad])


@pytest.mark.parametrize("schema", [{"name": "f", "parameters": {}}, {"function": {"name": "g"}}, None])
def test_a_schema_written_by_hand_is_of_that_tool(schema):
    with pytest.raises(ValueError, match=r"schema of Tool\('f', ...\) must be .*'function': {'name': 'f'.*, got"):
        Tool("f", schema, add)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two tools are called 'add'"):
        Toolbox([add, add])


@pytest.mark.parametrize("limit", ["timeout", "max_result_chars", "max_parallel_calls"])
@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_limits_are_positive(limit, value):
    with pytest.raises(ValueError, match=rf"{limit}={value} of the tools must be greater than 0"):
        Toolbox([add], **{limit: value})


# --- arguments ---------------------------------------------------------------------------------------------------


def test_arguments_of_every_kind_reach_the_tool():
    given = {
        "mode": "b",
        "unit": "ft",
        "number": 2,
        "maybe": None,
        "either": [1, 2],
        "table": {"x": [1]},
        "pair": [1, "y"],
        "flag": True,
        "anything": [None, {"k": 1}],
    }
    expected = ("b", Unit.FEET, 2, None, [1, 2], {"x": [1]}, [1, "y"], True, [None, {"k": 1}])
    assert ask(Toolbox([typed]), ("typed", given))[0].content == repr(expected)


def test_a_whole_number_written_as_a_fraction_is_an_integer():
    assert ask(Toolbox([add]), ("add", {"a": 2.0, "b": 3}))[0].content == "5"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "c"}, "argument 'mode' must be one of ['a', 'b'], not 'c'"),
        ({"unit": "miles"}, "argument 'unit' must be one of ['m', 'ft'], not 'miles'"),
        ({"number": "3"}, "argument 'number' must be of type number, not '3'"),
        ({"number": True}, "argument 'number' must be of type number, not True"),
        ({"number": math.inf}, "argument 'number' must be of type number, not inf"),
        ({"maybe": 1.5}, "argument 'maybe' must be of type integer, not 1.5"),
        ({"table": {"x": 1}}, "argument 'table'.x must be of type array, not 1"),
        ({"pair": [1]}, "argument 'pair' must have 2 items, not 1"),
        ({"pair": [1, 2]}, "argument 'pair'[1] must be of type string, not 2"),
        ({"flag": 1}, "argument 'flag' must be of type boolean, not 1"),
        ({"colour": 1}, "there is no argument 'colour'; there are: mode, unit"),
        ({"flag": "y" * 5000}, "not 'yyyy"),
    ],
)
def test_a_wrong_argument_is_answered_with_what_is_allowed(arguments, message):
    (result,) = ask(Toolbox([typed]), ("typed", arguments))
    assert result.failure is Failure.WRONG_ARGUMENT
    assert message in result.content
    assert len(result.content) < 600


def test_each_kind_of_a_union_is_checked():
    tool = Tool.of(typed)
    if "anyOf" not in tool.schema["function"]["parameters"]["properties"]["either"]:
        pytest.skip("transformers 5.17 does not describe the items of a list in a union")
    (result,) = ask(Toolbox([typed]), ("typed", {"either": ["x"]}))
    assert result.failure is Failure.WRONG_ARGUMENT
    assert "argument 'either' must be of type integer, not ['x']; or argument 'either'[0] must be" in result.content


def test_a_union_with_an_enumeration_takes_its_other_kinds():
    def mixed(one: Unit | float, two: Unit | tuple[int, int] | None = None):
        """Try kinds.

        Args:
            one: A unit or a number.
            two: A unit or a pair.
        """
        return repr((one, two))

    (result,) = ask(Toolbox([mixed]), ("mixed", {"one": 3, "two": [1, 2]}))
    assert result.content == "(3, [1, 2])"
    (result,) = ask(Toolbox([mixed]), ("mixed", {"one": "ft", "two": "m"}))
    assert result.content == repr((Unit.FEET, Unit.METRES))


@pytest.mark.parametrize("value", ["miles", ["m", "miles"], [1]])
def test_values_that_are_no_member_of_a_union_are_wrong(value):
    (result,) = ask(Toolbox([survey]), ("survey", {"one": None, "more": [], "either": value}))
    assert result.failure is Failure.WRONG_ARGUMENT


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer", "minimum": 1}, 1, 0),
        ({"type": "string", "pattern": "^[a-z]+$"}, "ab", "a1"),
        ({"const": "now"}, "now", "later"),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, [1, 2.0], [1, 2, 3]),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, None, "x"),
        ({"type": "string", "nullable": True, "enum": ["a"]}, None, "b"),
        ({"type": "object", "allOf": [{"properties": {"a": {}}}, {"required": ["b"]}]}, {"a": 1, "b": 2}, {"a": 1}),
        ({"properties": {"a": {}}, "anyOf": [{"properties": {"b": {"const": 1}}}]}, {"a": 1, "b": 1}, {"a": 1, "b": 2}),
        ({"properties": {"a": {}}}, {"a": 1}, {"b": 1}),
    ],
)
def test_schemas_written_by_hand_hold_with_all_their_keywords(schema, right, wrong):
    box = Toolbox([tool(repr_of, value=schema)])
    fine, refused = ask(box, ("t", {"value": right}), ("t", {"value": wrong}))
    assert (fine.content, refused.failure) == (repr(right).replace("2.0", "2"), Failure.WRONG_ARGUMENT)
    assert "argument 'value'" in refused.content


def repr_of(value):
    return repr(value)


def test_references_hold_within_a_schema_and_none_is_fetched():
    word = {"$defs": {"word": {"enum": ["a"]}}, "properties": {"x": {"$ref": "#/$defs/word"}}}
    away = {"properties": {"x": {"$ref": "http://127.0.0.1:1/schema"}}}
    for parameters, fine in ((word, "a"), (away, None)):
        schema = {"type": "function", "function": {"name": "t", "description": "", "parameters": parameters}}
        box = Toolbox([Tool("t", schema, lambda x: x)])
        assert ask(box, ("t", {"x": "b"}))[0].failure is Failure.WRONG_ARGUMENT
        assert fine is None or ask(box, ("t", {"x": fine}))[0].content == fine


def test_parameters_that_are_no_schema_are_refused():
    with pytest.raises(ValueError, match=r"Tool\('t', ...\)"):
        tool(repr_of, value={"type": "text"})


def test_a_missing_argument_is_named():
    (result,) = ask(Toolbox([add]), ("add", {}))
    assert (result.failure, result.content) == (Failure.WRONG_ARGUMENT, "{'error': 'add needs the arguments: a'}")


def test_a_tool_cannot_change_the_call_that_is_logged():
    call = ToolCall("t", {"items": [1]})
    box = Toolbox([tool(lambda items: items.append(2), items={"type": "array"})])
    asyncio.run(box.answer(AssistantTurn("", [call])))
    assert call.arguments == {"items": [1]}


# --- answers -----------------------------------------------------------------------------------------------------


def test_calls_of_a_turn_run_concurrently_and_keep_their_order():
    """Each thread waits for the other, so that one after the other they would not finish."""
    barrier = threading.Barrier(2, timeout=10)
    box = Toolbox([tool(lambda x: (barrier.wait(), x)[1], x={"type": "integer"}), wait])
    results = ask(box, ("t", {"x": 1}), ("wait", {"seconds": 0.0}), ("t", {"x": 2}))
    assert [result.content for result in results] == ["1", "awake", "2"]
    assert [result.failure for result in results] == [None] * 3
    assert [result.call_id for result in results] == ["call00000", "call00001", "call00002"]


def test_the_message_is_what_chat_templates_read():
    (result,) = asyncio.run(Toolbox([add]).answer(AssistantTurn("", [ToolCall("add", {"a": 1})]), first_id=7))
    assert result.message() == {"role": "tool", "name": "add", "tool_call_id": "call00007", "content": "2"}


def test_a_result_bears_the_id_that_the_policy_wrote():
    calls = [ToolCall("add", {"a": 1, "b": 2}, call_id="VvvODy9mT"), ToolCall("no", {}, call_id="abcdefghi")]
    turn = AssistantTurn("", [*calls, ToolCall("add", {"a": 1, "b": 2})])
    results = asyncio.run(Toolbox([add]).answer(turn, first_id=4))
    assert [result.call_id for result in results] == ["VvvODy9mT", "abcdefghi", "call00006"]
    said = as_message(turn, "")["tool_calls"]
    assert [call.get("id") for call in said] == ["VvvODy9mT", "abcdefghi", None]


def test_an_unknown_tool_and_a_malformed_call_are_answered():
    turn = AssistantTurn("", [ToolCall("ad", {})], [MalformedCall("{", "it is not closed")])
    unknown, malformed = asyncio.run(Toolbox([add]).answer(turn))
    assert unknown.content == str({"error": "there is no tool 'ad'; did you mean add? The tools are: add"})
    assert unknown.failure is Failure.UNKNOWN_TOOL
    assert malformed.content == "{'error': 'the call could not be read: it is not closed'}"
    assert malformed.failure is Failure.MALFORMED


def test_calls_beyond_the_limit_are_answered_with_one_error():
    ran = []
    box = Toolbox([tool(lambda: ran.append(1))], max_parallel_calls=2)
    results = ask(box, *[("t", {})] * 5)
    assert len(ran) == 2
    assert [result.failure for result in results] == [None, None, Failure.TOO_MANY]
    assert "only 2 calls of a turn are executed; 3 more were left out" in results[-1].content


def test_a_tool_may_return_something_to_await():
    assert answer(lambda: wait(0.0)).content == "awake"


def test_context_variables_reach_threads():
    import contextvars

    number = contextvars.ContextVar("number", default=0)
    number.set(5)
    assert answer(number.get).content == "5"


@dataclasses.dataclass
class Point:
    x: int
    y: int


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("as it is", "as it is"),
        (None, "None"),
        (True, "True"),
        (1.5, "1.5"),
        (math.nan, "nan"),
        ({"ä": [1, None]}, "{'ä': [1, None]}"),
        ((1, 2), "(1, 2)"),
        (set(), "set()"),
        (Point(1, 2), "Point(x=1, y=2)"),
        ({3}, "{3}"),
        (b"caf\xc3\xa9\xff", "café�"),
        (Unit.FEET, "Unit.FEET"),
        ("half \ud83d", "half ?"),
        ("x" * 30, "x" * 20 + "\n[10 more characters left out]"),
        (["y" * 30], "['yyyyyyyyyyyyyyyyyy\n[14 more characters left out]"),
        (["y"] * 100, "['y', 'y', 'y', 'y',\n[more characters left out]"),
    ],
)
def test_results_of_any_type_become_text(result, text):
    assert answer(lambda: result, max_result_chars=20).content == text


def nested(depth, width):
    """A list of lists with width ** depth members at the end."""
    result = []
    for _ in range(depth):
        result = [result] * width
    return result


def itself():
    result = []
    result.append(result)
    return result


class Liar(str):
    def __len__(self):
        return -1

    def encode(self, *args):
        return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: nested(60, 2), "[[[[[[[[[[[[[[[[[[[[\n[more characters left out]"),
        (lambda: [object, nested(60, 2)], "[<class 'object'>, [\n[more characters left out]"),
        (lambda: collections.deque(nested(60, 2)), "deque(" + "[" * 14 + "\n[more characters left out]"),
        (itself, "[...]"),
        (lambda: ({object}, (3,), collections.deque([{1: 2}])), "({<class 'object'>},\n[23 more characters left out]"),
        (lambda: nested(100_000, 1), "[[[[[[[[[[[[[[[[[[[[\n[more characters left out]"),
        (lambda: [0] * 10**8, "[0, 0, 0, 0, 0, 0, 0\n[more characters left out]"),
        (lambda: Liar("fine"), "fine"),
    ],
)
def test_endless_results_are_rendered_up_to_the_limit(make, text):
    assert answer(make, max_result_chars=20).content == text


def test_a_coroutine_that_is_returned_is_awaited():
    async def outer():
        return wait(0.01)

    assert answer(lambda: wait(0.01)).content == answer(outer).content == "awake"


def test_images_stay_images():
    picture = Image.new("RGB", (2, 2))
    assert answer(lambda: picture).content == [{"type": "image", "image": picture}]
    assert answer(lambda: ["see:", picture, 3]).content == [
        {"type": "text", "text": "see:"},
        {"type": "image", "image": picture},
        {"type": "text", "text": "3"},
    ]
    part = {"type": "image", "image": picture}
    assert answer(lambda: [{"type": "text", "text": "a"}, part]).content == [{"type": "text", "text": "a"}, part]


# --- hostile tools -----------------------------------------------------------------------------------------------


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no")


class Unshowable:
    def __str__(self):
        raise ValueError("not shown")


def raising(error):
    def function():
        raise error

    return function


def recursive():
    return recursive()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "text"),
    [
        (raising(ValueError("not today")), "{'error': 'not today'}"),
        (raising(SystemExit(3)), "{'error': '3'}"),
        (raising(KeyboardInterrupt()), "{'error': 'KeyboardInterrupt'}"),
        (raising(StopIteration()), "StopIteration"),
        (raising(GeneratorExit()), "{'error': 'GeneratorExit'}"),
        (raising(asyncio.CancelledError()), "{'error': 'CancelledError'}"),
        (raising(TimeoutError("mine")), "{'error': 'mine'}"),
        (raising(Unprintable()), "{'error': 'Unprintable'}"),
        (lambda: sys.exit("out"), "{'error': 'out'}"),
        (Unshowable, "{'error': 'not shown'}"),
        (lambda: (number for number in ()), "{'error': 'the tool returned a generator"),
        (lambda missing: 1, "missing 1 required positional argument"),
        (recursive, "{'error': 'maximum recursion depth"),
        (raising(ValueError("z" * 10_000)), "zzz..."),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_tool_that_raises_is_answered_with_the_exception(function, text, asynchronous):
    async def asynchronously():
        return function()

    box = Toolbox([tool(asynchronously if asynchronous else function), add], timeout=10)
    bad, good = ask(box, ("t", {}), ("add", {"a": 1}))
    assert bad.failure is Failure.EXCEPTION
    assert text in bad.content
    assert len(bad.content) < 600
    assert good.content == "2"
    assert ask(box, ("add", {"a": 2}))[0].content == "3"


def spin():
    while True:
        pass


def spin_stubbornly():
    while True:
        with contextlib.suppress(Exception):
            spin()


class SlowToShow:
    def __str__(self):
        spin()


@pytest.mark.slow
@pytest.mark.parametrize(
    "function", [lambda: time.sleep(30), spin, spin_stubbornly, threading.Event().wait, SlowToShow]
)
def test_a_tool_that_hangs_is_given_up_and_costs_only_itself(function):
    box = Toolbox([tool(function), add, wait], timeout=1.0)
    hung, added, waited = ask(box, ("t", {}), ("add", {"a": 1}), ("wait", {"seconds": 0.01}))
    assert (hung.failure, hung.content) == (Failure.TIMEOUT, "{'error': 't took longer than 1 s and was given up'}")
    assert (added.content, waited.content) == ("2", "awake")


@pytest.mark.filterwarnings("ignore::covey.runtime.deadlines.LateCallWarning")
def test_a_tool_that_always_hangs_costs_a_bounded_number_of_threads():
    """Each turn calls a function that nothing can stop; another box with the same tool, as of an environment."""
    release, calls = threading.Event(), []

    def hangs():
        calls.append(1)
        release.wait()

    hanging = tool(hangs)
    before = threading.active_count()
    for _ in range(MAX_STILL_RUNNING + 4):
        box = Toolbox([hanging, add], timeout=0.02)
        hung, added = ask(box, ("t", {}), ("add", {"a": 1}))
        assert hung.failure is Failure.TIMEOUT and added.failure in (None, Failure.TIMEOUT)
    assert len(calls) == MAX_STILL_RUNNING
    assert threading.active_count() <= before + MAX_STILL_RUNNING + 2  # threads that stop others, and `add`
    release.set()
    until = time.monotonic() + 20
    while hanging.late.running():
        assert time.monotonic() < until
        time.sleep(0.005)
    assert ask(Toolbox([hanging], timeout=20.0), ("t", {}))[0].failure is None


@pytest.mark.slow
def test_a_late_thread_that_runs_python_is_stopped():
    running = threading.Event()
    stopped = threading.Event()

    def function():
        running.set()
        try:
            spin()
        finally:
            stopped.set()

    assert answer(function, timeout=1.0).failure is Failure.TIMEOUT
    assert running.is_set()
    assert stopped.wait(10)


def test_a_late_coroutine_is_cancelled():
    cancelled = threading.Event()

    async def function():
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    assert answer(function, timeout=0.3).failure is Failure.TIMEOUT
    assert cancelled.wait(10)


@pytest.mark.slow
@pytest.mark.parametrize("block", [lambda: time.sleep(5), spin])
def test_a_call_after_a_blocked_loop_gets_a_new_loop(block):
    async def function():
        block()

    box = Toolbox([tool(function), wait], timeout=1.0)
    assert ask(box, ("t", {}))[0].failure is Failure.TIMEOUT
    assert ask(box, ("wait", {"seconds": 0.01}))[0].content == "awake"


def test_async_tools_share_one_loop_over_a_run():
    loops = []

    async def function():
        loops.append(asyncio.get_running_loop())

    box = Toolbox([tool(function)])
    for _ in range(2):
        ask(box, ("t", {}), ("t", {}))
    assert len(set(loops)) == 1


def test_many_rollouts_with_slow_tools_wait_at_the_same_time():
    box = Toolbox([tool(lambda: time.sleep(0.3))], timeout=20)

    async def rollouts():
        await asyncio.gather(*(box.answer(AssistantTurn("", [ToolCall("t", {})])) for _ in range(64)))

    started = time.monotonic()
    asyncio.run(rollouts())
    assert time.monotonic() - started < 0.3 * 64 / 2  # a half of one after the other; about 0.4 s when idle


# --- metrics -----------------------------------------------------------------------------------------------------


def with_calls(calls):
    return Rollout([1], [2], [True], None, "", FinishReason.STOP, calls=dict(calls))


def test_frequencies_are_calls_per_rollout_and_failures_per_call():
    box = Toolbox([add])
    calls = count_outcomes(ask(box, ("add", {"a": 1}), ("add", {}), ("sub", {})))
    malformed = count_outcomes(asyncio.run(box.answer(AssistantTurn("", [], [MalformedCall("{", "broken")]))))
    metrics = {name: mean.value() for name, mean in call_stats([with_calls(calls), with_calls(malformed)]).items()}
    assert metrics["tools/call_frequency"] == 2.0
    assert metrics["tools/failure_frequency"] == 0.75
    assert metrics["tools/failures/unknown_tool"] == metrics["tools/failures/malformed"] == 0.25
    assert metrics["tools/failures/timeout"] == 0


def test_without_calls_there_is_no_share_of_failures():
    metrics = call_stats([with_calls({})] * 4)
    assert metrics["tools/call_frequency"].value() == 0
    assert math.isnan(metrics["tools/failure_frequency"].value())
