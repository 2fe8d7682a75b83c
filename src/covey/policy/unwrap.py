"""The model inside whatever accelerate, torch.compile and a launcher have wrapped around it.

Not here: copies of it (`covey.policy.full_copy`).
"""

import weakref
from typing import Any


class Unwrap:
    """(wrapped model) -> the transformers (or PEFT) model inside.

    Accelerate goes through all modules to find it, and an engine asks before each token: so each answer is kept.

    Args:
        accelerator: has wrapped it.
    """

    def __init__(self, accelerator: Any):
        self._accelerator = accelerator
        self._found: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()

    def __call__(self, model: Any) -> Any:
        known = self._found.get(model)
        inner = None if known is None else known()
        if inner is None:
            inner = self._accelerator.unwrap_model(model, keep_torch_compile=False)
            self._found[model] = weakref.ref(inner)
        return inner
