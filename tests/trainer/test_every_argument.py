"""Every argument of the trainers and of the classes that users make changes something, or it is said that it does not.

As in `tests/config/test_every_option.py`: names are those of the code, and each has a case. A case is what differs from
the usual arguments, with further ones in which it acts; what it may change is what is made, or what is computed.
"""

import dataclasses
import inspect
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig, LlamaForSequenceClassification, TrainerCallback

import covey.rewards
from covey import EvalSuite, GRPOTrainer, Rollout, isolated
from covey.core.engine import SamplingParams
from covey.core.records import FinishReason
from covey.engines.scripted import ScriptedEngine
from covey.rewards import LLMJudge, RewardSuite
from covey.rewards.resolve import BUILT_IN
from covey.rollout.agents import AgentProgram, RemoteAgents
from covey.rollout.environments import GymEnvironment, OpenEnvironment
from covey.rollout.environments.verifiers import VerifiersEnvironment
from covey.trainer.evaluation.suites import Graded, estimates
from covey_tools.study.plan import Halving
from covey_tools.study.study import Study
from tests.support import runs, tiny
from tests.support.outcomes import built, differences, outcome, parts, said

ROOT = Path(__file__).parents[2]
TWO = {"train_dataset": {"a": tiny.rows(8), "b": tiny.rows(16)[8:]}}
MESSAGES = {"train_dataset": tiny.rows(conversational=True)}


def label(value: Any) -> str:
    return getattr(value, "__name__", None) or re.sub(" at 0x[0-9a-f]+", "", str(value))


def arguments(function: Any) -> set[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name for name, one in inspect.signature(function).parameters.items() if one.kind not in kinds} - {"self"}


def lookup(query: str) -> str:
    """Look it up.

    Args:
        query: What to look for.
    """
    return query


async def play(row: Any, engine: Any) -> Rollout:
    return Rollout([1], [5, 6], [True, True], None, "ab", FinishReason.STOP)


async def program(row: Any, base_url: str, api_key: str) -> float:
    return 1.0


class Echo:
    def reset(self, **row: Any) -> str:
        return "go"

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        return "on", 1.0, True, {}


def judge() -> Any:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(tiny.config(num_labels=1))


def with_template(text: str) -> Any:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template += text
    return tokenizer


class Quiet(TrainerCallback):
    pass


# ---- trainers --------------------------------------------------------------------------------------------------------

PARTS: dict[str, dict[str, Any]] = {  # of a trainer, which are held by what it is made of
    "eval_dataset": {"eval_dataset": tiny.rows(2)},
    "callbacks": {"callbacks": [Quiet()]},
    "peft_config": {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])},
    "quantization_config": {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)},
    "tools": {"tools": [lookup], **MESSAGES},
    "rollout_func": {"rollout_func": play},
    "environment_factory": {"environment_factory": Echo, **MESSAGES},
    "engine": {"engine": ScriptedEngine(lambda *given: [5, 6])},
    "optimizer_cls_and_kwargs": {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})},
    "agent": {"agent": program},
    "seats": {"seats": {"other": "frozen"}, "rollout_func": play},
    "eval_seats": {"eval_seats": {"other": "frozen"}, "rollout_func": play},
    "model_init": {"model": None, "model_init": lambda: tiny.model(seed=1)},
    "reward_funcs": {"reward_funcs": runs.digits},
    "reward_processing_classes": {"reward_processing_classes": tiny.tokenizer()},  # of a function: pointed out
}
OUTCOMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # usual and other parts of a run
    "model": ({}, {"model": tiny.model(seed=1)}),
    "train_dataset": ({}, {"train_dataset": tiny.rows()[::-1]}),
    "processing_class": (MESSAGES, {**MESSAGES, "processing_class": with_template("{{ 'so' }}")}),
    "sources": (TWO, {**TWO, "sources": {"a": {"weight": 0}}}),
}
ELSEWHERE = {
    "args": "tests/config/test_every_option.py",
    "optimizers": "tests/trainer/test_unread.py::test_settings_of_an_optimizer_that_is_given",
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.filterwarnings("ignore:the prompts are text")
def test_an_argument_of_a_trainer_changes_a_part_of_it_or_says_that_it_does_not(name, tmp_path):
    usual = [built(tmp_path), built(tmp_path)]
    made, named = said(name, lambda: built(tmp_path, given=PARTS[name]))
    assert named or differences(usual[0], made) - differences(*usual)


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTCOMES)
@pytest.mark.filterwarnings("ignore")
def test_an_argument_of_a_trainer_changes_the_outcome_of_a_run(name, tmp_path):
    usual, other = (outcome(tmp_path / str(number), given=given) for number, given in enumerate(OUTCOMES[name]))
    assert usual["weights"] != other["weights"] or usual["prompts"] != other["prompts"]


@pytest.mark.filterwarnings("ignore")
def test_the_tokenizer_of_a_reward_model_changes_its_rewards():
    """A tokenizer that joins texts by another template gives the model other tokens."""
    rollout = Rollout([1], [5], [True], None, [{"role": "assistant", "content": "a"}], FinishReason.STOP)
    row = {"prompt": [{"role": "user", "content": "b"}]}
    suites = [RewardSuite(judge(), processing_classes=with_template(text)) for text in ("", "{{ 'so' }}")]
    context = covey.rewards.RewardContext(None, lambda *given: None, lambda *given: None)
    first, second = (suite([row], [rollout], context).rewards for suite in suites)
    assert not torch.equal(first, second)


def test_each_argument_of_a_trainer_has_a_case():
    assert arguments(GRPOTrainer.__init__) == {*PARTS, *OUTCOMES, *ELSEWHERE}


# ---- callbacks -------------------------------------------------------------------------------------------------------

EVENTS = sorted(name for name in dir(TrainerCallback) if name.startswith("on_"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_each_event_of_a_callback_is_called(tmp_path, monkeypatch):
    called: set[str] = set()
    methods = {name: lambda self, *args, _name=name, **kwargs: called.add(_name) for name in EVENTS}
    settings = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    given = {"callbacks": [type("All", (TrainerCallback,), methods)()], "eval_dataset": tiny.rows(2)}
    trained = runs.trainer(tmp_path, parts=given, per_device_eval_batch_size=4, **settings)
    trained.train()
    trained.predict(tiny.rows(2))
    assert called == {*EVENTS} - {"on_push_begin"}  # of the hub


# ---- evaluation suites -----------------------------------------------------------------------------------------------

SUITES: dict[str, list[dict[str, Any]]] = {  # values alone, and with what they need
    "num_generations": [{"num_generations": 2}],
    "temperature": [{"temperature": 0.5}],
    "top_p": [{"top_p": 0.5}, {"top_p": 0.5, "temperature": 0}],
    "top_k": [{"top_k": 3}, {"top_k": 3, "temperature": 0}],
    "min_p": [{"min_p": 0.1}, {"min_p": 0.1, "temperature": 0}],
    "repetition_penalty": [{"repetition_penalty": 1.5}, {"repetition_penalty": 1.5, "temperature": 0}],
    "max_completion_length": [{"max_completion_length": 3}],
    "pass_at": [{"pass_at": 1}],
    "maj_at": [{"maj_at": 1, "answer": str}],
    "success_reward": [{"success_reward": "longer"}, {"success_reward": "longer", "pass_at": 1}],
    "success_threshold": [{"success_threshold": 0.5}, {"success_threshold": 0.5, "pass_at": 1}],
    "answer": [{"answer": str}, {"answer": str, "maj_at": 1}],
    "dataset": [{"dataset": tiny.rows(3)}],
}


def of_suite(suite: EvalSuite) -> Any:
    """All that an evaluation asks of a suite."""
    algebra = runs.config("x").algebra(1)
    graded = [Graded(0, reward, reward >= 0.5, str(reward)) for reward in (0.0, 0.7, 1.0, 1.0)]
    judged = suite.grader(RewardSuite([runs.digits, runs.longer]))
    return (
        len(suite.dataset),
        suite.batches(algebra),
        suite.sampling(SamplingParams(8)),
        (judged.reward, judged.threshold, judged.answer),
        estimates(suite, 4, graded),
    )


@pytest.mark.parametrize(
    ("name", "settings"), [(name, one) for name, many in SUITES.items() for one in many], ids=label
)
def test_a_setting_of_a_suite_changes_an_evaluation_or_says_that_it_does_not(name, settings):
    needed = {"success_reward": "digits"} if {"pass_at", "maj_at"} & set(settings) else {}
    usual = {"dataset": tiny.rows(2), **needed, **{key: value for key, value in settings.items() if key != name}}
    if name == "answer" and "maj_at" in settings:
        usual["answer"] = repr
    with warnings.catch_warnings(action="ignore"):
        before = of_suite(EvalSuite(**usual))
    made, named = said(name, lambda: of_suite(EvalSuite(**{**usual, **settings})))
    assert named or made != before


def test_each_setting_of_a_suite_has_a_case():
    assert {one.name for one in dataclasses.fields(EvalSuite)} == {*SUITES}


# ---- agents and environments -----------------------------------------------------------------------------------------


class Once:
    """An environment as gymnasium has them."""

    action_space = type("Text", (), {})()

    def reset(self, **given: Any) -> Any:
        return "seen", {}

    def step(self, action: Any) -> Any:
        return f"did {action}", 1.0, True, False, {}


class Twice(Once):
    def step(self, action: Any) -> Any:
        return f"did {action}", 2.0, True, False, {}


class Client:
    """A client as OpenEnv has them."""

    def reset(self, **given: Any) -> Any:
        return SimpleNamespace(observation={"text": "seen", "more": 1})

    def step(self, action: Any) -> Any:
        return SimpleNamespace(observation=f"did {action}", reward=1.0, done=True)


class OtherClient(Client):
    def step(self, action: Any) -> Any:
        return SimpleNamespace(observation=f"did {action}", reward=2.0, done=True)


def no_action(text: Any) -> Any:
    raise ValueError("that is none")


def episode(factory: Any) -> Any:
    """What a factory of environments gives: rows, observations, rewards, and what a run reads of it."""
    environment = factory()
    read = [getattr(factory, name, None) for name in ("max_turns", "turn_rewards", "max_environments")]
    return factory.dataset(1), environment.reset(), environment.step("left"), read


MADE: dict[Any, dict[str, list[dict[str, Any]]]] = {
    AgentProgram: {
        "agent": [{"agent": ["cat"]}, {"agent": program}],
        "directory": [{"directory": str(ROOT)}, {"directory": "/nowhere"}, {"agent": program, "directory": str(ROOT)}],
        "environment": [{"environment": {"A": "1"}}, {"environment": ["NO_SUCH_VARIABLE"]}],
        "memory": [{"memory": 1.0}, {"agent": program, "memory": 1.0}],
        "processes": [{"processes": 3}, {"agent": program, "processes": 3}],
        "seats": [{"seats": {"other": "frozen"}}],
    },
    RemoteAgents: {
        "port": [{"port": 2}],
        "host": [{"host": "127.0.0.2"}],
        "key": [{"key": "y" * 16}],
        "seats": [{"seats": {"other": "frozen"}}],
    },
    GymEnvironment: {
        "make": [{"make": Twice}],
        "actions": [{"actions": {"left": 7}}],
        "parse": [{"parse": str.upper}],
        "show": [{"show": lambda observation, environment: "shown"}],
        "instructions": [{"instructions": "Say left."}],
        "system": [{"system": "You play."}],
        "invalid_reward": [{"invalid_reward": -1.0, "parse": no_action}],
        "turn_rewards": [{"turn_rewards": True}],
        "max_turns": [{"max_turns": 3}],
    },
    OpenEnvironment: {
        "client": [{"client": OtherClient}],
        "action": [{"action": "other"}],
        "show": [{"show": lambda observation: "shown"}],
        "instructions": [{"instructions": "Say left."}],
        "system": [{"system": "You play."}],
        "invalid_reward": [{"invalid_reward": -1.0, "action": no_action}],
        "turn_rewards": [{"turn_rewards": True}],
        "max_turns": [{"max_turns": 3}],
        "max_environments": [{"max_environments": 3}],
    },
}
USUAL: dict[Any, dict[str, Any]] = {
    AgentProgram: {"agent": "echo x"},
    RemoteAgents: {"port": 1, "key": "x" * 16},
    GymEnvironment: {"make": Once},
    OpenEnvironment: {"client": Client, "action": "move"},
}


def of_factory(kind: Any, given: dict[str, Any]) -> Any:
    made = kind(**given)
    return episode(made) if kind in (GymEnvironment, OpenEnvironment) else str(parts(vars(made)))


@pytest.mark.parametrize(
    ("kind", "name", "settings"),
    [(kind, name, one) for kind, names in MADE.items() for name, many in names.items() for one in many],
    ids=label,
)
def test_a_setting_of_a_factory_changes_what_it_makes_or_says_that_it_does_not(kind, name, settings):
    usual = USUAL[kind] | {key: value for key, value in settings.items() if key != name}
    made, named = said(name, lambda: of_factory(kind, {**usual, **settings}))
    with warnings.catch_warnings(action="ignore"):
        before = of_factory(kind, usual)
    assert named or made != before


@pytest.mark.parametrize("kind", MADE)
def test_each_setting_of_a_factory_has_a_case(kind):
    assert arguments(kind.__init__) == {*MADE[kind]}


# ---- built-in rewards ------------------------------------------------------------------------------------------------

SAID = {
    "completions": ["Paris ", '```json\n{"a": 1}\n```', "the answer is \\boxed{4}", "\\boxed{5}"],
    "completion_ids": [[1, 2, 1, 2, 1, 2], [1, 2, 3], [1, 1, 1, 1], [4, 5]],
    "answer": ["paris", "1.05", "4.1", "5"],
    "solution": ["7", "7", "4", "4"],
}
FACTORIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # usual arguments, and other values of each
    "get_json_reward": ({}, {"required_keys": ["b"], "allow_fence": False}),
    "get_regex_reward": (
        {"pattern": "paris "},
        {"pattern": "box", "flags": 2, "match": "fullmatch", "name": "other"},
    ),
    "get_soft_overlong_punishment": (
        {"max_completion_len": 5, "soft_punish_cache": 2},
        {"max_completion_len": 6, "soft_punish_cache": 4},
    ),
    "get_cosine_scaled_reward": (
        {"max_len": 8},
        {
            "max_len": 5,
            "min_value_wrong": -2.0,
            "max_value_wrong": -0.1,
            "min_value_correct": 0.1,
            "max_value_correct": 2.0,
        },
    ),
    "get_repetition_penalty_reward": ({}, {"ngram_size": 1, "max_penalty": -0.5}),
    "get_exact_match_reward": ({"ignore_case": True}, {"ignore_case": False, "ignore_whitespace": False}),
    "get_numeric_match_reward": ({}, {"relative_tolerance": 0.1}),
}


def scored(name: str, given: dict[str, Any]) -> Any:
    reward = BUILT_IN[name](**given)
    return reward(**SAID), reward.__name__


@pytest.mark.parametrize(
    ("name", "argument"), [(name, one) for name, (_, others) in FACTORIES.items() for one in others]
)
def test_an_argument_of_a_factory_of_rewards_changes_rewards(name, argument):
    pytest.importorskip("math_verify")
    usual, others = FACTORIES[name]
    if argument == "match":
        usual = {"pattern": "Paris"}  # which is followed by a space
    assert scored(name, {**usual, argument: others[argument]}) != scored(name, usual)


def test_each_argument_of_each_factory_of_rewards_has_a_case():
    assert {name for name in BUILT_IN if name.startswith("get_")} == {*FACTORIES}
    for name, (_, others) in FACTORIES.items():
        assert arguments(BUILT_IN[name]) == {*others}


# ---- classes whose settings have tests of their own ------------------------------------------------------------------

JUDGE, STUDY, ISOLATED = "rewards/test_judge.py", "covey_tools/study/test_study.py", "runtime/test_isolation.py"
SHOWN: dict[Any, dict[str, str]] = {
    LLMJudge: {
        **dict.fromkeys(("url", "request"), f"{JUDGE}::test_a_run_file_names_it_with_its_settings"),
        **dict.fromkeys(
            ("rubric", "columns", "model"), f"{JUDGE}::test_the_judge_sees_rubric_prompt_columns_and_completion"
        ),
        "api_key_env": f"{JUDGE}::test_the_key_is_sent_and_nowhere_else",
        "rank": f"{JUDGE}::test_ranking_asks_once_per_group_in_any_order",
        "seed": f"{JUDGE}::test_the_order_shown_depends_on_the_seed",
        "scale": f"{JUDGE}::test_replies_become_rewards_or_none",
        "cache": f"{JUDGE}::test_scores_on_record_are_not_paid_for_again",
        **dict.fromkeys(("max_calls", "max_tokens"), f"{JUDGE}::test_a_spent_budget_is_no_reward_and_no_failure"),
        "concurrency": f"{JUDGE}::test_requests_at_a_time_are_limited",
        "deadline": f"{JUDGE}::test_an_answer_that_hangs_ends_at_the_deadline",
        "retries": f"{JUDGE}::test_a_busy_endpoint_is_asked_again",
        "name": f"{JUDGE}::test_a_failure_is_counted_and_shown_with_its_cause",
    },
    Study: {
        **dict.fromkeys(
            ("model", "variants", "args", "train_dataset", "processing_class", "reward_funcs"),
            f"{STUDY}::test_variants_are_their_solo_runs",
        ),
        **dict.fromkeys(("eval_dataset", "eval_steps"), f"{STUDY}::test_rows_to_compare_on_are_asked_for"),
        "save_rounds": f"{STUDY}::test_a_killed_study_resumes_bit_exactly",
        "halving": "covey_tools/study/test_comparison.py::test_halving_acts_at_the_step_of_an_evaluation",
        "parts": f"{STUDY}::test_variants_are_their_solo_runs",
    },
    Halving: dict.fromkeys(
        ("keep", "certain"), "covey_tools/study/test_comparison.py::test_halving_stops_those_that_are_really_worse"
    ),
    isolated: {
        "function": f"{ISOLATED}::",
        **dict.fromkeys(("memory", "processes", "start"), f"{ISOLATED}::"),
    },
    VerifiersEnvironment: dict.fromkeys(
        ("taskset", "options", "environment", "harness", "max_turns"), "real_environments/test_real_environments.py::"
    ),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_each_setting_of_these_is_named_in_a_test_that_is_there(kind):
    assert arguments(kind.__init__ if inspect.isclass(kind) else kind) == {*SHOWN[kind]}
    for place in SHOWN[kind].values():
        path, _, test = place.partition("::")
        source = (ROOT / "tests" / path).read_text()
        assert f"def {test}(" in source if test else source
