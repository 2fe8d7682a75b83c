"""The HTTP side: keys, strangers, bodies that are none, long polls and downloads."""

import asyncio
import json
import random

import pytest
from aiohttp import ClientSession, FormData

from covey.tinker import server as server_module
from covey.tinker.server import TinkerServer
from tests.support import tinkering
from tests.tinker.test_wire import BODIES

KEY = {"X-API-Key": "tml-any"}


def ask(folder, program, key=None, **settings):
    """Run a coroutine function of a client session, whose paths are those of the API."""

    async def main(one):
        async with TinkerServer(one, key=key) as server, ClientSession(f"{server.url}/api/v1/", headers=KEY) as http:
            return await program(http, server)

    with tinkering.service(folder, **settings) as one:
        return asyncio.run(main(one))


async def post(http, path, body, **options):
    async with http.post(path, json=body, **options) as response:
        return response.status, await response.json()


def test_a_program_trains_over_http(tmp_path):
    async def program(http, server):
        status, flags = await post(http, "client/config", {"sdk_version": "0.38.0"})
        _, session = await post(http, "create_session", {"sdk_version": "0.99.0", "tags": [], "type": "create_session"})
        created = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": tinkering.NAME}
        _, promise = await post(http, "create_model", created)
        _, model = await post(http, "retrieve_future", promise)
        body = bytes.fromhex(BODIES["0.25.0"]).replace(
            b"\x0a\x09s:train:0", b"\x0a%c" % len(model["model_id"]) + model["model_id"].encode()
        )
        async with http.post(
            "forward_backward", data=body, headers={"Content-Type": server_module.PROTOBUF}
        ) as response:
            promise = await response.json()
        await post(http, "optim_step", {"model_id": model["model_id"], "seq_id": 1, "adam_params": {}})
        await post(http, "optim_step", {"model_id": model["model_id"], "seq_id": 2, "adam_params": {}})
        failed = await post(http, "retrieve_future", promise)
        async with http.get("get_server_capabilities") as response:
            served = await response.json()
        async with http.get("training_runs/" + model["model_id"]) as response:
            run = await response.json()
        ended = await post(http, f"sessions/{session['session_id']}/finish", {"reason": {"type": "success"}})
        return status, flags, session, failed, served, run, ended

    status, flags, session, failed, served, run, ended = ask(tmp_path, program)
    assert (status, flags) == (200, {}) and "0.99.0" in session["info_message"]
    assert (
        failed[0] == 200 and failed[1]["category"] == "user"
    )  # its settings fit no loss, and its tokens not this model
    assert served["supported_models"][0]["model_name"] == tinkering.NAME
    assert run["lora_rank"] == 32 and ended == (200, {})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"X-API-Key": ""}, 401),
        ({"X-API-Key": "sk-1"}, 401),
        ({"X-API-Key": "tml-any", "Origin": "http://127.0.0.1"}, 403),
        ({"X-API-Key": "tml-any", "Host": "evil.example:80"}, 403),
        ({"X-API-Key": "tml-any"}, 200),
    ],
)
def test_strangers_are_refused(tmp_path, headers, status):
    async def program(http, server):
        return await post(http, "client/config", {}, headers=headers)

    answer = ask(tmp_path, program)
    assert answer[0] == status and (status == 200 or answer[1]["detail"])


def test_a_server_with_a_key_takes_no_other(tmp_path):
    async def program(http, server):
        right = {"X-API-Key": "tml-secret"}
        return [(await post(http, "client/config", {}, headers=one))[0] for one in (KEY, right)]

    assert ask(tmp_path, program, key="tml-secret") == [401, 200]


def test_a_result_that_is_not_there_yet_is_asked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "POLL", 0.05)

    async def program(http, server):
        _, session = await post(http, "create_session", {})
        created = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": tinkering.NAME}
        _, promise = await post(http, "create_model", created)
        _, model = await post(http, "retrieve_future", promise)
        step = {"model_id": model["model_id"], "seq_id": 2, "adam_params": {}}  # waits for the operation before it
        _, promise = await post(http, "optim_step", step)
        polls = await asyncio.gather(*(post(http, "retrieve_future", promise) for _ in range(200)))
        return {status for status, _ in polls}, await post(http, "retrieve_future", {"request_id": "r"})

    waiting, unknown = ask(tmp_path, program)
    assert waiting == {408}
    assert unknown[0] == 404 and "resume" in unknown[1]["detail"]


def test_nonsense_is_answered_and_the_server_lives(tmp_path):
    chance = random.Random(1)
    paths = [
        "create_model",
        "forward_backward",
        "asample",
        "retrieve_future",
        "sessions/x/finish",
        "nowhere",
        "../../x",
    ]

    async def program(http, server):
        found = set()
        for number in range(150):
            data = chance.randbytes(chance.randrange(60)) if number % 3 else json.dumps([1]).encode()
            kind = chance.choice(["application/json", server_module.PROTOBUF])
            async with http.post(chance.choice(paths), data=data, headers={"Content-Type": kind}) as response:
                found.add(response.status)
                assert response.status == 200 or "detail" in await response.json()
        form = FormData({"a": "b"})
        async with http.post("asample", data=form) as response:
            assert response.status == 400
        async with http.get("samplers/a:b") as response:
            assert response.status == 404
        assert (await post(http, "client/config", {}))[0] == 200
        return found

    assert ask(tmp_path, program) <= {200, 400, 404}


def test_a_body_may_be_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_BODY", 1000)

    async def program(http, server):
        return await post(http, "telemetry", {"events": "x" * 2000})

    status, told = ask(tmp_path, program)
    assert status == 413 and "1,000" in told["detail"]


def test_files_of_a_state_are_downloaded_without_the_key(tmp_path):
    async def program(http, server):
        client = tinkering.Client(server.service)
        model = await client.create()
        await client.save(model, "a", "save_weights_external")
        async with http.get(f"training_runs/{model}/checkpoints/external_weights/a/external_weights_urls") as response:
            urls = (await response.json())["urls"]
        async with ClientSession() as stranger:
            async with stranger.get(urls["adapter_config.json"]) as response:
                config = json.loads(await response.text())
            async with stranger.get(urls["adapter_config.json"].replace("adapter_config", "checkpoint")) as response:
                other = response.status
        async with http.delete(f"training_runs/{model}/checkpoints/external_weights/a") as response:
            deleted = response.status
        async with http.put(f"training_runs/{model}/checkpoints/weights/b/ttl", json={}) as response:
            return config, other, deleted, response.status

    config, *statuses = ask(tmp_path, program)
    assert config["r"] == 4 and config["peft_type"] == "LORA" and statuses == [404, 200, 404]
