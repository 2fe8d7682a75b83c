"""Engines other than the trainer's own, built from the built-in one: other weights, temperature or reports."""

import copy
from dataclasses import replace

import torch

from covey.core.engine import EngineTraits
from covey.engines.native.engine import NativeEngine
from covey.trainer.engine_check.parity import EngineCheck, corrected


class ForeignEngine(NativeEngine):
    """Samples like `own` but for what is given: a model, a temperature, a function of each list of log-probs."""

    def __init__(self, own, *, model=None, temperature=None, report=None, traits=None):
        super().__init__(
            own._model if model is None else lambda: model,
            eos_token_ids=own.eos_token_ids,
            pad_token_id=own.pad_token_id,
            max_context=own.max_context,
        )
        self.traits = traits or EngineTraits()
        self.temperature = temperature
        self.report = report

    async def generate(self, request):
        if self.temperature is not None:
            request = replace(request, params=replace(request.params, temperature=self.temperature))
        completions = await super().generate(request)
        for completion in completions:
            if self.report is not None:
                completion.logprobs = self.report(completion.logprobs)
        return completions


def sample_from(trainer, **engine):
    """The trainer, with such an engine in the place of its own."""
    trainer.collector.engine = ForeignEngine(trainer.collector.engine, **engine)
    run, params = trainer.run, trainer.rollouts.params
    fresh = trainer.make_algorithm(trainer.args)
    run.method.algorithm = corrected(fresh, trainer.args, trainer.collector.engine.traits, params)
    trainer.behaviour.engine_check = EngineCheck(
        run, trainer.collector, params, trainer.collector.engine.traits, trainer.batch_scorer.rescore
    )
    return trainer


def perturbed(model, size=0.05):
    """A copy with noise on its weights."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.ndim > 1:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return other
