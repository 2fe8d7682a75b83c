"""The chat completions server whose sessions are rollouts, asked by plain HTTP clients."""

import json

import aiohttp
import pytest

from covey.core.records import FinishReason
from covey.rollout.environments.endpoint import SESSION_HEADER, ChatEndpoint, ChatSession
from covey.rollout.tools.parsers import TOOL_PARSERS
from covey.rollout.user_functions import RolloutFunction, RolloutValidator
from tests.support.playing import TOKENIZER, call, play, says

START = [{"role": "user", "content": "go"}]


def program(steps):
    """An agent whose turns are what a program asks the endpoint for; `steps(ask)` gets the means to ask."""

    async def rollout(row, engine):
        session = ChatSession(engine, TOOL_PARSERS["hermes"])
        async with ChatEndpoint() as endpoint, aiohttp.ClientSession() as client:
            endpoint.open("mine", session)

            async def ask(messages, name="mine", **body):
                url, headers = f"{endpoint.base_url}/chat/completions", {SESSION_HEADER: name}
                body = {"model": "policy", "messages": messages, **body}
                async with client.post(url, json=body, headers=headers) as response:
                    text = await response.text()
                    return response.status, json.loads(text) if text.startswith("{") else text

            result = await steps(ask)
        if session.refused:
            raise ValueError(session.refused)
        return session.episode.done(FinishReason.LENGTH if session.full else None, result=result)

    return RolloutFunction(rollout, 20, RolloutValidator(len(TOKENIZER), None))


def said(answer):
    status, body = answer
    assert status == 200, body
    return body["choices"][0]["message"]


def test_a_conversation_is_one_episode():
    async def steps(ask):
        first = said(await ask(START))
        second = said(await ask([*START, first, {"role": "user", "content": [{"type": "text", "text": "on"}]}]))
        return first["content"], second["content"]

    (rollout,) = play(program(steps), says("1", "2"))
    assert rollout.extras["result"] == ("1", "2")
    assert TOKENIZER.decode(rollout.completion_ids) == "1<eos><bos>user: on<eos><bos>assistant: 2<eos>"
    assert rollout.num_sampled == 4 and rollout.finish is FinishReason.STOP


def test_the_same_request_again_gets_the_same_answer():
    async def steps(ask):
        return [said(await ask(START))["content"] for _ in range(3)]

    (rollout,) = play(program(steps), says("1", "2"))
    assert rollout.extras["result"] == ["1"] * 3 and len(rollout.turn_ends) == 1


def test_calls_of_tools_come_and_go_in_openais_form():
    schema = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}

    async def steps(ask):
        _, body = await ask(START, tools=[schema])
        asked = body["choices"][0]["message"]
        assert body["choices"][0]["finish_reason"] == "tool_calls"
        (one,) = asked["tool_calls"]
        result = {"role": "tool", "tool_call_id": one["id"], "content": "5"}
        answer = said(await ask([*START, asked, result], tools=[schema]))
        return one["function"], answer["content"]

    (rollout,) = play(program(steps), says("so " + call("add", a=2), "5"))
    function, answer = rollout.extras["result"]
    assert function == {"name": "add", "arguments": '{"a": 2}'} and answer == "5"
    assert rollout.completion[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2}}
    assert "<bos>tool: 5<eos>" in TOKENIZER.decode(rollout.completion_ids)


def test_answers_may_be_streamed():
    async def steps(ask):
        status, text = await ask(START, stream=True)
        assert status == 200
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        chunks = [json.loads(line) for line in lines]
        return chunks[0]["choices"][0]["delta"]["content"], chunks[1]["choices"][0]["finish_reason"]

    (rollout,) = play(program(steps), says("12"))
    assert rollout.extras["result"] == ("12", "stop")


@pytest.mark.parametrize(
    ("later", "reason"),
    [
        ([{"role": "user", "content": "other"}], "does not continue the last request"),
        ([*START, {"role": "assistant", "content": "not what was said"}, *START], "does not continue"),
        ([*START, {"role": "assistant", "content": "1"}], "does not continue"),
        (
            [*START, {"role": "assistant", "content": "1"}, *START, {"role": "assistant", "content": "2"}],
            "that the policy did not write",
        ),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "text alone, not 'image_url'"),
        ([], "`messages` must be a list"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(later, reason):
    async def steps(ask):
        await ask(START)
        status, body = await ask(later)
        return status, body["error"]["message"]

    (rollout,) = play(program(steps), says("1"))
    assert rollout.finish is FinishReason.ERROR and reason in rollout.error


def test_a_full_conversation_ends_with_what_there_was():
    async def steps(ask):
        first = said(await ask(START))
        status, body = await ask([*START, first, {"role": "user", "content": "x" * 50}])
        return status, body["error"]["code"]

    (rollout,) = play(program(steps), says("1"), room=20)
    assert rollout.extras["result"] == (400, "context_length_exceeded")
    assert rollout.finish is FinishReason.LENGTH and len(rollout.completion_ids) == 2


def test_strangers_get_nothing():
    async def steps(ask):
        said(await ask(START))
        return (await ask(START, name="other"))[0]

    (rollout,) = play(program(steps), says("1"))
    assert rollout.extras["result"] == 404


def test_several_completions_of_one_request_are_refused():
    async def steps(ask):
        return (await ask(START, n=2))[1]["error"]["message"]

    (rollout,) = play(program(steps), says("1"))
    assert "n must be 1" in rollout.error


def test_an_engine_that_fails_ends_the_batch():
    class Fails:
        async def generate(self, request):
            raise OSError("gone")

        def awake(self):
            from contextlib import nullcontext

            return nullcontext()

    async def steps(ask):
        return await ask(START)

    with pytest.raises(OSError, match="gone"):
        play(program(steps), Fails())
