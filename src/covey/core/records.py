"""Records that pass between the stages of a training step, in the order of the stages.

Letters: n completions of this process, N of all processes, F reward functions.

Example:
    Two answers to "2+2=", sampled, scored and flattened:

    >>> samples = [PromptSample({"prompt": "2+2="}, prompt=0, sample=i) for i in range(2)]
    >>> right = Rollout([17, 10, 17, 28], [19, 2], [True, True], [-0.1, -0.2], "4", FinishReason.STOP)
    >>> wrong = Rollout([17, 10, 17, 28], [20], [True], [-2.3], "5", FinishReason.LENGTH)
    >>> scored = RolloutBatch(samples, [right, wrong], torch.tensor([[1.0], [0.0]]), columns={}, steps=[{}, {}])
    >>> scored.scores.rewards.tolist(), scored.scores.lengths, wrong.truncated
    ([[1.0], [0.0]], [2, 1], True)
    >>> from covey.core.batch import collate
    >>> batch = collate(scored.rollouts)
    >>> batch.token_ids.tolist(), batch.lengths.tolist(), batch.groups.tolist(), batch.prompt_ids.tolist()
    ([19, 2, 20], [2, 1], [0, 0], [17, 10, 17, 28])

    With credit they are an `Experience`; the micro-batches of an optimizer step are a `Plan`:

    >>> from dataclasses import replace
    >>> credited = replace(batch, advantages=torch.tensor([0.7, 0.7, -0.7]), weights=torch.full((3,), 1 / 3))
    >>> experience = Experience(credited, entropy=[])
    >>> plan = Plan([[experience.batch]], measures_entropy=True)
    >>> plan.size, PlannedMicroStep(plan, 0).is_last
    (1, True)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from covey.core.media import Media, images_of
from covey.core.stats import Stat

if TYPE_CHECKING:
    from covey.core.batch import TrainBatch

Mode = Literal["train", "eval"]
"""Purpose of rollouts: training or an evaluation."""

StepRewards = list[tuple[int, float]]
"""Pairs of an end and a reward, NaN for an abstention. An end is what a reward function returned (`CharEnd`, `TurnEnd`
or a token index) until it is resolved to a token index."""

Message = dict[str, Any]  # one chat message: `{"role": ..., "content": ...}` and whatever else a chat template reads

WRITERS = ("user", "tool", "system")
"""Roles of the messages in an episode that the policy does not write; `Rollout.observed` stores 1 + the index here."""

PER_TOKEN = ("logprobs", "entropies", "versions", "sampling_mask")
"""Fields of completions and rollouts that have a value for each token, or are None where the engine reports none."""


@dataclass(frozen=True, slots=True)
class PromptSample:
    """One completion to be sampled."""

    row: dict[str, Any]  # the dataset row; `row["prompt"]` is the prompt
    prompt: int  # the row's number, which seeds the sample
    sample: int  # index among the prompt's completions, from 0 to G - 1
    source: str = ""  # name of the row's source (`covey.data.sources`); "" in a run without
    max_tokens: int | None = None  # most tokens of the completion, where its source has a limit of its own
    absent: bool = False  # nothing is sampled, as groups of its source are smaller than those of the run


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """Samples of one prompt."""

    start: int  # index of the first sample in the batch
    samples: list[PromptSample]  # one or more
    rows: list[dict[str, Any]]  # the dataset row of each


class MicroStep(NamedTuple):
    """A nominal micro-batch of an optimizer step, as the dataloader yields it."""

    # number, since the run began, of the rollout batch that begins with it; None where training continues with the
    # current one
    rollout_batch: int | None = None
    # this process's prompt samples of it; None where the trainer chooses prompts when it samples
    samples: list[PromptSample] | None = None


class FinishReason(StrEnum):
    """Why a rollout ended."""

    STOP = "stop"  # the policy emitted an end-of-sequence token
    LENGTH = "length"  # the completion reached `max_completion_length`, or the context ended: truncated
    TOOL_BUDGET = "tool_budget"  # the tool-calling iterations were used up
    ERROR = "error"  # something outside the policy failed; the rollout holds the tokens up to the failure
    ABSENT = "absent"  # a placeholder without tokens: its game or group has fewer rollouts than others


@dataclass(slots=True)
class Completion:
    """One sampled continuation of a prompt, as an engine returns it."""

    token_ids: list[int]  # the sampled tokens, the end-of-sequence token included where one was sampled
    # natural log-probability of each token under the sampling policy at its temperature, before top-k, top-p and min-p
    # cut the tail (after it under `keep_mask`): what the trainer's scorer computes. None if the engine reports none.
    logprobs: list[float] | None
    finish: FinishReason  # STOP or LENGTH
    # entropy in nats of the distribution each token was drawn from, at the temperature and before any cut; None if the
    # engine does not report them
    entropies: list[float] | None = None
    # how many of the first tokens were taken from a draft (`SampleRequest.drafts`) instead of decoded one by one; their
    # log-probs and entropies are still those under the current policy
    reused: int = 0
    # policy version, in optimizer steps, that each token was sampled with; None if the engine does not say. Versions
    # differ within a completion if new weights arrived while it was being sampled.
    versions: list[int] | None = None
    # ids of the tokens that each token was drawn from (an empty list: from all), under `SamplingParams.keep_mask`
    sampling_mask: list[list[int]] | None = None
    # experts of the first R tokens of prompt and completion, under `SamplingParams.keep_routes`: [R, L, k] uint8 or
    # int16 (`covey.core.routes`). The last token has none, because it was never an input of the model
    routes: Tensor | None = field(default=None, compare=False, repr=False)


@dataclass(slots=True)
class Rollout:
    """One finished episode.

    ValueError if a list with a value per token is not as long as `completion_ids`, or if `turn_ends` or `routes` reach
    beyond the tokens.

    Example:
        A rollout that answered "4<eos>" to "2+2=":
        `Rollout([17, 10, 17, 28], [19, 2], [True, True], [-0.1, -0.2], "4", FinishReason.STOP)`
    """

    prompt_ids: list[int]  # tokens the episode started from; never trained on
    completion_ids: list[int]  # every token after the prompt: sampled ones and, with tools, those of tool results
    sampled: list[bool]  # the only mask: True where the policy chose the token, False where something else wrote it
    logprobs: list[float] | None  # as the engine saw them, one per completion token (0.0 where not sampled), or None
    completion: str | list[Message]  # for reward functions: text (standard prompts) or messages
    finish: FinishReason  # why it ended
    group: int = 0  # index of its prompt within the batch, equal for all rollouts of a group
    entropies: list[float] | None = None  # in nats, one per completion token, or None
    media: tuple[Media, ...] = ()  # images in the prompt, then in the results of tools
    extras: dict[str, Any] = field(default_factory=dict)  # for reward functions (from a `rollout_func` or environment)
    reused: int = 0  # how many of the sampled tokens were taken from a draft
    # policy version, in optimizer steps, that each completion token was sampled with; None if the engine does not say
    versions: list[int] | None = None
    # index of the last token of each of the policy's turns among `completion_ids`; if empty, it counts as one turn
    turn_ends: list[int] = field(default_factory=list)
    # number of tool calls by fate: "ok", or one of `covey.rollout.tools.toolbox.Failure`
    calls: dict[str, int] = field(default_factory=dict)
    error: str | None = None  # description of a failure outside of the policy, where `finish` is ERROR
    seconds: float = 0.0  # duration, where an agent played it
    tool_seconds: float = 0.0  # part of the duration that was spent waiting for tools
    prompt: str | list[Message] | None = None  # the episode's own prompt, where it may differ from the row's
    sampling_mask: list[list[int]] | None = None  # as `Completion.sampling_mask`, one list per completion token
    # where strands begin among `completion_ids` (`covey.core.strands`), in order, each with the index of the token that
    # it follows, counted over prompt and completion (-1: none)
    strands: list[tuple[int, int]] = field(default_factory=list)
    # lists that tools returned, by the index of the tool's message in `completion`; the message has the list as text
    returned: dict[int, list[Any]] = field(default_factory=dict)
    role: str = ""  # seat of a game that it was played in, by which credit is assigned; "": none
    game: int = 0  # number of its game within the group
    # writer of each completion token: 1 + the index of the message's role in `WRITERS`, or 0 for the policy and for
    # programs. Tokens that the chat template adds count with the message. None if the writers are not known
    observed: list[int] | None = None
    # experts of the first R tokens of prompt and completion, [R, L, k], as `Completion.routes`; or None
    routes: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        tokens = len(self.completion_ids)
        for name in ("sampled", "observed", *PER_TOKEN):
            values = getattr(self, name)
            if values is not None and len(values) != tokens:
                raise ValueError(
                    f"a Rollout of {tokens} completion_ids was given {len(values)} {name}: give one for each token of"
                    " the completion, including the tokens of tool results."
                )
        if self.routes is not None and len(self.routes) > len(self.prompt_ids) + tokens:
            raise ValueError(
                f"a Rollout of {len(self.prompt_ids)} prompt_ids and {tokens} completion_ids was given the routes of"
                f" {len(self.routes)} tokens: give at most one route per token, first for the prompt, then for the"
                " completion."
            )
        if self.turn_ends and not 0 <= min(self.turn_ends) <= max(self.turn_ends) < tokens:
            raise ValueError(
                f"a Rollout of {tokens} completion_ids was given turn_ends={self.turn_ends}: give the index of the last"
                " token of each turn among completion_ids, from 0 on."
            )

    @property
    def images(self) -> list[Any]:
        return images_of(self.media)

    def asked(self, row: dict[str, Any]) -> Any:
        """The prompt as reward functions and logs get it: the episode's own, or else that of the dataset row."""
        return row.get("prompt") if self.prompt is None else self.prompt

    def answered(self) -> Any:
        """The completion as reward functions get it: a list that a tool returned is given as a list, not as text."""
        if not self.returned or isinstance(self.completion, str):
            return self.completion
        messages = enumerate(self.completion)
        return [m if index not in self.returned else {**m, "content": self.returned[index]} for index, m in messages]

    @property
    def truncated(self) -> bool:
        """True if the policy did not stop by itself: it was cut off, used up its tool calls, or something failed."""
        return self.finish not in (FinishReason.STOP, FinishReason.ABSENT)

    @property
    def absent(self) -> bool:
        return self.finish is FinishReason.ABSENT

    @property
    def played(self) -> bool:
        """False for one that is absent, or that failed before the policy had sampled a token: it has no length."""
        return not self.absent and (self.finish is not FinishReason.ERROR or any(self.sampled))

    @property
    def num_sampled(self) -> int:
        return sum(self.sampled)

    @property
    def num_turns(self) -> int:
        return max(len(self.turn_ends), int(any(self.sampled)))


def absent_rollout(prompt_ids: list[int], completion: str | list[Message]) -> Rollout:
    """A rollout that fills up a game or a group, with an empty `completion`: nothing is learned from it."""
    return Rollout(prompt_ids, [], [], [], completion, FinishReason.ABSENT, entropies=[], versions=[])


class GameSeat(NamedTuple):
    """Seat that a completion was played in: a role in a game."""

    role: str  # name of the seat; "": none
    game: int = 0  # number of the game in the completion's group
    environment: str = ""  # name of the environment of the row, where it has one
    known: bool = True  # False: the rollout failed before its role was known


NO_SEAT = GameSeat("")


@dataclass(frozen=True)
class Scores:
    """Rewards of N completions."""

    rewards: Tensor  # [N, F] unweighted, NaN where a function abstained; the sum of its steps where it rewarded steps
    # [N] dictionaries: index of a reward function that rewarded the completion's steps -> pairs of a step's last token
    # and its reward
    steps: list[dict[int, StepRewards]]
    lengths: list[int]  # [N] completion tokens, including those of tool results
    seats: list["GameSeat"] = field(default_factory=list)  # [N]; empty where no completion belongs to a game
    sources: list[str] = field(default_factory=list)  # [N] names of the rows' sources; empty in a run without sources
    absent: list[bool] = field(default_factory=list)  # [N] true for placeholders; empty where there are none

    @classmethod
    def joined(cls, parts: Sequence["Scores"]) -> "Scores":
        with_seats, with_absent = any(part.seats for part in parts), any(part.absent for part in parts)
        return cls(
            torch.cat([part.rewards for part in parts]),
            [steps for part in parts for steps in part.steps],
            [length for part in parts for length in part.lengths],
            [seat for part in parts for seat in part.seats or [NO_SEAT] * len(part.lengths)] if with_seats else [],
            [source for part in parts for source in part.sources],
            [gone for part in parts for gone in part.absent or [False] * len(part.lengths)] if with_absent else [],
        )

    @property
    def present(self) -> list[bool]:
        """[N] true for all but absent rollouts."""
        return [not gone for gone in self.absent] or [True] * len(self.lengths)

    def take(self, rows: Tensor) -> "Scores":
        """The scores of the completions `rows` [R], in this order."""
        chosen = rows.tolist()
        named = (self.seats, self.sources, self.absent)
        seats, sources, absent = ([values[n] for n in chosen] if values else [] for values in named)
        steps, lengths = [self.steps[n] for n in chosen], [self.lengths[n] for n in chosen]
        return Scores(self.rewards[rows], steps, lengths, seats, sources, absent)

    def by_source(self) -> dict[str, Tensor]:
        """Indexes of the completions of each source, in order: [n] int64 by the source's name."""
        numbers: dict[str, list[int]] = {}
        for number, name in enumerate(self.sources or [""] * len(self.lengths)):
            numbers.setdefault(name, []).append(number)
        return {name: torch.tensor(found) for name, found in numbers.items()}

    @property
    def process_functions(self) -> list[int]:
        """Indexes of the functions that rewarded steps of any completion."""
        return sorted(set[int]().union(*self.steps))

    def steps_of(self, function: int) -> list[StepRewards]:
        """[N] steps that a process function rewarded; a plain number counts as one step that ends the completion."""
        numbers = self.rewards[:, function].tolist()
        found: list[StepRewards] = []
        for steps, length, number in zip(self.steps, self.lengths, numbers, strict=True):
            scored = not math.isnan(number)
            if function in steps:
                found.append(steps[function] if scored else [(end, math.nan) for end, _ in steps[function]])
            else:
                found.append([(length - 1, number)] if scored and length else [])
        return found

    def outcomes(self) -> Tensor:
        """[N, F] rewards of outcomes: NaN for process functions."""
        outcomes = self.rewards.clone()
        outcomes[:, self.process_functions] = torch.nan
        return outcomes


@dataclass(frozen=True)
class RolloutBatch:
    """Completions of this process with their rewards."""

    samples: list[PromptSample]  # n, in sampling order
    rollouts: list[Rollout]  # n, in the same order
    rewards: Tensor  # [n, F], NaN where a function abstained
    columns: dict[str, list[Any]]  # further columns of the completions table, each [n]
    steps: list[dict[int, StepRewards]]  # [n], rewards of steps by the index of the reward function
    key: tuple[Any, ...] = ()  # (mode, number of the rollout batch), and the round's number if it is not the first
    selection: Any = None  # `covey.data.dynamic_sampling.Selection`, where groups were selected by their rewards
    stats: list[dict[str, Stat]] = field(default_factory=list)  # metrics of sampling and rewards

    @property
    def scores(self) -> Scores:
        """Rewards, lengths, seats and sources: the part of the batch that is sent to other processes."""
        lengths = [len(rollout.completion_ids) for rollout in self.rollouts]
        sources = [sample.source for sample in self.samples] if any(sample.source for sample in self.samples) else []
        absent = [one.absent for one in self.rollouts] if any(one.absent for one in self.rollouts) else []
        return Scores(self.rewards, self.steps, lengths, seats_of(self.samples, self.rollouts), sources, absent)

    def __getitem__(self, part: slice) -> "RolloutBatch":
        columns = {name: values[part] for name, values in self.columns.items()}
        return RolloutBatch(self.samples[part], self.rollouts[part], self.rewards[part], columns, self.steps[part])


def seats_of(samples: Sequence[PromptSample], rollouts: Sequence[Rollout]) -> list[GameSeat]:
    """The seat of each rollout, [n]; empty where no rollout belongs to a game."""
    if not any(rollout.role or rollout.game for rollout in rollouts):
        return []
    return [
        GameSeat(
            one.role,
            one.game,
            str(sample.row.get("environment") or ""),
            bool(one.role) or one.finish is not FinishReason.ERROR,
        )
        for sample, one in zip(samples, rollouts, strict=True)
    ]


class Behaviour(NamedTuple):
    """Rollouts with their log-probs under the policies that the loss compares with (old, reference, engine)."""

    rollouts: list[Rollout]  # with the entropies that were measured
    batch: "TrainBatch"  # with the log-probs that the loss needs, and the tokens of its terms
    kl: Tensor | None  # [n] KL penalty that is subtracted from the rewards, or None
    entropy: list[dict[str, Stat]]  # the metric `entropy` of all completions, in parts; empty if it is not known
    stats: list[dict[str, Stat]]  # further metrics


@dataclass(frozen=True)
class RankShard:
    """One process's share of a rollout batch, as it is sent to the other processes: numbers, no text."""

    scores: Scores  # rewards of its n completions
    kl: Tensor | None  # [n] KL penalty of each completion, or None
    trained: list[int]  # n, tokens of each that are learned from
    micro_batches: int  # nominal micro-batches
    staleness: int  # largest age, in optimizer steps, of the weights that a token was sampled with
    lengths: list[int]  # n, sampled tokens
    truncated: list[bool]  # n, `Rollout.truncated`
    played: list[bool]  # n, `Rollout.played`
    prompt_tokens: int  # sum over the n completions, without placeholders
    entropies: list[float | None]  # n, mean over a completion's sampled tokens, in nats; None if unknown or not needed
    likeness: list[Any]  # n, `covey.core.likeness.Keys`, by which completions are compared
    terms: dict[str, Any] = field(default_factory=dict)  # `covey.core.terms.TermCounts` by the name of the loss's term
    term_sizes: dict[str, list[int]] = field(default_factory=dict)  # [n] tokens in each completion, by the term's name


@dataclass(frozen=True)
class Experience:
    """Training data of this process's rollouts of a rollout batch, with credit and token weights."""

    batch: "TrainBatch"
    # the metric `entropy` of all its completions, in parts; empty where neither the engine nor a scoring pass measured
    # it, so that the loss has to
    entropy: list[dict[str, Stat]]
    stats: list[dict[str, Stat]] = field(default_factory=list)  # metrics of sampling, rewards, scores and credit
    sources: list[str] = field(default_factory=list)  # names of the rollouts' sources; empty in a run without sources
    absent: list[bool] = field(default_factory=list)  # true for placeholders among the rollouts; as in `Scores`


@dataclass(frozen=True)
class Plan:
    """Micro-batches of an optimizer step or an evaluation batch on this process, with the settings that they share."""

    micro_steps: list[list["TrainBatch"]]  # in the order in which they run; a micro-step may have none
    training: bool = True  # False: the loss of an evaluation
    # factor of every micro-batch's loss: token weights are for a sum over processes and a full gradient accumulation,
    # but gradients are averaged over processes
    scale: float = 1.0
    measures_entropy: bool = False  # the forward passes measure `entropy`, because it is unknown for some rollouts
    # (router loads of a micro-batch, its number of rollouts) -> its share of the load-balancing loss, before the
    # coefficient; None without such a loss
    balance: Callable[[Any, int], Tensor] | None = None
    # `covey.policy.scoring.Teachers` of the divergence over the whole vocabulary; None without such a term
    teachers: Any = None
    stats: list[dict[str, Stat]] = field(default_factory=list)  # metrics of the plan

    @property
    def size(self) -> int:
        """Number of micro-batches."""
        return sum(map(len, self.micro_steps))


@dataclass(frozen=True)
class PlannedMicroStep:
    """One micro-step of a plan: the inputs of a trainer's `training_step`."""

    plan: Plan
    number: int  # index in `Plan.micro_steps`
    # metrics of its micro-batches, which `training_step` appends: Hugging Face's signature returns the loss alone
    stats: list[dict[str, Stat]] = field(default_factory=list)

    @property
    def micro_batches(self) -> list["TrainBatch"]:
        return self.plan.micro_steps[self.number]

    @property
    def earlier(self) -> int:
        """Number of micro-batches of earlier micro-steps."""
        return sum(map(len, self.plan.micro_steps[: self.number]))

    @property
    def is_last(self) -> bool:
        """True if the optimizer takes its step after this micro-step."""
        return self.number == len(self.plan.micro_steps) - 1
