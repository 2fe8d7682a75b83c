"""Logits of prompts divided by the temperature of each request, in stand-ins for vLLM's two model runners."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from covey.engines.servers.vllm.prompt_temperature import temperature_of, wrap_runner, wrap_worker


def asking(temperature):
    return SimpleNamespace(sampling_params=SimpleNamespace(temperature=temperature))


class Model:
    def compute_logits(self, hidden):
        return hidden


class Runner:
    """As the older one: requests one after the other, which are gone when they are complete."""

    def __init__(self, **temperatures):
        self.requests = {name: asking(value) for name, value in temperatures.items()}
        self.num_prompt_logprobs = dict.fromkeys(temperatures, 0)
        self.model = Model()

    def _get_prompt_logprobs_dict(self, hidden_states, complete):
        found = {}
        for name in list(self.num_prompt_logprobs):
            found[name] = self.model.compute_logits(hidden_states).tolist()
            if name in complete:
                del self.num_prompt_logprobs[name]
        return found


@pytest.fixture
def runner():
    kind = type("Wrapped", (Runner,), {"_get_prompt_logprobs_dict": Runner._get_prompt_logprobs_dict})
    wrap_runner(kind)
    wrap_runner(kind)  # twice changes nothing
    return kind


def test_each_request_has_the_logits_of_its_temperature(runner):
    one = runner(a=1.0, b=0.5, c=0.0, d=0.5)
    assert one._get_prompt_logprobs_dict(torch.tensor([2.0]), {"a", "b"}) == {
        "a": [2.0], "b": [4.0], "c": [2.0], "d": [4.0],
    }  # fmt: skip
    assert one.num_prompt_logprobs == {"c": 0, "d": 0}  # those that are not complete
    assert one.model.compute_logits(torch.tensor([2.0])) == 2.0


def test_requests_at_temperature_one_take_the_usual_way(runner):
    one = runner(a=1.0)
    assert one._get_prompt_logprobs_dict(torch.tensor([2.0]), {"a"}) == {"a": [2.0]}
    assert "compute_logits" not in vars(one.model) and not one.num_prompt_logprobs


def test_an_error_leaves_the_runner_as_it_was(runner):
    one = runner(a=0.5)

    def fails(hidden):
        raise RuntimeError("out of memory")

    one.model.compute_logits = fails
    with pytest.raises(RuntimeError):
        one._get_prompt_logprobs_dict(torch.tensor([2.0]), set())
    assert one.num_prompt_logprobs == {"a": 0}


class Worker:
    """As the newer one: the logits of a batch in pieces of two tokens."""

    max_num_reqs = 4

    def __init__(self):
        self.added = []

    def add_request(self, req_id, req_idx, sampling_params):
        self.added.append((req_id, req_idx))

    def compute_prompt_logprobs(self, logits_fn, hidden_states, input_batch, more):
        pieces = [logits_fn(piece) for piece in hidden_states.split(2)]
        return [*torch.cat(pieces)[:, 0].tolist(), more]


def test_each_token_of_a_batch_has_the_temperature_of_its_request():
    wrap_worker(Worker)
    worker = Worker()
    for name, index, temperature in (("a", 2, 0.5), ("b", 0, 1.0), ("c", 3, 2.0)):
        worker.add_request(name, index, SimpleNamespace(temperature=temperature))
    batch = SimpleNamespace(idx_mapping_np=np.array([2, 3, 0]), query_start_loc_np=np.array([0, 3, 4, 5, 5, 5]))
    hidden = torch.full((5, 1), 4.0)
    assert worker.compute_prompt_logprobs(lambda rows: rows, hidden, batch, "more") == [8.0, 8.0, 8.0, 2.0, 4.0, "more"]
    assert worker.added == [("a", 2), ("b", 0), ("c", 3)]


@pytest.mark.parametrize(("given", "divides"), [(0.7, 0.7), (0.0, 1.0), (None, 1.0)])
def test_greedy_requests_are_scored_at_one(given, divides):
    assert temperature_of(SimpleNamespace(temperature=given)) == divides
