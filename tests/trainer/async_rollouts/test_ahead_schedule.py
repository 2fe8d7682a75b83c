"""What is sampled ahead, when, from which prompts and with which weights: decided without a clock."""

from collections import deque
from contextlib import nullcontext

import pytest

from covey.config.algebra import BatchAlgebra
from covey.core.engine import EngineTraits, SamplingParams
from covey.data.dynamic_sampling import prompt_source
from covey.data.sampler import train_loader
from covey.engines.scripted import ScriptedEngine
from covey.rewards.call import RewardStream
from covey.rollout.collector import Collector, run_async
from covey.rollout.prompts import PromptCodec
from covey.trainer.async_rollouts import AsyncRollouts
from tests.support import tiny

EIGHT = tiny.rows(8)


def algebra(accumulation=2, steps=2, iterations=1):
    return BatchAlgebra(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps,
        num_iterations=iterations,
        num_generations=4,
    )


def seeds_and_prompts(prompt_ids, seed):
    return [4 + seed % 90, 4 + sum(prompt_ids) % 90]


def content(draws, rollouts):
    pairs = zip(draws, rollouts, strict=True)
    return [(draw.prompt, draw.sample, tuple(rollout.completion_ids)) for draw, rollout in pairs]


class Run:
    """A training loop without training: the dataloader's marks, and what a trainer does at each of them."""

    def __init__(self, max_staleness, a=None, *, rows=EIGHT, max_steps=8, traits=None):
        self.a = a or algebra()
        self.engine = ScriptedEngine(seeds_and_prompts)
        if traits is not None:
            self.engine.traits = traits
        self.events = []
        self.keys = iter(range(1000))
        self.max_steps = max_steps
        collector = Collector(self.engine, PromptCodec(tiny.tokenizer(), None, None), seed=3)
        per_epoch = len(rows) // self.a.prompts_per_rollout_batch if hasattr(rows, "__len__") else None
        self.ahead = AsyncRollouts(
            collector,
            SamplingParams(max_tokens=4),
            prompt_source(rows, None, self.a, 0, shuffle=True, seed=1),
            *(self.a, per_epoch, max_steps, max_staleness),
            next_key=lambda: ("train", next(self.keys)),
            send_weights=self._send,
            stream=RewardStream,
            waiting=nullcontext,
        )
        self.loader = train_loader(rows, self.a, 0, shuffle=True, seed=1, choose_late=True)

    def _send(self, version):
        self.engine.version = version
        self.events.append(("weights", version))
        return {}

    def steps(self):
        """(optimizer step, what the loader says at each of its micro-steps)."""
        step, micro, epoch = 0, deque(), 0
        while step < self.max_steps:
            if hasattr(self.loader.batch_sampler, "set_epoch"):
                self.loader.batch_sampler.set_epoch(epoch)
            for marks in self.loader:
                micro.append(marks)
                if len(micro) == self.a.gradient_accumulation_steps:
                    yield step, list(micro)
                    micro.clear()
                    step += 1
                    if step == self.max_steps:
                        return
            if micro:  # the last optimizer step of an epoch may be a short one
                yield step, list(micro)
                micro.clear()
                step += 1
            epoch += 1

    def go(self):
        taken = []
        for step, micro in self.steps():
            self.ahead.launch(step, micro[0].rollout_batch)
            for marks in micro:
                if marks.rollout_batch is not None:
                    flight, _ = self.ahead.take(marks.rollout_batch, step)
                    taken.append((step, flight))
                    self.events.append(("train", flight.number))
        self.ahead.close()
        return taken


CUTS = {
    "one update per rollout batch": algebra(),
    "four updates per rollout batch": algebra(accumulation=1, steps=2, iterations=2),
    "two rollout batches per update": algebra(accumulation=4, steps=2),
    "updates that mix rollout batches": algebra(accumulation=4, steps=3),
    "epochs that end within an update": algebra(accumulation=3, steps=2),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_weights_are_as_old_as_they_may_be_and_never_older(cut, staleness):
    run = Run(staleness, CUTS[cut], max_steps=9)
    taken = run.go()
    ages = [step - flight.version for step, flight in taken]
    assert max(ages) <= staleness
    # from where the run has come as far as it may look ahead: exactly as old, for what the run is made of
    assert ages[-1] == min(staleness, taken[-1][0])
    for _, flight in taken:
        assert all(v == flight.version for one in flight.rollouts() for v in one.versions)


@pytest.mark.parametrize("cut", CUTS)
def test_the_schedule_knows_the_first_step_of_every_rollout_batch(cut):
    run = Run(1, CUTS[cut], max_steps=9)
    taken = run.go()
    assert [step for step, _ in taken] == [run.ahead.begins(flight.number) for _, flight in taken]
    launched = next(run.keys)
    assert launched == len(taken) == len({flight.number for _, flight in taken})  # nothing that is not trained on


def test_one_step_ahead_is_launched_before_the_step_is_trained():
    # rollout batches 0 and 1 with the first weights; then, as step n begins, rollout batch n + 1 with weights n
    run = Run(1, max_steps=4)
    run.go()
    launched = [(served.version, served.request.seeds) for served in run.engine.served]
    assert [version for version, _ in launched] == [0, 0, 0, 0, 1, 1, 2, 2]  # two prompts a rollout batch
    assert run.events == [
        ("weights", 0),
        ("train", 0),
        ("weights", 1),
        ("train", 1),
        ("weights", 2),
        ("train", 2),
        ("train", 3),  # nothing is left to be sampled, so no weights are sent
    ]


@pytest.mark.parametrize("cut", CUTS)
def test_prompts_and_seeds_are_those_of_the_synchronous_run(cut):
    a = CUTS[cut]
    synchronous = []
    engine = ScriptedEngine(seeds_and_prompts)
    collector = Collector(engine, PromptCodec(tiny.tokenizer(), None, None), seed=3)
    loader, number, epoch = train_loader(EIGHT, a, 0, shuffle=True, seed=1), 0, 0
    while number < 6:
        loader.set_epoch(epoch)
        for draws in (step.samples for step in loader):
            if draws:
                rollouts = collector.collect(draws, SamplingParams(max_tokens=4), ("train", number))
                synchronous.append(content(draws, rollouts))
                number += 1
        epoch += 1
    for staleness in (1, 4):
        taken = Run(staleness, a, max_steps=20).go()
        found = [content(flight.samples, flight.rollouts()) for _, flight in taken]
        assert found[:5] == synchronous[:5] and len(found[:5]) == 5


def test_a_stream_is_read_ahead_in_its_own_order():
    class Stream:
        def __iter__(self):
            return iter(EIGHT[:6])

    drawn = [[d.row["prompt"] for d in flight.samples][::4] for _, flight in Run(2, rows=Stream(), max_steps=5).go()]
    names = [row["prompt"] for row in EIGHT[:6]]
    assert drawn == [names[0:2], names[2:4], names[4:6], names[0:2], names[2:4]]


def test_weights_wait_for_answers_of_an_engine_that_needs_it():
    run = Run(4, max_steps=6, traits=EngineTraits())
    open_when_sent = []
    send = run.ahead.send_weights

    def watching(version):
        open_when_sent.append([served.ended is None for served in run.engine.served])
        return send(version)

    run.engine.seconds = 0.01
    run.ahead.send_weights = watching
    run.go()
    assert len(open_when_sent) > 1 and not any(any(flags) for flags in open_when_sent)


def test_checkpoints_keep_rollouts_and_resample_failed_ones():
    def facts(flights):
        return [(f.number, f.version, f.key, [r.completion_ids for r in f.rollouts()]) for f in flights]

    straight = facts(flight for _, flight in Run(2).go())
    run = Run(2)
    at = run.steps()
    found = []
    for _ in range(3):
        step, micro = next(at)
        run.ahead.launch(step, micro[0].rollout_batch)
        for one in micro:
            if one.rollout_batch is not None:
                found.append(run.ahead.take(one.rollout_batch, step)[0])
    state = run.ahead.state_dict()
    run.ahead.close()
    assert [one["generation"] for one in state["flights"]] == [3, 4]
    state["flights"][1]["rollouts"] = None
    resumed = Run(2)
    resumed.keys = iter(range(5, 100))
    assert resumed.ahead.load_state_dict(state, 3)[0] == 0
    assert resumed.events == [("weights", 3)]  # before anything is sampled: the server may hold none of this run
    for step, micro in resumed.steps():
        if step < 3:
            continue
        resumed.ahead.launch(step, micro[0].rollout_batch)
        for one in micro:
            if one.rollout_batch is not None:
                found.append(resumed.ahead.take(one.rollout_batch, step)[0])
    resumed.ahead.close()
    assert straight[4][1] == 2
    straight[4] = (4, 3, *straight[4][2:])  # launched with version 2 before, and now with 3
    assert straight == facts(found)
    assert {version for rollout in found[4].rollouts() for version in rollout.versions} == {3}


def test_data_that_begin_anew_are_followed():
    run = Run(2)
    run.ahead.launch(3, 7)
    flight, _ = run.ahead.take(7, 3)
    assert (flight.number, flight.version) == (7, 3)
    run.ahead.launch(4, 8)
    assert run.ahead.take(8, 4)[0].version == 3  # as far ahead as ever
    run.ahead.close()


def test_a_background_failure_surfaces_with_its_rollout_batch():
    run = Run(1)
    second = run.a.prompts_per_rollout_batch  # the place of the second rollout batch's first request

    def fails_from_there(number):
        if number >= second:
            raise ConnectionError("the server is gone")
        return 0.0

    run.engine.seconds = fails_from_there
    run.ahead.launch(0, 0)
    run.ahead.settle()
    assert run.ahead.take(0, 0)[0].number == 0
    assert run.ahead.state_dict()["flights"][0]["rollouts"] is None
    with pytest.raises(ConnectionError, match="the server is gone"):
        run.ahead.take(1, 1)
    run.ahead.close()


def test_afterwards_the_collector_runs_as_before():
    run = Run(1)
    collector = run.ahead.collector
    assert collector.run != run_async
    run.go()
    assert collector.run == run_async
