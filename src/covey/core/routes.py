"""Routes of tokens through mixtures of experts: the experts that each token was sent to, in each layer with a router.

Letters: T tokens, L layers with a router, k experts of a token. A route takes one or two bytes per expert. `NONE` marks
an expert that is not known; a route is known as a whole or not at all.
"""

import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

NONE = {torch.uint8: 255, torch.int16: -1}
"""Fill value of unknown routes, by dtype."""


class RouteShape(NamedTuple):
    """Shape of a model's routes."""

    layers: tuple[int, ...]  # indexes, among all decoder layers, of the L with a router
    hidden_layers: int  # number of all decoder layers
    experts: int  # the largest number of experts of a layer
    top_k: int  # k

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if self.experts < NONE[torch.uint8] + 1 else torch.int16

    @property
    def nbytes(self) -> int:
        """Bytes of a token's route."""
        return len(self.layers) * self.top_k * self.dtype.itemsize

    def unknown(self, tokens: int) -> Tensor:
        """[tokens, L, k] routes that are not known."""
        return torch.full((tokens, len(self.layers), self.top_k), NONE[self.dtype], dtype=self.dtype)

    def stored(self, ids: Tensor) -> Tensor:
        """Ids [T, L, k] of any integer type, converted to the dtype in which routes are stored."""
        return ids.to(self.dtype)

    def of_server(self, ids: np.ndarray) -> Tensor:
        """Routes from a server's ids [T, layers, k], of all decoder layers or of those with a router.

        ValueError for another shape, or for experts that the model does not have.
        """
        if ids.ndim != 3 or ids.shape[1] not in (len(self.layers), self.hidden_layers) or ids.shape[2] != self.top_k:
            raise ValueError(
                f"the server returned experts of shape {list(ids.shape)}; expected [tokens, layers, k], where the model"
                f" has {len(self.layers)} layers with a router among {self.hidden_layers}, and k={self.top_k}"
            )
        own = ids if ids.shape[1] == len(self.layers) else ids[:, list(self.layers)]
        if own.size and not 0 <= int(own.min()) <= int(own.max()) < self.experts:
            wrong = int(own.max()) if int(own.max()) >= self.experts else int(own.min())
            raise ValueError(f"the server returned expert {wrong}; the model has experts 0 to {self.experts - 1}")
        return self.stored(torch.from_numpy(np.ascontiguousarray(own.astype(np.int64))))


def unknown_like(routes: Tensor, tokens: int) -> Tensor:
    """[tokens, L, k] unknown routes, with the L, k, dtype and device of other routes."""
    return torch.full((tokens, *routes.shape[1:]), NONE[routes.dtype], dtype=routes.dtype, device=routes.device)


def are_known(routes: Tensor) -> Tensor:
    """[T] bool: True where the route of the token is known."""
    return (routes != NONE[routes.dtype]).flatten(1).all(1)


def continued(known: Tensor | None, later: Tensor) -> Tensor:
    """Extend the routes `known` of a sequence's first tokens by routes `later` of a pass over the whole sequence.

    A token keeps the route that it was first computed with, as its log-prob does.

    Example:
        Two tokens were computed in the first turn, and the second turn computes four:

        >>> first, second = torch.tensor([1, 2]).view(2, 1, 1), torch.tensor([9, 9, 3, 4]).view(4, 1, 1)
        >>> continued(first, second).flatten().tolist()
        [1, 2, 3, 4]
    """
    return later if known is None else torch.cat([known, later[len(known) :]])


def spread(routes: Tensor | None, prompt: int, completion: int, shape: Tensor | None) -> tuple[Tensor, Tensor]:
    """Routes of `prompt` and of `completion` tokens, [.., L, k] each; unknown where `routes` ends.

    `shape` [0, L, k] gives L, k and dtype to a sequence without routes.
    """
    known = shape if routes is None else routes
    assert known is not None, "routes or a shape are needed"
    whole = torch.cat([known, unknown_like(known, prompt + completion - len(known))])
    return whole[:prompt], whole[prompt:]


def differing(own: Tensor, others: Tensor) -> Tensor:
    """[T, L] bool: True where two routes have different sets of experts in a layer; False where one is unknown."""
    known = are_known(own) & are_known(others)
    return (own.sort(-1).values != others.sort(-1).values).any(-1) & known[:, None]


def to_bytes(routes: Tensor) -> bytes:
    """Routes as a NumPy file."""
    file = io.BytesIO()
    np.save(file, routes.numpy(), allow_pickle=False)
    return file.getvalue()


def read_bytes(data: bytes) -> np.ndarray:
    """Array of a NumPy file, as vLLM sends it; ValueError if it is none."""
    try:
        return np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"no NumPy array ({error})") from error


def some(routes: Sequence[Tensor | None]) -> Tensor | None:
    """An empty slice [0, L, k] of the first routes that are not None, which gives L, k and dtype; None if all are."""
    first = next((one for one in routes if one is not None), None)
    return None if first is None else first[:0]
