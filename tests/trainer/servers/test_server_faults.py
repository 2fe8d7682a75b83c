"""Servers that are wrong, slow, dying or lying: every fault has one clear outcome, soon, and nothing is lost by it.

The catalogue is in `server_faults`; benchmarks/server-faults.md has a row for each.
"""

import itertools
import multiprocessing
import re
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from tests.support.servers import server_faults
from tests.support.servers.server_faults import CONFIG, CONTINUES, ENDS, FAULTS, START, WARNS, Scene

PAGE = Path(__file__).parents[3] / "benchmarks" / "server-faults.md"
TITLE = "# Faults of inference servers"

RESUMED = {
    *("the only server is killed, and stays away", "it refuses the weights", "weights are changed on their way"),
    *("SGLang: it is out of memory at every request", "SGLang: taking weights hangs"),
}
"""After one fault of a kind the run is resumed; after the others its checkpoint is looked at."""

MOST_SECONDS = 300.0  # on the busiest machine; deadlines of what hangs here are shorter than a second
"""Until an outcome; deadlines are 2 seconds in most of these runs, and the machine may be shared."""


@pytest.fixture
def scene(tmp_path, monkeypatch, fault):
    monkeypatch.chdir(tmp_path)
    for name in ("VLLM_API_KEY", "SGLANG_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    made = Scene(tmp_path, fault.sglang)
    with made.ending:
        yield made


class Weights(TrainerCallback):
    """Those after each step, from 1."""

    def __init__(self):
        self.steps = [{}]

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.steps.append(weights(model))


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def all_undisturbed(tmp_path_factory):
    """The weights after each step of a run in which nothing goes wrong, with vLLM's servers and with SGLang's."""
    found = []
    for sglang in (False, True):
        scene, after = Scene(tmp_path_factory.mktemp("undisturbed"), sglang), Weights()
        with scene.ending:
            steps = 2 + max(len(others) for fault, others in PASSING if fault.sglang == sglang)
            scene.trainer(scene.serve().url, parts={"callbacks": [after]}, max_steps=steps).train()
            found.append(after.steps)
    return found


@pytest.fixture
def undisturbed(all_undisturbed, fault):
    return all_undisturbed[fault.sglang]


def same(mine, expected):
    return mine.keys() == expected.keys() and all(torch.equal(mine[name], expected[name]) for name in mine)


def named(fault):
    return fault.what.replace(" ", "-") if isinstance(fault, server_faults.Fault) else "and-others"


def meet(fault, scene, others=()):
    """Let a fault happen and see that it ends soon; the error, or the trainer."""
    began = time.monotonic()
    try:
        return fault.meet(scene, others)
    finally:
        seconds = time.monotonic() - began
        print(f"{seconds:.1f} s")
        assert seconds < MOST_SECONDS


def check_message(fault, scene, error):
    notes = "\n".join([str(error), *getattr(error, "__notes__", [])])
    for pattern in fault.says:
        assert re.search(pattern, notes), f"{pattern!r} is not in {notes!r}"
    if isinstance(error, server_faults.ServerError | server_faults.NoServerLeft):
        assert "http" in notes, "which server?"
    if fault.outcome == ENDS:
        assert re.search(r"version 1\b|step 1\b", notes), f"which step? {notes!r}"


@pytest.mark.filterwarnings("ignore:.*was started with")
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.outcome in (CONFIG, START)], ids=named)
def test_what_will_not_do_is_said_before_anything_is_trained(scene, fault):
    with pytest.raises(fault.kind) as caught:
        meet(fault, scene)
    check_message(fault, scene, caught.value)
    assert not list(scene.path.glob("run/checkpoint-*"))


def one_after_another():
    """Faults that pass, each with those that need the same servers and settings: one run meets them all."""
    passing = [fault for fault in FAULTS if fault.outcome == CONTINUES]
    alone = [fault for fault in passing if fault.settings or fault.servers > 1]
    found = [(fault, ()) for fault in alone]
    for sglang, server in itertools.product((False, True), ({}, {"buckets": True})):
        alike = [f for f in passing if f not in alone and (f.sglang, f.server) == (sglang, server)]
        found += [(alike[0], tuple(alike[1:]))] if alike else []
    return found


PASSING = one_after_another()


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "others"), PASSING, ids=named)
def test_what_passes_changes_nothing(scene, fault, others, undisturbed):
    trained = meet(fault, scene, others)
    assert trained.state.global_step == 2 + len(others)
    assert same(weights(trained.model), undisturbed[2 + len(others)])
    assert not any(server.misbehaves() for server in scene.servers), "it went wrong as it should"


@pytest.mark.slow
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.outcome == ENDS], ids=named)
def test_a_lasting_fault_ends_the_run_which_can_be_resumed(scene, fault, undisturbed):
    with pytest.raises(fault.kind) as caught:
        meet(fault, scene)
    check_message(fault, scene, caught.value)
    [checkpoint] = scene.path.glob("run/checkpoint-*")
    assert same(load_file(checkpoint / "model.safetensors"), undisturbed[1])
    if fault.what not in RESUMED:
        return
    port = {name: value for name, value in fault.given().items() if name == "vllm_group_port"}
    resumed = scene.trainer(scene.serve(**fault.server).url, **port)  # beside the one that failed
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2
    assert same(weights(resumed.model), undisturbed[2])


@pytest.mark.slow
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.outcome == WARNS], ids=named)
def test_what_may_be_meant_is_a_warning(scene, fault, undisturbed):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert same(weights(meet(fault, scene).model), undisturbed[2])
    told = [str(w.message) for w in caught if re.search(fault.says[0], str(w.message))]
    assert len(told) == 1
    assert all(re.search(pattern, told[0]) for pattern in fault.says)


@pytest.fixture(autouse=True)
def nothing_is_left():
    """After a test that closes its engine, none of our threads or processes runs."""
    before = set(threading.enumerate())
    yield
    until = time.monotonic() + 5
    while (left := ours(before)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not left
    assert not multiprocessing.active_children()


def ours(before):
    """Threads of the library that are new; one that waits for a group that nobody joins ends at its own deadline."""
    new = set(threading.enumerate()) - before
    return [thread for thread in new if thread.name.startswith("covey") and thread.name != "covey-weights"]


# ---- the page ------------------------------------------------------------------------------------------------------


def test_the_page_has_a_row_for_every_fault():
    section = PAGE.read_text().partition(TITLE)[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    rows = {what.strip("`"): happens for what, happens, _ in cells if what not in ("What goes wrong", "---")}
    assert set(rows) == {fault.what for fault in FAULTS}
    for fault in FAULTS:
        assert rows[fault.what].startswith(fault.outcome), fault.what


def test_there_are_as_many_faults_as_were_promised():
    assert len({fault.what for fault in FAULTS}) >= 25
