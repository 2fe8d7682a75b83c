"""Threads wait briefly and then sleep, unless the user has decided otherwise or torch was there before."""

import os
import re
import subprocess
import sys

import pytest
import torch

from covey.core.findings import CheckWarning
from covey.runtime import waiting
from covey.runtime.waiting import BRIEFLY, POLICY, CoreUse, Waiting, choose, runtimes_in, used_by_others
from covey.trainer import build
from covey.trainer.integrations import first_step
from covey.trainer.integrations.first_step import OtherPrograms, check_waiting
from tests.support import runs

MAPS = """\
7f0-7f1 r-xp 00000000 08:01 11 /env/lib/python3.11/site-packages/torch/lib/libgomp.so.1
7f1-7f2 rw-p 00000000 08:01 11 /env/lib/python3.11/site-packages/torch/lib/libgomp.so.1
7f2-7f3 r-xp 00000000 08:01 12 /env/lib/python3.11/site-packages/scikit_learn.libs/libgomp-a34b3233.so.1.0.0
7f3-7f4 r-xp 00000000 08:01 13 /env/lib/libiomp5.so
7f4-7f5 r-xp 00000000 08:01 14 /lib/x86_64-linux-gnu/libcomponent.so.2
"""


@pytest.fixture
def nothing_set(monkeypatch):
    for name in (POLICY, *BRIEFLY):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(waiting, "loaded_runtimes", lambda variable: [])


def variables():
    return {name: os.environ[name] for name in (POLICY, *BRIEFLY) if name in os.environ}


def test_threads_sleep_after_a_short_loop(nothing_set):
    assert choose() == Waiting({}, ())
    assert variables() == BRIEFLY


@pytest.mark.parametrize("policy", ["active", "passive"])
def test_the_users_policy_holds_alone(nothing_set, monkeypatch, policy):
    monkeypatch.setenv(POLICY, policy)
    assert choose() == Waiting({POLICY: policy}, ())
    assert variables() == {POLICY: policy}


def test_a_variable_of_the_user_is_kept(nothing_set, monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert choose() == Waiting({"GOMP_SPINCOUNT": "7"}, ())
    assert variables() == {**BRIEFLY, "GOMP_SPINCOUNT": "7"}
    assert "GOMP_SPINCOUNT=7" in str(choose())


def test_a_child_finds_what_its_parent_has_set(nothing_set):
    choose()
    assert choose() == Waiting(BRIEFLY, ())
    assert str(choose()) == str(Waiting({}, ()))


def test_a_runtime_that_is_loaded_has_not_read_what_is_set_then(nothing_set, monkeypatch):
    there = {"GOMP_SPINCOUNT": ["/no/such/libgomp.so.1"]}
    monkeypatch.setattr(waiting, "loaded_runtimes", lambda variable: there.get(variable, []))
    assert choose() == Waiting({}, ("GOMP_SPINCOUNT",))
    assert variables() == BRIEFLY  # for children
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")  # it was set before the runtime was loaded, which read it
    assert choose().late == ()


def test_a_runtime_that_can_be_told_is_not_late(nothing_set, monkeypatch):
    monkeypatch.setattr(waiting, "loaded_runtimes", lambda variable: ["libiomp5.so"] * (variable == "KMP_BLOCKTIME"))
    monkeypatch.setattr(waiting, "_told", lambda path: True)
    assert choose() == Waiting({}, ())


def test_runtimes_are_those_of_torch():
    torchs = "/env/lib/python3.11/site-packages/torch/lib/libgomp.so.1"
    assert runtimes_in(MAPS, "GOMP_SPINCOUNT") == [torchs]
    assert runtimes_in(MAPS, "KMP_BLOCKTIME") == ["/env/lib/libiomp5.so"]
    assert runtimes_in(torchs.replace("libgomp", "libgomp-98b21ff3"), "GOMP_SPINCOUNT")


def printed(code, **more):
    kept = {name: value for name, value in os.environ.items() if name not in (POLICY, *BRIEFLY)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**kept, **more})
    return run.stdout.strip(), run.stderr


def test_importing_covey_sets_them_before_torch_is_there():
    code = "import covey, os, sys; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    assert printed(code)[0] == f"{BRIEFLY['GOMP_SPINCOUNT']} False"
    assert printed("import covey, os; print('GOMP_SPINCOUNT' in os.environ)", **{POLICY: "passive"})[0] == "False"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have other runtimes")
@pytest.mark.parametrize(
    ("imports", "set_before", "read", "late"),
    [
        ("covey, torch", {}, BRIEFLY["GOMP_SPINCOUNT"], "()"),
        ("torch, covey", {}, "300000", "('GOMP_SPINCOUNT',)"),  # libgomp's default
        ("covey, torch", {"GOMP_SPINCOUNT": "7"}, "7", "()"),
        ("torch, covey", {"GOMP_SPINCOUNT": "7"}, "7", "()"),
    ],
)
def test_libgomp_reads_them_when_torch_is_loaded(imports, set_before, read, late):
    code = f"import {imports}\nfrom covey.runtime.waiting import CHOSEN\nprint(CHOSEN.late)"
    said, display = printed(code, OMP_DISPLAY_ENV="VERBOSE", **set_before)
    found = re.search(r"GOMP_SPINCOUNT = '(\d+)'", display)
    if found is None:
        pytest.skip("this torch has another OpenMP runtime")
    assert (found[1], said) == (read, late)


def test_cores_of_others_are_the_busy_ones_that_are_not_ours():
    # in 10 s: 16 s of the cores, 9 of them ours, so others used 7 / 10
    assert used_by_others(CoreUse(100, 50, 20), CoreUse(110, 66, 29)) == pytest.approx(0.7)
    assert used_by_others(CoreUse(100, 50, 20), CoreUse(110, 51, 29)) == 0.0  # clocks that disagree a little
    assert used_by_others(CoreUse(100, 50, 20), CoreUse(100, 60, 20)) == 0.0


def test_readings_grow():
    before = CoreUse.now()
    sum(range(200_000))
    after = CoreUse.now()
    assert after.clock > before.clock and after.busy >= before.busy and after.own >= before.own > 0


LATE = Waiting({}, ("GOMP_SPINCOUNT",))


@pytest.mark.parametrize(
    ("found", "used", "codes"),
    [
        (LATE, 0.9, ["threads-spin"]),
        (LATE, 0.1, []),
        (Waiting({}, ()), 0.9, []),
        (Waiting({POLICY: "active"}, ()), 2, []),
    ],
)
def test_threads_that_do_not_sleep_are_pointed_out_where_others_need_the_cores(found, used, codes):
    assert [one.code for one in check_waiting(found, used)] == codes


def test_the_first_step_is_looked_at(monkeypatch, recwarn):
    readings = iter([CoreUse(0, 0, 0), CoreUse(10, 15, 5)])
    monkeypatch.setattr(CoreUse, "now", classmethod(lambda cls: next(readings)))
    callback = OtherPrograms(LATE)
    for _ in range(2):
        callback.on_step_begin(None, None, None)
        callback.on_step_end(None, None, None)
    assert [one.message.finding.code for one in recwarn if isinstance(one.message, CheckWarning)] == ["threads-spin"]


@pytest.mark.slow
@pytest.mark.parametrize(("found", "threads", "told"), [(LATE, 2, 1), (LATE, 1, 0), (Waiting({}, ()), 2, 0)])
def test_a_run_says_it_once(tmp_path, monkeypatch, recwarn, found, threads, told):
    monkeypatch.setattr(build, "CHOSEN", found)
    monkeypatch.setattr(first_step, "used_by_others", lambda before, after: 1.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    runs.trainer(tmp_path, max_steps=2).train()
    codes = [one.message.finding.code for one in recwarn if isinstance(one.message, CheckWarning)]
    assert codes.count("threads-spin") == told
