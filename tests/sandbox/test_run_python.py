"""Sandboxed code: what it prints comes back, and what it does by accident stops at a limit."""

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest

from covey import sandbox
from covey.sandbox import MIB, LocalSandbox, SandboxResult, run_python

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX system")

GUARDS = run_python("").guards if sys.platform == "linux" else frozenset()


def guarded(name):
    return pytest.mark.skipif(name not in GUARDS, reason=f"this kernel does not allow the guard {name!r}")


def alive(mark):
    """Processes whose command line or environment mentions `mark`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


# --- ordinary programs -------------------------------------------------------------------------------------------


def test_output_and_exit_code_come_back():
    result = run_python("import sys; print('out é'); print('err', file=sys.stderr)")
    assert (result.stdout, result.stderr, result.exit_code) == ("out é\n", "err\n", 0)
    assert result.ok
    assert not result.timed_out
    assert not result.truncated
    assert 0 < result.duration < 60


@pytest.mark.parametrize(
    ("code", "exit_code", "error"),
    [
        ("raise ValueError('no')", 1, "ValueError: no"),
        ("print(", 1, "SyntaxError"),
        ("import sys; sys.exit(7)", 7, ""),
        ("import os; os._exit(3)", 3, ""),
        ("import ctypes; ctypes.string_at(0)", -11, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("x = '\ud800'", 1, "SyntaxError"),
        ("\0", 1, "SyntaxError"),
    ],
)
def test_a_program_that_fails_says_how(code, exit_code, error):
    result = run_python(code)
    assert result.exit_code == exit_code
    assert error in result.stderr
    assert not result.ok
    assert result.stopped is None


def test_stdin_is_what_was_given_and_empty_otherwise():
    assert run_python("print(input())", stdin="hello\n").stdout == "hello\n"
    assert "EOFError" in run_python("input()").stderr
    assert run_python("import sys; print(len(sys.stdin.read()))", stdin="x" * 1_000_000).stdout == "1000000\n"


def test_it_has_a_directory_of_its_own_that_is_gone_afterwards():
    result = run_python("import os; open('note', 'w').write('x'); print(os.getcwd(), os.environ['HOME'])")
    folder, home = result.stdout.split()
    assert folder == home
    assert not Path(folder).exists()


def test_installed_packages_import_and_the_environment_is_hidden(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    result = run_python("import os, numpy; print(numpy.arange(3).sum(), 'SECRET_KEY' in os.environ)", memory=2048 * MIB)
    assert result.stdout == "3 False\n"


@pytest.mark.parametrize(
    "limit",
    [
        *({"timeout": value} for value in (0, float("nan"), float("inf"), 1e12, "5")),
        *({"memory": value} for value in (-1, float("inf"))),
    ],
)
def test_limits_are_positive_numbers(limit):
    with pytest.raises(ValueError, match="of run_python must be greater than 0 and at most 1e"):
        run_python("", **limit)


def test_a_limit_may_be_years():
    assert run_python("print(1)", timeout=1e9).stdout == "1\n"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"code": None}, "code of run_python must be text, got NoneType: None"),
        ({"code": ["1"]}, "code of run_python must be text, got list"),
        ({"code": "1", "stdin": 5}, "stdin of run_python must be text, got int: 5"),
    ],
)
def test_a_program_is_text(given, said):
    with pytest.raises(ValueError, match=said):
        run_python(**given)


def test_an_interpreter_that_is_not_there_is_an_error():
    with pytest.raises(RuntimeError, match="could not start /no/python"):
        LocalSandbox(python="/no/python").run("", timeout=1, memory=MIB, stdin="")


@pytest.fixture(params=[True, False], ids=["namespaces", "no namespaces"])
def either_way(request):
    """With whatever namespaces the kernel allows, and without any, as on a kernel that allows none."""
    sandbox.use_sandbox(LocalSandbox(namespaces=request.param))
    yield
    sandbox.use_sandbox(None)


either = pytest.mark.usefixtures("either_way")


# --- accidents ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(3600)",
        "import signal, time\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\nwhile True: time.sleep(1)",
        "import os\nos.close(0); os.close(1); os.close(2)\nwhile True: pass",
        "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
    ],
)
@either
def test_an_endless_program_is_ended_at_the_deadline(code):
    result = run_python(code, timeout=1.0)
    assert result.timed_out
    assert result.exit_code < 0
    assert not result.ok
    assert result.duration > 0.9


@pytest.mark.slow
def test_what_was_printed_before_the_deadline_is_kept():
    assert run_python("print('begun', flush=True)\nwhile True: pass", timeout=1.0).stdout == "begun\n"


def test_a_flood_of_output_is_cut_and_the_program_runs_on():
    code = "import sys\nfor _ in range(128): sys.stdout.write('x' * (1 << 20))\nprint('end', file=sys.stderr)"
    result = run_python(code, timeout=60.0)
    assert result.truncated
    assert len(result.stdout) == LocalSandbox().max_output
    assert (result.stderr, result.exit_code) == ("end\n", 0)


@either
def test_a_memory_hog_gets_a_memory_error():
    result = run_python("x = bytearray(1 << 30)", memory=256 * MIB)
    assert (result.exit_code, "MemoryError" in result.stderr) == (1, True)


@pytest.mark.skipif(sys.platform != "linux", reason="counted through /proc")
@either
def test_several_processes_share_the_memory():
    code = (
        "import os, time\n"
        "for _ in range(4):\n"
        "    if os.fork() == 0:\n"
        "        kept = bytearray(b'x') * (60 << 20)\n"
        "        time.sleep(30)\n"
        "time.sleep(30)"
    )
    result = run_python(code, timeout=20.0, memory=128 * MIB)
    assert result.stopped == "memory"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counted through /proc")
@either
def test_a_fork_bomb_is_ended():
    mark = f"covey-bomb-{os.getpid()}"
    code = (
        f"import os, sys, time\nmark = {mark!r}\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.1)"
    )
    result = run_python(code, timeout=5.0)
    assert result.stopped in ("processes", "time")  # where the kernel counts processes itself, it lives to its deadline
    assert result.exit_code < 0


def test_a_file_that_is_too_large_cannot_be_written():
    result = run_python("open('big', 'wb').write(b'x' * (100 << 20))", timeout=120.0)
    assert not result.ok
    assert "OSError" in result.stderr or result.exit_code == -25  # SIGXFSZ


BACKGROUND = """
import subprocess, sys
subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)', {mark!r}], start_new_session={away},
                 stdout=None if {noisy} else subprocess.DEVNULL)
print('left it')
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("noisy", [False, True])
@either
def test_no_process_survives_not_even_in_another_session(away, noisy):
    mark = f"covey-left-{os.getpid()}-{away}-{noisy}"
    result = run_python(BACKGROUND.format(mark=mark, away=away, noisy=noisy), timeout=300.0)
    assert (result.stdout, result.exit_code) == ("left it\n", 0)
    assert not result.timed_out  # its open stdout is not waited for
    assert alive(mark) == []


@guarded("network")
def test_there_is_no_network():
    code = "import socket\nwith socket.socket() as s:\n    s.settimeout(5)\n    s.connect(('127.0.0.1', {port}))"
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        result = run_python(code.format(port=server.getsockname()[1]))
    assert "Network is unreachable" in result.stderr or "OSError" in result.stderr
    assert result.exit_code == 1


@guarded("files")
def test_what_is_read_only_cannot_be_mounted_again(tmp_path):
    kept = tmp_path / "kept"
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nread_only = (ctypes.c_uint64 * 4)(0, 1, 0, 0)\n"
        "remounted = libc.mount(b'none', b'/', None, 0x20 | 0x1000, None)\n"
        "print(remounted, libc.syscall(442, -100, b'/', 0x8000, read_only, 32))\n"
        f"open({str(kept)!r}, 'w')"
    )
    result = run_python(code)
    assert (result.stdout, result.exit_code, kept.exists()) == ("-1 -1\n", 1, False)


WITHOUT = LocalSandbox(namespaces=False).run("", timeout=10, memory=512 * MIB, stdin="").guards


@pytest.mark.skipif("files" not in WITHOUT, reason="this kernel has no Landlock")
@either
def test_keys_of_other_processes_cannot_be_read():
    result = run_python(f"print(len(open('/proc/{os.getpid()}/environ').read()))")
    assert (result.stdout, "PermissionError" in result.stderr) == ("", True)


LANDLOCK = ctypes.CDLL(None).syscall(444, None, 0, 1) if sys.platform == "linux" else 0


@pytest.mark.skipif(LANDLOCK < 6, reason="this kernel lets signals pass without namespaces")
@either
def test_other_processes_cannot_be_signalled():
    """Else `os.kill(-1, 9)` would end every process of the user."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        result = run_python(f"import os\nos.kill({other.pid}, 15)")
        assert result.exit_code == 1 and ("PermissionError" in result.stderr or "ProcessLookup" in result.stderr)
        assert other.poll() is None
        other.kill()


@pytest.mark.skipif("files" not in WITHOUT, reason="this kernel has no Landlock")
@either
def test_files_of_its_own_can_be_made_moved_and_cut():
    code = (
        "import os\nos.makedirs('a/b')\nopen('a/b/f', 'w').write('long')\nos.rename('a/b/f', 'f')\n"
        "os.symlink('f', 'g')\nopen('g', 'w').write('x')\nopen('/dev/null', 'w').write('y')\nprint(open('f').read())"
    )
    assert run_python(code).stdout == "x\n"


@pytest.mark.skipif("files" not in WITHOUT, reason="this kernel has no Landlock")
@either
def test_files_outside_of_its_directory_cannot_be_changed(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("safe")
    for change in (f"open({str(kept)!r}, 'w')", f"os.remove({str(kept)!r})", f"shutil.rmtree({str(tmp_path)!r})"):
        assert run_python(f"import os, shutil\n{change}").exit_code == 1
    assert kept.read_text() == "safe"
    assert run_python(f"print(open({str(kept)!r}).read())").stdout == "safe\n"


def test_a_caller_may_ignore_the_ends_of_its_children():
    code = (
        "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "from covey.sandbox import run_python; print(run_python('print(1)', timeout=20.0))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout
    assert "stdout='1\\n'" in said and "exit_code=0, stopped=None" in said


def test_lines_that_code_writes_into_its_report_are_skipped():
    """Code of the same user reaches it by /proc, where there are no namespaces."""
    end = {"exit_code": 3, "stopped": None, "duration": 0.5}
    spoilt = ["rubbish", "5", '{"guards": 7}', '{"exit_code": 0}', "[" * 99_999, "\udcff", json.dumps(end), '{"exit']
    report = bytearray("\n".join(['{"guards": ["files"]}', *spoilt]).encode("utf-8", "surrogateescape"))
    assert sandbox._outcome(report) == {"guards": frozenset({"files"}), **end}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@either
def test_a_program_that_kills_its_watcher_leaves_no_process():
    mark = f"covey-unwatched-{os.getpid()}"
    code = BACKGROUND.format(mark=mark, away=True, noisy=False)
    result = run_python(f"{code}\nimport os, time\nos.kill(os.getppid(), 9)\ntime.sleep(30)", timeout=2.0)
    assert not result.ok and alive(mark) == []


def test_a_folder_that_its_program_has_shut_is_removed(tmp_path):
    """Its owner may not look into it, unless that is root, whom nothing stops."""
    (tmp_path / "shut").mkdir(mode=0)
    with mock.patch.object(os, "chmod", wraps=os.chmod) as opened:
        sandbox._remove(str(tmp_path / "shut"))
    assert opened.call_args_list == [mock.call(str(tmp_path / "shut"), 0o700)]
    assert list(tmp_path.iterdir()) == []


DEEP = "import os\nfor i in range(2100): os.mkdir('d'); os.chdir('d')\nos.chmod('.', 0)\nprint('deep')"


@pytest.mark.slow
@either
def test_a_folder_of_any_depth_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run_python(DEEP).stdout == "deep\n"
    assert list(tmp_path.iterdir()) == []


CALLER = """
import sys
from covey.sandbox import LocalSandbox
LocalSandbox(namespaces=sys.argv[2] == "True").run(sys.argv[1], timeout=60, memory=1 << 30, stdin="")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("namespaces", [True, False])
@pytest.mark.parametrize("away", [False, True])
def test_the_program_ends_with_a_caller_that_is_killed(namespaces, away):
    mark = f"covey-orphan-{os.getpid()}-{namespaces}-{away}"
    code = BACKGROUND.format(mark=mark, away=away, noisy=False) + "import time; time.sleep(60)"
    caller = subprocess.Popen([sys.executable, "-c", CALLER, code, str(namespaces)])
    until = time.monotonic() + 30
    while len(alive(mark)) < 2:  # the caller, whose command line holds the code, and what that has started
        assert time.monotonic() < until
        time.sleep(0.02)
    caller.kill()
    caller.wait()
    until = time.monotonic() + 5
    while alive(mark):
        assert time.monotonic() < until, "it is still there"
        time.sleep(0.02)


def test_folders_of_killed_callers_are_removed_later(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for name, hours in ((f"{gone.pid}-old", 2), (f"{gone.pid}-new", 0), (f"{os.getpid()}-ours", 2), ("other-old", 2)):
        (tmp_path / f"covey-sandbox-{name}").mkdir()
        os.utime(tmp_path / f"covey-sandbox-{name}", (time.time() - 3600 * hours,) * 2)
    sandbox._remove_abandoned.cache_clear()
    run_python("")
    left = sorted(path.name.removeprefix("covey-sandbox-") for path in tmp_path.iterdir())
    assert left == sorted([f"{gone.pid}-new", f"{os.getpid()}-ours", "other-old"])


@pytest.mark.slow
@either
def test_nothing_is_left_open_or_running(tmp_path):
    def open_files():
        return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0

    run_python("")
    before = open_files()
    for code in ("", "raise SystemExit(1)", "while True: pass"):
        run_python(code, timeout=0.5)
    assert open_files() == before


# --- elsewhere ---------------------------------------------------------------------------------------------------


class Elsewhere:
    """A sandbox that echoes, as a remote one would answer."""

    def run(self, code, *, timeout, memory, stdin):
        return SandboxResult(f"{code}|{stdin}|{timeout}|{memory}", "", 0, None, False, 0.0)


def test_another_sandbox_can_take_its_place():
    sandbox.use_sandbox(Elsewhere())
    try:
        assert run_python("code", timeout=3, memory=5, stdin="in").stdout == "code|in|3|5"
    finally:
        sandbox.use_sandbox(None)
    assert run_python("print(1)").stdout == "1\n"
