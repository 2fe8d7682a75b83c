"""Counts the bytes that collectives bring to this process."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):
    """Within it, what gathering and reducing brings is added up: of numbers, not of objects, which travel as bytes.

    Attributes:
        gathered: bytes of other processes' parts of what was gathered.
        reduced: bytes of this process's part of what was added up, from each other process.
    """

    def __init__(self):
        super().__init__()
        self.gathered = self.reduced = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        name = operation._schema.name
        if name in ("c10d::_allgather_base_", "_c10d_functional::all_gather_into_tensor"):
            self.gathered += difference(args[0], args[1] if name.startswith("c10d") else made)
        elif name == "c10d::allgather_" and (own := args[1][0]).is_floating_point():
            self.gathered += (len(args[0][0]) - 1) * own.nbytes * (own.numel() > 1)
        elif name == "c10d::_reduce_scatter_base_":
            self.reduced += difference(*args[:2])
        return made


def difference(one: Tensor, other: Tensor) -> int:
    """Bytes by which one is larger than the other; 0 where one is a single number, as losses are."""
    return abs(one.nbytes - other.nbytes) if min(one.numel(), other.numel()) > 1 else 0
