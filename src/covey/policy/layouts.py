"""Layouts of a batch's ragged tokens for one forward pass: padded, packed, or with shared prefixes.

To add one, write a function of the signature `Layout` and add it to `LAYOUTS`. Layouts that put many sequences in one
row need a decoder that goes through transformers' attention interface, which `choose_layout` tests.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from covey.core.batch import TrainBatch, segment_starts
from covey.core.findings import CheckError
from covey.core.model import compute_dtype, decoder_of, name_of, sdpa_suits
from covey.policy.attention import PACKED_ATTENTION, TokenTree
from covey.runtime.process_memory import is_out_of_memory
from covey.runtime.user_code import warn

WORTH_SHARING = 8
"""Fewest common tokens for which completions share a branch: each branch costs two more calls of attention."""


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """One forward pass."""

    kwargs: dict[str, Any]  # keyword arguments of the model's forward; `input_ids` is [rows, width]
    # [N] int64: for each completion token, the flat position (row * width + column) of the hidden state that predicts
    # it
    predictors: Tensor
    # maps numbers of rollouts [B] to positions [rows * width]: the sum over the rollouts that contain the position's
    # token, which for a shared prompt is the whole group; 0 for padding
    sum_over_readers: Callable[[Tensor], Tensor]
    # [rows * width] int64: the token at each position, as an index into the batch's `prompt_ids` and then its
    # `token_ids`; -1 for padding
    sources: Tensor


Layout = Callable[[TrainBatch, int], ModelInputs]  # (batch, pad token id) -> model inputs

Span = tuple[int, int]  # (start, stop) of the batch's tokens, `prompt_ids` then `token_ids`


def padded(batch: TrainBatch, pad_token_id: int) -> ModelInputs:
    """One row per rollout, padded on the right to the longest: slow, but correct for every causal language model."""
    prompts = batch.prompts()
    groups = batch.groups.tolist()
    rows = [torch.cat([prompts[g], completion]) for g, completion in zip(groups, batch.completions(), strict=True)]
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_token_id)
    prompt_lengths = batch.prompt_lengths[batch.groups][:, None]
    column = torch.arange(input_ids.shape[1], device=input_ids.device)
    filled = column < prompt_lengths + batch.lengths[:, None]
    before = (column >= prompt_lengths - 1) & (column < prompt_lengths + batch.lengths[:, None] - 1)
    of_prompt = segment_starts(batch.prompt_lengths)[batch.groups][:, None] + column
    of_completion = len(batch.prompt_ids) + segment_starts(batch.lengths)[:, None] + column - prompt_lengths
    return ModelInputs(
        kwargs={"input_ids": input_ids, "attention_mask": filled.long(), "position_ids": column.expand(len(rows), -1)},
        predictors=before.flatten().nonzero()[:, 0],
        sum_over_readers=lambda numbers: (filled * numbers[:, None]).flatten(),
        sources=torch.where(filled, torch.where(column < prompt_lengths, of_prompt, of_completion), -1).flatten(),
    )


def packed(batch: TrainBatch, pad_token_id: int) -> ModelInputs:
    """All rollouts end to end in one row without padding; each attends only to itself, and its positions start at 0."""
    forest = _Forest(batch)
    for rollout, (group, completion) in enumerate(zip(batch.groups.tolist(), forest.completions, strict=True)):
        forest.add((forest.prompts[group], completion), -1, [rollout])
    return _one_row(batch, forest)


def shared_prefix(batch: TrainBatch, pad_token_id: int) -> ModelInputs:
    """One row with one copy of a prompt for all its completions: `[prompt | completion 1 | ... | completion G]`.

    A group with a prompt of P tokens and G completions of R costs P + G R tokens instead of G (P + R), with the same
    results. Completions with a common beginning share it as a branch; the last hidden state of a branch predicts the
    first token of every branch that continues it.
    """
    forest = _Forest(batch)
    members: list[list[int]] = [[] for _ in forest.prompts]
    for rollout, group in enumerate(batch.groups.tolist()):
        members[group].append(rollout)
    for prompt, rollouts in zip(forest.prompts, members, strict=True):
        forest.grow(rollouts, 0, forest.add((prompt,), -1, rollouts))
    return _one_row(batch, forest)


LAYOUTS: dict[str, Layout] = {"shared_prefix": shared_prefix, "packed": packed, "padded": padded}
"""Fastest first; the last one suits every model."""


class _Forest:
    """Segments, each of adjacent tokens of a row, in depth-first order, and each rollout's path through them."""

    def __init__(self, batch: TrainBatch):
        self.prompts = _spans(batch.prompt_lengths, 0)
        self.completions = _spans(batch.lengths, len(batch.prompt_ids))
        # Tokens of each completion; with routes, numbers of (token, route) pairs, so that only equal pairs are shared.
        self.tokens: list[list[int]] = [part.tolist() for part in _numbered(batch).split(batch.lengths.tolist())]
        self.segments: list[tuple[Span, ...]] = []
        self.parents: list[int] = []  # the segment that each continues, or -1
        self.paths: list[list[int]] = [[] for _ in self.tokens]

    def add(self, spans: tuple[Span, ...], parent: int, rollouts: list[int]) -> int:
        index = len(self.segments)
        self.segments.append(spans)
        self.parents.append(parent)
        for rollout in rollouts:
            self.paths[rollout].append(index)
        return index

    def grow(self, rollouts: list[int], done: int, parent: int) -> None:
        """Add the segments of `rollouts` that follow their first `done` tokens, which they have in common."""
        for cluster in self._clusters(rollouts, done):
            first = self.completions[cluster[0]][0]
            # Members are sorted by tokens, so a prefix common to the first and the last is common to all.
            least, most = self.tokens[cluster[0]], self.tokens[cluster[-1]]
            differ = (index for index, (a, b) in enumerate(zip(least, most, strict=False)) if a != b)
            shared = next(differ, len(least)) if len(cluster) > 1 else len(least)
            if shared > done:
                branch = self.add(((first + done, first + shared),), parent, cluster)
                if len(cluster) > 1:
                    self.grow(cluster, shared, branch)

    def _clusters(self, rollouts: list[int], done: int) -> list[list[int]]:
        """Unfinished rollouts, sorted by tokens and grouped by the next tokens that are worth sharing."""
        clusters: list[list[int]] = []
        next_tokens = slice(done, done + WORTH_SHARING)
        for rollout in sorted(rollouts, key=self.tokens.__getitem__):
            tokens = self.tokens[rollout]
            if len(tokens) <= done:
                continue
            begins = tokens[next_tokens]
            if clusters and len(begins) == WORTH_SHARING and begins == self.tokens[clusters[-1][-1]][next_tokens]:
                clusters[-1].append(rollout)
            else:
                clusters.append([rollout])
        return clusters


def _numbered(batch: TrainBatch) -> Tensor:
    """[N] a number for each token, equal for equal tokens with equal routes."""
    if batch.routes is None:
        return batch.token_ids
    routes, numbers = batch.routes.cpu().numpy(), dict[tuple[int, bytes], int]()
    pairs = zip(batch.token_ids.tolist(), (route.tobytes() for route in routes), strict=True)
    return torch.tensor([numbers.setdefault(pair, len(numbers)) for pair in pairs], dtype=torch.long)


def _spans(lengths: Tensor, first: int) -> list[Span]:
    return list(pairwise([first, *(lengths.cumsum(0) + first).tolist()]))


def _one_row(batch: TrainBatch, forest: _Forest) -> ModelInputs:
    """Lay the segments in one row, depth first."""
    device = batch.token_ids.device
    lengths = [sum(stop - start for start, stop in spans) for spans in forest.segments]
    tree = TokenTree(lengths, forest.parents)
    order = torch.cat([torch.arange(*span) for spans in forest.segments for span in spans]).to(device)
    predictors = []  # of each completion token, the position of the one before it on the rollout's path
    prompts = batch.prompt_lengths[batch.groups].tolist()
    for prompt, length, path in zip(prompts, batch.lengths.tolist(), forest.paths, strict=True):
        positions = torch.cat([torch.arange(tree.starts[segment], tree.stops[segment]) for segment in path])
        predictors.append(positions[prompt - 1 :][:length])

    def sum_over_readers(numbers: Tensor) -> Tensor:
        visits = [(rollout, segment) for rollout, path in enumerate(forest.paths) for segment in path]
        by, of = (torch.tensor(column, dtype=torch.long, device=device) for column in zip(*visits, strict=True))
        totals = numbers.new_zeros(len(lengths)).index_add(0, of, numbers[by])
        return totals.repeat_interleave(torch.tensor(lengths, device=device))

    return ModelInputs(
        kwargs={
            "input_ids": torch.cat([batch.prompt_ids, batch.token_ids])[order][None],
            # Four-dimensional, which keeps transformers from building a quadratic mask that nothing reads.
            "attention_mask": torch.zeros(1, 1, 1, 1, device=device),
            "position_ids": tree.positions().to(device)[None],
            "token_tree": tree,
        },
        predictors=torch.cat(predictors).to(device),
        sum_over_readers=sum_over_readers,
        sources=order,
    )


# ---- selection: the fastest layout with the log-probs of padded rows, found by trials, once per model ----------------
# The trials use synthetic rollouts: all processes run the same forward passes, and single rollouts can be packed too.

LONGEST_WINDOW = 512  # longest sliding window that trials exceed; the layouts treat longer ones no differently

Score = Callable[[str, TrainBatch], Tensor]  # (layout, batch) -> the model's log-probs [N] in that layout


def choose_layout(wanted: str, model: Any, score: Score, device: torch.device) -> str:
    """Choose the fastest layout that gives an unwrapped model's log-probs, by trials on synthetic rollouts.

    `wanted` is "auto" or the layout that the user set. CheckError if that one gives wrong log-probs; in half precision
    only a warning, because rounding may explain the difference.
    """
    if wanted == "padded":
        return wanted
    if wanted != "auto":
        if (objection := _objection(wanted, model, score, *_padded_scores(model, score, device))) is not None:
            message = f"attn_layout='{wanted}' is wrong for {name_of(model)}: {objection}."
            if compute_dtype(model).itemsize >= 4 or not objection.startswith("log-probs differ"):
                raise CheckError.of("model-layout", message, "Set attn_layout='auto' or 'padded'.")
            warn(f"{message} In half precision this may be rounding; otherwise set attn_layout='auto' or 'padded'.")
        return wanted
    chosen = model.config._attn_implementation
    is_default = not sdpa_suits(model) if chosen == "eager" else chosen in ("sdpa", PACKED_ATTENTION)
    if not is_default:  # the user chose it
        if chosen != "eager":
            warn(
                f"{name_of(model)} runs with attn_implementation='{chosen}', as you set it, so it is scored"
                " with padded rows. Leave it out to let completions share their prompt, or set attn_layout='padded' to"
                " silence this."
            )
        return "padded"
    reasons = []
    expected, noise = _padded_scores(model, score, device)
    for layout in [name for name in LAYOUTS if name != "padded"]:
        if (reason := _objection(layout, model, score, expected, noise)) is None:
            return layout
        reasons.append(reason)
    model.set_attn_implementation(chosen)
    warn(
        f"{name_of(model)} cannot use the packed layouts ({'; '.join(dict.fromkeys(reasons))}); scoring with"
        " padded rows instead. Set attn_layout='padded' to silence this."
    )
    return "padded"


def slowest(layouts: Iterable[str]) -> str:
    """Slowest of the layouts that the processes chose: it is correct for all of them."""
    return max(layouts, key=list(LAYOUTS).index)


def synthetic_rollouts(config: Any, device: torch.device) -> TrainBatch:
    """Two random completions for each of two prompts, one longer than the window, so that any leak is visible."""
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None) or 0
    room = (getattr(config, "max_position_embeddings", None) or LONGEST_WINDOW) - 8
    long = max(1, min(window + 5 if window <= LONGEST_WINDOW else 19, room))
    prompts, lengths = torch.tensor([long, max(1, min(5, room))]), torch.tensor([7, 4, 6, 3])
    generator = torch.Generator().manual_seed(0)

    def tokens(count: Tensor) -> Tensor:
        return torch.randint(config.vocab_size, (int(count.sum()),), generator=generator)

    return TrainBatch(
        token_ids=tokens(lengths),
        lengths=lengths,
        sampled=torch.ones(int(lengths.sum()), dtype=torch.bool),
        prompt_ids=tokens(prompts),
        prompt_lengths=prompts,
        groups=torch.tensor([0, 0, 1, 1]),
    ).to(device)


def _padded_scores(model: Any, score: Score, device: torch.device) -> tuple[Tensor, float]:
    """Log-probs [N] of padded rows, and their mean change when each rollout is scored alone (rounding error)."""
    few = synthetic_rollouts(model.config, device)
    expected = score("padded", few)
    alone = torch.cat([score("padded", one) for one in few.split(1)])
    return expected, (alone - expected).abs().mean().item()


def _objection(layout: str, model: Any, score: Score, expected: Tensor, noise: float) -> str | None:
    """Reason why a layout does not suit a model, or None."""
    named = decoder_of(model).named_modules()  # state-space models and hybrids have convolutions
    if convolution := next((name for name, module in named if isinstance(module, nn.Conv1d)), None):
        return f"'{convolution}' is a convolution along the row, which mixes neighbouring sequences"
    try:
        actual = score(layout, synthetic_rollouts(model.config, expected.device))
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        if is_out_of_memory(error):
            raise  # not the layout's fault
        return f"{layout} fails with {type(error).__name__}: {error}"
    difference = (actual - expected).abs().mean().item()
    # Not "difference > ...", which is False for NaN.
    if not difference <= tolerance(model, noise):
        return f"log-probs differ by {difference:.2g} on average with {layout}, by {noise:.2g} through rounding alone"
    changed = synthetic_rollouts(model.config, actual.device)
    first = int(changed.lengths[0])
    changed.token_ids[:first] = (changed.token_ids[:first] + 1) % model.config.get_text_config().vocab_size
    leak = (score(layout, changed) - actual)[first:].abs().mean().item()
    # Nothing but the changed tokens differs, so most models give the same bits; experts may round differently.
    if not leak <= noise + (1e-6 if compute_dtype(model).itemsize >= 4 else 1e-3):
        return f"log-probs differ by {leak:.2g} on average with {layout} when another rollout of the row changes"
    return None


def tolerance(model: Any, noise: float) -> float:
    """Largest mean difference of log-probs between layouts, in nats; experts that nearly tie need room for rounding."""
    return 5 * noise + (1e-5 if compute_dtype(model).itemsize >= 4 else 0.05)
