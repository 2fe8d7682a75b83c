"""Who gets past the door of a vLLM server that has a key."""

import asyncio
from typing import Any

import pytest

from covey.engines.servers.vllm.launch import MIDDLEWARE, RequireKey


@pytest.fixture
def door(monkeypatch):
    """Sends a request through; returns whether it got in and the status of the answer."""
    monkeypatch.setenv("VLLM_API_KEY", "k1")

    def knock(path: str, *authorizations: str, kind: str = "http", method: str = "POST") -> tuple[bool, Any]:
        entered, sent = [], []

        async def app(scope, receive, send):
            entered.append(scope)

        async def send(message):
            sent.append(message)

        headers = [(b"authorization", value.encode()) for value in authorizations]
        scope = {"type": kind, "path": path, "headers": headers, "method": method}
        asyncio.run(RequireKey(app)(scope, None, send))
        return bool(entered), sent[0].get("status", sent[0].get("code")) if sent else None

    return knock


@pytest.mark.parametrize("path", ["/v1/completions", "/collective_rpc", "/update_weights", "/health/../pause", "/"])
def test_only_the_key_opens(door, path: str):
    assert door(path, "Bearer k1") == (True, None)
    for wrong in ((), ("Bearer k2",), ("k1",), ("Basic k1",), ("Bearer k1 ",), ("Bearer k1", "Bearer k1")):
        assert door(path, *wrong) == (False, 401)
    assert door(path, method="OPTIONS") == (False, 401)


def test_health_is_open_to_load_balancers(door):
    assert door("/health", method="GET") == (True, None)


def test_the_start_of_the_application_passes(door):
    assert door("", kind="lifespan") == (True, None)


def test_a_websocket_is_closed(door):
    assert door("/v1/realtime", kind="websocket") == (False, 1008)
    assert door("/v1/realtime", "Bearer k1", kind="websocket") == (True, None)


def test_a_door_without_a_key_does_not_exist(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ValueError, match="VLLM_API_KEY"):
        RequireKey(lambda *parts: None)


def test_it_is_found_under_its_path():
    module, _, name = MIDDLEWARE.rpartition(".")
    assert getattr(__import__(module, fromlist=[name]), name) is RequireKey
