"""The trainer's own checks, the first prompt and the rewards of two completions, with the model but not its weights."""

import math
import statistics
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig, TrainerState

from covey.core.records import FinishReason, Rollout
from covey.policy.loading import load_processing_class
from covey.rewards.functions import FunctionReward, RewardContext
from covey.rewards.suite import RewardSuite
from covey.rollout.collector import Collector
from covey.rollout.prompts import PromptCodec
from covey.rollout.vision import tokenizer_of
from covey.runtime.safe_text import printable
from covey.runtime.user_code import parameters_of
from covey.sizing.model_spec import meta_model
from covey.trainer import build
from covey.trainer.build_rollouts import plays_functions
from covey.trainer.checks import check_datasets, check_evaluations, check_fit, evaluation_sets
from covey.trainer.evaluation.suites import rows_of

MOST_ROWS = 1000  # whose prompts are counted, evenly over the data set
SHOWN_LINES = 12  # of the first prompt
SOLUTIONS = ("solution", "answer", "target", "label")  # columns that hold a correct completion


def trainer_parts(run: Any, algebra: Any, given: dict[str, Any]) -> tuple[Collector | None, RewardSuite] | None:
    """Make what a trainer makes of its arguments, and check it as it does; None where models would be loaded.

    Without the model's config there is no collector: columns, rewards and evaluations are checked alone.
    """
    args, played = run.args, (given["tools"], given["rollout_func"], given["environment_factory"])
    build.resolve_args(args, run.model, type(args))
    check_datasets(args, given["train_dataset"], given["eval_dataset"], given["environment_factory"] is None)
    functions = given["reward_funcs"] or None
    if any(isinstance(one, str) for one in functions or ()):
        return None  # reward models, which are not loaded
    try:
        config = AutoConfig.from_pretrained(run.model, local_files_only=True, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError):
        if functions and not any(played):
            suite = RewardSuite(functions, weights=args.reward_weights)
            for dataset in [given["train_dataset"], *map(rows_of, evaluation_sets(given["eval_dataset"]))]:
                suite.check_columns(dataset.column_names)
            check_evaluations(args, suite, given["eval_dataset"])
            return None, suite
        return None
    model = meta_model(config)
    here = {"local_files_only": True}
    processing = load_processing_class(None, model, trust_remote_code=args.trust_remote_code, init_kwargs=here)
    loop = SimpleNamespace(policy=model, optimizer=None, state=TrainerState())
    context: Any = SimpleNamespace(args=args, algebra=algebra, device=args.device, loop=loop)
    vision = build.build_vision(processing, model)
    no_engine = object()  # in the place of one that would be started
    collector = build.build_collector(context, model, tokenizer_of(processing), no_engine, *played, vision=vision)
    build.sampling_params(args, collector.codec.tokenizer)
    rewards = build.build_rewards(context, collector, functions, None)
    check_fit(context, collector, rewards, given["train_dataset"], given["eval_dataset"])
    return collector, rewards


def prompt_lines(codec: PromptCodec, dataset: Any, max_completion_length: int | None) -> tuple[list[str], int]:
    """Sentences about prompts as the model reads them, and the tokens of the longest."""
    count = min(len(dataset), 16 if codec.vision else MOST_ROWS)
    rows = [dataset[number * len(dataset) // count] for number in range(count)]
    read = [codec.read_row(row).ids for row in rows if row.get("prompt") is not None]
    if not read:
        return [], 0  # environments give them
    shown = printable(codec.tokenizer.decode(read[0])).splitlines()
    rest = [f"   ({len(shown) - SHOWN_LINES} more lines)"] if len(shown) > SHOWN_LINES else []
    lengths, of = [*map(len, read)], "" if count == len(dataset) else f" (of {len(dataset):,}, evenly)"
    lines = ["The first one, as the model reads it:", *(f"   | {line}" for line in shown[:SHOWN_LINES]), *rest]
    lines.append(
        f"Tokens of {len(lengths):,} prompts{of}: from {min(lengths)} to {max(lengths)}, median"
        f" {statistics.median_low(lengths)}."
    )
    room = (codec.max_context or math.inf) - (max_completion_length or 1)
    if crowded := sum(length > room for length in lengths):
        lines.append(
            f"{crowded:,} of them leave less room than max_completion_length={max_completion_length} in the model's"
            f" context of {codec.max_context} tokens: their completions end there."
        )
    return lines, max(lengths)


def reward_lines(suite: RewardSuite, collector: Collector | None, row: dict[str, Any]) -> Iterator[str]:
    """A table of the rewards of an empty completion and of the row's solution; `RewardError` if both fail."""
    if (collector and plays_functions(collector.spec)) or row.get("prompt") is None:
        return  # completions have arguments of the user's own, or prompts are an environment's
    column, tried = _solution_column(suite, row), []
    for text in (str(row[column]) if column else "?", ""):
        if collector:
            codec = collector.codec
            ids = codec.tokenizer(text, add_special_tokens=False)["input_ids"]
            shown, prompt = codec.decode(row["prompt"], ids), codec.read_row(row).ids
        else:  # no tokenizer: each byte is a token
            ids, prompt = list(text.encode()), [0]
            shown = text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
        tried.append(Rollout(prompt, ids, [True] * len(ids), None, shown, FinishReason.STOP))
    context = RewardContext(TrainerState(), lambda name, values: None, lambda name, value: None)
    right, empty = suite([row] * 2, tried, context).rewards.tolist()
    table = [("reward of a completion", "empty", "solution")]
    table += [(name, _cell(one), _cell(other)) for name, one, other in zip(suite.names, empty, right, strict=True)]
    yield from (f"   {name:<30}{one:>10}" + (f"{other:>12}" if column else "") for name, one, other in table)
    if column:
        yield f"The solution is the text of the first row's {column!r}: {printable(str(row[column]))[:80]!r}."


def _solution_column(suite: RewardSuite, row: dict[str, Any]) -> str | None:
    """The column that holds a correct completion: one of `SOLUTIONS`, or one that a reward asks for, best of text."""
    functions = [one.function for one in suite.functions if isinstance(one, FunctionReward)]
    asked = [parameter.name for function in functions for parameter in parameters_of(function) or ()]
    named = [name for name in SOLUTIONS if isinstance(row.get(name), str | int | float)]
    asked = [name for name in asked if name != "prompt" and isinstance(row.get(name), str | int | float)]
    return next(iter(named + sorted(asked, key=lambda name: not isinstance(row[name], str))), None)


def _cell(value: float) -> str:
    return "none" if math.isnan(value) else f"{value + 0.0:.3f}"  # no -0
