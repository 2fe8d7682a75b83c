"""Checks of datasets, optimizer and metrics before training, and of loss, gradients and weights during it."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from covey.algorithms.comparison import ROLE_AVERAGE
from covey.config.base import OnlineConfig
from covey.config.choosing import BY_ADVANTAGES, gates_among, unfiltered
from covey.config.messages import ignored, is_set
from covey.config.optimizers import STOCHASTIC, name_of
from covey.core.findings import CheckError, Finding
from covey.core.routing import check_routing
from covey.core.stats import Mean, Sum
from covey.data.sampler import check_enough
from covey.data.sources import (
    Sources,
    check_groups,
    check_one_scale,
    check_rarest,
    check_sizes,
    parts_of,
    raw,
    source_of,
)
from covey.data.validation import check_dataset, check_prompts, columns_of, first_rows
from covey.policy.precision import changed, held_in_half, sample, share_that_moves
from covey.rewards import RewardSuite
from covey.rewards.functions import FunctionReward, check_isolated, function_name
from covey.rewards.suite import check_weights
from covey.rollout.collector import Collector
from covey.rollout.environments.agent import OBJECTS
from covey.runtime.isolation import isolation_of
from covey.runtime.user_code import report, warn
from covey.trainer.build_rollouts import check_rows, plays_functions
from covey.trainer.checkpoint import numbered_checkpoints
from covey.trainer.evaluation.suites import EvalSuite, rows_of
from covey.trainer.integrations.attributes import as_list
from covey.trainer.run import Run

MOST_NAMED = 3  # parameters that a message names
MOST_IN_A_ROW = 3  # steps that are not finite; the last of them ends the run
MOST_SKIPPED = 30  # steps that float16's loss scaling may skip in a row; each halves the scale, which starts at 2^16


def check_datasets(
    args: OnlineConfig, train_dataset: Any, eval_dataset: Any, prompts_required: bool, reward_funcs: Any = None
) -> list[Finding]:
    """Findings about rows, and about the columns that these `reward_funcs` ask for, before a model is loaded."""
    evaluated = [rows_of(one) for one in evaluation_sets(eval_dataset)]
    named = [*parts_of(train_dataset, "train_dataset"), *(("eval_dataset", dataset) for dataset in evaluated)]
    rows = [one for role, dataset in named for one in check_dataset(raw(dataset), role, prompts_required)]
    found = [*_check_given(args, train_dataset, eval_dataset), *rows, *_check_eval_batches(args, eval_dataset)]
    functions = [one for one in as_list(reward_funcs) if callable(one) and not isinstance(one, torch.nn.Module)]
    for function in functions:
        if args.reward_isolation == "process" or isolation_of(function):
            found += check_isolated(function, function_name(function))
    if any(one.grave for one in rows):
        return found  # they cannot be read
    found += [] if train_dataset is None else _check_length(args, train_dataset)
    found += _check_choice(args, train_dataset)
    if functions and prompts_required:
        found += check_weights(args.reward_weights, len(as_list(reward_funcs)))
        for _, dataset in named:
            own = isinstance(dataset, Sources) and dataset.sources[0].settings.reward_funcs is not None
            for function in functions if not own else ():
                found += FunctionReward(function, function_name(function)).check_columns(columns_of(dataset))
    return found


def _check_eval_batches(args: OnlineConfig, eval_dataset: Any) -> Iterator[Finding]:
    for dataset in evaluation_sets(eval_dataset) if _evaluates(args) else ():  # else `evaluate` checks, if it is called
        algebra = args.algebra()
        yield from (dataset.batches(algebra) if isinstance(dataset, EvalSuite) else algebra).check_eval()


def _evaluates(args: OnlineConfig) -> bool:
    return args.eval_strategy != "no" or args.eval_on_start


def _check_given(args: OnlineConfig, train_dataset: Any, eval_dataset: Any) -> Iterator[Finding]:
    if train_dataset is None and eval_dataset is None:
        yield Finding.error(
            "dataset-missing",
            "neither `train_dataset` nor `eval_dataset` was given.",
            "Give rows to train on, with a `prompt` column or, where environments give the prompts, `max_steps`.",
        )
    elif eval_dataset is None and _evaluates(args):
        strategy = str(getattr(args.eval_strategy, "value", args.eval_strategy))
        setting = f"eval_strategy={strategy!r}" if strategy != "no" else "eval_on_start=True"
        evidence = f"{setting} evaluates, and there is no `eval_dataset`."
        yield Finding.error("dataset-missing", evidence, "Give an `eval_dataset`, or leave the setting out.")


def _check_length(args: OnlineConfig, train_dataset: Any) -> Iterator[Finding]:
    """Findings about the number of rows, or the lack of one."""
    algebra = args.algebra()
    if isinstance(train_dataset, Sources):
        together = algebra.prompts_per_rollout_batch
        epochs = len(train_dataset) / together * max(args.num_train_epochs, 1)
        batches = args.max_steps / algebra.updates_per_rollout_batch if args.max_steps > 0 else epochs
        yield from check_sizes(train_dataset, together, math.ceil(batches), float(algebra.updates_per_rollout_batch))
        yield from check_one_scale(train_dataset)
        yield from check_rarest(train_dataset, together)
        yield from check_groups(train_dataset, args)
        yield from _check_averages(args, train_dataset)
        return
    if hasattr(train_dataset, "__len__"):
        yield from check_enough(len(train_dataset), algebra)
        yield from _check_remainder(args, len(train_dataset), algebra.prompts_per_rollout_batch)
        return
    if args.max_steps <= 0:
        yield Finding.error(
            "stream-endless",
            f"`train_dataset` has no length, as it is read as a stream, and max_steps={args.max_steps}:",
            "set max_steps, the number of updates after which the run ends.",
        )
    names = [name for name in ("dynamic_sample", "gates", "prompt_sampler") if is_set(args, name)]
    if names:
        yield Finding.error(
            "stream-lookup",
            f"{names[0]}={getattr(args, names[0])!r} looks prompts up by their number, and `train_dataset`"
            f" ({type(train_dataset).__name__}) can only be read forward.",
            "Give a dataset with a length (`datasets.load_dataset` without streaming=True, or a list of rows), or leave"
            " the setting at its default.",
        )
    because = "a dataset without a length is read by the process that trains, as every worker would have to read all"
    yield from ignored(args, ["dataloader_num_workers"], because)
    for kind in ("eval", "save", "logging"):
        if getattr(args, f"{kind}_strategy") == "epoch":
            yield Finding.warning(
                "stream-epochs",
                f"`{kind}_strategy='epoch'` acts at the end of the run alone: `train_dataset` is read as a stream, so"
                " no step is known to be the last of an epoch.",
                f"Set {kind}_strategy='steps' and {kind}_steps.",
            )


def _check_remainder(args: OnlineConfig, rows: int, together: int) -> Iterator[Finding]:
    """Rows that do not fill a rollout batch come first in the next epoch, if there is one and nothing is shuffled."""
    left = rows % together
    if left and not args.shuffle_dataset and args.max_steps <= 0 and args.num_train_epochs <= 1:
        yield Finding.warning(
            "dataset-remainder",
            f"the last {left} of {rows} rows are never sampled: a rollout batch has {together} prompts, rows are not"
            " shuffled (shuffle_dataset=False), and the run ends after one epoch.",
            "Give a number of rows that rollout batches divide, change generation_batch_size, or train for more epochs,"
            " which begin with them.",
        )


def _check_averages(args: OnlineConfig, sources: Sources) -> Iterator[Finding]:
    """Errors of averages of sources that micro-batches could not keep."""
    own = [one.name for one in sources.sources if one.settings.average == "own"]
    if own and args.loss_type == "bnpo":
        yield Finding.error(
            "source-setting",
            f"sources: {own[0]}: average='own' with loss_type='bnpo', whose micro-batches hold rows of all sources.",
            "Take loss_type='dapo', or the average 'joint'.",
        )


def _check_choice(args: OnlineConfig, train_dataset: Any) -> Iterator[Finding]:
    """Findings about samplers and gates: warnings of settings that neither the run nor a source of it reads."""
    sources = [one.settings for one in train_dataset.sources] if isinstance(train_dataset, Sources) else []
    samplers = [one.sampler for one in sources if one.sampler is not None]
    if not samplers or len(samplers) < len(sources):
        samplers.append(args.prompt_sampler)
    for one in sources if args.compare == ROLE_AVERAGE else ():
        if one.compare is None and gates_among(one.gates, BY_ADVANTAGES):
            yield unfiltered(f"sources: gates={one.gates!r}")
    if "difficulty" not in samplers:
        yield from ignored(args, ["difficulty_floor"], f"prompt_sampler is {args.prompt_sampler!r}")
    if not (args.dynamic_sample or args.gates or any(one.gates for one in sources)):
        yield from ignored(args, ["max_resample_times"], "dynamic_sample is False, and there are no gates")
    if sources:
        because = "with several sources the prompts of a rollout batch are chosen, and read, when it begins"
        yield from ignored(args, ["dataloader_num_workers"], because)
    else:
        yield from ignored(args, ["resume_sources"], "`train_dataset` is one dataset, without sources")


def check_routes(args: OnlineConfig, policy: Any, sees_images: bool) -> None:
    """CheckError where the routes of the policy's experts are to be replayed and cannot be."""
    if args.routing_replay is None:
        return
    given = f"routing_replay={args.routing_replay!r}"
    if sees_images:
        raise CheckError.of(
            "model-routes",
            f"{given}: the experts of vision-language models are not read, as images change the number of tokens.",
            "Leave routing_replay unset.",
        )
    check_routing(policy, given)


def foreign_loader(given: Any, method: str) -> TypeError:
    """Error for what an overridden `get_train_dataloader` or `get_eval_dataloader` made itself."""
    return TypeError(
        f"`{method}` was overridden and returned a dataloader of its own (of {type(given).__name__}), which cannot"
        " be sampled from: batches here are numbered samples of prompts. Return what"
        f" `super().{method}()` returns. To choose rows or their order, give such a dataset with"
        " shuffle_dataset=False; to change them, use `dataset.map` or `dataset.set_transform`; see also"
        " `prompt_sampler`."
    )


def evaluation_sets(eval_dataset: Any) -> list[Any]:
    given = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    return [dataset for dataset in given if dataset is not None]


def check_fit(
    args: OnlineConfig, collector: Collector, rewards: RewardSuite, train_dataset: Any, eval_dataset: Any
) -> Iterator[Finding]:
    """Findings that no part of a trainer can make alone: whether data suit the tokenizer and the rewards."""
    if train_dataset is not None:
        for role, dataset in parts_of(train_dataset, "train_dataset"):
            yield from _check_columns(collector, rewards, dataset, role)
        yield from _check_plain_text(args, collector, train_dataset)
    for dataset in evaluation_sets(eval_dataset):
        yield from _check_columns(collector, rewards, rows_of(dataset), "eval_dataset")
    yield from check_evaluations(args, rewards, eval_dataset)


def check_evaluations(args: OnlineConfig, rewards: RewardSuite, eval_dataset: Any) -> Iterator[Finding]:
    """Findings about the rewards that suites name, and the metric that chooses the best model."""
    for dataset in evaluation_sets(eval_dataset):
        if isinstance(dataset, EvalSuite):
            dataset.grader(rewards)
    yield from _check_best_metric(args.metric_for_best_model, eval_dataset)


def _check_columns(collector: Collector, rewards: RewardSuite, dataset: Any, role: str) -> Iterator[Finding]:
    player, columns = collector.spec and collector.spec.play, columns_of(dataset)
    yield from islice(check_rows(collector.spec, first_rows(dataset), role), 1)  # of the first row that has one
    yield from check_prompts(dataset, role, collector.codec)
    if missing := [name for name in getattr(player, "needs", ()) if name not in columns]:
        yield Finding.error(
            "column-reset",
            f"`reset` of the environment asks for {', '.join(map(repr, missing))}, and `{role}` has no such column; it"
            f" has {', '.join(sorted(columns))}.",
            "Rename the column, or give the argument a default.",
        )
    if not plays_functions(collector.spec):  # which columns they add is known once they have run
        given = {OBJECTS} if getattr(player, "gives_objects", False) else set()
        yield from rewards.check_columns(columns | given, source_of(dataset))


def _check_plain_text(args: OnlineConfig, collector: Collector, dataset: Any) -> Iterator[Finding]:
    """A warning of prompts of text that skip the chat template which the tokenizer has."""
    tokenizer = collector.codec.tokenizer
    if args.prompts_as_messages is not None or not tokenizer.chat_template or plays_functions(collector.spec):
        return
    texts = [row["prompt"] for row in first_rows(dataset) if isinstance(row.get("prompt"), str)]
    marks = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    if texts and not any(mark in texts[0] for mark in marks):  # written by a template before
        yield Finding.warning(
            "prompt-text",
            "the prompts are text, which skips the chat template of this tokenizer: an instruct model then continues"
            " the text instead of answering it.",
            "Set prompts_as_messages=True, which makes each a message of the user (in a run file a system_prompt does"
            " so, too); for a base model False keeps them as they are.",
        )


def check_policy(policy: Any, optimizer: Any, device: str, layout: str, sees_images: bool) -> Iterator[Finding]:
    """Findings about the model to train: its optimizer if one was given, its attention, and the layout of its rows."""
    if sees_images and layout not in ("auto", "padded"):
        yield Finding.error(
            "model-layout",
            f"attn_layout={layout!r} does not suit images, whose tokens have positions of their own and may attend in"
            " both directions: rows are padded.",
            "Leave attn_layout at 'auto', or give `processing_class=processor.tokenizer` to train on text alone.",
        )
    yield from _check_optimizer(optimizer, policy)
    attention = getattr(policy.config, "_attn_implementation", None)
    if device == "cpu" and attention == "flex_attention":
        yield Finding.error(
            "attention-cpu",
            "attn_implementation='flex_attention' cannot be trained on a CPU: torch has no backward pass of it there.",
            "Leave it out, or choose 'sdpa' or 'eager'.",
        )


MOST_STILL, FEW = 5, 0.1  # optimizer steps, and the share of weights that each should at least change
MOVES = 0.5  # share of weights held in half precision that an update should be able to move
IN_FLOAT32 = (
    "Load the model in float32 (the default here: leave `dtype` out, or model.float()); bf16=True computes in bfloat16"
    " all the same. Or train an adapter, whose weights are float32, or raise the learning rate."
)
BY_CHANCE = "Or set optim='adamw_stochastic', which rounds to either side so that nothing is lost in the mean."
KEEPS_REST = ("kahan", "stochastic_round")  # words in `optim_args` of optimizers that lose nothing to rounding
UPDATES = (("adam|lion|adafactor|lamb", 1.0), ("muon", 0.2))
"""Patterns of optimizers' names, and the usual size of their update of a weight, in learning rates."""


def check_rounding(args: OnlineConfig, policy: Any) -> Iterator[Finding]:
    """A warning if weights are held in half precision, where rounding would undo updates of this learning rate."""
    weights, name = held_in_half(policy), name_of(args)
    size = next((size for pattern, size in UPDATES if re.search(pattern, name)), None)
    if not weights or size is None or loses_nothing(args, weights):
        return
    share = share_that_moves(weights, size * args.learning_rate)
    if share < MOVES:
        dtype = str(weights[0].dtype).removeprefix("torch.")
        yield Finding.warning(
            "weights-rounded",
            f"the weights to train are held in {dtype}, whose numbers are so far apart that an update of"
            f" learning_rate={args.learning_rate:g} is rounded back to the old weight for about {1 - share:.0%} of"
            " them: they hardly move.",
            advice_on_rounding(weights),
        )


def loses_nothing(args: OnlineConfig, weights: list[Tensor]) -> bool:
    """True for an optimizer that keeps, or adds up in the mean, what rounding to half precision would lose."""
    by_chance = name_of(args) == STOCHASTIC and all(weight.dtype == torch.bfloat16 for weight in weights)
    return by_chance or any(word in (args.optim_args or "") for word in KEEPS_REST)


def advice_on_rounding(weights: list[Tensor]) -> str:
    in_bfloat16 = all(weight.dtype == torch.bfloat16 for weight in weights)
    return f"{IN_FLOAT32} {BY_CHANCE}" if in_bfloat16 else IN_FLOAT32


class MovedWeights(TrainerCallback):
    """Logs the share of weights held in half precision that an optimizer step changed; warns once if few change."""

    def __init__(self, run: Run, warned: bool):
        self._run, self._warned = run, warned
        self._before: list[Tensor] = []
        self._steps = self._moved = self._total = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._before = sample(held_in_half(self._run.policy))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        weights = held_in_half(self._run.policy)
        if len(weights) != len(self._before):
            return
        moved, total = changed(self._before, weights)
        self._before = []
        if not total or not kwargs["lr_scheduler"].get_last_lr()[0]:
            return
        self._run.metrics.add({"updates/weights_moved": Mean(float(moved), float(total))}, "train")
        self._steps, self._moved, self._total = self._steps + 1, self._moved + moved, self._total + total
        few = self._moved < FEW * self._total and not loses_nothing(self._run.args, weights)
        if self._steps == MOST_STILL and few and not self._warned:
            self._warned = True
            evidence = (
                f"in {MOST_STILL} optimizer steps, only {self._moved / self._total:.1%} of the weights changed in a"
                f" step, on average: they are held in {weights[0].dtype}, and the other updates were rounded away."
            )
            report([Finding.warning("weights-rounded", evidence, advice_on_rounding(weights))])


def _check_optimizer(optimizer: Any, policy: Any) -> Iterator[Finding]:
    """Error of a given optimizer that holds no trained weight, such as one made before the adapter."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return
    held = {id(parameter) for group in groups for parameter in group["params"]}
    if not any(parameter.requires_grad and id(parameter) in held for parameter in policy.parameters()):
        yield Finding.error(
            "optimizer-weights",
            f"`optimizers` holds a {type(optimizer).__name__} of other weights than those that are trained, so nothing"
            " would change.",
            "Make it of `model.parameters()` of the model that the trainer gets. With a `peft_config` it makes the"
            " weights to train: give optimizer_cls_and_kwargs=(class, arguments), or apply `get_peft_model` yourself.",
        )


def _check_best_metric(name: str | None, datasets: Any) -> Iterator[Finding]:
    """Error of a `metric_for_best_model` that no evaluation has; with named sets it must name one of them."""
    if name is None or datasets is None:
        return
    metric, dataset = name.removeprefix("eval_"), datasets
    if isinstance(datasets, dict):
        owners = [one for one in datasets if metric.startswith(f"{one}_")]
        if not owners:
            proposals = [f"eval_{one}_{metric}" for one in datasets]
            yield Finding.error(
                "best-metric",
                f"metric_for_best_model={name!r}: the evaluation sets have names, and every metric begins with one.",
                f"Name the evaluation set: {' or '.join(map(repr, proposals))}.",
            )
            return
        owner = max(owners, key=len)
        metric, dataset = metric.removeprefix(f"{owner}_"), datasets[owner]
    is_suite = isinstance(dataset, EvalSuite)  # it has no loss, and an estimate is only of the k that it names
    estimated = [f"{kind}@{k}" for kind in ("pass", "maj") for k in getattr(dataset, f"{kind}_at", ())]
    unknown = "@" in metric and metric.removesuffix("_low").removesuffix("_high") not in estimated
    if unknown or (is_suite and metric == "loss"):
        there = ["reward", *estimated, *([] if is_suite else ["loss"])]
        others = (
            ", or let it estimate others (pass_at, maj_at)" if is_suite else "; pass@k and maj@k are an EvalSuite's"
        )
        yield Finding.error(
            "best-metric",
            f"metric_for_best_model={name!r}: this evaluation set{' is a suite and' * is_suite} has no {metric}.",
            f"Choose among its metrics, such as {', '.join(there)}{others}.",
        )


def determine_best_metric(trainer: Any, metrics: dict[str, float], trial: Any) -> bool:
    """A method of the trainer: an evaluation without any reward never becomes the best."""
    name = "eval_" + (trainer.args.metric_for_best_model or "").removeprefix("eval_")
    if name not in metrics and any(name in entry for entry in trainer.state.log_history):
        warn(
            f"step {trainer.state.global_step}: this evaluation has no {name}, which chooses the best model, although"
            " earlier ones had it (every reward is None, say), so it is not the best.",
        )
        return False
    return Trainer._determine_best_metric(trainer, metrics, trial)


class NotFiniteError(FloatingPointError):
    """A loss, a gradient or a weight became NaN or infinite."""


class FiniteCheck:
    """Skips steps whose loss or gradient is not finite.

    It ends a run at the third such step in a row, or as soon as a weight is not finite.
    """

    def __init__(
        self,
        run: Run,
        rewards: Callable[[], str] = lambda: "unknown",
        optimizer: Callable[[], Any] = lambda: None,
        earlier: Callable[[], Collection[str]] = tuple,  # names of another run's checkpoints in output_dir
    ):
        self._optimizer, self._earlier = optimizer, earlier
        self._run, self._rewards = run, rewards  # rewards of the newest rollout batch, for messages
        self._skipped_in_a_row, self._skipped_step = 0, -1
        self._not_finite: list[str] = []  # micro-batches of this step, with their losses
        self.norm = math.nan  # of the newest gradient

    def state_dict(self) -> dict[str, Any]:
        return {"skipped_in_a_row": self._skipped_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._skipped_in_a_row = state["skipped_in_a_row"]

    def check_loss(self, loss: float, number: int) -> float:
        """The factor by which a micro-batch's loss is multiplied if it is not finite.

        NaN, so that no process takes the step; 1 under float16's loss scaling, which skips such steps itself. Raises
        NotFiniteError if a weight is not finite.
        """
        if self.scales_loss:
            return 1.0
        if not_finite(self._run.policy.named_parameters()):
            raise self._stopped(f"the loss is {loss}")
        self._not_finite.append(f"{number} (loss {loss})")
        return math.nan

    def check_norm(self, norm: Any) -> None:
        """Skip the step if the norm is not finite; every process has the same norm, so all decide alike."""
        self.norm = value = 0.0 if norm is None else float(norm.item() if isinstance(norm, Tensor) else norm)
        if math.isfinite(value):
            self._skipped_in_a_row = 0
            return
        if self._skipped_step == self._run.step:  # asked again after clipping
            return
        self._skipped_in_a_row += 1
        if not self.scales_loss:
            self._skip(f"the norm of the gradient is {value}")
        elif self._skipped_in_a_row > MOST_SKIPPED:
            raise self._stopped(
                f"the gradient was not finite in {self._skipped_in_a_row} steps in a row, at any loss scale of float16"
            )

    def _skip(self, what: str) -> None:
        """Drop the gradients, so that the optimizer changes neither weights nor moments."""
        named = list(self._run.policy.named_parameters())
        gradients = not_finite((name, weight.grad) for name, weight in named)
        spoilt = bool(not_finite(named)) or self._run.sharding.deepspeed  # whose gradients are out of reach
        if spoilt or self._skipped_in_a_row >= MOST_IN_A_ROW:
            again = f" in {self._skipped_in_a_row} steps in a row" if self._skipped_in_a_row > 1 else ""
            raise self._stopped(what + again, gradients)
        for _, weight in named:
            weight.grad = None
        self._skipped_step = self._run.step
        if self._run.accelerator.is_main_process:
            self._run.metrics.add({"updates/skipped_nonfinite": Sum(1.0)}, "train")
        losses = f"; micro-batches whose loss is not: {', '.join(self._not_finite)}" if self._not_finite else ""
        self._not_finite.clear()
        warn(
            f"step {self._run.step + 1}: {what}, so the step is not taken and all weights stay as they are."
            f" Gradients that are not finite: {listed(gradients)}{losses}. Rewards of the step: {self._rewards()}."
            f" The run ends after {MOST_IN_A_ROW} such steps in a row. {CAUSES}",
        )

    def check_weights(self, together: bool = True) -> None:
        """Stop if a trained weight, or a moment of it, is not finite, before it is saved. Collective if `together`."""
        named = self._run.policy.named_parameters()
        trained = [(name, weight) for name, weight in named if weight.requires_grad]
        found = not_finite(trained) or not_finite(self._moments(trained))
        gather = self._run.collectives.gather
        everyone = gather(found, "check that the weights are finite") if together else [found]
        if names := sorted({name for share in everyone for name in share}):
            what = "moments of the optimizer" if all(" " in name for name in names) else "weights"
            raise NotFiniteError(
                f"step {self._run.step}: {what} are NaN or infinite, so they are not saved: {listed(names)}."
                f" {CAUSES} {self._where_to_resume()}"
            )

    def _moments(self, trained: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """State of the optimizer for each weight: with an infinite second moment it would never change again."""
        state = getattr(self._optimizer(), "state", None) or {}
        for name, weight in trained:
            for key, value in (state.get(weight) or {}).items():
                if isinstance(value, Tensor):
                    yield f"{key} of {name}", value

    @property
    def scales_loss(self) -> bool:
        """True under float16's loss scaling, which skips steps whose gradient is not finite."""
        scaler = getattr(self._run.accelerator, "scaler", None)
        by_deepspeed = self._run.sharding.deepspeed and self._run.accelerator.mixed_precision == "fp16"
        return by_deepspeed or (scaler is not None and scaler.is_enabled())

    def _stopped(self, what: str, gradients: Sequence[str] = ()) -> NotFiniteError:
        weights = not_finite(self._run.policy.named_parameters())
        details = f" Gradients that are not finite: {listed(gradients)}." if gradients else ""
        details += f" Weights that are not finite: {listed(weights)}." if weights else " All weights are still finite."
        args, dtype = self._run.args, self._run.policy.dtype
        details += f" This run has learning_rate={args.learning_rate:g}, loss_type={args.loss_type!r} and {dtype}."
        return NotFiniteError(
            f"step {self._run.step + 1}: {what}, so the run ends before its weights are spoilt or saved."
            f"{details} {CAUSES} {self._where_to_resume()}"
        )

    def _where_to_resume(self) -> str:
        found = numbered_checkpoints(self._run.args.output_dir or ".", self._earlier())
        if not found:
            return "No checkpoint was saved before; start again with other settings."
        return (
            f"The last checkpoint, {found[-1]}, is kept: resume from it, or begin a new run with it as `model`, as"
            " another learning rate has no effect on a resumed one."
        )


CAUSES = (
    "Common causes: a learning rate that is too high, a loss or an optimizer of one's own, activations that overflow"
    " (use bf16=True or float32 instead of float16), a damaged weight file."
)


def is_finite(values: Tensor) -> bool:
    """True if a tensor holds neither NaN nor infinity; of a sharded one, this process's shard is checked."""
    values = getattr(values, "ds_tensor", values)  # ZeRO-3
    values = getattr(values, "_local_tensor", values).detach()  # FSDP2
    if values.is_meta or not values.is_floating_point() or values.dtype.itemsize < 2:
        return True
    total = values.sum(dtype=torch.promote_types(values.dtype, torch.float32))
    return math.isfinite(total.item()) or all(bool(part.isfinite().all()) for part in values.flatten().split(2**24))


def not_finite(named: Iterable[tuple[str, Tensor | None]]) -> list[str]:
    return [name for name, values in named if values is not None and not is_finite(values)]


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: 'a, b, c and 2 more'."""
    more = len(names) - MOST_NAMED
    return (", ".join(names[:MOST_NAMED]) or "none") + (f" and {more} more" if more > 0 else "")


def check_model(model: Any) -> None:
    if any(weight.is_meta for weight in model.parameters()):
        raise ValueError("the model is on the device `meta`, where it has no weights: load it with `from_pretrained`.")
    if names := not_finite(model.named_parameters()):
        raise ValueError(
            f"the model holds weights that are NaN or infinite: {listed(names)}. Nothing but NaN can be trained from"
            " them. Either the run that saved them had diverged, or the files are damaged: load an earlier checkpoint,"
            " or download the model again."
        )
