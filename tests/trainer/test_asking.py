"""A trainer at the prompt of Python: completions of its model, the line that shows it, and its warnings."""

import math
import sys
import warnings

import pytest
import torch

from tests.support import forking, runs, tiny
from tests.support.launching import environment


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    one = runs.trainer(tmp_path_factory.mktemp("asked"), max_steps=1)
    one.train()
    return one


def test_completions_are_those_of_the_trained_model(trained):
    """Greedy: each token is the one that the model finds most probable after those before."""
    text = trained.generate("2+2=", temperature=0.0, max_tokens=4)
    tokenizer = tiny.tokenizer()
    ids = trained.collector.codec.read("2+2=").ids
    prompt = len(ids)
    for _ in range(4):
        with torch.no_grad():
            ids = [*ids, int(trained.model(torch.tensor([ids])).logits[0, -1].argmax())]
        if ids[-1] == tokenizer.eos_token_id:
            break
    assert text == tokenizer.decode(ids[prompt:], skip_special_tokens=True)


def test_completions_come_in_the_shape_of_the_prompts(trained):
    one = trained.generate([{"role": "user", "content": "hi"}])
    many = trained.generate(["a", "b"], num_generations=3)
    assert isinstance(one, str) and [len(group) for group in many] == [3, 3]
    assert len(trained.generate("a", num_generations=2)) == 2


def test_prompts_of_text_become_messages_as_in_training(tmp_path):
    one = runs.trainer(tmp_path, prompts_as_messages=True)
    text, message = "hi", [{"role": "user", "content": "hi"}]
    assert one.generate(text, temperature=0.0) == one.generate(message, temperature=0.0)
    assert one.generate([text, text], seed=1) == one.generate([message, message], seed=1)


def test_a_seed_gives_the_same_completions_and_training_is_as_it_was(trained):
    state, weights, mode = torch.get_rng_state(), runs.weights(trained), trained.model.training
    again = [trained.generate(["a", "b"], seed=3) for _ in range(2)]
    assert again[0] == again[1] and trained.model.training is mode
    assert torch.equal(torch.get_rng_state(), state) and all(map(torch.equal, runs.weights(trained), weights))


@pytest.mark.parametrize(
    "wrong",
    [
        *({"max_length": 3}, {"temperature": -1.0}, {"temperature": math.nan}, {"temperature": "warm"}, {"top_p": 0.0}),
        *({"top_k": -1}, {"top_k": 1.5}, {"min_p": 2.0}, {"repetition_penalty": 0.0}, {"max_tokens": 0}),
        *({"num_generations": 0}, {"num_generations": 1.5}, {"num_generations": True}),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_sampled_with_is_refused(trained, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        trained.generate("a", **wrong)


@pytest.mark.parametrize("prompts", [None, [], "", 7, {"role": "user", "content": "hi"}], ids=str)
def test_what_is_no_prompt_is_refused(trained, prompts):
    with pytest.raises(ValueError, match="generate"):
        trained.generate(prompts)


def test_a_trainer_shows_its_model_rewards_and_progress(trained):
    shown = repr(trained)
    assert shown.startswith("GRPOTrainer(") and "longer" in shown and "step 1 of 1" in shown


def test_metrics_of_an_evaluation_are_a_table_in_notebooks(tmp_path):
    asked = runs.trainer(tmp_path, parts={"eval_dataset": tiny.rows()[:4]})
    metrics = asked.evaluate()
    assert isinstance(metrics, dict) and f"<td>{metrics['eval_reward']:.4g}</td>" in metrics._repr_html_()


WARNS = """
import warnings
from covey.runtime.quiet import show_own_warnings_plainly
show_own_warnings_plainly()
for name, text in (("covey.somewhere", "its own"), ("another", "of another")):
    exec(f"import warnings; warnings.warn({text!r})", {"__name__": name})
"""


@pytest.mark.slow
def test_own_warnings_are_shown_without_code_and_those_of_others_as_they_are():
    lines = forking.run([sys.executable, "-c", WARNS], env=environment(), timeout=120).stderr.splitlines()
    assert lines[0] == "covey: warning: its own"
    assert "UserWarning: of another" in lines[1]


@pytest.mark.slow
def test_what_an_earlier_run_has_left_is_one_warning(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    runs.trainer(tmp_path, **saving).train()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs.trainer(tmp_path, **saving).train()
    found = [str(one.message) for one in caught if "earlier run" in str(one.message)]
    assert len(found) == 1 and all(word in found[0] for word in ("checkpoint-1", "record"))
