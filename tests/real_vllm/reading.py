"""Worker extension for tests: tells what the server's model holds, after vLLM has fused and repacked it."""

from typing import Any

from covey.engines.servers.vllm.worker import CoveyWorker
from covey.engines.servers.weights.buckets import checksum


class ReadingWorker(CoveyWorker):
    def read_checksums(self) -> dict[str, Any]:
        """Checksums of all parameters and buffers, by name."""
        model = self.model_runner.get_model()
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {name: checksum(tensor.contiguous()) for name, tensor in named.items()}
