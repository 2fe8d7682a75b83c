"""Evaluation suites: datasets with their own sampling, and estimates of pass@k and maj@k.

    eval_dataset={"gsm": EvalSuite(rows, temperature=0.0), "aime": EvalSuite(others, num_generations=16, pass_at=8)}

To add an estimate, add a field to `EvalSuite` and a line to `estimates`; formulas are in `covey.core.estimates`.
"""

import dataclasses
import math
import numbers
import statistics
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from covey.config.algebra import BatchAlgebra
from covey.config.messages import closest
from covey.core.engine import SamplingParams, check_setting
from covey.core.estimates import interval_of_mean, interval_of_share, maj_at_k, pass_at_k
from covey.core.findings import CheckError, Finding
from covey.data.conversations import as_user_messages
from covey.data.sources import Sources, source_of
from covey.rewards.contract import extract_of
from covey.rewards.functions import FunctionReward
from covey.rewards.suite import RewardSuite
from covey.runtime.user_code import format_error, format_value, place_of, report, warn

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # passed to the sampler unchanged


@dataclass(frozen=True)
class EvalSuite:
    """An evaluation dataset with its own settings; those that are None come from the config.

    A completion is right if its `success_reward` is at least `success_threshold`.

    Attributes:
        dataset: as for `eval_dataset`.
        num_generations: completions per prompt; 1 where `temperature` is 0.
        temperature: 0 is greedy.
        top_p, top_k, min_p, repetition_penalty: sampling settings.
        max_completion_length: maximum tokens of a completion.
        pass_at: each k for which to estimate the probability that one of k completions is right.
        maj_at: each k for which to estimate the probability that the most frequent answer of k completions is right.
        success_reward: name of the reward function that decides; the only one by default.
        success_threshold: smallest reward of a right completion.
        answer: for `maj_at`: a function from a completion (text or messages) to its answer or None, or the name of a
            column that a reward function logs with `log_extra`. Defaults to the function that the reward function
            names (`covey.rewards.answers`), as the built-in ones that compare answers do.

    Raises:
        CheckError: settings that cannot work.

    Example:
        >>> suite = EvalSuite([{"prompt": "1+1="}], num_generations=4, pass_at=(1, 4))
        >>> suite.pass_at
        (1, 4)
    """

    dataset: Any
    num_generations: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_completion_length: int | None = None
    pass_at: Sequence[int] = ()
    maj_at: Sequence[int] = ()
    success_reward: str | None = None
    success_threshold: float = 1.0
    answer: Callable[[Any], Hashable | None] | str | None = None

    def __post_init__(self) -> None:
        report(self._check_settings())

    def _check_settings(self) -> Iterator[Finding]:
        for name in ("num_generations", "max_completion_length", "pass_at", "maj_at"):
            given = getattr(self, name)
            if several := name.endswith("_at"):
                given = tuple(given) if isinstance(given, Sequence | set) and not isinstance(given, str) else (given,)
            values = given if several else () if given is None else (given,)
            if any(isinstance(value, bool) or not isinstance(value, int) or value < 1 for value in values):
                yield Finding.error(
                    "suite-setting", f"EvalSuite({name}={given!r}): whole numbers, 1 or more, are allowed."
                )
            elif several:
                object.__setattr__(self, name, tuple(sorted(set(values))))
        for name in SAMPLING:
            if (value := getattr(self, name)) is not None:
                yield from check_setting(name, value, f"EvalSuite({name}={value!r})")
        threshold = self.success_threshold
        if isinstance(threshold, bool) or not isinstance(threshold, numbers.Real) or not math.isfinite(threshold):
            yield Finding.error("suite-setting", f"EvalSuite(success_threshold={threshold!r}) must be a finite number.")
        unread = dict.fromkeys(("top_p", "top_k", "min_p"), "temperature=0 takes the most probable token")
        unread = unread if self.temperature == 0 else {}
        if not self.pass_at and not self.maj_at:
            because = "only pass_at and maj_at ask what is right"
            unread |= {"success_reward": because, "success_threshold": because}
        if not self.maj_at:
            unread["answer"] = "only maj_at counts answers"
        for name, because in unread.items():
            if (value := getattr(self, name)) != type(self).__dataclass_fields__[name].default:
                yield Finding.warning("suite-unread", f"EvalSuite({name}={value!r}) has no effect: {because}.")
        if self.temperature == 0 and self.num_generations not in (None, 1):
            yield Finding.error(
                "suite-setting",
                f"EvalSuite(temperature=0, num_generations={self.num_generations}): greedy completions of a prompt are"
                " all the same, so more than one tells nothing.",
                "Set num_generations=1, or a temperature above 0.",
            )

    def completions(self, algebra: BatchAlgebra) -> int:
        """Completions of each prompt; CheckError if an estimate needs more."""
        count = self.num_generations or (1 if self.temperature == 0 else algebra.eval_group)
        report(
            Finding.error(
                "suite-setting",
                f"EvalSuite({name}={getattr(self, name)}) needs {max(getattr(self, name))} completions of each prompt,"
                f" and {count} are sampled.",
                "Raise its num_generations, or leave out what is larger.",
            )
            for name in ("pass_at", "maj_at")
            if any(k > count for k in getattr(self, name))
        )
        return count

    def batches(self, algebra: BatchAlgebra) -> BatchAlgebra:
        """Batch sizes of the run with as many whole groups of this suite as an evaluation batch holds, at least one."""
        count = self.completions(algebra)
        per_device = count * max(1, algebra.per_device_eval_batch_size // count)
        return replace(algebra, num_generations_eval=count, per_device_eval_batch_size=per_device)

    def sampling(self, params: SamplingParams) -> SamplingParams:
        changes = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        if self.max_completion_length is not None:
            changes["max_tokens"] = self.max_completion_length
        return replace(params, keep_mask=False, keep_routes=False, **changes)

    def grader(self, rewards: RewardSuite) -> "Grader":
        """The grader of this suite's completions; CheckError if no reward or answer is named that it needs."""
        rounded = torch.tensor(self.success_threshold, dtype=torch.float32).item()
        threshold = min(float(self.success_threshold), rounded)  # which a reward of it in float32 reaches, too
        named, names = self.success_reward, rewards.scoring(source_of(self.dataset))
        if not self.pass_at and not self.maj_at and named in (None, *names):
            return Grader(None, threshold, None)
        if named is None and len(names) > 1:
            raise CheckError.of(
                "suite-reward",
                "an EvalSuite with pass_at or maj_at needs to know which reward decides what is right.",
                f"Set its success_reward to one of: {', '.join(names)}.",
            )
        if named is not None and named not in names:
            raise CheckError.of(
                "suite-reward",
                f"EvalSuite(success_reward={named!r}): there is no such reward.",
                f"Choose one of: {', '.join(names)}.{closest(named, names)}",
            )
        index = rewards.names.index(names[0] if named is None else named)
        answer, asked = self.answer, rewards.functions[index]
        if answer is None and isinstance(asked, FunctionReward):
            answer = extract_of(asked.function)
        if self.maj_at and answer is None:
            raise CheckError.of(
                "suite-answer",
                f"EvalSuite(maj_at={self.maj_at}) counts answers, and the reward {rewards.names[index]!r} does not say"
                " what a completion's answer is.",
                "Set `answer` to a function from a completion to its answer (None where it has none), or to the name of"
                " a column that a reward function logs with `log_extra`.",
            )
        return Grader(index, threshold, answer if self.maj_at else None)


@dataclass(frozen=True)
class Graded:
    """Grade of a completion."""

    prompt: int  # row of the dataset
    reward: float  # weighted total; NaN without a reward
    right: bool | None  # None without a reward, unless the rollout failed
    answer: str | None  # for maj@k, as text


@dataclass(frozen=True)
class Grader:
    """Grades completions by a reward."""

    reward: int | None  # index of the reward function; None grades nothing
    threshold: float  # minimum reward of a right completion
    answer: Callable[[Any], Hashable | None] | str | None  # a function or a column; None: not asked for

    def right(self, rewards: Sequence[float], failed: bool) -> bool | None:
        """None where nothing is graded, or the reward function gave nothing. A rollout that failed is wrong."""
        if self.reward is None:
            return None
        value = rewards[self.reward]
        return False if failed else None if math.isnan(value) else value >= self.threshold

    def answers(self, completions: list[Any], columns: Mapping[str, Sequence[Any]], scored: bool) -> list[str | None]:
        """The answer of each completion, as text, so that processes agree on equality; None if the function raises.

        Where some completion was `scored`, a column must have been logged; a function that failed on all logs nothing.
        """
        if self.answer is None:
            return [None] * len(completions)
        if not isinstance(self.answer, str):
            return [self._answer(self.answer, completion) for completion in completions]
        if self.answer not in columns and scored:
            raise CheckError.of(
                "suite-answer",
                f"EvalSuite(answer={self.answer!r}): no reward function has logged such a column with `log_extra`;"
                f" there are: {', '.join(columns) or 'none'}.",
            )
        return [_as_vote(value) for value in columns.get(self.answer, [None] * len(completions))]

    def _answer(self, extract: Callable[[Any], Hashable | None], completion: Any) -> str | None:
        try:
            return _as_vote(extract(completion))
        except Exception as error:  # of a user
            warn(
                f"EvalSuite.answer raised {format_error(error)}{place_of(error)} for {format_value(completion)}, which"
                " counts as no answer. Return None where there is none to silence this.",
            )
            return None


def estimates(suite: EvalSuite, completions: int, graded: Sequence[Graded]) -> dict[str, float]:
    """Estimates of a suite from the grades of all processes, with that many completions of each prompt."""
    prompts: dict[int, list[Graded]] = {}
    for one in graded:
        prompts.setdefault(one.prompt, []).append(one)
    rewards = [[one.reward for one in group if not math.isnan(one.reward)] for group in prompts.values()]
    means = [statistics.fmean(values) for values in rewards if values]
    found: dict[str, float] = {"prompts": len(prompts)}
    if len(means) > 1:
        found["reward_low"], found["reward_high"] = interval_of_mean(means)
    judged = [[one for one in group if one.right is not None] for group in prompts.values()]
    votes = [([one.answer for one in group], [bool(one.right) for one in group]) for group in judged]
    counts = [(len(right), sum(right)) for _, right in votes]
    for k in suite.pass_at:
        found |= _share(f"pass@{k}", [pass_at_k(*count, k) for count in counts if count[0] >= k], completions // k)
    for k in suite.maj_at:
        found |= _share(f"maj@{k}", [maj_at_k(*vote, k) for vote in votes if len(vote[0]) >= k], completions // k)
    return found


def _share(name: str, values: list[float], trials: int) -> dict[str, float]:
    if not values:
        return {}
    low, high = interval_of_share(values, trials)
    return {name: statistics.fmean(values), f"{name}_low": low, f"{name}_high": high}


def rows_of(dataset: Any) -> Any:
    return dataset.dataset if isinstance(dataset, EvalSuite) else dataset


def as_of_source(sources: Sources, name: str, given: Any) -> Any:
    """A dataset or suite with the settings of a source; a suite's own limit of length wins over the source's."""
    if isinstance(rows_of(given), Sources | str | None):
        return given
    if not isinstance(given, EvalSuite):
        return sources.named(name, given)
    return replace(given, dataset=sources.named(name, given.dataset, limited=given.max_completion_length is None))


def as_of_sources(sources: Sources | None, given: Any) -> Any:
    """Evaluation sets by name, with the settings of the sources that some are named after; others as they are."""
    if sources is None or not isinstance(given, Mapping):
        return given
    return {name: as_of_source(sources, name, one) if name in sources.names else one for name, one in given.items()}


def with_user_messages(given: Any) -> Any:
    """Datasets, suites, or several by name, whose prompts of text become a message of the user each."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        return {name: with_user_messages(one) for name, one in given.items()}
    changed = as_user_messages(rows_of(given))
    return replace(given, dataset=changed) if isinstance(given, EvalSuite) else changed


def suite_of(settings: Mapping[str, Any], dataset: Any) -> EvalSuite:
    known = [field.name for field in dataclasses.fields(EvalSuite) if field.name != "dataset"]
    if unknown := [name for name in settings if name not in known]:
        raise CheckError(
            *(
                Finding.error(
                    "suite-setting",
                    f"an evaluation suite has no setting {name!r}; it has: dataset, {', '.join(known)}.",
                    closest(name, known).strip(),
                )
                for name in unknown
            )
        )
    return EvalSuite(dataset, **settings)


def _as_vote(answer: Hashable | None) -> str | None:
    return None if answer is None or answer == "" else str(answer)
