"""What vLLM holds before the policy's weights arrive: numbers without meaning, and constants as they should be.

vLLM's own way of starting without weights draws all that it holds, its constants too: tables that a model computes when
it is made (the mean of pixels, for one), which no checkpoint has and no update would put right.
"""

from functools import cache
from typing import Any

LOAD_FORMAT = "covey_dummy"


@cache
def register_dummy_loader() -> str:
    """Make it known to vLLM; the name of its load format."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader(LOAD_FORMAT)
    class DummyLoader(DummyModelLoader):
        """Draws weights, and leaves buffers as they were made."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            made = {name: buffer.clone() for name, buffer in model.named_buffers()}
            super().load_weights(model, model_config)
            for name, buffer in model.named_buffers():
                if name in made:
                    buffer.copy_(made[name])

    return LOAD_FORMAT
