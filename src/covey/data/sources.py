"""Sources: several datasets in one run, each with a share of the prompts and with settings of its own.

    train_dataset={"sums": rows, "code": others}, sources={"code": {"weight": 2, "reward_funcs": runs_code}}

`Sources` is one dataset: the rows of all sources, concatenated, with a column `source`. `Shares` decides which source
each prompt of the run is drawn from. To add a setting, add a field to `SourceSettings` and read it where the run's own
setting of that name is read.
"""

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covey.algorithms import ADVANTAGES
from covey.algorithms.comparison import WITHIN
from covey.config.choosing import check_gates, check_sampler
from covey.config.fields import LIMITS
from covey.config.messages import closest
from covey.core.findings import Finding
from covey.core.losses import Pool, Weighting, pooled
from covey.data.conversations import with_system_message
from covey.data.rows import plain_row
from covey.runtime.import_path import is_reference

COLUMN = "source"  # column of every row of a run with sources: the name of its source
HASHED = 64  # rows of a source by which a resumed run recognises it
UNIT = 720720 << 32  # parts of a prompt in which shares are counted; divisible by all integers up to 16

_ONE_DISTRIBUTION = "all sources are scored at one temperature and by one distribution"
_ONE_LOSS = "a micro-batch holds completions of all sources, and has one loss"
REFUSED = {
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty"), _ONE_DISTRIBUTION),
    **dict.fromkeys(("generation_kwargs", "keep_sampling_mask"), _ONE_DISTRIBUTION),
    **dict.fromkeys(("loss_type", "epsilon", "epsilon_high", "delta", "beta", "kl_estimator"), _ONE_LOSS),
    **dict.fromkeys(("importance_sampling_level", "entropy_coef", "num_iterations", "method"), _ONE_LOSS),
    "generation_batch_size": "a rollout batch is of all sources",
    **dict.fromkeys(("learning_rate", "max_steps", "num_train_epochs"), "an update is of all sources"),
}
"""Settings that all sources of a run share, with the reason."""

OF_CREDIT = ("advantages", "scale_rewards", "pass_at_k", "compare")
"""Fields of the config that a source may set for the comparison of its own completions."""


@dataclass(frozen=True)
class SourceSettings:
    """Settings of a source; a setting of None means the run's.

    Attributes:
        weight: share of the prompts, relative to the weights of the other sources. With a list of `[step, weight]` it
            changes linearly between these optimizer steps; "rows" is the number of rows; 0: not trained on.
        sampler, floor: choice of its rows, as `prompt_sampler` and `difficulty_floor` of the config.
        gates: as `gates` of the config.
        reward_funcs, reward_weights: reward functions of its rows, instead of the run's.
        environment: name of the environment in `environment_factory` that plays its rows.
        system_prompt, chat_template_kwargs: for those of its rows that have none of their own.
        teacher: name of the teacher of its rows, if `teacher` of the config has several.
        max_completion_length: most tokens of its completions, at most the run's.
        num_generations: completions of each of its prompts, at most the run's.
        mask_truncated_completions, advantages, scale_rewards, pass_at_k, compare: as in the config.
        average: "joint": its tokens are averaged together with those of other sources; "own": separately.
        loss_weight: with `average="own"`, the factor of its average; None: the source's share of the prompts.
    """

    weight: Any = "rows"
    sampler: Any = None
    floor: float | None = None
    gates: Any = None
    reward_funcs: Any = None
    reward_weights: Sequence[float] | None = None
    environment: str | None = None
    system_prompt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    teacher: str | None = None
    max_completion_length: int | None = None
    num_generations: int | None = None
    mask_truncated_completions: bool | None = None
    advantages: str | None = None
    scale_rewards: Any = None
    pass_at_k: int | None = None
    compare: Any = None
    average: str = "joint"
    loss_weight: float | None = None

    @property
    def of_credit(self) -> dict[str, Any]:
        """Fields of the config that this source sets for its completions."""
        return {name: value for name in OF_CREDIT if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Source:
    name: str
    rows: Any  # with a length
    settings: SourceSettings = SourceSettings()
    teacher_column: str = "teacher"  # of the config

    def row(self, number: int) -> Any:
        """A row with the name of the source, and with the source's settings where the row has none of its own."""
        return self.filled(plain_row(self.rows[number]))

    def filled(self, row: Any) -> Any:
        if not isinstance(row, dict):
            return row  # which is refused
        settings = self.settings
        own: dict[str, Any] = {
            "environment": settings.environment,
            "chat_template_kwargs": settings.chat_template_kwargs,
        }
        own[self.teacher_column] = settings.teacher
        filled = {name: value for name, value in own.items() if value is not None and row.get(name) is None}
        return {**row, **filled, COLUMN: self.name}

    def digest(self) -> str:
        """Hash of up to `HASHED` rows, spread evenly over the source."""
        places = sorted({number * (len(self.rows) - 1) // (HASHED - 1) for number in range(HASHED)})
        texts = "".join(repr(sorted(map(repr, self.row(place).items()))) for place in places)
        return hashlib.sha256(texts.encode("utf-8", "replace")).hexdigest()


class Sources(Sequence[Any]):
    """The rows of several sources as one dataset; a row's number counts over all sources in order.

    Example:
        >>> both = Sources([Source("a", [{"prompt": "1"}]), Source("b", [{"prompt": "2"}, {"prompt": "3"}])])
        >>> len(both), both[2], both.of(2), both.names
        (3, {'prompt': '3', 'source': 'b'}, 1, ['a', 'b'])
    """

    def __init__(self, sources: Sequence[Source]):
        self.sources = list(sources)
        self.firsts = [0, *accumulate(len(one.rows) for one in self.sources)]
        """Number of the first row of each source, and of all rows."""
        limits = {one.name: one.settings.max_completion_length for one in self.sources}
        self.limits: dict[str, int] = {name: limit for name, limit in limits.items() if limit is not None}
        """Most tokens of a completion, by source, where it has a limit of its own."""
        sizes = {one.name: one.settings.num_generations for one in self.sources}
        self.group_sizes: dict[str, int] = {name: size for name, size in sizes.items() if size is not None}
        """Completions of a prompt, by source, where it has a number of its own."""

    def __len__(self) -> int:
        return self.firsts[-1]

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        number %= len(self)
        index = self.of(number)
        return self.sources[index].row(number - self.firsts[index])

    def of(self, number: int) -> int:
        """Index of the source of the row `number`."""
        return next(index for index, last in enumerate(self.firsts[1:]) if number < last)

    @property
    def names(self) -> list[str]:
        return [one.name for one in self.sources]

    def settings(self, name: str) -> SourceSettings:
        """Settings of a source; default settings (the run's) for rows without a source."""
        return next((one.settings for one in self.sources if one.name == name), SourceSettings())

    def named(self, name: str, rows: Any, limited: bool = True) -> "Sources":
        """Other rows with the settings of a source; its length limit only if `limited`."""
        known = next(one for one in self.sources if one.name == name)
        settings = dataclasses.replace(known.settings, num_generations=None)  # evaluations have their own
        settings = settings if limited else dataclasses.replace(settings, max_completion_length=None)
        filled = with_system_message(settings.system_prompt, rows)
        return Sources([dataclasses.replace(known, rows=filled, settings=settings)])

    def weights_at(self, step: int) -> list[float]:
        """Weights of the sources before an optimizer step."""
        return [weight_at(one.settings.weight, step, len(one.rows)) for one in self.sources]

    def numbers(self, names: Sequence[str]) -> Tensor:
        """[B] int64, index of the source of each name."""
        places = {name: place for place, name in enumerate(self.names)}
        return torch.tensor([places[name] for name in names], dtype=torch.long)

    def longest(self, numbers: Tensor, of_run: int | None, device: torch.device) -> int | Tensor | None:
        """Most tokens of completions of the sources `numbers`; [B] if sources have limits of their own."""
        if not self.limits:
            return of_run
        limits = [self.limits.get(name, of_run) for name in self.names]
        return torch.tensor([limits[number] for number in numbers.tolist()], device=device)

    def sizes(self, numbers: Tensor, trained: Sequence[int], present: Sequence[bool] = ()) -> "SourceSizes":
        """Rollouts and trained tokens of each source, from rollouts whose sources are `numbers` [B].

        Only those that are `present` [B] count as rollouts; empty: all.
        """
        rows, slots, tokens = ([0] * len(self.sources) for _ in range(3))
        for number, count, there in zip(numbers.tolist(), trained, present or [True] * len(trained), strict=True):
            rows[number] += there
            slots[number] += 1
            tokens[number] += count
        return SourceSizes(rows, tokens, slots)

    def term_sizes(self, numbers: Tensor, tokens: Sequence[int]) -> "SourceSizes":
        """Rollouts that have tokens of a term of the loss, and the number of these tokens [B], by source."""
        known = [place for place, count in enumerate(tokens) if count]
        return self.sizes(numbers[known], [tokens[place] for place in known])

    def shares_at(self, step: int) -> list[float]:
        """Share of the prompts of each source."""
        weights = self.weights_at(step)
        return [weight / sum(weights) for weight in weights]


class SourceSizes(NamedTuple):
    """Rollouts and trained tokens of each source, by which an average of its own divides."""

    rows: list[int]  # without absent rollouts
    tokens: Sequence[float]
    slots: list[int]  # with absent rollouts: in proportion to the prompts


def averaged_by_source(
    sources: Sources,
    weighting: Weighting,
    members: Tensor,
    sizes: SourceSizes,
    updates: float,
    of_term: SourceSizes | None = None,
) -> Weighting:
    """The weighting with a separate average for sources that have `average="own"`; `members` [B] are rollouts' sources.

    `sizes` count all rollouts that `updates` optimizer steps train on. For a term of the loss, `of_term` has the
    rollouts and tokens of the term, and the shares of the sources are the same.
    """
    own = [place for place, one in enumerate(sources.sources) if one.settings.average == "own" and sizes.rows[place]]
    if not own:
        return weighting
    others = [place for place in range(len(sources.sources)) if place not in own]
    pools = []
    for places in (*([place] for place in own), others):
        slots, counted = sum(sizes.slots[place] for place in places), sizes if of_term is None else of_term
        weight = None if places is others else sources.sources[places[0]].settings.loss_weight
        pools.append(
            Pool(
                torch.isin(members, torch.tensor(places, dtype=torch.long, device=members.device)),
                rows_per_update=sum(counted.rows[place] for place in places) / updates,
                tokens_per_update=sum(counted.tokens[place] for place in places) / updates,
                factor=slots / sum(sizes.slots) if weight is None else weight,
            )
        )
    return pooled(weighting, pools)


def parts_of(dataset: Any, role: str) -> list[tuple[str, Any]]:
    """The datasets of the sources, each with its name for messages; a dataset without sources is one part."""
    if dataset is None:
        return []
    if not isinstance(dataset, Sources) or len(dataset.sources) == 1:
        return [(role, dataset)]
    return [(f"{role}[{one.name!r}]", Sources([one])) for one in dataset.sources]


def source_of(dataset: Any) -> str:
    """Name of the source of a dataset; "" for a dataset without a source."""
    return dataset.names[0] if isinstance(dataset, Sources) else ""


def raw(dataset: Any) -> Any:
    """Original rows of a dataset that is one source; any other dataset itself."""
    return dataset.sources[0].rows if isinstance(dataset, Sources) and len(dataset.sources) == 1 else dataset


def weight_at(weight: Any, step: int, rows: int) -> float:
    """The weight of a source before an optimizer step: linear between the points of a schedule, constant outside.

    Example:
        >>> [weight_at([[0, 1], [100, 3]], step, 10) for step in (0, 50, 200)], weight_at("rows", 0, 10)
        ([1.0, 2.0, 3.0], 10.0)
    """
    if weight == "rows":
        return float(rows)
    if not isinstance(weight, list | tuple):
        return float(weight)
    if step <= weight[0][0]:
        return float(weight[0][1])
    for (begin, first), (end, second) in pairwise(weight):
        if step < end:
            return first + (second - first) * (step - begin) / (end - begin)
    return float(weight[-1][1])


class Shares:
    """The source of each prompt of a run: after any number of prompts, every source is within one prompt of its share.

    The debt of a source is its share of the prompts so far, including the next one, minus the prompts drawn from it.
    Let k be the number of sources with a weight above 0. Of the sources with a debt of at least 1 / (2k - 2), the one
    is drawn whose debt would be the first to reach 1 - 1 / (2k - 2), which bounds every debt by that number (Tijdeman,
    The chairman assignment problem, Discrete Mathematics 32, 1980). Drawing the largest debt instead can be off by more
    than one prompt with four or more sources. Debts are integers, so that a resumed run continues exactly.

    Example:
        >>> shares = Shares(3)
        >>> [shares.next([5, 2, 1]) for _ in range(8)]
        [0, 0, 1, 0, 2, 0, 1, 0]
    """

    def __init__(self, sources: int):
        self.owed = [0] * sources
        """Debt of each source in parts of a prompt (`UNIT` is one prompt); below 0 if it had more than its share."""

    def next(self, weights: Sequence[float]) -> int:
        """The source of the next prompt."""
        parts = parts_of_prompt(weights)
        self.owed = [owed + part for owed, part in zip(self.owed, parts, strict=True)]
        trained = [index for index, part in enumerate(parts) if part]
        edges = max(2 * len(trained) - 2, 1)
        ready = [index for index in trained if self.owed[index] * edges >= UNIT]
        if ready:
            due = {index: Fraction(UNIT * (edges - 1) - self.owed[index] * edges, parts[index]) for index in ready}
            chosen = min(ready, key=due.__getitem__)
        else:
            chosen = max(trained, key=self.owed.__getitem__)
        self.owed[chosen] -= UNIT
        return chosen

    def take(self, count: int, weights: Sequence[float]) -> list[int]:
        """The sources of the next `count` prompts."""
        return [self.next(weights) for _ in range(count)]


def parts_of_prompt(weights: Sequence[float]) -> list[int]:
    """Shares as integer parts that add up to `UNIT`; the largest remainders are rounded up."""
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    shares = [UNIT * weight / total for weight in exact]
    parts = [math.floor(share) for share in shares]
    order = sorted(range(len(parts)), key=lambda index: parts[index] - shares[index])
    for index in order[: UNIT - sum(parts)]:
        parts[index] += 1
    return parts


def most_of_a_batch(sources: Sources, prompts: int, batches: int, steps_per_batch: float = 1.0) -> list[int]:
    """Largest number of prompts of each source in any of the first `batches` rollout batches."""
    shares, most = Shares(len(sources.sources)), [0] * len(sources.sources)
    for batch in range(batches):
        taken = shares.take(prompts, sources.weights_at(int(batch * steps_per_batch)))
        most = [max(known, taken.count(index)) for index, known in enumerate(most)]
    return most


# ---- what a trainer is given -----------------------------------------------------------------------------------------


def are_datasets(given: Any) -> bool:
    """True for a dictionary of datasets by name; False for the splits or columns of one dataset."""
    if not isinstance(given, Mapping) or hasattr(given, "column_names"):
        return False
    firsts = [rows[0] for rows in given.values() if isinstance(rows, list | tuple) and rows]
    return bool(given) and all(isinstance(row, dict) for row in firsts)


def read_sources(
    datasets: Mapping[str, Any], given: Mapping[str, Any] | None, teacher_column: str = "teacher"
) -> Sources:
    """The sources made from datasets by name and settings, which `check_sources` has accepted."""
    found = []
    for name, rows in datasets.items():
        settings = SourceSettings(**(given or {}).get(name, {}))
        found.append(Source(name, with_system_message(settings.system_prompt, rows), settings, teacher_column))
    return Sources(found)


def check_sources(datasets: Any, given: Any, longest: int | None) -> Iterator[Finding]:
    """Errors in sources and their settings, before rows are read; `longest` is the run's max_completion_length."""
    if given is not None and not (
        isinstance(given, Mapping) and all(isinstance(one, Mapping) for one in given.values())
    ):
        yield Finding.error(
            "source-setting",
            f"`sources` must give each source its settings, as in {{'code': {{'weight': 2}}}}, got {given!r:.200}.",
        )
        return
    if not isinstance(datasets, Mapping) or not datasets:
        yield Finding.error(
            "source-name",
            f"`sources` has settings of {', '.join(map(repr, given or ['none']))}, and `train_dataset` is no dictionary"
            " of datasets.",
            "Give a dictionary of datasets by name, as in train_dataset={'sums': rows, 'code': others}.",
        )
        return
    if odd := [
        name for name in datasets if not isinstance(name, str) or not name or "/" in name or name.strip() != name
    ]:
        evidence = f"a source is called {odd[0]!r}, and its name is part of metrics' names."
        yield Finding.error("source-name", evidence, "Give text without slashes and without spaces around it.")
    for name, rows in datasets.items():
        if isinstance(rows, Mapping) or not (hasattr(rows, "__len__") or hasattr(rows, "__iter__")):
            yield Finding.error(
                "dataset-type",
                f"source {name!r} is {rows!r:.100}, not a dataset.",
                "Give a list of rows or a `datasets.Dataset` (of a DatasetDict, one split). Settings of a source are in"
                f" `sources`, as in train_dataset={{{name!r}: rows}}, sources={{{name!r}: {{'weight': 2}}}}.",
            )
        elif not hasattr(rows, "__len__"):
            yield Finding.error(
                "stream-lookup",
                f"source {name!r} ({type(rows).__name__}) can only be read forward, and prompts of several sources are"
                " looked up by their number.",
                "Give a dataset with a length (`datasets.load_dataset` without streaming=True, or a list of rows).",
            )
    for name in given or {}:
        if name not in datasets:
            known = f"`sources` has settings of {name!r}, and `train_dataset` no such rows; it has"
            yield Finding.error("source-name", f"{known} {', '.join(map(repr, datasets))}.{closest(name, datasets)}")
    for name, settings in (given or {}).items():
        yield from _check_settings(settings, f"sources: {name}", longest)
    yield from _check_weights(datasets, given or {})


def _check_weights(datasets: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[Finding]:
    weights = {name: given.get(name, {}).get("weight", "rows") for name in datasets}
    wrong = False
    for name, weight in weights.items():
        points = weight if isinstance(weight, list | tuple) else [[0, weight]]
        pairs = bool(points) and all(isinstance(point, list | tuple) and len(point) == 2 for point in points)
        numbers: list[Any] = [number for point in points for number in point] if pairs else [None]
        well_formed = all(isinstance(one, int | float) and one == one and not isinstance(one, bool) for one in numbers)
        if weight != "rows" and not (well_formed and all(0 <= number < math.inf for number in numbers if number)):
            wrong = True
            yield Finding.error(
                "source-weights",
                f"sources: {name}: weight={weight!r} must be a number, 0 or more, 'rows', or a list of [step, weight].",
            )
        elif isinstance(weight, list | tuple) and any(a >= b for (a, _), (b, _) in pairwise(weight)):
            wrong = True
            yield Finding.error("source-weights", f"sources: {name}: weight={weight!r}: the steps must rise.")
    if not wrong:
        marks = sorted({point[0] for one in weights.values() if isinstance(one, list | tuple) for point in one} | {0})
        for step in marks:
            if not any(weight_at(weight, step, 1) for weight in weights.values()):
                when = f" before step {step}" if len(marks) > 1 else ""
                yield Finding.error(
                    "source-weights",
                    f"the weights of all sources ({', '.join(weights)}) are 0{when}, so no prompt could be drawn.",
                    "Give one of them a weight above 0.",
                )
                return


def _check_settings(settings: Mapping[str, Any], place: str, longest: int | None) -> Iterator[Finding]:
    known = [field.name for field in dataclasses.fields(SourceSettings)]
    for name, value in settings.items():
        if name in REFUSED:
            yield Finding.error("source-setting", f"{place}: {name}={value!r}: {REFUSED[name]}.", "Set it for the run.")
        elif name not in known:
            evidence = f"{place} has {name!r}, which is no setting of a source; there are: {', '.join(known)}."
            yield Finding.error("source-setting", f"{evidence}{closest(name, [*known, *REFUSED])}")
        elif value is not None:
            yield from _check_setting(name, value, place)
    length = settings.get("max_completion_length")
    if isinstance(length, int) and longest is not None and length > longest:
        yield Finding.error(
            "source-setting",
            f"{place}: max_completion_length={length} is above the run's {longest}, which memory is planned for.",
            "Raise the run's, or lower the source's.",
        )
    if settings.get("loss_weight") is not None and settings.get("average", "joint") != "own":
        yield Finding.error(
            "source-setting",
            f"{place}: loss_weight={settings['loss_weight']!r} weighs an average of the source's own.",
            "Set average='own' too, or change `weight`, its share of the prompts.",
        )


def _check_setting(name: str, value: Any, place: str) -> Iterator[Finding]:
    shown, number = f"{place}: {name}", isinstance(value, int | float) and not isinstance(value, bool)
    if name == "sampler":
        yield from check_sampler(value, shown)
    elif name == "gates":
        yield from check_gates(value, shown)
    elif name in ("floor", "loss_weight"):
        if not number:
            yield Finding.error("source-setting", f"{shown}={value!r} must be a number.")
        elif name == "floor":
            yield from LIMITS["difficulty_floor"].check(shown, value)
        elif not 0 <= value < math.inf:
            yield Finding.error("source-setting", f"{shown}={value!r} must be 0 or more, and finite.")
    elif name in ("max_completion_length", "num_generations", "pass_at_k"):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield Finding.error("source-setting", f"{shown}={value!r} must be a whole number, 1 or more.")
    elif name == "scale_rewards":
        if value not in (True, False, "group", "batch", "none"):
            yield Finding.error("source-setting", f"{shown}={value!r} must be one of: group, batch, none.")
    elif name == "advantages":
        if value not in ADVANTAGES and not (isinstance(value, str) and is_reference(value)):
            known = f"{shown}={value!r} is not known; choose one of: {', '.join(sorted(ADVANTAGES))}."
            yield Finding.error("source-setting", f"{known}{closest(value, ADVANTAGES)}")
    elif name == "compare":
        given = value.values() if isinstance(value, Mapping) else [value]
        if any(one not in WITHIN for one in given):
            known = f"{shown}={value!r} must be one of: {', '.join(WITHIN)}, or give roles one each."
            yield Finding.error("source-setting", known, "Running means (role_average) are the run's.")
    elif name == "average":
        if value not in ("joint", "own"):
            yield Finding.error("source-setting", f"{shown}={value!r} must be 'joint' or 'own'.")
    elif name == "mask_truncated_completions":
        if not isinstance(value, bool):
            yield Finding.error("source-setting", f"{shown}={value!r} must be True or False.")
    elif name in ("environment", "system_prompt", "teacher"):
        if not isinstance(value, str) or not value:
            yield Finding.error("source-setting", f"{shown}={value!r} must be text.")
    elif name == "chat_template_kwargs" and not isinstance(value, Mapping):
        yield Finding.error("source-setting", f"{shown}={value!r} must be a dictionary.")


def check_players(sources: Sources, environments: Any, teachers: Mapping[str, Any]) -> Iterator[Finding]:
    """Errors for environments and teachers of sources whose names the run does not have."""
    known = {"environment": environments if isinstance(environments, Mapping) else {}, "teacher": teachers}
    for source in sources.sources:
        for kind, there in known.items():
            name = getattr(source.settings, kind)
            if name is not None and name not in there:
                names = ", ".join(repr(one) for one in there if one) or "none by name"
                yield Finding.error(
                    "source-setting",
                    f"sources: {source.name}: {kind}={name!r} is none of the run's, which has {names}.",
                    "Give several by name, as in {'a': ..., 'b': ...}, as `environment_factory` or as `teacher`.",
                )


def check_rows_of_sources(sources: Sources) -> Iterator[Finding]:
    """Errors for rows whose columns name another source or environment than their source's."""
    for source in sources.sources:
        wanted = source.settings.environment
        for number in range(len(source.rows)):
            row = plain_row(source.rows[number])
            if not isinstance(row, dict):
                break  # the check of rows reports it
            if row.get(COLUMN, source.name) not in (None, source.name):
                yield Finding.error(
                    "source-column",
                    f"row {number} of source {source.name!r} has {row[COLUMN]!r} in its column 'source', which is the"
                    " name of a row's source in a run with several:",
                    "rename yours, as by `dataset.rename_column('source', 'origin')`.",
                )
                break
            if wanted is not None and row.get("environment") not in (None, wanted):
                yield Finding.error(
                    "environment-name",
                    f"row {number} of source {source.name!r} names the environment {row['environment']!r}, and the"
                    f" source {wanted!r}.",
                    "Leave one of the two out.",
                )
                break
            if number == 0 and COLUMN not in row and "environment" not in row and hasattr(source.rows, "column_names"):
                break  # a table: no row has them


def check_sizes(sources: Sources, prompts: int, batches: int, steps_per_batch: float) -> Iterator[Finding]:
    """Errors for sources with fewer rows than a rollout batch may draw from them."""
    if any(one.settings.weight != 0 and len(one.rows) < prompts for one in sources.sources):
        most = most_of_a_batch(sources, prompts, min(batches, 1 + 20_000 // prompts), steps_per_batch)
        for source, count in zip(sources.sources, most, strict=True):
            if count > len(source.rows):
                yield Finding.error(
                    "source-small",
                    f"source {source.name!r} has {len(source.rows)} row(s), and a rollout batch of {prompts} prompts"
                    f" draws up to {count} of it by its weight: one row would come twice.",
                    "Lower its weight, give it more rows, or draw fewer prompts at a time.",
                )


def check_groups(sources: Sources, args: Any) -> Iterator[Finding]:
    """Errors of sources with groups of their own size, in a run with the config `args`.

    Groups of one are checked with the rewards, by which they would be compared.
    """
    for source in sources.sources:
        own, size = source.settings, source.settings.num_generations
        if size is None:
            continue
        shown, k = f"sources: {source.name}: num_generations={size}", own.pass_at_k or args.pass_at_k
        if size > args.num_generations:
            fix = "Raise the run's, which is the size of the largest groups, or lower the source's."
            yield Finding.error("source-setting", f"{shown} is above the run's {args.num_generations}.", fix)
        elif size % args.rollouts_per_game:
            evidence = f"{shown} is not a multiple of rollouts_per_game={args.rollouts_per_game}."
            yield Finding.error("source-setting", evidence, "Set a multiple, so that games are whole.")
        elif (own.advantages or args.advantages) == "pass_at_k" and k > size:
            yield Finding.error(
                "source-setting", f"{shown} is below pass_at_k={k}.", "Raise the one or lower the other."
            )


def check_one_scale(sources: Sources) -> Iterator[Finding]:
    """A warning where a number that one source is given is compared with the number of rows of another."""
    given = [(one.name, one.settings.weight, len(one.rows)) for one in sources.sources]
    numbers = [(name, weight) for name, weight, _ in given if weight not in ("rows", 0)]
    counted = [(name, rows) for name, weight, rows in given if weight == "rows" and rows]
    if numbers and counted:
        (name, weight), (other, rows) = numbers[0], counted[0]
        yield Finding.warning(
            "source-scales",
            f"source {name!r} has weight={weight!r}, and {other!r} has none, so its weight is its number of rows,"
            f" {rows}.",
            "Give each source a number, or none of them.",
        )


def check_rarest(sources: Sources, prompts: int) -> Iterator[Finding]:
    """Warnings for sources of which some rollout batches have no prompt."""
    shares = dict(zip(sources.names, sources.shares_at(0), strict=True))
    name, share = min(((name, share) for name, share in shares.items() if share), key=lambda pair: pair[1])
    if share * prompts < 1:
        yield Finding.warning(
            "source-rare",
            f"source {name!r} has a share of {share:.1%} of the prompts, and a rollout batch has {prompts}: it comes in"
            f" about one of {1 / (share * prompts):.3g} rollout batches. Shares hold over many of them.",
        )
