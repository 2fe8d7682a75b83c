"""Selection of prompts by reward: dynamic sampling, and prompts by difficulty.

Every process sees all rewards, makes the same decision and takes part in every round.

Letters: P prompts, G completions of each, N = P·G completions of all processes in sampling order, F reward functions, n
completions of this process.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from covey.algorithms.credit import spread_of_rewards
from covey.config.algebra import BatchAlgebra
from covey.core.records import PromptSample, ScoredRollouts, Scores
from covey.core.stats import Mean, Stat
from covey.data.difficulty import PromptHistory
from covey.data.prompt_stream import PromptStream
from covey.data.sampler import GenerationSampler, PromptDataset, Slot, rank_share, share_of, train_stream

Place = tuple[int, int]  # (round of sampling, place in that round) of a group or of a completion


@dataclass(frozen=True)
class SamplingRound:
    """One round of sampling as every process sees it."""

    prompts: list[int]  # [P] row numbers
    scores: Scores
    lengths: list[int]  # [N] sampled tokens
    truncated: list[bool]  # [N]
    prompt_lengths: list[int]  # [N]
    has_signal: list[bool]  # [P] groups with a gradient

    @property
    def processed_tokens(self) -> int:
        return sum(self.lengths) + sum(self.prompt_lengths)


@dataclass(frozen=True)
class Selection:
    """Groups selected to train on."""

    kept: ScoredRollouts  # this process's share of them
    first: SamplingRound  # before any refilling
    processed_tokens: int  # of all rounds
    stats: dict[str, Stat]


@dataclass(frozen=True)
class SignalFilter:
    """Finds groups with a signal."""

    # (scores, completions of a group) -> [N] bool, True where some token of a completion has an advantage other than 0.
    # Without the KL penalty, which would make all groups differ.
    signal: Callable[[Scores, int], Tensor]
    weights: Tensor  # [F] of the reward functions
    mask_truncated: bool  # truncated completions are not learned from, so they carry no signal

    def has_signal(self, scores: Scores, group: int, lengths: Sequence[int], truncated: Sequence[bool]) -> list[bool]:
        """[P]: True where a completion that is learned from has an advantage other than 0."""
        learned = torch.tensor(lengths) > 0
        if self.mask_truncated:
            learned &= ~torch.tensor(truncated)
        return (self.signal(scores, group) & learned).view(-1, group).any(1).tolist()


def kept_groups(has_signal: Sequence[Sequence[bool]], count: int) -> list[Place]:
    """`count` groups to train on, in sampling order: those with a signal, then the first others of round 0."""
    good = [(number, index) for number, flags in enumerate(has_signal) for index, flag in enumerate(flags) if flag]
    others = [(0, index) for index, flag in enumerate(has_signal[0]) if not flag]
    return sorted([*good[:count], *others[: max(count - len(good), 0)]])


@dataclass(eq=False)
class PromptChooser:
    """Selects the prompts and the groups of each generation."""

    dataset: Any  # rows with a length
    algebra: BatchAlgebra
    rank: int  # of this process
    stream: PromptStream  # source of refills; with `history`, of every prompt
    signal_filter: SignalFilter
    _: KW_ONLY
    history: PromptHistory | None  # difficulty by which the stream selects prompts; None leaves them to the dataloader
    max_rounds: int | None  # maximum rounds of refilling; None: no dynamic sampling
    gather: Callable[[Any], list[Any]]  # collective: one object to those of all ranks
    exchange: Callable[[list[Any]], list[Any]]  # collective: one object for each rank to one from each

    def refill(self, rounds: list[SamplingRound]) -> list[PromptSample] | None:
        """This process's share of the groups to sample next; None when there are enough, or after the last round."""
        missing = self.algebra.prompts_per_generation - _signals(rounds)
        if len(rounds) > (self.max_rounds or 0) or not missing:
            return None
        return self._draws(self.stream.take(missing, avoid={prompt for one in rounds for prompt in one.prompts}))

    def select(self, mine: list[ScoredRollouts], rounds: list[SamplingRound]) -> Selection:
        """The groups to train on, from this process's completions of all `rounds`. Collective."""
        kept = kept_groups([one.has_signal for one in rounds], self.algebra.prompts_per_generation)
        tokens = sum(one.processed_tokens for one in rounds)
        return Selection(self._collect(mine, rounds, kept), rounds[0], tokens, self._stats(rounds))

    def draw(self) -> list[PromptSample]:
        """This process's share of the prompts of a generation, by current difficulty. Collective."""
        return self._draws(self.stream.take(self.algebra.prompts_per_generation))

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

    def share(self, mine: ScoredRollouts) -> SamplingRound:
        """Gather the scores of a round, and add them to the history. Collective."""
        pairs = zip(mine.draws, mine.rollouts, strict=True)
        facts = [(draw.prompt, one.num_sampled, one.truncated, len(one.prompt_ids)) for draw, one in pairs]
        everyone = self.gather((mine.scores, facts))
        prompts, lengths, truncated, prompt_lengths = zip(*(fact for _, part in everyone for fact in part), strict=True)
        scores = Scores.joined([part for part, _ in everyone])
        group = self.algebra.num_generations
        if self.history is not None:
            self.history.update(prompts[::group], *spread_of_rewards(scores, self.signal_filter.weights, group))
        return SamplingRound(
            prompts=list(prompts[::group]),
            scores=scores,
            lengths=list(lengths),
            truncated=list(truncated),
            prompt_lengths=list(prompt_lengths),
            has_signal=self.signal_filter.has_signal(scores, group, lengths, truncated),
        )

    def _collect(self, mine: list[ScoredRollouts], rounds: list[SamplingRound], kept: list[Place]) -> ScoredRollouts:
        """This process's equal share of the selected groups, fetched from other processes where needed."""
        if all(number == 0 for number, _ in kept):
            return mine[0]  # this process sampled its share
        group = self.algebra.num_generations
        places = [(number, place * group + sample) for number, place in kept for sample in range(group)]
        shares = [places[share_of(len(places), self.algebra, rank)] for rank in range(self.algebra.world_size)]
        held: dict[Place, ScoredRollouts] = {}
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
            groups = self.algebra.prompts_per_generation
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


def _joined(completions: list[ScoredRollouts], groups: list[Place]) -> ScoredRollouts:
    """Single completions of several rounds as one share; equal `groups` belong together."""
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    names = dict.fromkeys(name for one in completions for name in one.columns)
    pairs = zip(completions, groups, strict=True)
    return ScoredRollouts(
        draws=[draw for one in completions for draw in one.draws],
        rollouts=[replace(rollout, group=numbers[group]) for one, group in pairs for rollout in one.rollouts],
        rewards=torch.cat([one.rewards for one in completions]),
        columns={name: [cell for one in completions for cell in one.columns.get(name, [None])] for name in names},
        steps=[steps for one in completions for steps in one.steps],
    )


# ---- prompts of async rollouts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptSource:
    """This process's prompt samples of any generation, for async rollouts that are ahead of the dataloader."""

    draws: Callable[[int], list[PromptSample]]
    """Samples of a generation, in the order of the dataloader; called once for each, in order. May be collective."""
    again: Callable[[int, list[Slot]], list[PromptSample]]
    """Samples of a generation that had these slots in the checkpoint."""


def prompt_source(
    dataset: Any, chooser: PromptChooser | None, algebra: BatchAlgebra, rank: int, *, shuffle: bool, seed: int
) -> PromptSource:
    if not hasattr(dataset, "__len__"):
        stream = enumerate(train_stream(dataset, algebra, rank, shuffle=shuffle, seed=seed).generations())

        def read(generation: int) -> list[PromptSample]:
            samples = next(samples for number, samples in stream if number >= generation)  # earlier ones are skipped
            assert samples is not None, "this stream is read"
            return samples

        return PromptSource(read, lambda generation, slots: read(generation))  # a stream is always in the same order
    fetch = PromptDataset(dataset).__getitems__
    if chooser is not None and chooser.history is not None:
        return PromptSource(lambda generation: chooser.draw(), lambda generation, slots: fetch(slots))
    sampler = GenerationSampler(len(dataset), algebra, rank, shuffle=shuffle, seed=seed)
    return PromptSource(lambda generation: fetch(sampler.slots(generation)), lambda generation, slots: fetch(slots))
