"""The HTTP side: keys, strangers, bodies that are none, long polls and downloads."""

import asyncio
import gzip
import json
import random
from contextlib import suppress

import pytest
from aiohttp import ClientSession, FormData

from covey.tinker import server as server_module
from covey.tinker.server import TinkerServer
from covey.tinker.wire import ForwardBackward, request_of
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


DEEP = "[" * 900 + "]" * 900
VALUES = [
    *(None, True, False, -1, 0, 1, 3, 0.5, 1e308, -1e308, 10**18, 10**400, -(10**400), float("nan"), float("inf")),
    *("", "x", "²", "1²", "9" * 5000, "\ud800", "\x00\n\x1b[2J", "../..", "tinker://a/weights/b", "dimuon", "snapshot"),
    *([], [1], [[]], [10**400], ["x"], [-1, 2**40], {}, {"type": "x"}, {"chunks": [{"tokens": [5, 6]}]}),
    {"rank": 10**30, "seed": 2**70, "train_mlp": "no"},
    {"max_tokens": 2, "stop": [2**63], "temperature": 1e-300, "top_k": 2**62, "seed": -(2**62)},
    {"max_tokens": 1, "stop": ["\ud800"], "top_p": 1e-300},
    {"learning_rate": 10**400, "beta1": -1, "eps": "x"},
    {"data": [1, 2], "shape": [1, 2], "sparse_crow_indices": [0, 2**40], "sparse_col_indices": [0, 1]},
    {"data": [[1]], "shape": ["1", 1]},
]
NAMES = [
    *("session_id", "model_id", "seq_id", "path", "user_metadata", "lora_config", "base_model", "rank", "kind", "type"),
    *("model_seq_id", "sampling_session_id", "sampling_session_seq_id", "model_path", "optimizer", "request_id"),
    *("num_samples", "prompt", "sampling_params", "prompt_logprobs", "topk_prompt_logprobs", "target_prompt_logprobs"),
    *("adam_params", "optimizer_params", "ttl_seconds", "overwrite", "tinker_path", "sdk_version", "tags"),
    *("prompt_logprobs_last_n", "topk_sample_logprobs", "prompt_alt_tokens_k", "age_encryption_recipients"),
]


@pytest.mark.slow
def test_no_request_makes_the_server_fail(tmp_path):
    """Every route with bodies, paths, queries and headers that make no sense: refused or answered, and never a 5xx."""
    chance = random.Random(2)

    async def program(http, server):
        client = tinkering.Client(server.service)
        model, sampler = await client.create(), await client.sampling()
        saved = (await client.save(model, "a"))["path"]
        known = {
            "session_id": client.session,
            "model_id": model,
            "sampling_session_id": sampler,
            "base_model": tinkering.NAME,
            "model_path": saved,
            "tinker_path": saved,
            "request_id": f"{model}/0",
        }
        number, found = 100, []

        def body():
            nonlocal number
            number += 1
            whole = {"seq_id": number, "model_seq_id": number, "sampling_session_seq_id": number, **known}
            whole |= {"prompt": {"chunks": [{"tokens": [5, 6]}]}, "sampling_params": {"max_tokens": 1}}
            kept = {name: value for name, value in whole.items() if chance.random() < 0.9}
            return kept | {name: chance.choice(VALUES) for name in chance.sample(NAMES, chance.randrange(4))}

        def place(path):
            words = ["x", "%ff", "%00", "..", "%2e%2e%2f", "a:b", model, client.session, "weights/a", "²", "%ed%a0%80"]
            while "{" in path:
                before, _, rest = path.partition("{")
                path = before + chance.choice(words) + rest.partition("}")[2].removeprefix("+}").removeprefix("}")
            return path

        routes = [(one.method, one.resource.canonical) for one in server._runner.app.router.routes()]
        assert len(routes) > 25
        for method, path in routes * 12:
            if path.endswith("finish"):
                path = "/api/v1/sessions/²%00/finish"
            data = (
                json.dumps(body()).encode() if chance.random() < 0.9 else chance.choice([DEEP.encode(), b"\xff\xfe["])
            )
            if path.endswith("unload_model"):
                data = b'{"model_id": 5}'
            headers = {"Content-Type": chance.choice(["application/json", server_module.PROTOBUF, "x", "text/\xe9"])}
            query = chance.choice(["", "?limit=²&offset=1", f"?limit={'9' * 5000}", "?limit=-1", "?offset=1e9&limit=0"])
            verb = chance.choice(["GET", "POST", "PUT", "HEAD"]) if method == "*" else method
            url = f"{server.url}{place(path)}{query}"
            async with http.request(verb, url, data=data, headers=headers) as response:
                found.append((response.status, verb, path, await response.read()))
        # whatever was accepted ends, with a result or a failure that is told
        for promise in list(server.service.promises._by_id):
            if not promise.startswith(f"{model}/"):
                async with http.post("retrieve_future", json={"request_id": promise}) as response:
                    assert response.status == 200
        assert (await post(http, "client/config", {}))[0] == 200
        return found

    with_failures = [one for one in ask(tmp_path, program, patience=0.1) if one[0] >= 500]
    assert with_failures == []


async def raw(server, data, *, more=b""):
    """The first line of the answer to bytes; empty if there is none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    writer.write(data)
    if more:
        await asyncio.sleep(0.05)
        writer.write(more)
    try:
        return await asyncio.wait_for(reader.readline(), 10)
    finally:
        writer.close()


HEAD = b"POST /api/v1/client/config HTTP/1.1\r\nHost: 127.0.0.1:1\r\n"
HALVES = {
    "a key of other bytes": (HEAD + b"X-API-Key: tml-\xff\xfe\r\nContent-Length: 2\r\n\r\n{}", b"", (401,)),
    "no host": (b"GET /api/v1/healthz HTTP/1.0\r\nX-API-Key: tml-secret\r\n\r\n", b"", (200, 403)),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"", (400,)),
    "a wrong length": (HEAD + b"X-API-Key: tml-secret\r\nContent-Length: x\r\n\r\n", b"", (400,)),
    "wrong chunks": (HEAD + b"X-API-Key: tml-secret\r\nTransfer-Encoding: chunked\r\n\r\n", b"zz\r\n", (400, 408)),
    "no gzip": (HEAD + b"X-API-Key: tml-secret\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", b"", (400,)),
    "half a body": (HEAD + b"X-API-Key: tml-secret\r\nContent-Length: 99\r\n\r\n{", b"", (408,)),
    "an expectation": (HEAD + b"X-API-Key: tml-secret\r\nExpect: x\r\nContent-Length: 2\r\n\r\n{}", b"", (417,)),
    "two keys": (HEAD + b"X-API-Key: tml-x\r\nX-API-Key: tml-secret\r\nContent-Length: 2\r\n\r\n{}", b"", (401,)),
    "two lengths": (HEAD + b"X-API-Key: tml-secret\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{} ", b"", (400,)),
    "two ends": (
        HEAD + b"X-API-Key: tml-secret\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"",
        (400,),
    ),
    "a length of 2**70": (HEAD + b"X-API-Key: tml-secret\r\nContent-Length: %d\r\n\r\n{}" % 2**70, b"", (400, 413)),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"", (400,)),
    "another server in its first line": (
        HEAD.replace(b" /api", b" http://evil.example/api") + b"X-API-Key: tml-secret\r\nContent-Length: 2\r\n\r\n{}",
        b"",
        (403,),
    ),
    "a header that does not end": (HEAD + b"X-API-Key: tml-secret\r\nX: " + b"x" * 100_000, b"", (400,)),
}


@pytest.mark.parametrize("half", HALVES)
def test_what_is_half_a_request_is_refused(tmp_path, monkeypatch, half):
    if 408 in HALVES[half][2]:
        monkeypatch.setattr(server_module, "READ", 0.2)
    data, more, statuses = HALVES[half]

    async def program(http, server):
        line = await raw(server, data, more=more)
        return line, await post(http, "client/config", {}, headers={"X-API-Key": "tml-secret"})

    line, after = ask(tmp_path, program, key="tml-secret")
    assert int(line.split()[1]) in statuses and after[0] == 200


def test_connections_that_say_nothing_hold_up_nobody(tmp_path):
    async def program(http, server):
        port = int(server.url.rpartition(":")[2])
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
        for _, writer in silent[::2]:
            writer.write(HEAD)
        answer = await post(http, "client/config", {})
        for _, writer in silent:
            writer.close()
        return answer

    assert ask(tmp_path, program) == (200, {})


def test_a_large_request_is_read_while_others_are_answered(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "LARGE", 100)

    async def program(http, server):
        client = tinkering.Client(server.service)
        model = await client.create()
        body = request_of(ForwardBackward(model, 1, [tinkering.datum(list(range(4, 60)))], "cross_entropy"))
        headers = {"Content-Type": server_module.PROTOBUF}
        async with http.post("forward_backward", data=body, headers=headers) as response:
            promise = await response.json()
        async with http.post("forward_backward", data=body[:-3], headers=headers) as response:
            return await client.result(promise), response.status

    scored, status = ask(tmp_path, program)
    assert isinstance(scored, bytes) and status == 400


def test_a_body_may_be_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_BODY", 1000)

    async def program(http, server):
        return await post(http, "telemetry", {"events": "x" * 2000})

    status, told = ask(tmp_path, program)
    assert status == 413 and "1,000" in told["detail"]


@pytest.mark.slow
def test_a_small_body_that_grows_when_it_is_unpacked_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_BODY", 1 << 20)
    packed = gzip.compress(b" " * (32 << 20))
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}

    async def program(http, server):
        async with http.post("telemetry", data=packed, headers=headers) as response:
            refused = response.status
        async with ClientSession(f"{server.url}/api/v1/", headers=KEY) as other:
            return refused, await post(other, "client/config", {})

    assert len(packed) < server_module.MAX_BODY and ask(tmp_path, program) == (413, (200, {}))


def test_a_program_that_reads_no_answer_holds_up_nobody(tmp_path):
    one = b"GET /api/v1/get_server_capabilities HTTP/1.1\r\nHost: 127.0.0.1:1\r\nX-API-Key: tml-any\r\n\r\n"

    async def program(http, server):
        _, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]), limit=1)
        writer.write(one * 20_000)  # the answers are megabytes more than a connection holds
        answers = [await post(http, "client/config", {}) for _ in range(20)]
        writer.transport.abort()
        return answers

    assert ask(tmp_path, program) == [(200, {})] * 20


def test_questions_that_are_broken_off_leave_the_operation_and_its_result(tmp_path):
    data = [tinkering.datum(tinkering.tokens(100, number)) for number in range(4)]

    async def program(http, server):
        client = tinkering.Client(server.service)
        model = await client.create()
        promise = client.forward_backward(model, data)

        async def ask_for_it():
            async with http.post("retrieve_future", json=promise) as response:
                await response.read()  # a number or an answer, if the operation was fast

        for _ in range(20):
            with suppress(TimeoutError):
                await asyncio.wait_for(ask_for_it(), 0.002)
        await post(http, "cancel_future", promise)  # samples can be cancelled, and training cannot
        return await client.result(promise), await client.result(client.step(model))

    scored, step = ask(tmp_path, program)
    assert isinstance(scored, bytes) and step["metrics"]["grad_norm"] > 0


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
