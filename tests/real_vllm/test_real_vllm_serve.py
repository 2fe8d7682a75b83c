"""`covey vllm-serve` with the real vLLM: it starts, answers, asks for its key, sleeps, and ends with who started it."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from covey.engines.servers.errors import ServerRefused
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.server_process import answers

pytestmark = pytest.mark.vllm

PROMPT = [2, 20, 30, 40]


def call(url: str, method: str, path: str, body: Any = None, key: str | None = None, **query: Any) -> Any:
    async def once() -> Any:
        server = ServerClient(url, key)
        return await server.call(method, path, doing="test", deadline=60.0, body=body, query=query or None)

    return asyncio.run(once())


def sample(running, key: str | None = None, **settings: Any) -> dict[str, Any]:
    body = {"model": running.model, "prompt": PROMPT, "max_tokens": 8, "logprobs": 0, "return_token_ids": True}
    return call(running.url, "POST", "/v1/completions", {**body, "ignore_eos": True, **settings}, key)["choices"][0]


def greedy_ids(running) -> list[int]:
    return sample(running, temperature=0.0)["token_ids"]


def test_tokens_come_out_with_the_log_probs_they_were_drawn_with(server):
    choice = sample(server, temperature=0.5, seed=3)
    ids = choice["token_ids"]
    model = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    expected = torch.log_softmax(logits / 0.5, -1)[range(len(ids)), ids]
    torch.testing.assert_close(torch.tensor(choice["logprobs"]["token_logprobs"]), expected, atol=2e-3, rtol=0)


def test_the_routes_for_training_are_there(server):
    assert call(server.url, "GET", "/get_world_size") == {"world_size": 1}
    assert call(server.url, "GET", "/is_paused")["is_paused"] is False
    call(server.url, "POST", "/pause", mode="keep")
    assert call(server.url, "GET", "/is_paused")["is_paused"] is True
    call(server.url, "POST", "/resume")
    call(server.url, "POST", "/reset_prefix_cache")


def test_it_sleeps_and_wakes_up_with_the_same_weights(server):
    before = greedy_ids(server)
    call(server.url, "POST", "/sleep", level="1")
    assert call(server.url, "GET", "/is_sleeping")["is_sleeping"] is True
    call(server.url, "POST", "/wake_up")
    assert call(server.url, "GET", "/is_sleeping")["is_sleeping"] is False
    assert greedy_ids(server) == before


def test_adapters_can_be_loaded_while_it_runs(server, tmp_path):
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    before = greedy_ids(server)
    call(server.url, "POST", "/v1/load_lora_adapter", {"lora_name": "a1", "lora_path": str(tmp_path / "adapter")})
    assert sample(server, temperature=0.0, model="a1")["token_ids"] != before
    call(server.url, "POST", "/v1/unload_lora_adapter", {"lora_name": "a1"})


def test_a_key_is_required_on_every_route_and_shown_nowhere(start_server):
    key = "key-5f2c"
    running = start_server("--served_model_name=quail", env={"VLLM_API_KEY": key})
    for method, path in (
        ("GET", "/v1/models"),
        ("POST", "/v1/completions"),
        ("POST", "/collective_rpc"),
        ("POST", "/pause"),
        ("POST", "/update_weights"),
        ("GET", "/server_info"),
        ("GET", "/version"),
    ):
        for wrong in (None, "another", key + "x"):
            with pytest.raises(ServerRefused, match=r"HTTP 401.*Give the server's API key"):
                call(running.url, method, path, {}, wrong)
    models = call(running.url, "GET", "/v1/models", key=key)["data"]
    assert [model["id"] for model in models] == ["quail"]  # vLLM's own flag reached it
    assert sample(running, key=key, model="quail")["token_ids"]
    assert key not in running.log
    commands = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    assert "launch.RequireKey" in commands and key not in commands


TRAINER = """
import sys, time
from pathlib import Path
from tests.real_vllm.serving import serve
running = serve(Path(sys.argv[1]), sys.argv[2])
print(running.url, flush=True)
time.sleep(600)
"""


def test_it_ends_with_a_trainer_that_is_killed(tmp_path, vllm_model):
    command = [sys.executable, "-c", TRAINER, str(tmp_path), vllm_model]
    paths = os.pathsep.join(path for path in sys.path if path)
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths})
    assert trainer.stdout is not None
    url = trainer.stdout.readline().strip()
    below = descendants(trainer.pid)
    assert answers(f"{url}/health") and len(below) >= 3  # its guard, its front end, and who computes
    trainer.kill()
    trainer.wait()
    until = time.monotonic() + 20
    while answers(f"{url}/health") or any(Path(f"/proc/{pid}").exists() for pid in below):
        assert time.monotonic() < until, [pid for pid in below if Path(f"/proc/{pid}").exists()]
        time.sleep(0.1)


def descendants(pid: int) -> list[int]:
    """Ids of all processes that it started, and that they started."""
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    children = [one for one, parent in pairs if parent == pid]
    return children + [one for child in children for one in descendants(child)]


def test_an_unknown_flag_ends_it_with_vllms_message(tmp_path, vllm_model):
    command = [sys.executable, "-m", "covey.cli.main", "vllm-serve", vllm_model, "--no-such-flag", "1", "--port=18999"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "no-such-flag" in done.stderr
