"""Mistakes with datasets and reward functions."""

import asyncio
import math
import re
import time

from datasets import Dataset, DatasetDict
from transformers import LlamaForSequenceClassification

from covey import isolated
from covey.core.findings import CheckWarning
from covey.rewards import CharEnd, RewardError, RewardWarning, TurnEnd, get_regex_reward, per_completion, resolve_reward
from tests.support import runs, tiny
from tests.support.mistakes.cases import CONFIG, CONSTRUCTION, TRAINING, Mistake, checked

SEVEN = tiny.rows(7)
CHAT = [{"role": "user", "content": "2+2="}]
ROW = "must be a string or a non-empty list of messages with 'role' and 'content'"


class Always:
    def __call__(self, completions, **kwargs):
        return [1.0] * len(completions)


def ends_by(token):
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"eos_token": token})
    return tokenizer


def prompts(*values):
    return [{"prompt": value, "answer": "4"} for value in values]


def stream():
    """The rows, to be read forward only."""
    return Dataset.from_list(tiny.rows()).to_iterable_dataset()


def data(what, dataset, code, *says, **settings):
    """A mistake in the training dataset; a function makes one from the bench."""
    make = lambda b: b.build(settings, train_dataset=dataset() if callable(dataset) else dataset)  # noqa: E731
    return checked(what, make, code, *says)


TWO = {"a": tiny.rows(8), "b": tiny.rows(8)}
GATE = {"max_truncated": 2}


def weighs(weight):
    return {"weight": weight}


def sourced(what, code, *says, rows=TWO, settings=None, reward_funcs=runs.longer, **sources):
    """A mistake in the settings of two sources; a function makes their rows."""
    given = {"reward_funcs": reward_funcs, "sources": sources or None}
    make = lambda b: b.build(settings, train_dataset=rows() if callable(rows) else rows, **given)  # noqa: E731
    return checked(what, make, code, *says)


NOT_A_PROMPT = [
    None,
    3,
    [],
    ["2+2="],
    CHAT[0],
    [{"role": "user"}],
    [{"content": "2+2="}],
    [{"role": "user", "content": 4}],
    [*CHAT, {"content": "and"}],
    [{"from": "human", "value": "2+2="}],
]

DATASETS = [
    data("Gave an empty dataset", [], "dataset-empty", "`train_dataset`", "'prompt'"),
    checked(
        "Gave no dataset at all",
        lambda b: b.build(train_dataset=None),
        "dataset-missing",
        "`train_dataset` nor `eval_dataset`",
    ),
    Mistake(
        "Called train() on a trainer without a training dataset",
        lambda b: b.train(train_dataset=None, eval_dataset=tiny.rows()),
        ("`train_dataset`",),
        when=TRAINING,
    ),
    Mistake(
        "Called evaluate() on a trainer without an evaluation dataset",
        lambda b: b.build().evaluate(),
        ("`eval_dataset`",),
        when=TRAINING,
    ),
    data("Gave a file name instead of a dataset", "questions.jsonl", "dataset-type", "'questions.jsonl'"),
    data("Gave something that is no dataset", 5, "dataset-type", " int", "load_dataset"),
    data(
        "Gave all splits instead of one, or a dictionary of columns",
        lambda: DatasetDict(train=Dataset.from_list(tiny.rows()), test=Dataset.from_list(tiny.rows())),
        "dataset-type",
        "'train', 'test'",
        r"`dataset\['train'\]`",
    ),
    data(
        "Gave all splits instead of one, or a dictionary of columns",
        {"prompt": ["2+2="]},
        "dataset-type",
        "'prompt'",
        r"datasets\.Dataset\.from_dict",
    ),
    data(
        "Gave a pandas data frame",
        lambda: Dataset.from_list(tiny.rows()).to_pandas(),
        "dataset-type",
        r"datasets\.Dataset\.from_pandas\(frame\)",
    ),
    data(
        "Gave a generator or another iterator",
        lambda: (row for row in tiny.rows()),
        "dataset-type",
        "generator",
        r"datasets\.IterableDataset\.from_generator",
    ),
    data("Gave a list of strings", ["2+2="] * 8, "row-type", "row 0 ", "str: '2"),
    data(
        "Named the prompt column otherwise",
        [{"prompts": "2+2="}] * 8,
        "column-prompt",
        r"\['prompts'\]",
        r"rename_column\('prompts', 'prompt'\)",
    ),
    data(
        "Named the prompt column otherwise",
        Dataset.from_list([{"question": "2+2=", "answer": "4"}] * 8),
        "column-prompt",
        r"\['answer', 'question'\]",
        r"rename_column\('question', 'prompt'\)",
    ),
    data("Gave a dataset without anything like a prompt", [{"a": 1}] * 8, "column-prompt", r"\['a'\]"),
    data(
        "Named a column like an argument of reward functions",
        [{**row, "completions": ""} for row in tiny.rows()],
        "column-reserved",
        "'completions'",
        "completions_ids, log_extra, log_metric, prompts, thinking_openings, trainer_state",
    ),
    checked(
        "Gave a column `tools` that holds no schemas, or that no prompt shows",
        lambda b: b.build(train_dataset=[{**row, "tools": ["look"]} for row in tiny.rows()]),
        "template",
        "row 0 of `train_dataset`",
        "`tools`",
        kind=CheckWarning,
    ),
    checked(
        "Gave rows that do not fill a rollout batch, in an order that is kept, for one epoch",
        lambda b: b.build(
            {"max_steps": -1, "num_train_epochs": 1, "shuffle_dataset": False}, train_dataset=tiny.rows(7)
        ),
        "dataset-remainder",
        " 1 of 7 rows",
        " 2 prompts",
        kind=CheckWarning,
    ),
    *(
        data(
            "Gave prompts that are neither text nor messages",
            prompts(*[prompt] * 8),
            "prompt-type",
            "row 0 of `train_dataset`",
            f"got {re.escape(repr(prompt))}",
        )
        for prompt in NOT_A_PROMPT
    ),
    data(
        "Gave prompts that are neither text nor messages",
        Dataset.from_list(prompts(*["2+2="] * 40, None)),
        "prompt-type",
        "row 40 of `train_dataset`",
        "None",
    ),
    data("Gave an empty prompt", prompts("2+2=", "") * 4, "prompt-empty", "row 1 of `train_dataset`"),
    data(
        "Mixed conversations and plain strings",
        [*Dataset.from_list([{"prompt": "2+2="}] * 40).to_list(), {"prompt": CHAT}],
        "prompt-mixture",
        r"row 40\).*\(row 0\)",
    ),
    data(
        "Gave a prompt that fills the model's context",
        prompts(*["2+2="] * 40, "+" * 256),
        "prompt-round-trip",
        "row 40 of `train_dataset`: .* 256 tokens .* 256:",
    ),
    data(
        "Wrote chat_template_kwargs of a row as text",
        [{"prompt": CHAT, "chat_template_kwargs": "enable_thinking"}] * 8,
        "row-type",
        "row 0 .*`chat_template_kwargs` .* str: 'enable_thinking'",
    ),
    data(
        "Gave fewer prompts than one rollout batch draws",
        prompts("2+2="),
        "dataset-small",
        r" 1 prompt\(s\) .* 2 ",
        "generation_batch_size=8 / num_generations=4",
    ),
    data("Gave an iterable dataset without max_steps", stream, "stream-endless", "max_steps=-1", max_steps=-1),
    sourced("Named settings of a source that is not there", "source-name", "'c'", "'a', 'b'", c={"weight": 2}),
    sourced("Gave settings of sources, and one dataset", "source-name", "'a'", rows=tiny.rows(), a={"weight": 2}),
    sourced("Gave a source a setting that it cannot have", "source-setting", "temperature=0.6", a={"temperature": 0.6}),
    sourced(
        "Gave a source a setting that it cannot have",
        "source-setting",
        "num_generations=8",
        "the run's 4",
        a={"num_generations": 8},
    ),
    sourced("Gave a source a setting that it cannot have", "source-setting", "'waight'", "weight", a={"waight": 2}),
    sourced(
        "Gave a source a setting that it cannot have", "source-setting", "99", "6", a={"max_completion_length": 99}
    ),
    sourced("Gave a source a setting that it cannot have", "source-setting", "loss_weight=2", a={"loss_weight": 2}),
    sourced("Gave a source a setting that it cannot have", "source-setting", "environment='x'", a={"environment": "x"}),
    sourced("Gave a source a setting that it cannot have", "source-setting", "teacher='x'", a={"teacher": "x"}),
    sourced("Gave a source a setting that it cannot have", "setting-word", "'easy'", a={"sampler": "easy"}),
    sourced("Gave a source a setting that it cannot have", "setting-range", "max_truncated=2", a={"gates": GATE}),
    sourced(
        "Gave a source a setting that it cannot have",
        "source-setting",
        "average='own'",
        "bnpo",
        a={"average": "own"},
        settings={"loss_type": "bnpo"},
    ),
    sourced(
        "Gave sources weights that leave no prompt, or none that can be read", "source-weights", "-1", a=weighs(-1)
    ),
    sourced(
        "Gave sources weights that leave no prompt, or none that can be read",
        "source-weights",
        "nan",
        a=weighs(math.nan),
    ),
    sourced(
        "Gave sources weights that leave no prompt, or none that can be read",
        "source-weights",
        "a, b",
        a=weighs(0),
        b=weighs(0),
    ),
    sourced(
        "Gave sources weights that leave no prompt, or none that can be read",
        "source-weights",
        "rise",
        a=weighs([[5, 1], [5, 2]]),
    ),
    sourced(
        "Gave a source fewer rows than a rollout batch draws of it",
        "source-small",
        "'a' has 1 row",
        "draws up to 2",
        rows={"a": tiny.rows(1), "b": tiny.rows(8)},
        a=weighs(9),
        b=weighs(1),
    ),
    checked(
        "Gave one of several sources a weight",
        lambda b: b.build(train_dataset=TWO, sources={"b": weighs(2)}),
        "source-scales",
        "'b' has weight=2",
        "'a' has none",
        kind=CheckWarning,
    ),
    checked(
        "Gave a source so small a weight that it seldom comes",
        lambda b: b.build(train_dataset=TWO, sources={"a": weighs(0.01), "b": weighs(1)}),
        "source-rare",
        "'a'",
        "1.0%",
        kind=CheckWarning,
    ),
    sourced(
        "Gave a run with sources a column `source` of another meaning",
        "source-column",
        "row 0 of source 'a'",
        "'web'",
        rows={"a": [{**row, "source": "web"} for row in tiny.rows()], "b": tiny.rows()},
    ),
    sourced("Gave a source no reward", "source-reward", "'b'", a={"reward_funcs": runs.longer}, reward_funcs=None),
    sourced(
        "Gave a source without a length",
        "stream-lookup",
        "'a'",
        "IterableDataset",
        rows=lambda: {"a": stream(), "b": tiny.rows()},
    ),
    sourced(
        "Gave a source its settings together with its rows",
        "dataset-type",
        "'a'",
        "sources=",
        rows={"a": {"data": tiny.rows(), "weight": 2}, "b": tiny.rows()},
    ),
    sourced(
        "Gave a source its settings together with its rows", "dataset-type", "None", rows={"a": tiny.rows(), "b": None}
    ),
    checked(
        "Ordered prompts by a column that some rows have not",
        lambda b: b.build({"prompt_sampler": {"order": "level"}}),
        "column-order",
        "'level'",
        "row 0",
    ),
    checked(
        "Chose a sampler or a gate that there is not",
        lambda b: b.config(prompt_sampler="difficult"),
        "setting-word",
        "'difficult'",
        "'difficulty'",
        when=CONFIG,
    ),
    checked(
        "Chose a sampler or a gate that there is not",
        lambda b: b.config(gates={"signals": True}),
        "setting-word",
        "signals",
        "'signal'",
        when=CONFIG,
    ),
    data(
        'Used dynamic_sample or prompt_sampler="difficulty" with a dataset that can only be read forward',
        stream,
        "stream-lookup",
        "dynamic_sample=True",
        r"`train_dataset` \(IterableDataset\)",
        dynamic_sample=True,
    ),
    checked(
        "Set an option that has no effect",
        lambda b: b.build({"dataloader_num_workers": 2}, train_dataset=stream()),
        "setting-unread",
        "`dataloader_num_workers=2`",
        kind=CheckWarning,
    ),
    checked(
        "Set an option that has no effect",
        lambda b: b.build({"save_strategy": "epoch", "max_steps": 1}, train_dataset=stream()),
        "stream-epochs",
        "`save_strategy='epoch'`",
        "save_strategy='steps'",
        kind=CheckWarning,
    ),
    checked(
        "Set an option that has no effect",
        lambda b: b.build({"chat_template_kwargs": {"enable_thinkin": False}}, train_dataset=[{"prompt": CHAT}] * 8),
        "setting-unread",
        "`chat_template_kwargs` .*'enable_thinkin'",
        kind=CheckWarning,
    ),
    checked(
        "Set an option that has no effect",
        lambda b: b.build({"optim": "sgd", "optim_args": "momentun=0.9"}),
        "setting-unread",
        "`optim_args` .*'momentun=0.9'",
        kind=CheckWarning,
    ),
    checked(
        "Made the same mistake in the evaluation dataset",
        lambda b: b.build(eval_dataset={"easy": tiny.rows(), "hard": []}),
        "dataset-empty",
        "`eval_dataset`",
    ),
    checked(
        "Chose an evaluation batch size that num_generations does not divide",
        lambda b: b.build({"per_device_eval_batch_size": 3, "eval_strategy": "steps"}, eval_dataset=tiny.rows()),
        "batch-groups",
        " 3 completions",
        "num_generations_eval=4",
        "per_device_eval_batch_size: 4",
    ),
    checked(
        "Allowed completions longer than the model's context",
        lambda b: b.build({"max_completion_length": 300}),
        "context-length",
        "max_completion_length=300 .* 256 ",
        kind=CheckWarning,
    ),
]


def solves(completions, solution):
    return [float(text == right) for text, right in zip(completions, solution, strict=True)]


def one_too_few(completions, **kwargs):
    return [0.0] * (len(completions) - 1)


def one_number(completions, **kwargs):
    return 1.0


def nothing(completions, **kwargs):
    pass


def words(completions, **kwargs):
    return ["good"] * len(completions)


def infinite(completions, **kwargs):
    return [math.inf] * len(completions)


def from_a_script(bench):
    """Names the reward function of a training script without a main guard."""
    code = "def f(completions, **kwargs):\n    return [1.0] * len(completions)\n\ntrain(f)\n"
    (bench.path / "training_script.py").write_text(code)
    return resolve_reward(f"{bench.path}/training_script.py:f")


def not_a_number(completions, **kwargs):
    return [math.nan] + [1.0] * (len(completions) - 1)


def broken(completions, **kwargs):
    raise KeyError("answer")


async def broken_server(completions, **kwargs):
    raise OSError("connection refused")


class Judge:
    """Scores with a method."""

    def score(self, completions, **kwargs):
        return [1.0] * len(completions)


def abstaining(completions, **kwargs):
    return [None] * len(completions)


def steps_without_ends(completions, **kwargs):
    return [[1.0, 0.0] for _ in completions]


def steps_named_in_words(completions, **kwargs):
    return [[("first", 1.0)] for _ in completions]


def step_after_the_last_token(completion_ids, **kwargs):
    return [[(len(ids), 1.0)] for ids in completion_ids]


def step_after_the_last_character(completions, **kwargs):
    return [[(CharEnd(len(text) + 1), 1.0)] for text in completions]


def second_turn_of_one(completions, **kwargs):
    return [[(TurnEnd(1), 1.0)] for _ in completions]


def first_token(completion_ids, **kwargs):
    return [[(0, float(ids[0] % 2))] for ids in completion_ids]


def hanging(completions, **kwargs):
    time.sleep(30)


async def hanging_server(completions, **kwargs):
    await asyncio.sleep(30)


class Fragile:
    """Raises on the first sample of the first batch it sees, whether alone or with others."""

    __name__ = "fragile"
    bad = None

    def __call__(self, completion_ids, **kwargs):
        self.bad = self.bad or completion_ids[0]
        if self.bad in completion_ids:
            raise RuntimeError("cannot parse")
        return [float(len(ids)) for ids in completion_ids]


def by_position(completions, /):
    return [0.0] * len(completions)


def reward(what, function, *says, kind=RewardError, when=TRAINING, **settings):
    return Mistake(what, lambda b: b.train(settings, reward_funcs=function), says, when, kind)


def early(what, function, code, *says, **settings):
    return checked(what, lambda b: b.build(settings, reward_funcs=function), code, *says)


def three_labels(bench):
    return LlamaForSequenceClassification(tiny.config(num_labels=3))


SHOWN = r"(First|That) sample:\n  prompt: .*\n  completion: "

REWARDS = [
    checked("Gave no reward function", lambda b: b.build(reward_funcs=None), "reward-missing", "`reward_funcs`"),
    early("Gave an empty list of reward functions", [], "reward-missing", "reward_funcs"),
    Mistake(
        "Looked for the end-of-sequence token in completions",
        lambda b: b.build(
            reward_funcs=get_regex_reward(r"4<\|eos\|>"),
            processing_class=ends_by("<|eos|>"),
            model=tiny.model(vocab_size=105),
        ),
        (r"'<\|eos\|>'", "`completion_ids`"),
        kind=UserWarning,
    ),
    checked(
        "Named a column `self`, and gave an object or a method as reward function",
        lambda b: b.build(reward_funcs=Always(), train_dataset=[{**row, "self": 1} for row in tiny.rows()]),
        "data-columns",
        "'self'",
        "'Always'",
    ),
    early("Gave a reward that cannot be called", [None], "reward-type", r"None \(NoneType\)"),
    early("Gave a reward that cannot be called", [0.5], "reward-type", r"0\.5 \(float\)"),
    early(
        "Isolated a reward function that no other process can import",
        isolated(lambda completions, **kwargs: [1.0] * len(completions)),
        "reward-isolation",
        "lambda",
        "reward_isolation='thread'",
    ),
    reward(
        "Wrote a reward function with positional-only arguments",
        by_position,
        "'by_position' takes 'completions'",
        when=CONSTRUCTION,
    ),
    checked(
        "Wrote a reward function that asks for a column the dataset does not have",
        lambda b: b.build(reward_funcs=solves),
        "data-columns",
        "'solves' .* 'solution'",
        " answer, completion_ids",
    ),
    early(
        "Gave more or fewer weights than reward functions",
        [runs.longer],
        "reward-weights",
        "2 reward weights for 1",
        reward_weights=[1.0, 2.0],
    ),
    checked(
        "Gave more or fewer tokenizers than reward functions",
        lambda b: b.build(reward_processing_classes=[None, None]),
        "reward-model",
        "2 reward processing classes for 1",
    ),
    early(
        "Gave a reward model that does not exist",
        "./no/such/model",
        "reward-model",
        r"'\./no/such/model'",
    ),
    checked(
        "Gave a reward model with several labels",
        lambda b: b.build(reward_funcs=three_labels(b), reward_processing_classes=tiny.tokenizer()),
        "reward-model",
        "num_labels=3",
        "num_labels=1",
    ),
    checked(
        "Gave the folder of a reward model with several labels",
        lambda b: b.build(reward_funcs=b.save("judge", three_labels(b), tiny.tokenizer())),
        "reward-model",
        "'.*judge'",
        "num_labels=1",
    ),
    Mistake(
        "Gave a language model as a reward model", lambda b: b.build(reward_funcs=b.folder), ("'.*'",), kind=UserWarning
    ),
    reward("Returned another number of rewards than completions", one_too_few, "'one_too_few'", "7 rewards for 8"),
    reward("Returned one number, or nothing, instead of a list", one_number, "'one_number'", r"1\.0"),
    reward("Returned one number, or nothing, instead of a list", nothing, "'nothing'", "`return`"),
    reward("Returned text as rewards", words, "'good'"),
    reward("Returned infinite rewards", infinite, "inf"),
    reward(
        "Returned a list for a completion that is none of steps",
        steps_without_ends,
        "'steps_without_ends'",
        r"1\.0",
        r"0\.0",
        "CharEnd",
        "TurnEnd",
    ),
    reward("Returned a list for a completion that is none of steps", steps_named_in_words, "'first'", r"1\.0"),
    reward("Ended a step where the completion has no end", step_after_the_last_token, "CharEnd"),
    reward("Ended a step where the completion has no end", step_after_the_last_character, "CharEnd"),
    reward("Ended a step where the completion has no end", second_turn_of_one, "TurnEnd"),
    reward(
        "Rewarded steps with a loss that credits whole completions",
        first_token,
        "loss_type='gmpo'",
        "importance_sampling_level='sequence_token'",
        "'token'",
        kind=ValueError,
        importance_sampling_level="sequence",
    ),
    reward("Wrote a reward function that always raises", broken, "KeyError", "'answer'"),
    reward("Wrote a reward function that always raises", broken_server, "'broken_server'"),
    Mistake(
        "Wrote a reward function that raises on some samples",
        lambda b: b.train(reward_funcs=Fragile()),
        ("'fragile'", "RuntimeError"),
        when=TRAINING,
        kind=RewardWarning,
    ),
    Mistake(
        "Named a function of a script that trains at its top level",
        from_a_script,
        ("'__main__'",),
        when=CONFIG,
        kind=UserWarning,
    ),
    reward("Returned NaN for some samples", not_a_number, "'not_a_number'", "NaN", kind=RewardWarning),
    reward(
        "Wrote reward functions that all abstain",
        abstaining,
        "no reward function scored 8 of 8 samples; their advantage is 0",
        kind=RewardWarning,
    ),
    Mistake(
        "Marked a method of an object per_completion",
        lambda b: b.build(reward_funcs=per_completion(Judge().score)),
        ("per_completion",),
        when=CONFIG,
        kind=RewardError,
    ),
    checked(
        "Asked for stream_rewards with reward models alone",
        lambda b: b.build(
            {"stream_rewards": True},
            reward_funcs=LlamaForSequenceClassification(tiny.config(num_labels=1)),
            reward_processing_classes=tiny.tokenizer(),
        ),
        "setting-unread",
        "`stream_rewards=True`",
        kind=CheckWarning,
    ),
    *(
        reward(
            "Wrote a reward function that hangs",
            [function, runs.longer],
            f"'{function.__name__}'",
            "0.1",
            kind=RewardWarning,
            reward_timeout=0.1,
        )
        for function in (hanging, hanging_server)
    ),
]
