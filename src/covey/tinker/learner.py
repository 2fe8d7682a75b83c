"""Training of one adapter: gradients of many requests added up, then a step of AdamW."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from covey.core.batch import TrainBatch, distinct_prompts
from covey.core.packing import ENOUGH_TOKENS
from covey.policy.fused import FusedLayer, find_fused_layers, fused_layers
from covey.policy.lm_head.scores import TokenScores
from covey.policy.scoring import TokenScorer
from covey.tinker.adapter import Adapter, added
from covey.tinker.errors import Refusal
from covey.tinker.losses import Loss, SentInputs
from covey.tinker.wire import Datum

T = TypeVar("T")

WHOLE = ("target_tokens",)  # inputs of whole numbers


@dataclass(frozen=True)
class AdamParams:
    """Settings of a step; defaults are the client's."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # largest norm of the gradient; 0 for no limit


@dataclass(frozen=True)
class Scored:
    """Log-probs of the targets of each datum, [N] or [N, K], and metrics by name."""

    logprobs: list[np.ndarray[Any, Any]]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Row:
    """A datum that was checked."""

    tokens: list[int]
    inputs: Mapping[str, Tensor]  # [N] or [N, K]
    counts: Tensor  # bool, as the targets: positions that the loss reads

    @property
    def head(self) -> int:
        """Number of positions before the first that the loss reads, such as a prompt's; 0 if it reads none."""
        read = self.counts.view(len(self.tokens), -1).any(-1)
        return int(read.to(torch.uint8).argmax()) if bool(read.any()) else 0


@dataclass(eq=False)
class Base:
    """The frozen model that all adapters are added to, and the limits of what is computed at once."""

    model: Any
    scorer: TokenScorer
    vocabulary: int
    most_tokens: int  # of a sequence
    token_budget: int = 2048  # of a micro-batch; a longer sequence is one by itself

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def enough(self) -> int:
        """Tokens of a micro-batch that keep the device busy."""
        return min(self.token_budget, ENOUGH_TOKENS.get(self.device.type, ENOUGH_TOKENS["cuda"]))

    def scores(
        self,
        sequences: Sequence[Sequence[int]],
        targets: Tensor,
        named: Tensor | None = None,
        top: int = 0,
        heads: Sequence[int] | None = None,
    ) -> TokenScores:
        """Scores of one target [N] for each token of the sequences, given all up to this token.

        `named` [N, K] are further targets, -1 for none; `top` most probable tokens are read out. The first `heads`
        tokens of each sequence have no target; sequences that share these and the next token share their computation.
        """
        batch = positions_of(sequences, heads or [0] * len(sequences)).to(self.device)
        named = None if named is None else named.to(self.device)
        return self.scorer(self.model, batch, targets=targets.to(self.device), named=named, top=top)

    def logprobs(
        self, sequences: Sequence[Sequence[int]], targets: Tensor, heads: Sequence[int] | None = None
    ) -> Tensor:
        """Log-probs of targets, [N] or [N, K], as `scores` reads them."""
        if targets.dim() == 1:
            return self.scores(sequences, targets, heads=heads).logprobs
        found = self.scores(sequences, targets[:, 0], named=targets, heads=heads).named
        assert found is not None, "targets are named"
        return found


@dataclass(eq=False)
class Learner:
    """An adapter, its gradients and its optimizer."""

    base: Base
    adapter: Adapter
    steps: int = 0
    requests: int = 0  # whose gradients were added since the last step
    optimizer: torch.optim.AdamW = field(init=False)
    _fused: list[FusedLayer] | None = field(default=None, init=False)  # layers that the adapter leaves as they are

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.adapter.parameters(), lr=0.0)

    def forward(self, data: Sequence[Datum], loss: Loss, config: Mapping[str, float]) -> Scored:
        """Score data without gradients."""
        return self._score(checked(data, loss, self.base), loss, config, backward=False)

    def forward_backward(self, data: Sequence[Datum], loss: Loss, config: Mapping[str, float]) -> Scored:
        """Score data, and add the gradient of the loss to that of earlier requests.

        Raises FloatingPointError where the loss is not finite. Micro-batches before may have added gradients then:
        `forget` them.
        """
        rows = checked(data, loss, self.base)
        for parameter in self.adapter.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        scored = self._score(rows, loss, config, backward=True)
        self.requests += 1
        return scored

    def step(self, params: AdamParams) -> dict[str, float]:
        """Take a step and forget the gradients; Refusal without any, FloatingPointError if they are not finite."""
        if not self.requests:
            raise Refusal("there was no forward_backward since the last step, so there is no gradient.")
        limit = params.grad_clip_norm or float("inf")
        parameters = self.adapter.parameters()
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))
        if not np.isfinite(norm):
            self.forget()
            raise FloatingPointError(f"the gradient's norm is {norm}. Its gradients were dropped.")
        for group in self.optimizer.param_groups:
            group.update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
        self.optimizer.step()
        self.forget()
        self.steps += 1
        return {"grad_norm": norm}

    def forget(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        self.requests = 0

    @contextmanager
    def _added(self) -> Iterator[None]:
        """The model with the adapter within the context, to which backward passes belong, too."""
        model = self.base.model
        with added(model, self.adapter.low_rank()):
            if self._fused is None:  # looked for here, as an MLP with an adapter is not computed fused
                self._fused = find_fused_layers(model)
            with fused_layers(self._fused):
                yield

    def _score(self, rows: Sequence[Row], loss: Loss, config: Mapping[str, float], backward: bool) -> Scored:
        heads = [row.head for row in rows]
        logprobs: list[list[Tensor]] = [[] for _ in rows]  # of the positions from a row's head on, then before it
        total = 0.0
        for trained, numbers in micro_batches(rows, heads, self.base.token_budget, self.base.enough):
            part, own = [rows[number] for number in numbers], [heads[number] for number in numbers]
            targets = torch.cat([targets_of(row)[head:] for row, head in zip(part, own, strict=True)])
            with torch.set_grad_enabled(backward and trained), self._added():
                found = self.base.logprobs([row.tokens for row in part], targets, own)
                value = loss_of_rows(found, part, loss, config, own)
                _check_finite(value, found, part, own, numbers)
                if backward and trained:
                    value.backward()
            total += float(value.detach())
            sizes = [len(row.tokens) - head for row, head in zip(part, own, strict=True)]
            for number, one in zip(numbers, found.detach().float().cpu().split(sizes), strict=True):
                logprobs[number].append(one)
        self._score_heads(rows, heads, logprobs)
        counted = sum(int(row.counts.sum()) for row in rows)
        joined = [torch.cat(parts[::-1]).numpy() for parts in logprobs]
        return Scored(joined, {"loss:sum": total, "tokens:sum": float(counted)})

    @torch.no_grad()
    def _score_heads(self, rows: Sequence[Row], heads: Sequence[int], logprobs: Sequence[list[Tensor]]) -> None:
        """Append the log-probs of the positions before each row's head, which are computed once for equal ones."""
        alike: dict[tuple[Any, ...], list[int]] = {}
        for number, (row, head) in enumerate(zip(rows, heads, strict=True)):
            if head:
                alike.setdefault((*row.tokens[:head], *targets_of(row)[:head].flatten().tolist()), []).append(number)
        for part in parts_of(list(alike.values()), lambda numbers: heads[numbers[0]], self.base.token_budget):
            firsts = [numbers[0] for numbers in part]
            targets = torch.cat([targets_of(rows[first])[: heads[first]] for first in firsts])
            with self._added():
                found = self.base.logprobs([rows[first].tokens[: heads[first]] for first in firsts], targets)
            for numbers, one in zip(part, found.float().cpu().split([heads[first] for first in firsts]), strict=True):
                for number in numbers:
                    logprobs[number].append(one)


def positions_of(sequences: Sequence[Sequence[int]], heads: Sequence[int]) -> TrainBatch:
    """A batch that predicts something at every token of the sequences from their heads on.

    Prompts end with the token at the head, and one more token ends each sequence.
    """
    rest = [[*tokens[head + 1 :], 0] for tokens, head in zip(sequences, heads, strict=True)]
    ids = torch.tensor(list(chain.from_iterable(rest)))
    return TrainBatch(
        token_ids=ids,
        lengths=torch.tensor(list(map(len, rest))),
        sampled=torch.ones(len(ids), dtype=torch.bool),
        **distinct_prompts(tokens[: head + 1] for tokens, head in zip(sequences, heads, strict=True)),
    )


def micro_batches(
    rows: Sequence[Row], heads: Sequence[int], budget: int, enough: int
) -> Iterator[tuple[bool, list[int]]]:
    """Numbers of rows to compute together, and False for those without a gradient.

    Rows are sorted by their tokens. Rows that share a head, which counts once, are a unit, and are cut at `budget`
    tokens. Units are put together up to `enough` tokens.
    """
    for trained in (True, False):
        chosen = [number for number, row in enumerate(rows) if bool(row.counts.any()) is trained]
        part, size = list[int](), 0
        for unit in sharing(rows, heads, chosen):
            head = heads[unit[0]]
            if part and size + head + sum(len(rows[number].tokens) - head for number in unit) > enough:
                yield trained, part
                part, size = [], 0
            size += head
            for number in unit:
                more = len(rows[number].tokens) - head
                if part and size + more > budget:
                    yield trained, part
                    part, size = [], head
                part.append(number)
                size += more
        if part:
            yield trained, part


def sharing(rows: Sequence[Row], heads: Sequence[int], chosen: Sequence[int]) -> Iterator[list[int]]:
    """Units of the chosen rows, sorted by their tokens: rows with the same head, or one row without a head."""
    ordered = sorted(chosen, key=lambda number: rows[number].tokens)
    # without a head to share, each row is for itself
    keys = {number: (rows[number].tokens[: heads[number] + 1], heads[number] or -number) for number in ordered}
    for _, unit in groupby(ordered, key=lambda number: keys[number]):
        yield list(unit)


def parts_of(items: Sequence[T], size_of: Callable[[T], int], budget: int) -> Iterator[list[T]]:
    """Cut items into parts of neighbours with at most `budget` tokens together; a larger item is a part by itself."""
    part, size = list[T](), 0
    for item in items:
        if part and size + size_of(item) > budget:
            yield part
            part, size = [], 0
        part.append(item)
        size += size_of(item)
    if part:
        yield part


def loss_of_rows(
    logprobs: Tensor,
    rows: Sequence[Row],
    loss: Loss,
    config: Mapping[str, float],
    heads: Sequence[int] | None = None,
) -> Tensor:
    """Sum of the token losses of rows, from the log-probs of their targets behind their heads (none by default)."""
    placed = list(zip(rows, heads or [0] * len(rows), strict=True))
    counts = torch.cat([row.counts[head:] for row, head in placed]).to(logprobs.device)

    def joined(name: str) -> Tensor | None:
        if name not in rows[0].inputs:
            return None
        return torch.where(counts, torch.cat([row.inputs[name][head:] for row, head in placed]).to(logprobs), 0.0)

    inputs = SentInputs(
        torch.where(counts, logprobs, 0.0),
        torch.tensor([len(row.tokens) - head for row, head in placed], device=logprobs.device),
        joined("weights"),
        joined("logprobs"),
        joined("advantages"),
        joined("sequence_ratio_mask"),
    )
    return torch.where(counts, loss.tokens(inputs, config), 0.0).sum()


def _check_finite(
    value: Tensor, logprobs: Tensor, rows: Sequence[Row], heads: Sequence[int], numbers: Sequence[int]
) -> None:
    if bool(value.isfinite()):
        return
    sizes = [len(row.tokens) - head for row, head in zip(rows, heads, strict=True)]
    for row, head, number, own in zip(rows, heads, numbers, logprobs.split(sizes), strict=True):
        wrong = ~own.isfinite().cpu()
        for name, given in row.inputs.items():
            wrong |= ~given[head:].isfinite() if name not in WHOLE else False
        wrong &= row.counts[head:]
        if bool(wrong.any()):
            position = head + int(wrong.nonzero()[0, 0])
            raise FloatingPointError(
                f"the loss is not finite: datum {number}, position {position}. Its gradients were dropped."
            )
    raise FloatingPointError(f"the loss is {float(value)}: a ratio overflows. Its gradients were dropped.")


def targets_of(row: Row) -> Tensor:
    return row.inputs["target_tokens"]


def checked(data: Sequence[Datum], loss: Loss, base: Base) -> list[Row]:
    """Rows of data; Refusal for what does not fit the loss or the model, which names the datum."""
    if not data:
        raise Refusal("there are no data in this request.")
    rows = [_checked(number, datum, loss, base) for number, datum in enumerate(data)]
    for number, row in enumerate(rows):
        for other in (row.inputs.keys() ^ rows[0].inputs.keys(),):
            if other:
                raise Refusal(f"datum {number} and datum 0 differ in their inputs: {', '.join(sorted(other))}.")
        if row.inputs["target_tokens"].shape[1:] != rows[0].inputs["target_tokens"].shape[1:]:
            raise Refusal(f"datum {number} and datum 0 have other numbers of targets for each position.")
    return rows


def _checked(number: int, datum: Datum, loss: Loss, base: Base) -> Row:
    refuse: Callable[[str], Refusal] = lambda text: Refusal(f"datum {number}: {text}")  # noqa: E731
    if datum.unread is not None:
        raise refuse(f"it holds {datum.unread}; this server reads text alone.")
    if not datum.tokens or len(datum.tokens) >= base.most_tokens:
        raise refuse(f"it has {len(datum.tokens)} tokens; from 1 to {base.most_tokens - 1} are possible.")
    _check_ids(refuse, "input", np.asarray(datum.tokens), base.vocabulary)
    given = ", ".join(datum.inputs) or "nothing"
    if missing := [name for name in loss.needs if name not in datum.inputs]:
        raise refuse(f"the loss needs {missing[0]}; given: {given}.")
    if unknown := [name for name in datum.inputs if name not in (*loss.needs, *loss.may)]:
        raise refuse(f"the loss does not read {unknown[0]}; it reads {', '.join((*loss.needs, *loss.may))}.")
    inputs = {}
    shape = datum.inputs["target_tokens"].shape
    for name, tensor in datum.inputs.items():
        if len(tensor.shape) not in ((1, 2) if loss.counts == "weights" else (1,)) or 0 in tensor.shape:
            raise refuse(f"{name} has shape {list(tensor.shape)}; this loss reads one number for each position.")
        if tensor.shape[0] != len(datum.tokens):
            raise refuse(f"{name} has {tensor.shape[0]} rows for {len(datum.tokens)} input tokens.")
        if tensor.shape != shape:
            raise refuse(f"{name} has shape {list(tensor.shape)}, and target_tokens {list(shape)}.")
        if (tensor.values.dtype.kind == "f") is (name in WHOLE):
            raise refuse(
                f"{name} has dtype {tensor.values.dtype}; it must be {'int64' if name in WHOLE else 'float32'}."
            )
        inputs[name] = torch.from_numpy(np.array(tensor.dense()))
    _check_ids(refuse, "target", inputs["target_tokens"].numpy(), base.vocabulary)
    counts = torch.ones(shape, dtype=torch.bool)
    if loss.counts in inputs:
        counts = inputs[loss.counts] != 0
        if loss.counts_too is not None:
            counts |= inputs[loss.counts_too] != 0
    return Row(datum.tokens, inputs, counts)


def _check_ids(refuse: Callable[[str], Refusal], what: str, ids: np.ndarray[Any, Any], vocabulary: int) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= vocabulary):
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise refuse(f"the {what} token {wrong} is not in the vocabulary, which has {vocabulary:,} tokens.")
