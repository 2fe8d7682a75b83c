"""A server in a process that can be killed, and a program that asks over HTTP and waits as the official client does."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from covey.tinker.wire import ForwardBackward, request_of
from tests.support import tinkering
from tests.support.launching import free_port

ROOT = Path(__file__).resolve().parents[2]
SERVER = ROOT / "tests/tinker/programs/server.py"
PROTOBUF = "application/x-protobuf"


class Mortal:
    """A server that is started again whenever it is killed."""

    def __init__(self, process, port):
        self._process, self.port = process, port
        self.url = f"http://127.0.0.1:{port}"
        self.pid = 0
        self.follow()

    def follow(self):
        """Learn the id of the next process."""
        self.pid = int(self._process.stdout.readline())

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        self.follow()


@contextmanager
def mortal(model, folder, *durable):
    """A server of a model that can be killed, within the context."""
    port = free_port()
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SERVER), str(model), str(port), str(folder), *durable]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        server = Mortal(process, port)
        try:
            yield server
        finally:
            process.kill()
            with suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGKILL)


class Program:
    """Requests over HTTP; one that is not answered is sent again, as often as it takes."""

    def __init__(self, port, seconds=60.0):
        self.port, self.seconds = port, seconds

    def once(self, method, path, body=None, content="application/json"):
        """Status and answer; OSError or HTTPException if the server is not there or dies."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.seconds)
        try:
            headers = {"X-API-Key": "tml-test", "Content-Type": content}
            data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
            connection.request(method, f"/api/v1/{path}", data if method == "POST" else None, headers)
            response = connection.getresponse()
            answer = response.read()
            return response.status, json.loads(answer) if response.headers.get_content_type() != PROTOBUF else answer
        finally:
            connection.close()

    def ask(self, method, path, body=None, content="application/json"):
        """The answer, whatever happens to the server meanwhile."""
        until = time.monotonic() + self.seconds
        while True:
            try:
                status, answer = self.once(method, path, body, content)
                if status == 200:
                    return answer
                if status not in (408, 429) and status < 500:
                    raise AssertionError(f"{path}: {status} {answer}")
            except (OSError, http.client.HTTPException):
                time.sleep(0.02)
            if time.monotonic() > until:
                raise TimeoutError(path)

    def post(self, path, /, **body):
        return self.ask("POST", path, body)

    def result(self, acknowledgement):
        return self.ask("POST", "retrieve_future", {"request_id": acknowledgement["request_id"]})

    def session(self):
        return self.post("create_session", sdk_version="0.38.0")["session_id"]

    def client(self, session, rank=4):
        asked = {"session_id": session, "model_seq_id": 0, "base_model": tinkering.NAME}
        return self.result(self.post("create_model", **asked, lora_config={"rank": rank, "seed": 1}))["model_id"]

    def forward_backward(self, model, number, data):
        body = request_of(ForwardBackward(model, number, data, "cross_entropy"))
        return self.ask("POST", "forward_backward", body, PROTOBUF)

    def step(self, model, number):
        return self.post("optim_step", model_id=model, seq_id=number, adam_params={"learning_rate": 0.01, "eps": 1e-8})


def adapter_bytes(folder, name):
    """The file of a saved adapter, of the one run that has it."""
    (file,) = Path(folder).glob(f"*/weights/{name}/adapter_model.safetensors")
    return np.frombuffer(file.read_bytes(), np.uint8)
