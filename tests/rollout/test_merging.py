"""Requests for the same tokens at the same moment are one request, and nothing else changes."""

import asyncio

import pytest

from covey.core.engine import SampleRequest, SamplingParams
from covey.core.media import Media
from covey.core.records import Completion, FinishReason
from covey.rollout.request_coalescing import RequestCoalescer

PARAMS = SamplingParams(max_tokens=4)


class Engine:
    """Answers each seed with the seed, once the gate is open; notes what came and what was given up."""

    def __init__(self, error=None):
        self.requests = []
        self.cancelled = 0
        self.error = error
        self.gate = asyncio.Event()
        self.gate.set()

    async def generate(self, request):
        self.requests.append(request)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return [Completion([seed], None, FinishReason.STOP) for seed in request.seeds]


def request(seeds, prompt=(5, 6), params=PARAMS, **changes):
    return SampleRequest(list(prompt), len(seeds), params, list(seeds), **changes)


def ask(*requests, error=None):
    """The engine's requests, as (prompt, seeds), and the answers to each of ours as seeds."""

    async def all_at_once():
        engine = Engine(error)
        merged = RequestCoalescer(engine)
        answers = await asyncio.gather(*map(merged.generate, requests))
        asked = [(one.prompt_ids, one.n, one.seeds) for one in engine.requests]
        return asked, [[completion.token_ids[0] for completion in answer] for answer in answers]

    return asyncio.run(all_at_once())


def test_equal_prompts_become_one_request_with_own_results():
    asked, answers = ask(request([1]), request([2, 3]), request([4]))
    assert asked == [([5, 6], 4, [1, 2, 3, 4])]
    assert answers == [[1], [2, 3], [4]]


def test_other_prompts_are_other_requests():
    asked, answers = ask(request([1]), request([2], prompt=(5, 7)), request([3]))
    assert asked == [([5, 6], 2, [1, 3]), ([5, 7], 1, [2])]
    assert answers == [[1], [2], [3]]


def test_other_settings_are_other_requests():
    warm = SamplingParams(max_tokens=4, temperature=0.5)
    asked, _ = ask(request([1]), request([2], params=warm), request([3], params=SamplingParams(max_tokens=4)))
    assert asked == [([5, 6], 2, [1, 3]), ([5, 6], 1, [2])]


def test_drafts_and_other_images_prevent_coalescing():
    cat, dog = (Media((name,), {}, {}, 0, 1, (7,)) for name in ("a cat", "a dog"))
    with_cat, with_dog, again = (request([seed], media=(one,)) for seed, one in ((2, cat), (5, dog), (6, cat)))
    asked, _ = ask(request([1]), with_cat, request([3], drafts=[[7]]), request([4]), with_dog, again)
    assert [seeds for _, _, seeds in asked] == [[1, 4], [2, 6], [3], [5]]


def test_what_is_asked_for_later_is_a_request_of_its_own():
    async def twice():
        engine = Engine()
        merged = RequestCoalescer(engine)
        await merged.generate(request([1]))
        await merged.generate(request([2]))
        return [one.seeds for one in engine.requests]

    assert asyncio.run(twice()) == [[1], [2]]


def test_siblings_that_are_tasks_of_their_own_still_ask_together():
    """Each goes as far as its first request in its own turn of the loop; all are put together."""

    async def siblings():
        engine = Engine()
        merged = RequestCoalescer(engine)

        async def sibling(number):
            first = await merged.generate(request([number]))
            second = await merged.generate(request([10 + number], prompt=(5, 6, 9)))
            return first[0].token_ids + second[0].token_ids

        answers = await asyncio.gather(*(asyncio.ensure_future(sibling(number)) for number in range(3)))
        return [one.seeds for one in engine.requests], answers

    assert asyncio.run(siblings()) == ([[0, 1, 2], [10, 11, 12]], [[0, 10], [1, 11], [2, 12]])


def test_who_gives_up_does_not_cancel_the_others():
    async def one_gives_up():
        engine = Engine()
        engine.gate.clear()
        merged = RequestCoalescer(engine)
        asking = [asyncio.ensure_future(merged.generate(request([seed]))) for seed in (1, 2)]
        await asyncio.sleep(0.001)
        asking[0].cancel()
        await asyncio.sleep(0.001)
        engine.gate.set()
        answer = await asking[1]
        return asking[0].cancelled(), [one.token_ids for one in answer], engine.cancelled

    assert asyncio.run(one_gives_up()) == (True, [[2]], 0)


def test_what_was_given_up_before_it_was_sent_is_not_asked_for():
    async def given_up():
        engine = Engine()
        merged = RequestCoalescer(engine)
        asking = [asyncio.ensure_future(merged.generate(request([seed], prompt=(seed,)))) for seed in (1, 2)]
        await asyncio.sleep(0)  # they have asked, and nothing is sent yet
        asking[0].cancel()
        await asyncio.wait(asking)
        return [one.seeds for one in engine.requests]

    assert asyncio.run(given_up()) == [[2]]


def test_an_engines_error_reaches_everybody_who_asked():
    async def failing():
        merged = RequestCoalescer(Engine(RuntimeError("out of memory")))
        asked = (merged.generate(request([seed])) for seed in (1, 2))
        return await asyncio.gather(*asked, return_exceptions=True)

    first, second = asyncio.run(failing())
    assert str(first) == str(second) == "out of memory"


def test_closing_gives_up_what_is_under_way():
    async def closing():
        engine = Engine()
        engine.gate.clear()
        merged = RequestCoalescer(engine)
        asking = asyncio.ensure_future(merged.generate(request([1])))
        while not engine.requests:
            await asyncio.sleep(0)
        merged.close()
        with pytest.raises(asyncio.CancelledError):
            await asking
        return engine.cancelled

    assert asyncio.run(closing()) == 1


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_requests_of_a_closed_group_are_cancelled_begun_or_not(turns):
    async def closed():
        coalescer = RequestCoalescer(engine := Engine())
        engine.gate.clear()
        asked = asyncio.ensure_future(coalescer.generate(request([1])))
        for _ in range(turns):  # asked, sent, begun
            await asyncio.sleep(0)
        coalescer.close()
        await asyncio.wait([asked], timeout=5)
        return asked.cancelled()

    assert asyncio.run(closed())
