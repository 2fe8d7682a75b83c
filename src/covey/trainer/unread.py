"""Arguments of a trainer, marks of functions and columns of data that change nothing, pointed out once each.

Settings of the config are pointed out by its rules (`covey.config`). To add a case, write a function that yields
its findings and call it in `check_unread`.
"""

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from transformers import TrainerCallback

from covey.config.base import OnlineConfig
from covey.config.messages import closest, default_of, ignored, is_set
from covey.config.teachers import TeacherFields
from covey.core.findings import Finding
from covey.data.sources import COLUMN, parts_of, source_of
from covey.data.templates import unread_arguments
from covey.data.validation import first_rows
from covey.rewards.contract import is_per_completion
from covey.rewards.functions import FunctionReward
from covey.rollout.prompts import is_conversational
from covey.rollout.tool_agent import ToolAgent
from covey.runtime.calling_thread import is_threaded
from covey.runtime.isolation import isolation_of
from covey.runtime.packages import is_own
from covey.runtime.user_code import is_async
from covey.trainer.checks import evaluation_sets
from covey.trainer.evaluation.suites import rows_of
from covey.trainer.integrations.attributes import as_list
from covey.trainer.optimizers import check_optimizer_kind, optimizer_of
from covey.trainer.teachers import columns_read

ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")
EVENTS = {name.removeprefix("on_").replace("_", ""): name for name in dir(TrainerCallback) if name.startswith("on_")}
"""Events of callbacks, by their names without `on` and underscores."""
OF_THE_TRAINER = frozenset(
    {"prompt", "completion", "completion_ids", "image", "images", "tools", "chat_template_kwargs", "environment"}
)
"""Columns that the trainer itself reads or replaces."""


def check_unread(trainer: Any) -> Iterator[Finding]:
    """Warnings of what was given to a trainer and changes nothing."""
    args, given = trainer.args, trainer.made_of
    yield from check_teacher_settings(trainer)
    yield from check_optimizer_settings(trainer)
    yield from check_callbacks(as_list(given.get("callbacks")))
    yield from check_rewards(trainer)
    yield from check_marks(given)
    if given.get("engine") is not None:
        yield from ignored(
            args, ["max_concurrent_completions"], "the trainer was given an engine, which batches by itself"
        )
    if trainer.collector.codec.vision is None:
        yield from ignored(args, ["log_multimodal"], "the model sees no images")
    sources = trainer.run.sources
    trained = given.get("train_dataset") if sources is None else sources
    own = [*parts_of(trained, "train_dataset")]
    own += [("eval_dataset", rows_of(one)) for one in evaluation_sets(given.get("eval_dataset"))]
    rows = [(role, source_of(dataset), first_rows(dataset)) for role, dataset in own]
    yield from check_prompt_settings(trainer, [row.get("prompt") for _, _, some in rows for row in some])
    for role, source, some in rows:
        yield from check_columns(trainer, {column for row in some for column in row}, role, source)


def check_teacher_settings(trainer: Any) -> Iterator[Finding]:
    """Warnings of settings of a teacher where there is none."""
    args = trainer.args
    if args.teacher is None:
        names = [field.name for field in dataclasses.fields(TeacherFields) if field.name != "teacher"]
        yield from ignored(args, names, "there is no teacher")


def check_prompt_settings(trainer: Any, prompts: Sequence[Any]) -> Iterator[Finding]:
    """Warnings of settings of messages where prompts are text, and of texts where they are messages."""
    args, codec = trainer.args, trainer.collector.codec
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if prompts and not texts:
        yield from ignored(args, ["prompts_as_messages"], "every prompt is a list of messages")
    if texts and len(texts) == len(prompts) and not args.prompts_as_messages:
        yield from ignored(
            args, ["chat_template_kwargs"], "prompts of text are read as they are, without the chat template"
        )
    elif unread := unread_arguments(args.chat_template_kwargs, codec.tokenizer):
        yield Finding.warning(
            "setting-unread",
            f"`chat_template_kwargs` has {', '.join(map(repr, unread))}, which the chat template does not mention, so"
            " prompts are the same without.",
        )
    factory = trainer.made_of.get("environment_factory")
    for one in factory.values() if isinstance(factory, dict) else as_list(factory):
        for name in ("instructions", "system"):
            text = "" if isinstance(one, type) else getattr(one, name, None)
            if isinstance(text, str) and text and prompts and not any(text in str(_texts(one)) for one in prompts):
                yield Finding.warning(
                    "prompt-instructions",
                    f"no prompt has `{name}` of {type(one).__name__} in it: the given rows have prompts of their own.",
                    "Make the rows with its `dataset(...)`, or put the text into their prompts.",
                )


def _texts(prompt: Any) -> list[str]:
    return [str(message.get("content")) for message in prompt] if is_conversational(prompt) else [str(prompt)]


# ---- optimizer and callbacks -----------------------------------------------------------------------------------------


def check_optimizer_settings(trainer: Any) -> Iterator[Finding]:
    """Warnings of settings of the optimizer and the schedule that those in use do not read."""
    args, names = trainer.args, ["optim", "optim_args", "optim_target_modules", "learning_rate", *ADAM]
    optimizer, scheduler = trainer.made_of.get("optimizers") or (None, None)
    if scheduler is not None:
        schedule = ["lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"]
        yield from ignored(args, schedule, "the trainer was given a scheduler")
    if optimizer is not None:
        yield from ignored(args, [*names, "weight_decay"], "the trainer was given an optimizer")
    elif trainer.made_of.get("optimizer_cls_and_kwargs") is not None:
        yield from ignored(args, names, "the trainer was given the class of an optimizer and its arguments")
    else:
        yield from _check_settings_of(args, trainer.policy)
        yield from check_optimizer_kind(args, trainer.policy)


def _check_settings_of(args: OnlineConfig, policy: Any) -> Iterator[Finding]:
    try:
        used = _optimizer_settings(args, policy)
    except (ImportError, ValueError, TypeError):
        return  # training says what is wrong with it
    for name in ADAM:
        other = copy.copy(args)
        setattr(other, name, default_of(type(args), name))
        if _optimizer_settings(other, policy) == used:
            yield from ignored(args, [name], f"optim={getattr(args.optim, 'value', args.optim)!r} does not read it")
    parts = [part for part in (args.optim_args or "").replace(" ", "").split(",") if part]
    for part in parts:
        other = copy.copy(args)
        other.optim_args = ",".join(one for one in parts if one != part)
        if is_set(args, "optim_args") and _optimizer_settings(other, policy) == used:
            name = getattr(args.optim, "value", args.optim)
            if name not in ("adamw_torch", "adamw_torch_fused"):  # a rule says so of all their arguments
                evidence = f"`optim_args` has {part!r}, which has no effect: optim={name!r} has it already or lacks it."
                yield Finding.warning("setting-unread", evidence)


def _optimizer_settings(args: OnlineConfig, policy: Any) -> str:
    return repr(optimizer_of(args, policy))


def check_callbacks(callbacks: Iterable[Any]) -> Iterator[Finding]:
    """Warnings of methods that look like events of training and are none, so that nothing calls them.

    Examples are `on_step_ended`, unless its class calls it, and `stepEnd`, an event's name in another form.
    """
    for callback in callbacks:
        kind = callback if isinstance(callback, type) else type(callback)
        for name, value in vars(kind).items():
            if is_own(kind.__module__) or hasattr(TrainerCallback, name) or not inspect.isroutine(value):
                continue
            event = EVENTS.get(re.sub("^on", "", name.replace("_", "").lower()))
            if event or (name.startswith("on_") and not _names_itself(kind, name)):
                hint = f" Did you mean {event!r}?" if event else closest(name, EVENTS.values())
                evidence = f"{kind.__name__}.{name} is never called: there is no such event.{hint}"
                yield Finding.warning("callback-event", evidence)


def _names_itself(kind: type, method: str) -> bool:
    """True if the source of a class has `.method`, so that it may be called from there."""
    try:
        return re.search(rf"\.{method}\b", inspect.getsource(kind)) is not None
    except (OSError, TypeError):
        return False


# ---- reward functions, tools and environments ------------------------------------------------------------------------


def check_rewards(trainer: Any) -> Iterator[Finding]:
    """Warnings of a reward that is there twice, of tokenizers of functions, and of marks that a function cannot use."""
    given, names, functions = (
        as_list(trainer.made_of.get("reward_funcs")),
        trainer.rewards.names,
        trainer.rewards.functions,
    )
    classes = as_list(trainer.made_of.get("reward_processing_classes"))
    for place, one in enumerate(given[: len(names)]):
        if any(one is earlier for earlier in given[:place]):
            yield Finding.warning(
                "reward-twice",
                f"`reward_funcs` has {names[place]!r} twice: it is computed twice and counts twice.",
                "Leave one out, or give it more weight with reward_weights.",
            )
        function = functions[place]
        if not isinstance(function, FunctionReward):
            continue
        if place < len(classes) and classes[place] is not None:
            yield Finding.warning(
                "setting-unread",
                f"`reward_processing_classes` has a tokenizer for {names[place]!r}, which has no effect: it is a"
                " function, and only reward models are given one.",
            )
        if is_per_completion(function.function) and not function.per_completion:
            yield Finding.warning(
                "mark-unread",
                f"reward function {names[place]!r} is marked per_completion, which has no effect: it asks for"
                " `trainer_state`, so it is called once everything is sampled.",
            )
        if is_threaded(function.function) and not is_async(function.function):
            yield Finding.warning(
                "mark-unread",
                f"reward function {names[place]!r} is marked covey.threaded, which has no effect: it marks tools and"
                " environments.",
                "covey.rewards.per_completion lets rewards be computed while others are sampled.",
            )


def check_marks(given: dict[str, Any]) -> Iterator[Finding]:
    """Warnings of marks of reward functions on what is no reward function."""
    marks: dict[str, Callable[[Any], Any]] = {"isolated": isolation_of, "per_completion": is_per_completion}
    for argument in ("tools", "rollout_func", "environment_factory", "agent"):
        value = given.get(argument)
        for one in value.values() if isinstance(value, dict) else as_list(value):
            for mark, is_marked in marks.items():
                if is_marked(one):
                    name = getattr(one, "__name__", type(one).__name__)
                    evidence = f"{name!r} of `{argument}` is marked {mark}, which has no effect:"
                    yield Finding.warning("mark-unread", evidence, "it marks reward functions.")


# ---- columns ---------------------------------------------------------------------------------------------------------


def check_columns(trainer: Any, columns: set[str], role: str, source: str = "") -> Iterator[Finding]:
    """Warnings of columns that nothing reads, and of arguments that a misspelt column leaves at their defaults."""
    columns = columns - {COLUMN} if source else columns
    if trainer.collector.spec is not None and not isinstance(trainer.collector.spec.play, ToolAgent):
        return  # environments, programs and rollout functions are given rows
    scoring = trainer.rewards.scoring(source)
    pairs = zip(trainer.rewards.names, trainer.rewards.functions, strict=True)
    functions = [one for name, one in pairs if name in scoring and isinstance(one, FunctionReward)]
    if any(one.names is None for one in functions):
        return
    read = {name for one in functions for name in one.names or ()} | columns_read(trainer.args)
    unread = columns - read - OF_THE_TRAINER
    for function in functions:
        for name in sorted(function.unfilled(columns)):
            if hint := closest(name, unread):
                yield Finding.warning(
                    "column-misspelt",
                    f"reward function {function.name!r} has an argument {name!r}, and `{role}` no such column, so its"
                    f" default is used.{hint}",
                )
                unread = {column for column in unread if repr(column) not in hint}
    if unread:
        yield Finding.warning(
            "column-unread",
            f"`{role}` has columns that nothing reads: {', '.join(map(repr, sorted(unread)))}.",
            "No reward function has an argument of such a name; give it one, or remove them.",
        )
