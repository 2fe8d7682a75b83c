"""The command finds subcommands quickly and shows errors in one line."""

import io
import os
import subprocess
import sys
import warnings

import pytest

from covey import __version__
from covey.cli import main as command
from covey.cli.main import main
from covey.engines.servers.errors import ServerUnreachable


@pytest.fixture
def failing(monkeypatch):
    """Commands that warn, raise what a user can mend, raise a mistake of ours, and are interrupted."""
    errors = {
        "warn": UserWarning("mind"),
        "user": ValueError("beta=-1 must not be negative."),
        "bug": KeyError("x"),
        "stop": KeyboardInterrupt(),
    }

    def raises(error):
        def run(arguments):
            if isinstance(error, Warning):
                warnings.warn(error, stacklevel=2)
                return 0
            raise error

        return run

    for name, error in errors.items():
        monkeypatch.setitem(command.COMMANDS, name, (__name__, name, ""))
        monkeypatch.setattr(sys.modules[__name__], name, raises(error), raising=False)


def test_help_lists_every_command_with_examples(capsys):
    assert main(["-h"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in command.COMMANDS)
    assert "covey grpo --config run.yaml" in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_no_command_is_an_error_with_the_same_help(capsys):
    assert main([]) == 2
    assert "usage: covey" in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"covey {__version__}\n"


def test_an_unknown_command_gets_a_suggestion(capsys):
    assert main(["grop"]) == 2
    assert "Did you mean 'grpo'?" in capsys.readouterr().err


def test_an_error_of_the_user_is_one_line(failing, capsys):
    assert main(["user"]) == 2
    assert capsys.readouterr().err == "covey: error: beta=-1 must not be negative.\n"


def test_debug_adds_the_traceback_wherever_it_stands(failing, capsys):
    for arguments in (["--debug", "user"], ["user", "--debug"]):
        assert main(arguments) == 2
        assert "Traceback" in capsys.readouterr().err


def test_debug_with_a_value_is_left_to_transformers():
    assert command._take_debug(["grpo", "--debug", "underflow_overflow"]) == (
        ["grpo", "--debug", "underflow_overflow"],
        False,
    )


def test_warnings_are_one_line_too(failing, capsys):
    assert main(["warn"]) == 0
    assert capsys.readouterr().err == "covey: warning: mind\n"


def test_a_server_that_is_not_there_is_one_line(failing, monkeypatch, capsys):
    def run(arguments):
        raise ServerUnreachable("http://127.0.0.1:1", "generate", "connection refused \x1b[2J")

    monkeypatch.setattr(sys.modules[__name__], "user", run)
    assert main(["user"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("covey: error: http://127.0.0.1:1: cannot generate")
    assert "\x1b" not in said


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "ascii:surrogateescape"])  # the last in the C locale
def test_a_console_that_cannot_encode_ends_nothing(encoding):
    code = "import sys; from covey.cli import main as m; sys.modules['n'] = type(sys)('n');"
    code += "sys.modules['n'].run = lambda a: print('→ 東') or 0; m.COMMANDS['n'] = ('n', 'run', '');"
    code += "sys.exit(m.main(['n']))"
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert (done.returncode, done.stdout) == (0, b"\\u2192 \\u6771\n")


def test_a_reader_that_is_gone_at_once_ends_no_run(failing, monkeypatch):
    class Gone(io.StringIO):
        def flush(self):
            raise BrokenPipeError

    monkeypatch.setitem(command.COMMANDS, "grpo", command.COMMANDS["warn"])
    monkeypatch.setattr("covey.cli.early.answer", lambda name, argv: None)
    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.warns(UserWarning, match="mind"):
        assert command._run("grpo", ["run.yaml"]) == 0


def test_a_closed_console_is_no_error(failing, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["warn"]) == 0


def test_our_own_mistakes_keep_their_traceback(failing):
    with pytest.raises(KeyError):
        main(["bug"])


def test_an_interruption_is_not_an_error_message(failing, capsys):
    assert main(["stop"]) == 130
    assert capsys.readouterr().err == "covey: stopped\n"


def test_a_command_without_arguments_is_two_lines(capsys):
    assert main(["rloo"]) == 2
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_reader_that_leaves_early_is_no_error():
    code = """
import sys
from covey.cli import main

main.COMMANDS["talk"] = (main.__name__, "talk", "says more than a pipe holds")
main.talk = lambda arguments: print("word\\n" * 10**6)
sys.exit(main.main(["talk"]))
"""
    command = f"{sys.executable} -c '{code}' | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["word", "0"] and "rror" not in done.stderr


def test_help_needs_no_torch():
    code = "import sys; from covey.cli.main import main; main(['-h']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
