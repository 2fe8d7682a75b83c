"""Servers that are killed at random moments: nothing that was said to be saved is lost, nothing is half there."""

import http.client
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from tests.support.tinker_wire import Program, adapter_bytes, mortal
from tests.support.tinkering import datum, tokens

DATA = [datum(tokens(size, size)) for size in (9, 17, 12)]
KILLS = 20

pytestmark = pytest.mark.slow


def save(program, model, number, name, **options):
    """Save a state with one request after the other, none of which is repeated; its path."""
    promise = program.once("POST", "save_weights", {"model_id": model, "seq_id": number, "path": name, **options})[1]
    status, answer = program.once("POST", "retrieve_future", promise)
    assert status == 200
    return answer["path"]


def test_states_survive_kills_while_they_are_saved(tiny_folder, tmp_path):
    chance, seconds = random.Random(0), 0.0
    saved = set()
    with mortal(tiny_folder, tmp_path) as server:
        program = Program(server.port)
        for kill in range(KILLS):
            model = program.client(program.session())
            program.result(program.forward_backward(model, 1, DATA))
            program.result(program.step(model, 2))
            first = 3
            if not seconds:  # of a save, on this machine
                began = time.monotonic()
                saved |= {save(program, model, number, f"first-{number}") for number in (3, 4, 5)}
                seconds, first = (time.monotonic() - began) / 3, 6
            killer = threading.Timer(chance.uniform(0.0, 4 * seconds), server.kill)
            killer.start()
            overwrite = bool(kill % 2)
            with suppress(OSError, http.client.HTTPException, AssertionError, KeyError, ValueError):
                for number in range(first, 500):  # one state after another, until the server dies
                    name = "x" if overwrite else f"s{kill}-{number}"
                    saved.add(save(program, model, number, name, overwrite=overwrite))
            killer.join()
            listed = {one["tinker_path"] for one in program.ask("GET", "checkpoints?limit=1000")["checkpoints"]}
            assert saved <= listed
            session, mine = program.session(), f"tinker://{model}/weights/"
            for number, path in enumerate(sorted(one for one in listed if one.startswith(mine))):
                asked = {"session_id": session, "model_seq_id": number, "path": path, "optimizer": True}
                loaded = program.result(program.post("load_weights", **asked))
                assert loaded["model_id"]
                program.result(program.post("unload_model", model_id=loaded["model_id"]))
            assert not [*tmp_path.glob("*/*/.new-*"), *tmp_path.glob("*/*/.old-*")]


def train(program, steps=10):
    """A run that samples, trains and saves; what it was told."""
    session = program.session()
    model, told, number = program.client(session), [], 0
    for step in range(steps):
        futures = []
        for part in (DATA[:1], DATA[1:]):
            number += 1
            futures.append(program.forward_backward(model, number, part))
        number += 1
        futures.append(program.step(model, number))
        number += 1
        asked = {"model_id": model, "seq_id": number, "sampling_session_seq_id": step}
        sampler = program.result(program.post("save_weights_for_sampler", **asked))["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens(7, step)}]}
        asked = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 4, "prompt": prompt}
        futures.append(program.post("asample", **asked, sampling_params={"max_tokens": 20}))
        told += [program.result(one) for one in futures]
    number += 1
    path = program.result(program.post("save_weights", model_id=model, seq_id=number, path="end"))["path"]
    return told, path.partition("/weights/")[2]


def test_a_program_does_not_notice_that_a_durable_server_is_killed(tiny_folder, tmp_path):
    with mortal(tiny_folder, tmp_path / "whole") as server:
        began = time.monotonic()
        expected, name = train(Program(server.port))
        seconds = time.monotonic() - began
    chance, kills = random.Random(1), 0
    done = threading.Event()
    with mortal(tiny_folder, tmp_path / "killed", "durable") as server:

        def kill():
            nonlocal kills
            while kills < KILLS and not done.wait(chance.uniform(0.2, 1.0) * max(0.3, seconds / 10)):
                server.kill()
                kills += 1

        killer = threading.Thread(target=kill)
        killer.start()
        told, _ = train(Program(server.port, 300.0))
        done.set()
        killer.join()
    assert kills > 0 and told == expected
    assert np.array_equal(adapter_bytes(tmp_path / "whole", name), adapter_bytes(tmp_path / "killed", name))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_is_asked_to_end_saves_and_says_where(tiny_folder, tmp_path, number):
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "covey.cli.main", "tinker-serve", "--model", tiny_folder, "--as", "tiny"),
            *("--checkpoints", str(tmp_path), "--port", "0", "--log", str(tmp_path / "log")),
        ],
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            lines = []
            while "TINKER_BASE_URL" not in (line := server.stderr.readline()):
                assert line
            program = Program(int(line.strip().rpartition(":")[2]))
            model = program.client(program.session())
            program.result(program.forward_backward(model, 1, DATA))
            program.result(program.step(model, 2))
            server.send_signal(number)
            lines = server.stderr.read()
            assert server.wait(60) == (130 if number == signal.SIGINT else 143)
        finally:
            server.kill()
    path = f"tinker://{model}/weights/unsaved-000001"
    (folder,) = tmp_path.glob("*/weights/unsaved-000001")
    assert path in lines and str(folder) in lines
    assert (folder / "optimizer.safetensors").exists() and (folder / "covey_manifest.json").exists()
