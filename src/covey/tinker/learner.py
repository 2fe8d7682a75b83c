"""Training of one adapter: gradients of many requests added up, then a step of AdamW."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from covey.core.batch import TrainBatch, distinct_prompts
from covey.policy.lm_head.scores import TokenScores
from covey.policy.scoring import TokenScorer
from covey.tinker.adapter import Adapter, added
from covey.tinker.errors import Refusal
from covey.tinker.losses import Loss, SentInputs
from covey.tinker.wire import Datum

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

    def scores(
        self, sequences: Sequence[Sequence[int]], targets: Tensor, named: Tensor | None = None, top: int = 0
    ) -> TokenScores:
        """Scores of one target [N] for each token of the sequences, given all up to this token.

        `named` [N, K] are further targets, -1 for none; `top` most probable tokens are read out.
        """
        batch = positions_of(sequences).to(self.device)
        named = None if named is None else named.to(self.device)
        return self.scorer(self.model, batch, targets=targets.to(self.device), named=named, top=top)

    def logprobs(self, sequences: Sequence[Sequence[int]], targets: Tensor) -> Tensor:
        """Log-probs of targets, [N] or [N, K]."""
        if targets.dim() == 1:
            return self.scores(sequences, targets).logprobs
        found = self.scores(sequences, targets[:, 0], named=targets).named
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

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.adapter.parameters(), lr=0.0)

    def forward(self, data: Sequence[Datum], loss: Loss, config: Mapping[str, float]) -> Scored:
        """Score data without gradients."""
        return self._score(checked(data, loss, self.base), loss, config, backward=False)

    def forward_backward(self, data: Sequence[Datum], loss: Loss, config: Mapping[str, float]) -> Scored:
        """Score data, and add the gradient of the loss to that of earlier requests.

        FloatingPointError, without a gradient, where the loss is not finite.
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
            raise Refusal("no forward_backward since the last step.")
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

    def _score(self, rows: Sequence[Row], loss: Loss, config: Mapping[str, float], backward: bool) -> Scored:
        logprobs: list[Any] = [None] * len(rows)
        total = 0.0
        for trained, numbers in micro_batches(rows, self.base.token_budget):
            part = [rows[number] for number in numbers]
            with torch.set_grad_enabled(backward and trained), added(self.base.model, self.adapter.low_rank()):
                found = self.base.logprobs([row.tokens for row in part], torch.cat([targets_of(row) for row in part]))
                value = loss_of_rows(found, part, loss, config)
                _check_finite(value, found, part, numbers)
                if backward and trained:
                    value.backward()
            total += float(value.detach())
            split = found.detach().float().cpu().split([len(row.tokens) for row in part])
            for number, one in zip(numbers, split, strict=True):
                logprobs[number] = one.numpy()
        counted = sum(int(row.counts.sum()) for row in rows)
        return Scored(logprobs, {"loss:sum": total, "tokens:sum": float(counted)})


def positions_of(sequences: Sequence[Sequence[int]]) -> TrainBatch:
    """A batch that every token of the sequences is a predictor in: the first is the prompt, and one more ends them."""
    rest = [[*tokens[1:], 0] for tokens in sequences]
    ids = torch.tensor(list(chain.from_iterable(rest)))
    return TrainBatch(
        token_ids=ids,
        lengths=torch.tensor(list(map(len, rest))),
        sampled=torch.ones(len(ids), dtype=torch.bool),
        **distinct_prompts(tokens[:1] for tokens in sequences),
    )


def micro_batches(rows: Sequence[Row], budget: int) -> Iterator[tuple[bool, list[int]]]:
    """Numbers of rows to compute together, at most `budget` tokens, and False for those without a gradient.

    Neighbours are those that begin alike, as they share what they have in common.
    """
    for trained in (True, False):
        chosen = [number for number, row in enumerate(rows) if bool(row.counts.any()) is trained]
        part, size = list[int](), 0
        for number in sorted(chosen, key=lambda number: rows[number].tokens):
            if part and size + len(rows[number].tokens) > budget:
                yield trained, part
                part, size = [], 0
            part.append(number)
            size += len(rows[number].tokens)
        if part:
            yield trained, part


def loss_of_rows(logprobs: Tensor, rows: Sequence[Row], loss: Loss, config: Mapping[str, float]) -> Tensor:
    """Sum of the token losses of rows, from the log-probs of their targets."""
    counts = torch.cat([row.counts for row in rows]).to(logprobs.device)

    def joined(name: str) -> Tensor | None:
        if name not in rows[0].inputs:
            return None
        return torch.where(counts, torch.cat([row.inputs[name] for row in rows]).to(logprobs), 0.0)

    inputs = SentInputs(
        torch.where(counts, logprobs, 0.0),
        torch.tensor([len(row.tokens) for row in rows], device=logprobs.device),
        joined("weights"),
        joined("logprobs"),
        joined("advantages"),
        joined("sequence_ratio_mask"),
    )
    return torch.where(counts, loss.tokens(inputs, config), 0.0).sum()


def _check_finite(value: Tensor, logprobs: Tensor, rows: Sequence[Row], numbers: Sequence[int]) -> None:
    if bool(value.isfinite()):
        return
    for row, number, own in zip(rows, numbers, logprobs.split([len(row.tokens) for row in rows]), strict=True):
        wrong = ~own.isfinite().cpu()
        for name, given in row.inputs.items():
            wrong |= ~given.isfinite() if name not in WHOLE else False
        wrong &= row.counts
        if bool(wrong.any()):
            position = int(wrong.nonzero()[0, 0])
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
