"""Processes that sample from one model run it equally often, whatever each has to do."""

import threading
from functools import partial

import pytest
import torch

from covey.engines.native.engine import NativeEngine
from covey.engines.native.inference_contexts import lockstep
from covey.engines.native.recurrent_engine import RecurrentEngine
from tests.engines.native.test_native_engine import PROMPTS, sample, tokens
from tests.support import tiny

CPU = torch.device("cpu")


class Votes:
    """What processes tell one another, for threads."""

    def __init__(self, processes):
        self.barrier = threading.Barrier(processes, timeout=60)
        self.busy = [False] * processes

    def of(self, rank):
        def any_busy(busy):
            self.busy[rank] = busy
            self.barrier.wait()
            found = any(self.busy)
            self.barrier.wait()
            return found

        return any_busy


def in_threads(works):
    """Each work done by a thread of its own, on a model of its own; what they return, and each model's passes."""
    votes, passes, found = Votes(len(works)), [0] * len(works), [None] * len(works)

    models = [tiny.model() for _ in works]

    def process(rank):
        model = models[rank]

        def count(*args):
            passes[rank] += 1

        model.register_forward_hook(count)
        found[rank] = works[rank](model, partial(lockstep, lambda: model, votes.of(rank), CPU))

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, passes


def running(number):
    def work(model, in_step):
        with torch.no_grad(), in_step():
            for _ in range(number):
                model(torch.zeros(1, 3, dtype=torch.long))

    return work


@pytest.mark.parametrize("numbers", [(4, 1), (0, 3), (0, 0), (2, 2, 5)])
def test_every_process_runs_as_many_passes_as_the_busiest(numbers):
    _, passes = in_threads([running(number) for number in numbers])
    assert passes == [max(numbers)] * len(numbers)


def sampling(kind, prompts):
    def work(model, in_step):
        more = {"pad_token_id": 0, "whole_calls": True} if kind is NativeEngine else {}
        engine = kind(lambda: model, eos_token_ids={1}, max_sequences=4, forward_context=in_step, device=CPU, **more)
        return sample(engine, prompts)

    return work


@pytest.mark.slow
@pytest.mark.parametrize("kind", [NativeEngine, RecurrentEngine])
def test_lockstep_changes_no_sample(kind):
    shares = [PROMPTS, PROMPTS[:1], []]
    found, passes = in_threads([sampling(kind, share) for share in shares])
    assert len(set(passes)) == 1 and passes[0] > 12
    alone = NativeEngine(lambda: model, eos_token_ids={1}, pad_token_id=0)
    model = tiny.model()
    for share, answers in zip(shares, found, strict=True):
        assert tokens(answers) == (tokens(sample(alone, share)) if share else [])


def test_failing_process_does_not_wait_for_the_others():
    model = tiny.model()
    in_step = lockstep(lambda: model, lambda busy: pytest.fail("asked the others"), CPU)
    with pytest.raises(RuntimeError, match="of its own"), in_step:
        raise RuntimeError("of its own")
    assert not model._forward_pre_hooks
