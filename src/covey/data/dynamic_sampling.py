"""Selection of prompts by reward: dynamic sampling, and prompts by difficulty.

Every process sees all rewards, makes the same decision and takes part in every round.

Letters: P prompts, G completions of each, N = P·G completions of all processes in sampling order, F reward functions.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from covey.algorithms.algorithm import Algorithm
from covey.algorithms.comparison import whole_groups
from covey.algorithms.credit import assign_credit, spread_of_rewards
from covey.config.algebra import BatchAlgebra
from covey.core.likeness import Keys, keys_of
from covey.core.records import PromptSample, RolloutBatch, Scores
from covey.core.stats import Mean, Stat
from covey.data.sampler import GenerationSampler, PromptDataset, Slot, rank_share, share_of, train_stream
from covey.rollout.prompts import sample_seed

NEWEST = 0.5  # weight of the newest group in a prompt's running means; high, because the policy changes between groups
Place = tuple[int, int]  # (round of sampling, place in that round) of a group or of a completion


class PromptHistory:
    """Running means of the total reward of every prompt, and the chance of sampling it.

    For prompt x, m ← (1 - ½) m + ½ mean_group(R) and q ← (1 - ½) q + ½ mean_group(R²), beginning with the first group
    seen. For rewards of 0 and 1, the variance v = q - m² is p (1 - p): largest for prompts of intermediate difficulty.

        chance(x) = floor + (1 - floor) · v(x) / largest v of any prompt

    Prompts not seen yet have chance 1, and all have while no prompt's rewards have differed. Where steps are rewarded,
    R is the reward of the outcome, and the variance of step rewards within a group is added to the mean of R².
    """

    def __init__(self, rows: int, floor: float):
        self.floor = floor
        self.means = torch.full((rows,), torch.nan, dtype=torch.float64)
        """[rows] running mean reward, the pass rate for rewards of 0 and 1; NaN for prompts not seen yet."""
        self._squares = torch.full((rows,), torch.nan, dtype=torch.float64)
        self._largest = 0.0

    def update(self, prompts: Sequence[int], rewards_PG: Tensor, variances_P: Tensor) -> None:
        """Add the groups of `prompts`, by row number; NaN are missing rewards, and groups of NaN alone are skipped."""
        for row, rewards, of_steps in zip(prompts, rewards_PG.double(), variances_P.double(), strict=True):
            scored = rewards[~rewards.isnan()]
            if not len(scored):
                if of_steps.isnan():
                    continue
                scored = torch.zeros(1, dtype=torch.float64)
            square = scored.square().mean() + of_steps.nan_to_num(0.0)
            newest = NEWEST if self.seen(row) else 1.0
            for running, value in ((self.means, scored.mean()), (self._squares, square)):
                running[row] = newest * value + ((1 - newest) * running[row] if newest < 1 else 0.0)
        self._largest = self._variances().nan_to_num(0.0).max().item()

    def seen(self, row: int) -> bool:
        return not bool(self.means[row].isnan())

    def chance(self, row: int) -> float:
        return self._chances(self._variances(row)).item()

    def stats(self) -> dict[str, Stat]:
        variances = self._variances()
        chances = self._chances(variances[~variances.isnan()])
        return {
            "difficulty/seen_fraction": Mean(len(chances), len(variances)),
            "difficulty/chance": Mean(chances.sum().item(), len(chances)),
            "difficulty/settled_fraction": Mean((chances <= self.floor + 1e-9).sum().item(), len(chances)),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"means": self.means.clone(), "squares": self._squares.clone(), "largest": self._largest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.means, self._squares = state["means"].clone(), state["squares"].clone()
        self._largest = state["largest"]

    def _variances(self, rows: Any = slice(None)) -> Tensor:
        return (self._squares[rows] - self.means[rows].square()).clamp(min=0.0)

    def _chances(self, variances: Tensor) -> Tensor:
        if not self._largest > 0:
            return torch.ones_like(variances)
        return (self.floor + (1 - self.floor) * variances / self._largest).nan_to_num(1.0)


@dataclass(eq=False)
class PromptStream:
    """Epochs over a dataset, each in an order of its own.

    An epoch includes each row with its `chance` (thinning), so no row comes twice in an epoch, rows come in proportion
    to their chances in the long run, and with chances of 1 every epoch includes every row once.

    Example:
        >>> stream = PromptStream(4, seed=0, name="refill", shuffle=False)
        >>> stream.take(2, avoid={0, 1}), stream.take(3)  # avoided rows are deferred, not lost
        ([2, 3], [0, 1, 2])
    """

    rows: int
    seed: int  # of the orders, together with the number of the epoch
    name: str  # streams of the same seed and other names are independent
    _: KW_ONLY
    shuffle: bool  # a random order in each epoch, else the dataset's own
    chance: Callable[[int], float] | None = None  # row number -> its chance, above 0 and at most 1; None: every row

    def __post_init__(self) -> None:
        self._deferred: list[int] = []
        self._begin(0)

    def take(self, count: int, avoid: AbstractSet[int] = frozenset()) -> list[int]:
        """The next rows, all different; those to `avoid` are deferred, unless too few others are left."""
        assert count <= self.rows, "a dataset fills at least one rollout batch"
        if self.rows - len(avoid) < count:
            avoid = frozenset()
        taken = [row for row in self._deferred if row not in avoid][:count]
        self._deferred = [row for row in self._deferred if row not in taken]
        while len(taken) < count:
            row = self._next()
            if row not in avoid and row not in taken:
                taken.append(row)
            elif row not in self._deferred and row not in taken:
                self._deferred.append(row)
        return taken

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "pass": self._epoch, "place": self._position, "put_off": list(self._deferred)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; ValueError if the dataset has another number of rows."""
        if state["rows"] != self.rows:
            raise ValueError(
                f"the checkpoint was made with a training dataset of {state['rows']} rows and this one has"
                f" {self.rows}: what it knows about prompts is kept by row number and would mean others. Resume with"
                " the same dataset, or begin a new run from the checkpoint's weights."
            )
        self._deferred = list(state["put_off"])
        self._begin(state["pass"], state["place"])

    def _next(self) -> int:
        while True:
            if self._position == self.rows:
                self._begin(self._epoch + 1)
            row, threshold = self._order[self._position], self._thresholds[self._position]
            self._position += 1
            if self.chance is None or threshold < self.chance(row):
                return row

    def _begin(self, epoch: int, position: int = 0) -> None:
        """Draw the order of an epoch, and for each position a number in [0, 1) that the row's chance must exceed."""
        self._epoch, self._position = epoch, position
        generator = torch.Generator().manual_seed(sample_seed(self.seed, self.name, epoch))
        self._thresholds = torch.rand(self.rows, generator=generator, dtype=torch.float64).tolist()
        order = torch.randperm(self.rows, generator=generator) if self.shuffle else torch.arange(self.rows)
        self._order = order.tolist()


@dataclass(frozen=True)
class SamplingRound:
    """One round of sampling as every process sees it."""

    prompts: list[int]  # [P] row numbers
    scores: Scores
    lengths: Sequence[int]  # [N] sampled tokens
    truncated: Sequence[bool]  # [N]
    likeness: Sequence[Keys]  # [N]
    processed_tokens: int  # of prompts and completions
    has_signal: list[bool]  # [P] groups with a gradient


@dataclass(frozen=True)
class Selection:
    """Groups selected to train on."""

    kept: RolloutBatch  # this process's share of them
    first: SamplingRound  # before any refilling
    processed_tokens: int  # of all rounds
    stats: dict[str, Stat]


def groups_with_signal(
    algorithm: Algorithm, weights_F: Tensor, scores: Scores, group_size: int, learned: Sequence[bool]
) -> list[bool]:
    """[P]: True where a completion that is `learned` [N] from has an advantage other than 0, any KL penalty aside."""
    signal_N = assign_credit(algorithm, weights_F, scores, group_size).has_signal() & torch.tensor(learned)
    return signal_N.view(-1, group_size).any(1).tolist()


def kept_groups(has_signal: Sequence[Sequence[bool]], count: int) -> list[Place]:
    """`count` groups to train on, in sampling order: those with a signal, then the first others of round 0."""
    good = [(number, index) for number, flags in enumerate(has_signal) for index, flag in enumerate(flags) if flag]
    others = [(0, index) for index, flag in enumerate(has_signal[0]) if not flag]
    return sorted([*good[:count], *others[: max(count - len(good), 0)]])


@dataclass(eq=False)
class PromptChooser:
    """Selects the prompts and the groups of each rollout batch."""

    dataset: Any  # rows with a length
    algebra: BatchAlgebra
    rank: int  # of this process
    stream: PromptStream  # source of refills; with `history`, of every prompt
    algorithm: Algorithm  # gives the advantages by which groups have a signal
    weights: Tensor  # [F] of the reward functions
    _: KW_ONLY
    mask_truncated: bool  # truncated completions are not learned from, so they carry no signal
    history: PromptHistory | None  # difficulty by which the stream selects prompts; None leaves them to the dataloader
    max_rounds: int | None  # maximum rounds of refilling; None: no dynamic sampling
    gather: Callable[[Any], list[Any]]  # collective: one object to those of all ranks
    exchange: Callable[[list[Any]], list[Any]]  # collective: one object for each rank to one from each

    def refill(self, rounds: list[SamplingRound]) -> list[PromptSample] | None:
        """This process's share of the groups to sample next; None when there are enough, or after the last round."""
        missing = self.algebra.prompts_per_rollout_batch - _signals(rounds)
        if len(rounds) > (self.max_rounds or 0) or not missing:
            return None
        return self._draws(self.stream.take(missing, avoid={prompt for one in rounds for prompt in one.prompts}))

    def select(self, mine: list[RolloutBatch], rounds: list[SamplingRound]) -> Selection:
        """The groups to train on, from this process's completions of all `rounds`. Collective."""
        kept = kept_groups([one.has_signal for one in rounds], self.algebra.prompts_per_rollout_batch)
        tokens = sum(one.processed_tokens for one in rounds)
        return Selection(self._collect(mine, rounds, kept), rounds[0], tokens, self._stats(rounds))

    def draw(self) -> list[PromptSample]:
        """This process's share of the prompts of a rollout batch, by current difficulty. Collective."""
        return self._draws(self.stream.take(self.algebra.prompts_per_rollout_batch))

    def state_dict(self) -> dict[str, Any]:
        history = None if self.history is None else self.history.state_dict()
        return {"stream": self.stream.state_dict(), "history": history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint; start over if its run selected prompts in another way."""
        if (state["history"] is None) != (self.history is None):
            return
        self.stream.load_state_dict(state["stream"])
        if self.history is not None:
            self.history.load_state_dict(state["history"])

    def _draws(self, prompts: Sequence[int]) -> list[PromptSample]:
        slots = rank_share(prompts, self.algebra.num_generations, self.algebra, self.rank)
        return PromptDataset(self.dataset).__getitems__(slots)

    def share(self, mine: RolloutBatch) -> SamplingRound:
        """Gather the scores of a round, and add them to the history. Collective."""
        pairs = zip(mine.samples, mine.rollouts, strict=True)
        facts = [
            (draw.prompt, one.num_sampled, one.truncated, len(one.prompt_ids), keys_of(draw, one))
            for draw, one in pairs
        ]
        everyone = self.gather((mine.scores, facts))
        prompts, lengths, truncated, prompt_lengths, likeness = zip(
            *(fact for _, part in everyone for fact in part), strict=True
        )
        scores = Scores.joined([part for part, _ in everyone])
        group = self.algebra.num_generations
        if self.history is not None:
            groups = whole_groups(len(scores.lengths), group)
            self.history.update(prompts[::group], *spread_of_rewards(scores, self.weights, groups))
        cut = truncated if self.mask_truncated else [False] * len(lengths)
        learned = [length > 0 and not left_out for length, left_out in zip(lengths, cut, strict=True)]
        return SamplingRound(
            prompts=list(prompts[::group]),
            scores=scores,
            lengths=lengths,
            truncated=truncated,
            likeness=likeness,
            processed_tokens=sum(lengths) + sum(prompt_lengths),
            has_signal=groups_with_signal(self.algorithm, self.weights, scores, group, learned),
        )

    def _collect(self, mine: list[RolloutBatch], rounds: list[SamplingRound], kept: list[Place]) -> RolloutBatch:
        """This process's equal share of the selected groups, fetched from other processes where needed."""
        if all(number == 0 for number, _ in kept):
            return mine[0]  # this process sampled its share
        group = self.algebra.num_generations
        places = [(number, place * group + sample) for number, place in kept for sample in range(group)]
        shares = [places[share_of(len(places), self.algebra, rank)] for rank in range(self.algebra.world_size)]
        held: dict[Place, RolloutBatch] = {}
        for number, (sampled, shared) in enumerate(zip(mine, rounds, strict=True)):
            share = share_of(len(shared.lengths), self.algebra, self.rank)
            for index, place in enumerate(range(share.start, share.stop)):
                held[number, place] = sampled[index : index + 1]
        outgoing: list[Any] = [{place: held[place] for place in share if place in held} or None for share in shares]
        own, outgoing[self.rank] = outgoing[self.rank] or {}, None
        for received in self.exchange(outgoing):
            own.update(received or {})
        return _joined([own[at] for at in shares[self.rank]], [(n, at // group) for n, at in shares[self.rank]])

    def _stats(self, rounds: list[SamplingRound]) -> dict[str, Stat]:
        stats: dict[str, Stat] = {}
        if self.max_rounds is not None:
            groups = self.algebra.prompts_per_rollout_batch
            kept = min(_signals(rounds), groups)
            stats = {
                "dynamic_sampling/first_signal": Mean(sum(rounds[0].has_signal), groups),
                "dynamic_sampling/trained_signal": Mean(kept, groups),
                "dynamic_sampling/rounds": Mean(len(rounds) - 1, 1),
                "dynamic_sampling/unfilled_groups": Mean(groups - kept, 1),
                "dynamic_sampling/cost": Mean(sum(len(one.prompts) for one in rounds), groups),
            }
        return stats if self.history is None else {**stats, **self.history.stats()}


def _signals(rounds: list[SamplingRound]) -> int:
    return sum(sum(one.has_signal) for one in rounds)


def _joined(completions: list[RolloutBatch], groups: list[Place]) -> RolloutBatch:
    """Single completions of several rounds as one share; equal `groups` belong together."""
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    names = dict.fromkeys(name for one in completions for name in one.columns)
    pairs = zip(completions, groups, strict=True)
    return RolloutBatch(
        samples=[draw for one in completions for draw in one.samples],
        rollouts=[replace(rollout, group=numbers[group]) for one, group in pairs for rollout in one.rollouts],
        rewards=torch.cat([one.rewards for one in completions]),
        columns={name: [cell for one in completions for cell in one.columns.get(name, [None])] for name in names},
        steps=[steps for one in completions for steps in one.steps],
    )


# ---- prompts of async rollouts ---------------------------------------------------------------------------------------


PromptSource = Callable[[int, list[Slot] | None], list[PromptSample]]
"""This process's prompt samples of a rollout batch, called once for each, in order, by async rollouts that are ahead of
the dataloader; with the rollout batch's slots if a checkpoint has them. May be collective."""


def prompt_source(
    dataset: Any, chooser: PromptChooser | None, algebra: BatchAlgebra, rank: int, *, shuffle: bool, seed: int
) -> PromptSource:
    if not hasattr(dataset, "__len__"):
        stream = enumerate(train_stream(dataset, algebra, rank, shuffle=shuffle, seed=seed).rollout_batches())

        def read(rollout_batch: int, slots: list[Slot] | None) -> list[PromptSample]:
            samples = next(samples for number, samples in stream if number >= rollout_batch)  # earlier ones are skipped
            assert samples is not None, "this stream is read"
            return samples  # those of the slots, as a stream is always in the same order

        return read
    sampler = GenerationSampler(len(dataset), algebra, rank, shuffle=shuffle, seed=seed)

    def draw(rollout_batch: int, slots: list[Slot] | None) -> list[PromptSample]:
        if slots is None and chooser is not None and chooser.history is not None:
            return chooser.draw()
        return PromptDataset(dataset).__getitems__(sampler.slots(rollout_batch) if slots is None else slots)

    return draw
