"""All reward functions of a run behind one call: rollouts in, a matrix of rewards (and the rewards of steps) out.

A sample that cannot be scored becomes NaN and is counted; a warning shows the first one. Only a function that needs a
missing argument, or that fails on all samples, stops the run. To add a kind of reward, write a class like
`FunctionReward` and a case in `_adapt`.
"""

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from covey.core.findings import Finding
from covey.core.records import Rollout, StepRewards
from covey.core.special_tokens import CompletionDecoder
from covey.core.stats import Mean, Stat, Sum
from covey.rewards.call import AsyncLane, CallResult, Lanes, RewardStream, ThreadLane, score
from covey.rewards.contract import RewardError, RewardWarning
from covey.rewards.functions import FunctionReward, IsolatedReward, Log, RewardBatch, RewardContext, Row, function_name
from covey.rewards.marks import named_tokens, warn_of_hidden_tokens
from covey.rewards.models import Device, ModelReward, is_reward_model, load_reward_model, model_name
from covey.rewards.steps import StepEndError, resolve
from covey.runtime.isolation import DEFAULT_LIMITS, isolation_of
from covey.runtime.loop_thread import LoopThread
from covey.runtime.safe_text import printable
from covey.runtime.user_code import call_all, report, warn

FAILED_BATCHES = 3  # after this many batches in a row on which a function failed entirely, the run stops


@dataclass(frozen=True)
class RewardResult:
    """Scores of a batch of N samples by F functions."""

    # [N, F] float64 on the CPU, unweighted; NaN where a function abstained or failed; the sum where it rewarded steps
    rewards: Tensor
    steps: list[dict[int, StepRewards]]  # [N] by function: sorted pairs of a step's last token and its reward
    stats: dict[str, Stat]  # `rewards/{name}/failures` and `/timeouts` (samples), `/seconds` (per call)


@dataclass(frozen=True)
class Routes:
    """Reward functions of a row by its source, the column `source` (`covey.data.sources`); "" for rows without one."""

    scored_by: list[frozenset[str] | None]  # for each function the sources whose rows it scores; None: all rows
    weights: dict[str, list[float]]  # by source: [F] weights that replace those of the run

    def accepts(self, function: int, row: Row) -> bool:
        sources = self.scored_by[function]
        return sources is None or row.get("source", "") in sources


class RewardSuite:
    """The reward functions of a run.

    Args:
        reward_funcs: one or a list of callables (sync or async), sequence classifiers, and ids or paths of classifiers.
        weights: one per function; all 1 by default.
        processing_classes: tokenizers of the reward models: a list aligned with `reward_funcs` (None for anything but a
            model, or to load the model's own), or a single one if there is a single function.
        model_init_kwargs: passed to `from_pretrained` of models given by id or path.
        timeout: seconds that one function may take for one batch; samples that it has not scored by then become NaN.
        batch_size: samples per forward pass of a reward model.
        device: device for reward models; None leaves them where they are.
        tokenizer: of the policy, to find the token of a `CharEnd`, and prompts that open thinking.
        isolation: "process" runs every callable in a process of its own, like those marked with `covey.isolated`.
        routes: which functions score the rows of each source; None: all functions score all rows.

    Attributes:
        names: unique names for metrics: `__name__`, or the last part of a model id; `name_1` for a second one.
        weights: [F] float64.

    Raises:
        CheckError: an argument cannot be a reward function, or lists have different lengths.

    Example:
        >>> from covey.core.records import FinishReason
        >>> def short(completions):
        ...     return [-float(len(text)) for text in completions]
        >>> rollout = Rollout([1], [2, 3], [True, True], None, "four", FinishReason.STOP)
        >>> suite = RewardSuite([short])
        >>> context = RewardContext(None, log_extra=print, log_metric=print)
        >>> suite.names, suite([{"prompt": "2+2="}], [rollout], context).rewards
        (['short'], tensor([[-4.]], dtype=torch.float64))
    """

    def __init__(
        self,
        reward_funcs: Any,
        *,
        weights: Sequence[float] | None = None,
        processing_classes: Any = None,
        model_init_kwargs: dict[str, Any] | None = None,
        timeout: float = 300.0,
        batch_size: int = 8,
        device: Device = None,
        tokenizer: Any = None,
        isolation: str = "thread",
        routes: Routes | None = None,
    ):
        given = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        classes = processing_classes if isinstance(processing_classes, list | tuple) else [processing_classes]
        classes = [None] * len(given) if processing_classes is None else list(classes)
        report(_check_given(given, weights, classes, timeout, batch_size))
        self.timeout = timeout
        self.abstains = all(one is no_reward for one in given)  # a run without rewards
        self.names = unique_names([_name(candidate) for candidate in given])
        self.weights = as_weights(weights, len(given))
        self.routes = routes
        own = {} if routes is None else routes.weights
        self._weights = {name: as_weights(values, len(given)) for name, values in own.items()}

        def adapted(index: int, one: Any) -> FunctionReward | ModelReward:
            kwargs, isolated = model_init_kwargs or {}, isolation == "process"
            return _adapt(one, classes[index], self.names[index], kwargs, batch_size, device, isolated)

        self._adapted = adapted
        self.functions = [adapted(index, one) for index, one in enumerate(given)]
        self._tokenizer = tokenizer
        self._text_of = None if tokenizer is None else CompletionDecoder(tokenizer, named_tokens(given, tokenizer))
        warn_of_hidden_tokens(given, tokenizer)
        self._loop = LoopThread("covey-async-rewards")
        self._has_scored = [False] * len(given)
        self._failed_batches = [0] * len(given)
        self._warned: set[tuple[str, str]] = set()

    def stream(self, trainer_state: Any, groups: bool = False) -> RewardStream:
        """A `RewardStream` for one batch, with the functions that can score rollouts before the batch is complete."""
        each: Lanes = {}
        whole: Lanes = {}
        for index, one in enumerate(self.functions):
            if isinstance(one, FunctionReward) and (groups or one.per_completion):
                (each if one.per_completion else whole)[index] = self._lane(one, trainer_state)
        return RewardStream(each, whole, self._tokenizer, self._accepts)

    def weights_of(self, source: str) -> Tensor:
        """[F] weights for the rows of a source; the run's own weights if the source has none."""
        return self._weights.get(source, self.weights)

    def scoring(self, source: str) -> list[str]:
        """Names of the functions that score rows of a source."""
        return [name for index, name in enumerate(self.names) if self._accepts(index, {"source": source})]

    def _accepts(self, function: int, row: Row) -> bool:
        return self.routes is None or self.routes.accepts(function, row)

    def _overlap(self, *functions: int) -> bool:
        """True if there are rows that all of these functions may score."""
        sources = [None if self.routes is None else self.routes.scored_by[function] for function in functions]
        named = [one for one in sources if one is not None]
        return not named or bool(frozenset.intersection(*named))

    def _taken(self, function: int, batch: RewardBatch) -> RewardBatch:
        """The samples of a batch that a function scores."""
        return batch.take([index for index, row in enumerate(batch.rows) if self._accepts(function, row)])

    def _lane(self, function: FunctionReward, trainer_state: Any) -> AsyncLane | ThreadLane:
        if function.is_async:
            return AsyncLane(function, self._loop, trainer_state, self.timeout)
        return ThreadLane(function, trainer_state, self.timeout)

    def __call__(
        self,
        rows: list[Row],
        rollouts: list[Rollout],
        context: RewardContext,
        streamed: RewardStream | None = None,
        begins: Callable[[str], None] = lambda name: None,
    ) -> RewardResult:
        """Score rollouts; failed ones get NaN and no function is called with them.

        Args:
            rows: the dataset row of every rollout, `row["prompt"]` as the user wrote it.
            rollouts: N rollouts, all groups of this process.
            context: the trainer's state and logs, for the functions.
            streamed: the stream that was given these rollouts as they ended, if any.
            begins: called with the name of each function before it scores the whole batch.

        Raises:
            RewardError: a function asks for a column that does not exist, or failed on all samples of its first batch,
                or of several batches in a row.
        """
        assert len(rows) == len(rollouts), "one dataset row per rollout"
        rewards = torch.full((len(rollouts), len(self.names)), math.nan, dtype=torch.float64)
        steps: list[dict[int, StepRewards]] = [{} for _ in rollouts]
        every = RewardBatch(rows, rollouts, self._tokenizer)
        scorable, batch = every.scorable, every.take(every.scorable)
        if not len(batch):
            return RewardResult(rewards, steps, self._stats([CallResult([], [], Log(0))] * len(self.names)))
        results = self._score_all(batch, context.trainer_state, streamed or RewardStream(), begins)
        logged: dict[str, int] = {}  # functions by the columns that they log
        for index, result in enumerate(results):
            mine = [place for place in scorable if self._accepts(index, rows[place])]
            own = every.take(mine)
            self._resolve_steps(index, result, own, mine, steps)
            self._check_failures(index, result, own)
            for column in result.log.extras:
                if (first := logged.setdefault(column, index)) != index and self._overlap(first, index):
                    self._warn_once(
                        self.names[index],
                        column,
                        f"reward functions {self.names[first]!r} and {self.names[index]!r} both log a column"
                        f" {column!r} with log_extra: the table keeps that of the second.",
                    )
            result.log.replay(context, mine, len(rollouts))
            rewards[mine, index] = torch.tensor(result.values, dtype=torch.float64)
        unscored = rewards[scorable].isnan().all(dim=1).nonzero().flatten().tolist()
        functions = range(len(self.functions))  # none scores rows of a source that learns from a teacher alone
        unscored = [place for place in unscored if any(self._accepts(one, batch.rows[place]) for one in functions)]
        if unscored and not self.abstains:
            self._warn_once(
                "",
                "unscored",
                f"no reward function scored {len(unscored)} of {len(batch)} samples; their advantage is 0. The first "
                f"of them has the columns {', '.join(sorted(batch.rows[unscored[0]]))}:\n{batch.describe(unscored[0])}",
            )
        return RewardResult(rewards, steps, self._stats(results))

    def replace(self, index: int, candidate: Any) -> None:
        """Replace a function from the next batch on; the new one keeps the name and weight of the old one."""
        report(_check_function(candidate))
        made, old = self._adapted(index, candidate), self.functions[index]
        self.functions[index] = made
        if isinstance(old, IsolatedReward):
            old.worker.close()

    def close(self) -> None:
        """End the processes of isolated functions; the next call starts them again."""
        call_all(*(one.worker.close for one in self.functions if isinstance(one, IsolatedReward)))

    def state_dict(self) -> dict[str, Any]:
        """State for checkpoints, by function: whether it has scored anything yet, and batches failed in a row."""
        counts = zip(self.names, self._has_scored, self._failed_batches, strict=True)
        return {name: [scored, failed] for name, scored, failed in counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for index, name in enumerate(self.names):
            self._has_scored[index], self._failed_batches[index] = state.get(name, (False, 0))

    def check_columns(self, columns: Collection[str], source: str = "") -> Iterator[Finding]:
        """Errors for arguments of reward functions that neither the trainer nor a dataset with these columns provides.

        `source` is the dataset's source, "" without sources.
        """
        for index, function in enumerate(self.functions):
            if isinstance(function, FunctionReward) and self._accepts(index, {"source": source}):
                yield from function.check_columns(columns)

    def _score_all(
        self, batch: RewardBatch, trainer_state: Any, streamed: RewardStream, begins: Callable[[str], None]
    ) -> list[CallResult]:
        """Start the async functions, run the others one after another in the meantime, then collect all results."""
        waiting: Lanes = {}
        others: dict[int, FunctionReward | ModelReward] = {}
        for index, function in enumerate(self.functions):
            if index in streamed:
                continue
            if isinstance(function, FunctionReward) and function.is_async:
                waiting[index] = self._lane(function, trainer_state)
            else:
                others[index] = function
        with RewardStream(groups=waiting, tokenizer=self._tokenizer, accepts=self._accepts) as started:
            started.on_group(0, batch.rows, batch.rollouts)
            results: dict[int, CallResult] = {}
            for index, function in others.items():
                own = self._taken(index, batch)
                if not len(own):
                    results[index] = CallResult([], [], Log(0))
                    continue
                begins(self.names[index])
                results[index] = score(function, own, trainer_state, self.timeout)
            results |= started.results() | streamed.results()
        for index, result in results.items():
            assert len(result.values) == len(self._taken(index, batch)), "every rollout was streamed"
        return [results[index] for index in range(len(self.functions))]

    def _resolve_steps(
        self, index: int, call: CallResult, batch: RewardBatch, scorable: list[int], steps: list[dict[int, StepRewards]]
    ) -> None:
        """Add a function's rewards of steps to `steps`; a step that ends outside of the completion is a failure."""
        for sample, rewarded in enumerate(call.steps):
            if rewarded is not None:
                try:
                    steps[scorable[sample]][index] = resolve(rewarded, batch.rollouts[sample], self._text_of)
                except StepEndError as error:
                    call.fail(sample, f"it ended a step at {error}")

    def _check_failures(self, index: int, result: CallResult, batch: RewardBatch) -> None:
        name, size, failures = self.names[index], len(batch), result.failures
        if not size:  # none of its source
            return
        if len(failures) < size:
            self._has_scored[index] = True
            self._failed_batches[index] = 0
        if not failures:
            return
        first = result.first_failure
        assert first is not None, "there are failures"
        failed = [sample for sample, failure in failures.items() if not failure.is_late]
        if len(failures) == size:
            self._failed_batches[index] += 1
            broken = not first.is_late and not self._has_scored[index]
            if broken or self._failed_batches[index] >= FAILED_BATCHES:
                raise RewardError(
                    f"reward function {name!r} failed on all {size} samples"
                    + (f", {FAILED_BATCHES} batches in a row" if not broken else "")
                    + f": {first.text}{'' if first.text.endswith(('.', '?')) else '.'}"
                    + f" First sample:\n{batch.describe(0)}"
                ) from first.error
        if failed:
            text = f"reward function {name!r} failed on {len(failed)} of {size} samples ({first.text}); they get no"
            text += f" reward from it and are counted in rewards/{name}/failures. The first of them:\n"
            self._warn_once(name, "failures", text + batch.describe(failed[0]))
        if late := len(failures) - len(failed):
            text = f"reward function {name!r} did not score {late} of {size} samples within"
            text += f" {self.timeout:g} s; they get no reward from it and are counted in rewards/{name}/timeouts. First"
            self._warn_once(name, "timeouts", f"{text} sample of the batch:\n{batch.describe(0)}")

    def _warn_once(self, name: str, kind: str, message: str) -> None:
        if (name, kind) not in self._warned:
            self._warned.add((name, kind))
            warn(message, RewardWarning)

    def _stats(self, results: list[CallResult]) -> dict[str, Stat]:
        """Statistics with the same keys on every call and every process."""
        stats: dict[str, Stat] = {}
        for name, result in zip(self.names, results, strict=True):
            late = sum(map(attrgetter("is_late"), result.failures.values()))
            stats[f"rewards/{name}/failures"] = Sum(float(len(result.failures) - late))
            stats[f"rewards/{name}/timeouts"] = Sum(float(late))
            stats[f"rewards/{name}/seconds"] = Mean.of([result.seconds])
        return stats


def no_reward(completions: Sequence[Any], **columns: Any) -> list[None]:
    """Reward function without rewards, for runs that learn only from a teacher."""
    return [None] * len(completions)


def _name(candidate: Any) -> str:
    if isinstance(candidate, str):
        return model_name(candidate)
    if is_reward_model(candidate):
        return model_name(getattr(candidate.config, "_name_or_path", "") or type(candidate).__name__)
    return printable(function_name(candidate))


def unique_names(names: list[str]) -> list[str]:
    """Distinct names: a second function of the same name gets `_1`, and so on."""
    unique: list[str] = []
    for name in names:
        candidate, suffix = name, 0
        while candidate in unique or (suffix and candidate in names):
            suffix += 1
            candidate = f"{name}_{suffix}"
        unique.append(candidate)
    return unique


def as_weights(weights: Sequence[float] | None, count: int) -> Tensor:
    """Weights [F] float64, all 1 by default; CheckError unless there is one finite number per function."""
    report(check_weights(weights, count))
    return torch.tensor([1.0] * count if weights is None else [float(one) for one in weights], dtype=torch.float64)


def check_weights(weights: Sequence[float] | None, count: int) -> Iterator[Finding]:
    """Errors if `weights` are not one finite number for each of `count` reward functions."""
    if weights is None:
        return
    if len(weights) != count:
        evidence = f"{len(weights)} reward weights for {count} reward functions."
        yield Finding.error("reward-weights", evidence, "Give one each.")
    if not all(math.isfinite(weight) for weight in weights):
        yield Finding.error("reward-weights", f"reward weights must be finite numbers, not {list(weights)}.")


def _check_given(
    given: list[Any], weights: Sequence[float] | None, classes: list[Any], timeout: float, batch_size: int
) -> Iterator[Finding]:
    if not given:
        yield Finding.error("reward-missing", "reward_funcs is empty.", "Give at least one reward function.")
    if not timeout > 0:
        yield Finding.error("setting-range", f"timeout={timeout} must be a positive number of seconds.")
    if batch_size < 1:
        yield Finding.error("setting-range", f"batch_size={batch_size} must be at least 1.")
    yield from check_weights(weights, len(given))
    if len(classes) != len(given):
        yield Finding.error(
            "reward-model",
            f"{len(classes)} reward processing classes for {len(given)} reward functions.",
            "Give a list with one for each, None for those that need none.",
        )
    for one in given:
        yield from _check_function(one)


def _check_function(one: Any) -> Iterator[Finding]:
    if isinstance(one, str) or is_reward_model(one):
        return
    if inspect.isclass(one):
        evidence = f"reward {_name(one)!r} is a class."
        yield Finding.error("reward-type", evidence, f"Give an object of it, such as {_name(one)}().")
    elif not callable(one):
        yield Finding.error(
            "reward-type",
            f"{one!r} ({type(one).__name__}) cannot be a reward function.",
            "Give a callable, a sequence classifier, or the id or path of one.",
        )


def _adapt(
    candidate: Any, tokenizer: Any, name: str, kwargs: dict[str, Any], batch_size: int, device: Device, isolate: bool
) -> FunctionReward | ModelReward:
    if isinstance(candidate, str):
        candidate = load_reward_model(candidate, kwargs)
        device = None if "device_map" in kwargs else device
    if is_reward_model(candidate):
        return ModelReward(candidate, tokenizer, name, batch_size, device)
    limits = isolation_of(candidate) or (DEFAULT_LIMITS if isolate else None)
    return IsolatedReward(candidate, name, limits) if limits else FunctionReward(candidate, name)
