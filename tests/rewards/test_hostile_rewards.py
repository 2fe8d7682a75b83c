"""Reward functions in processes of their own: whatever they do ends in time, and harms no other completion."""

import math
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from covey.core.findings import CheckError
from covey.rewards import CharEnd, RewardError, RewardSuite, RewardWarning, get_regex_reward, per_completion
from covey.rewards.call import score as call
from covey.rewards.functions import IsolatedReward, RewardBatch
from covey.rewards.resolve import BUILT_IN
from covey.runtime.child_process import Quota
from covey.runtime.isolation import FunctionWorker
from tests.rewards import hostile_rewards as functions
from tests.rewards.conftest import RecordingContext, make_rollout
from tests.support import runs

DEADLINE = 0.3
LATE = 200.0  # seconds after it: less than 1 on a machine of its own, but tests run next to others
FAST = ("exits with 3", "segfaults", "stops its parent", "backtracks", "sleeps with signals blocked", "leaks", "forks")
FAST += ("ends its reader", "kills its parent and stays", "forges an answer", "breaks json")
FAST += ("holds the interpreter", "writes to all files", "hangs when pickled", "leaves a daemon", "forks and returns")
CASES = [
    pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow])
    for name in {**functions.NO_REWARD, **functions.HARMLESS}
]


@pytest.fixture(scope="module")
def hostile():
    os.environ["COVEY_TEST_HOSTILE"] = mark = f"hostile-{os.getpid()}"
    reward = IsolatedReward(functions.hostile, "hostile", Quota(memory=0.3, processes=16))
    yield reward
    reward.worker.close()
    del os.environ["COVEY_TEST_HOSTILE"]
    assert not left_behind(mark)


def left_behind(mark: str) -> list[str]:
    """Names of processes, other than this one, that have this mark in their environment."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if (
                process.name.isdigit()
                and int(process.name) != os.getpid()
                and mark in (process / "environ").read_text()
            ):
                found.append((process / "cmdline").read_text())
        except OSError:  # it ended
            continue
    return found


def batch_of(*completions: str, **columns) -> RewardBatch:
    return RewardBatch([{"prompt": "q", **columns}] * len(completions), [make_rollout(text) for text in completions])


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_reward_ends_at_its_deadline(hostile, name: str):
    assert call(hostile, batch_of("fine"), None, 20.0).values == [1.0]  # the process is up
    start = time.monotonic()
    [value] = call(hostile, batch_of(name), None, DEADLINE).values
    assert time.monotonic() - start < DEADLINE + LATE
    assert value == 1.0 if name in functions.HARMLESS else math.isnan(value)
    hostile.worker.close()
    assert not left_behind(os.environ["COVEY_TEST_HOSTILE"])


def test_there_are_sixty_of_them():
    assert len(functions.NO_REWARD) + len(functions.HARMLESS) >= 60


@pytest.fixture
def suites():
    made = []

    def make(reward, **settings):
        made.append(RewardSuite(reward, isolation="process", **settings))
        return made[-1]

    yield make
    for suite in made:
        suite.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [("segfaults", "failures"), pytest.param("loops", "timeouts", marks=pytest.mark.slow)]
)
def test_other_completions_keep_their_rewards(suites, score, name: str, kind: str):
    suite = suites(functions.hostile, timeout=12.0)
    with pytest.warns(RewardWarning):
        rewards, stats = score(suite, ["a", name, "b"])
    assert rewards == [[1.0], [None], [1.0]]
    assert stats[f"rewards/hostile/{kind}"] == 1


def test_killing_a_worker_costs_no_reward(suites, score, tmp_path: Path):
    suite = suites(functions.kills_itself_once)
    flag = str(tmp_path / "flag")
    assert score(suite, ["a", "bb", "ccc"], flag=[flag] * 3)[0] == [[1.0], [2.0], [3.0]]
    assert os.path.exists(flag)


def test_arguments_and_logs_pass_as_in_the_trainer(suites):
    results = []
    for isolation in ("thread", "process"):
        context = RecordingContext(SimpleNamespace(global_step=7, log_history=[{"loss": torch.ones(1)}]))
        suite = (
            suites(functions.reads_everything) if isolation == "process" else RewardSuite(functions.reads_everything)
        )
        batch = batch_of("a", "bb", answer="4")
        rewards = suite(batch.rows, batch.rollouts, context).rewards.tolist()
        results.append((rewards, context.extras, context.metrics))
    assert results[0] == results[1] == ([[3.0], [4.0]], {"answers": ["4", "4"]}, [("step", 7.0)])


@pytest.mark.slow
def test_async_marked_and_built_in_functions_run_there(suites, score):
    suite = suites([functions.waits, get_regex_reward("b"), per_completion(functions.where)])
    rewards = score(suite, ["a", "b"])[0]
    assert [row[:2] for row in rewards] == [[1.0, 0.0], [1.0, 1.0]]
    assert rewards[0][2] != os.getpid()
    with suite.stream(None) as stream:  # on a thread of its own
        batch = batch_of("a", "b")
        stream.on_rollouts(0, batch.rows, batch.rollouts)
        assert suite(batch.rows, batch.rollouts, RecordingContext(), stream).rewards.tolist() == rewards


def step_rewards(completions, **kwargs):
    return [[(CharEnd(1), 1.0), (CharEnd(len(text)), torch.tensor(0.5))] for text in completions]


@pytest.mark.slow  # the worker imports torch
def test_rewards_of_steps_and_tensors_come_back():
    reward = IsolatedReward(step_rewards, "steps", Quota(4.0, 16))
    [steps] = call(reward, batch_of("abc"), None, 60.0).steps
    assert steps == [(CharEnd(1), 1.0), (CharEnd(3), 0.5)] and type(steps[0][0]) is CharEnd
    reward.worker.close()


def test_what_cannot_be_sent_is_an_error_with_advice(suites):
    for reward in (lambda completions: [1.0], functions.needs_environments):
        with pytest.raises(CheckError, match="reward_isolation='thread'") as error:
            suites(reward)
        assert error.value.codes == ["reward-isolation"]


def test_every_built_in_reward_can_be_sent(monkeypatch):
    monkeypatch.setattr(FunctionWorker, "start", lambda self: None)
    made = [get_regex_reward("4"), *(value for name, value in BUILT_IN.items() if name.endswith("_reward"))]
    made += [BUILT_IN[name](**given) for name, given in FACTORIES.items()]
    assert len([IsolatedReward(reward, "built_in", Quota(4.0, 16)) for reward in made]) >= 10


FACTORIES = {
    "get_cosine_scaled_reward": {"max_len": 10},
    "get_repetition_penalty_reward": {},
    "get_soft_overlong_punishment": {"max_completion_len": 10, "soft_punish_cache": 5},
    "get_json_reward": {},
}


def test_an_argument_that_cannot_be_sent_is_an_error(suites, score):
    with pytest.raises(RewardError, match="cannot be sent to its process"):
        score(suites(functions.waits), ["a"], lock=[(one for one in "abc")])


# ---- in training -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_is_the_same_and_leaves_no_process(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("COVEY_TEST_TRAINED", mark := f"trained-{os.getpid()}")
    trained = []
    for isolation in ("thread", "process"):
        parts = {"reward_funcs": functions.shares_of_digits}
        trainer = runs.trainer(tmp_path / isolation, parts=parts, reward_isolation=isolation, stream_rewards=True)
        assert bool(left_behind(mark)) == (isolation == "process")
        trainer.train()
        assert not left_behind(mark)
        trained.append(runs.weights(trainer))
    assert all(torch.equal(one, other) for one, other in zip(*trained, strict=True))


class World:
    def reset(self, **row):
        return "begin"

    def step(self, text):
        return "", 1.0, True, {}


def test_an_error_in_training_leaves_no_process(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("COVEY_TEST_FAILED", mark := f"failed-{os.getpid()}")
    parts = {"reward_funcs": functions.needs_environments, "environment_factory": World}
    with pytest.raises(CheckError, match="asks for `environments`"):
        runs.trainer(tmp_path, parts=parts, reward_isolation="process")
    trainer = runs.trainer(tmp_path, parts={"reward_funcs": functions.hostile}, reward_isolation="process")
    monkeypatch.setattr(trainer.updates, "gradients", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert not left_behind(mark)
