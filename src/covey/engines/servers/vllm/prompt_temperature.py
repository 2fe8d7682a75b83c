"""Log-probs of prompts at the temperature of their request, in vLLM's worker processes; vLLM itself computes them at 1.

vLLM has two model runners. The older one computes the logits of one request at a time, the newer one computes the
logits of all requests of a batch in pieces; both then turn logits into log-probs. The wrappers here divide the logits
in between. They read attributes that vLLM may rename; therefore a trainer measures the temperature that a teacher's
server applies before using it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor


def install() -> None:
    """Wrap the model runners of this vLLM; a runner that is built differently is left unchanged without an error."""
    with suppress(Exception):
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        wrap_runner(GPUModelRunner)
    with suppress(Exception):
        from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

        wrap_worker(PromptLogprobsWorker)


def temperature_of(sampling_params: Any) -> float:
    """The temperature that divides logits; 1 for greedy sampling, whose temperature is 0."""
    given = getattr(sampling_params, "temperature", None)
    return float(given) if given else 1.0


def wrap_runner(kind: Any) -> None:
    """Wrap the older runner: call its method once per temperature, with the requests that have it."""
    compute = kind._get_prompt_logprobs_dict
    if hasattr(compute, "__wrapped__"):
        return

    @wraps(compute)
    def at_temperatures(self: Any, hidden_states: Tensor, *rest: Any) -> dict[str, Any]:
        asked: dict[str, int] = self.num_prompt_logprobs
        groups: dict[float, dict[str, int]] = {}
        for request, number in asked.items():
            temperature = temperature_of(self.requests[request].sampling_params)
            groups.setdefault(temperature, {})[request] = number
        if {*groups} <= {1.0}:
            return compute(self, hidden_states, *rest)
        found: dict[str, Any] = {}
        left: dict[str, int] = {}
        try:
            for temperature, group in groups.items():
                self.num_prompt_logprobs = group  # the method removes complete requests from it
                with divided_logits(self.model, temperature):
                    found |= compute(self, hidden_states, *rest)
                left |= group
        finally:
            self.num_prompt_logprobs = asked
        asked.clear()
        asked.update(left)
        return found

    kind._get_prompt_logprobs_dict = at_temperatures


@contextmanager
def divided_logits(model: Any, temperature: float) -> Iterator[None]:
    """Context in which `model.compute_logits` gives logits that are divided by the temperature."""
    if temperature == 1.0:
        yield
        return
    own, compute = vars(model).get("compute_logits"), model.compute_logits

    def divided(*given: Any, **named: Any) -> Tensor | None:
        logits = compute(*given, **named)
        return None if logits is None else logits.float() / temperature  # None: another process has them

    model.compute_logits = divided
    try:
        yield
    finally:
        if own is None:
            del model.compute_logits
        else:
            model.compute_logits = own


def wrap_worker(kind: Any) -> None:
    """Wrap the newer runner's worker, which computes the pieces of a batch in the order of its tokens."""
    add, compute = kind.add_request, kind.compute_prompt_logprobs
    if hasattr(compute, "__wrapped__"):
        return

    @wraps(add)
    def remembering(self: Any, req_id: str, req_idx: int, sampling_params: Any) -> None:
        if not hasattr(self, "covey_temperatures"):
            self.covey_temperatures = np.ones(self.max_num_reqs, dtype=np.float32)
        self.covey_temperatures[req_idx] = temperature_of(sampling_params)
        add(self, req_id, req_idx, sampling_params)

    @wraps(compute)
    def at_temperatures(
        self: Any, logits_fn: Callable[[Tensor], Tensor], hidden_states: Tensor, input_batch: Any, *rest: Any
    ) -> dict[str, Any]:
        requests, known = input_batch.idx_mapping_np, getattr(self, "covey_temperatures", None)
        of_requests = np.ones(len(requests), dtype=np.float32) if known is None else known[requests]
        if (of_requests == 1.0).all():
            return compute(self, logits_fn, hidden_states, input_batch, *rest)
        lengths = np.diff(input_batch.query_start_loc_np[: len(requests) + 1])
        of_tokens = torch.from_numpy(np.repeat(of_requests, lengths)).to(hidden_states.device)
        done = 0

        def divided(hidden: Tensor) -> Tensor:
            nonlocal done
            rows = of_tokens[done : done + len(hidden), None]
            done += len(hidden)
            return logits_fn(hidden).float() / rows

        return compute(self, divided, hidden_states, input_batch, *rest)

    kind.add_request, kind.compute_prompt_logprobs = remembering, at_temperatures
