"""Ctrl-C and SIGTERM: the answer, what is saved, and how the process ends, wherever a run is."""

import logging
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from covey.runtime.interrupts import ANSWERED, Interrupts
from tests.support import forking, runs, tiny
from tests.support.launching import environment

SAVING = {"save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Weights of a run of three steps that nobody stops."""
    straight = runs.trainer(tmp_path_factory.mktemp("saved"), max_steps=3)
    straight.train()
    return runs.weights(straight)


def hang():
    for _ in range(3000):
        time.sleep(0.01)
    raise AssertionError("nobody has ended it")


class Stops(TrainerCallback):
    """Sends signals at a place of the second step, each once the one before was answered, and then waits there."""

    def __init__(self, *numbers, hangs=False):
        self.__name__, self.numbers, self.hangs, self.calls, self.trainer = "stops", numbers, hangs, 0, None

    def send(self):
        for count, number in enumerate(self.numbers, 1):
            os.kill(os.getpid(), number)
            while self.trainer.stop.count < count:
                time.sleep(0.01)
        if self.hangs:
            hang()

    def __call__(self, completion_ids, **kwargs):
        self.calls += 1
        if self.calls == 2:
            self.send()
        return runs.longer(completion_ids)


def stopped(folder, stops, ends=KeyboardInterrupt, before=lambda trainer: None, parts=None, **changes):
    """A run of three steps that a signal ends, and what it said, line by line."""
    asked = runs.trainer(
        folder, parts=parts or {"reward_funcs": stops}, **{"save_strategy": "epoch", "max_steps": 3, **changes}
    )
    stops.trainer, said = asked, []
    asked.stop.say = said.append
    before(asked)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(ends) as ended:
        asked.train()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert all(thread.name != "covey-signals" for thread in threading.enumerate())
    assert said[-1] == asked.report.farewell()
    return asked, said, ended.value


def assert_continues(folder, saved, step):
    """The only checkpoint is of this step, and a run that continues from it ends as one that nobody has stopped."""
    assert [path.name for path in folder.glob("checkpoint-*")] == [f"checkpoint-{step}"]
    resumed = runs.trainer(folder, max_steps=3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "since .* was saved, this run has changed")  # the reward's name
        resumed.train(resume_from_checkpoint="auto")
    assert all(map(torch.equal, runs.weights(resumed), saved))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "ends"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_finishes_the_step_and_saves_it(tmp_path, saved, number, ends):
    _, said, error = stopped(tmp_path, Stops(number), ends)
    assert len(said) == 2
    assert error.code == 143 if ends is SystemExit else getattr(error, ANSWERED)
    assert_continues(tmp_path, saved, 2)


@pytest.mark.slow
def test_a_second_interrupt_ends_the_step_and_saves_those_before(tmp_path, saved):
    stopped(tmp_path, Stops(2, 2, hangs=True))
    assert_continues(tmp_path, saved, 1)


@pytest.mark.slow
def test_a_step_that_takes_too_long_ends_at_the_deadline_and_those_before_are_saved(tmp_path, saved):
    def soon(trainer):
        trainer.stop.seconds = 0.3

    stopped(tmp_path, Stops(15, hangs=True), SystemExit, soon)
    assert_continues(tmp_path, saved, 1)


def test_repeated_sigterm_is_one_request(tmp_path, saved):
    class Twice(Stops):
        def send(self):
            super().send()
            os.kill(os.getpid(), signal.SIGTERM)

    asked, _, _ = stopped(tmp_path, Twice(15), SystemExit)
    assert asked.stop.count == 1
    assert_continues(tmp_path, saved, 2)


class AtUpdate(Stops):
    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        if state.global_step == 1:
            optimizer.optimizer.register_step_post_hook(lambda *given: self.send())


class BeforeStep(Stops):
    def on_save(self, args, state, control, **kwargs):
        self.send()


@pytest.mark.slow
def test_weights_that_are_changing_are_not_left_half_changed(tmp_path, saved):
    stops = AtUpdate(2, 2)
    stopped(tmp_path, stops, parts={"callbacks": [stops]})
    assert_continues(tmp_path, saved, 2)


@pytest.mark.slow
def test_a_request_between_two_steps_begins_no_further_one(tmp_path, saved):
    stops = BeforeStep(2)
    stopped(tmp_path, stops, parts={"callbacks": [stops]}, save_strategy="steps", save_steps=2)
    assert_continues(tmp_path, saved, 2)


@pytest.mark.slow
def test_an_evaluation_is_cut_short_and_its_step_saved(tmp_path, saved):
    def reward(completion_ids, trainer_state, **kwargs):
        if trainer_state.global_step == 2:  # which the third step's training does not reach
            stops.send()
        return runs.longer(completion_ids)

    stops = Stops(2, hangs=True)
    parts = {"reward_funcs": reward, "eval_dataset": tiny.rows()[:4]}
    stopped(tmp_path, stops, parts=parts, eval_strategy="steps", eval_steps=2)
    assert_continues(tmp_path, saved, 2)


@pytest.mark.slow
def test_a_checkpoint_is_finished_after_the_deadline_and_a_second_request(tmp_path, saved):
    stops = Stops(15)

    def late(trainer):
        write = trainer.checkpoints.before_saving

        def before_saving():
            write()
            trainer.stop.deadline = 0.0  # which has passed
            os.kill(os.getpid(), signal.SIGINT)
            while trainer.stop.count < 2 or trainer.stop.deadline == 0.0:
                time.sleep(0.01)

        trainer.checkpoints.before_saving = before_saving

    stopped(tmp_path, stops, SystemExit, late)
    assert_continues(tmp_path, saved, 2)


def test_a_third_interrupt_leaves_without_saving(tmp_path):
    def slow(trainer):
        write = trainer.checkpoints.before_saving

        def before_saving():
            write()
            os.kill(os.getpid(), signal.SIGINT)
            hang()

        trainer.checkpoints.before_saving = before_saving

    stopped(tmp_path, Stops(2, 2, hangs=True), before=slow)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_a_run_that_saves_nothing_ends_at_the_first_interrupt(tmp_path):
    asked, said, _ = stopped(tmp_path, Stops(2, hangs=True), save_strategy="no")
    assert asked.state.global_step == 1 and len(said) == 2


def test_an_interrupt_in_a_task_is_logged_by_none(tmp_path, caplog):
    """asyncio logs what ends a task that nobody awaits any more."""

    def sampled(trainer):
        generate = trainer.collector.engine.generate

        async def wrapped(request):
            stops.calls += 1
            if stops.calls == 3:  # of 2 groups a step
                stops.send()
            return await generate(request)

        trainer.collector.engine.generate = wrapped

    stops = Stops(2, 2, hangs=True)
    with caplog.at_level(logging.DEBUG, "asyncio"):
        stopped(tmp_path, stops, before=sampled, parts={"reward_funcs": runs.longer})
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


def test_an_evaluation_without_training_ends_with_an_answer(tmp_path, capfd):
    def reward(completion_ids, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        hang()

    asked = runs.trainer(tmp_path, parts={"reward_funcs": reward, "eval_dataset": tiny.rows()[:4]})
    with pytest.raises(KeyboardInterrupt) as ended:
        asked.evaluate()
    assert getattr(ended.value, ANSWERED)
    assert capfd.readouterr().err.splitlines()[-2:] == ["covey: stopping", "covey: stopped"]


def test_an_interrupt_that_is_caught_is_raised_again(monkeypatch):
    monkeypatch.setattr("covey.runtime.interrupts.REPEAT_SECONDS", 0.05)
    one, caught = Interrupts(), 0
    one.say = lambda line: None
    with pytest.raises(KeyboardInterrupt), one.listening():
        while caught < 2:
            try:
                if not caught:
                    os.kill(os.getpid(), signal.SIGINT)
                hang()
            except KeyboardInterrupt:
                caught += 1
    assert caught == 2 and one.count == 1


def test_another_error_of_a_run_that_nobody_stops_is_its_own():
    with pytest.raises(ZeroDivisionError), Interrupts().listening():
        raise ZeroDivisionError


# ---- processes -----------------------------------------------------------------------------------------------------

SCRIPT = """
import ctypes, sys, time
from pathlib import Path
from covey.runtime import interrupts
from tests.support import runs, tiny

folder, place = Path(sys.argv[1]), sys.argv[2]
interrupts.LAST_RESORT = 0.2
calls = 0

def here(*given, **named):
    (folder / "here").touch()
    if place == "stuck":  # in C, which no signal ends
        lock = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(lock)
    while True:
        time.sleep(0.01)

def reward(completion_ids, trainer_state, **kwargs):
    if place in ("reward", "stuck") and trainer_state.global_step == 1:
        here()
    return runs.longer(completion_ids)

trainer = runs.trainer(folder, parts={"reward_funcs": reward}, max_steps=3, save_strategy="steps", save_steps=1)

def at(place_there, owner, name, second=True):
    there = getattr(owner, name)
    def reached(*given, **named):
        if place == place_there and trainer.state.global_step == 1:
            here()
        return there(*given, **named)
    setattr(owner, name, reached)

at("sampling", trainer.collector.engine, "generate")
at("scoring", trainer.behaviour, "score")
at("backward", trainer.accelerator, "backward")
trainer.train()
"""


def interrupted(tmp_path, place, number, times, script=SCRIPT):
    """Status and lines of a process that is asked to end so often, each time once it has answered."""
    with (tmp_path / "out").open("wb") as out:
        command = [sys.executable, "-c", script, str(tmp_path), place]
        one = forking.Forked(command, env=environment(), stdout=out, stderr=out, start_new_session=True)

    def lines():
        said = (tmp_path / "out").read_text().splitlines()
        return [line for line in said if line.startswith("covey: ") and not line.startswith("covey: warning")]

    try:
        until = time.monotonic() + 120
        for answers in range(times):
            while not ((tmp_path / "here").exists() and len(lines()) >= answers):
                assert one.poll() is None and time.monotonic() < until, (tmp_path / "out").read_text()
                time.sleep(0.02)
            one.send_signal(number)
        return one.wait(120), (tmp_path / "out").read_text()
    finally:
        one.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "number", "times"),
    [
        ("reward", signal.SIGINT, 2),
        ("stuck", signal.SIGINT, 3),
        pytest.param("sampling", signal.SIGINT, 2, marks=pytest.mark.slow),
        pytest.param("scoring", signal.SIGINT, 2, marks=pytest.mark.slow),
        pytest.param("backward", signal.SIGINT, 2, marks=pytest.mark.slow),
    ],
)
def test_a_script_ends_with_the_command_that_continues_it(tmp_path, place, number, times):
    status, said = interrupted(tmp_path, place, number, times)
    assert status in (-signal.SIGINT, 128 + signal.SIGINT)
    assert said.splitlines()[-1].endswith("checkpoint-1 with: trainer.train(resume_from_checkpoint=True)"), said
    assert "Traceback" not in said and "never retrieved" not in said, said
    assert Path(tmp_path, "checkpoint-1").is_dir()


COMMAND = """
import sys, time
from pathlib import Path
from covey.cli import main

def hang(*given, **named):
    Path(sys.argv[1], "here").touch()
    try:
        while True:
            time.sleep(0.01)
    except KeyboardInterrupt as error:  # as a library does that cannot be imported
        raise RuntimeError("another error") from error

sys.modules["interrupted_command"] = type(sys)("interrupted_command")
sys.modules["interrupted_command"].hang = hang
main.COMMANDS["env"] = ("interrupted_command", "hang", "")
sys.exit(main.main(["env"]))
"""


def test_a_command_ends_without_a_traceback_wherever_it_is(tmp_path):
    status, said = interrupted(tmp_path, "", signal.SIGINT, 1, COMMAND)
    assert status == 128 + signal.SIGINT
    assert said.splitlines() == ["covey: stopping", "covey: stopped"]
