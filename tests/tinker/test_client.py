"""The official client, unmodified and in environments of its own, as a program has it: `make test-tinker`."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from covey.tinker.build import serve
from covey.tinker.server import TinkerServer, served
from tests.support import tinkering
from tests.support.launching import free_port
from tests.support.tinker_wire import adapter_bytes, mortal

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).with_name("programs") / "client.py"
PYTHONS = {  # the oldest client that is supported, and the newest
    "oldest": os.environ.get("COVEY_TINKER_OLDEST", str(ROOT / ".venv-tinker-oldest/bin/python")),
    "newest": os.environ.get("COVEY_TINKER_NEWEST", str(ROOT / ".venv-tinker-newest/bin/python")),
}

pytestmark = [
    pytest.mark.tinker,
    pytest.mark.skipif(
        not all(Path(one).exists() for one in PYTHONS.values()), reason="`make test-tinker` installs the clients"
    ),
]


@pytest.fixture(params=PYTHONS)
def python(request):
    return PYTHONS[request.param]


def program(python, url, *words):
    """Lines that a program of the client prints."""
    added = {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-test", "TINKER_TELEMETRY": "0"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | added
    command = [python, "-W", "ignore", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def run(python, url, name, *arguments):
    """The finding of a function of `programs/client.py`."""
    return json.loads(program(python, url, str(PROGRAMS), name, *arguments)[-1])


@contextmanager
def serving(folder, **settings):
    with tinkering.service(folder, **settings) as service, served(service) as url:
        yield url


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("states"), max_clients=100) as url:
        yield url


def test_every_call(python, url):
    found = run(python, url, "every_call")
    assert found["rank"] == 8 and found["grad_norm"] > 0 and found["lengths"] == [4, 4] and found["frozen"]
    assert found["loss"] == pytest.approx(-sum(map(sum, found["first"])), rel=1e-5)
    assert found["prompt"][0] is None
    assert found["prompt"][1:] == pytest.approx(found["now"][0], abs=1e-5)  # the sampler's weights are the client's
    assert found["resumed"] == found["fresh"] == found["end"] != found["now"]
    assert found["from_path"][1:] == pytest.approx(found["end"][0], abs=1e-5)
    assert found["base"][1:] == pytest.approx(found["first"][0], abs=1e-5)  # an adapter begins without an effect


def test_losses_on_samples(python, url):
    found = run(python, url, "losses")
    assert len(found) == 4 and all(norm > 0 for _, norm in found.values())


def test_a_loss_of_ones_own_has_the_gradient_of_the_built_in_one(python, url):
    found = run(python, url, "custom")
    assert found["metrics"]["mine"] == 1.0
    assert found["norms"][0] == pytest.approx(found["norms"][1], rel=1e-4)
    for own, built_in in zip(found["own"], found["built_in"], strict=True):
        assert own == pytest.approx(built_in, abs=1e-3)


def test_chunks_of_two_datums_make_one_step(python, url, tmp_path):
    whole = run(python, url, "steps")
    with serving(tmp_path, client_config={"fwdbwd_max_chunk_len": 2}) as other:
        parts = run(python, other, "steps")
    assert parts["outputs"] == whole["outputs"] == 5
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    for one, other in zip(parts["end"], whole["end"], strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_an_answer_that_is_lost_repeats_nothing(python, url, tmp_path, monkeypatch):
    lost = []

    async def lose(self, request, *, handle=TinkerServer._forward_backward):
        answer = await handle(self, request)
        if len(lost) < 2:
            lost.append(request)
            await asyncio.sleep(0.3)  # it is executed
            request.transport.close()
        return answer

    whole = run(python, url, "steps")
    monkeypatch.setattr(TinkerServer, "_forward_backward", lose)
    with serving(tmp_path) as other:
        found = run(python, other, "steps")
    assert len(lost) == 2 and found == whole


def test_targets_of_each_position_dense_and_sparse(python, url):
    found = run(python, url, "many_targets")
    assert found["shapes"] == [[4, 2], [4, 2]] and found["dense"] == found["sparse"]
    # each weighted sum is that of the two targets by themselves
    assert found["loss"] == pytest.approx(found["loss_of_each"], rel=1e-5)
    assert found["norms"][0] == pytest.approx(found["norms"][1], rel=1e-5)


def test_failures_are_told_in_words(python, url):
    found = run(python, url, "failures")
    assert "loss_fn=importance_sampling" in found["loss"]
    assert "forward_backward 1 failed" in found["step"]
    assert "datum 0" in found["datum"] and "500" in found["datum"]
    assert "was not run" in found["again"]
    assert "no forward_backward" in found["empty"]
    assert "--as other" in found["model"]
    assert "--max-rank" in found["rank"]
    assert "stop" in found["stop"]


def test_a_server_that_is_killed_keeps_what_was_saved(python, tiny_folder, tmp_path):
    port = free_port()
    words = ["--model", tiny_folder, "--as", "tiny", "--port", str(port), "--checkpoints", str(tmp_path / "states")]
    command = [sys.executable, "-m", "covey.cli.main", "tinker-serve", *words]
    url = f"http://127.0.0.1:{port}"

    def start():
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        asked = urllib.request.Request(f"{url}/api/v1/healthz", headers={"X-API-Key": "tml-x"})
        for _ in range(600):
            try:
                urllib.request.urlopen(asked)
                return process
            except OSError:
                time.sleep(0.1)
        raise TimeoutError("the server does not start")

    process = start()
    try:
        saved = run(python, url, "save", "x")
        process.send_signal(signal.SIGKILL)
        process.wait()
        process = start()
        assert run(python, url, "resume", saved["path"])["end"] == saved["end"]
    finally:
        process.kill()
        process.wait()


def test_a_durable_server_is_killed_and_the_client_notices_nothing(python, tiny_folder, tmp_path):
    with mortal(tiny_folder, tmp_path / "whole") as server:
        whole = run(python, server.url, "long")
    done, kills = threading.Event(), []
    with mortal(tiny_folder, tmp_path / "killed", "durable") as server:

        def kill():
            while len(kills) < 5 and not done.wait(0.5):
                if list((tmp_path / "killed").glob("*/run.json")):  # the program has begun
                    server.kill()
                    kills.append(time.monotonic())

        killer = threading.Thread(target=kill)
        killer.start()
        killed = run(python, server.url, "long")
        done.set()
        killer.join()
    assert kills and killed["found"] == whole["found"] and killed["end"] == whole["end"]
    name = whole["path"].rpartition("/")[2]
    one, other = (adapter_bytes(tmp_path / folder, name) for folder in ("whole", "killed"))
    assert np.array_equal(one, other)


def test_the_example_takes_a_step(python, tiny_folder, tmp_path):
    words = ["--max_steps", "1", "--prompts", "2", "--group", "2", "--held_out", "2", "--max_tokens", "4"]
    with serve(tiny_folder, checkpoints=tmp_path) as url:
        lines = program(python, url, str(ROOT / "examples/tinker/sums.py"), "--model", tiny_folder, *words)
    assert [line.partition(":")[0] for line in lines] == ["before", "step 1", "after", "tinker"]
    assert list(tmp_path.glob("*/weights/sums"))
