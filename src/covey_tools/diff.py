"""`covey diff`: two runs compared rollout batch by rollout batch, stage by stage of a step."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any

from covey.cli import parsers
from covey.config import engines, objective, sampling, training
from covey.core.transcript import as_text
from covey.observability.record_files import FOLDER, REWARD, columns_of, files, number_of, read_rows, read_run
from covey.runtime.safe_text import printable

Row = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """A stage of a step: what it makes, and what makes it differ."""

    columns: tuple[str, ...]  # compared in this order; a name with a slash at its end is a prefix
    what: str
    causes: tuple[str, ...]  # parts of run.json that act here
    fields: tuple[type, ...] = ()  # groups of settings that act here
    names: tuple[str, ...] = ()  # further settings


STAGES = (
    Stage(
        ("row", "data"),
        "the prompts are other rows of the dataset",
        ("dataset",),
        (sampling.PromptFields, training.BatchFields),
        ("seed", "data_seed"),
    ),
    Stage(
        ("prompt", "prompt_ids"),
        "the same row became another prompt",
        ("chat_template", "versions"),
        names=("chat_template_kwargs", "max_prompt_length"),
    ),
    Stage(
        ("logprobs",),
        "the same tokens have other log-probs, so the weights or the arithmetic differ",
        ("versions", "model", "engine"),
        (training.ModelFields, engines.VllmFields, engines.SglangFields),
        ("bf16", "fp16", "model_init_kwargs", "temperature", "repetition_penalty"),
    ),
    Stage(
        ("token_ids", "finish"),
        "other tokens were sampled, with equal log-probs up to there",
        ("versions",),
        (sampling.GenerationFields, sampling.SpeculationFields, sampling.AgentFields),
        ("seed",),
    ),
    Stage(
        ("completion", "finish", "length"),
        "the same prompt got another completion",
        ("versions", "model", "engine", "chat_template"),
        (
            *(training.ModelFields, engines.VllmFields, engines.SglangFields),
            *(sampling.GenerationFields, sampling.SpeculationFields, sampling.AgentFields),
        ),
        ("seed", "bf16", "fp16", "model_init_kwargs", "temperature", "repetition_penalty"),
    ),
    Stage((REWARD, "steps"), "the same completion has another reward", ("rewards",), (objective.RewardFields,)),
    Stage(
        (
            *("advantages", "advantage", "fate", "weights", "entropy_weights", "mismatch_weights"),
            *("old_logprobs", "ref_logprobs", "teacher_logprobs"),
        ),
        "the same rewards became other advantages or weights",
        (),
        (objective.RewardFields, objective.LossFields, objective.KLFields, engines.MismatchFields),
        ("num_iterations",),
    ),
)
"""In the order of a step. Log-probs are compared up to the first token that differs."""

UPDATE = Stage(
    (),
    "everything was equal until then, so the updates before it differ",
    ("versions",),
    (objective.LossFields, objective.KLFields, objective.EntropyFields, training.BatchFields),
    (
        *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "max_steps"),
        *("num_train_epochs", "gradient_accumulation_steps", "optim", "optim_args", "weight_decay", "max_grad_norm"),
        *("adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "fp16", "seed"),
    ),
)
AS_TEXT = ("prompt", "completion", "length", "advantage", "fate")
OTHERS = ("output_dir", "logging_dir", "run_name", "record", "record_max_gb", "replay_from")
"""Settings without an effect on what is trained."""


@dataclass(frozen=True)
class FirstDifference:
    """The first place at which two records differ: the column of a rollout batch, its row and, in a column of tokens,
    which token."""

    stage: Stage
    column: str
    step: int
    rollout_batch: int
    rollout: int  # index in the rollout batch's file
    token: int | None  # index in the completion or prompt
    values: tuple[Any, Any]

    def __str__(self) -> str:
        at = f"step {self.step}, rollout batch {self.rollout_batch}, rollout {self.rollout}"
        token = f", token {self.token}" if self.token is not None else ""
        first, second = map(_shown, _from_where_they_part(*self.values))
        return f"First difference: {self.column} at {at}{token}: {first} and {second} ({self.stage.what})."


def main(argv: Sequence[str]) -> int:
    first, second = parsers.diff().parse_args(list(argv)).runs
    described = read_run(first), read_run(second)
    changes = [*changed(*described)]
    tokens = [has_tokens(run / FOLDER) for run in (first, second)]
    difference = first_difference(first / FOLDER, second / FOLDER)
    bare = [str(run) for run, has in zip((first, second), tokens, strict=True) if not has and any(tokens)]
    in_texts = [
        f"{run} has no tokens on record, so only prompts, completions and rewards were compared." for run in bare
    ]
    if difference is None:
        print("No difference: the runs recorded the same rollout batches." if not changes else "No difference so far.")
        print(*in_texts, sep="\n", end="\n" * bool(in_texts))
        _list("Differs, without an effect up to here:", changes)
        return 0
    print(printable(str(difference)))
    stages = [difference.stage]
    if difference.rollout_batch and difference.stage.columns[0] in ("logprobs", "token_ids", "completion"):
        print(f"It is rollout batch {difference.rollout_batch}: {UPDATE.what}.")
        stages = [UPDATE, *stages]
    print(*in_texts, sep="\n", end="\n" * bool(in_texts))
    likely = [change for stage in stages for change in changes if acts(change, stage)]
    likely = [*dict.fromkeys(likely)]
    _list("What differs and acts there:", likely)
    _list("Differs as well:", [change for change in changes if change not in likely])
    if not changes:
        print("Nothing that is recorded differs: look at the code of the run, at its model and at the machine.")
    return 1


@dataclass(frozen=True)
class Change:
    """A part of run.json that differs."""

    part: str  # settings, versions, dataset, rewards, chat_template, engine or processes
    name: str
    values: tuple[Any, Any]

    def __str__(self) -> str:
        names = {"settings": self.name, "versions": f"version of {self.name}"}
        name = names.get(self.part, f"{self.part} {self.name}".rstrip())
        without_values = {
            "rewards": f"code of the reward {self.name}",
            "dataset": f"dataset ({self.name})",
            "chat_template": "chat template",
        }
        return without_values.get(self.part, f"{name}: {self.values[0]} and {self.values[1]}")


def changed(first: dict[str, Any], second: dict[str, Any]) -> Iterator[Change]:
    """Differences of two runs as run.json describes them."""
    for part in dict.fromkeys([*first, *second]):
        if part in ("parts", "changed", "provenance"):
            continue  # names, whose content is compared as dataset, rewards and model, and what differs in any two runs
        one, two = first.get(part), second.get(part)
        if not isinstance(one, dict) or not isinstance(two, dict):
            one, two = {"": one}, {"": two}
        for name in dict.fromkeys([*one, *two]):
            if one.get(name) != two.get(name) and not (part == "settings" and name in OTHERS):
                yield Change(part, name, (one.get(name), two.get(name)))


def acts(change: Change, stage: Stage) -> bool:
    """True if a change can make a stage give other results."""
    if change.part != "settings":
        return change.part in stage.causes
    return change.name in stage.names or any(change.name in kind.__annotations__ for kind in stage.fields)


def has_tokens(folder: Path) -> bool:
    found = files(folder)
    return bool(found) and "token_ids" in columns_of(found[0])


def first_difference(first: Path, second: Path) -> FirstDifference | None:
    """The earliest rollout batch's first stage at which two records differ; None if one only continues longer."""
    ranks = len({path.stem.partition("_rank")[2] for path in first.glob("generation_*.parquet")})

    def by_number(rank: int) -> list[dict[int, Path]]:
        return [{number_of(path): path for path in files(folder, rank)} for folder in (first, second)]

    of_ranks = [by_number(rank) for rank in range(ranks)]
    for rollout_batch in sorted({number for here, there in of_ranks[:1] for number in here.keys() & there.keys()}):
        found: list[FirstDifference] = []
        for here, there in of_ranks:
            if rollout_batch in here and rollout_batch in there:
                found += _differences(read_rows(here[rollout_batch]), read_rows(there[rollout_batch]), rollout_batch)
        if found:
            return min(found, key=lambda one: STAGES.index(one.stage))
    return None


def _differences(here: list[Row], there: list[Row], rollout_batch: int) -> Iterator[FirstDifference]:
    """The first difference of each stage and rollout."""
    one: Row
    two: Row
    with_tokens = ["token_ids" in rows[0] for rows in (here, there) if rows]
    for number, (one, two) in enumerate(zip_longest(here, there, fillvalue={})):
        same = _unequal(one.get("token_ids"), two.get("token_ids"))
        limit = same[0] if same else None
        for stage in STAGES:
            if stage.columns[0] == "token_ids" and not all(with_tokens):
                continue  # its end is one of the completion's columns
            for column in _columns(stage, one, two):
                if not all(with_tokens) and any(with_tokens) and (column in one) != (column in two):
                    continue  # one of the runs was recorded without tokens
                if column in AS_TEXT and all(with_tokens):
                    continue  # tokens are compared instead
                mine, other = one.get(column), two.get(column)
                if column in AS_TEXT[:2]:  # messages
                    mine, other = (value if value is None else as_text(value) for value in (mine, other))
                if column == "logprobs" and mine and other:  # of the tokens that both have
                    mine, other = mine[:limit], other[:limit]
                if found := _unequal(mine, other):
                    yield FirstDifference(stage, column, (one or two)["step"], rollout_batch, number, *found)
                    break


def _columns(stage: Stage, one: Row, two: Row) -> Iterator[str]:
    for name in stage.columns:
        yield from [c for c in dict.fromkeys([*one, *two]) if c.startswith(name)] if name == REWARD else [name]


def _unequal(one: Any, two: Any) -> tuple[int | None, tuple[Any, Any]] | None:
    """Index and values of the first unequal elements, if any; index None for values that are no lists."""
    are_lists = isinstance(one, list) and isinstance(two, list)
    pairs: Iterable[tuple[int | None, Any]] = enumerate(zip_longest(one, two)) if are_lists else [(None, (one, two))]
    return next(((index, pair) for index, pair in pairs if not _equal(*pair)), None)


def _equal(one: Any, two: Any) -> bool:
    return bool(one == two or (one != one and two != two))  # NaN is as NaN


def _from_where_they_part(one: Any, two: Any) -> tuple[Any, Any]:
    """Two texts from shortly before their first difference."""
    if not isinstance(one, str) or not isinstance(two, str):
        return one, two
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))
    begin = max(same - 20, 0)
    first, second = (repr(f"{'...' if begin else ''}{text[begin : begin + 50]}") for text in (one, two))
    return first, second


def _shown(value: Any) -> str:
    text = "nothing" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _list(title: str, entries: Iterable[Change]) -> None:
    lines = [f"  {entry}" for entry in entries]
    if lines:
        print(printable("\n".join([title, *lines])))
