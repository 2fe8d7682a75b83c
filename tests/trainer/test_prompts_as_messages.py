"""Prompts of text and the chat template: they are messages if the config says so, and a run says if they skip it."""

import warnings

import pytest

from covey import EvalSuite, GRPOConfig, GRPOTrainer
from covey.core.findings import CheckWarning
from tests.support import tiny

ROWS = [{"prompt": "one plus one", "answer": "2"}, {"prompt": "two plus two", "answer": "4"}]


def seen(prompts, completions, **kwargs):
    return [float(isinstance(prompt, list)) for prompt in prompts]


def make(tmp_path, rows=ROWS, model=None, **settings):
    sizes = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 2, "max_steps": 1}
    args = GRPOConfig(output_dir=str(tmp_path), report_to="none", save_strategy="no", use_cpu=True, **sizes, **settings)
    suite = {"held": EvalSuite(rows, temperature=0)}
    return GRPOTrainer(
        model or tiny.model(), reward_funcs=seen, args=args, train_dataset=rows, eval_dataset=suite,
        processing_class=tiny.tokenizer(),
    )  # fmt: skip


def warned(tmp_path, **given):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(tmp_path, **given)
    found = [one.message.finding.code for one in caught if isinstance(one.message, CheckWarning)]
    return found.count("prompt-text")


def test_text_becomes_a_message_for_the_model_and_for_rewards(tmp_path):
    trainer = make(tmp_path, prompts_as_messages=True)
    assert trainer.train_dataset[0] == {"prompt": [{"role": "user", "content": "one plus one"}], "answer": "2"}
    trainer.train()
    assert trainer.state.log_history[0]["reward"] == 1.0
    assert trainer.evaluate()["eval_held_reward"] == 1.0
    given = trainer.evaluate(ROWS)  # also a dataset that comes later
    assert next(value for name, value in given.items() if name.endswith("_reward")) == 1.0


def test_text_stays_text_unless_asked(tmp_path):
    assert make(tmp_path).train_dataset[0]["prompt"] == "one plus one"


@pytest.mark.parametrize(
    ("settings", "count"), [({}, 1), ({"prompts_as_messages": False}, 0), ({"prompts_as_messages": True}, 0)]
)
def test_a_run_says_once_that_text_skips_the_template(tmp_path, settings, count):
    assert warned(tmp_path, **settings) == count


def test_text_that_a_template_wrote_is_no_plain_text(tmp_path):
    written = [{**row, "prompt": f"{row['prompt']}{tiny.tokenizer().eos_token}"} for row in ROWS]
    assert warned(tmp_path, rows=written) == 0


def test_messages_skip_nothing(tmp_path):
    chats = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    assert warned(tmp_path, rows=chats) == 0
