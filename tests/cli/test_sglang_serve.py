"""What `covey sglang-serve` makes of its arguments, and that it becomes the server."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from covey.cli import serving, sglang_serve
from covey.cli.main import main
from covey.cli.sglang_serve import SGLANG, plan


def parse(argv, environ):
    return serving.parse(argv, environ, SGLANG)


def command(*argv: str, environ: dict[str, str] | None = None) -> list[str]:
    return plan(parse(argv, environ or {}), environ or {})[0]


@pytest.fixture
def release(monkeypatch):
    """Pretends that a release of SGLang is installed, or none."""
    real = importlib.metadata.version

    def pretend(found: str | None):
        def version(name: str) -> str:
            if name != "sglang":
                return real(name)
            if found is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(importlib.metadata, "version", version)

    return pretend


def test_it_listens_on_this_machine_alone():
    words = command("--model", "m")
    assert words[1:5] == ["-m", "covey.engines.servers.sglang.launch", "--model-path", "m"]
    assert words[5:] == ["--host", "127.0.0.1", "--port", "30000"]


def test_unknown_flags_reach_sglang_in_its_own_spelling():
    assert command("m", "--tp_size", "2", "--mem-fraction-static=0.5")[-3:] == [
        "--tp-size",
        "2",
        "--mem-fraction-static=0.5",
    ]


def test_listening_wider_needs_a_key():
    with pytest.raises(ValueError, match="set the environment variable SGLANG_API_KEY"):
        parse(["m", "--host", "0.0.0.0"], {})
    assert parse(["m", "--host", "0.0.0.0"], {"SGLANG_API_KEY": "k"}).api_key == "k"


def test_a_key_never_shows_in_the_command(release, capsys):
    release("0.5.23")
    assert main(["sglang-serve", "m", "--host", "0.0.0.0", "--api-key", "topsecret", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "SGLANG_API_KEY=..." in shown and "topsecret" not in shown


@pytest.mark.parametrize(("flag", "says"), [("--admin-api-key", "the trainer sends one"), ("--grpc-port", "no key")])
def test_what_would_lock_the_trainer_out_or_others_in_is_refused(flag, says):
    with pytest.raises(ValueError, match=says):
        parse(["m", flag, "1"], {})


def test_adapters_that_come_later_are_announced():
    words = command("m", "--enable-lora", "--max-lora-rank", "8")
    assert words[words.index("--lora-target-modules") + 1] == "all" and words.count("--max-lora-rank") == 1
    assert "--lora-target-modules" not in command("m")


def test_the_raw_logprobs_variable_is_dropped_with_a_note():
    notes = plan(parse(["m"], {}), {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"})[2]
    assert any("is ignored" in note for note in notes)


@pytest.mark.parametrize(
    ("found", "says"), [(None, r"pip install sglang"), ("0.4.9.post2", "SGLang 0.4.9.post2 is too old")]
)
def test_a_missing_or_old_sglang_is_said(release, found, says):
    release(found)
    with pytest.raises(ImportError, match=says):
        SGLANG.installed()


def test_a_recent_sglang_will_do(release):
    release("0.6.1")
    SGLANG.installed()


def test_help_without_arguments(capsys):
    assert main(["sglang-serve"]) == 2 and "usage: covey sglang-serve" in capsys.readouterr().out


def test_the_server_gets_its_key_and_not_the_wrong_logprobs(tmp_path):
    """A package of that name stands in for SGLang; what it sees are the arguments and the environment of the server."""
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(
        "import os, sys\nassert __name__ == '__main__'\nprint(sys.argv[1:], open('/proc/self/cmdline').read())\n"
        "import logging\nlogging.basicConfig(force=True)\nlogging.warning(f'{sys.argv=}')\n"
        "print('SGLANG_API_KEY' in os.environ, 'SGLANG_RETURN_ORIGINAL_LOGPROB' in os.environ)\n"
    )
    source = Path(sglang_serve.__file__).parents[2]
    environ = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}:{source}",
        "SGLANG_API_KEY": "topsecret",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    }
    words = command("m", "--tp-size", "2")
    ended = subprocess.run([sys.executable, *words[1:]], env=environ, capture_output=True, text=True, check=True)
    assert "'--api-key', '...'" in ended.stderr and "topsecret" not in ended.stderr
    shown = ended.stdout
    arguments, _, public = shown.splitlines()[0].partition("] ")
    assert "'--tp-size', '2', '--api-key', 'topsecret'" in arguments and "topsecret" not in public
    assert shown.splitlines()[1] == "False False"
