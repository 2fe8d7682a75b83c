"""A service of the tiny model without HTTP, and requests to it as clients send them."""

import asyncio
from itertools import count

import numpy as np
import torch

from covey.policy.adapters import with_shared_weights
from covey.policy.scoring import TokenScorer
from covey.tinker.build import opened
from covey.tinker.learner import Base
from covey.tinker.service import Settings
from covey.tinker.wire import Datum, ForwardBackward, WireTensor
from tests.support import tiny

NAME = "tiny"


def base(model=None, token_budget=2048):
    model = tiny.model().requires_grad_(False) if model is None else model
    scorer = TokenScorer(lambda inner: inner, temperature=1.0)
    return Base(with_shared_weights(model), scorer, 104, 256, token_budget)


def tensor(values):
    array = np.asarray(values)
    array = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
    return WireTensor(array.reshape(-1), array.shape)


def datum(tokens, **inputs):
    """Tokens to learn from: each position's target is the next token."""
    given = {"target_tokens": tokens[1:], **inputs}
    return Datum(list(tokens[:-1]), {name: tensor(values) for name, values in given.items()})


def tokens(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 104, (length,), generator=generator).tolist()


class Client:
    """A program as the service sees it: a session with its numbers."""

    def __init__(self, service, session=None):
        self.service = service
        self.session = session or service.create_session({"sdk_version": "0.38.0"})["session_id"]
        self._numbers, self._models, self._samplers = {}, count(), count()

    async def result(self, acknowledgement):
        return await self.service.retrieve_future({"request_id": acknowledgement["request_id"]}, 60.0)

    async def create(self, rank=4, **config):
        asked = {"session_id": self.session, "model_seq_id": next(self._models), "base_model": NAME}
        made = await self.result(self.service.create_model({**asked, "lora_config": {"rank": rank, **config}}))
        self._numbers[made["model_id"]] = count(1)
        return made["model_id"]

    def number(self, model):
        return next(self._numbers[model])

    def forward_backward(self, model, data, loss="cross_entropy", *, forward_only=False, number=None, **config):
        number = self.number(model) if number is None else number
        return self.service.forward_backward(ForwardBackward(model, number, data, loss, config, forward_only))

    def step(self, model, number=None, **params):
        number = self.number(model) if number is None else number
        given = {"learning_rate": 0.01, "eps": 1e-8, **params}
        return self.service.optim_step({"model_id": model, "seq_id": number, "adam_params": given})

    async def sampler(self, model):
        return (await self.result(self.freeze(model, self.number(model), next(self._samplers))))["sampling_session_id"]

    def freeze(self, model, number, sampler):
        asked = {"model_id": model, "seq_id": number, "sampling_session_seq_id": sampler}
        return self.service.save_weights_for_sampler(asked)

    async def save(self, model, name, route="save_weights", **options):
        asked = {"model_id": model, "seq_id": self.number(model), "path": name, **options}
        return await self.result(getattr(self.service, route)(asked))

    async def load(self, path, optimizer=True):
        asked = {"session_id": self.session, "model_seq_id": next(self._models), "path": path, "optimizer": optimizer}
        made = await self.result(self.service.load_weights(asked))
        if "model_id" in made:
            self._numbers[made["model_id"]] = count(1)
        return made

    async def sampling(self, path=None):
        asked = {"session_id": self.session, "sampling_session_seq_id": next(self._samplers)}
        asked |= {"base_model": NAME} if path is None else {"model_path": path}
        return (await self.service.create_sampling_session(asked))["sampling_session_id"]

    def sample(self, sampler, prompt, number=0, n=1, **options):
        params = {"max_tokens": 6, **options.pop("params", {})}
        chunks = {"chunks": [{"type": "encoded_text", "tokens": prompt}]}
        asked = {"sampling_session_id": sampler, "seq_id": number, "num_samples": n, "prompt": chunks}
        return self.service.asample({**asked, "sampling_params": params, **options})


def service(folder, model=None, durable=None, say=None, **settings):
    """Context of a service for the tiny model."""
    made = tiny.model() if model is None else model
    return opened(made, Settings((NAME,), **settings), folder, tokenizer=tiny.tokenizer(), durable=durable, say=say)


def run(folder, program, **settings):
    """Run a coroutine function of a service and a client of it."""

    async def main(one):
        await one.restore()
        return await program(one, Client(one))

    with service(folder, **settings) as one:
        return asyncio.run(main(one))
