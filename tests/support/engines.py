"""Engines with weights of their own, for the tests in this folder."""

import copy

import torch

from covey.core.engine import EngineTraits
from covey.engines.native.engine import NativeEngine
from covey.engines.scripted import ScriptedEngine

LETTERS = 90
"""Tokens of the tiny tokenizer's printable characters, from 4 on."""


def scripted(**settings):
    """Completions of 1 to 6 letters that the seed and the prompt decide."""

    def script(prompt_ids, seed):
        length, start = 1 + seed % 6, seed // 6 + sum(prompt_ids)
        return [4 + (start + place * place) % LETTERS for place in range(length)]

    return ScriptedEngine(script, **settings)


class CopyEngine(NativeEngine):
    """The built-in engine on a copy of the model: it samples with the weights that it was sent, and says which."""

    def __init__(self, model):
        self.model = copy.deepcopy(model).eval()
        super().__init__(lambda: self.model, eos_token_ids=[1], pad_token_id=0, max_context=256)
        self.traits = EngineTraits(batch_invariant=True)
        self.version = None

    def load_weights(self, update):
        with torch.no_grad():
            own = self.model.state_dict()
            for spec, tensor in update.checked():
                own[spec.name].copy_(tensor)
        self.version = update.version

    async def generate(self, request):
        version = self.version
        completions = await super().generate(request)
        for completion in completions:
            completion.versions = [version] * len(completion.token_ids)
        return completions
