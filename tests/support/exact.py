"""Float64 all the way through a model, so that equality differs from rounding."""

import torch
from torch.overrides import TorchFunctionMode


class KeepFloat64(TorchFunctionMode):
    """Norms, routers and softmaxes that would round float64 to float32 do not.

    Where a prompt is shared, gradients are summed before such a rounding rather than after, which alone would show.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        wide = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64
        if wide and (function is torch.Tensor.float or any(a is torch.float32 for a in args)):
            return args[0]
        if wide and kwargs.get("dtype") == torch.float32:
            kwargs["dtype"] = torch.float64
        if function is torch.Tensor.matmul and {one.dtype for one in args} == {torch.float32, torch.float64}:
            args = tuple(one.double() for one in args)  # positions, times the frequencies of an embedding
        return function(*args, **kwargs)
