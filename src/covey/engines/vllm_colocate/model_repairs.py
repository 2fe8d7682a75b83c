"""Repairs of vLLM's models, colocated or in a server: packed heads on CPUs, constants of models without weights."""

from functools import cache
from typing import Any

LOAD_FORMAT = "covey_dummy"


def repack_heads(model: Any) -> int:
    """Pack the output heads of a vLLM model on a CPU again after new weights; returns their number.

    A head on a CPU multiplies a packed copy of its weights. A head tied to the embedding has no tensor in a checkpoint,
    so vLLM does not pack it again, and the model would continue with its old head.
    """
    heads = [module for module in model.modules() if type(module).__name__ == "ParallelLMHead"]
    packed = [head for head in heads if hasattr(head, "cpu_linear")]
    for head in packed:
        head.quant_method.process_weights_after_loading(head)
    return len(packed)


@cache
def register_dummy_loader() -> str:
    """Register a load format with random weights and intact buffers; returns its name.

    vLLM's own dummy format also randomizes constants that the model computes when it is created (such as the mean of
    pixels), which no checkpoint and no update would restore.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader(LOAD_FORMAT)
    class DummyLoader(DummyModelLoader):
        def load_weights(self, model: Any, model_config: Any) -> None:
            constants = {name: buffer.clone() for name, buffer in model.named_buffers()}
            super().load_weights(model, model_config)
            for name, buffer in model.named_buffers():
                if name in constants:
                    buffer.copy_(constants[name])

    return LOAD_FORMAT
