"""Mistakes about evaluation, searching, trackers and hubs."""

from transformers import TrainerCallback
from transformers.integrations import integration_utils

from covey import EvalSuite
from covey.cli.config_file import load_run
from covey.cli.data import load_evaluations
from covey_tools.study.command import rows_to_compare
from tests.support import runs, tiny
from tests.support.mistakes.cases import CONFIG, CONSTRUCTION, TRAINING, Mistake, checked


def suite(what, settings, code, *says, reward_funcs=(runs.longer, runs.digits), when=CONSTRUCTION, **config):
    parts = {"reward_funcs": list(reward_funcs)}
    return checked(
        what,
        lambda b: b.build(
            {"eval_strategy": "steps", "eval_steps": 1, **config},
            eval_dataset={"one": EvalSuite(tiny.rows(2), **settings)},
            **parts,
        ),
        code,
        *says,
        when=when,
    )


def sums(bench):
    return bench.write('{"prompt": "1+1="}', "rows.jsonl")


def search(what, says, parts=None, **options):
    model = {"model": None, "model_init": tiny.model, "eval_dataset": tiny.rows(2)}
    settings = {"per_device_eval_batch_size": 4}
    return Mistake(
        what,
        lambda b: b.build(settings, **{**model, **(parts or {})}).hyperparameter_search(lambda trial: {}, **options),
        says,
        TRAINING,
    )


class Offline(TrainerCallback):
    """A tracker whose server cannot be reached at the first log."""

    def on_log(self, args, state, control, **kwargs):
        if len(state.log_history) == 1:
            raise ConnectionError("no route to host")


def offline(bench):
    """A run that reports to it."""
    integration_utils.INTEGRATION_TO_CALLBACK["offline"] = Offline
    try:
        return bench.train({"report_to": "offline", "max_steps": 2, "logging_steps": 1})
    finally:
        del integration_utils.INTEGRATION_TO_CALLBACK["offline"]


EVALUATION = [
    suite(
        "Asked a suite for pass_at or maj_at of more completions than it samples",
        {"num_generations": 2, "pass_at": 8, "success_reward": "longer"},
        "suite-setting",
        r"pass_at=\(8,\)\) needs 8 .* 2 ",
        "num_generations",
    ),
    suite(
        "Asked for several greedy completions of a prompt",
        {"num_generations": 4, "temperature": 0},
        "suite-setting",
        "temperature=0, num_generations=4",
        when=CONFIG,
    ),
    suite(
        "Gave a suite numbers that are none",
        {"pass_at": 1.5},
        "suite-setting",
        r"pass_at=\(1\.5,\)",
        when=CONFIG,
    ),
    suite(
        "Gave a suite a temperature below 0",
        {"temperature": -1},
        "setting-range",
        "temperature=-1",
        "1e-05",
        when=CONFIG,
    ),
    suite(
        "Did not say which of several rewards tells what is right",
        {"pass_at": 1},
        "suite-reward",
        "success_reward .* longer, digits",
    ),
    suite(
        "Named a success_reward that does not exist",
        {"pass_at": 1, "success_reward": "long"},
        "suite-reward",
        "success_reward='long'",
        "longer, digits",
        "'longer'",
    ),
    suite(
        "Asked for maj_at without saying what an answer is",
        {"maj_at": 1},
        "suite-answer",
        r"maj_at=\(1,\)",
        "'longer'",
        "`answer`",
        reward_funcs=[runs.longer],
    ),
    checked(
        "Named a column as the answer that nobody logs",
        lambda b: b.build(
            {"per_device_eval_batch_size": 4}, eval_dataset=EvalSuite(tiny.rows(2), maj_at=1, answer="parsed")
        ).evaluate(),
        "suite-answer",
        "`log_extra`",
        when=TRAINING,
    ),
    checked(
        "Chose the best model by a metric without the name of its evaluation set",
        lambda b: b.build(
            {
                "metric_for_best_model": "eval_reward",
                "load_best_model_at_end": True,
                "eval_strategy": "steps",
                "save_strategy": "steps",
                "per_device_eval_batch_size": 4,
            },
            eval_dataset={"sums": tiny.rows(2), "more": tiny.rows(2)},
        ),
        "best-metric",
        "metric_for_best_model='eval_reward'",
        "'eval_sums_reward'",
    ),
    checked(
        "Chose the best model by a metric that its evaluation set does not have",
        lambda b: b.build(
            {"metric_for_best_model": "eval_hard_pass@8", "per_device_eval_batch_size": 4},
            eval_dataset={"hard": EvalSuite(tiny.rows(2), num_generations=4, pass_at=(1, 4), success_reward="longer")},
        ),
        "best-metric",
        "pass@8",
        "reward, pass@1, pass@4",
    ),
    checked(
        "Asked for evaluations without data for them",
        lambda b: b.build({"eval_strategy": "steps"}),
        "dataset-missing",
        "eval_strategy='steps'",
        "`eval_dataset`",
    ),
    checked(
        "Wrote an evaluation set into a run file that is none",
        lambda b: load_evaluations({"sums": {"temperature": 0}}),
        "dataset-type",
        "eval_dataset",
        "'temperature': 0",
        when=CONFIG,
    ),
    checked(
        "Gave an evaluation set in a run file a setting that does not exist",
        lambda b: load_evaluations({"dataset": b.write('{"prompt": "1"}', "rows.jsonl"), "passat": 1}),
        "suite-setting",
        "'passat'",
        "'pass_at'",
        when=CONFIG,
    ),
    Mistake(
        "Gave an evaluation set of a study settings of its own",
        lambda b: rows_to_compare(load_run({"eval_dataset": {"dataset": sums(b), "pass_at": 2}})),
        ("pass_at", "eval_dataset", "--model"),
        when=CONFIG,
        kind=UserWarning,
    ),
    Mistake(
        "Asked a trainer for completions with a setting that does not exist",
        lambda b: b.build().generate("1+1=", max_token=8),
        ("`generate`", "'max_token'", "'max_tokens'"),
        when=TRAINING,
    ),
    search(
        "Searched for settings with a loaded model",
        ("hyperparameter_search",),
        {"model": tiny.model(), "model_init": None},
    ),
    search("Searched for settings without an evaluation dataset", ("`eval_dataset`",), {"eval_dataset": None}),
    search(
        "Searched with an objective of one's own and no direction",
        ("direction='maximize'",),
        compute_objective=len,
    ),
    search("Searched with another backend than optuna", ("optuna", "backend='ray'"), backend="ray"),
    search("Searched with several trials at a time", ("n_jobs=2",), n_jobs=2),
    search(
        "Searched with an optimizer of one's own",
        ("`optimizer_cls_and_kwargs`",),
        {"optimizers": (object(), None)},
    ),
    Mistake(
        "Gave a model and a model_init",
        lambda b: b.build(model=tiny.model(), model_init=tiny.model),
        ("`model`", "`model_init`"),
    ),
    Mistake(
        "Wrote a model_init that returns nothing",
        lambda b: b.build(model=None, model_init=lambda: None),
        ("`model_init`",),
    ),
    Mistake(
        "Wrote a model_init that needs more than the trial",
        lambda b: b.build(model=None, model_init=lambda seed, layers: None),
        ("`model_init`",),
    ),
    Mistake(
        "Reported to a tracker that does not exist",
        lambda b: b.build({"report_to": "wandbb"}),
        ("report_to='wandbb'", "'wandb'"),
    ),
    Mistake(
        "Reported to a tracker that is not installed",
        lambda b: b.build({"report_to": "azure_ml"}),
        ("report_to='none'",),
        kind=ImportError,
    ),
    Mistake(
        "Reported to a tracker that fails while logging", offline, ("ConnectionError",), when=TRAINING, kind=UserWarning
    ),
    Mistake(
        "Named a data set for completions that cannot be created",
        lambda b: b.build({"log_completions_hub_repo": "a/b/c"}),
        ("log_completions_hub_repo='a/b/c'",),
    ),
    checked(
        "Asked for NEFTune's noise",
        lambda b: b.config(neftune_noise_alpha=5.0),
        "embedding-noise",
        r"neftune_noise_alpha=5\.0",
        when=CONFIG,
    ),
    checked(
        "Chose an optimizer that changes the weights within a backward pass",
        lambda b: b.config(optim="lomo"),
        "optimizer-in-backward",
        "optim='lomo'",
        when=CONFIG,
    ),
]
