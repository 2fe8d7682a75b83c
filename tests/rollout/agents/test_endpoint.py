"""The endpoint that programs talk to, asked by plain HTTP clients in each of its APIs."""

import asyncio
import json
from contextlib import nullcontext
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web

from covey.core.records import FinishReason
from covey.engines.scripted import ScriptedEngine
from covey.rollout.agents import endpoint as module
from covey.rollout.agents.endpoint import AgentEndpoint
from covey.rollout.agents.session import MAX_STRANDS, AgentSession
from covey.rollout.seats import Seat, checked_seats
from covey.rollout.user_functions import RolloutFunction, RolloutValidator
from tests.support.playing import TOKENIZER, call, play, says

PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="
START = [{"role": "user", "content": "go"}]
ADD = {"name": "add", "description": "", "parameters": {"type": "object"}}


def program(steps, **options):
    """An agent whose turns are what a program asks the endpoint for; `steps(ask)` gets the means to ask."""

    async def rollout(row, engine):
        session = AgentSession(engine, **options)
        async with AgentEndpoint() as endpoint, aiohttp.ClientSession() as client:
            key = endpoint.open(session)

            async def ask(messages=None, path="/v1/chat/completions", key=key, data=None, charset="utf-8", **body):
                body = {"model": "policy", **({} if messages is None else {"messages": messages}), **body}
                headers = {"Authorization": f"Bearer {key}", "Content-Type": f"application/json; charset={charset}"}
                data = json.dumps(body) if data is None else data
                async with client.post(endpoint.url + path, data=data, headers=headers) as response:
                    text = await response.text()
                    return response.status, json.loads(text) if text.startswith("{") else text

            ask.session = session
            result = await steps(ask)
        return session.rollout(result=result)

    return RolloutFunction(rollout, 20, RolloutValidator(len(TOKENIZER), None))


def said(answer):
    status, body = answer
    assert status == 200, body
    return body["choices"][0]["message"]


def events(text):
    """The data of a stream's events."""
    lines = [line for line in text.split("\n") if line.startswith("data: ")]
    return [line if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")) for line in lines]


def user(text):
    return {"role": "user", "content": text}


def text_of(rollout):
    return TOKENIZER.decode(rollout.completion_ids)


def test_a_conversation_is_one_strand():
    async def steps(ask):
        first = said(await ask(START))
        second = said(await ask([*START, first, {"role": "user", "content": [{"type": "text", "text": "on"}]}]))
        return first["content"], second["content"]

    (rollout,) = play(program(steps), says("1", "2"))
    assert rollout.extras["result"] == ("1", "2") and not rollout.strands
    assert text_of(rollout) == "1<eos><bos>user: on<eos><bos>assistant: 2<eos>"
    assert rollout.num_sampled == 4 and rollout.finish is FinishReason.STOP
    assert [message["content"] for message in rollout.completion] == ["1", "on", "2"]


def test_a_rewritten_history_is_another_strand():
    """Its tokens, but those that it has in common, come after the others': `user: g` is shared, `o` and `et` differ."""

    async def steps(ask):
        said(await ask(START))
        return said(await ask([user("get")]))["content"]

    (rollout,) = play(program(steps), says("1"))
    assert text_of(rollout) == "1<eos>et<eos><bos>assistant: 1<eos>"
    ((start, follows),) = rollout.strands
    assert TOKENIZER.decode(rollout.completion_ids[:start]) == "1<eos>"
    assert TOKENIZER.decode(rollout.prompt_ids[: follows + 1]) == "<bos>user: g"
    assert rollout.num_sampled == 4 and [one["content"] for one in rollout.completion] == ["1", "get", "1"]


def test_an_earlier_turn_is_continued_again():
    async def steps(ask):
        first = said(await ask(START))
        for text in ("a", "b"):
            said(await ask([*START, first, user(text)]))

    (rollout,) = play(program(steps), says("1", "2"))
    ((start, follows),) = rollout.strands
    shared = TOKENIZER.decode([*rollout.prompt_ids, *rollout.completion_ids][: follows + 1])
    assert shared == "<bos>user: go<eos><bos>assistant: 1<eos><bos>user: "
    assert TOKENIZER.decode(rollout.completion_ids[start:]) == "b<eos><bos>assistant: 2<eos>"
    assert rollout.num_sampled == 6


def test_choices_of_one_request_are_each_trained_on():
    """Both are "1<eos>": equal tokens that were sampled twice are there twice."""

    async def steps(ask):
        _, body = await ask(START, n=2)
        return [choice["message"]["content"] for choice in body["choices"]]

    (rollout,) = play(program(steps), says("1"))
    assert rollout.extras["result"] == ["1", "1"] and text_of(rollout) == "1<eos>1<eos>"
    assert rollout.strands == [(2, len(rollout.prompt_ids) - 1)] and rollout.num_sampled == 4


def test_calls_of_tools_come_and_go_in_openais_form():
    async def steps(ask):
        tools = [{"type": "function", "function": ADD}]
        _, body = await ask(START, tools=tools)
        asked = body["choices"][0]["message"]
        assert body["choices"][0]["finish_reason"] == "tool_calls"
        (one,) = asked["tool_calls"]
        result = {"role": "tool", "tool_call_id": one["id"], "content": "5"}
        answer = said(await ask([*START, asked, result], tools=tools))
        return one["function"], answer["content"]

    (rollout,) = play(program(steps), says("so " + call("add", a=2), "5"))
    function, answer = rollout.extras["result"]
    assert function == {"name": "add", "arguments": '{"a": 2}'} and answer == "5" and not rollout.strands
    assert rollout.completion[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2}}
    assert "<bos>tool: 5<eos>" in text_of(rollout)


def test_calls_of_tools_in_the_form_of_responses():
    async def steps(ask):
        tools, path = [{"type": "function", **ADD}], "/v1/responses"
        status, body = await ask(input="go", tools=tools, path=path)
        assert status == 200, body
        content, asked = body["output"]
        assert asked["arguments"] == '{"a": 2}' and content["content"][0]["text"] == "so"
        result = {"type": "function_call_output", "call_id": asked["call_id"], "output": "5"}
        _, body = await ask(input=[user("go"), content, asked, result], tools=tools, path=path)
        _, stream = await ask(input=[user("go"), content, asked, result], tools=tools, path=path, stream=True)
        return body["output"][0]["content"][0]["text"], events(stream)

    (rollout,) = play(program(steps), says("so " + call("add", a=2), "5"))
    answer, stream = rollout.extras["result"]
    assert answer == "5" and "<bos>tool: 5<eos>" in text_of(rollout)
    assert [one["delta"] for one in stream if one["type"] == "response.output_text.delta"] == ["5"]
    assert stream[-1]["type"] == "response.completed" and stream[-1]["response"]["output"][0]["role"] == "assistant"
    assert len(rollout.turn_ends) == 3 and len(rollout.strands) == 1


def test_calls_of_tools_in_anthropics_form():
    async def steps(ask):
        tools = [{"name": "add", "input_schema": {"type": "object"}}]
        options = {"tools": tools, "path": "/v1/messages", "max_tokens": 100, "system": "be brief"}
        status, body = await ask(START, **options)
        assert status == 200 and body["stop_reason"] == "tool_use", body
        result = {"type": "tool_result", "tool_use_id": body["content"][1]["id"], "content": "5"}
        later = [*START, {"role": "assistant", "content": body["content"]}, {"role": "user", "content": [result]}]
        _, stream = await ask(later, stream=True, **options)
        return body["content"], events(stream)

    (rollout,) = play(program(steps), says("so " + call("add", a=2), "5"))
    (text, use), stream = rollout.extras["result"]
    assert text == {"type": "text", "text": "so"} and use["input"] == {"a": 2}
    assert [one["type"] for one in stream][:3] == ["message_start", "content_block_start", "content_block_delta"]
    assert stream[2]["delta"]["text"] == "5" and stream[-2]["delta"]["stop_reason"] == "end_turn"
    assert not rollout.strands and "<bos>system: be brief" in TOKENIZER.decode(rollout.prompt_ids)


def test_what_a_server_would_have_to_keep_is_refused():
    """As Anthropic's client expects it, which then sends all messages; the new ones alone would be another strand."""

    async def steps(ask):
        kept = await ask(START, path="/v1/messages", max_tokens=9, thread={"type": "create"})
        await ask(START, path="/v1/messages", max_tokens=9)
        return kept, await ask(input="go", path="/v1/responses", previous_response_id="resp_1")

    (rollout,) = play(program(steps), says("1"))
    (status, body), (other, refused) = rollout.extras["result"]
    assert status == 400 and body["error"]["details"] == {"error_code": "thread_unsupported_request"}
    assert other == 400 and refused["error"]["param"] == "previous_response_id"
    assert text_of(rollout) == "1<eos>"


def test_answers_may_be_streamed():
    async def steps(ask):
        status, text = await ask(START, stream=True, stream_options={"include_usage": True})
        assert status == 200
        return events(text)

    (rollout,) = play(program(steps), says("12"))
    first, last, usage, end = rollout.extras["result"]
    assert first["choices"][0]["delta"]["content"] == "12" and last["choices"][0]["finish_reason"] == "stop"
    assert usage["usage"]["completion_tokens"] == 3 and end == "data: [DONE]"


def test_stop_texts_end_the_turn_where_they_are_complete():
    """The tokens after `Obs` are dropped; the program sees the text before it, and its next request continues."""

    async def steps(ask):
        _, body = await ask(START, stop=["Obs"])
        choice = body["choices"][0]
        said(await ask([*START, choice["message"], user("on")]))
        return choice

    (rollout,) = play(program(steps), says("do Obs: 7", "2"))
    choice = rollout.extras["result"]
    assert choice["message"]["content"] == "do " and choice["finish_reason"] == "stop"
    assert text_of(rollout) == "do Obs<eos><bos>user: on<eos><bos>assistant: 2<eos>" and not rollout.strands


def test_seats_answer_in_the_place_of_the_policy():
    """An engine, a server, which gets the request as it is, and one that is not there; none leaves a token."""

    async def server(request):
        received.append((request.path, request.headers["Authorization"], await request.json()))
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": "from afar"}}]}, status=201)

    async def steps(ask):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", server)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        ask.session.seats |= {"far": Seat(url, "gpt", "secret"), "gone": Seat("http://127.0.0.1:9/v1")}
        other = await ask(START, model="other", n=2, tools=[{"type": "function", "function": ADD}])
        far = await ask(START, model="far", temperature=0.5)
        gone = await ask(START, model="gone")
        await runner.cleanup()
        return other, far, gone, said(await ask(START))["content"]

    received = []
    other = says("so " + call("add", a=2))
    (rollout,) = play(program(steps, seats={"other": other}), says("1"))
    (status, body), far, gone, own = rollout.extras["result"]
    assert status == 200 and [one["finish_reason"] for one in body["choices"]] == ["tool_calls"] * 2
    assert far == (201, {"choices": [{"message": {"role": "assistant", "content": "from afar"}}]})
    sent = {"model": "gpt", "messages": START, "temperature": 0.5}
    assert received == [("/v1/chat/completions", "Bearer secret", sent)]
    assert gone[0] == 502 and "does not answer" in gone[1]["error"]["message"]
    assert own == "1" and text_of(rollout) == "1<eos>" and len(rollout.completion) == 1


def test_a_seat_is_a_server_or_an_engine():
    with pytest.raises(ValueError, match=r"the seat 'judge' is 'http://x'; give Seat\(url=...\)"):
        checked_seats({"judge": "http://x"})


def test_logprobs_come_with_each_token():
    class Reporting(ScriptedEngine):
        async def generate(self, request):
            return [replace(one, logprobs=[-0.5] * len(one.token_ids)) for one in await super().generate(request)]

    async def steps(ask):
        return (await ask(START, logprobs=True))[1]["choices"][0]["logprobs"]["content"]

    engine = Reporting(lambda ids, seed: [*TOKENIZER("12")["input_ids"], TOKENIZER.eos_token_id])
    (rollout,) = play(program(steps), engine)
    given = [(one["token"], one["logprob"]) for one in rollout.extras["result"]]
    assert given == [("1", -0.5), ("2", -0.5), ("<eos>", -0.5)] and rollout.logprobs == [-0.5] * 3


def test_limits_of_tokens_cut_a_turn_off():
    async def steps(ask):
        _, body = await ask(START, max_tokens=2)
        said(await ask([*START, body["choices"][0]["message"], user("on")]))
        return body["choices"][0]

    (rollout,) = play(program(steps), says("123", "2"))
    assert rollout.extras["result"]["finish_reason"] == "length"
    assert text_of(rollout).startswith("12<eos><bos>user: on") and not rollout.strands


def test_requests_at_once_are_strands():
    async def steps(ask):
        return [said(one)["content"] for one in await asyncio.gather(*(ask([user(f"{i}")]) for i in range(9)))]

    (rollout,) = play(program(steps), says("1"))
    assert rollout.extras["result"] == ["1"] * 9 and rollout.num_sampled == 18 and len(rollout.turn_ends) == 9


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/v1/chat/completions", {"messages": []}, 400, "`messages` is []; it must be a list with messages"),
        ("/v1/chat/completions", {"messages": "hi"}, 400, '`messages` is "hi"; it must be a list'),
        ("/v1/chat/completions", {"messages": [{"role": "emperor", "content": "x"}]}, 400, "emperor"),
        (
            "/v1/chat/completions",
            {"messages": [user([{"type": "image_url"}])]},
            400,
            "content[0].image_url` is null; it must be an object",
        ),
        ("/v1/chat/completions", {"messages": START, "n": 10**9}, 400, "must be 1 to 16"),
        ("/v1/chat/completions", {"messages": START, "max_tokens": -1}, 400, "at least 1"),
        (
            "/v1/chat/completions",
            {"messages": START, "response_format": {"type": "json_object"}},
            400,
            'must be "text": no grammar',
        ),
        (
            "/v1/chat/completions",
            {"messages": [user([{"type": "image_url", "image_url": {"url": PIXEL}}])]},
            400,
            "has no vision",
        ),
        ("/v1/messages", {"messages": START, "output_config": {"format": {"type": "json_schema"}}}, 400, "no grammar"),
        ("/v1/chat/completions", {"data": "{"}, 400, "not JSON"),
        ("/v1/chat/completions", {"data": "[" * 100_000}, 400, "not JSON"),
        ("/v1/chat/completions", {"data": b"\xff\xfe\x00"}, 400, "not JSON"),
        ("/v1/chat/completions", {"data": "7"}, 400, "`body` is 7, not an object"),
        ("/v1/chat/completions", {"messages": START, "key": "other"}, 401, "this key has no session"),
        ("/v1/chat/completions", {"data": b"x" * (module.MAX_BODY + 1)}, 413, "at most"),
        ("/v1/responses", {"input": [{"type": "computer_call"}]}, 400, '`input[0].type` is "computer_call"'),
        ("/v1/messages", {"messages": [user([{"type": "image"}])]}, 400, "`messages[0].content[0].source` is null"),
        ("/v1/messages", {"messages": START, "key": ""}, 401, "this key has no session"),
    ],
)
def test_requests_that_cannot_be_answered_say_why(path, body, status, reason):
    async def steps(ask):
        refused = await ask(path=path, **body)
        said(await ask(START))
        return refused

    (rollout,) = play(program(steps), says("1"))
    given, answer = rollout.extras["result"]
    assert given == status and reason in answer["error"]["message"]
    assert answer["error"].get("param") is None or f"`{answer['error']['param']}`" in answer["error"]["message"]
    assert (answer.get("type") == "error") is (path == "/v1/messages")
    assert text_of(rollout) == "1<eos>"


def test_a_full_conversation_ends_with_what_there_was():
    async def steps(ask):
        first = said(await ask(START))
        status, body = await ask([*START, first, user("x" * 50)])
        known = ("prompt is too long", "this model's maximum context length is")  # as clients look for it, not to retry
        assert all(words in body["error"]["message"] for words in known)
        return status, body["error"]["code"]

    (rollout,) = play(program(steps), says("1"), room=20)
    assert rollout.extras["result"] == (400, "context_length_exceeded")
    assert rollout.finish is FinishReason.LENGTH and len(rollout.completion_ids) == 2


def test_a_rewritten_conversation_that_is_too_long_finds_no_room():
    """As one that continues: clients know the code, and the rollout counts as cut off."""

    async def steps(ask):
        first = said(await ask(START))
        return (await ask([user("x" * 80), first, user("go")]))[1]["error"]["code"]

    (rollout,) = play(program(steps), says("1"), context=60)
    assert rollout.extras["result"] == "context_length_exceeded"
    assert rollout.finish is FinishReason.LENGTH and text_of(rollout) == "1<eos>"


def test_a_rollout_has_a_budget_of_tokens_and_of_strands():
    """10 tokens are 5 replies of two; then requests find no room, whichever they are."""

    async def steps(ask):
        return [(await ask([user(str(i))]))[0] for i in range(7)], (await ask(START, n=16))[0]

    (rollout,) = play(program(steps), says("1"), room=10)
    assert rollout.extras["result"] == ([200] * 5 + [400] * 2, 400) and rollout.num_sampled == 10
    assert rollout.finish is FinishReason.LENGTH

    async def cut(ask):  # replies of 7 tokens; the second has room for 3
        return [(await ask([user(text)]))[1]["choices"][0]["finish_reason"] for text in "ab"]

    (rollout,) = play(program(cut), says("123456"), room=10)
    assert rollout.extras["result"] == ["stop", "length"] and rollout.num_sampled == 10
    assert rollout.finish is FinishReason.LENGTH

    async def many(ask):
        return [(await ask(START, n=16))[0] for _ in range(MAX_STRANDS // 16 + 1)]

    (rollout,) = play(program(many), says("1"))
    assert rollout.extras["result"] == [200] * (MAX_STRANDS // 16) + [400]


@pytest.mark.parametrize("n", [1, 3])
def test_the_budget_is_exact_for_requests_at_once(n):
    """Four requests are sampled together, each choice with the 10 tokens that were left when they began."""

    class Together(ScriptedEngine):
        async def generate(self, request):
            arrived.extend(request.seeds)
            if len(arrived) == 4 * n:
                everyone.set()
            await everyone.wait()
            return await super().generate(request)

    arrived, everyone = [], asyncio.Event()
    engine = Together(lambda ids, seed: [*TOKENIZER("123456")["input_ids"], TOKENIZER.eos_token_id])

    async def steps(ask):
        answers = await asyncio.gather(*(ask([user(str(i))], n=n) for i in range(4)))
        full = [body["error"]["code"] == "context_length_exceeded" for status, body in answers if status == 400]
        return sum(len(body["choices"]) for status, body in answers if status == 200), full

    (rollout,) = play(program(steps), engine, room=10)
    assert rollout.num_sampled == 10 and rollout.finish is FinishReason.LENGTH
    choices, full = rollout.extras["result"]  # one of 7 tokens and one of 3; the others find no room
    assert choices == len(rollout.turn_ends) == 2 and len(full) >= 2 and all(full)


def test_seeds_do_not_depend_on_the_order_of_arrival():
    """Two conversations of two turns, the first one asked twice: its second reply has another seed."""

    class Noting(ScriptedEngine):
        async def generate(self, request):
            noted.setdefault(TOKENIZER.decode(request.prompt_ids), []).extend(request.seeds)
            return await super().generate(request)

    def steps(order):
        async def steps(ask):
            for added in ([], [{"role": "assistant", "content": "1"}, user("on")]):
                for text in order:
                    said(await ask([user(text), *added]))

        return steps

    found = []
    for order in ("aab", "baa"):
        noted = {}
        play(program(steps(order)), Noting(lambda ids, seed: [*TOKENIZER("1")["input_ids"], TOKENIZER.eos_token_id]))
        found.append(noted)
    assert found[0] == found[1] and sorted(map(len, found[0].values())) == [1, 1, 2, 2]
    assert len({seed for seeds in found[0].values() for seed in seeds}) == 6


def test_a_program_gets_the_tokens_of_the_same_loop_in_process():
    """Three turns by seeds alone, of three samples; the program asks something else in between."""

    async def rollout(row, engine):
        episode = engine.begin()
        for turn in range(3):
            assert not turn or episode.write([user("on")])
            await episode.sample()
        return episode.done()

    async def steps(ask):
        messages = START
        for _ in range(3):
            said(await ask([user("aside")]))
            messages = [*messages, said(await ask(messages)), user("on")]

    def numbers(ids, seed):
        return [*TOKENIZER(str(seed % 10**6))["input_ids"], TOKENIZER.eos_token_id]

    inside = play(
        RolloutFunction(rollout, 20, RolloutValidator(len(TOKENIZER), None)), ScriptedEngine(numbers), group=3
    )
    through = play(program(steps), ScriptedEngine(numbers), group=3)
    assert len({text_of(one) for one in inside}) == 3
    assert all(text_of(one) in text_of(other) for one, other in zip(inside, through, strict=True))


def test_a_key_opens_its_own_session_alone():
    async def rollout(row, engine):
        mine, other = AgentSession(engine), AgentSession(engine)
        async with AgentEndpoint() as endpoint, aiohttp.ClientSession() as client:
            key, closed = endpoint.open(mine), endpoint.open(other)
            endpoint.close(closed)
            for given in (key, closed):
                headers = {"x-api-key": given}
                async with client.post(f"{endpoint.url}/v1/messages", json={"messages": START}, headers=headers):
                    pass
            assert not other.asked
            async with client.get(f"{endpoint.url}/{key}/v1/models") as response:
                assert (await response.json())["data"][0]["id"] == "policy"
        return mine.rollout()

    (played,) = play(RolloutFunction(rollout, 20, RolloutValidator(len(TOKENIZER), None)), says("1"))
    assert text_of(played) == "1<eos>"


@pytest.mark.slow
def test_what_a_client_did_not_hear_is_told_it_again():
    """A client that goes away and repeats its request gets the replies that were sampled for it; another does not."""

    class Slow(ScriptedEngine):
        async def generate(self, request):
            await asyncio.sleep(0.3)
            return await super().generate(request)

    slow = Slow(lambda ids, seed: [*TOKENIZER("1")["input_ids"], TOKENIZER.eos_token_id])

    async def steps(ask):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(START, n=2), 0.1)
        await asyncio.sleep(0.4)
        one, two = await ask(START, path="/v1/messages"), await ask(START, n=2)
        return one[0], len(two[1]["choices"]), ask.session.refused

    (rollout,) = play(program(steps), slow)
    assert rollout.extras["result"] == (200, 2, None) and rollout.num_sampled == 3 * 2  # three replies of two tokens


def test_a_request_that_is_not_waited_for_leaves_nothing():
    """A program that asks twice at once and takes the first reply: the other request has no token in the rollout."""

    class OneHangs(ScriptedEngine):
        async def generate(self, request):
            if TOKENIZER.decode(request.prompt_ids).startswith(TOKENIZER.decode(hangs)):
                await asyncio.sleep(20)
            return await super().generate(request)

    hangs = TOKENIZER.apply_chat_template(START, return_dict=False)
    engine = OneHangs(lambda ids, seed: [*TOKENIZER("1")["input_ids"], TOKENIZER.eos_token_id])

    async def steps(ask):
        first = asyncio.create_task(ask(START))
        await asyncio.sleep(0.05)
        reply = said(await ask([user("other")]))
        first.cancel()
        return reply["content"]

    (rollout,) = play(program(steps), engine)
    assert rollout.extras["result"] == "1" and text_of(rollout) == "1<eos>" and rollout.turn_ends == [1]
    assert "other" in TOKENIZER.decode(rollout.prompt_ids) and not rollout.strands


def test_an_engine_that_fails_ends_the_batch():
    class Fails:
        async def generate(self, request):
            raise OSError("gone")

        def awake(self):
            return nullcontext()

    async def steps(ask):
        return await ask(START)

    with pytest.raises(OSError, match="gone"):
        play(program(steps), Fails())


@pytest.mark.parametrize("error", [KeyError("role"), IndexError("no turn"), ValueError("3 values"), TypeError("None")])
def test_an_error_of_the_session_is_not_one_of_the_body(error):
    """Of a session, a template or an engine: the answer and the session say which."""

    async def steps(ask):
        async def answer(request):
            raise error

        works, ask.session.answer = ask.session.answer, answer
        broken = await ask(START)
        ask.session.answer = works
        return broken, ask.session.refused, (await ask(START))[0]

    (rollout,) = play(program(steps), says("1"))
    (status, body), refused, then = rollout.extras["result"]
    assert (status, body["error"]["code"], then) == (500, "server_error", 200)
    assert body["error"]["message"] == refused == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({"data": b"{"}, 400),
        ({"data": b"\xff"}, 400),
        ({"data": b"[" * 100_000}, 400),
        ({"data": b"9" * 10_000}, 400),
        ({"data": b"{}", "charset": "no-such"}, 400),
        ({"data": b"x" * (module.MAX_BODY + 1)}, 413),
        ({"messages": [{"role": "user", "content": 1}]}, 400),
    ],
    ids=["no JSON", "no text", "deep", "a long number", "unknown encoding", "too large", "another type"],
)
def test_each_refusal_of_a_request_is_remembered(sent, status):
    async def steps(ask):
        refused = await ask(**sent)
        first = ask.session.refused
        await ask(data=b"not this one")
        await ask(START)
        return refused, first, ask.session.refused

    (rollout,) = play(program(steps), says("1"))
    (found, body), first, last = rollout.extras["result"]
    assert found == status and body["error"]["message"] == first == last
