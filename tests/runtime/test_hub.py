"""A name is looked up once: here, among downloads, then by one request."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from huggingface_hub import constants

from covey.runtime import hub
from covey.runtime.hub import NotFound, look_up, nearby


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "downloads"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "prepared"))
    for name in hub.OFFLINE:
        monkeypatch.delenv(name, raising=False)
    hub._answers.clear()
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")


@pytest.fixture
def asked(monkeypatch):
    """Paths of requests to a hub that knows me/model and me/rows alone."""
    paths = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            paths.append(self.path)
            known = self.path.startswith(("/api/models/me/model", "/api/datasets/me/rows"))
            body = b'{"id": "me/model", "siblings": []}'
            self.send_response(200 if known else 404)
            if not known:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    point_at(f"http://127.0.0.1:{server.server_port}", monkeypatch)
    yield paths
    server.shutdown()


def point_at(address, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: huggingface_hub.hf_api.HfApi(endpoint=address))


def download(tmp_path, name):
    (tmp_path / "downloads" / name / "snapshots").mkdir(parents=True)


def test_a_folder_asks_nobody(asked):
    assert look_up("tiny") and asked == []


def test_a_folder_at_home_asks_nobody(asked, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert look_up("~/tiny") and asked == []


def test_a_refusal_holds_for_a_while_and_an_answer_for_good(asked, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(hub.time, "monotonic", lambda: now[0])
    for later, count in ((0.0, 1), (hub.HOLDS - 1, 1), (hub.HOLDS, 2)):
        now[0] = later
        with pytest.raises(NotFound):
            look_up("me/later")
        assert len(asked) == count
    for later in (0.0, 10 * hub.HOLDS):
        now[0] = later
        assert look_up("me/model")
    assert len(asked) == 3


def test_the_hub_is_asked_once(asked):
    assert look_up("me/model") and look_up("me/model") and look_up("me/rows", "dataset")
    assert len(asked) == 2


@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_a_name_that_the_hub_denies_is_refused_after_one_request(asked, kind):
    with pytest.raises(NotFound, match="me/modle"):
        look_up("me/modle", kind)
    assert len(asked) == 1


def test_without_a_network_the_name_is_refused_at_once(monkeypatch):
    point_at("http://127.0.0.1:9", monkeypatch)  # the port of nobody
    with pytest.raises(NotFound, match=r"\./tiny"):
        look_up("tinny")


def test_without_a_network_a_download_is_taken(tmp_path, monkeypatch):
    point_at("http://127.0.0.1:9", monkeypatch)
    download(tmp_path, "models--me--model")
    assert look_up("me/model") is False


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_asks_nobody(tmp_path, asked, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(NotFound, match=variable):
        look_up("me/model")
    download(tmp_path, "models--me--model")
    assert look_up("me/model") is False
    assert asked == []


@pytest.mark.parametrize("name", ["./tinny", "/no/such/folder", "~/no", "a/b/c"])
def test_a_path_is_no_hub_id(asked, name):
    with pytest.raises(NotFound):
        look_up(name)
    assert asked == []


def test_only_folders_of_models_are_proposed(tmp_path):
    (tmp_path / "tinier").mkdir()
    assert "./tiny?" in nearby("tinie")
    assert nearby("runs/zzz") == ""


def test_the_base_of_an_adapter_is_looked_up_as_well(tmp_path, asked):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for base, found in (("me/model", True), (str(tmp_path / "tiny"), True), ("me/modle", False)):
        (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        if found:
            assert look_up("adapter")
        else:
            with pytest.raises(NotFound, match=r"me/modle.*adapter"):
                look_up("adapter")
