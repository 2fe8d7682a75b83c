"""A program of the `tinker` client for `benchmarks.tinker`: does what a line of JSON asks for, and answers with one.

It runs in the client's own environment, so it imports nothing of Covey.
"""

import json
import sys
import time
from typing import Any

import tinker
from tinker import types

RATE = types.AdamParams(learning_rate=1e-4, eps=1e-8)


def done(future: Any) -> Any:
    """The result; older clients return some at once."""
    return future.result() if hasattr(future, "result") else future


def datum(tokens: list[int], head: int, advantage: float) -> types.Datum:
    """A sequence of which the positions from `head` on are learned."""
    length = len(tokens) - 1
    inputs = {
        "target_tokens": types.TensorData(data=tokens[1:], dtype="int64"),
        "logprobs": types.TensorData(data=[0.0] * head + [-1.0] * (length - head), dtype="float32"),
        "advantages": types.TensorData(data=[0.0] * head + [advantage] * (length - head), dtype="float32"),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def data_of(sequences: list[list[int]], head: int) -> list[types.Datum]:
    return [datum(tokens, head, 1.0 if number % 2 else -1.0) for number, tokens in enumerate(sequences)]


class Program:
    """Training clients, each in a session of its own, and a sampler of each."""

    def __init__(self) -> None:
        self.training: list[Any] = []
        self.samplers: list[Any] = []
        self.services: list[Any] = []

    def open(self, model: str, clients: int, rank: int, tokens: list[int]) -> None:
        """Create the clients, whose adapters take a step, as a new one changes nothing."""
        for number in range(clients):
            self.services.append(tinker.ServiceClient())
            client = done(self.services[-1].create_lora_training_client(base_model=model, rank=rank, seed=number))
            for future in (
                client.forward_backward(data_of([tokens], 0), "importance_sampling"),
                client.optim_step(RATE),
            ):
                done(future)
            self.training.append(client)
            self.samplers.append(done(client.save_weights_and_get_sampling_client()))

    def sample(self, clients: int, prompts: list[list[int]], n: int, tokens: int) -> int:
        """Sample from so many clients at once, with prompts for each; the number of tokens."""
        params = types.SamplingParams(max_tokens=tokens, temperature=1.0, stop=[])
        asked = [
            one.sample(types.ModelInput.from_ints([*prompt, number]), n, params)
            for number, one in enumerate(self.samplers[:clients], 3)
            for prompt in prompts
        ]
        return sum(len(sequence.tokens) for future in asked for sequence in done(future).sequences)

    def train(self, clients: int, sequences: list[list[int]], head: int, steps: bool) -> int:
        """forward_backward and, with `steps`, optim_step of so many clients at once; the number of tokens."""
        asked = []
        for client in self.training[:clients]:
            asked.append(client.forward_backward(data_of(sequences, head), "importance_sampling"))
            if steps:
                asked.append(client.optim_step(RATE))
        for future in asked:
            done(future)
        return clients * sum(map(len, sequences))


def main() -> None:
    program = Program()
    for line in sys.stdin:
        asked = json.loads(line)
        began, used = time.perf_counter(), time.process_time()
        found = getattr(program, asked.pop("do"))(**asked)
        times = {"seconds": time.perf_counter() - began, "processor_seconds": time.process_time() - used}
        print(json.dumps({"found": found, **times}), flush=True)


if __name__ == "__main__":
    main()
