"""Built-in engine for many LoRA adapters over one frozen model: one decode batch mixes sequences of all of them.

Each linear layer multiplies all rows with its weights once. Two further products compute the low-rank terms of all
adapters at once: the adapters' matrices are concatenated, and a mask keeps the columns of each row's own adapter.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from covey.core.engine import SampleRequest
from covey.core.model import patched_forward
from covey.core.records import Completion
from covey.engines.native.engine import NativeEngine
from covey.engines.native.sampling import SequenceState

# Per layer, by the name of its module in the model: A [rank, in] and B [out, rank], scaled. A layer adds x @ A^T @ B^T.
LowRank = Mapping[str, tuple[Tensor, Tensor]]


@dataclass(eq=False, kw_only=True)
class AdapterEngine(NativeEngine):
    """Samples each request with the adapter that it names (`SampleRequest.adapter`); None is the model without one."""

    adapters: Callable[[], Mapping[str, LowRank]]  # read whenever the engine wakes

    def __post_init__(self, model: Callable[[], Any]) -> None:
        super().__post_init__(model)
        self._use_graphs = False  # a graph would hold the rows of one step
        self._rows = AdapterRows()

    @contextmanager
    def awake(self) -> Iterator[None]:
        with super().awake(), self._rows.added(self._model(), self.adapters()):
            yield

    async def generate(self, request: SampleRequest) -> list[Completion]:
        """Sample `request.n` completions with the request's adapter; ValueError for an unknown one.

        Requests whose adapter changes nothing (its B is 0) are sampled without it, and share stored prefixes.
        """
        adds = self._rows.number(request.adapter) >= 0
        # stored prefixes are computed without an adapter
        request = replace(request, shared=0) if adds else replace(request, adapter=None)
        return await super().generate(request)

    def _prefill(self, groups: list[list[SequenceState]]) -> None:
        self._rows.select([group[0].request.adapter for group in groups])
        super()._prefill(groups)

    def _continue_prefixes(self, sequences: list[SequenceState]) -> None:
        self._rows.select([])  # no sequence with a prefix has an adapter
        super()._continue_prefixes(sequences)

    def _verify_drafts(self, prefilled: Cache | None, *computed: Any) -> None:
        self._rows.select([sequence.request.adapter for _, sequence in computed[-1]])
        super()._verify_drafts(prefilled, *computed)

    def _decode(self) -> None:
        if self._batch is None and self._running:
            self._rows.select([sequence.request.adapter for sequence in self._running])
        super()._decode()


class AdapterRows:
    """The adapters of all rows of a forward pass, and the terms that they add to linear layers."""

    def __init__(self) -> None:
        self._load({})

    def _load(self, adapters: Mapping[str, LowRank]) -> None:
        adding = {name: low for name, low in adapters.items() if any(bool(b.any()) for _, b in low.values())}
        self._numbers: dict[str | None, int] = dict.fromkeys((None, *adapters), -1)
        self._numbers |= {name: number for number, name in enumerate(adding)}
        self._layers: dict[str, tuple[Tensor, Tensor, tuple[int, ...]]] = {}  # A and B of all adapters, their ranks
        for layer in dict.fromkeys(layer for low in adding.values() for layer in low):
            parts = [low.get(layer) for low in adding.values()]
            given = [part for part in parts if part is not None]
            ranks = tuple(0 if part is None else len(part[0]) for part in parts)
            self._layers[layer] = torch.cat([a for a, _ in given]), torch.cat([b for _, b in given], dim=1), ranks
        self.select([])

    def number(self, name: str | None) -> int:
        """Index of an adapter among those that change something, else -1; ValueError for an unknown one."""
        if name not in self._numbers:
            known = ", ".join(repr(one) for one in self._numbers if one is not None)
            raise ValueError(f"there is no adapter {name!r} to sample with; the engine holds {known or 'none'}.")
        return self._numbers[name]

    def select(self, names: Sequence[str | None]) -> None:
        """Set the adapter of each row of the next forward passes.

        If all names are equal, a layer may get any number of rows, as experts do, or a head called for some tokens.
        """
        numbers = [self.number(name) for name in names]
        self._selected = numbers[:1] if len(set(numbers)) == 1 else numbers
        self._masks: dict[tuple[int, ...], Tensor | None] = {}

    @contextmanager
    def added(self, model: nn.Module, adapters: Mapping[str, LowRank]) -> Iterator[None]:
        """Context in which the model's layers add the products of these adapters."""
        self._load(adapters)
        with ExitStack() as patches:
            for name, (a, b, ranks) in self._layers.items():
                layer = model.get_submodule(name)
                patches.enter_context(patched_forward(layer, partial(self._forward, layer.forward, a, b, ranks)))
            try:
                yield
            finally:
                self._load({})

    def _forward(
        self, base: Callable[[Tensor], Tensor], a: Tensor, b: Tensor, ranks: tuple[int, ...], x: Tensor
    ) -> Tensor:
        y = base(x)
        mask = self._mask(ranks, x)
        if mask is None:
            return y
        low = nn.functional.linear(x.to(a.dtype), a).view(len(mask), -1, len(a)).masked_fill_(mask, 0.0)
        return y + nn.functional.linear(low, b).view(y.shape).to(y.dtype)

    def _mask(self, ranks: tuple[int, ...], x: Tensor) -> Tensor | None:
        """[rows, 1, sum of ranks], False in the columns of the row's adapter; [1, 1, sum of ranks] if all rows have the
        same one, None if no row has one."""
        if ranks not in self._masks:
            owners = torch.arange(len(ranks)).repeat_interleave(torch.tensor(ranks))
            others = owners != torch.tensor(self._selected, dtype=torch.long)[:, None]
            self._masks[ranks] = None if others.all() else others[:, None].to(x.device)
        mask = self._masks[ranks]
        if mask is not None and len(mask) not in (1, len(x)):
            raise RuntimeError(
                f"a layer got {len(x)} rows for {len(mask)} sequences: it is a layer of experts, whose adapters cannot"
                " be mixed in one batch. Set `target_modules` to attention layers only."
            )
        return mask
