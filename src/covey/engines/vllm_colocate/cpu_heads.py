"""A repair that vLLM needs on CPUs after its weights were replaced; runs where the model is, colocated or in a server.

There an output head multiplies a packed copy of its weights. A head that is tied to the embedding gets no tensor of
its own when a checkpoint is loaded, so nothing packs it again, and the model would go on with its old head.
"""

from typing import Any


def repack_heads(model: Any) -> int:
    """Pack every output head of a vLLM model anew from its weights; how many there were. Nothing to do off the CPU."""
    heads = [module for module in model.modules() if type(module).__name__ == "ParallelLMHead"]
    packed = [head for head in heads if hasattr(head, "cpu_linear")]
    for head in packed:
        head.quant_method.process_weights_after_loading(head)
    return len(packed)
