"""Whether the parts of a trainer suit each other: its data, tokenizer, batch sizes, rewards and environments.

Not here: what the data alone show (`covey.data.validation`), and what the config alone does (`covey.config`).
"""

from typing import Any

from covey.data.sampler import check_enough
from covey.data.validation import check_prompts, first_rows
from covey.trainer.build_environments import check_columns, given_by
from covey.trainer.build_rollouts import plays_functions, refuse_plain_prompts
from covey.trainer.evaluation.suites import EvalSuite, rows_of


def check_fit(trainer: Any) -> None:
    """Look at what no part of a trainer can see alone: whether its data suit its tokenizer, rewards and batch sizes.

    Raises:
        ValueError: too few prompts, one that cannot be encoded, or a column that a reward function asks for is missing;
            an optimizer of other weights; or an attention that cannot be trained on this device.
    """
    _check_optimizer(trainer.optimizer, trainer.policy)
    _check_attention(trainer.policy, trainer.accelerator.device.type)
    if trainer.train_dataset is not None:
        if hasattr(trainer.train_dataset, "__len__"):
            check_enough(len(trainer.train_dataset), trainer.algebra)
        _check_fit(trainer, trainer.train_dataset, "train_dataset")
    given = trainer.eval_dataset
    for dataset in given.values() if isinstance(given, dict) else [given]:
        if dataset is not None:
            _check_fit(trainer, rows_of(dataset), "eval_dataset")
        if isinstance(dataset, EvalSuite):
            dataset.judge(trainer.rewards)
    _check_best_metric(trainer.args.metric_for_best_model, given)


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


def _check_fit(trainer: Any, dataset: Any, role: str) -> None:
    agency = trainer.collector.spec
    player = None if agency is None else agency.play
    columns = check_prompts(dataset, role, trainer.collector.codec)
    refuse_plain_prompts(agency, first_rows(dataset), role)
    check_columns(player, columns, role)
    if not plays_functions(agency):  # what these give to reward functions is known when they have
        trainer.rewards.check_columns(columns | given_by(player))


def _check_best_metric(name: str | None, datasets: Any) -> None:
    """What decides which model is best is a metric that an evaluation has; with sets by name, one set's."""
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
