"""Mistakes about evaluation, searching, trackers and hubs."""

from transformers import TrainerCallback
from transformers.integrations import integration_utils

from covey import EvalSuite
from covey.cli.config_file import load_run
from covey.cli.data import load_evaluations
from covey_tools.study.command import rows_to_compare
from tests.support import runs, tiny
from tests.support.mistakes.cases import CONFIG, TRAINING, Mistake, checked


def suite(what, settings, *says, reward_funcs=(runs.longer, runs.digits), when=None, **config):
    parts = {"reward_funcs": list(reward_funcs)}
    return Mistake(
        what,
        lambda b: b.build(
            {"eval_strategy": "steps", "eval_steps": 1, **config},
            eval_dataset={"one": EvalSuite(tiny.rows(2), **settings)},
            **parts,
        ),
        says,
        **({"when": when} if when else {}),
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
        r"EvalSuite\(pass_at=\(8,\)\) needs 8 completions of each prompt, and 2 are sampled",
        "Raise its num_generations",
    ),
    suite(
        "Asked for several greedy completions of a prompt",
        {"num_generations": 4, "temperature": 0},
        "greedy completions of a prompt are all the same",
        "Set num_generations=1, or a temperature above 0",
        when=CONFIG,
    ),
    suite(
        "Gave a suite numbers that are none",
        {"pass_at": 1.5},
        r"EvalSuite\(pass_at=.*\): whole numbers, 1 or more, are allowed",
        when=CONFIG,
    ),
    suite(
        "Gave a suite a temperature below 0",
        {"temperature": -1},
        r"EvalSuite\(temperature=-1\) must be a number, 0 \(greedy\), or 1e-05 or more",
        when=CONFIG,
    ),
    suite(
        "Did not say which of several rewards tells what is right",
        {"pass_at": 1},
        "needs to know which reward tells what is right",
        "set its success_reward to one of: longer, digits",
    ),
    suite(
        "Named a success_reward that does not exist",
        {"pass_at": 1, "success_reward": "long"},
        "there is no such reward; choose one of: longer, digits",
        "Did you mean 'longer'",
    ),
    suite(
        "Asked for maj_at without saying what an answer is",
        {"maj_at": 1},
        "counts votes, and the reward 'longer' does not say what a completion's answer is",
        "Set `answer` to a function",
        reward_funcs=[runs.longer],
    ),
    Mistake(
        "Named a column as the answer that nobody logs",
        lambda b: b.build(
            {"per_device_eval_batch_size": 4}, eval_dataset=EvalSuite(tiny.rows(2), maj_at=1, answer="parsed")
        ).evaluate(),
        ("no reward function has logged such a column with `log_extra`; there are: none",),
        TRAINING,
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
    Mistake(
        "Gave an evaluation set in a run file a setting that does not exist",
        lambda b: load_evaluations({"dataset": b.write('{"prompt": "1"}', "rows.jsonl"), "passat": 1}),
        ("an evaluation suite has no setting 'passat'", "Did you mean 'pass_at'"),
        CONFIG,
    ),
    Mistake(
        "Gave an evaluation set of a study settings of its own",
        lambda b: rows_to_compare(load_run({"eval_dataset": {"dataset": sums(b), "pass_at": 2}})),
        ("a study compares its variants by their mean rewards", "pass_at of eval_dataset", "covey eval --model"),
        CONFIG,
        UserWarning,
    ),
    Mistake(
        "Asked a trainer for completions with a setting that does not exist",
        lambda b: b.build().generate("1+1=", max_token=8),
        ("`generate` has no setting 'max_token'", "it takes max_tokens, temperature, .*Did you mean 'max_tokens'"),
        TRAINING,
    ),
    search(
        "Searched for settings with a loaded model",
        ("trains a fresh model in every trial", "Give its hub id or folder, or a function that makes it"),
        {"model": tiny.model(), "model_init": None},
    ),
    search("Searched for settings without an evaluation dataset", ("give an `eval_dataset`",), {"eval_dataset": None}),
    search(
        "Searched with an objective of one's own and no direction",
        ("needs to know what is better", "direction='maximize'"),
        compute_objective=len,
    ),
    search("Searched with another backend than optuna", ("works with optuna alone",), backend="ray"),
    search("Searched with several trials at a time", ("n_jobs=2: trials run one after another",), n_jobs=2),
    search(
        "Searched with an optimizer of one's own",
        ("every trial has another", "or give `optimizer_cls_and_kwargs`"),
        {"optimizers": (object(), None)},
    ),
    Mistake(
        "Gave a model and a model_init",
        lambda b: b.build(model=tiny.model(), model_init=tiny.model),
        ("`model` and `model_init` were both given",),
    ),
    Mistake(
        "Wrote a model_init that returns nothing",
        lambda b: b.build(model=None, model_init=lambda: None),
        ("`model_init` returned None; it must return a model",),
    ),
    Mistake(
        "Wrote a model_init that needs more than the trial",
        lambda b: b.build(model=None, model_init=lambda seed, layers: None),
        ("`model_init` needs seed, layers; it is called with the trial of a search, or with nothing",),
    ),
    Mistake(
        "Reported to a tracker that does not exist",
        lambda b: b.build({"report_to": "wandbb"}),
        ("report_to='wandbb' is no tracker; choose among: ", "Did you mean 'wandb'"),
    ),
    Mistake(
        "Reported to a tracker that is not installed",
        lambda b: b.build({"report_to": "azure_ml"}),
        ("the package azureml is not installed", "or set report_to='none'"),
        kind=ImportError,
    ),
    Mistake(
        "Reported to a tracker that fails while logging",
        offline,
        (r"Offline could not log \(ConnectionError: no route to host\)", "The run continues without it"),
        TRAINING,
        UserWarning,
    ),
    Mistake(
        "Named a data set for completions that cannot be created",
        lambda b: b.build({"log_completions_hub_repo": "a/b/c"}),
        ("log_completions_hub_repo='a/b/c' cannot be created or written to", "Give the id of a data set"),
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
