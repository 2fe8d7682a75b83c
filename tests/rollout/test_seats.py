"""Opponents that answer in text: servers and functions, and the names of seats."""

import asyncio
import json
import re
import time

import pytest
from aiohttp import web

from covey.core.records import FinishReason
from covey.rollout.seats import FunctionSeat, Seat, TextSeat, checked_seats, past_steps, seat_named
from covey.runtime.calling_thread import threaded


async def served(status, body, play):
    """What `play` gets from a server that answers so, and the requests that it saw."""
    seen = []

    async def answer(request):
        seen.append((request.headers.get("Authorization"), await request.json()))
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return web.Response(body=raw, status=status, content_type="text/html" if raw is body else "application/json")

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        return await play(Seat(f"http://127.0.0.1:{port}/v1", model="m", key="secret")), seen
    finally:
        await runner.cleanup()


def test_a_server_is_asked_with_the_whole_conversation():
    async def play(seat):
        conversation = TextSeat("judge", seat, max_tokens=9, temperature=0.5).begin("one")
        first = await conversation.sample(stop=["."])
        assert conversation.write("two")
        return first, await conversation.sample(max_tokens=3)

    body = {"choices": [{"message": {"content": "so"}, "finish_reason": "length"}]}
    (first, second), seen = asyncio.run(served(200, body, play))
    assert (first.text, first.finish, second.token_ids) == ("so", FinishReason.LENGTH, [])
    (key, asked), (_, again) = seen
    assert key == "Bearer secret"
    assert asked == {
        "model": "m",
        "messages": [{"role": "user", "content": "one"}],
        "max_tokens": 9,
        "temperature": 0.5,
        "stop": ["."],
    }
    roles = [(one["role"], one["content"]) for one in again["messages"]]
    assert roles == [("user", "one"), ("assistant", "so"), ("user", "two")] and again["max_tokens"] == 3


def test_a_server_that_refuses_or_is_not_there_is_named():
    async def play(seat):
        return await TextSeat("judge", seat, 9, 1.0).begin("one").sample()

    with pytest.raises(ValueError, match=r"'judge' at http://127.*status 500.*busy"):
        asyncio.run(served(500, {"error": "busy"}, play))
    with pytest.raises(ValueError, match=r"'judge' at http://127\.0\.0\.1:9/v1 does not answer"):
        asyncio.run(play(Seat("http://127.0.0.1:9/v1")))


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b'{"choices": [{"message": {"content": "\xff',
        {"error": "busy"},
        {"choices": []},
        [1],
        "so",
        {"choices": [{"text": "so"}]},
        {"choices": [{"message": None}]},
        {"choices": [{"message": {"content": [{"type": "text", "text": "so"}]}}]},
        {"choices": [{"message": {"content": 7}}]},
    ],
)
def test_an_answer_that_is_no_chat_completion_is_shown_with_the_seat(body):
    async def play(seat):
        return await TextSeat("judge", seat, 9, 1.0).begin("one").sample()

    shown = re.escape((body if isinstance(body, bytes) else json.dumps(body).encode()).decode("utf-8", "replace"))
    with pytest.raises(ValueError, match=rf"'judge' at http://127.*{shown}"):
        asyncio.run(served(200, body, play))


def test_an_empty_answer_and_a_slash_after_the_address_are_allowed():
    async def play(seat):
        return await TextSeat("judge", Seat(seat.url + "/"), 9, 1.0).begin("one").sample()

    reply, seen = asyncio.run(served(200, {"choices": [{"message": {"content": None}}]}, play))
    assert (reply.text, reply.finish, len(seen)) == ("", FinishReason.STOP, 1)


def test_a_function_returns_text():
    async def late(messages):
        return messages[-1]["content"] + "!"

    for function in (late, lambda messages: late(messages), lambda messages: messages[-1]["content"] + "!"):
        assert asyncio.run(FunctionSeat(function, 9.0).answer([{"role": "user", "content": "a"}])) == "a!"
    with pytest.raises(ValueError, match="returned a int; it must return text"):
        asyncio.run(FunctionSeat(lambda messages: 5, 9.0).answer([]))


def test_an_exception_of_a_function_is_the_games_to_handle():
    def lost(messages):
        raise LookupError("no such opening")

    with pytest.raises(LookupError, match="no such opening"):
        asyncio.run(FunctionSeat(lost, 9.0).answer([]))


@pytest.mark.parametrize("marked", [False, True])
def test_calls_of_a_function_come_one_after_another_unless_it_is_threaded(marked):
    """Three games, of which the first one's call is the longest."""
    order, running = [], []

    def thinks(messages):
        running.append(None)
        order.append((messages[0]["content"], len(running)))
        time.sleep(0.3 - 0.1 * messages[0]["content"])
        running.pop()
        return "7"

    seat = FunctionSeat(threaded(thinks) if marked else thinks, 9.0)

    async def games():
        return await asyncio.gather(*(seat.answer([{"content": number}]) for number in range(3)))

    assert asyncio.run(games()) == ["7"] * 3
    assert [game for game, _ in order] == [0, 1, 2]
    assert [together for _, together in order] == ([1, 2, 3] if marked else [1, 1, 1])


def test_seats_have_names_and_kinds():
    assert past_steps("policy:50") == 50 and past_steps("policy:0") is None and past_steps("frozen") is None
    given = {"a": "frozen", "b": "policy:3", "c": Seat("http://x/v1"), "d": str}
    seats = checked_seats(given, 9.0)
    assert seat_named(seats, "b") == "policy:3" and given["d"] is str
    assert (seats["d"].function, seats["d"].seconds) == (str, 9.0)
    with pytest.raises(ValueError, match="the seat 'd' is"):
        checked_seats(given)
    with pytest.raises(ValueError, match="the trainer was given none"):
        seat_named({}, "b")
