"""Starting a server and waiting for it, with small real servers."""

import gc
import socket
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from covey.engines.servers.server_process import LaunchFailed, ServerProcess, answers, free_port

SERVER = """
import http.server, os, sys, time
print("loading", flush=True)
time.sleep(float(os.environ.get("SLOW", 0)))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if self.path == "/never" else 200)
        self.end_headers()
        self.wfile.write(os.environ.get("COLOUR", "").encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def server(tmp_path: Path):
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    made: list[ServerProcess] = []

    def make(path: str = "/health", deadline: float = 30.0, **options) -> tuple[ServerProcess, str]:
        url = f"http://127.0.0.1:{(port := free_port())}"
        command = [sys.executable, str(script), str(port)]
        one = ServerProcess(
            command, url + path, log_path=tmp_path / "logs" / f"{port}.log", deadline=deadline, **options
        )
        made.append(one)
        return one, url

    yield make
    for one in made:
        one.stop()


def test_it_answers_within_the_context_and_is_gone_after_it(server):
    one, url = server(env={"COLOUR": "brown"})
    with one:
        assert one.running
        assert urllib.request.urlopen(url).read() == b"brown"
        assert "loading" in one.log_tail()
    assert not one.running
    assert not answers(url)


def test_its_environment_is_not_shown(server):
    one, _ = server(env={"API_KEY": "secret-key"})
    assert "secret-key" not in repr(one)


def test_it_can_be_started_again_at_the_same_address(server):
    one, url = server()
    for _ in range(2):
        with one.start():
            assert answers(url)
        assert not answers(url)


def test_starting_twice_is_refused(server):
    one, _ = server()
    with one, pytest.raises(RuntimeError, match=r"runs already \(process \d+\); stop it"):
        one.start()


@pytest.mark.slow
def test_a_server_that_is_late_is_stopped_and_its_log_shown(server):
    one, _ = server("/never", deadline=3.0, name="the 503 server")
    with pytest.raises(LaunchFailed, match=r"(?s)the 503 server was not ready within 3 seconds.*loading.*"):
        one.start()
    assert not one.running


def test_a_server_that_ends_early_fails_with_its_log(tmp_path: Path):
    code = "print('line\\n' * 1000); raise MemoryError('no room for the cache')"
    one = ServerProcess([sys.executable, "-c", code], "http://127.0.0.1:9", log_path=tmp_path / "log", deadline=600)
    started = time.monotonic()
    with pytest.raises(LaunchFailed, match=r"(?s)ended with exit status 1 before.*no room for the cache") as caught:
        one.start()
    assert time.monotonic() - started < 300
    assert str(caught.value).count("line\n") < 30


def test_a_server_killed_by_a_signal_is_reported_as_such(tmp_path: Path):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    one = ServerProcess([sys.executable, "-c", code], "http://127.0.0.1:9", log_path=tmp_path / "log", deadline=600)
    with pytest.raises(LaunchFailed, match=r"exit status 137 \(SIGKILL\)"):
        one.start()


def test_ready_may_be_a_function(tmp_path: Path):
    flag = tmp_path / "ready"
    code = f"import time; time.sleep(0.3); open({str(flag)!r}, 'w').close(); time.sleep(600)"
    with ServerProcess([sys.executable, "-c", code], flag.exists, log_path=tmp_path / "log", deadline=30):
        assert flag.exists()


def test_an_interruption_during_the_wait_leaves_nothing_running(tmp_path: Path):
    def interrupted() -> bool:
        raise KeyboardInterrupt

    code = "import time; time.sleep(600)"
    one = ServerProcess([sys.executable, "-c", code], interrupted, log_path=tmp_path / "log", deadline=30)
    with pytest.raises(KeyboardInterrupt):
        one.start()
    assert not one.running


def test_a_server_that_nobody_refers_to_is_stopped(tmp_path: Path):
    gone = tmp_path / "gone"
    code = f"""
import signal, sys, time
def go(number, frame):
    open({str(gone)!r}, "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, go)
open({str(tmp_path / "up")!r}, "w").close()
time.sleep(600)
"""
    one = ServerProcess([sys.executable, "-c", code], (tmp_path / "up").exists, log_path=tmp_path / "log", deadline=30)
    one.start()
    del one
    gc.collect()
    assert gone.exists()


def test_free_ports_are_free():
    with socket.socket() as one:
        one.bind(("127.0.0.1", free_port()))
