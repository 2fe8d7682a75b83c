"""Functions in child processes that can be killed. The functions that are sent are in this module."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from covey import isolated
from covey.rewards.contract import declared
from covey.runtime.child_process import Quota
from covey.runtime.isolation import FunctionWorker, WorkerFailed, WorkerLate

FILE = """
import os, sys, time

def echo(what, sleep=0.0):
    time.sleep(sleep)
    return what

def dies(how):
    exec(how)

def about_itself():
    return os.getpid(), "torch" in sys.modules, sys.stdin.read()

def records(log):
    log("a", [1.0], key=2)

async def waits(what):
    return what
"""
STARTS = {
    "time.sleep(60)": "did not start: no answer in time",
    "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()": "did not start: no answer in time",
    "sys.exit(3)": "cannot import it: SystemExit: 3",
    "os._exit(3)": "did not start: its process exited with 3",
    "os.fork() or os.setsid()\nwhile True: pass": "did not start: no answer in time",
    "1 / 0": "cannot import it: ZeroDivisionError: division by zero",
}

REPLIES = "import os, sys; replies = sys._getframe(3).f_locals['replies']"  # the pipe of answers, in `main`


@pytest.fixture
def worker(tmp_path: Path):
    made = []

    def make(name: str, **settings) -> FunctionWorker:
        path = tmp_path / "functions.py"
        path.write_text(FILE)
        made.append(FunctionWorker((name, path), **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("code", STARTS)
def test_a_file_that_cannot_be_imported_ends_in_time(worker, code):
    late = worker("echo", limits=Quota(1.0, 8, start=0.5 if "in time" in STARTS[code] else 30.0))
    (path,) = pickle.loads(late._function)[1].values()
    Path(path).write_text(f"{FILE}\n{code}")
    with pytest.raises(RuntimeError, match=STARTS[code]):
        late.start()


def test_calls_wait_for_a_slow_start_until_their_deadlines(worker, tmp_path):
    slow, may_start = worker("echo"), tmp_path / "may start"
    (path,) = pickle.loads(slow._function)[1].values()
    Path(path).write_text(f"{FILE}\nwhile not os.path.exists({str(may_start)!r}):\n    time.sleep(0.01)")
    with pytest.raises(WorkerLate, match="had not started"):
        slow.call({"what": 1}, 0.2)
    may_start.touch()
    assert slow.call({"what": 2}, 120.0)["result"] == 2  # of the same process, which was still starting


def test_a_worker_stays_warm_and_imports_no_torch(worker):
    about = worker("about_itself")
    first = about.call({}, 30.0)["result"]
    assert first == about.call({}, 30.0)["result"]
    assert first[0] != os.getpid() and first[1:] == [False, ""]  # and its input is empty


def test_a_late_worker_is_killed_and_its_answer_dropped(worker):
    echo = worker("echo")
    assert echo.call({"what": 1}, 30.0) == {"result": 1, "calls": []}
    first = echo._process.pid
    with pytest.raises(WorkerLate, match=r"no answer in time"):
        echo.call({"what": 2, "sleep": 1.0}, 0.2)
    assert echo.call({"what": 3}, 30.0)["result"] == 3
    assert echo._process.pid != first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("import os; os._exit(3)", "its process exited with 3"),
        ("import ctypes; ctypes.string_at(0)", f"its process ended by signal {int(signal.SIGSEGV)}"),
        ("import os, time; os.kill(os.getppid(), 9); time.sleep(5)", "its process ended by signal 9"),
        ("import os; os.closerange(3, 64)", "its process"),
        (f"{REPLIES}; replies.write(b'AAA'); replies.flush(); os._exit(3)", "its process exited with 3"),
        (f"{REPLIES}; replies.write(b'A' * (1 << 26))", "its answer has more than 64 MiB"),
    ],
)
def test_a_worker_that_dies_is_replaced(worker, how: str, cause: str):
    dies = worker("dies", stderr=subprocess.DEVNULL)
    dies.start()
    with pytest.raises(WorkerFailed, match=cause):
        dies.call({"how": how}, 30.0)
    assert dies.call({"how": "pass"}, 30.0)["result"] is None


def test_programs_that_a_function_starts_find_their_own_modules(worker, monkeypatch):
    dies = worker("dies")
    monkeypatch.setenv("PYTHONPATH", "/own")
    reply = dies.call(
        {"how": "import os; raise KeyError(os.environ['PYTHONPATH'], 'COVEY_PYTHONPATH' in os.environ)"}, 9
    )
    assert reply["raised"][1] == "('/own', False)"


def test_exceptions_come_back_with_their_traceback(worker):
    kind, message, trace = worker("dies").call({"how": "raise SystemExit('now')"}, 30.0)["raised"]
    assert (kind, message) == ("SystemExit", "now") and "functions.py" in trace


def test_a_fork_that_returns_gives_no_second_answer(worker):
    dies = worker("dies")
    assert dies.call({"how": "import os; os.fork()"}, 30.0) == {"result": None, "calls": []}
    assert dies.call({"how": "1 / 0"}, 30.0)["raised"][0] == "ZeroDivisionError"


def test_a_request_that_is_never_read_is_late(worker):
    echo = worker("echo")
    echo.start()
    os.kill(-_group_of(echo), signal.SIGSTOP)
    with pytest.raises(WorkerLate):
        echo.call({"what": "x" * (1 << 20)}, 0.3)  # more than the pipe holds


def _group_of(worker: FunctionWorker) -> int:
    children = Path(f"/proc/{worker._process.pid}/task/{worker._process.pid}/children").read_text().split()
    return int(children[0])


def test_calls_of_recorded_functions_and_coroutines_come_back(worker):
    assert worker("records").call({}, 30.0, ["log"])["calls"] == [["log", ["a", [1.0]], {"key": 2}]]
    assert worker("waits").call({"what": 4}, 30.0)["result"] == 4


def test_a_busy_worker_ends_when_its_run_is_killed(tmp_path: Path):
    script, started = tmp_path / "endless.py", tmp_path / "started"
    # the regular expression takes longer than anybody lives, and never lets another thread run
    script.write_text(
        f"import os, re\n\ndef f():\n    open({str(started)!r}, 'w').write(str(os.getpid()))\n"
        "    re.match('(a*)*b', 'a' * 60)\n"
    )
    imports = "from pathlib import Path; from covey.runtime.isolation import FunctionWorker"
    run = f"{imports}; FunctionWorker(('f', Path({str(script)!r}))).call({{}}, 600.0)"
    process = subprocess.Popen([sys.executable, "-c", run])
    _wait_until(lambda: started.exists() and started.read_text())
    process.kill()
    process.wait()
    _wait_until(lambda: not Path(f"/proc/{started.read_text()}").exists())


def _wait_until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_worker_ends_when_nothing_refers_to_it(worker, tmp_path: Path):
    (tmp_path / "functions.py").write_text(FILE)
    about = FunctionWorker(("about_itself", tmp_path / "functions.py"))
    pid = about.call({}, 30.0)["result"][0]
    del about
    assert not Path(f"/proc/{pid}").exists()


def test_a_function_that_cannot_be_loaded_is_an_error(tmp_path: Path):
    (tmp_path / "broken.py").write_text("import no_such_module")
    with pytest.raises(RuntimeError, match="ModuleNotFoundError: No module named 'no_such_module'"):
        FunctionWorker(("f", tmp_path / "broken.py")).start()


# ---- what can be sent ------------------------------------------------------------------------------------------------


class Scaled:
    def __init__(self, by):
        self.by = by

    def __call__(self, value):
        return self.by * value


@pytest.mark.slow
def test_objects_of_modules_are_sent_by_value():
    worker = FunctionWorker(Scaled(3))
    assert worker.call({"value": 2}, 30.0)["result"] == 6
    worker.close()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda value: value, "<lambda>"),
        (Scaled(torch.nn.Linear(1, 1)), "it holds a model"),
        (Scaled(open(os.devnull)).__call__, "cannot pickle .*TextIOWrapper"),  # noqa: SIM115
    ],
)
def test_what_cannot_be_sent_is_refused(function, reason: str):
    with pytest.raises(ValueError, match=reason):
        FunctionWorker(function)


def test_functions_of_the_script_are_refused(monkeypatch):
    monkeypatch.setattr(test_functions_of_the_script_are_refused, "__module__", "__main__")
    with pytest.raises(ValueError, match="defined in the script"):
        FunctionWorker(test_functions_of_the_script_are_refused)


def test_marks_hold_limits_and_those_must_be_positive():
    @isolated
    def plain(): ...

    @isolated(memory=0.5, processes=2)
    def small(): ...

    assert tuple(declared(one, "covey_isolated") for one in (plain, small, print)) == (
        Quota(4.0, 64),
        Quota(0.5, 2),
        None,
    )
    for wrong in ({"memory": 0}, {"memory": float("inf")}, {"processes": 2.5}, {"start": 0}):
        with pytest.raises(ValueError, match="{}={}".format(*next(iter(wrong.items())))):
            isolated(**wrong)
    with pytest.raises(ValueError, match="cannot be marked"):
        isolated(len)
