"""`covey tinker-serve`: its flags, its key, and a command that it runs."""

import sys

import pytest

from covey.cli import tinker_serve
from covey.cli.main import main
from covey.tinker.build import names_of, tokenizer_place

PROGRAM = """
import json, os, sys, urllib.request
request = urllib.request.Request(os.environ["TINKER_BASE_URL"] + "/api/v1/get_server_capabilities")
request.add_header("X-API-Key", os.environ["TINKER_API_KEY"])
print(json.load(urllib.request.urlopen(request))["supported_models"][0]["model_name"])
assert os.environ["HF_HUB_OFFLINE"] == "1" and os.environ["TINKER_TELEMETRY"] == "0"
sys.exit(7)
"""


def test_a_command_finds_the_server_and_its_status_is_the_servers(tiny_folder, tmp_path, capfd):
    words = ["tinker-serve", "--model", tiny_folder, "--as", "other/name", "--checkpoints", str(tmp_path / "states")]
    words += ["--log", str(tmp_path / "log"), "--", sys.executable, "-c", PROGRAM]
    assert main(words) == 7
    out, told = capfd.readouterr()
    assert "other/name" in out
    assert "serving other/name" in told and "MiB for each training client" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--"], "command to run"),
        (["--host", "0.0.0.0"], "TINKER_API_KEY"),
        (["--api-key", "secret"], "tml-"),
        (["--substitute", "stable_reinforce"], "OLD=NEW"),
        (["--substitute", "ppo=nothing"], "OLD=NEW"),
    ],
)
def test_flags_that_cannot_be_are_refused(tiny_folder, words, told, capsys, monkeypatch):
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    assert main(["tinker-serve", "--model", tiny_folder, "--port", "0", *words]) == 2
    assert told in capsys.readouterr().err


def test_limits_reach_the_server(tiny_folder, tmp_path, monkeypatch):
    made = []

    def note(model, settings, checkpoints, **options):
        made.append((settings, options))
        raise ValueError("noted")

    monkeypatch.setattr("covey.tinker.build.opened", note)
    words = ["--max-clients", "1", "--max-rank", "2", "--max-tokens", "3", "--max-waiting", "4"]
    words += ["--token-budget", "5", "--seed", "6", "--device", "meta", "--durable", "7"]
    assert main(["tinker-serve", "--model", tiny_folder, "--port", "0", *words]) == 2
    ((settings, options),) = made
    assert (settings.max_clients, settings.max_rank, settings.max_waiting, settings.seed) == (1, 2, 4, 6)
    assert (options["max_tokens"], options["token_budget"], options["device"]) == (3, 5, "meta")
    assert options["durable"] == 7


def test_a_server_tells_programs_where_it_is(capsys):
    lines = list(tinker_serve.address("http://127.0.0.1:8010", None))
    assert any("TINKER_BASE_URL=http://127.0.0.1:8010" in line for line in lines)
    assert any("TINKER_API_KEY=tml-" in line for line in lines)
    assert not any("tml-secret" in line for line in tinker_serve.address("http://127.0.0.1:8010", "tml-secret"))


def test_names_of_a_folder_and_of_a_hub_id(tmp_path):
    folder = tmp_path / "Model"
    folder.mkdir()
    assert names_of(str(folder), ["other"]) == ("other", str(folder), "Model")
    assert names_of("owner/model") == ("owner/model",)
    assert tokenizer_place("owner/model") is None and tokenizer_place(str(folder)) == str(folder)


def test_a_folder_that_clients_take_for_a_hub_id_is_spelt_otherwise(monkeypatch):
    monkeypatch.setattr("os.path.isdir", lambda path: True)
    assert tokenizer_place("/a/model") == "/./a/model"
