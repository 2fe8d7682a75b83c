"""Saving, and pushing to a hub that is a small server on this machine."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import runs
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_a_saved_model_loads_and_speaks_alike(tmp_path):
    trained = runs.trainer(tmp_path)
    trained.train()
    trained.save_model()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    trained.model.eval()
    torch.testing.assert_close(loaded(ids).logits, trained.model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*api_key")
def test_the_servers_keys_are_in_no_file(tmp_path):
    keys = {"vllm_server_api_key": "s3cret-1", "sglang_api_key": "s3cret-2"}
    trained = runs.trainer(tmp_path, save_strategy="steps", save_steps=1, max_steps=1, **keys)
    trained.train()
    trained.save_model()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"training_args.bin", "optimizer.pt"} <= {path.name for path in written}
    assert not [path for path in written if b"s3cret" in path.read_bytes()]
    assert trained.args.vllm_server_api_key == "s3cret-1"


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as an upload needs; `commits` holds the file names of each commit."""

    commits: list[list[str]]

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.endswith("/repos/create"):
            self.answer({"url": f"http://{self.headers['Host']}/me/tiny", "id": "me/tiny"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self.answer({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]})
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            type(self).commits.append([line["value"]["path"] for line in lines if line["key"] == "file"])
            self.answer({"commitUrl": f"http://{self.headers['Host']}/me/tiny/commit/1", "commitOid": "1" * 40})
        else:
            self.answer({})

    def do_GET(self):
        self.answer({"type": "user", "name": "me", "id": "me/tiny", "sha": "1" * 40, "siblings": []})

    def answer(self, content):
        payload = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args):
        pass


PUSH = """
import sys
import runs
trained = runs.trainer(sys.argv[1], hub_model_id="me/tiny", hub_token="hf_test")
trained.train()
trained.push_to_hub(commit_message="done")
"""


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OneHub", (Hub,), {"commits": []}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def test_a_model_is_pushed_with_its_tokenizer_and_card(tmp_path, hub):
    here = Path(__file__).parent
    environment = {  # the hub's address is read once, when its client is first imported
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)]),
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_OFFLINE": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", PUSH, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    pushed = {name for commit in hub.RequestHandlerClass.commits for name in commit}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= pushed
