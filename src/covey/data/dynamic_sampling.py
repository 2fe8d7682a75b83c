"""Selection of prompts and groups: which source and row is sampled next, which finished groups are trained on.

Every process gets all rewards, makes the same decision and takes part in every round. Samplers choose rows
(`covey.data.samplers`), gates admit groups (`covey.data.gates`). A run without sources has one source without a name.

Letters: P prompts, G completions of each, N = P·G completions of all processes in sampling order, F reward functions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain
from typing import Any

import torch

from covey.algorithms.comparison import whole_groups
from covey.algorithms.credit import JudgeOf, credit_by_source, spread_by_source, spread_of_rewards
from covey.config.algebra import BatchAlgebra
from covey.core.findings import CheckError
from covey.core.likeness import Keys, keys_of
from covey.core.records import PromptSample, RolloutBatch, Scores
from covey.core.stats import Max, Mean, Stat
from covey.data.gates import Gate, facts_of_groups
from covey.data.sampler import GenerationSampler, PromptDataset, Slot, rank_share, share_of, train_stream
from covey.data.samplers import PromptHistory, PromptStream
from covey.data.sources import Shares
from covey.data.validation import read_row

Place = tuple[int, int]  # (round of sampling, place in that round) of a group or of a completion


@dataclass(frozen=True)
class SamplingRound:
    """One round of sampling, with the same values in every process."""

    prompts: list[int]  # [P] row numbers
    scores: Scores
    lengths: Sequence[int]  # [N] sampled tokens
    truncated: Sequence[bool]  # [N]
    played: Sequence[bool]  # [N] it has a length (`Rollout.played`)
    likeness: Sequence[Keys]  # [N]
    processed_tokens: int  # of prompts and completions
    sources: list[str]  # [P] names of the prompts' sources, "" in a run without
    rejected: list[list[str]]  # [P] names of the gates that reject the group

    @property
    def admitted(self) -> list[bool]:
        return [not gates for gates in self.rejected]


@dataclass(frozen=True)
class Selection:
    """Groups selected to train on."""

    kept: RolloutBatch  # this process's share of them
    first: SamplingRound  # before any refilling
    processed_tokens: int  # of all rounds
    stats: dict[str, Stat]


def kept_groups(admitted: Sequence[Sequence[bool]], sources: Sequence[Sequence[str]]) -> list[Place]:
    """The groups to train on, in sampling order: as many of each source as its first round has.

    For each source, `admitted` groups are taken first, then rejected ones of round 0 in order. Both arguments have a
    list per round, with a value per group.
    """
    places = [(number, index) for number, names in enumerate(sources) for index in range(len(names))]
    kept = []
    for source in dict.fromkeys(sources[0]):
        own = [(number, index) for number, index in places if sources[number][index] == source]
        count = sum(number == 0 for number, _ in own)
        good = [(number, index) for number, index in own if admitted[number][index]][:count]
        others = [(0, index) for number, index in own if number == 0 and not admitted[0][index]]
        kept += [*good, *others[: count - len(good)]]
    return sorted(kept)


@dataclass(eq=False)
class SourceChoice:
    """Choice of prompts and groups of one source."""

    stream: PromptStream  # of the rows to draw, or only of refills
    _: KW_ONLY
    name: str = ""
    first: int = 0  # number of its first row in the run's dataset
    history: PromptHistory | None = (
        None  # rewards that decide which rows the stream includes; None if they are not used
    )
    gates: Mapping[str, Gate] = field(default_factory=dict)
    digest: str | None = None  # hash of its rows, by which a resumed run recognises them

    def take(self, count: int, avoid: set[int] | None = None) -> list[int]:
        """Row numbers of the next prompts, all different; rows in `avoid` are deferred."""
        rows = range(self.first, self.first + self.stream.rows)
        if count > len(rows):
            raise CheckError.of(
                "source-small",
                f"source {self.name!r} has {len(rows)} row(s), and a rollout batch asks for {count} of it.",
                "Lower its weight, give it more rows, or draw fewer prompts at a time.",
            )
        taken = self.stream.take(count, {row - self.first for row in avoid or () if row in rows})
        return [self.first + row for row in taken]

    def state_dict(self) -> dict[str, Any]:
        history = None if self.history is None else self.history.state_dict()
        return {"stream": self.stream.state_dict(), "history": history, "digest": self.digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint; ValueError if the source has other rows."""
        if (was := state.get("digest")) is not None and self.digest is not None and was != self.digest:
            same = state["stream"]["rows"] == self.stream.rows
            raise ValueError(
                f"source {self.name!r} has other rows than in the checkpoint"
                f" ({'as many' if same else state['stream']['rows']} then, {self.stream.rows} now): what is known about"
                " prompts is kept by row number. Resume with the same rows, or begin a new run from the weights."
            )
        self.stream.load_state_dict(state["stream"])
        if self.history is not None and state["history"] is not None:
            self.history.load_state_dict(state["history"])


@dataclass(eq=False)
class PromptChooser:
    """Selects the prompts and the groups of each rollout batch."""

    dataset: Any  # rows with a length
    algebra: BatchAlgebra
    rank: int  # of this process
    choices: list[SourceChoice]  # one in a run without sources
    judge_of: JudgeOf  # by the name of the source
    _: KW_ONLY
    mask_truncated: Callable[[str], bool]  # True if truncated completions of the source are not trained on
    draws: bool  # True: it draws every prompt; False: only refills, and the dataloader draws the others
    max_rounds: int  # maximum rounds of refilling
    gather: Callable[[Any], list[Any]]  # collective: one object to those of all ranks
    exchange: Callable[[list[Any]], list[Any]]  # collective: one object for each rank to one from each
    takes_new_sources: bool = False  # a resumed run may have sources that its checkpoint lacks

    def __post_init__(self) -> None:
        self.shares = Shares(len(self.choices))
        self.drawn = 0  # rollout batches

    @property
    def gated(self) -> bool:
        return any(choice.gates for choice in self.choices)

    def refill(self, rounds: list[SamplingRound]) -> list[PromptSample] | None:
        """This process's share of the groups to sample next; None when there are enough, or after the last round."""
        if len(rounds) > self.max_rounds:
            return None
        seen = {prompt for one in rounds for prompt in one.prompts}
        missing = {choice.name: rounds[0].sources.count(choice.name) for choice in self.choices}
        for one in rounds:
            for name, admitted in zip(one.sources, one.admitted, strict=True):
                missing[name] -= admitted
        prompts = [choice.take(count, seen) for choice in self.choices if (count := missing[choice.name]) > 0]
        return self._draws([*chain.from_iterable(prompts)]) if prompts else None

    def select(self, mine: list[RolloutBatch], rounds: list[SamplingRound]) -> Selection:
        """The groups to train on, from this process's completions of all `rounds`. Collective."""
        kept = kept_groups([one.admitted for one in rounds], [one.sources for one in rounds])
        tokens = sum(one.processed_tokens for one in rounds)
        return Selection(self._collect(mine, rounds, kept), rounds[0], tokens, self._stats(rounds))

    def draw(self) -> list[PromptSample]:
        """This process's share of the prompts of the next rollout batch. Collective."""
        step = int(self.drawn * self.algebra.updates_per_rollout_batch)
        self.drawn += 1
        for choice in self.choices:
            if choice.history is not None:
                choice.history.at_step(step)
        count = self.algebra.prompts_per_rollout_batch
        if len(self.choices) == 1:
            return self._draws(self.choices[0].take(count))
        order = self.shares.take(count, self.dataset.weights_at(step))
        taken = [iter(choice.take(order.count(index))) for index, choice in enumerate(self.choices)]
        return self._draws([next(taken[index]) for index in order])

    def state_dict(self) -> dict[str, Any]:
        choices = {choice.name: choice.state_dict() for choice in self.choices}
        return {"draws": self.draws, "owed": list(self.shares.owed), "drawn": self.drawn, "sources": choices}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint; start over if the checkpoint has no state of such a selection.

        Raises:
            ValueError: a source is missing or has other rows, or is new without `takes_new_sources`.
        """
        if "sources" not in state:  # of version 0.2
            state = {"draws": state["history"] is not None, "owed": [0], "drawn": 0, "sources": {"": state}}
        known, names = list(state["sources"]), [choice.name for choice in self.choices]
        if ("" in known) != ("" in names) or state["draws"] != self.draws:
            return
        if names[: len(known)] != known:
            raise ValueError(
                f"the checkpoint has the sources {', '.join(known)}, and this run {', '.join(names)}: rows are known by"
                " their number, counted over all sources in this order. Name the same ones in the same order, weight 0"
                " for those that should not be trained on, and new ones behind them."
            )
        if len(names) > len(known) and not self.takes_new_sources:
            raise ValueError(
                f"this run has sources that the checkpoint has not: {', '.join(names[len(known) :])}. Set"
                " resume_sources=True to begin with them now."
            )
        for choice in self.choices[: len(known)]:
            choice.load_state_dict(state["sources"][choice.name])
        self.shares.owed = [*state["owed"], *([0] * (len(names) - len(known)))]
        self.drawn = state["drawn"]

    def _draws(self, prompts: Sequence[int]) -> list[PromptSample]:
        slots = rank_share(prompts, self.algebra.num_generations, self.algebra, self.rank)
        return PromptDataset(self.dataset).__getitems__(slots)

    def share(self, mine: RolloutBatch) -> SamplingRound:
        """Gather the scores of a round, and add them to the histories. Collective."""
        pairs = zip(mine.samples, mine.rollouts, strict=True)
        facts = [
            (
                draw.prompt,
                draw.source,
                one.num_sampled,
                one.truncated,
                one.played,
                len(one.prompt_ids) * (not one.absent),
            )
            for draw, one in pairs
        ]
        likeness = [keys_of(*pair) for pair in zip(mine.samples, mine.rollouts, strict=True)]
        everyone = self.gather((mine.scores, facts, likeness))
        each_prompt, each_source, lengths, truncated, played, prompt_lengths = zip(
            *(fact for _, part, _ in everyone for fact in part), strict=True
        )
        likeness = [keys for _, _, part in everyone for keys in part]
        scores = Scores.joined([part for part, _, _ in everyone])
        group = self.algebra.num_generations
        prompts, sources = list(each_prompt[::group]), list(each_source[::group])
        for choice in self.choices:
            if choice.history is not None and choice.name in sources:
                rows = scores.by_source()[choice.name]
                own = [row - choice.first for row, name in zip(prompts, sources, strict=True) if name == choice.name]
                weights, groups = self.judge_of(choice.name).weights_F, whole_groups(len(rows), group)
                choice.history.update(own, *spread_of_rewards(scores.take(rows), weights, groups))
        masked = {name: self.mask_truncated(name) for name in dict.fromkeys(sources)}
        cut = [one and masked[sources[index // group]] for index, one in enumerate(truncated)]
        learned = [length > 0 and not left_out for length, left_out in zip(lengths, cut, strict=True)]
        return SamplingRound(
            prompts=prompts,
            scores=scores,
            lengths=lengths,
            truncated=truncated,
            played=played,
            likeness=likeness,
            processed_tokens=sum(lengths) + sum(prompt_lengths),
            sources=sources,
            rejected=self._rejected(prompts, sources, scores, lengths, truncated, learned),
        )

    def _rejected(
        self,
        prompts: list[int],
        sources: list[str],
        scores: Scores,
        lengths: Sequence[int],
        truncated: Sequence[bool],
        learned: Sequence[bool],
    ) -> list[list[str]]:
        """[P] names of the gates that reject each group."""
        if not self.gated:
            return [[] for _ in prompts]
        group, gates = self.algebra.num_generations, {choice.name: choice.gates for choice in self.choices}
        totals = spread_by_source(self.judge_of, scores, whole_groups(len(lengths), group))[0].flatten().tolist()
        credit = credit_by_source(self.judge_of, scores, group)
        rows = [read_row(self.dataset, prompt) for prompt in prompts]
        facts = facts_of_groups(scores, credit, totals, lengths, truncated, learned, rows)
        return [
            [name for name, gate in gates[source].items() if not gate(one)]
            for one, source in zip(facts, sources, strict=True)
        ]

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
        if self.gated:
            groups, admitted = len(rounds[0].prompts), sum(sum(one.admitted) for one in rounds)
            kept = min(admitted, groups)
            stats = {
                "dynamic_sampling/first_signal": Mean(sum(rounds[0].admitted), groups),
                "dynamic_sampling/trained_signal": Mean(kept, groups),
                "dynamic_sampling/rounds": Mean(len(rounds) - 1, 1),
                "dynamic_sampling/unfilled_groups": Mean(groups - kept, 1),
                "dynamic_sampling/cost": Mean(sum(len(one.prompts) for one in rounds), groups),
            }
        histories = [choice.history.stats() for choice in self.choices if choice.history is not None]
        for name in histories[0] if histories else ():
            total = Mean(0.0, 0.0)
            for one in histories:
                total = total.merge(one[name])
            stats[f"difficulty/{name}"] = total
        named = [choice for choice in self.choices if choice.name]
        for choice in named:
            stats |= {f"source/{choice.name}/{name}": stat for name, stat in self._stats_of(choice, rounds).items()}
        return stats

    def _stats_of(self, choice: SourceChoice, rounds: list[SamplingRound]) -> dict[str, Stat]:
        """Metrics of a source's prompts: epochs, rejections of its gates, and the state of its sampler."""
        pairs = (pair for one in rounds for pair in zip(one.sources, one.rejected, strict=True))
        rejected = [gates for name, gates in pairs if name == choice.name]
        stats: dict[str, Stat] = {"epoch": Max(choice.stream.epochs)}
        if choice.gates and rejected:
            stats["admitted"] = Mean(sum(not gates for gates in rejected), len(rejected))
            for gate in choice.gates:
                stats[f"gate/{gate}"] = Mean(sum(gate in gates for gates in rejected), len(rejected))
        return stats | ({} if choice.history is None else choice.history.stats())


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
"""(number of the rollout batch, its slots if a checkpoint has them) -> this process's prompt samples. Called once per
rollout batch, in order, by async rollouts that run ahead of the dataloader. May be collective."""


def prompt_source(
    dataset: Any, chooser: PromptChooser | None, algebra: BatchAlgebra, rank: int, *, shuffle: bool, seed: int
) -> PromptSource:
    if not hasattr(dataset, "__len__"):
        stream = enumerate(train_stream(dataset, algebra, rank, shuffle=shuffle, seed=seed).rollout_batches())

        def read(rollout_batch: int, slots: list[Slot] | None) -> list[PromptSample]:
            samples = next(samples for number, samples in stream if number >= rollout_batch)  # earlier ones are skipped
            assert samples is not None, "this stream is read"
            return samples  # the samples of the slots, because a stream always has the same order

        return read
    sampler = GenerationSampler(len(dataset), algebra, rank, shuffle=shuffle, seed=seed)

    def draw(rollout_batch: int, slots: list[Slot] | None) -> list[PromptSample]:
        if slots is None and chooser is not None and chooser.draws:
            return chooser.draw()
        return PromptDataset(dataset).__getitems__(sampler.slots(rollout_batch) if slots is None else slots)

    return draw
