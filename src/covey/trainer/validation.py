"""Checks across the parts of a trainer: its data, tokenizer, batch sizes, rewards and environments."""

from typing import Any

from covey.config.base import OnlineConfig
from covey.data.sampler import check_enough
from covey.data.validation import check_dataset, check_prompts, first_rows
from covey.rewards import RewardSuite
from covey.rollout.collector import Collector
from covey.trainer.build_environments import check_columns, given_by
from covey.trainer.build_rollouts import plays_functions, refuse_plain_prompts
from covey.trainer.context import RunContext
from covey.trainer.evaluation.suites import EvalSuite, rows_of


def check_datasets(args: OnlineConfig, train_dataset: Any, eval_dataset: Any, prompts_required: bool) -> None:
    """Look at the rows of datasets, before a model is loaded.

    Raises:
        ValueError: rows that cannot be sampled from, or an evaluation batch that does not consist of whole groups.
    """
    if train_dataset is not None:
        check_dataset(train_dataset, "train_dataset", prompts_required)
    for dataset in evaluation_sets(eval_dataset):
        check_dataset(rows_of(dataset), "eval_dataset", prompts_required)
        algebra = args.algebra(args.world_size)
        (dataset.batches(algebra) if isinstance(dataset, EvalSuite) else algebra).check_eval()


def evaluation_sets(eval_dataset: Any) -> list[Any]:
    """The datasets and suites of an argument `eval_dataset`."""
    given = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    return [dataset for dataset in given if dataset is not None]


def check_fit(
    context: RunContext, collector: Collector, rewards: RewardSuite, train_dataset: Any, eval_dataset: Any
) -> None:
    """Look at what no part of a trainer can see alone: whether its data suit its tokenizer, rewards and batch sizes.

    Raises:
        ValueError: too few prompts, one that cannot be encoded, or a column that a reward function asks for is missing;
            an optimizer of other weights; or an attention that cannot be trained on this device.
    """
    _check_optimizer(context.loop.optimizer, context.loop.policy)
    _check_attention(context.loop.policy, context.device.type)
    if train_dataset is not None:
        if hasattr(train_dataset, "__len__"):
            check_enough(len(train_dataset), context.algebra)
        _check_columns(collector, rewards, train_dataset, "train_dataset")
    for dataset in evaluation_sets(eval_dataset):
        _check_columns(collector, rewards, rows_of(dataset), "eval_dataset")
        if isinstance(dataset, EvalSuite):
            dataset.judge(rewards)
    _check_best_metric(context.args.metric_for_best_model, eval_dataset)


def _check_optimizer(optimizer: Any, policy: Any) -> None:
    """One that is given holds weights that are trained; an adapter's are there once the trainer has made it."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return
    held = {id(parameter) for group in groups for parameter in group["params"]}
    if not any(parameter.requires_grad and id(parameter) in held for parameter in policy.parameters()):
        raise ValueError(
            f"`optimizers` holds a {type(optimizer).__name__} of other weights than those that are trained, so nothing"
            " would change. Make it of `model.parameters()` of the model that the trainer gets. With a `peft_config` it"
            " makes the weights to train: give optimizer_cls_and_kwargs=(class, arguments), or apply"
            " `get_peft_model` yourself."
        )


def _check_attention(policy: Any, device_type: str) -> None:
    if device_type == "cpu" and getattr(policy.config, "_attn_implementation", None) == "flex_attention":
        raise ValueError(
            "attn_implementation='flex_attention' cannot be trained on a CPU: torch has no backward pass of it there."
            " Leave it out, or choose 'sdpa' or 'eager'."
        )


def _check_columns(collector: Collector, rewards: RewardSuite, dataset: Any, role: str) -> None:
    spec = collector.spec
    player = None if spec is None else spec.play
    columns = check_prompts(dataset, role, collector.codec)
    refuse_plain_prompts(spec, first_rows(dataset), role)
    check_columns(player, columns, role)
    if not plays_functions(spec):  # what these give to reward functions is known when they have
        rewards.check_columns(columns | given_by(player))


def _check_best_metric(name: str | None, datasets: Any) -> None:
    """The best model is chosen by a metric of an evaluation; with named sets, of one of them."""
    if name is None or datasets is None:
        return
    wanted = name.removeprefix("eval_")
    if not isinstance(datasets, dict):
        _check_estimated(name, wanted, datasets)
        return
    owners = [one for one in datasets if wanted.startswith(f"{one}_")]
    if not owners:
        proposals = [f"eval_{one}_{wanted}" for one in datasets]
        raise ValueError(
            f"metric_for_best_model={name!r}: the evaluation sets have names, and every metric begins with one. Choose"
            f" whose is to decide: {' or '.join(map(repr, proposals))}."
        )
    owner = max(owners, key=len)
    _check_estimated(name, wanted.removeprefix(f"{owner}_"), datasets[owner])


def _check_estimated(name: str, metric: str, dataset: Any) -> None:
    """A suite has no loss, and an estimate is only of the k that it names."""
    is_suite = isinstance(dataset, EvalSuite)
    estimated = [
        f"{kind}@{k}" for kind in ("pass", "maj") for k in (getattr(dataset, f"{kind}_at") if is_suite else ())
    ]
    unknown = "@" in metric and metric.removesuffix("_low").removesuffix("_high") not in estimated
    if unknown or (is_suite and metric == "loss"):
        there = ["reward", *estimated, *([] if is_suite else ["loss"])]
        others = (
            ", or let it estimate others (pass_at, maj_at)" if is_suite else "; pass@k and maj@k are an EvalSuite's"
        )
        raise ValueError(
            f"metric_for_best_model={name!r}: this evaluation set{' is a suite and' * is_suite} has no {metric}. Choose"
            f" among its metrics, such as {', '.join(there)}{others}."
        )
